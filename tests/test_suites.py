"""CPython's and cloudpickle's own test suites pass on fastcap's pickler, apart from explained exceptions."""

import importlib.util
import os
import pathlib

import pytest
import suites

HAS_PICKLER = importlib.util.find_spec("fastcap._native.pickler") is not None
needs_pickler = pytest.mark.skipif(not HAS_PICKLER, reason="the native pickler is not built")

WRONG_PICKLERS = """
import os, pickle
class Losing(pickle.Pickler):
    def dump(self, obj):
        super().dump({} if type(obj) is dict else obj)
class Dying(pickle.Pickler):
    def dump(self, obj):
        os.abort()
"""


def test_pickletester_passes_on_the_c_pickler():
    """The harness itself is right: the pickler that CPython tests this way passes."""
    outcome = suites.run_pickletester("_pickle:Pickler")
    assert outcome["failed"] == {}
    assert outcome["passed"] > 250


@pytest.mark.parametrize("pickler", ["Losing", "Dying"])
def test_pickletester_fails_on_wrong_picklers(pickler, tmp_path, monkeypatch):
    (tmp_path / "wrong_picklers.py").write_text(WRONG_PICKLERS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    failed = suites.run_pickletester(f"wrong_picklers:{pickler}")["failed"]
    assert ("crash" in failed) == (pickler == "Dying")
    assert len(failed) >= (1 if pickler == "Dying" else 10)


@needs_pickler
def test_pickletester_passes():
    """Whatever cloudpickle's pickler passes, ours passes too."""
    inherited = suites.run_pickletester("cloudpickle:Pickler")["failed"]
    assert "crash" not in inherited
    check(suites.run_pickletester("fastcap:Pickler"), inherited, suites.explained("pickletester"), 250)


@needs_pickler
def test_pickletester_passes_without_reducers():
    """The encoder alone passes all that CPython's own pickler passes."""
    check(suites.run_pickletester("fastcap._native.pickler:Pickler"), {}, suites.explained("pickletester"), 250)


@needs_pickler
def test_cloudpickle_suite_passes(request):
    checkout = request.config.getoption("--cloudpickle-suite")
    if not checkout:
        pytest.skip("no checkout of cloudpickle: give one with --cloudpickle-suite or CLOUDPICKLE_SUITE")
    assert pathlib.Path(checkout, "tests", "cloudpickle_test.py").exists(), f"{checkout} is no checkout of cloudpickle"
    pytest.importorskip("psutil", reason="cloudpickle's tests need psutil")
    inherited = suites.run_cloudpickle(checkout, installed=False)["failed"]
    assert "crash" not in inherited
    check(suites.run_cloudpickle(checkout, installed=True), inherited, suites.explained("cloudpickle"), 200)


def check(outcome, inherited, explained, least):
    """Nothing fails but what is inherited or explained, and everything that is explained does fail."""
    unexplained = {test: error for test, error in outcome["failed"].items() if test not in {*inherited, *explained}}
    assert not unexplained, "\n".join(f"{test}: {error}" for test, error in unexplained.items())
    assert set(explained) <= set(outcome["failed"]), "these pass: they need no explanation any more"
    assert outcome["passed"] >= least, f"of {outcome['ran']} tests {outcome['passed']} passed: {os.linesep}{outcome}"
