"""Public bug reports, as cases in ../shared/cases: fastcap is never worse than cloudpickle, and names the culprits.

A sample of the cases runs by default, all of them with --long.
"""

import ast
import functools
import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
CASES = ROOT.parent / "shared" / "cases"
FILES = sorted(CASES.glob("[0-9][0-9][0-9]_*.py"))
if not FILES:
    pytest.skip(f"no cases in {CASES}", allow_module_level=True)

PICKLER = "fastcap" if importlib.util.find_spec("fastcap._native.pickler") else None
# Cases that start Ray get a cluster of their own, whatever runs on the machine.
ENVIRONMENT = dict(
    os.environ, PYTHONPATH=os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]), RAY_ADDRESS="local"
)
# Cases that load a library for many seconds, or start a cluster.
SLOW = {"048", "050", "051", "076", "103", "105", "106", "108"}
SAMPLE = {"001", "006", "008", "013", "018", "028", "031", "036", "043", "055", "056", "063", "086", "095", "101"}
# The runner's verdicts from worst to best; what is slow is at least right.
RANKS = [
    "CRASH", "RUNNER-ERROR", "FAILS", "WRONG", "NOT-DETECTED", "NOT-OVERSIZED", "limit", "SLOW", "confirms", "works",
]

needs_pickler = pytest.mark.skipif(PICKLER is None, reason="the native pickler is not built")


def facts(file: pathlib.Path) -> dict:
    """The constants that a case's file assigns."""
    found = {}
    for statement in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Constant):
            found |= {target.id: statement.value.value for target in statement.targets if isinstance(target, ast.Name)}
    return found


def cases(*expected: str) -> list:
    """The cases with one of these EXPECT, as parameters; those that take long are marked so."""
    chosen = [file for file in FILES if facts(file)["EXPECT"] in expected]
    return [pytest.param(file, id=file.stem, marks=[pytest.mark.long] if is_long(file, expected) else [])
            for file in chosen]


def is_long(file: pathlib.Path, expected: tuple[str, ...]) -> bool:
    number = file.name[:3]
    return number in SLOW or (number not in SAMPLE and expected != ("oversized",))


@functools.cache
def verdict(module: str, file: pathlib.Path) -> tuple[str, str]:
    """What the runner of the cases says about a module: the verdict and the detail."""
    result = subprocess.run(
        [sys.executable, str(CASES / "run.py"), "--module", module, "--path", str(ROOT), "--only", file.stem, "--json",
         "/dev/stdout"], env=ENVIRONMENT, capture_output=True, text=True, timeout=600, check=False,
    )
    text = result.stdout[result.stdout.find("\n{") + 1:]
    assert text.startswith("{"), result.stdout + result.stderr
    entry = json.JSONDecoder().raw_decode(text)[0][file.stem]
    return entry["verdict"], entry["detail"]


def look_at(task: str, file: pathlib.Path, *arguments: str) -> dict:
    """What ``case_process`` says about a case."""
    result = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "case_process.py"), task, str(file), *arguments], env=ENVIRONMENT,
        capture_output=True, text=True, timeout=600, check=False,
    )
    assert result.returncode == 0, f"exit status {result.returncode}: {result.stderr[-3000:]}"
    answer = json.loads(result.stdout)
    if "skip" in answer:
        pytest.skip(f"{file.stem}: {answer['skip']}")
    return answer


def check_same(answer: dict) -> None:
    """Our dump is that of cloudpickle, or fails with the same exception.

    The first dump may differ from the others. Where even the others differ among themselves, there is nothing to be
    held to; and what is too deep for cloudpickle need not be too deep for us.
    """
    first, second, third = answer["cloudpickle"]
    ours = answer["ours"]
    if second != third:
        pytest.skip("cloudpickle writes other bytes every time")
    if "recursion" in second.get("message", ""):
        assert "error" not in ours or "recursion" in ours["message"]
    elif "error" in second:
        assert ours.get("error") == second["error"], ours
    else:
        assert ours in (first, second)


def test_there_are_cases_of_every_kind():
    assert {facts(file)["EXPECT"] for file in FILES} == {"roundtrip", "oversized", "unpicklable", "handle"}
    assert {file.name[:3] for file in FILES} >= SAMPLE | SLOW


@pytest.mark.parametrize("file", cases("roundtrip")[:1])
def test_harness_sees_cloudpickle_as_it_is(file):
    """The comparison itself: cloudpickle writes its own bytes, another pickler does not."""
    check_same(look_at("bytes", file, "cloudpickle"))
    with pytest.raises(AssertionError):
        check_same(look_at("bytes", file, "marshal"))


@needs_pickler
@pytest.mark.parametrize("file", cases("roundtrip", "unpicklable", "oversized", "handle"))
def test_case_is_never_worse(file):
    theirs, their_detail = verdict("cloudpickle", file)
    if theirs == "skip":
        pytest.skip(f"{file.stem}: {their_detail}")
    ours, our_detail = verdict("fastcap", file)
    if "recursion" in their_detail and "dumped without error" in our_detail:
        return  # what is too deep for cloudpickle need not be too deep for us
    assert RANKS.index(ours) >= RANKS.index(theirs), f"{ours} ({our_detail}), cloudpickle: {theirs} ({their_detail})"


@needs_pickler
@pytest.mark.parametrize("file", cases("roundtrip", "unpicklable", "oversized", "handle"))
def test_case_has_the_same_bytes(file):
    check_same(look_at("bytes", file, "fastcap"))


@needs_pickler
@pytest.mark.skipif(sys.version_info < (3, 11), reason="exceptions have notes from Python 3.11 on")
@pytest.mark.parametrize("file", cases("unpicklable"))
def test_unpicklable_case_names_the_culprit(file):
    found, detail = verdict("fastcap", file)
    if found == "skip":
        pytest.skip(f"{file.stem}: {detail}")
    if "recursion" in verdict("cloudpickle", file)[1]:
        pytest.skip("too deep for cloudpickle alone")
    assert found == "confirms"
    assert "[names the culprit]" in detail


@pytest.mark.parametrize("file", cases("oversized"))
def test_oversized_case_names_the_culprit(file):
    fastcap = pytest.importorskip("fastcap")
    if not hasattr(fastcap, "analyze"):
        pytest.skip("fastcap has no analyze yet")
    answer = look_at("culprit", file)
    case = facts(file)
    biggest = answer["captures"][0]
    assert re.search(rf"\b{re.escape(case['CULPRIT_NAME'])}\b", biggest["path"]), answer["captures"]
    assert 0.9 * case["BYTES"] <= biggest["retained_size"] <= 1.2 * case["BYTES"], answer


def about_culprit(rows: list[dict], file: pathlib.Path) -> list[dict]:
    name = re.escape(facts(file)["CULPRIT_NAME"])
    return [row for row in rows if re.search(rf"(?<![^\W_]){name}(?![^\W_])", row["path"])]


@needs_pickler
@pytest.mark.parametrize("file", cases("unpicklable"))
def test_unpicklable_case_is_found_by_path(file):
    answer = look_at("findings", file)
    if "dump_error" not in answer:
        # fastcap itself can pickle what is too deep for cloudpickle: no error, but told, and where it begins
        assert "recursion" in verdict("cloudpickle", file)[1]
        rows = about_culprit(answer["live"], file)
        assert [(row["code"], row["severity"]) for row in rows] == [("FC103", "warning")], answer["live"]
        assert "cloudpickle.dumps raises PicklingError" in rows[0]["message"]
        return
    rows = [row for row in about_culprit(answer["live"], file) if row["code"] == "FC101"]
    assert len(rows) == 1, answer["live"]
    assert rows[0]["severity"] == "error"
    assert rows[0]["replacement"]
    assert [row for row in answer["live"] if row["severity"] == "error"] == rows


@needs_pickler
@pytest.mark.parametrize("file", cases("handle"))
def test_handle_case_is_found_live_and_in_the_file(file):
    answer = look_at("findings", file)
    for kind, severity in (("live", "warning"), ("file", "error")):
        rows = about_culprit(answer[kind], file)
        assert [(row["code"][:4], row["severity"]) for row in rows] == [("FC20", severity)], answer[kind]


# What plain cloudpickle does not bring to another process as it was: the finding that says why, and a word of it. None:
# nothing that a look at the object could tell, see the reason.
REASONS = {
    "001": ("FC210", "Stage.__init_subclass__ needs `key`"),
    "005": ("FC101", "cannot pickle '_thread.RLock' object"),
    "006": ("FC210", "none of its members is a single bit"),
    "008": ("FC211", "without its names METER"),
    "010": (None, "loading where the class lives sets its attributes back, as cloudpickle means it to"),
    "011": (None, "the same"),
    "015": ("FC210", "its slot __secret is known as _Vault__secret"),
    "025": ("FC212", "wsgiref.util may not be imported on load"),
    "026": ("FC212", "wsgiref.headers may not be imported on load"),
    "028": ("FC213", "add writes `total`, which it shares with read"),
    "033": ("FC213", "f writes the global `x`"),
    "036": ("FC203", "Can't get attribute 'P'"),
    "046": ("FC211", "loads without what its .rate holds"),
    "050": ("FC211", "loads without its .grad"),
    "065": (None, "loads well; the order of a set differs from process to process"),
    "066": (None, "loads well; a second dump has other bytes"),
    "070": (None, "loads in the Python that made it; FC215 says it of the file, see test_rules"),
}


def rank_of_cloudpickle(file: pathlib.Path) -> int:
    return RANKS.index(verdict("cloudpickle", file)[0])


@needs_pickler
@pytest.mark.parametrize("file", cases("roundtrip"))
def test_no_error_about_what_cloudpickle_carries(file):
    """And a finding that names the reason where it does not carry it, or not as it was."""
    answer = look_at("findings", file)
    worst = [row for row in answer["live"] + answer.get("file", []) if row["severity"] == "error"]
    works = rank_of_cloudpickle(file) > RANKS.index("WRONG")
    number = file.name[:3]
    assert works == (number not in REASONS) or number in VERSION_DEPENDENT, verdict("cloudpickle", file)
    code, words = REASONS.get(number, (None, ""))
    if works:
        assert worst == []
    elif code is None:
        assert worst == [], words
    else:
        rows = [row for row in answer["live"] if row["code"] == code and words in row["message"]]
        assert rows, answer
        assert all(row["replacement"] for row in rows)
        assert [row for row in worst if row["code"] != code] == []


# The reasons of these went away in later versions of Python or cloudpickle; 070 wants another Python.
VERSION_DEPENDENT = {"005", "006", "065", "066", "070"}


@pytest.mark.parametrize("file", cases("oversized"))
def test_oversized_case_has_a_capture_or_a_finding(file):
    answer = look_at("findings", file)
    for rows in (answer["live"], answer["file"]):
        assert not [row for row in rows if row["severity"] == "error"]
        assert all(row["replacement"] for row in rows)
