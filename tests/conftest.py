"""Options, hypothesis profiles and fixtures of the whole test suite."""

import os

import corpus
import pytest
from hypothesis import HealthCheck, settings

settings.register_profile(
    "short", max_examples=50, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile(
    "long", max_examples=10_000, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("fastcap")
    group.addoption("--long", action="store_true", help="also run what takes minutes, with many more examples")
    group.addoption(
        "--cloudpickle-suite", metavar="DIR", default=os.environ.get("CLOUDPICKLE_SUITE"),
        help="checkout of cloudpickle whose own tests are run on fastcap (default: $CLOUDPICKLE_SUITE)",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "kinds(condition): run for the kinds of the corpus that meet the condition")
    settings.load_profile("long" if config.getoption("--long") else "short")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--long"):
        return
    for item in items:
        if item.get_closest_marker("long"):
            item.add_marker(pytest.mark.skip(reason="takes minutes: run with --long"))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that asks for ``kind`` runs for every kind of the corpus, one that asks for ``failing`` for every failure.

    The marker ``kinds`` narrows the choice. Kinds whose library is missing are skipped with the reason.
    """
    if "kind" in metafunc.fixturenames:
        marker = metafunc.definition.get_closest_marker("kinds")
        metafunc.parametrize(
            "kind",
            [
                pytest.param(
                    entry, id=entry.name, marks=[pytest.mark.skip(reason=entry.missing)] if entry.missing else []
                )
                for entry in corpus.KINDS.values()
                if marker is None or marker.args[0](entry)
            ],
        )
    if "failing" in metafunc.fixturenames:
        metafunc.parametrize("failing", [pytest.param(entry, id=name) for name, entry in corpus.FAILING.items()])


@pytest.fixture
def long_run(request: pytest.FixtureRequest) -> bool:
    """Whether the suite runs with --long."""
    return bool(request.config.getoption("--long"))


@pytest.fixture(scope="session")
def corpus_payloads() -> list[corpus.Payload]:
    """Every payload of the corpus that can be made here, and the raw streams; made once."""
    return [*corpus.payloads(), *corpus.raw_streams()]
