"""Reads small values back from the bytes of a graph's nodes, as inert data: nothing is executed or imported.

A graph has no nodes for ints, floats, bools and None, and knows of strings only where they are. This module decodes
them, on demand, from the opcodes in a node's span. Each call looks at a bounded number of opcodes and bytes, whatever
the size of the node, so that describing one row of a report costs the same in a payload of any size.

What the opcodes and their arguments mean is taken from CPython's `pickletools`.
"""

from __future__ import annotations

import _compat_pickle
import io
import pickletools
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from fastcap._native.graph import ITEM, OPERAND, PAIR, Edge, Graph, NodeView

TEXT_KEPT = 4096
"""Bytes of a string that are read at most."""

OPCODES = 320
"""Opcodes of a node that are looked at in one call."""

_LINE_KEPT = 1 << 16
_INT_BYTES = 64
_BY_CODE: Final = {ord(op.code): op for op in pickletools.opcodes}
_PREFIXES: Final = {
    pickletools.TAKEN_FROM_ARGUMENT1: 1,
    pickletools.TAKEN_FROM_ARGUMENT4: 4,
    pickletools.TAKEN_FROM_ARGUMENT4U: 4,
    pickletools.TAKEN_FROM_ARGUMENT8U: 8,
}


def _layout_of(op: pickletools.OpcodeInfo) -> tuple[str, int, int]:
    """(name, bytes of a fixed argument or -1, bytes of a length in front of the argument or 0 for lines)."""
    if op.arg is None or op.arg.n >= 0:
        return op.name, 0 if op.arg is None else op.arg.n, 0
    return op.name, -1, _PREFIXES.get(op.arg.n, 0)


LAYOUT: Final = {code: _layout_of(op) for code, op in _BY_CODE.items()}
_WINDOW: Final = 4096
GETS: Final = frozenset({"GET", "BINGET", "LONG_BINGET"})
PUTS: Final = frozenset({"PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"})
_MARKS: Final = frozenset({"MARK"})
CONSTANTS: Final[dict[str, Any]] = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_FLOATS: Final = frozenset({"FLOAT", "BINFLOAT"})
INTS: Final = frozenset({"INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4"})
_NUMBERS: Final = INTS | _FLOATS
ATOMS: Final = {
    **dict.fromkeys(CONSTANTS, "constant"),
    **dict.fromkeys(INTS, "int"),
    **dict.fromkeys(_FLOATS, "float"),
}
"""Opcodes that push an atom, with its type. An atom has a node only where it is memoized or popped with something."""
TEXTS: Final = frozenset({"UNICODE", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"})
OLD_TEXTS: Final = frozenset({"STRING", "BINSTRING", "SHORT_BINSTRING"})  # Python 2's str; Python 3 reads them as str
BYTES: Final = frozenset({"SHORT_BINBYTES", "BINBYTES", "BINBYTES8", "BYTEARRAY8"})
TUPLES: Final = frozenset({"EMPTY_TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "TUPLE"})
LISTS: Final = frozenset({"EMPTY_LIST", "LIST"})
DICTS: Final = frozenset({"EMPTY_DICT", "DICT"})
SETS: Final = frozenset({"EMPTY_SET", "FROZENSET"})
CALLS: Final = frozenset({"REDUCE", "NEWOBJ", "NEWOBJ_EX", "OBJ", "INST"})
GLOBALS: Final = frozenset({"GLOBAL", "STACK_GLOBAL"})
EXTENSIONS: Final = frozenset({"EXT1", "EXT2", "EXT4"})
PERSISTENT: Final = frozenset({"PERSID", "BINPERSID"})
_MAKES_CONTAINER: Final = frozenset({"EMPTY_LIST", "EMPTY_DICT", "EMPTY_SET", "EMPTY_TUPLE"})
_TEXT_MODULES: Final = {**_compat_pickle.IMPORT_MAPPING, "__builtins__": "builtins"}


@dataclass(frozen=True, slots=True)
class At:
    """A value that has a node of its own (or stands behind a memo reference to one)."""

    index: int


class Text(NamedTuple):
    """A string or byte string. ``value`` holds its beginning; ``size`` is its full size in bytes in the stream."""

    value: str | bytes
    size: int
    cut: bool
    start: int  # net offset


class Unread:
    """Stands for a value that was not read because that would cost too much."""

    def __repr__(self) -> str:
        return "UNREAD"


UNREAD: Final = Unread()


class _Instruction(NamedTuple):
    name: str
    argument: bytes  # without its length prefix; may be cut
    size: int  # full length of the argument
    at: int
    end: int  # offset of the next opcode


class Reader:
    """Inert access to the values in a graph. All offsets are net offsets."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self._views: dict[int, NodeView] = {}
        self._names: dict[int, str] = {}

    def view(self, index: int) -> NodeView:
        """The node, kept for the next time."""
        found = self._views.get(index)
        if found is None:
            found = self._views[index] = self.graph.node(index)
        return found

    def resolve(self, index: int) -> int:
        """The node itself, or what it stands for if it only carries the bytes of a memo reference."""
        for _ in range(8):
            view = self.view(index)
            if view.op not in GETS or view.arg < 0:
                break
            index = view.arg
        return index

    # --- opcodes -----------------------------------------------------------------------------------------------------

    def _instruction(self, at: int, end: int, window: tuple[bytes, int] = (b"", 0)) -> _Instruction | None:
        """The opcode at an offset; ``window`` may hold bytes that were fetched before and where they begin."""
        code, base = window
        place = at - base
        if not 0 <= place < len(code) - 9:
            code, place = self.graph.code(at, min(at + 9, end)), 0
        layout = LAYOUT.get(code[place]) if code else None
        if layout is None:
            return None
        name, fixed, width = layout
        if fixed >= 0:
            return _Instruction(name, code[place + 1 : place + 1 + fixed], fixed, at, at + 1 + fixed)
        if not width:
            return self._line(name, at, end, lines=2 if name in ("GLOBAL", "INST") else 1)
        size = int.from_bytes(code[place + 1 : place + 1 + width], "little")
        start = at + 1 + width
        body = self.graph.code(start, min(start + min(size, TEXT_KEPT), end)) if size else b""
        return _Instruction(name, body, size, at, start + size)

    def _window(self, at: int, end: int) -> tuple[bytes, int]:
        """Bytes from an offset on, as `_instruction` takes them; none where the graph left some out."""
        stop = min(at + _WINDOW, end)
        return (b"", 0) if self.graph.holes(at, stop) else (self.graph.code(at, stop), at)

    def _line(self, name: str, at: int, end: int, lines: int) -> _Instruction | None:
        window = 256
        while True:
            stop = min(at + window, end)
            text = self.graph.code(at, stop)
            found = 0
            for _ in range(lines):
                found = text.find(b"\n", found + 1)
                if found < 0:
                    break
            if found >= 0:
                break
            if stop == end or window >= _LINE_KEPT:
                return None
            window *= 8
        # Bytes that the graph left out in front of the line's end shift it.
        left_out = 0
        for hole, missing in self.graph.holes(at, stop):
            if hole - at - left_out > found:
                break
            left_out += missing
        return _Instruction(name, text[1:found], found - 1 + left_out, at, at + found + left_out + 1)

    def _number(self, code: _Instruction) -> Any:
        if code.size != len(code.argument) or code.size > _INT_BYTES:
            return UNREAD
        if code.name == "BININT":
            return int.from_bytes(code.argument, "little", signed=True)
        if code.name in ("BININT1", "BININT2"):
            return int.from_bytes(code.argument, "little")
        info = _BY_CODE[self.graph.code(code.at, code.at + 1)[0]]
        assert info.arg is not None
        try:
            return info.arg.reader(io.BytesIO(self.graph.code(code.at + 1, code.end)))
        except ValueError:
            return UNREAD

    # --- values ------------------------------------------------------------------------------------------------------

    def text(self, index: int) -> Text | None:
        """The string or byte string at a node; None if it is something else."""
        index = self.resolve(index)
        view = self.view(index)
        if view.op not in TEXTS and view.op not in BYTES and view.op not in OLD_TEXTS:
            return None
        code = self._instruction(view.start, view.end)
        if code is None:
            return Text(b"" if view.op in BYTES else "", view.end - view.start, True, view.start)
        data, cut = code.argument, len(code.argument) != code.size
        value: str | bytes = data
        if view.op == "UNICODE":
            try:
                value = data.decode("raw-unicode-escape")
            except UnicodeDecodeError:
                value = data.decode("latin-1")
        elif view.op in OLD_TEXTS:
            value = (unquote(data) if view.op == "STRING" else data).decode("latin-1")
        elif view.op in TEXTS:
            try:
                value = data.decode("utf-8", "surrogatepass")
            except UnicodeDecodeError:  # cut within a character, or bytes that no pickler writes
                value = data.decode("utf-8", "ignore" if cut else "replace")
        return Text(value, code.size, cut, view.start)

    def string(self, value: object) -> str | None:
        """The str that a value is or stands for, as far as it was read."""
        if isinstance(value, str):
            return value
        text = self.text(value.index) if isinstance(value, At) else None
        return text.value if text is not None and isinstance(text.value, str) else None

    def atom_at(self, at: int, end: int) -> Any:
        """The value that the opcode at an offset pushes: a number, a constant; `UNREAD` for anything else."""
        code = self._instruction(at, end)
        return UNREAD if code is None else self._atom(code)

    def _atom(self, code: _Instruction) -> Any:
        if code.name in CONSTANTS:
            return CONSTANTS[code.name]
        if code.name in _NUMBERS:
            return self._number(code)
        if code.name == "EMPTY_TUPLE":
            return ()
        return UNREAD

    def contents(self, index: int, limit: int = 64) -> dict[int, Any]:
        """What a node holds, by position: operands of a tuple or call, items of a list or set, keys and values.

        Values with a node of their own are `At`; numbers, bools and None are read. Positions past ``limit``, or that
        cannot be read within the bounds, are missing.
        """
        index = self.resolve(index)
        view = self.view(index)
        role = OPERAND
        if view.op in LISTS or view.op == "EMPTY_SET":
            role = ITEM
        elif view.op in DICTS:
            role = PAIR
        found: dict[int, Any] = {}
        children: dict[int, tuple[int, int | None]] = {}  # start -> end, position
        edges = self.graph.edges(index, 0, 2 * limit)
        for edge in edges:
            mine = edge.role in (role, OPERAND) if role != OPERAND else edge.role == OPERAND
            if not edge.is_reference:
                child = self.view(edge.target)
                if child.end > child.start:  # a buffer that was attached has no opcodes
                    children[child.start] = (child.end, edge.position if mine else None)
            if mine and edge.position < limit:
                found[edge.position] = At(self.resolve(edge.target))
        if view.op in GLOBALS or view.op in PERSISTENT or view.op == "EMPTY_TUPLE":
            return found
        at, position, opcodes = view.start, 0, 0
        window = self._window(view.start, view.end)
        while at < view.end and position < limit and opcodes < OPCODES:
            opcodes += 1
            if at in children:
                at, place = children[at]
                if place is not None:
                    position = place + 1
                continue
            code = self._instruction(at, view.end, window)
            if code is None:
                break
            at = code.end
            if code.name in GETS:
                position += 1
            elif code.name in CONSTANTS or code.name in _NUMBERS:
                found.setdefault(position, self._atom(code))
                position += 1
            elif code.name == "EMPTY_TUPLE":
                found.setdefault(position, ())
                position += 1
            elif code.name in CALLS or code.name in TUPLES:
                break
            elif code.name in _MARKS or code.name in PUTS or code.name in _MAKES_CONTAINER:
                continue
        return found

    def sequence(self, index: int, limit: int = 64) -> list[Any]:
        """`contents` as a list, up to the first position that is missing."""
        found = self.contents(index, limit)
        values: list[Any] = []
        while len(values) in found:
            values.append(found[len(values)])
        return values

    def pairs(self, index: int, limit: int = 64) -> dict[str, Any]:
        """The entries of a small dict whose keys are strings."""
        found = self.contents(index, 2 * limit)
        entries = {}
        for position, key in found.items():
            name = self.string(key) if position % 2 == 0 else None
            if name is not None and position + 1 in found:
                entries[name] = found[position + 1]
        return entries

    def value(self, value: Any, nesting: int = 3, limit: int = 32) -> Any:
        """A value with strings and small tuples and lists read; `At` stays where there is more to it."""
        if not isinstance(value, At):
            return value
        view = self.view(self.resolve(value.index))
        text = self.text(view.index)
        if text is not None:
            return value if text.cut else text.value
        if nesting and (view.op in TUPLES or view.op in LISTS):
            parts = [self.value(part, nesting - 1, limit) for part in self.sequence(view.index, limit)]
            if view.op in LISTS:
                return parts
            return tuple(parts) if view.op == "EMPTY_TUPLE" or len(parts) == max(view.arg, 0) else value
        return value

    def pair_key(self, parent: int, edge: Edge) -> Any:
        """The key of the dict entry whose value an edge leads to: `At`, an atom, or `UNREAD`."""
        position = edge.position - 1
        view = self.view(parent)
        if edge.is_reference:
            return self._reference_key(view, position)
        child = self.view(edge.target)
        before = self.graph.previous_sibling(edge.target)
        start = view.start
        if before >= 0:
            sibling = self.view(before)
            if sibling.role == PAIR and sibling.position == position:
                return At(self.resolve(before))
            start = sibling.end
        at = self.graph.last_push(start, child.start)
        if at < 0:
            return UNREAD
        code = self._instruction(at, child.start)
        if code is None:
            return UNREAD
        if code.name not in GETS:
            return self._atom(code)
        return self._reference_key(view, position)

    def _reference_key(self, view: NodeView, position: int) -> Any:
        """A key in front of, or itself, a memo reference: found among the references of a container."""
        for edge in self.graph.edges(view.index, 1 << 62, 2048):
            if edge.role == PAIR and edge.position == position:
                return At(self.resolve(edge.target))
        if view.op in DICTS:
            return self.contents(view.index, 2048).get(position, UNREAD)
        return UNREAD

    # --- names -------------------------------------------------------------------------------------------------------

    def global_name(self, index: int) -> str | None:
        """``module.name`` of a global looked up at a node; None if it is none, or its parts are not plain strings."""
        index = self.resolve(index)
        known = self._names.get(index)
        if known is not None:
            return known or None
        view = self.view(index)
        module: str | None = None
        name: str | None = None
        if view.op == "STACK_GLOBAL":
            parts = self.contents(index, 2)
            module, name = self.string(parts.get(0)), self.string(parts.get(1))
        elif view.op in ("GLOBAL", "INST"):
            at = view.start if view.op == "GLOBAL" else self._inst_at(view)
            code = self._instruction(at, view.end) if at is not None else None
            if code is not None and code.name == view.op:
                module, _, name = code.argument.decode("utf-8", "replace").partition("\n")
        elif view.op in EXTENSIONS:
            code = self._instruction(view.start, view.end)
            number = int.from_bytes(code.argument, "little") if code is not None else 0
            self._names[index] = f"extension {number}"
            return self._names[index]
        if module is None or name is None:
            self._names[index] = ""
            return None
        if self.graph.protocol < 3:
            module, name = _compat_pickle.NAME_MAPPING.get((module, name), (module, name))
            module = _TEXT_MODULES.get(module, module)
        full = f"{module[:200]}.{name[:200]}"
        self._names[index] = full
        return full

    def _inst_at(self, view: NodeView) -> int | None:
        """Where the INST opcode itself stands: behind its operands."""
        start = view.start + 1
        for edge in self.graph.edges(view.index, 0, OPCODES, False):
            if edge.role == OPERAND:
                start = self.view(edge.target).end
        for _ in range(OPCODES):
            code = self._instruction(start, view.end)
            if code is None:
                return None
            if code.name == "INST":
                return start
            start = code.end
        return None


def unquote(data: bytes) -> bytes:
    """The bytes that a STRING argument (a quoted Python 2 literal) stands for."""
    if len(data) >= 2 and data[:1] == data[-1:] and data[:1] in (b"'", b'"'):
        data = data[1:-1]
    try:
        return data.decode("latin-1").encode("latin-1", "replace").decode("unicode_escape").encode("latin-1")
    except (UnicodeDecodeError, UnicodeEncodeError):
        return data
