"""Slimming where Ray exports a definition, and nowhere else: what Ray writes into files goes other ways.

Each function here makes a stand-in for one of Ray's (`fastcap.ray.hooks`). A definition that cannot be slimmed, for
whatever reason, is exported by Ray as ever.
"""

from __future__ import annotations

import functools
import logging
import pickle
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import ray

import fastcap
from fastcap.ray.explaining import append, verdict_on_object, verdict_on_payload
from fastcap.ray.parts import FLAVOR, SHELF, ExportStore, Predicate, global_worker, keep_beyond_driver

logger = logging.getLogger("fastcap.ray")


@dataclass(frozen=True, slots=True)
class Settings:
    """What `fastcap.ray.install` was asked for."""

    min_size: int | str = "1 MiB"
    explain: bool = True
    slim: bool = True
    native: bool = True
    writable: bool = False
    only: Predicate | None = None
    skip: Predicate | None = None


class _Exporting(threading.local):
    """What is being exported in this thread."""

    outlives = False  # whether it can be used after this process has ended
    actor_class: Any = None  # metadata of the actor class: Ray keeps classes themselves in a cache
    registering: tuple[Any, str, str] | None = None  # (registry, category, key) of Tune
    validating: Any = None  # what Tune pickles to see whether it can be pickled


class Exporter:
    """Slims what this process exports, until `close`."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.now = _Exporting()
        # What was registered with Tune before there was a cluster, to be pickled again when there is one.
        self.unflushed: dict[tuple[str, str], tuple[Any, Any]] = {}
        # What has been exported with parts, and so must be exported anew when those are let go of.
        self.functions: weakref.WeakSet[Any] = weakref.WeakSet()
        self.actor_classes: weakref.WeakSet[Any] = weakref.WeakSet()  # their metadata

    # ---- slimming

    def dumps(self, obj: Any, key: Any, holder: Any) -> bytes | None:
        """The slim pickle of a definition whose parts are held as long as ``holder`` lives, under ``key``.

        None if Ray should pickle it: without a cluster there is no store, and what cannot be pickled is Ray's to tell.
        """
        if not global_worker().connected:
            return None
        settings = self.settings
        name = self.now.registering[2] if self.now.registering else getattr(obj, "__name__", type(obj).__name__)
        store = ExportStore(writable=settings.writable, only=settings.only, skip=settings.skip, name=name)
        store.keep = keep_beyond_driver if self.now.outlives else None
        try:
            data = fastcap.dumps(obj, flavor=FLAVOR, store=store, min_size=settings.min_size)
        except Exception as error:
            SHELF.discard_unheld(store.parts)
            ordinary = isinstance(error, (TypeError, pickle.PicklingError, ray.exceptions.RayError))
            level = logging.INFO if ordinary else logging.WARNING
            logger.log(level, "%s is left to Ray, whole: %s: %s", name, type(error).__name__, error)
            return None
        SHELF.hold(key, holder, name, store.parts, replace=self.now.registering is not None)
        for part in store.parts:
            logger.info("%s: %s (%s bytes) is in %s", name, part.info.path, part.info.size, part.where)
        return data

    def pickle_dumps(self, own: Callable[[Any, str], bytes]) -> Callable[[Any, str], bytes]:
        """For ``pickle_dumps`` of remote functions, actor classes and setup hooks."""

        @functools.wraps(own)
        def pickle_dumps(obj: Any, error_msg: str) -> bytes:
            for_good = "worker_process_setup_hook" in error_msg  # workers run it as long as there is the job
            holder = obj if self.now.actor_class is None else self.now.actor_class
            data = self.dumps(obj, id(holder), None if for_good else holder)
            return own(obj, error_msg) if data is None else data

        return pickle_dumps

    # ---- remote functions

    def export(self, own: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
        """For ``FunctionActorManager.export``: which remote functions have parts."""

        @functools.wraps(own)
        def export(manager: Any, remote_function: Any) -> None:
            own(manager, remote_function)
            if self.has_parts(remote_function._function):
                self.functions.add(remote_function)

        return export

    def getstate(self, own: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """For ``RemoteFunction.__getstate__``: a copy elsewhere can be called when the original is dead."""

        @functools.wraps(own)
        def __getstate__(remote_function: Any) -> Any:
            SHELF.seal(id(remote_function._function))
            return own(remote_function)

        return __getstate__

    # ---- actors

    def create_actor(self, own: Callable[..., Any]) -> Callable[..., Any]:
        """For ``ActorClass._remote``: actors that are started later, or by others, need the parts of their class."""

        @functools.wraps(own)
        def _remote(actor_class: Any, args: Any = None, kwargs: Any = None, **options: Any) -> Any:
            meta = actor_class.__ray_metadata__
            detached = options.get("lifetime") == "detached"
            if detached and any(not part.keeper for part in SHELF.parts_of(id(meta), meta)):
                meta.last_export_cluster_and_job = None  # its parts must not die with this process: export it again
            before, self.now.actor_class = self.now.actor_class, meta
            try:
                with self.outliving(detached or self.now.outlives):
                    handle = own(actor_class, args, kwargs, **options)
            finally:
                self.now.actor_class = before
            if self.has_parts(meta):
                self.actor_classes.add(meta)
                if detached or options.get("max_restarts"):
                    SHELF.seal(id(meta))
            return handle

        return _remote

    @contextmanager
    def outliving(self, outlives: bool) -> Iterator[None]:
        """What is exported meanwhile has to work when this process has ended."""
        before, self.now.outlives = self.now.outlives, outlives
        try:
            yield
        finally:
            self.now.outlives = before

    def has_parts(self, obj: Any) -> bool:
        """Whether a definition was exported with parts."""
        return bool(SHELF.parts_of(id(obj), obj))

    # ---- Tune

    def registry_pickle(self, own: ModuleType) -> ModuleType:
        """For the module that ``ray.tune.registry`` pickles with."""

        def dumps_debug(obj: Any, *args: Any, **kwargs: Any) -> bytes:
            registering = self.now.registering
            if registering is None or args or kwargs:
                data: bytes | None = None
            else:
                registry, category, key = registering
                if not global_worker().connected:
                    self.unflushed[category, key] = (registry, obj)
                data = self.dumps(obj, ("tune", category, key), None)
            return own.dumps_debug(obj, *args, **kwargs) if data is None else data

        return _like(own, dumps_debug=dumps_debug)

    def register(self, own: Callable[..., None]) -> Callable[..., None]:
        """For ``_Registry.register``."""

        @functools.wraps(own)
        def register(registry: Any, category: str, key: str, value: Any) -> None:
            before, self.now.registering = self.now.registering, (registry, category, key)
            try:
                own(registry, category, key, value)
            except Exception as error:
                payload = registry._to_flush.get((category, key))
                if self.settings.explain:
                    broken = isinstance(error, (TypeError, pickle.PicklingError))
                    if broken:
                        append(error, verdict_on_object(value))
                    elif payload is not None:  # it was pickled, and would not go to the cluster
                        append(error, verdict_on_payload(payload))
                raise
            finally:
                self.now.registering = before

        return register

    def tuner_pickle(self, own: ModuleType) -> ModuleType:
        """For the module that ``ray.tune.impl.tuner_internal`` pickles with: a file, and to see whether that works."""

        def dumps(obj: Any, *args: Any, **kwargs: Any) -> bytes:
            if obj is not self.now.validating or obj is None or args or kwargs:
                data: bytes = own.dumps(obj, *args, **kwargs)
                return data
            fastcap.dump(obj, _Nowhere(), flavor=FLAVOR)  # the same, without holding what nobody looks at
            return b""

        return _like(own, dumps=dumps)

    def validate_trainable(self, own: Callable[..., None]) -> Callable[..., None]:
        """For ``TunerInternal._validate_trainable``."""

        @functools.wraps(own)
        def _validate_trainable(tuner: Any, trainable: Any, *args: Any, **kwargs: Any) -> None:
            before, self.now.validating = self.now.validating, trainable
            try:
                own(tuner, trainable, *args, **kwargs)
            finally:
                self.now.validating = before

        return _validate_trainable

    def slim_unflushed(self) -> None:
        """Pickle again what was registered before there was a cluster. Ray calls this when there is one."""
        unflushed, self.unflushed = self.unflushed, {}
        for (category, key), (registry, value) in unflushed.items():
            if (category, key) in registry._to_flush:
                self.now.registering = (registry, category, key)
                try:
                    data = self.dumps(value, ("tune", category, key), None)
                finally:
                    self.now.registering = None
                if data is not None:
                    registry._to_flush[category, key] = data

    # ---- Serve

    def serve_dumps(self, own: Callable[[Any, str], bytes]) -> Callable[[Any, str], bytes]:
        """For ``pickle_dumps`` of deployments: their controller starts replicas after this process has ended."""

        @functools.wraps(own)
        def pickle_dumps(obj: Any, error_msg: str) -> bytes:
            with self.outliving(True):
                data = self.dumps(obj, object(), None)
            return own(obj, error_msg) if data is None else data

        return pickle_dumps

    # ---- the end

    def close(self) -> None:
        """Have what was exported with parts exported anew when it is used next; the parts are not touched."""
        self.unflushed.clear()
        worker = global_worker()
        if not worker.connected:
            return
        for function in list(self.functions):
            _forget_export(worker, function)
        for meta in list(self.actor_classes):
            meta.last_export_cluster_and_job = None


def _like(module: ModuleType, **functions: Any) -> ModuleType:
    """A module that is like another one but for some functions."""
    made = ModuleType(module.__name__, module.__doc__)
    vars(made).update(functions, __getattr__=functools.partial(getattr, module))
    return made


class _Nowhere:
    """A file that keeps nothing."""

    def write(self, data: Any) -> None:
        pass


def _forget_export(worker: Any, function: Any) -> None:
    """Make Ray export a remote function anew; what is in its function table it would not overwrite."""
    from ray._private.function_manager import make_function_table_key
    from ray._private.ray_constants import KV_NAMESPACE_FUNCTION_TABLE

    function._last_export_cluster_and_job = None
    key = make_function_table_key(
        b"RemoteFunction", worker.current_job_id, function._function_descriptor.function_id.binary()
    )
    worker.gcs_client.internal_kv_del(key, False, KV_NAMESPACE_FUNCTION_TABLE)


