"""Where slimmed parts go: what a store is, and what stores share.

A store takes an object out of a payload and gives back a reduce value, which is pickled in the object's place. So the
payload stays an ordinary pickle: ``pickle.loads`` calls what the store said, and gets the object. Stores that fastcap
brings along: ``RayStore`` (Ray's object store) and ``DirectoryStore`` (files).
"""

from __future__ import annotations

import importlib
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

Value = TypeVar("Value")
ReduceValue = tuple[Callable[..., Any], tuple[Any, ...]]
"""``(callable, arguments)``: loading the payload calls it, and takes the result for the object."""


@dataclass(frozen=True, slots=True)
class PartInfo:
    """What is known of an object that goes to a store, for reports and messages."""

    path: str  # where it is in the payload, as in reports: ``train<closure self>.data``
    type: str  # as in reports: ``ndarray``
    what: str  # a phrase: ``ndarray float64 (104857600,)``
    size: int  # bytes that it takes in the payload
    temporary: bool  # a reducer has made it for this dump; it dies with the dump, and the next dump has another one


class Store(Protocol):
    """What `fastcap.dumps` takes as ``store``.

    A store with a true attribute ``split`` gets the smallest parts that are big enough, others the biggest: of a dict
    of big arrays each array, or else the whole dict.
    """

    def put(self, obj: Any, info: PartInfo, /) -> ReduceValue | None:
        """Keep an object, for as long as the payload may be loaded, and say how to get it back; None leaves it in.

        Called once per object and dump. A store that keeps objects beyond one dump can look them up in a `LiveTable`,
        so that each goes there once however often it is pickled; an object that has been changed in the meantime then
        comes back as it was. Whatever this raises ends the dump.
        """
        ...


class LiveTable(Generic[Value]):
    """What a store knows of objects that it has met, by their identity, while they live.

    An object that can be referred to weakly is forgotten when it dies. Others (lists, dicts, tuples, bytes, strings)
    are kept alive, since their ids might be used again, until `discard` or `clear`. Safe to use from any thread.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a dying object may call back in the midst of anything
        self._entries: dict[int, tuple[Callable[[], Any], Value]] = {}  # id -> (gives the object or None, value)

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, obj: Any) -> Value | None:
        """What was set for this very object, else None."""
        with self._lock:
            entry = self._entries.get(id(obj))
            return entry[1] if entry is not None and entry[0]() is obj else None

    def set(self, obj: Any, value: Value) -> None:
        """Remember a value for an object."""
        key = id(obj)
        table = weakref.ref(self)

        def forget(reference: Any) -> None:
            own = table()
            if own is not None:
                own._forget(key, reference)

        holder: Callable[[], Any]
        try:
            holder = weakref.ref(obj, forget)
        except TypeError:

            def holder() -> Any:
                return obj

        with self._lock:
            self._entries[key] = (holder, value)

    def discard(self, obj: Any) -> None:
        """Forget an object."""
        with self._lock:
            entry = self._entries.get(id(obj))
            if entry is not None and entry[0]() is obj:
                del self._entries[id(obj)]

    def clear(self) -> None:
        """Forget all objects."""
        with self._lock:
            entries, self._entries = self._entries, {}
        entries.clear()  # outside of the lock: objects die here

    def values(self) -> list[Value]:
        """The values of all objects that live."""
        with self._lock:
            return [value for _, value in self._entries.values()]

    def _forget(self, key: int, reference: Any) -> None:
        with self._lock:
            entry = self._entries.get(key)
            if entry is not None and entry[0] is reference:
                del self._entries[key]


_ELSEWHERE = {"DirectoryStore": "fastcap.saving", "RayStore": "fastcap.ray"}


def __getattr__(name: str) -> Any:
    if name not in _ELSEWHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_ELSEWHERE[name]), name)
