"""Comparisons: what changed by path and by type, and that it always adds up."""

import io
import json
import pickle
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import objects

import fastcap
from fastcap.cli import main
from fastcap.comparison import compare, parse_growth
from fastcap.render.diff import render_diff
from fastcap.report import Report, ViewOptions


class Trainer:
    def __init__(self, **attributes):
        self.__dict__.update(attributes)


def saved(report):
    """The report as it comes back from a file: what it does not show cannot be asked for."""
    return Report.from_dict(json.loads(json.dumps(report.to_dict())))


def assert_closed(found):
    assert found.delta == found.new_size - found.old_size
    assert sum(row.delta for row in found.changes) + found.overhead_delta == found.delta
    assert sum(row.delta for row in found.types) + found.overhead_delta == found.delta
    for row in (*found.changes, *found.types):
        assert row.delta == row.new_size - row.old_size
        assert min(row.old_size, row.new_size) >= 0


def changes(old, new, **options):
    found = compare(fastcap.analyze(old, name="obj", **options), fastcap.analyze(new, name="obj", **options))
    assert_closed(found)
    return {(row.kind, row.path): row for row in found.changes}


OLD = {"kept": b"k" * 5000, "grown": b"g" * 1000, "gone": {"x": b"x" * 3000}}
NEW = {"kept": b"k" * 5000, "grown": b"g" * 9000, "new": [b"n" * 2000]}


def test_what_came_went_grew_and_shrank():
    found = changes(OLD, NEW)
    assert set(found) >= {("grew", "obj['grown']"), ("came", "obj['new']"), ("went", "obj['gone']")}
    assert ("grew", "obj['kept']") not in found
    assert found["grew", "obj['grown']"].delta == 8000
    assert found["came", "obj['new']"].new_size >= 2000 > 0 == found["came", "obj['new']"].old_size
    assert found["went", "obj['gone']"].old_size >= 3000
    back = changes(NEW, OLD)
    assert back["shrank", "obj['grown']"].delta == -8000
    assert {("came", "obj['gone']"), ("went", "obj['new']")} <= set(back)


def test_biggest_change_comes_first():
    found = compare(fastcap.analyze(OLD), fastcap.analyze(NEW))
    deltas = [abs(row.delta) for row in found.changes]
    assert deltas == sorted(deltas, reverse=True)
    assert found.changes[0].path == "obj['grown']"


def test_no_change():
    found = compare(fastcap.analyze(OLD), fastcap.analyze(OLD))
    assert (found.delta, found.overhead_delta, found.changes, found.types) == (0, 0, (), ())


def test_names_of_roots_do_not_matter():
    found = compare(fastcap.analyze(OLD, name="before"), fastcap.analyze(NEW, name="after"))
    assert_closed(found)
    assert {row.path for row in found.changes if row.kind != "went"} >= {"after['grown']", "after['new']"}
    assert [row.path for row in found.changes if row.kind == "went"] == ["before['gone']"]


def test_another_type_under_the_same_path():
    row = changes({"a": b"x" * 1000}, {"a": "x" * 5000})["grew", "obj['a']"]
    assert (row.old_type, row.type) == ("bytes", "str")
    assert row.old_what != row.what


def test_moved_part_is_no_growth():
    numpy = pytest.importorskip("numpy")
    data = numpy.arange(5000.0)
    found = changes({"trainer": Trainer(data=data)}, {"trainer": Trainer(inner=Trainer(data=data))})
    row = found["moved", "obj['trainer'].inner.data"]
    assert row.old_path == "obj['trainer'].data"
    assert abs(row.delta) <= 64
    assert row.new_size > 40_000
    assert sum(abs(row.delta) for row in found.values()) < 400  # the wrapper alone


def test_what_moved_must_have_the_same_size_type_and_description():
    for other in (b"x" * 5000, "x" * 4096, bytearray(4096)):
        kinds = {row.kind for row in changes({"a": b"x" * 4096}, {"b": other}).values()}
        assert kinds & {"came", "went"} == {"came", "went"}
        assert "moved" not in kinds
    assert "moved" in {row.kind for row in changes({"a": b"x" * 4096}, {"b": b"x" * 4096}).values()}


def test_each_part_moves_once():
    block = b"x" * 4096
    found = compare(
        fastcap.analyze({"a": bytes(block)}),
        fastcap.analyze({"b": bytes(bytearray(block)), "c": bytes(bytearray(block))}),
    )
    assert_closed(found)
    assert sorted(row.kind for row in found.changes if row.path != "obj") == ["came", "moved"]


CUT = [ViewOptions(), ViewOptions(depth=0), ViewOptions(depth=1), ViewOptions(top=1), ViewOptions(min_size=1500)]


@pytest.mark.parametrize("old_options", CUT, ids=range(len(CUT)))
@pytest.mark.parametrize("new_options", CUT, ids=range(len(CUT)))
@pytest.mark.parametrize("make_old", [saved, lambda report: report], ids=["saved", "live"])
@pytest.mark.parametrize("make_new", [saved, lambda report: report], ids=["saved", "live"])
def test_cut_reports_add_up(old_options, new_options, make_old, make_new):
    rng = random.Random(7)

    def tree(depth):
        if not depth:
            return rng.randbytes(rng.randrange(3000))
        return {f"k{n}": tree(depth - 1) for n in rng.sample(range(9), 5)}

    old = make_old(fastcap.analyze(tree(3), options=old_options))
    new = make_new(fastcap.analyze(tree(3), options=new_options))
    assert_closed(compare(old, new))


@given(objects(), objects(), st.sampled_from(CUT), st.sampled_from(CUT), st.booleans(), st.booleans())
def test_random_objects_add_up(old, new, old_options, new_options, save_old, save_new):
    reports = [fastcap.analyze(old, options=old_options), fastcap.analyze(new, options=new_options)]
    made = [saved(report) if save else report for report, save in zip(reports, (save_old, save_new))]
    assert_closed(compare(*made))
    assert_closed(compare(*reversed(made)))


def test_part_that_one_report_does_not_show_is_looked_up():
    """A part of a few bytes that grew is no part that came."""
    old = {"filler": b"f" * 2_000_000, "cfg": {"data": b"d"}}
    new = {"filler": b"f" * 2_000_000, "cfg": {"data": b"d" * 1_000_000}}
    report = fastcap.analyze(old)
    assert "obj['cfg']['data']" not in [row.path for row in report.nodes]
    found = compare(report, fastcap.analyze(new))
    assert_closed(found)
    assert (found.changes[0].kind, found.changes[0].path) == ("grew", "obj['cfg']['data']")
    assert not found.notes


def test_culprit_is_named_against_a_saved_report_that_is_cut():
    old = {"filler": b"f" * 2_000_000, "cfg": {"data": b"d"}}
    new = {"filler": b"f" * 2_000_000, "cfg": {"data": b"d" * 1_000_000}}
    found = compare(saved(fastcap.analyze(old)), fastcap.analyze(new))
    assert_closed(found)
    assert found.changes[0].path == "obj['cfg']"
    assert any("OLD is a saved report" in note for note in found.notes)


def test_small_parts_of_a_cut_saved_report_are_compared_as_a_whole():
    old = {"filler": b"f" * 2_000_000, "a": b"a" * 500, "b": b"b" * 500}
    options = ViewOptions(min_size=1)
    found = compare(saved(fastcap.analyze(old)), fastcap.analyze(old, options=options))
    assert_closed(found)
    assert not found.changes


def test_reports_that_do_not_add_up_are_refused():
    data = fastcap.analyze(OLD).to_dict()
    data["nodes"][0]["self_size"] += 1
    with pytest.raises(ValueError, match="do not add up"):
        compare(Report.from_dict(data), fastcap.analyze(NEW))
    data = fastcap.analyze(OLD).to_dict()
    del data["types"][0]
    with pytest.raises(ValueError, match="do not add up"):
        compare(fastcap.analyze(NEW), Report.from_dict(data))


def test_out_of_band_buffers_count():
    buffers = []
    stream = pickle.dumps({"a": pickle.PickleBuffer(bytes(5000))}, 5, buffer_callback=buffers.append)
    found = compare(fastcap.analyze({"a": b""}), fastcap.scan(stream, buffers=buffers))
    assert_closed(found)
    assert found.delta > 4900


# ---- sources


def test_python_takes_reports_files_bytes_and_saved_reports(tmp_path):
    path, report_path = tmp_path / "old.pkl", tmp_path / "new.json"
    path.write_bytes(pickle.dumps(OLD))
    report_path.write_text(json.dumps(fastcap.scan(pickle.dumps(NEW)).to_dict()))
    expected = fastcap.diff(fastcap.scan(pickle.dumps(OLD)), fastcap.scan(pickle.dumps(NEW)))
    assert expected.delta == len(pickle.dumps(NEW)) - len(pickle.dumps(OLD))
    for old in (path, str(path), pickle.dumps(OLD), io.BytesIO):
        for new in (report_path, pickle.dumps(NEW)):
            found = fastcap.diff(old(pickle.dumps(OLD)) if old is io.BytesIO else old, new)
            assert_closed(found)
            assert found.changes == expected.changes
    assert fastcap.diff(path, report_path).old_target == str(path)


def test_python_errors(tmp_path):
    path = tmp_path / "bad.json"
    path.write_text('{"format": 99}')
    with pytest.raises(ValueError, match=r"bad\.json is neither a pickle nor a saved report"):
        fastcap.diff(path, b"N.")
    with pytest.raises(fastcap.PayloadError):
        fastcap.diff(b"N.", b"no pickle")
    with pytest.raises(FileNotFoundError):
        fastcap.diff(tmp_path / "none.pkl", b"N.")
    with pytest.raises(TypeError):
        fastcap.diff(5, b"N.")


# ---- growth


@pytest.mark.parametrize(
    ("text", "allowed", "too_much"),
    [("10%", 1100, 1101), ("100 B", 1100, 1101), ("0", 1000, 1001), ("0 %", 1000, 1001), ("2.5%", 1025, 1026)],
)
def test_growth(text, allowed, too_much):
    growth = parse_growth(text)
    assert growth.allows(1000, allowed)
    assert not growth.allows(1000, too_much)
    assert growth.allows(1000, 10)


def test_growth_from_nothing():
    assert not parse_growth("50%").allows(0, 1)
    assert parse_growth("1k").allows(0, 1024)


@pytest.mark.parametrize(
    "text", ["", "%", "-1%", "ten%", "1e3%", "nan%", "inf%", "1%%", "10 percent", "-5", "9" * 30 + "%"]
)
def test_no_growth(text):
    with pytest.raises(ValueError):
        parse_growth(text)


# ---- text


@pytest.mark.parametrize("width", [1, 40, 63, 64, 80, 200])
@pytest.mark.parametrize("unicode", [True, False])
def test_text_keeps_to_its_width(width, unicode):
    old = {f"key {n}" * 9: b"x" * n for n in range(200)} | {"\x1b[31m\u202e\n関数": b"y" * 9000}
    new = {f"key {n}" * 9: b"x" * (2 * n) for n in range(100)} | {"moved\n": b"y" * 9000}
    found = compare(fastcap.analyze(old, name="old\n"), fastcap.analyze(new, name="new\t"))
    from rich.cells import cell_len

    lines = render_diff(found, width=width, unicode=unicode).split("\n")
    assert all(cell_len(line) <= max(width, 40) for line in lines)
    assert all(line.isprintable() for line in lines)
    assert unicode or "".join(lines).isascii()
    assert len(lines) < 150


def test_text_sums_up_what_it_does_not_show():
    found = compare(fastcap.analyze(OLD), fastcap.analyze(NEW))
    text = render_diff(found, top=1, width=120)
    assert f"[{len(found.changes) - 1} more]" in text
    assert text.splitlines()[0] == "obj"
    assert text.splitlines()[1].startswith("payload grew by 6.8 KiB (")
    assert "\npayload shrank by" in render_diff(compare(fastcap.analyze(NEW), fastcap.analyze(OLD)))
    assert "payload has the size it had" in render_diff(compare(fastcap.analyze(OLD), fastcap.analyze(OLD)))
    assert "\x1b[" in render_diff(found, color=True)
    assert "\x1b[" not in text


# ---- the command


SCRIPT = "def make(size):\n    data = bytes(size)\n    def job():\n        return data\n    return job\n"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    (tmp_path / "old.pkl").write_bytes(pickle.dumps(OLD))
    (tmp_path / "new.pkl").write_bytes(pickle.dumps(NEW))
    (tmp_path / "jobs.py").write_text(f"{SCRIPT}small = make(1000)\nbig = make(500_000)\n")
    return tmp_path


def test_command(folder, capsys):
    assert main(["diff", "old.pkl", "new.pkl"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("old.pkl → new.pkl\npayload grew by 6.8 KiB")
    assert "obj['grown']" in out
    assert err == ""


def test_command_json(folder, capsys):
    assert main(["diff", "old.pkl", "new.pkl", "--format", "json", "-o", "diff.json"]) == 0
    assert capsys.readouterr() == ("", "")
    data = json.loads((folder / "diff.json").read_text())
    assert data["format"] == 1
    assert sum(row["delta"] for row in data["changes"]) + data["overhead_delta"] == data["delta"] != 0
    assert data == fastcap.diff("old.pkl", "new.pkl").to_dict()


def test_command_takes_objects_and_saved_reports(folder, capsys):
    assert main(["analyze", "jobs.py:small", "--format", "json", "-o", "small.json"]) == 0
    for old in ("jobs.py:small", "small.json"):
        capsys.readouterr()
        assert main(["diff", old, "jobs.py:big", "--max-growth", "10%"]) == 1
        out, err = capsys.readouterr()
        assert out.splitlines()[0] == "small → big"
        row = next(line for line in out.splitlines() if "big<closure data>" in line)
        assert row.split()[:3] == ["+487.3", "KiB", "grew"]
        assert "more than --max-growth 10%" in err


@pytest.mark.parametrize(
    ("limit", "code"), [("8 KiB", 0), ("6000", 1), ("100%", 0), ("10%", 1), ("0", 1)], ids=lambda value: str(value)
)
def test_max_growth(folder, capsys, limit, code):
    assert main(["diff", "old.pkl", "new.pkl", "--max-growth", limit]) == code
    out, err = capsys.readouterr()
    assert out
    assert (f"--max-growth {limit}" in err) == bool(code)
    assert main(["diff", "new.pkl", "old.pkl", "--max-growth", limit]) == 0


def test_max_growth_of_the_project(folder, capsys):
    (folder / "pyproject.toml").write_text('[tool.fastcap]\nmax-growth = "10%"\n')
    assert main(["diff", "old.pkl", "new.pkl"]) == 1
    assert "max-growth of" in capsys.readouterr().err
    assert main(["diff", "old.pkl", "new.pkl", "--max-growth", "1MiB"]) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-", "-"], "cannot both be standard input"),
        (["old.pkl", "none.pkl"], "no file none.pkl"),
        (["old.pkl", "new.pkl", "--flavor", "cloudpickle"], "--flavor is for objects"),
        (["old.pkl", "new.pkl", "-o", "new.pkl"], "would overwrite"),
        (["old.pkl", "new.pkl", "--max-growth", "some"], "'some' is not a size"),
        (["old.pkl"], "Missing argument 'NEW'"),
        (["old.pkl", "damaged.json"], "do not add up"),
    ],
)
def test_command_errors(folder, capsys, arguments, message):
    data = fastcap.analyze(NEW).to_dict()
    data["nodes"][0]["self_size"] += 1
    (folder / "damaged.json").write_text(json.dumps(data))
    assert main(["diff", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert len(err.splitlines()) == 1


def test_what_cannot_be_pickled_is_told():
    import threading

    locks = {f"lock{k}": threading.Lock() for k in range(7)}
    good, bad = fastcap.analyze({"data": b"x" * 5000}), fastcap.analyze({"data": b"x" * 9000, **locks})
    assert compare(good, good).notes == ()
    for report in (bad, saved(bad)):
        found = compare(good, report)
        assert_closed(found)
        note = found.notes[0]
        assert note.startswith("NEW cannot be pickled, because of 7 parts: obj['lock0'], obj['lock1'], ")
        assert note.endswith("obj['lock4'] and 2 more; its sizes are those without")
        assert note in render_diff(found, width=400)
        assert json.loads(json.dumps(found.to_dict()))["notes"][0] == note
    one = fastcap.analyze([threading.Lock()])
    assert compare(one, good).notes == (
        "OLD cannot be pickled, because of one part: obj[0]; its sizes are those without",
    )


def test_a_budget_is_not_kept_by_what_cannot_be_pickled(folder, capsys):
    (folder / "locked.py").write_text("import threading\nbad = {'data': b'x', 'lock': threading.Lock()}\n")
    assert main(["diff", "old.pkl", "locked.py:bad"]) == 0
    out, _ = capsys.readouterr()
    assert "note: NEW cannot be pickled, because of one part: bad['lock']" in out
    assert main(["diff", "old.pkl", "locked.py:bad", "--max-growth", "1MiB"]) == 1
    assert "locked.py:bad cannot be pickled: no payload" in capsys.readouterr().err
    assert main(["diff", "locked.py:bad", "new.pkl", "--max-growth", "1MiB"]) == 0
