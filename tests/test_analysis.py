"""Reports: totals close whatever is left out, what matters comes first, and every path leads back to its row."""

import dataclasses
import json
import os
import pickle
import random
import subprocess
import sys

import cloudpickle
import corpus
import numpy as np
import pytest

import fastcap
from fastcap.analysis import MAX_ROWS, analyze, scan
from fastcap.errors import PayloadError
from fastcap.paths import parse
from fastcap.report import Report, ViewOptions

BLOB = bytes(100_000)
VIEWS = [
    ViewOptions(),
    ViewOptions(min_size=1, top=300),
    ViewOptions(depth=1),
    ViewOptions(depth=0),
    ViewOptions(top=1, min_size=1),
    ViewOptions(top=0),
    ViewOptions(sort="self", min_size=1, top=50),
    ViewOptions(sort="subtree", min_size=50),
]


def check(report):
    """The invariants of every report."""
    assert sum(row.self_size for row in report.nodes) + report.overhead == report.payload_size
    assert sum(row.size for row in report.types) + report.overhead == report.payload_size
    assert report.payload_size == report.stream_size + report.buffer_size
    root = report.nodes[0]
    assert (root.parent, root.depth, root.path) == (None, 0, report.target)
    assert root.retained_size == root.subtree_size == report.payload_size - report.overhead
    for number, row in enumerate(report.nodes):
        assert 0 <= row.self_size <= row.retained_size <= row.subtree_size
        assert row.count > 0
        if number:
            parent = report.nodes[row.parent]
            assert row.parent < number
            assert parent.depth == row.depth - 1
            assert row.path == parent.path + (row.label if row.type != "more" else "<more>")
        if row.type == "more":
            assert row.label == f"[{row.count:,} more]"
    sizes = [capture.retained_size for capture in report.captures]
    assert sizes == sorted(sizes, reverse=True)
    assert report.captures


def payloads_of(kind):
    return list(corpus.payloads((2, 5), [kind]))


def scan_payload(payload, options):
    sizes = [memoryview(buffer).nbytes for buffer in payload.buffers or ()]
    return scan(payload.stream, buffers=sizes, options=options)


def test_invariants_over_the_corpus(kind):
    for payload in payloads_of(kind):
        for options in VIEWS:
            report = scan_payload(payload, options)
            check(report)
            assert Report.from_dict(json.loads(json.dumps(report.to_dict()))).to_dict() == report.to_dict()


def test_every_path_leads_to_its_row(kind):
    for payload in payloads_of(kind):
        report = scan_payload(payload, ViewOptions(min_size=1, top=100))
        paths = [row.path for row in report.nodes]
        assert len(set(paths)) == len(paths)
        for row in report.nodes[:60]:
            assert str(parse(row.path)) == row.path
            if row.type != "more":
                found = report.find(row.path)
                assert found is not None
                assert (found.path, found.self_size, found.what) == (row.path, row.self_size, row.what)
        for capture in report.captures:
            assert report.find(capture.path).retained_size == capture.retained_size


@pytest.mark.parametrize("protocol", [3, 5])
def test_live_object_and_its_pickle_give_the_same_report(kind, protocol):
    if not kind.deterministic or protocol < kind.protocol or kind.settles:
        pytest.skip("two dumps differ")
    obj = kind.make()
    if kind.name.startswith("text_file"):
        pytest.skip("reading the file moves it")
    live, read = analyze(obj, protocol=protocol), scan(cloudpickle.dumps(obj, protocol))
    if live.payload_size == read.payload_size:  # dumps of a dynamic class differ in their tracker ids
        assert [row.path for row in live.nodes] == [row.path for row in read.nodes]
    check(live)


def test_find_knows_what_is_not_shown():
    report = scan(pickle.dumps({"big": BLOB, "small": {"deep": ["x" * 10, (1, b"y")]}}))
    assert "obj['small']['deep'][1]" not in {row.path for row in report.nodes}
    assert report.find("obj['small']['deep'][1]").type == "tuple"
    assert report.find("obj['small']['deep'][1][1]").what == "b'y'"
    assert report.find("obj['nothing']") is None
    assert report.find("other['big']") is None
    with pytest.raises(ValueError, match="not a path"):
        report.find("obj[")


def test_root_name():
    def work():
        return BLOB

    class Thing:
        pass

    assert analyze(work).target == "work"
    assert analyze(Thing).target == "Thing"
    assert analyze(Thing()).target == "obj"
    assert analyze(work, name="mine").target == "mine"
    assert analyze([1], name="my script.py").target == "'my script.py'"
    assert analyze(lambda: 0).target == "<lambda>"
    assert analyze([1], name="x" * 10_000).find(analyze([1], name="x" * 10_000).target).type == "list"


def test_sharing_is_charged_once():
    shared = np.ones(10_000)
    report = analyze({"a": {"data": shared}, "b": [shared, shared.copy()]})
    assert {c.path: c.shared_by for c in report.captures} == {
        "obj['a']['data']": ("obj['b'][0]",),
        "obj['b'][1]": (),
    }
    assert report.find("obj['a']").retained_size < 100 < 80_000 < report.find("obj['a']").subtree_size
    assert {"obj['a']", "obj['a']['data']"} <= {row.path for row in report.nodes}


def make_dataclass(*, slots):
    data = Owner(big=BLOB)

    class Settings:
        x: object = data

    Settings.__annotations__ = {"x": object}
    return dataclasses.dataclass(slots=slots)(Settings)


@pytest.mark.parametrize("slots", [False, True])
def test_the_fields_of_a_dataclass_are_not_the_way_to_an_attribute(slots):
    cls = make_dataclass(slots=slots)
    capture = analyze(cls()).captures[0]
    assert (capture.path, capture.how) == ("obj.x.big", None)
    assert "obj.__class__.__dataclass_fields__['x'].default.big" in capture.shared_by
    report = analyze(cls)
    capture = report.captures[0]
    expected = "Settings.__init__<default x>.big" if slots else "Settings.x.big"
    assert (capture.path, report.find(expected).retained_size) == (expected, capture.retained_size)
    found = (capture.how, capture.name, capture.captured, capture.by)
    if slots:
        assert found == ("default", "x", "Settings.__init__<default x>", "Settings.__init__")
    else:
        assert found == ("class attribute", "x", "Settings.x", "Settings")


class Owner:
    def __init__(self, **attributes):
        vars(self).update(attributes)

    def first(self):
        return self

    def second(self):
        return self


def shared_owner():
    owner = Owner(big=BLOB)
    return {"handlers": [owner.first, owner.second], "last": (owner,)}


def shared_by_functions():
    inner = {"deep": [BLOB]}
    return [lambda: inner, lambda: [inner, inner]]


def containing_itself():
    loop = {"big": BLOB}
    loop["again"] = loop
    return {"loop": loop, "other": [loop]}


def with_many_back_references():
    owner = Owner(parts=[Owner() for _ in range(500)], big=BLOB)
    for part in owner.parts:
        part.owner = owner
    return {"first": owner, "second": owner}


def repeated():
    item = [bytes(50_000)]
    return {"a": [item] * 3, "b": {"c": item}}


HELD = {
    "one parent, several times": (lambda: {"a": [BLOB] * 3}, "obj['a'][0]", ["obj['a'][1]", "obj['a'][2]"]),
    "one parent, by two steps": (
        lambda: {"x": Owner(a=BLOB, b=BLOB), "y": BLOB},
        "obj['x'].a", ["obj['x'].b", "obj['y']"],
    ),
    "the owner of bound methods": (
        shared_owner, "obj['handlers'][0]<self>.big", ["obj['handlers'][1]<self>.big", "obj['last'][0].big"],
    ),
    "a cell's content": (shared_by_functions, "obj[0]<closure inner>['deep'][0]", ["obj[1]<closure inner>['deep'][0]"]),
    "an object that holds itself": (containing_itself, "obj['loop']['big']", ["obj['other'][0]['big']"]),
    "an object that its parts refer to": (with_many_back_references, "obj['first'].big", ["obj['second'].big"]),
    "what lies in an item": (repeated, "obj['a'][0][0]", ["obj['a'][1][0]", "obj['a'][2][0]", "obj['b']['c'][0]"]),
    "a key": (lambda: (lambda key: {key: 1, "same": key})("k" * 100_000), "obj<key 0>", ["obj['same']"]),
    "more than are told": (lambda: [{"k": BLOB}] * 100, "obj[0]['k']", [f"obj[{n}]['k']" for n in range(1, 11)]),
}  # fmt: skip


@pytest.mark.parametrize("name", HELD)
def test_everyone_who_holds_a_capture_is_told(name):
    make, path, holders = HELD[name]
    report = scan(cloudpickle.dumps(make()))
    capture = report.captures[0]
    assert (capture.path, sorted(capture.shared_by)) == (path, sorted(holders))
    for holder in holders:
        assert report.find(holder).retained_size == capture.retained_size


CULPRITS = {
    "one attribute": (lambda: {"x": 1, "y": {"z": BLOB}}, ["obj['y']['z']"]),
    "two of the same order": (lambda: {"a": BLOB, "b": bytes(70_000)}, ["obj['a']", "obj['b']"]),
    "spread over many": (lambda: {"rows": [str(i) * 100 for i in range(1000)], "n": 1}, ["obj['rows']"]),
    "own bytes": (lambda: {"hist": list(range(100_000))}, ["obj['hist']"]),
    "a key": (lambda: {"n": 1, "k" * 200_000: [2], bytes(100_000): 3}, ["obj<key 1>", "obj<key 2>"]),
    "an attribute's name": (lambda: Owner(**{"k" * 200_000: 1}), ["obj<key 0>"]),
    "the root": (lambda: [str(i) * 100 for i in range(1000)], ["obj"]),
    "nested deeper than anyone reads": (lambda: {"links": chain(400)}, ["obj['links']"]),
    "atoms and a part": (lambda: [list(range(50_000)), BLOB], ["obj[0]", "obj[1]"]),
}


def chain(length):
    link = None
    for _ in range(length):
        link = {"data": bytes(500), "next": link}
    return link


@pytest.mark.parametrize("name", CULPRITS)
def test_captures_name_the_culprit(name):
    make, paths = CULPRITS[name]
    report = scan(pickle.dumps(make()))
    assert [capture.path for capture in report.captures] == paths


def test_taking_a_part_out_saves_what_it_retains():
    parts = {"own": [BLOB], "shared": [str(i) for i in range(1000)], "user": None, "code": np.ones(5000)}
    parts["user"] = {"of": parts["shared"], "also": list(range(3000))}
    whole = scan(pickle.dumps(parts))
    for key in parts:
        rest = {name: value for name, value in parts.items() if name != key}
        if key == "shared":  # leaves only if nobody holds it any more
            rest["user"] = {"also": parts["user"]["also"]}
        saved = whole.payload_size - len(pickle.dumps(rest))
        assert abs(saved - whole.find(f"obj[{key!r}]").retained_size) < 60, key


def test_rows_are_limited_and_sorted():
    obj = [{"k": bytes(i * 10)} for i in range(2000)]
    report = scan(pickle.dumps(obj))
    assert len(report.nodes) <= 2 * MAX_ROWS
    report = scan(pickle.dumps(obj), options=ViewOptions(top=5, min_size=1))
    children = [row for row in report.nodes if row.parent == 0]
    assert [row.label for row in children] == ["[1999]", "[1998]", "[1997]", "[1996]", "[1995]", "[3,991 more]"]
    report = scan(pickle.dumps(obj), options=ViewOptions(top=2000, min_size=1))
    assert [row.label for row in report.nodes if row.parent == 0][:-1] == [f"[{i}]" for i in reversed(range(2000))]
    assert max(row.depth for row in scan(pickle.dumps(obj), options=ViewOptions(depth=1)).nodes) == 1


def test_sort_by_self_size():
    obj = {"own": list(range(2000)), "below": ["x" * 50_000], "small": [1]}
    report = scan(pickle.dumps(obj), options=ViewOptions(sort="self", min_size=1))
    assert [row.label for row in report.nodes if row.parent == 0][:1] == ["['own']"]
    report = scan(pickle.dumps(obj), options=ViewOptions(sort="retained", min_size=1))
    assert [row.label for row in report.nodes if row.parent == 0][:2] == ["['below']", "['own']"]


def test_types_close_and_name_what_people_know():
    class Thing:
        def __init__(self):
            self.data = np.ones(1000)

    report = analyze([Thing(), Thing(), "text"])
    types = {row.type: row for row in report.types}
    assert types["ndarray"].count == 2
    assert types["ndarray"].size > 16_000
    assert types["Thing"].count == 2
    assert report.types[0].type == "ndarray"


def test_very_many_kinds_of_call():
    stream = b"(" + b"".join(b"cmod\nname%d\n)R" % i for i in range(3000)) + b"l."
    report = scan(stream)
    assert "other" in {row.type for row in report.types}
    check(report)


def test_analyze_raises_for_its_arguments_only():
    with pytest.raises(ValueError, match="flavor"):
        analyze([1], flavor="marshal")
    with pytest.raises(ValueError, match="protocol"):
        analyze([1], protocol=99)


def test_sizes_cost_no_words(monkeypatch):
    monkeypatch.setattr("fastcap.explain._subject", lambda *_: pytest.fail("described without being asked"))
    report = analyze({"a": BLOB})
    assert report.payload_size > 100_000


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_analysis_reads_no_page_of_a_big_array():
    code = (
        "import re, numpy as np; from fastcap.analysis import analyze;"
        "big = np.zeros(1 << 30);"
        "report = analyze(lambda: big, name='f');"
        "assert report.captures[0].path == 'f<global big>', report.captures;"
        "assert report.payload_size > 8 << 30;"
        "print(re.search(r'VmHWM:\\s+(\\d+) kB', open('/proc/self/status').read())[1])"
    )
    root = os.path.dirname(os.path.dirname(fastcap.__file__))
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60,
                          env=dict(os.environ, PYTHONPATH=root))
    assert int(done.stdout) < 300 * 1024


def mutate(stream, source):
    """A stream with a few bytes changed, dropped or repeated."""
    data = bytearray(stream)
    for _ in range(source.choice([1, 1, 2, 4])):
        at, what = source.randrange(len(data)), source.random()
        if what < 0.5:
            data[at] = source.randrange(256)
        elif what < 0.7 and len(data) > 8:
            del data[at : at + source.randrange(1, 6)]
        elif what < 0.9:
            other = source.randrange(len(data))
            data[at:at] = data[other : other + source.randrange(1, 40)]
        else:
            data[at] = source.choice(b"()}]tRbNaeus0012hq\x85\x86\x87\x81\x94\x92\x93\x90\x91")
    return bytes(data)


def test_broken_streams_give_a_report_or_an_error(corpus_payloads, long_run):
    source = random.Random(7)
    streams = [payload for payload in corpus_payloads if 0 < len(payload.stream) < 5000]
    reports = 0
    for _ in range(100_000 if long_run else 1500):
        payload = source.choice(streams)
        sizes = [memoryview(buffer).nbytes for buffer in payload.buffers or ()]
        try:
            report = scan(mutate(payload.stream, source), buffers=sizes, options=ViewOptions(min_size=1))
        except PayloadError:
            continue
        except ValueError:
            assert sizes  # more buffers are given than the broken stream uses
            continue
        reports += 1
        check(report)
        for row in report.nodes[:10]:
            assert row.type == "more" or report.find(row.path) is not None
    assert reports > 100
