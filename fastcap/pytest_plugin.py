"""Budgets for payloads in tests: the marker ``limit_payload`` and the fixture ``payload``.

Everything else of fastcap is loaded when a test uses one of them.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from fastcap.config import Settings
    from fastcap.record import Dump, Recording
    from fastcap.report import Report

MARKER = "limit_payload"
_INI_LIMIT, _INI_FLAVOR = "fastcap_limit_payload", "fastcap_flavor"
_SHOWN = 3  # payloads of one test that are reported
_MARGIN = 4  # columns that pytest puts before a failure's text
_RAY = "ray.cloudpickle"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Two settings for pytest.ini, ``[tool.pytest.ini_options]`` and the like."""
    parser.addini(_INI_LIMIT, f"limit for the payloads of tests without @pytest.mark.{MARKER}", default="")
    parser.addini(_INI_FLAVOR, "copy of cloudpickle that the fixture `payload` pickles with", default="cloudpickle")


def pytest_configure(config: pytest.Config) -> None:
    """Make the marker known."""
    config.addinivalue_line(
        "markers",
        f'{MARKER}(size, *, objects=False): fail if the test pickles anything bigger than size, such as "1 MiB"; '
        "objects: also count what Ray writes to its object store",
    )


# ---- the marker


@dataclass(frozen=True, slots=True)
class _Budget:
    size: int
    objects: bool = False

    def covers(self, dump: Dump) -> bool:
        # Only what goes to the object store is pickled by Ray with a buffer callback; functions and classes are not.
        return self.objects or not (dump.flavor == _RAY and dump.has_buffer_callback)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Watch what a test with a limit pickles, and fail it afterwards."""
    budget = _budget_of(item)
    if budget is None:
        return (yield)
    from fastcap.record import recording

    with recording(budget.size) as found:
        try:
            result = yield
        except BaseException:
            text = _judge(item, budget, found)
            if text:
                item.add_report_section("call", MARKER, text)
            raise
    text = _judge(item, budget, found)
    if text:
        pytest.fail(text, pytrace=False)
    return result


def _budget_of(item: pytest.Item) -> _Budget | None:
    marker = item.get_closest_marker(MARKER)
    text = item.config.getini(_INI_LIMIT)
    if marker is None and not text:
        return None
    try:
        return _read_budget(text) if marker is None else _read_budget(*marker.args, **marker.kwargs)
    except TypeError:
        reason = 'write limit_payload("1 MiB") or limit_payload("1 MiB", objects=True)'
    except ValueError as error:
        reason = str(error)
    where = _INI_LIMIT if marker is None else f"@pytest.mark.{MARKER}"
    pytest.fail(f"{where}: {reason}", pytrace=False)


def _read_budget(size: int | str | None, *, objects: bool = False) -> _Budget | None:
    """What the marker says; a size of None takes a limit away that was set for the module or for all tests."""
    from fastcap.report import as_size

    return None if size is None else _Budget(as_size(size), objects)


def _judge(item: pytest.Item, budget: _Budget, found: Recording) -> str:
    """What is to be said against a test; nothing if it stayed within its budget."""
    from fastcap.report import format_size

    limit = format_size(budget.size)
    lines = []
    # In order: what is pickled first may be part of what comes next, as the bytes of a function in Ray's export of it.
    over = list(filter(budget.covers, found.dumps))
    if over:
        count = "a payload" if len(over) == 1 else f"{len(over)} payloads"
        lines.append(f"the test pickled {count} over its limit of {limit}")
    for dump in over[:_SHOWN]:
        size = format_size(dump.payload_size, exact=True)
        where = f" at {dump.where.removeprefix(f'{item.config.rootpath}/')}" if dump.where else ""
        lines.append(f"\n{size} pickled by {dump.flavor}{where}")
        if dump.report is not None:
            report = dump.report.with_budget(MARKER, budget.size, "the test")
            lines.append(_render(item.config, report))
    if len(over) > _SHOWN:
        lines.append(f"\n[{len(over) - _SHOWN} more]")
    lines.extend(
        f"the test imported {name}: what it pickled with that was not seen by {MARKER}. Import it before the test "
        "runs, at the top of its module or in conftest.py"
        for name in found.missed
    )
    return "\n".join(lines)


def _render(config: pytest.Config, report: Report) -> str:
    from fastcap.render.text import render_text

    width = config.get_terminal_writer().fullwidth - _MARGIN
    return render_text(report, width=width, base=str(config.rootpath), brief=True).rstrip("\n")


# ---- the fixture


class Payload:
    """Assertions about what an object pickles to. They return its report; a failure shows what is to blame.

    ``name`` is the root of the paths that are shown, ``flavor`` the copy of cloudpickle (default: the ini option
    ``fastcap_flavor``), ``protocol`` that of pickle.
    """

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    @cached_property
    def _settings(self) -> Settings:
        from fastcap.config import find_settings

        return find_settings(self._config.rootpath)

    def assert_under(self, obj: object, max_size: int | str | None = None, **options: Any) -> Report:
        """Fail if the object cannot be pickled or takes more than ``max_size``, in bytes or as ``"1 MiB"``.

        Without a size, the ``max-size`` of ``[tool.fastcap]`` in the project's pyproject.toml counts.
        """
        __tracebackhide__ = True
        limit = self._settings.max_size if max_size is None else max_size
        if limit is None:
            raise ValueError('give a size: payload.assert_under(obj, "1 MiB"), or set max-size in [tool.fastcap]')
        return self._check(obj, limit, options)

    def assert_picklable(self, obj: object, **options: Any) -> Report:
        """Fail if the object cannot be pickled."""
        __tracebackhide__ = True
        return self._check(obj, None, options)

    def assert_portable(self, obj: object, **options: Any) -> Report:
        """Fail if the object cannot be pickled, or not loaded in another process: on findings that are errors.

        Those that ``[tool.fastcap]`` ignores do not count.
        """
        __tracebackhide__ = True
        report = self._check(obj, None, options)
        details = report.details
        errors = tuple(row for row in details.findings if row.severity == "error" and self._settings.wants(row.code))
        if errors:
            shown = report.changed(make_details=lambda: replace(details, findings=errors))
            parts = "one part of it" if len(errors) == 1 else f"{len(errors)} parts of it"
            verdict = f"{report.target} will not work in another process, for {parts}"
            pytest.fail(f"{verdict}\n{_render(self._config, shown)}")
        return report

    def _check(self, obj: object, max_size: int | str | None, options: dict[str, Any]) -> Report:
        __tracebackhide__ = True
        from fastcap.checking import check
        from fastcap.errors import NotPicklable, PayloadTooLarge

        options.setdefault("flavor", self._config.getini(_INI_FLAVOR))
        try:
            return check(obj, max_size, **options)
        except (NotPicklable, PayloadTooLarge) as error:
            text = str(error)
        pytest.fail(text)


@pytest.fixture
def payload(request: pytest.FixtureRequest) -> Payload:
    """`Payload`: ``payload.assert_under(obj, "1 MiB")``, ``assert_picklable(obj)``, ``assert_portable(obj)``."""
    return Payload(request.config)
