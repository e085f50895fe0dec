"""Sizes as text and back, and reports as dictionaries and back."""

import copy
import json
from dataclasses import fields
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastcap.report import FORMAT, NodeRow, Report, format_size, parse_size

SAVED = json.loads((Path(__file__).parent / "golden" / "oversized.json").read_text())


@pytest.mark.parametrize(
    ("size", "text", "exact"),
    [
        (0, "0 B", "0 B"),
        (1023, "1,023 B", "1,023 B"),
        (1024, "1.0 KiB", "1.0 KiB (1,024 B)"),
        (10**7, "9.5 MiB", "9.5 MiB (10,000,000 B)"),
        (838_860_800, "800.0 MiB", "800.0 MiB (838,860,800 B)"),
        (1024**2 - 1, "1.0 MiB", "1.0 MiB (1,048,575 B)"),
        (2**63 - 1, "8.0 EiB", "8.0 EiB (9,223,372,036,854,775,807 B)"),
        (-2048, "-2.0 KiB", "-2.0 KiB (-2,048 B)"),
    ],
)
def test_format_size(size, text, exact):
    assert format_size(size) == text
    assert format_size(size, exact=True) == exact


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("512", 512),
        ("512 B", 512),
        ("1 byte", 1),
        ("1e6", 10**6),
        ("1E+6 B", 10**6),
        ("512k", 512 * 1024),
        ("512K", 512 * 1024),
        ("512KB", 512_000),
        ("10MiB", 10 * 1024**2),
        ("10 MB", 10**7),
        (" 1.5g ", 3 * 1024**3 // 2),
        (".5Ki", 512),
        ("0.1 KB", 100),
        ("1eib", 1024**6),
        ("838,860,800 B", 838_860_800),
    ],
)
def test_parse_size(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text",
    ["", "MiB", "-1", "+1", "1e", "1e-3", "nan", "inf", "0x10", "1 2", "1,00", "10 mibs", "10q", "٣", "1.2.3", "1_000",
     "1e99", "9" * 40, "9223372036854775808", "9EB9", "1k" * 10**6],
)  # fmt: skip
def test_parse_size_refuses_in_one_short_line(text):
    with pytest.raises(ValueError, match="write 10MiB") as error:
        parse_size(text)
    assert len(str(error.value)) < 200
    assert "\n" not in str(error.value)


@given(st.integers(0, 2**63 - 1))
def test_parse_size_reads_what_format_size_writes(size):
    assert parse_size(f"{size:,} B") == size
    assert parse_size(format_size(size).replace("8.0 EiB", "7.99999999 EiB")) == pytest.approx(size, rel=0.05)


def test_dict_round_trip():
    report = Report.from_dict(SAVED)
    assert report.to_dict() == SAVED
    assert json.loads(json.dumps(report.to_dict())) == SAVED
    assert report.find("train_func<closure self>.data").self_size == 838_860_860
    assert report.find("train_func<closure self>.nope") is None


def test_dict_keeps_totals():
    report = Report.from_dict(SAVED)
    assert sum(row.self_size for row in report.nodes) + report.overhead == report.payload_size
    assert sum(row.size for row in report.types) + report.overhead == report.payload_size
    assert report.stream_size + report.buffer_size == report.payload_size


def test_json_has_the_documented_fields():
    sizes = {"payload_size", "stream_size", "buffer_size", "overhead", "protocol", "node_count"}
    documented = sizes | {"format", "target", "nodes", "captures", "types", "limits", "findings"}
    row = {"path", "parent", "depth", "type", "what", "self_size", "subtree_size", "retained_size", "shared_by"}
    data = Report.from_dict(SAVED).to_dict()
    assert documented <= data.keys()
    assert data["format"] == FORMAT
    assert all(row <= node.keys() for node in data["nodes"])
    assert all({"path", "type", "what", "file", "line", "retained_size"} <= each.keys() for each in data["captures"])
    assert all({"code", "severity", "path", "size", "message", "replacement"} <= f.keys() for f in data["findings"])


def damaged(change):
    data = copy.deepcopy(SAVED)
    change(data)
    return data


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "it is a list"),
        (None, "it is a NoneType"),
        ({}, "its 'format' is None"),
        (damaged(lambda d: d.update(format=2)), "its 'format' is 2"),
        (damaged(lambda d: d.pop("nodes")), "'nodes' is missing"),
        (damaged(lambda d: d.pop("payload_size")), "payload_size"),
        (damaged(lambda d: d.update(payload_size="1")), "'payload_size' is not of type int"),
        (damaged(lambda d: d.update(payload_size=-1)), "'payload_size' is not of type int"),
        (damaged(lambda d: d.update(payload_size=2**64)), "'payload_size' is not of type int"),
        (damaged(lambda d: d.update(payload_size=True)), "'payload_size' is not of type int"),
        (damaged(lambda d: d.update(notes="x")), "'notes' is not of type"),
        (damaged(lambda d: d.update(make_details=1)), "unknown field 'make_details'"),
        (damaged(lambda d: d.update(nodes={})), "nodes is no list"),
        (damaged(lambda d: d["nodes"].append(3)), r"nodes\[8\] is no dict"),
        (damaged(lambda d: d["nodes"][1].pop("path")), "path"),
        (damaged(lambda d: d["nodes"][1].update(colour="red")), "unknown field 'colour'"),
        (damaged(lambda d: d["nodes"][1].update(shared_by=[1])), "'shared_by' is not of type"),
        (damaged(lambda d: d["nodes"][1].update(depth=10**9)), r"nodes\[1\] is not below its parent"),
        (damaged(lambda d: d["nodes"][1].update(parent=None)), r"nodes\[1\] is not below its parent"),
        (damaged(lambda d: d["nodes"][1].update(parent=7)), r"nodes\[1\] is not below its parent"),
        (damaged(lambda d: d["nodes"][0].update(depth=1)), r"nodes\[0\] is not below its parent"),
        (damaged(lambda d: d["captures"][0].update(line="23")), "'line' is not of type"),
        (damaged(lambda d: d["limits"][0].update(ratio="8")), "'ratio' is not of type float"),
    ],
)
def test_from_dict_refuses(data, message):
    with pytest.raises(ValueError, match=message):
        Report.from_dict(data)


def test_every_field_type_can_be_checked():
    """A field of a new type needs a row in the table of checks, or from_dict refuses what to_dict wrote."""
    saved = SAVED["nodes"][0]
    assert {each.name for each in fields(NodeRow)} == set(saved)


def test_details_are_made_once_and_late():
    calls = []
    source = Report.from_dict(SAVED)

    def make_details():
        calls.append(1)
        return source.details

    head = {name: value for name, value in source.to_dict().items() if name in {each.name for each in fields(Report)}}
    report = Report(**head, make_details=make_details)
    assert not calls
    assert report.nodes is source.nodes
    assert report.captures is source.captures
    assert len(calls) == 1
