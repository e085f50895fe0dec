"""Edits a pickle without loading it: parts are dropped or replaced by path, everything else is copied.

No class, module or cluster of the original is needed, for nothing is executed or imported. `edit` is the whole of it in
one call; `Editor` shows what would change before it writes.

What an edit means is what it would mean in memory:

- a member of a list, tuple, set or frozenset is dropped: it is gone, and those behind it move up;
- a dict entry or an attribute of an instance, a class or a function: it is gone;
- a closure variable, a global or a default of a function, an argument of a reducer, a field of a namedtuple, an element
  of an array: None takes its place, since there has to be something; what cannot even be None (the class of an
  instance, the object of a bound method) is refused;
- a part is replaced: another pickle takes its place.

A path names a *place*. Where an object is in several places, the others keep it: its definition moves to the first of
them that is left. A path that leads through a reference leads into the shared object, as in Python.

Works on one plain pickle of any protocol, of any size: what is kept is copied block by block. Compressed files are
edited too, and written with the same compression. Files of ``joblib.dump`` and ``torch.save`` are refused, as is
everything that holds more than one pickle.
"""

from __future__ import annotations

import bz2
import gzip
import importlib
import io
import json
import lzma
import os
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from difflib import get_close_matches
from itertools import islice
from typing import Any, BinaryIO, Final, Literal, NamedTuple, overload

from fastcap._native.editor import ATOM, CHILD, Program, Rewriter, Slots
from fastcap._native.graph import ITEM, OPERAND, PAIR, STATE, Edge, Graph, NodeView
from fastcap.errors import EditError, PayloadError
from fastcap.explain import Explainer, Glue, Part, Place
from fastcap.handles import find_handles
from fastcap.inert import LAYOUT, LISTS, UNREAD, At, Reader
from fastcap.opening import BLOCK, Progress, Source, plain_blocks, scan_source
from fastcap.paths import Path, Step, parse
from fastcap.pickling import dumps
from fastcap.writing import write_all, written_beside

NONE: Final = b"N"
"""Opcodes of None."""

_IN_MEMORY = 16 << 20  # bytes of a source that cannot be read twice that are kept in memory
_READ_AHEAD = 1 << 18  # bytes read at least where short arguments are copied
_CACHED_SLOTS = 64
_MANY_SLOTS = 256  # values of one node from which on a look-up does not go through all of them
_CANDIDATES = 1000  # parts that are looked at to guess which one was meant
_TUPLES: Final = b"\x85\x86\x87"  # TUPLE1, TUPLE2, TUPLE3
_BY_LENGTH: Final = (b")", b"\x85", b"\x86", b"\x87")  # opcodes that make a tuple of so many members
_REFUSED: Final = {
    "self": "a bound method needs its object",
    "base": "a class needs its bases",
    "metaclass": "a class needs its metaclass",
    "callable": "a reducer needs something to call",
}
_KEPT_AS_NONE: Final = frozenset({"global", "default", "closure"})


@dataclass(frozen=True, slots=True)
class Pickled:
    """A pickle, to be put in the place of something else: bytes, a path or a binary file that can seek."""

    source: Source


@dataclass(frozen=True, slots=True)
class Change:
    """What was done at a path. ``size`` is what leaves the payload, in bytes; ``kept_at`` is another place of it."""

    path: str
    action: Literal["dropped", "set to None", "replaced"]
    what: str
    size: int
    kept_at: str | None = None  # where the object is now, if something else refers to it


@dataclass(frozen=True, slots=True)
class Summary:
    """What an edit has done; sizes in bytes of the stream, decompressed."""

    changes: tuple[Change, ...]
    old_size: int
    new_size: int
    buffers: tuple[int, ...]  # out-of-band buffers that the result uses, by their old numbers, in their new order
    unused_buffers: tuple[int, ...]  # out-of-band buffers that it no longer uses
    compression: str | None  # how it is compressed, as the source was


class _Slot(NamedTuple):
    """A value that a node's own opcodes consume; see `fastcap._native.editor.Slots`."""

    role: int
    position: int
    start: int
    end: int
    target: int
    kind: int
    opcode: int
    consumer: int


class _SlotReader(Reader):
    """A reader that knows of all values, also those that have no node."""

    def __init__(self, graph: Graph, program: Program) -> None:
        super().__init__(graph)
        self.program = program
        self._slots: dict[int, Slots] = {}

    def slots(self, index: int) -> Slots:
        """What the opcodes of a node consume, kept for the next time."""
        found = self._slots.pop(index, None)
        if found is None:
            found = self.program.slots(index)
        self._slots[index] = found  # the last one used comes last
        if len(self._slots) > _CACHED_SLOTS:
            del self._slots[next(iter(self._slots))]
        return found

    def slots_for(self, index: int, position: Step | None, key: Step | None) -> Iterator[tuple[int, _Slot]]:
        """The slots of a node with their numbers, all those that may lie behind a step among them.

        Of a list that is an object itself, ``position`` leads to one slot; of many dict entries, ``key`` to a few.
        """
        slots = self.slots(index)
        numbers: Iterable[int] = range(len(slots))
        if len(slots) > _MANY_SLOTS:
            value = None if position is None or position.kind != "item" else position.value
            if type(value) is int and self.view(index).op in LISTS:
                numbers = [number for role in (ITEM, OPERAND) if (number := slots.at(role, value)) >= 0]
            elif key is not None and key.kind != "key" and type(key.value) in (str, int):
                text = str(key.value).encode("utf-8", "surrogatepass")
                numbers = slots.candidates(text, key.value if type(key.value) is int else None)
        for number in numbers:
            yield number, _Slot(*slots.slot(number))

    def show_atom(self, parent: int, slot: _Slot) -> int:
        """The number behind those of all nodes, under which the atom can be viewed until the next one is shown."""
        index = len(self.graph)
        size = slot.end - slot.start
        self._views[index] = NodeView(
            index, LAYOUT[slot.opcode][0], slot.start, slot.end, parent, slot.role, slot.position, 0, -1, 1, size,
            size, size, parent,
        )  # fmt: skip
        return index

    def contents(self, index: int, limit: int = 64) -> dict[int, Any]:
        """What a node holds; an atom holds nothing."""
        return {} if index >= len(self.graph) else super().contents(index, limit)

    def pair_key(self, parent: int, edge: Edge) -> Any:
        """The key of a dict entry."""
        slots = self.slots(parent)
        number = slots.at(edge.role, edge.position - 1)
        if number < 0:
            return UNREAD
        key = _Slot(*slots.slot(number))
        if key.kind == ATOM:
            return self.atom_at(key.start, key.end)
        return At(self.resolve(key.target))


class _Found(NamedTuple):
    """A place in a payload: a slot of a node, and the step that led to it."""

    parent: int
    number: int
    slot: _Slot
    step: Step
    is_own: bool  # the node is the object itself, not one that only holds its parts


class Editor:
    """Edits of one pickle: `drop` and `replace` say what, `write` does it.

    ``source`` is a path, bytes or a binary file; what cannot be read twice is kept, in memory or a temporary file,
    until the editor is closed (it is a context manager). ``name`` is the root of all paths, as for `fastcap.scan`;
    ``buffers`` are out-of-band buffers or their sizes.

    Raises `fastcap.PayloadError` for what is no pickle, `fastcap.EditError` for what cannot be edited.
    """

    def __init__(
        self,
        source: Source,
        *,
        name: str | None = None,
        buffers: Iterable[Any] | None = None,
        progress: Progress | None = None,
    ) -> None:
        self._stack = ExitStack()
        try:
            self._source = _open_source(source, self._stack)
            tables, _ = scan_source(self._source.scannable(), buffers=buffers, progress=progress)
            self.graph = Graph(tables)
            self._program = _make_program(self.graph, tables, self._source)
        except BaseException:
            self._stack.close()
            raise
        self.explainer = Explainer(self.graph, name)
        self._reader = _SlotReader(self.graph, self._program)
        self.explainer.reader = self._reader
        self._buffer_sizes = list(tables.buffer_sizes)
        self._edits: dict[int, dict[int, int]] = {}  # node -> slot of it -> piece, or -1 where it is left out
        self._nodes: dict[int, int] = {}  # node -> piece in its place, wherever it is referred to
        self._pieces: list[bytes | Program] = []
        self._sources: list[_Stored | None] = []  # of the pieces
        self._known_pieces: dict[bytes, int] = {}
        self._protocol = self._program.protocol
        self._new_size = 0
        self._moved: set[int] = set()
        self._used: tuple[int, ...] = ()
        self._changes: list[tuple[Change, int]] = []  # with the node that was there, -1 for none

    def __enter__(self) -> Editor:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close what the editor opened. The source itself stays as it is."""
        self._stack.close()

    @property
    def old_size(self) -> int:
        """Bytes of the stream as it is."""
        return self.graph.stream_size

    # --- what is to be done ------------------------------------------------------------------------------------------

    def drop(self, path: str) -> None:
        """Leave out what is at a path; see the module for what that means where."""
        found = self._find(path)
        if not found:
            raise EditError(f"{path} is the whole pickle: there would be nothing left", (path,))
        for place in found:
            action, piece = self._how_to_drop(path, place)
            self._enter(place, piece)
        self._note(path, found, action)

    def replace(self, path: str, value: Any) -> None:
        """Put a value, or the pickle of a `Pickled`, in place of what is at a path.

        A value is pickled as `fastcap.dumps` does it, in the protocol of the stream.
        """
        found = self._find(path)
        piece = self._add_piece(value)
        if not found:
            self._nodes[0] = piece
            view = self.graph.node(0)
            self._changes.append((Change(path, "replaced", self.explainer.subject(0).what, view.retained_size), -1))
            return
        for place in found:
            self._enter(place, piece)
        self._note(path, found, "replaced")

    def replace_node(self, index: int, opcodes: bytes) -> None:
        """Put what a few opcodes push in place of a node of `graph`, for all that refer to it.

        ``opcodes`` push one value and do not use the memo: ``b"N"`` is None, ``b"\\x8c\\x03one" + b"Q"`` a persistent
        id. A whole pickle (from PROTO to STOP) is taken too.
        """
        if not 0 <= index < len(self.graph):
            raise IndexError(f"node {index} of {len(self.graph)}")
        self._nodes[index] = self._add_opcodes(opcodes)

    def drop_handles(self, *, placeholders: bool = False) -> int:
        """Put None, or a `fastcap.Unrestorable`, in place of every handle of Ray; returns how many there were."""
        found = find_handles(self.explainer)
        for handle in found:
            if placeholders:
                self._nodes[handle.node] = self._add_piece(handle.placeholder())
            else:
                self.replace_node(handle.node, NONE)
            size = self.graph.node(handle.node).retained_size
            action: Literal["replaced", "set to None"] = "replaced" if placeholders else "set to None"
            what = self.explainer.subject(handle.node).what
            self._changes.append((Change(handle.path, action, what, size), -1))
        return len(found)

    def below(self, path: str) -> list[str]:
        """The paths of everything directly below what is at a path, numbers and the like too."""
        self._find(path)
        index = self._node_at(parse(path).steps)
        if index is None:
            return []  # an atom
        return list(dict.fromkeys(f"{path}{place.step}" for place in self._slots_below(index)))

    # --- places ------------------------------------------------------------------------------------------------------

    def _find(self, path: str) -> list[_Found]:
        """The places of a path: several where a stream sets a key twice; none if it is the root."""
        parsed = self._parse(path)
        if not parsed.steps:
            return []
        found = self._places(0, parsed.steps)
        if not found:
            raise EditError(f"{path} is not in the pickle: {self._explain_missing(parsed)}", (path,))
        return found

    def _parse(self, path: str) -> Path:
        parsed = parse(path)
        if parsed.root != self.explainer.root_name:
            raise EditError(f"{path} is not in the pickle: its root is called {self.explainer.path(0)}", (path,))
        return parsed

    def _explain_missing(self, parsed: Path) -> str:
        """Which step leads nowhere, and which ones would not."""
        depth = 1
        while self._places(0, parsed.steps[:depth]):
            depth += 1
        there, step = Path(parsed.root, parsed.steps[: depth - 1]), str(parsed.steps[depth - 1])
        above = self._node_at(parsed.steps[: depth - 1])
        known = [] if above is None else [str(place.step) for place in islice(self._slots_below(above), _CANDIDATES)]
        close = get_close_matches(step, dict.fromkeys(known), n=3)
        if not known:
            return f"{there} has no parts"
        return f"{there} has no {step}" + (f": did you mean {' or '.join(close)}?" if close else "")

    def _node_at(self, steps: tuple[Step, ...]) -> int | None:
        """The object at a path; None if there is nothing, or an atom."""
        if not steps:
            return 0
        return next((place.slot.target for place in self._places(0, steps) if place.slot.kind != ATOM), None)

    def _places(self, above: int, steps: tuple[Step, ...]) -> list[_Found]:
        """The places that some steps lead to; several, where a stream sets the last one twice."""
        ways: list[Iterator[_Found]] = []
        found: list[_Found] = []
        tried = set()
        while True:
            depth = len(ways)
            if depth == len(steps) - 1:
                wanted = str(steps[-1])
                found = [place for place in self._slots_below(above, steps[-1]) if str(place.step) == wanted]
            elif (depth, above) not in tried:
                tried.add((depth, above))
                ways.append(self._slots_below(above, steps[depth]))
            while ways and not found:
                wanted = str(steps[len(ways) - 1])
                place = next((p for p in ways[-1] if str(p.step) == wanted and p.slot.kind != ATOM), None)
                if place is not None:
                    above = place.slot.target
                    break
                ways.pop()
            if found or not ways:
                return found

    def _slots_below(self, above: int, wanted: Step | None = None) -> Iterator[_Found]:
        """Everything directly below an object, or below what it is a reference to; a step may narrow it down."""
        for start in dict.fromkeys((above, self._reader.resolve(above))):
            place = self.explainer.place(start)
            if place is None:
                continue
            seen = {start}
            open_nodes = [(start, place)]
            while open_nodes:
                index, here = open_nodes.pop()
                for number, slot in self._reader.slots_for(index, wanted if index == start else None, wanted):
                    target = self._reader.show_atom(index, slot) if slot.kind == ATOM else slot.target
                    edge = Edge(slot.role, slot.position, target, slot.kind not in (ATOM, CHILD))
                    shape = self.explainer.shape(here, index, edge)
                    if isinstance(shape, Part):
                        yield _Found(index, number, slot, shape.step, index == start)
                    elif isinstance(shape, Glue) and slot.kind != ATOM and target not in seen:
                        seen.add(target)
                        open_nodes.append((target, Place(start, shape.route, part=shape.part)))

    def _how_to_drop(self, path: str, place: _Found) -> tuple[Literal["dropped", "set to None"], int]:
        slot, step = place.slot, place.step
        if step.kind in _REFUSED or (step.kind == "attr" and step.value == "__class__"):
            why = _REFUSED.get(step.kind, "an instance needs its class")
            raise EditError(f"{path} cannot be dropped, only replaced: {why}", (path,))
        opcode = self._consumer(place)[4]
        if step.kind in _KEPT_AS_NONE:
            return "set to None", self._add_opcodes(NONE)
        if slot.role in (PAIR, STATE) or opcode == b"d"[0]:
            return "dropped", -1
        if slot.role == ITEM or opcode in b"lt\x85\x86\x87\x91":
            # Members of a list or tuple that only holds the fields of something (a state, arguments) keep their places.
            if place.is_own or step.kind == "member":
                return "dropped", -1
            return "set to None", self._add_opcodes(NONE)
        if opcode in b"io":
            return "set to None", self._add_opcodes(NONE)
        raise EditError(f"{path} cannot be dropped: what it belongs to is not made without it", (path,))

    def _enter(self, place: _Found, piece: int) -> None:
        """What is left out stays so, whatever is to take its place."""
        slots = self._edits.setdefault(place.parent, {})
        if slots.get(place.number, 0) >= 0:
            slots[place.number] = piece
        if piece < 0 and (place.slot.role == PAIR or self._consumer(place)[4] == b"d"[0]):
            slots[self._other(place)] = piece

    def _consumer(self, place: _Found) -> tuple[int, int, int, int, int]:
        return self._reader.slots(place.parent).consumer(place.slot.consumer)

    def _other(self, place: _Found) -> int:
        """The slot of the key that belongs to a value, or the other way round."""
        first = self._consumer(place)[2]
        return first + ((place.number - first) ^ 1)

    def _note(self, path: str, found: list[_Found], action: Literal["dropped", "set to None", "replaced"]) -> None:
        slot = found[0].slot
        size = 0
        what = "a value"
        if slot.kind == CHILD:
            size = self.graph.node(slot.target).retained_size
            what = self.explainer.subject(slot.target).what
        elif slot.kind != ATOM:
            what = f"reference to {self.explainer.path(slot.target) or 'an object'}"
            size = slot.end - slot.start
        else:
            what = repr(self._reader.atom_at(slot.start, slot.end))
            size = slot.end - slot.start
        self._changes.append((Change(path, action, what, size), slot.target if slot.kind == CHILD else -1))

    # --- pieces ------------------------------------------------------------------------------------------------------

    def _add_piece(self, value: Any) -> int:
        if not isinstance(value, Pickled):
            return self._add_opcodes(dumps(value, max(self._program.protocol, 2)))
        return self._add_program(value.source)

    def _add_opcodes(self, opcodes: bytes) -> int:
        known = self._known_pieces.get(opcodes)
        if known is None:
            if opcodes.startswith(b"\x80") or len(opcodes) > 1:
                whole = opcodes if opcodes.startswith(b"\x80") else b"%b." % opcodes
                known = self._add_program(whole)
            else:
                known = len(self._pieces)
                self._pieces.append(opcodes)
                self._sources.append(None)
            self._known_pieces[opcodes] = known
        return known

    def _add_program(self, source: Source) -> int:
        stored = _open_source(source, self._stack)
        tables, _ = scan_source(stored.scannable())
        graph = Graph(tables)
        program = _make_program(graph, tables, stored)
        mine = self._program.protocol
        if program.protocol != mine and stored.starts_with_proto():
            if (program.protocol < 3) != (mine < 3) and graph.select(b"ci", limit=1):
                raise EditError(
                    f"a pickle of protocol {program.protocol} cannot be put into one of protocol {mine}: names are "
                    f"written differently; pickle it again with protocol {max(mine, 2)}"
                )
            self._protocol = max(self._protocol, program.protocol) if mine >= 3 else mine
        if graph.select(b"\x97", limit=1):
            raise EditError("a pickle with out-of-band buffers cannot be put into another one")
        self._pieces.append(program)
        self._sources.append(stored)
        return len(self._pieces) - 1

    # --- writing -----------------------------------------------------------------------------------------------------

    def write(self, target: Any, progress: Progress | None = None) -> Summary:
        """Write the pickle as it is now into a binary file, compressed as the source was."""
        done = 0
        with _compressed(target, self._source.compression) as file:
            for block in self.blocks():
                write_all(file, block)
                done += len(block)
                if progress is not None:
                    progress(done, None)
        return self.summary()

    def measure(self) -> Summary:
        """What `write` would do, without reading what would only be copied."""
        for _ in self._blocks(copy=False):
            pass
        return self.summary()

    def open(self) -> BinaryIO:
        """The pickle as it is now, uncompressed, as a file to read from."""
        return io.BufferedReader(_Blocks(self.blocks()), BLOCK)

    def blocks(self) -> Iterator[bytes | memoryview]:
        """The pickle as it is now, uncompressed; of a file, in blocks of at most 1 MiB."""
        return self._blocks(copy=True)

    def _blocks(self, *, copy: bool) -> Iterator[bytes | memoryview]:
        ready: list[Any] = []  # blocks, and what is to be copied
        cuts = list(self._cuts())  # this may add pieces
        rewriter = Rewriter(
            self._program,
            cuts,
            self._pieces,
            ready.append,
            lambda piece, at, size: self._source_of(piece).read(at, size),
            lambda *span: ready.append(span),
            framed=self._program.framed,
        )
        if self._source.starts_with_proto():
            self._new_size = 2
            yield bytes((0x80, self._protocol))
        more = True
        while more:
            more = rewriter.step()
            for block in ready:
                if isinstance(block, tuple):
                    if copy:
                        yield from self._source_of(block[0]).blocks(*block[1:])
                else:
                    yield block
            ready.clear()
        self._new_size += rewriter.written
        self._moved = set(rewriter.moved)
        self._used = self._used_buffers(rewriter.buffers)

    def summary(self) -> Summary:
        """What was done, once everything has been written."""
        changes = (self._with_keeper(change, node) for change, node in self._changes)
        return Summary(
            tuple(changes),
            old_size=self.graph.stream_size,
            new_size=self._new_size,
            buffers=self._used,
            unused_buffers=tuple(sorted(set(range(self._buffer_count())) - set(self._used))),
            compression=self._source.compression,
        )

    def _with_keeper(self, change: Change, node: int) -> Change:
        """A part that was dropped in one place and is still there in others."""
        if node not in self._moved:
            return change
        others = [path for path in self.explainer.holders(node) if not path.startswith(change.path)]
        return replace(change, size=0, kept_at=others[0] if others else "elsewhere")

    def _source_of(self, piece: int) -> _Stored:
        found = self._source if piece < 0 else self._sources[piece]
        assert found is not None
        return found

    def _buffer_count(self) -> int:
        return max(len(self._buffer_sizes), len(self.graph.select(b"\x97")))

    def _used_buffers(self, offsets: list[int]) -> tuple[int, ...]:
        if not offsets:
            return ()
        numbers = {}
        for index in self.graph.select(b"\x97"):
            view = self.graph.node(index)
            numbers[view.start] = view.arg
        used = tuple(numbers[offset] for offset in offsets)
        if len(set(used)) != len(used):
            raise EditError("an out-of-band buffer is part of something that contains itself: it would be read twice")
        return used

    def _cuts(self) -> Iterator[tuple[int, int, int, int]]:
        for index, piece in self._nodes.items():
            view = self.graph.node(index)
            yield view.start, view.end, piece, index
        for parent, edits in self._edits.items():
            yield from self._cuts_in(parent, edits)

    def _cuts_in(self, parent: int, edits: dict[int, int]) -> Iterator[tuple[int, int, int, int]]:
        slots = self._reader.slots(parent)
        dropped: dict[int, int] = {}  # consumer -> slots of it that are left out
        for number, piece in edits.items():
            slot = _Slot(*slots.slot(number))
            yield slot.start, slot.end, piece, -1
            if piece < 0:
                dropped[slot.consumer] = dropped.get(slot.consumer, 0) + 1
        for consumer, gone in dropped.items():
            mark, at, _, count, opcode = slots.consumer(consumer)
            if opcode in _TUPLES:
                yield at, at + 1, self._add_opcodes(_BY_LENGTH[count - gone]), -1
            elif gone == count and opcode in b"abseu\x90":  # nothing is left to append, build or set
                yield at, at + 1, -1, -1
                if mark >= 0:
                    yield mark, mark + 1, -1, -1


def _make_program(graph: Graph, tables: Any, source: _Stored) -> Program:
    if graph.pickle_count != 1 or graph.tail:
        raise EditError(
            f"this file holds {graph.pickle_count:,} pickles{' and other bytes' if graph.tail else ''}: only a file "
            "that holds one pickle and nothing else can be edited"
        )
    if graph.select(b"\x00", limit=1):
        raise EditError("this is a file of joblib.dump, with arrays between its opcodes: load and dump it to change it")
    return Program(graph, tables)


# --- sources ---------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Stored:
    """The decompressed bytes of a source: all of them in memory, or in a file that can seek."""

    data: memoryview | None
    file: Any
    base: int  # position in the file of the first byte
    compression: str | None

    def scannable(self) -> Any:
        if self.data is not None:
            return self.data
        self.file.seek(self.base)
        return self.file

    def starts_with_proto(self) -> bool:
        return bytes(self.read(0, 1)[:1]) == b"\x80"

    def read(self, at: int, least: int) -> bytes | memoryview:
        """At least so many bytes from an offset on, or an error."""
        if self.data is not None:
            return self.data[at:]
        self.file.seek(self.base + at)
        wanted = max(least, _READ_AHEAD)
        found = b""
        while len(found) < least:
            block = self.file.read(wanted - len(found))
            if block is None:
                raise BlockingIOError("the file is in non-blocking mode and has no data; give fastcap a blocking file")
            if not block:
                raise PayloadError("the source has become shorter since it was scanned", at + len(found))
            found = found + block if found else block
        return found

    def blocks(self, at: int, size: int) -> Iterator[bytes | memoryview]:
        """So many bytes from an offset on."""
        if self.data is not None:
            yield self.data[at : at + size]
            return
        while size:
            self.file.seek(self.base + at)
            block = self.file.read(min(size, BLOCK))
            if block is None:
                raise BlockingIOError("the file is in non-blocking mode and has no data; give fastcap a blocking file")
            if not block:
                raise PayloadError("the source has become shorter since it was scanned", at)
            yield block
            at += len(block)
            size -= len(block)


class _Blocks(io.RawIOBase):
    """Blocks as a raw file to read from."""

    def __init__(self, blocks: Iterator[bytes | memoryview]) -> None:
        self._blocks = blocks
        self._left = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, target: Any) -> int:
        while not self._left:
            block = next(self._blocks, None)
            if block is None:
                return 0
            self._left = memoryview(block)
        count = min(len(target), len(self._left))
        target[:count] = self._left[:count]
        self._left = self._left[count:]
        return count


def _open_source(source: Source, stack: ExitStack) -> _Stored:
    """The bytes of a source where they can be read again."""
    base = None
    if hasattr(source, "read"):
        seekable = getattr(source, "seekable", None)
        if seekable is not None and seekable():
            base = source.tell()  # type: ignore[union-attr]
    with plain_blocks(source) as (kind, blocks):
        if kind == "zip":
            raise EditError("a zip archive (torch.save?) is not one plain pickle and cannot be edited")
        if kind is not None and kind not in _COMPRESSORS:
            raise EditError(f"a file compressed with {kind} cannot be written again: decompress it first")
        if kind is not None or (base is None and hasattr(source, "read")):
            return _spool(blocks, kind, stack)
    if isinstance(source, (str, os.PathLike)):
        return _Stored(None, stack.enter_context(open(source, "rb", buffering=0)), 0, None)
    if base is not None:
        return _Stored(None, source, base, None)
    return _Stored(memoryview(source).cast("B"), None, 0, None)  # type: ignore[arg-type]


def _spool(blocks: Iterator[bytes | memoryview], kind: str | None, stack: ExitStack) -> _Stored:
    """Keep what cannot be read twice: in memory as long as it is small."""
    kept = io.BytesIO()
    for block in blocks:
        kept.write(block)
        if kept.tell() > _IN_MEMORY:
            break
    else:
        return _Stored(kept.getbuffer(), None, 0, kind)
    file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 - the stack closes it
    stack.enter_context(file)
    write_all(file, kept.getbuffer())
    for block in blocks:
        write_all(file, block)
    return _Stored(None, file, 0, kind)


# --- targets ---------------------------------------------------------------------------------------------------------


class _Deflater:
    """`zlib.compressobj` with the interface of a file."""

    def __init__(self, target: Any) -> None:
        self._target = target
        self._inner = zlib.compressobj()

    def write(self, data: bytes | memoryview) -> int:
        self._target.write(self._inner.compress(data))
        return len(data)

    def close(self) -> None:
        self._target.write(self._inner.flush())


def _lz4(target: Any) -> Any:
    return importlib.import_module("lz4.frame").LZ4FrameFile(target, "wb")


def _zstd(target: Any) -> Any:
    try:
        return importlib.import_module("compression.zstd").ZstdFile(target, "wb")  # Python 3.14
    except ImportError:
        return importlib.import_module("zstandard").ZstdCompressor().stream_writer(target, closefd=False)


_COMPRESSORS: Final[dict[str, Callable[[Any], Any]]] = {
    "gzip": lambda target: gzip.GzipFile("", "wb", fileobj=target, mtime=0),
    "bz2": lambda target: bz2.BZ2File(target, "wb"),  # `_compressed` closes it, likewise below
    "xz": lambda target: lzma.LZMAFile(target, "wb", format=lzma.FORMAT_XZ),  # noqa: SIM115
    "lzma": lambda target: lzma.LZMAFile(target, "wb", format=lzma.FORMAT_ALONE),  # noqa: SIM115
    "zlib": _Deflater,
    "lz4": _lz4,
    "zstd": _zstd,
}


@contextmanager
def _compressed(target: Any, kind: str | None) -> Iterator[Any]:
    """A file whose contents go into another one compressed; that one stays open."""
    if kind is None:
        yield target
        return
    file = _COMPRESSORS[kind](target)
    try:
        yield file
    finally:
        file.close()


def parse_replacement(text: str) -> tuple[str, Any]:
    """``PATH=JSON`` or ``PATH=@FILE`` as a path and what takes its place. ValueError says what is wrong."""
    at = -1
    while True:
        at = text.find("=", at + 1)
        if at < 0:
            raise ValueError(f"{text!r} is not PATH=VALUE: it has no '=' behind a path such as obj['key'].name")
        with suppress(ValueError):
            path = str(parse(text[:at].strip()))
            break
    value = text[at + 1 :]
    if value.startswith("@"):
        return path, Pickled(value[1:])
    try:
        return path, json.loads(value)
    except ValueError as error:
        raise ValueError(
            f"{value!r} is not JSON ({error}): strings need double quotes, and @FILE stands for a pickle"
        ) from error


def replace_nodes(source: Source, opcodes: Mapping[int, bytes]) -> BinaryIO:
    """A pickle with other values in place of some nodes (of the graph that `fastcap.scan` has), as a file to read from.

    See `Editor.replace_node` for what can take their place.
    """
    editor = Editor(source)
    for index, code in opcodes.items():
        editor.replace_node(index, code)
    return editor.open()


@overload
def edit(
    source: Source,
    target: None = None,
    *,
    drop: str | Iterable[str] = ...,
    replace: Mapping[str, Any] | None = ...,
    handles: Literal["keep", "drop", "placeholder"] = ...,
    name: str | None = ...,
) -> bytes: ...
@overload
def edit(
    source: Source,
    target: str | os.PathLike[str] | BinaryIO,
    *,
    drop: str | Iterable[str] = ...,
    replace: Mapping[str, Any] | None = ...,
    handles: Literal["keep", "drop", "placeholder"] = ...,
    name: str | None = ...,
) -> Summary: ...
def edit(
    source: Source,
    target: str | os.PathLike[str] | BinaryIO | None = None,
    *,
    drop: str | Iterable[str] = (),
    replace: Mapping[str, Any] | None = None,
    handles: Literal["keep", "drop", "placeholder"] = "keep",
    name: str | None = None,
) -> bytes | Summary:
    """A pickle without some of its parts, or with others in their place; it is not loaded.

    ``drop`` are paths, as `fastcap.scan` shows them; ``replace`` maps paths to values, or to the pickles of `Pickled`
    objects. ``handles`` says what becomes of Ray's actor handles and object references: "keep", "drop" (None takes
    their place) or "placeholder" (a `fastcap.Unrestorable` does).

    Returns the new pickle, or, with a ``target`` (a path, which may be that of the source, or a binary file), a
    `Summary`. A file appears whole or not at all.

    Raises `fastcap.PayloadError` for what is no pickle, `fastcap.EditError` for what cannot be edited or is not there,
    ValueError for what is no path.
    """
    with Editor(source, name=name) as editor:
        for path in (drop,) if isinstance(drop, str) else drop:
            editor.drop(path)
        for path, value in (replace or {}).items():
            editor.replace(path, value)
        if handles != "keep":
            editor.drop_handles(placeholders=handles == "placeholder")
        if target is None:
            result = io.BytesIO()
            editor.write(result)
            return result.getvalue()
        if isinstance(target, (str, os.PathLike)):
            with written_beside(os.fspath(target)) as file:
                return editor.write(file)
        return editor.write(target)
