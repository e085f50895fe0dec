"""Ray's own words about sizes and pickling, with fastcap's verdict after them.

Nothing is done until Ray says something.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any, Final

import fastcap
from fastcap.errors import FastcapError
from fastcap.render.text import render_text
from fastcap.report import Report

logger = logging.getLogger("fastcap.ray")

_TITLE: Final = "fastcap on what is in it:"
_LOST_ACTOR: Final = "Tracked actor is not managed"  # how Tune ends after an actor class was too large
_pending = threading.local()  # .payload: what Ray is about to warn of, in this thread


def verdict(report: Report) -> str:
    """What a report says, to come after a message of Ray's."""
    return f"\n\n{_TITLE}\n{render_text(report, brief=True).rstrip()}"


def verdict_on_payload(payload: bytes) -> str:
    """On a payload that is too large; empty if it cannot be read."""
    try:
        return verdict(fastcap.scan(payload))
    except (FastcapError, MemoryError) as error:
        logger.debug("no verdict: %s", error)
        return ""


def verdict_on_object(obj: object) -> str:
    """On an object that cannot be pickled; empty if it can."""
    try:
        report = fastcap.analyze(obj, flavor="ray.cloudpickle")
        broken = [row for row in report.findings if row.code.startswith("FC1")]
        return verdict(report) if broken else ""
    except Exception as error:  # an object that does anything must not hide Ray's own error
        logger.debug("no verdict: %s", error)
        return ""


def append(error: BaseException, text: str) -> None:
    """Add to the message of an exception, which stays the object that it is."""
    if not text or _TITLE in str(error):
        return
    if error.args and isinstance(error.args[0], str):
        error.args = (error.args[0] + text, *error.args[1:])
    if text not in str(error):  # its __str__ does not show its arguments
        error.__notes__ = [*getattr(error, "__notes__", ()), text.strip()]  # type: ignore[attr-defined]


@contextlib.contextmanager
def _warning_of(payload: bytes) -> Iterator[None]:
    before = getattr(_pending, "payload", None)
    _pending.payload = payload
    try:
        yield
    finally:
        _pending.payload = before


# ---- what stands in for Ray's functions --------------------------------------------------------------------------


def explain_size(own: Callable[..., None]) -> Callable[..., None]:
    """For ``check_oversized_function``."""

    @functools.wraps(own)
    def check_oversized_function(pickled: bytes, name: str, obj_type: str, worker: Any) -> None:
        with _warning_of(pickled):
            try:
                own(pickled, name, obj_type, worker)
            except ValueError as error:
                append(error, verdict_on_payload(pickled))
                raise

    return check_oversized_function


def explain_warning(own: Callable[..., None]) -> Callable[..., None]:
    """For ``push_error_to_driver``: the warnings that `explain_size` gives rise to."""

    @functools.wraps(own)
    def push_error_to_driver(worker: Any, error_type: str, message: str, job_id: Any = None) -> None:
        payload = getattr(_pending, "payload", None)
        if payload is not None:
            message += verdict_on_payload(payload)
        own(worker, error_type, message, job_id)

    return push_error_to_driver


def explain_lost_actor(own: Callable[..., Any]) -> Callable[..., Any]:
    """For ``RayActorManager.schedule_actor_task``: the reason is in the error that came before."""

    @functools.wraps(own)
    def schedule_actor_task(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return own(self, *args, **kwargs)
        except ValueError as error:
            if _LOST_ACTOR in str(error):
                append(error, _earlier_message(error))
            raise

    return schedule_actor_task


def _earlier_message(error: BaseException) -> str:
    """The message with a verdict of an exception that this one came out of."""
    earlier = error.__cause__ or error.__context__
    seen = {id(error)}
    while earlier is not None and id(earlier) not in seen:
        if _TITLE in str(earlier):
            return f"\n\nIt was never started: {earlier}"
        seen.add(id(earlier))
        earlier = earlier.__cause__ or earlier.__context__
    return ""


def explain_unpicklable(own: Callable[..., Any]) -> Callable[..., Any]:
    """For ``inspect_serializability``, whose text goes into the errors of all of Ray's exports and puts."""

    @functools.wraps(own)
    def inspect_serializability(base_obj: Any, *args: Any, **kwargs: Any) -> Any:
        result = own(base_obj, *args, **kwargs)
        text = verdict_on_object(base_obj)
        if text:
            print(text.lstrip("\n"), file=kwargs.get("print_file", args[2] if len(args) > 2 else None))
        return result

    return inspect_serializability
