"""Text and folded stacks: golden files, widths, hostile strings, totals."""

import copy
import json
import random
import re
import subprocess
import sys
import unicodedata
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from fastcap.render import clean
from fastcap.render.folded import render_folded
from fastcap.render.text import GLYPHS, render_text
from fastcap.report import Report

GOLDEN = Path(__file__).parent / "golden"
SAVED = json.loads((GOLDEN / "oversized.json").read_text())
HOSTILE = [
    "\x1b[31mred\x1b[0m\x1b]0;title\x07",
    "two\nlines\r\n\ttab\x0b\x0c\x85\u2028\u2029",
    "\u202egnp.exe\u2066\u2069\u200f\u061c",
    "lone \ud800 surrogate \udfff",
    "[bold red]markup[/bold red] [link=http://x]y[/link] :smile:",
    "k" * 10_000_000,
    "\x00\x01\x7f\x9b1m\xad\ufeff\u200b\U000e0041",
    "e" + "\u0301" * 50,
    "日本語" * 200,
    "a;b;c 123\n d;e 5",
    "",
    " ",
    "{name} %s {0}",
]


def saved_report(change=None):
    data = copy.deepcopy(SAVED)
    if change:
        change(data)
    return Report.from_dict(data)


def hostile_report(text):
    def change(data):
        data.update(target=text, type=text, what=text, notes=[text])
        for row in data["nodes"]:
            row.update(path=text, label=text, what=text, shared_by=[text] * 5)
            if row["type"] != "more":
                row["type"] = text
        for row in data["captures"]:
            row.update(path=text, what=text, type=text, shared_by=[text], how="closure", name=text, by=text, file=text)
            row.update(captured=text, captured_type=text)
        for row in data["types"]:
            row["type"] = text
        for row in data["limits"]:
            row.update(name=text, source=text)
        for row in data["findings"]:
            row.update(path=text, message=text, code=text, severity=text, replacement=text)

    return saved_report(change)


@pytest.mark.parametrize("width", [40, 80, 200])
def test_golden_text(width):
    assert render_text(saved_report(), width=width) == (GOLDEN / f"oversized-{width}.txt").read_text()


def test_golden_ascii():
    assert render_text(saved_report(), width=80, unicode=False) == (GOLDEN / "oversized-ascii.txt").read_text()


def test_golden_folded():
    assert render_folded(saved_report()) == (GOLDEN / "oversized.folded").read_text()


def test_verdict_comes_first():
    first, second = render_text(saved_report(), width=200).splitlines()[:2]
    assert first == "train_func  function examples/oversized_tune.py:23"
    assert second.startswith(
        "payload 800.0 MiB (838,862,110 B): over Ray's export limit (95.4 MiB) 8.4 times, over gRPC"
    )


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (500, "below every known limit (the first: Ray's warning size, 9.5 MiB)"),
        (20_000_000, "over Ray's warning size (9.5 MiB) 2.0 times"),
        (101_000_000, "over Ray's export limit (95.4 MiB) by 1.0 %"),
        (100_000_001, "just over Ray's export limit (95.4 MiB)"),
        (10_000_000, "exactly at Ray's warning size (9.5 MiB)"),
    ],
)
def test_verdict_follows_the_limits(size, expected):
    def change(data):
        data["payload_size"] = size
        for limit in data["limits"]:
            limit.update(ratio=size / limit["size"], exceeded=size > limit["size"])

    assert render_text(saved_report(change), width=200).splitlines()[1].endswith(f": {expected}")


def test_verdict_without_limits():
    text = render_text(saved_report(lambda data: data.update(limits=[])), width=80)
    assert text.splitlines()[1] == "payload 800.0 MiB (838,862,110 B)"


def test_color_only_when_asked_for(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")  # deciding is the caller's business
    plain = render_text(saved_report(), width=80)
    colored = render_text(saved_report(), width=80, color=True)
    assert "\x1b" not in plain
    assert "\x1b[1;31m" in colored
    assert re.sub(r"\x1b\[[0-9;]*m", "", colored) == plain


@pytest.mark.parametrize("width", [1, 40, 63, 64, 80, 99, 100, 200])
@pytest.mark.parametrize("unicode", [True, False])
@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_strings_in_text(text, width, unicode):
    lines = render_text(hostile_report(text), width=width, unicode=unicode).split("\n")
    assert all(cell_len(line) <= max(width, 40) for line in lines)
    assert all(line.isprintable() for line in lines)
    assert unicode or "".join(lines).isascii()
    assert len(lines) < 600


def test_markup_is_shown_as_it_is():
    assert "[bold red]markup[/bold red]" in render_text(hostile_report(HOSTILE[4]), width=200, color=True)


@given(st.text())
def test_any_text_becomes_one_harmless_line(text):
    cleaned = clean(text, 50)
    assert cleaned.isprintable()
    assert len(cleaned) <= 50
    assert clean(cleaned, 500) == cleaned
    assert clean(text, 50, ascii_only=True).isascii()


def test_clean_keeps_writing():
    for text in ["naïve", "日本語", "עברית", "ที่นี่", "e\u0301", "👍", "x['a b']"]:
        assert clean(text) == text


def test_clean_shortens_in_the_middle():
    cleaned = clean("head" + "x" * 10**6 + "tail", 40)
    assert len(cleaned) == 40
    assert cleaned.startswith("head")
    assert cleaned.endswith("tail")


def random_tree(seed, count):
    """A report of ``count`` nodes in random shape with random sizes."""
    rng = random.Random(seed)

    def change(data):
        nodes = [data["nodes"][0]]
        for number in range(1, count):
            # Preorder: the parent is the previous row or one of its ancestors.
            parent = number - 1
            while parent and rng.random() < 0.4:
                parent = nodes[parent]["parent"]
            label = f"[{number}]"
            above = nodes[parent]
            place = {"parent": parent, "depth": above["depth"] + 1, "path": above["path"] + label, "label": label}
            nodes.append({**data["nodes"][2], **place, "self_size": rng.randrange(1000)})
        data["nodes"] = nodes
        data["payload_size"] = sum(node["self_size"] for node in nodes) + data["overhead"]

    return saved_report(change)


@pytest.mark.parametrize("seed", range(20))
def test_tree_lines_lead_to_the_right_parent(seed):
    report = random_tree(seed, 30)
    text = render_text(report, width=400)
    lines = text[text.index("Tree\n") :].splitlines()[2 : 2 + len(report.nodes)]
    column = lines[0].index("train_func")
    above = {}
    for row, line in zip(report.nodes, lines):
        position = column + 2 * row.depth
        assert line[position:].startswith(row.label)
        if row.depth:
            mark = line[position - 2]
            follows = any(other.parent == row.parent for other in report.nodes[report.nodes.index(row) + 1 :])
            assert mark == ("├" if follows else "└")
            for depth in range(1, row.depth):
                assert line[column + 2 * depth - 2] == (" " if above[depth] == "└" else "│")
            above[row.depth] = mark


@pytest.mark.parametrize("seed", range(20))
def test_folded_sums_to_the_payload(seed):
    report = random_tree(seed, 200)
    lines = [re.fullmatch(r"(.*) (\d+)", line) for line in render_folded(report).splitlines()]
    assert all(lines)
    assert sum(int(line[2]) for line in lines) == report.payload_size
    depths = {len(line[1].split(";")) - 1 for line in lines}
    assert max(depths) == max(row.depth for row in report.nodes if row.self_size)


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_strings_in_folded(text):
    report = hostile_report(text)
    lines = [re.fullmatch(r"(.*) (\d+)", line) for line in render_folded(report).split("\n")[:-1]]
    assert sum(int(line[2]) for line in lines) == report.payload_size
    levels = {len(line[1].split(";")) for line in lines}
    assert levels <= {1, 2, 3, 4}


def deep_chain(count):
    def change(data):
        root = data["nodes"][0]
        data["nodes"] = [
            {**root, "parent": depth - 1 if depth else None, "depth": depth, "label": f"[{depth}]", "self_size": 1}
            for depth in range(count)
        ]
        data.update(payload_size=count, overhead=0)

    return saved_report(change)


def test_deep_trees_stay_readable_and_linear():
    report = deep_chain(20_000)
    text = render_text(report, width=80)
    assert all(cell_len(line) <= 80 for line in text.splitlines())
    assert "[19999]" in text
    folded = render_folded(report)
    assert len(folded) < 20_000 * 40 * 10
    assert sum(int(line.rpartition(" ")[2]) for line in folded.splitlines()) == 20_000
    assert "[deeper]" in folded


def test_many_types_are_summed_up():
    def change(data):
        data["types"] = [{"type": f"type{number}", "count": 2, "size": 100 - number} for number in range(50)]

    text = render_text(saved_report(change), width=80)
    assert "[39 more types]" in text
    assert f"{sum(100 - number for number in range(11, 50)):,} B" in text.replace("2.7 KiB", "2,730 B")


def test_files_are_shown_relative_to_a_base():
    def change(data):
        data["captures"][0]["file"] = "/home/me/project/train.py"
        data["what"] = "function /home/me/project/train.py:23"

    text = render_text(saved_report(change), width=120, base="/home/me/project")
    assert "/home/me" not in text
    assert "captured as `self` at train.py:23" in text
    assert "captured as `self` at /home/me/project/train.py:23" in render_text(saved_report(change), width=120)


LONG_FILE = "/home/somebody/with a long name/projects/of this year/models/" + "deeper/" * 20 + "train loop.py"


@pytest.mark.parametrize("width", [40, 64, 80, 100, 200])
def test_a_long_file_keeps_its_name_and_line(width):
    def change(data):
        data["what"] = data["nodes"][0]["what"] = f"function {LONG_FILE}:123"

    lines = render_text(saved_report(change), width=width).splitlines()
    assert all(cell_len(line) <= width for line in lines)
    tree = next(line for line in lines[lines.index("Tree") :] if " train_func  " in line)
    for line in (lines[0], tree):
        assert line.endswith("/train loop.py:123" if width > 64 else ".py:123"), line
        assert "function …" in line or width <= 64


@pytest.mark.parametrize("width", [40, 64, 80, 200])
def test_paths_of_captures_and_their_holders_are_whole(width):
    long = "train_func" + "".join(f"<closure variable_{number}>['a key']" for number in range(12))
    holders = [f"{long}.holder{number}" for number in range(10)]

    def change(data):
        data["captures"][0].update(path=long, shared_by=holders)
        data["findings"][0]["path"] = long

    text = render_text(saved_report(change), width=width)
    joined = re.sub(r"\n *", "", text)
    assert joined.count(long) >= 1 + 4 + 1
    for holder in holders[:4]:
        assert holder in joined
    assert "and at least 6 more" in text


def test_few_holders_take_one_line():
    def change(data):
        data["captures"][0]["shared_by"] = ["a", "b.c", "d"]

    assert "\n    also held by a, b.c, d\n" in render_text(saved_report(change), width=80)


def test_shared_rows_say_so_at_any_width():
    def change(data):
        data["nodes"][2]["shared_by"] = ["train_func<closure self>.config['data']", "other", "third"]

    assert "(also train_func<closure self>.config['data'], other and 1 more)" in render_text(
        saved_report(change), width=200
    )
    for width in (40, 80):
        row = next(line for line in render_text(saved_report(change), width=width).splitlines() if "├ .d" in line)
        assert row.endswith("  (shared)")


def test_self_column_leads_when_sorted_by_self():
    assert re.search(r"Tree\n +self +retained", render_text(saved_report(), width=80, sort="self"))
    assert re.search(r"Tree\n +self\n", render_text(saved_report(), width=40, sort="self"))
    assert re.search(r"Tree\n +subtree +retained +self", render_text(saved_report(), width=80, sort="subtree"))


def test_wide_characters_keep_columns_straight():
    def change(data):
        for row in data["captures"]:
            row["path"] = "関数<closure 値>" + row["path"][-4:]

    lines = [line for line in render_text(saved_report(change), width=120).splitlines() if "関数" in line]
    assert len({cell_len(line[: line.index("dict of" if "dict of" in line else "ndarray")]) for line in lines}) == 1


def test_glyphs_are_all_that_is_not_ascii():
    assert set(render_text(saved_report(), width=80)) - {chr(code) for code in range(128)} <= set(GLYPHS)
    assert all(unicodedata.east_asian_width(glyph) in "NA" for glyph in GLYPHS)


def test_renderers_import_rich_only_for_text():
    code = "import sys, fastcap.render.folded, fastcap.render.text; print('rich' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


@pytest.mark.parametrize(
    ("type_name", "what", "shown"),
    [
        ("numpy.ndarray", "ndarray float64 (3,)", "ndarray float64 (3,)"),
        ("raw bytes", "bytes that are no opcodes", "bytes that are no opcodes"),
        ("dict", "", "dict"),
        ("", "", ""),
        ("", "something", "something"),
        ("Trainer", "of 3", "Trainer of 3"),
    ],
)
def test_type_and_description_make_one_phrase(type_name, what, shown):
    text = render_text(saved_report(lambda data: data.update(type=type_name, what=what)), width=80)
    assert text.splitlines()[0] == f"train_func  {shown}".strip()
