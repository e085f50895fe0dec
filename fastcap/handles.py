"""Finds Ray's actor handles and object references in a pickle; Ray is not needed for that, nor a cluster."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fastcap.explain import Call, Explainer
from fastcap.inert import CALLS, At
from fastcap.placeholders import Unrestorable


@dataclass(frozen=True, slots=True)
class Handle:
    """A handle or object reference of Ray in a pickle."""

    node: int  # of the graph
    path: str
    kind: str  # "ActorHandle" or "ObjectRef"
    id: str  # in hex; "" if the stream does not have it in the open
    owner: bytes  # tells apart equal ids of different clusters
    what: str  # "actor of class Tracker", "object"

    @property
    def identity(self) -> tuple[str, str, bytes]:
        """Equal for what is the same actor or object."""
        return self.kind, self.id, self.owner

    def placeholder(self) -> Unrestorable:
        """What stands for it."""
        return Unrestorable(self.path, self.kind, self.id, f"the {self.what} belongs to the cluster it was pickled in")


def find_handles(explainer: Explainer, apart_from: tuple[str, ...] = ()) -> list[Handle]:
    """All handles and object references of Ray in a pickle, in stream order; Ray is not needed.

    Their paths do not lead through those of ``apart_from``, if they have others.
    """
    kinds = ("ActorHandle", "ObjectRef")
    wanted = [key for key, op, example in explainer.kinds if op in CALLS and explainer.subject(example).type in kinds]
    found = explainer.graph.select_kinds(wanted) if wanted else []
    return [_read_handle(explainer, index, apart_from) for index in found]


def is_below(path: str, above: str) -> bool:
    """Whether a path is that of an object, or leads through it."""
    return path.startswith(above) and path[len(above) : len(above) + 1] in ("", ".", "[", "<")


def _read_handle(explainer: Explainer, index: int, apart_from: tuple[str, ...]) -> Handle:
    path = explainer.path(index) or "(too deep for a path)"
    if any(is_below(path, each) for each in apart_from):
        others = explainer.holders(index, inherited=True)
        path = next((other for other in others if not any(is_below(other, each) for each in apart_from)), path)
    kind = explainer.subject(index).type
    args = Call(explainer, index).args
    first, third = (_bytes_at(explainer, args, place) for place in (0, 2))
    if kind == "ObjectRef":
        return Handle(index, path, kind, first.hex(), third, "object")
    # The fields of Ray's message ActorHandle (src/ray/protobuf/core_worker.proto): 1 is the actor's id, 3 the address
    # of its owner, 6 a function descriptor, of which 2 is that for Python, of which 2 is the class; 10 is its name.
    fields = _read_message(first)
    cls = _read_message(_read_message(fields.get(6, b"")).get(2, b"")).get(2, b"")
    name = fields.get(10, b"")
    what = f"actor of class {cls.decode('utf-8', 'replace')}" if cls else "actor"
    if name:
        what += f" named {name.decode('utf-8', 'replace')!r}"
    return Handle(index, path, kind, fields.get(1, b"").hex(), fields.get(3, b""), what)


def _bytes_at(explainer: Explainer, args: list[Any], place: int) -> bytes:
    value = args[place] if place < len(args) else None
    text = explainer.reader.text(value.index) if isinstance(value, At) else None
    return text.value if text is not None and isinstance(text.value, bytes) else b""


def _read_message(data: bytes) -> dict[int, bytes]:
    """The fields of a protobuf message that have a length, the first of each number, as far as it can be read."""
    found: dict[int, bytes] = {}
    at = 0
    while at < len(data):
        tag, at = _read_varint(data, at)
        number, wire = tag >> 3, tag & 7
        if wire == 0:
            _, at = _read_varint(data, at)
        elif wire == 2:
            size, at = _read_varint(data, at)
            if at + size > len(data):
                break
            found.setdefault(number, data[at : at + size])
            at += size
        elif wire in (1, 5):
            at += 8 if wire == 1 else 4
        else:
            break
    return found


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(data):
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            break
    return value, at
