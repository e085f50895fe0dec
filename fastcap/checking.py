"""`check`: an object's report, or an exception that says what is wrong with its payload."""

from __future__ import annotations

from fastcap.analysis import analyze
from fastcap.errors import FastcapError, NotPicklable, PayloadTooLarge
from fastcap.render import clean
from fastcap.render.text import render_text
from fastcap.report import Report, as_size, format_size


def check(
    obj: object,
    max_size: int | str | None = None,
    *,
    name: str | None = None,
    protocol: int | None = None,
    flavor: str = "cloudpickle",
) -> Report:
    """The report on an object that can be pickled into at most ``max_size``, a number of bytes or ``"10 MiB"``.

    Raises `fastcap.NotPicklable` if it cannot be pickled and `fastcap.PayloadTooLarge` if that takes more; both
    messages hold the verdict and the paths of what is to blame. The other arguments are those of `fastcap.analyze`.
    """
    limit = as_size(max_size) if max_size is not None else None
    analyze(None, protocol=protocol, flavor=flavor)  # raises what is wrong with these two: it is not the object's fault
    try:
        report = analyze(obj, name=name, protocol=protocol, flavor=flavor)
    except FastcapError:
        raise
    except Exception as error:
        raise NotPicklable(_describe(error, name or getattr(obj, "__name__", None))) from error
    broken = report.unpicklable
    if broken:
        parts = "one part of it" if len(broken) == 1 else f"{len(broken)} parts of it"
        verdict = f"{clean(report.target)} cannot be pickled, for {parts}"
        raise NotPicklable(f"{verdict}\n{render_text(report, brief=True)}", broken, report)
    if limit is not None and report.payload_size > limit:
        size = format_size(report.payload_size, exact=True)
        verdict = f"{clean(report.target)} pickles to {size}, more than max_size, {format_size(limit)}"
        shown = render_text(report.with_budget("max_size", limit, "fastcap.check"), brief=True)
        raise PayloadTooLarge(f"{verdict}\n{shown}", report.payload_size, limit, report)
    return report


def _describe(error: Exception, name: object) -> str:
    """One line for what a pickler raised, and where in the object it was, which the native pickler notes."""
    reason = clean(f"{type(error).__name__}: {error}")
    notes = [clean(note) for note in getattr(error, "__notes__", ()) if isinstance(note, str)]
    return "\n  ".join([f"{clean(name) if isinstance(name, str) else 'obj'} cannot be pickled: {reason}", *notes])
