"""Parts in Ray's object store: each is put once, fetched where a definition is loaded, and held while that can be.

A part is known by its object, by the copies of it that this process has fetched (Ray Tune pickles what it has unpickled
before), and, if a reducer makes it anew for each dump, by its content. An object that has changed since it was put is
put again.

Ray keeps an object while the process that has put it refers to it. So this process refers to it, as long as one of the
definitions that came with it is there: a function or class until it dies and nothing that it has started is pending,
what Tune has registered until something else is registered under its name. What can be used without this process
knowing (`Shelf.seal`) is held until Ray is shut down.
"""

from __future__ import annotations

import builtins
import copy
import hashlib
import logging
import os
import pickle
import socket
import threading
import types
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Final

import numpy
import ray
from ray.exceptions import ObjectStoreFullError, OutOfDiskError

import fastcap
from fastcap._native.digest import digest
from fastcap.errors import FastcapError
from fastcap.report import format_size
from fastcap.stores import LiveTable, PartInfo, ReduceValue

logger = logging.getLogger("fastcap.ray")

FLAVOR: Final = "ray.cloudpickle"
_BLOCK: Final = 1 << 21  # words of 8 bytes that are compared at once
_UNCHANGEABLE: Final = frozenset({bytes, str})
_ATOMS: Final = frozenset({bool, bytes, complex, float, int, str, type(None), type(...)})


# ---- the worker's side -------------------------------------------------------------------------------------------


def _fetch(reference: Any, part: str, origin: str, share: bool, writable: bool) -> Any:
    # Runs wherever a definition is loaded, and travels with it: it must need nothing but Ray.
    import sys
    import weakref

    import ray

    key = reference.binary()
    own = sys.modules.get("fastcap.ray.parts")  # only where fastcap is in use itself
    if own is not None:
        known = own.SHELF.fetched(key)
        if known is not None and not writable:
            return known
    shared = ray.__dict__.get("_fastcap_parts")
    if shared is None:
        shared = ray.__dict__.setdefault("_fastcap_parts", weakref.WeakValueDictionary())
    value = shared.get(key) if share else None
    if value is None:
        try:
            value = ray.get(reference)
        except ray.exceptions.RayError as error:
            raise RuntimeError(
                f"{part} is not in Ray's object store any more ({type(error).__name__}). fastcap had put it there when "
                f"{origin}, to keep it out of Ray's function table; it is gone if that process has ended, has called "
                "fastcap.ray.uninstall() or ray.shutdown(), or if the only node with a copy is lost. To get it back, "
                "export the definition again from a running driver: make the function, the actor class or the Tuner "
                "anew. What has to outlive its driver should be an actor with lifetime='detached' created under "
                "fastcap.ray.install(), or load its data itself"
            ) from error
        if writable:
            import copy

            value = copy.deepcopy(value)
        elif share:
            shared[key] = value
    if own is not None:
        own.SHELF.note_fetched(reference, value, part, writable)
    return value


def _by_value(function: types.FunctionType) -> Callable[..., Any]:
    """The function as one that pickles by value: of a module that no worker has."""
    made = types.FunctionType(function.__code__, {"__builtins__": builtins}, "fastcap_part")
    made.__qualname__, made.__module__ = "fastcap_part", "__main__"
    return made


fetch_part: Final = _by_value(_fetch)  # type: ignore[arg-type]


class _Reference:
    """Pickles as an object reference, and does not pin the object for good, as Ray does with those in functions."""

    __slots__ = ("reference",)

    def __init__(self, reference: Any) -> None:
        self.reference = reference

    def __reduce__(self) -> Any:
        context = global_worker().get_serialization_context()
        in_band = context.is_in_band_serialization()
        contained = context.get_and_clear_contained_object_refs()
        context.set_in_band_serialization()
        try:
            return ray.cloudpickle.CloudPickler.dispatch[ray.ObjectRef](self.reference)
        finally:
            if not in_band:
                context.set_out_of_band_serialization()
            context.get_and_clear_contained_object_refs()
            for other in contained:
                context._thread_local.object_refs.add(other)


# ---- what is where -----------------------------------------------------------------------------------------------


class Part:
    """An object that was put."""

    __slots__ = (
        "digest", "exports", "fetched", "holders", "info", "keeper", "kept", "name", "reference", "share", "where",
    )  # fmt: skip

    def __init__(self, reference: Any, info: PartInfo, name: str, where: str, share: bool, keeper: bool) -> None:
        self.reference = reference  # None once it is let go of
        self.info = info
        self.name = name  # of the definition that it was first exported with
        self.where = where
        self.share = share  # whether all who load it in one process may get the same object
        self.keeper = keeper  # whether an actor owns it that outlives this process
        self.digest = b""  # of its content, for objects that are made anew for each dump
        self.exports = 0
        self.holders = 0  # definitions
        self.kept: list[Any] = []  # objects that cannot be referred to weakly, and so live as long as the part
        self.fetched: Callable[[], Any] | None = None  # the read-only object that this process has got, if it lives

    def reduce(self, writable: bool) -> ReduceValue:
        """What is pickled in the place of the object."""
        text = f"{self.info.path} ({self.info.what}, {format_size(self.info.size)})"
        origin = f"{self.name} was exported by process {os.getpid()} on {socket.gethostname()}"
        return fetch_part, (_Reference(self.reference), text, origin, self.share and not writable, writable)


class Definition:
    """Something exported, and the parts that whoever loads it will ask for."""

    __slots__ = ("key", "name", "parts", "pinned", "reference", "tasks")

    def __init__(self, key: Any, name: str) -> None:
        self.key = key
        self.name = name
        self.parts: dict[Part, None] = {}
        self.reference: Any = None  # weak, to what is exported
        self.pinned = False  # held until Ray is shut down
        self.tasks: set[Any] = set()  # the tasks (a driver is one, too) that have exported it


class Shelf:
    """All parts of this process and its current cluster. Safe to use from any thread."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._session: Any = None
        self._known: LiveTable[Part] = LiveTable()
        self._parts: dict[bytes, Part] = {}  # by the id of the reference
        self._contents: dict[bytes, Part] = {}  # by digest
        self._definitions: dict[Any, Definition] = {}
        self._retired: list[Definition] = []  # dead, but maybe still asked for

    # ---- putting

    def put(self, obj: Any, info: PartInfo, name: str, *, keep: Keep | None = None) -> Part:
        """The part that holds an object as it is now.

        Raises what `ray.put` raises, and FastcapError where there is no object store.
        """
        if not global_worker().connected:
            raise FastcapError(
                "there is no object store: call ray.init() before"
                + (" (not under Ray Client, whose objects are on the other side)" if ray.is_initialized() else "")
            )
        with self._lock:
            self._enter_session()
            part, content = self._find(obj, info, keep is not None)
            if part is None:
                reference, where = ray.put(obj), _whereabouts()
                if keep is not None:
                    reference, where = keep(reference)
                part = Part(reference, info, name, where, _may_share(obj), keep is not None)
                self._parts[reference.binary()] = part
                if content:
                    part.digest = content
                    self._contents[content] = part
                else:
                    self._remember(obj, part)
            part.exports += 1
            return part

    def _find(self, obj: Any, info: PartInfo, kept: bool) -> tuple[Part | None, bytes]:
        """The part of an object, if there is one that does; and the digest of one that is made anew for each dump.

        What outlives this process is Serve's above all, which copies what it is given.
        """
        if info.temporary or kept:
            content = _digest(obj)
            part = self._contents.get(content)
            return (part if _serves(part, kept) else None), content
        part = self._known.get(obj)
        if part is None or not _serves(part, kept):
            return None, b""
        if part.fetched is not None and part.fetched() is obj:
            return part, b""
        return (part if type(obj) in _UNCHANGEABLE or _is_unchanged(obj, part.reference) else None), b""

    def _remember(self, obj: Any, part: Part) -> None:
        self._known.set(obj, part)
        try:
            weakref.ref(obj)
        except TypeError:
            part.kept.append(obj)

    # ---- fetching

    def fetched(self, key: bytes) -> Any:
        """What this process has fetched of a part before, None if nothing."""
        with self._lock:
            part = self._parts.get(key)
            return part.fetched() if part is not None and part.fetched is not None else None

    def note_fetched(self, reference: Any, value: Any, text: str, writable: bool) -> None:
        """Know a fetched object again when it is exported."""
        with self._lock:
            self._enter_session()
            part = self._parts.get(reference.binary())
            try:
                holder: Callable[[], Any] = weakref.ref(value)
            except TypeError:
                if part is None or writable:
                    return  # it would have to be kept alive for good, or as long as others like it

                def holder() -> Any:
                    return value

            if part is None:
                path, _, what = text.partition(" (")
                info = PartInfo(path, type(value).__name__, what.rpartition(", ")[0], 0, False)
                part = Part(reference, info, path, "fetched from another process", _may_share(value), False)
                self._parts[reference.binary()] = part
            if not writable:
                part.fetched = holder
            self._remember(value, part)

    # ---- holding

    def hold(self, key: Any, obj: Any, name: str, parts: Iterable[Part], *, replace: bool = False) -> None:
        """Hold parts as long as a definition can be used: as long as ``obj`` lives, or for good if that is None."""
        with self._lock:
            self._enter_session()
            definition = self._definitions.get(key)
            if definition is not None and definition.reference is not None and definition.reference() is not obj:
                self._retire(definition)  # the key is an id that is used again
                definition = None
            parts = list(parts)
            if definition is None and not parts:
                return
            if definition is None:
                definition = self._definitions[key] = Definition(key, name)
                if obj is not None:
                    definition.reference = weakref.ref(obj, lambda _: self._died(key))
            before, definition.parts = definition.parts, {} if replace else definition.parts
            for part in parts:
                if part not in definition.parts:
                    definition.parts[part] = None
                    part.holders += 1
            if replace:
                self._drop(before)
            definition.tasks.add(global_worker().current_task_id)
            self.sweep()

    def parts_of(self, key: Any, obj: Any) -> list[Part]:
        """The parts that a definition is held with."""
        with self._lock:
            definition = self._definitions.get(key)
            if definition is None or (definition.reference is not None and definition.reference() is not obj):
                return []
            return list(definition.parts)

    def seal(self, key: Any) -> None:
        """Hold a definition until Ray is shut down: what uses it need not be known here."""
        with self._lock:
            definition = self._definitions.get(key)
            if definition is not None:
                definition.pinned = True

    def forget(self, key: Any) -> None:
        """Hold no parts for a definition any more, whether it can be used or not."""
        with self._lock:
            definition = self._definitions.pop(key, None)
            if definition is not None:
                self._drop(definition.parts)

    def _died(self, key: Any) -> None:
        # Called in the midst of anything: take the lock only if nobody has it.
        if self._lock.acquire(blocking=False):
            try:
                definition = self._definitions.get(key)
                if definition is not None and definition.reference() is None:
                    self._retire(definition)
                    self.sweep()
            finally:
                self._lock.release()

    def _retire(self, definition: Definition) -> None:
        if self._definitions.get(definition.key) is definition:
            del self._definitions[definition.key]
        self._retired.append(definition)

    def sweep(self) -> None:
        """Let go of the parts of definitions that are dead and have nothing pending."""
        with self._lock:
            for definition in list(self._definitions.values()):
                if definition.reference is not None and definition.reference() is None:
                    self._retire(definition)
            dead = [definition for definition in self._retired if not definition.pinned]
            if not dead or not _is_quiet(set().union(*(definition.tasks for definition in dead))):
                return
            self._retired = [definition for definition in self._retired if definition.pinned]
            for definition in dead:
                self._drop(definition.parts)

    def _drop(self, parts: Iterable[Part]) -> None:
        for part in parts:
            part.holders -= 1
            self.discard_unheld((part,))

    def discard_unheld(self, parts: Iterable[Part]) -> None:
        """Let go of those parts that no definition holds."""
        with self._lock:
            for part in parts:
                if part.holders <= 0 and part.reference is not None:
                    self._parts.pop(part.reference.binary(), None)
                    self._let_go(part)

    def _let_go(self, part: Part) -> None:
        for obj in part.kept:
            self._known.discard(obj)
        part.kept.clear()
        self._contents.pop(part.digest, None)
        part.reference = part.fetched = None

    def clear(self) -> None:
        """Let go of everything."""
        with self._lock:
            parts = list(self._parts.values())
            for table in (self._known, self._parts, self._contents, self._definitions, self._retired):
                table.clear()
            for part in parts:
                self._let_go(part)

    def _enter_session(self) -> None:
        """Forget the parts of another cluster or job: Ray has been shut down in between."""
        session = current_session()
        if session is not None and session != self._session:
            if self._session is not None:
                self.clear()
            self._session = session

    # ---- telling

    def parts(self) -> list[Part]:
        """What this process holds in the cluster that it is connected to."""
        with self._lock:
            if current_session() != self._session:
                return []
            self.sweep()
            return [part for part in self._parts.values() if part.holders > 0]


Keep = Callable[[Any], tuple[Any, str]]
"""Takes a reference and gives another one, to a copy that somebody else owns, and a word about that owner."""

SHELF: Final = Shelf()


def global_worker() -> Any:
    """Ray's object for this process."""
    return ray._private.worker.global_worker


def current_session() -> Any:
    """Which cluster and job this process is connected to, None if to none."""
    worker = global_worker()
    return worker.current_cluster_and_job if worker.connected else None


def _serves(part: Part | None, kept: bool) -> bool:
    return part is not None and part.reference is not None and (part.keeper or not kept)


def _whereabouts() -> str:
    node = ray.get_runtime_context().get_node_id()
    return f"Ray's object store on node {node[:12]}, owned by process {os.getpid()}"


def _is_quiet(tasks: set[Any]) -> bool:
    """Whether nothing is pending that these tasks, or the current one, have started."""
    worker = global_worker()
    if not worker.connected:
        return False
    pending = worker.core_worker.get_pending_children_task_ids
    return not any(pending(task) for task in {*tasks, worker.current_task_id})


def _may_share(obj: Any) -> bool:
    """Whether everybody in a process may get one object: an array, which comes back read-only."""
    return type(obj) is numpy.ndarray and not obj.dtype.hasobject


# ---- the same as before? -----------------------------------------------------------------------------------------


def _pickled(obj: Any) -> tuple[bytes, list[memoryview]]:
    buffers: list[pickle.PickleBuffer] = []
    stream = fastcap.dumps(obj, 5, buffers.append, flavor=FLAVOR)
    return stream, [buffer.raw() for buffer in buffers]


def _is_unchanged(obj: Any, reference: Any) -> bool:
    """Whether an object still is what was put. In doubt it is not."""
    try:
        return _is_same(obj, ray.get(reference), {})
    except Exception:
        return False


def _is_same(one: Any, other: Any, met: dict[int, Any]) -> bool:
    """Whether two objects have the same content and sharing; ``met`` has the counterparts of objects by their ids."""
    kind = type(one)
    if kind is not type(other):
        return False
    if kind in _ATOMS:
        return bool(one == other) or repr(one) == repr(other)
    if id(one) in met:
        return met[id(one)] is other
    met[id(one)] = other
    if kind is numpy.ndarray and not one.dtype.hasobject:
        return (one.dtype, one.shape) == (other.dtype, other.shape) and _have_same_bytes(one, other)
    if kind in (list, tuple):
        return len(one) == len(other) and all(_is_same(a, b, met) for a, b in zip(one, other))
    if kind is dict:
        return len(one) == len(other) and all(
            _is_same(a, b, met) and _is_same(one[a], other[b], met) for a, b in zip(one, other)
        )
    if kind.__module__ == "torch" and kind.__name__ == "Tensor" and one.device.type == "cpu":
        return (
            (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride())
            and one.requires_grad == other.requires_grad
            and _have_same_bytes(one.detach().view(-1).numpy(), other.detach().view(-1).numpy())
        )
    package = kind.__module__.partition(".")[0]
    if package == "pyarrow" and hasattr(kind, "schema"):
        return bool(one.equals(other, check_metadata=True))
    if package == "pandas" and hasattr(kind, "axes") and hasattr(kind, "attrs"):
        names = [axis.names for axis in one.axes] == [axis.names for axis in other.axes]
        return names and _is_same(one.attrs, other.attrs, met) and bool(one.equals(other))
    # Arrays that come out of the store are read-only, which pickle writes down.
    (stream, buffers), (old_stream, old_buffers) = _pickled(one), _pickled(copy.deepcopy(other))
    return (
        stream == old_stream
        and len(buffers) == len(old_buffers)
        and all(
            _have_same_bytes(numpy.frombuffer(new, "u1"), numpy.frombuffer(old, "u1"))
            for new, old in zip(buffers, old_buffers)
        )
    )


def _have_same_bytes(one: Any, other: Any) -> bool:
    """Whether two arrays of one type and shape have the same bytes."""
    if one.strides == other.strides and one.flags.f_contiguous:
        one, other = one.T, other.T  # so that neither is copied
    a, b = (numpy.ascontiguousarray(array).reshape(-1).view(numpy.uint8) for array in (one, other))
    whole = len(a) & ~7
    words, old_words = a[:whole].view(numpy.uint64), b[:whole].view(numpy.uint64)
    return numpy.array_equal(a[whole:], b[whole:]) and all(
        numpy.array_equal(words[start : start + _BLOCK], old_words[start : start + _BLOCK])
        for start in range(0, len(words), _BLOCK)
    )


def _digest(obj: Any) -> bytes:
    """For objects of which each dump has another one; two with one digest pickle alike."""
    stream, buffers = _pickled(obj)
    found = hashlib.blake2b(stream, digest_size=32)
    for buffer in buffers:
        found.update(len(buffer).to_bytes(8, "little"))
        found.update(digest(buffer))
    return found.digest()


# ---- the store ---------------------------------------------------------------------------------------------------


class RayStore:
    """Ray's object store as a store for `fastcap.dumps`: ``fastcap.dumps(obj, store=RayStore())``.

    Parts come back as from ``ray.get``: arrays without a copy and read-only, one object for all who load the part in a
    process; with ``writable`` each gets a copy to write to. ``only`` and ``skip`` get ``(obj, info)``, the object and a
    `fastcap.stores.PartInfo`; what ``only`` says no to, or ``skip`` yes, stays in the payload. ``name`` says in reports
    and messages whose parts they are.

    The parts of a payload live as long as this process is connected to the cluster, or until `release`. When the object
    store and the disk are full, a part stays in the payload, with a warning.
    """

    def __init__(
        self,
        *,
        writable: bool = False,
        only: Predicate | None = None,
        skip: Predicate | None = None,
        name: str | None = None,
    ) -> None:
        self.writable = writable
        self.only = only
        self.skip = skip
        self.name = name
        self.keep: Keep | None = None  # set where what is exported outlives this process
        self._key: object | None = object()  # of the definition that its parts are held with
        self.parts: list[Part] = []

    def put(self, obj: Any, info: PartInfo, /) -> ReduceValue | None:
        """See `fastcap.stores.Store`; None leaves the object in the payload."""
        if (self.only is not None and not self.only(obj, info)) or (self.skip is not None and self.skip(obj, info)):
            return None
        name = self.name or info.path
        try:
            part = SHELF.put(obj, info, name, keep=self.keep)
        except (ObjectStoreFullError, OutOfDiskError) as error:
            logger.warning(
                "%s (%s) stays in the payload: there is no room for it in Ray's object store (%s)",
                info.path, format_size(info.size), type(error).__name__,
            )  # fmt: skip
            return None
        self.parts.append(part)
        if self._key is not None:
            SHELF.hold(self._key, None, name, (part,))
        return part.reduce(self.writable)

    def release(self) -> None:
        """Let go of the parts: payloads that refer to them cannot be loaded any more, unless others hold them."""
        SHELF.forget(self._key)
        SHELF.discard_unheld(self.parts)
        self.parts.clear()


class ExportStore(RayStore):
    """A store whose parts are held by the definition that is exported."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._key = None


Predicate = Callable[[Any, PartInfo], bool]


# ---- what outlives this process ----------------------------------------------------------------------------------

_KEEPER_NAME, _KEEPER_NAMESPACE = "parts", "fastcap"


def keep_beyond_driver(reference: Any) -> tuple[Any, str]:
    """Have a part copied by an actor that outlives this process, and so owns the copy. A `Keep`."""

    class Keeper:
        def __init__(self) -> None:
            self.kept: list[Any] = []

        def keep(self, references: list[Any]) -> list[Any]:
            self.kept.append(ray.put(ray.get(references[0])))
            return self.kept[-1:]

    Keeper.__module__ = "__main__"  # by value
    remote: Any = ray.remote(num_cpus=0)
    actor = (
        remote(Keeper)
        .options(name=_KEEPER_NAME, namespace=_KEEPER_NAMESPACE, lifetime="detached", get_if_exists=True)
        .remote()
    )
    (copied,) = ray.get(actor.keep.remote([reference]))
    return copied, f"Ray's object store, owned by the detached actor {_KEEPER_NAME!r} (namespace {_KEEPER_NAMESPACE!r})"
