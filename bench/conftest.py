"""The processes in which workloads are measured, and the table at the end of the run."""

import contextlib
import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from bench import targets, workloads

LEDGER = pytest.StashKey[targets.Ledger]()
ROOT = pathlib.Path(__file__).resolve().parent.parent


class Worker:
    """A process that has made one workload."""

    measured = 0.0  # seconds, all workers together

    def __init__(self, name: str) -> None:
        self.entry = workloads.WORKLOADS[name]
        environment = dict(os.environ, PYTHONPATH=os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
        self.process = subprocess.Popen(
            [sys.executable, str(pathlib.Path(workloads.__file__)), name], env=environment, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        self.state = self.receive()

    def receive(self) -> dict[str, Any]:
        assert self.process.stdout
        line = self.process.stdout.readline()
        if line:
            return json.loads(line)
        _, errors = self.process.communicate()
        return {"error": f"the process ended with status {self.process.returncode}: {errors[-500:]}"}

    def ask(self, contender: str, **options: Any) -> dict[str, Any]:
        if "unavailable" in self.state or "error" in self.state:
            return self.state
        assert self.process.stdin
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps({"contender": contender, **options}), file=self.process.stdin, flush=True)
        answer = self.receive()
        if "the process ended" in answer.get("error", ""):
            self.state = answer
        Worker.measured += answer.get("seconds", 0)
        return answer

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


def measured_time() -> float:
    """A clock that runs while a worker measures, and stands else: for pytest-benchmark, which runs here."""
    return Worker.measured


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("fastcap").addoption(
        "--rounds", type=int, metavar="N", help="measurements of each contender (default: 3 to 9, by the workload)"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.stash[LEDGER] = targets.Ledger()


@pytest.fixture(scope="session")
def ledger(request: pytest.FixtureRequest) -> targets.Ledger:
    return request.config.stash[LEDGER]


@pytest.fixture(scope="module")
def worker(request: pytest.FixtureRequest) -> Iterator[Worker]:
    """The process of the workload that the module-scoped parameter names."""
    started = Worker(request.param)
    yield started
    started.close()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    ledger = config.stash[LEDGER]
    rows = ledger.rows()
    if not rows:
        return
    terminalreporter.section("targets")
    terminalreporter.write_line(targets.table(rows))
    for path in targets.write_results(ledger):
        terminalreporter.write_line(f"written: {path}")
