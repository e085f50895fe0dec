"""Runs test suites that belong to others on a pickler of ours, each in a process of its own.

``run_pickletester("module:Pickler")`` runs CPython's ``test.pickletester`` with that pickler in place of
``_pickle.Pickler``. ``run_cloudpickle(checkout, installed)`` runs cloudpickle's own tests from a checkout of it, on the
installed cloudpickle, with ``fastcap.install("cloudpickle")`` in the process of the tests and in every Python process
that they start; or without, for comparison.

Both give an outcome: ``ran``, ``passed``, ``skipped`` and ``failed``, which maps a test to its error. ``EXPLAINED``
lists what may fail, and why; ``tests/test_suites.py`` holds both suites to it.
"""

import argparse
import collections
import contextlib
import faulthandler
import importlib
import json
import os
import pathlib
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import unittest
from collections.abc import Iterator
from typing import Any, TextIO

Outcome = dict[str, Any]  # ran: int, passed: int, skipped: {test: reason}, failed: {test: error}
ROOT = str(pathlib.Path(__file__).resolve().parent.parent)
TEST_TIMEOUT = 60  # seconds, for one test of pickletester
PREFIX = "suites: "  # of the line of standard output that holds the outcome

# Tests that may fail, by suite and by the start of the Python version ("" for all): test -> why that is right.
# Each entry has been looked into; whatever cloudpickle's own pickler fails is not listed, but found out by running it.
EXPLAINED: dict[str, dict[str, dict[str, str]]] = {
    "pickletester": {"": {}, "3.10": {}, "3.11": {}, "3.12": {}, "3.13": {}},
    "cloudpickle": {"": {}, "3.10": {}, "3.11": {}, "3.12": {}, "3.13": {}},
}


def explained(suite: str) -> dict[str, str]:
    """What may fail on this version of Python."""
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    return {test: reason for start, tests in EXPLAINED[suite].items() if version.startswith(start)
            for test, reason in tests.items()}


# ---------------------------------------------------------------------------------------------------------------------
# CPython's pickletester


def pickletester_cases(pickler: type, module: Any) -> list[type[unittest.TestCase]]:
    """CPython's test cases for picklers, with ``pickler`` in place of ``_pickle.Pickler``.

    ``module`` is where ``dump`` and ``dumps`` come from; without one of them, its tests are left out.
    """
    import _pickle

    from test import pickletester, test_pickle

    class PicklerTests(test_pickle.PyPicklerTests):
        pass

    class LoadedByPython(test_pickle.PyPicklerTests):
        pass

    class PersistentTests(test_pickle.PyPersPicklerTests):
        pass

    class IdentityPersistentTests(test_pickle.PyIdPersPicklerTests):
        persistent_load_error = _pickle.UnpicklingError

    class ObjectTests(test_pickle.PyPicklerUnpicklerObjectTests):
        pickler_class = pickler
        unpickler_class = _pickle.Unpickler

    class DispatchTableTests(pickletester.AbstractDispatchTableTests, unittest.TestCase):
        pickler_class = pickler

        def get_dispatch_table(self):
            return pickle.dispatch_table.copy()

    class ChainDispatchTableTests(DispatchTableTests):
        def get_dispatch_table(self):
            return collections.ChainMap({}, pickle.dispatch_table)

    class HookTests(pickletester.AbstractHookTests, unittest.TestCase):
        pickler_class = type("CustomPickler", (pickler, pickletester.AbstractCustomPicklerClass), {})

    cases: list[type[unittest.TestCase]] = [PicklerTests, LoadedByPython, PersistentTests, IdentityPersistentTests]
    if hasattr(test_pickle, "PyPicklingErrorTests"):  # Python 3.13

        class PicklingErrorTests(test_pickle.PyPicklingErrorTests):
            pass

        cases.append(PicklingErrorTests)
    for case in cases:
        case.pickler = pickler
        case.unpickler = pickle._Unpickler if case is LoadedByPython else _pickle.Unpickler
    cases += [ObjectTests, DispatchTableTests, ChainDispatchTableTests, HookTests]

    if hasattr(module, "dump"):

        class ModuleTests(pickletester.AbstractPickleModuleTests, unittest.TestCase):
            dump, dumps = staticmethod(module.dump), staticmethod(module.dumps)
            load, loads = staticmethod(pickle.load), staticmethod(pickle.loads)
            Pickler, Unpickler = pickler, _pickle.Unpickler

        cases.append(ModuleTests)
    if hasattr(module, "dumps"):

        class InMemoryTests(pickletester.AbstractPickleTests, unittest.TestCase):
            test_framed_write_sizes_with_delayed_writer = None

            def dumps(self, arg, protocol=None, **kwargs):
                return module.dumps(arg, protocol, **kwargs)

            def loads(self, data, **kwargs):
                return pickle.loads(data, **kwargs)

        cases.append(InMemoryTests)
    return cases


class Recorder(unittest.TestResult):
    """Records outcomes under ``Case.test``, and names each test on ``log`` as it starts, for the case of a crash."""

    def __init__(self, log: TextIO) -> None:
        super().__init__()
        self.log = log
        self.outcome: Outcome = {"ran": 0, "passed": 0, "skipped": {}, "failed": {}}

    @staticmethod
    def name(test: Any) -> str:
        test = getattr(test, "test_case", test)  # of a subtest
        return f"{type(test).__name__}.{test._testMethodName}" if hasattr(test, "_testMethodName") else str(test)

    def startTest(self, test: Any) -> None:
        self.log.write(f"{self.name(test)}\n")
        self.log.flush()
        signal.alarm(TEST_TIMEOUT)
        self.outcome["ran"] += 1
        super().startTest(test)

    def record(self, test: Any, error: Any) -> None:
        self.outcome["failed"].setdefault(self.name(test), f"{error[0].__name__}: {error[1]}")

    def addFailure(self, test: Any, err: Any) -> None:
        self.record(test, err)

    def addError(self, test: Any, err: Any) -> None:
        self.record(test, err)

    def addSubTest(self, test: Any, subtest: Any, err: Any) -> None:
        if err is not None:
            self.record(test, err)

    def addSkip(self, test: Any, reason: str) -> None:
        self.outcome["skipped"][self.name(test)] = reason


def run_cases(cases: list[type[unittest.TestCase]], log: TextIO) -> Outcome:
    recorder = Recorder(log)
    loader = unittest.TestLoader()
    unittest.TestSuite(map(loader.loadTestsFromTestCase, cases)).run(recorder)
    outcome = recorder.outcome
    outcome["passed"] = outcome["ran"] - len(outcome["failed"]) - len(outcome["skipped"])
    return outcome


def time_out(*_: object) -> None:
    raise TimeoutError(f"the test took more than {TEST_TIMEOUT} s")


def main_pickletester(target: str) -> Outcome:
    signal.signal(signal.SIGALRM, time_out)
    module_name, _, attribute = target.partition(":")
    module = importlib.import_module(module_name)
    faulthandler.enable()
    return run_cases(pickletester_cases(getattr(module, attribute), module), sys.stderr)


# ---------------------------------------------------------------------------------------------------------------------
# cloudpickle's tests

# Python imports a module of this name when it starts. cloudpickle's tests start processes with nothing on their path
# but the folder above the tests: there it is found, and completes the path before it installs fastcap.
SITECUSTOMIZE = """
    import os
    import sys
    sys.path[1:1] = os.environ.get("SUITE_PATH", "").split(os.pathsep)
    if "SUITE_INSTALL" in os.environ:
        try:
            import fastcap
            fastcap.install("cloudpickle")
        except BaseException:
            import traceback
            traceback.print_exc()
            os._exit(70)
"""


class PytestRecorder:
    """A pytest plugin that records outcomes under ``file::Case::test``."""

    def __init__(self) -> None:
        self.outcome: Outcome = {"ran": 0, "passed": 0, "skipped": {}, "failed": {}}

    def pytest_runtest_logreport(self, report: Any) -> None:
        name = report.nodeid
        if report.when == "call" or (report.when == "setup" and not report.passed):
            self.outcome["ran"] += 1
        if report.failed:
            self.outcome["failed"][name] = str(report.longrepr)[-2000:]
        elif report.skipped:
            self.outcome["skipped"][name] = str(getattr(report, "wasxfail", report.longrepr))
        elif report.when == "call":
            self.outcome["passed"] += 1

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.outcome["failed"][report.nodeid or "collection"] = str(report.longrepr)[-2000:]


def main_cloudpickle(folder: str) -> Outcome:
    import cloudpickle
    import pytest

    if "SUITE_INSTALL" in os.environ:
        for function in (cloudpickle.dumps, cloudpickle.Pickler.dump):
            if "fastcap" not in pathlib.Path(function.__code__.co_filename).parts:
                raise SystemExit(f"fastcap.install had no effect on {function}")
    recorder = PytestRecorder()
    os.chdir(folder)
    pytest.main(["tests", "-q", "--capture=no", "-p", "no:cacheprovider", "--rootdir", folder], plugins=[recorder])
    return recorder.outcome


@contextlib.contextmanager
def cloudpickle_folder(checkout: pathlib.Path) -> Iterator[tuple[str, dict[str, str]]]:
    """A folder with cloudpickle's tests but not its package, so that they run on the installed one; an environment."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(checkout / "tests", pathlib.Path(folder, "tests"))
        pathlib.Path(folder, "sitecustomize.py").write_text(textwrap.dedent(SITECUSTOMIZE))
        path = [os.path.join(folder, "tests", "cloudpickle_testpkg"), ROOT, os.environ.get("PYTHONPATH", "")]
        yield folder, dict(os.environ, PYTHONPATH=folder, SUITE_PATH=os.pathsep.join(filter(None, path)))


# ---------------------------------------------------------------------------------------------------------------------
# From outside


def run_suite(*arguments: str, environment: dict[str, str] | None = None, timeout: float = 900) -> Outcome:
    """Run this file as a program and give its outcome.

    A process that dies counts as one failed test, named "crash", whose error ends with what it last said.
    """
    command = [sys.executable, os.path.abspath(__file__), *arguments]
    if environment is None:
        environment = dict(os.environ, PYTHONPATH=os.pathsep.join([ROOT, os.environ.get("PYTHONPATH", "")]))
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout, check=False)
    except subprocess.TimeoutExpired as error:
        said = (error.stderr or b"")[-3000:].decode(errors="replace")
        return {"ran": 0, "passed": 0, "skipped": {}, "failed": {"crash": f"no end after {timeout} s: {said}"}}
    for line in done.stdout.splitlines():
        if line.startswith(PREFIX):
            return json.loads(line.removeprefix(PREFIX))
    error = f"exit status {done.returncode}: {done.stdout[-1000:]}{done.stderr[-3000:]}"
    return {"ran": 0, "passed": 0, "skipped": {}, "failed": {"crash": error}}


def run_pickletester(target: str) -> Outcome:
    """CPython's tests on the pickler ``module:attribute``."""
    return run_suite("pickletester", target)


def run_cloudpickle(checkout: str | os.PathLike[str], installed: bool) -> Outcome:
    """cloudpickle's tests from a checkout, with fastcap installed into cloudpickle or without."""
    with cloudpickle_folder(pathlib.Path(checkout).resolve()) as (folder, environment):
        if installed:
            environment["SUITE_INSTALL"] = "1"
        return run_suite("cloudpickle", folder, environment=environment)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="suite", required=True)
    commands.add_parser("pickletester").add_argument("pickler", metavar="MODULE:PICKLER")
    commands.add_parser("cloudpickle").add_argument("folder", help="made by cloudpickle_folder")
    arguments = parser.parse_args()
    if arguments.suite == "pickletester":
        outcome = main_pickletester(arguments.pickler)
    else:
        outcome = main_cloudpickle(arguments.folder)
    print(f"\n{PREFIX}{json.dumps(outcome)}", flush=True)


if __name__ == "__main__":
    main()
