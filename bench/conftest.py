"""Fixtures of the benchmarks, and the table at the end of the run."""

from collections.abc import Iterator

import pytest

from bench import targets
from bench.worker import Worker

LEDGER = pytest.StashKey[targets.Ledger]()


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
