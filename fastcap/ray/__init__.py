"""Ray: what is oversized in an export is named, or travels through the object store.

``fastcap.ray.install()`` is all there is to call. From then on

- Ray's errors and warnings about sizes, and about what cannot be pickled, end with fastcap's verdict: which object it
  is, where it was captured, how big it is and what to write instead. Exceptions keep their types.
- what a remote function, an actor class, a trainable of Tune or Train, a deployment of Serve or a worker's setup hook
  drags along goes to Ray's object store, if it is pure data of at least ``min_size``, and comes back where the
  definition is loaded. Workers need no fastcap. Nothing else is touched: files that Ray writes stay self-contained.
- ``ray.cloudpickle`` pickles natively.

This package is the only one of fastcap that imports Ray.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import ray

from fastcap.pickling import install as install_native
from fastcap.pickling import uninstall as uninstall_native
from fastcap.ray import explaining
from fastcap.ray.exports import Exporter, Settings
from fastcap.ray.hooks import Exchange, check_hooks
from fastcap.ray.lean import with_captures
from fastcap.ray.parts import FLAVOR, SHELF, Predicate, RayStore
from fastcap.ray.reporting import Entry, RayReport, report
from fastcap.ray.restoring import DeadPart, restore_trainer, restore_tuner
from fastcap.report import as_size

__all__ = [
    "DeadPart",
    "Entry",
    "RayReport",
    "RayStore",
    "install",
    "installed",
    "report",
    "restore_trainer",
    "restore_tuner",
    "setup_worker",
    "uninstall",
    "with_captures",
    "worker_process_setup_hook",
]


class _Installation:
    """What `install` has changed in Ray."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.exporter = Exporter(settings)
        self.exchange = Exchange(_stand_ins(self.exporter))
        if settings.slim:
            ray._private.worker._post_init_hooks.insert(0, self.exporter.slim_unflushed)
        if settings.native:
            install_native(FLAVOR)

    def undo(self) -> None:
        if self.settings.native:
            uninstall_native(FLAVOR)
        if self.exporter.slim_unflushed in ray._private.worker._post_init_hooks:
            ray._private.worker._post_init_hooks.remove(self.exporter.slim_unflushed)
        self.exchange.undo()
        self.exporter.close()


def _stand_ins(exporter: Exporter) -> dict[str, Callable[[Any], Any]]:
    """By the key of a hook, what makes the stand-in from Ray's own."""
    manager, actors = "ray._private.function_manager", "ray.air.execution._internal.actor_manager"
    found: dict[str, Callable[[Any], Any]] = {}
    if exporter.settings.slim:
        found |= {
            "ray.remote_function:pickle_dumps": exporter.pickle_dumps,
            f"{manager}:pickle_dumps": exporter.pickle_dumps,
            f"{manager}:FunctionActorManager.export": exporter.export,
            "ray.actor:ActorClass._remote": exporter.create_actor,
            "ray.remote_function:RemoteFunction.__getstate__": exporter.getstate,
            "ray.tune.registry:pickle": exporter.registry_pickle,
            "ray.tune.impl.tuner_internal:pickle": exporter.tuner_pickle,
            "ray.tune.impl.tuner_internal:TunerInternal._validate_trainable": exporter.validate_trainable,
            "ray.serve._private.config:pickle_dumps": exporter.serve_dumps,
        }
    if exporter.settings.slim or exporter.settings.explain:
        found["ray.tune.registry:_Registry.register"] = exporter.register
    if exporter.settings.explain:
        found |= {
            f"{manager}:check_oversized_function": explaining.explain_size,
            "ray.util.client.common:check_oversized_function": explaining.explain_size,
            "ray._private.utils:push_error_to_driver": explaining.explain_warning,
            f"{actors}:RayActorManager.schedule_actor_task": explaining.explain_lost_actor,
            "ray._common.serialization:inspect_serializability": explaining.explain_unpicklable,
            "ray.util:inspect_serializability": explaining.explain_unpicklable,
            "ray.tune.impl.tuner_internal:inspect_serializability": explaining.explain_unpicklable,
        }
    return found


_current: _Installation | None = None
_lock = threading.RLock()


def install(
    min_size: int | str = "1 MiB",
    *,
    explain: bool = True,
    slim: bool = True,
    native: bool = True,
    writable: bool = False,
    only: Predicate | None = None,
    skip: Predicate | None = None,
) -> None:
    """Stand in for Ray's exports in this process, until `uninstall`; a second call changes the settings.

    Parts of an exported definition that take at least ``min_size`` (bytes, or such as ``"1 MiB"``) and are pure data go
    to the object store, once each, and come back as from ``ray.get``: arrays read-only and without a copy, unless
    ``writable``. ``only`` and ``skip`` choose among them: they get the object and a `fastcap.stores.PartInfo`
    (``path``, ``type``, ``what``, ``size``). ``slim=False`` leaves exports as they are, ``explain=False`` Ray's
    messages, ``native=False`` the pickling. Can be called before or after ``ray.init`` and any import of Ray's.

    Raises `fastcap.errors.UnknownRay`, with nothing changed, if Ray is not built as fastcap expects; ValueError or
    TypeError for a ``min_size`` that is no size.
    """
    global _current
    settings = Settings(as_size(min_size), explain, slim, native, writable, only, skip)
    with _lock:
        if _current is not None and _current.settings == settings:
            return
        check_hooks()
        if _current is not None:
            _current.undo()
        _current = _Installation(settings)


def uninstall() -> None:
    """Give Ray its own functions back, and let go of all parts.

    Functions and actor classes that have been exported with parts are exported anew, whole, when they are used next.
    What is running goes on; what is pending, or a restart of an actor, may find its parts gone, and says so.
    """
    global _current
    with _lock:
        if _current is not None:
            _current.undo()
            _current = None
        SHELF.clear()


@contextlib.contextmanager
def installed(min_size: int | str = "1 MiB", **settings: Any) -> Iterator[None]:
    """``with fastcap.ray.installed(): ...`` -- `install` on entry; on exit what was before, `uninstall` if nothing."""
    with _lock:
        before = _current
        install(min_size, **settings)
    try:
        yield
    finally:
        _return_to(before)


def _return_to(before: _Installation | None) -> None:
    if before is None:
        uninstall()
        return
    settings = before.settings
    install(
        settings.min_size, explain=settings.explain, slim=settings.slim, native=settings.native,
        writable=settings.writable, only=settings.only, skip=settings.skip,
    )  # fmt: skip


# ---- workers -----------------------------------------------------------------------------------------------------


def setup_worker() -> None:
    """`install` in a worker: ``ray.init(runtime_env={"worker_process_setup_hook": "fastcap.ray.setup_worker"})``."""
    install()


def worker_process_setup_hook(min_size: int | str = "1 MiB", **settings: Any) -> Callable[[], None]:
    """A setup hook that calls `install` in each worker, so that tasks and actors that start others slim them, too.

    ``ray.init(runtime_env={"worker_process_setup_hook": fastcap.ray.worker_process_setup_hook("10 MiB")})``. The
    workers need fastcap; without the hook they do not.
    """
    as_size(min_size)
    Settings(**settings)  # TypeError for what is no setting

    def set_up_fastcap() -> None:
        import fastcap.ray

        fastcap.ray.install(min_size, **settings)

    set_up_fastcap.__module__ = "__main__"  # by value: its closure has the settings
    return set_up_fastcap
