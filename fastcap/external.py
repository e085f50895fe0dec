"""What a pickle says about bytes that stand outside its opcodes: arrays of joblib, storages of torch.

``joblib.dump`` writes a small description in place of an array and the array's bytes behind it, between the opcodes;
``torch.save`` writes the name of a storage, whose bytes lie elsewhere. To find those bytes, the few opcodes of such a
description are evaluated here, with inert values in place of objects: a call becomes a record of what is called with
what. Nothing is executed or imported, and each description costs a bounded number of opcodes.

Formats: `joblib.numpy_pickle.NumpyArrayWrapper.write_array`, `torch.serialization._save` and `_legacy_save`.
"""

from __future__ import annotations

import pickletools
from dataclasses import dataclass
from typing import Any, Final

from fastcap._native.scanner import Scanner
from fastcap.errors import PayloadError
from fastcap.inert import CONSTANTS, GETS, INTS, LAYOUT, OLD_TEXTS, PUTS, TEXTS, unquote

_LONGEST = 1 << 16  # bytes of a description
_NESTING = 16  # memo references that lead to memo references
_FREE = 100_000  # opcodes that are evaluated in any case; beyond that no more than the stream has bytes
_DIMENSIONS = 64
_LARGEST = 1 << 62  # bytes of an array or storage

_STORAGE_WIDTHS: Final = {
    "Double": 8, "Float": 4, "Half": 2, "BFloat16": 2, "Long": 8, "Int": 4, "Short": 2, "Char": 1, "Byte": 1, "Bool": 1,
    "ComplexDouble": 16, "ComplexFloat": 8, "QInt8": 1, "QUInt8": 1, "QInt32": 4, "QUInt4x2": 1, "QUInt2x4": 1,
    "Untyped": 1,
}  # fmt: skip
"""Bytes of an element, by the name of torch's storage class."""


@dataclass(frozen=True, slots=True)
class Array:
    """An array of joblib, whose bytes follow in the stream."""

    size: int | None  # bytes of its items; None: a pickle of its own follows, for an array of objects
    padded: bool  # one byte that says how many more follow comes before the items


@dataclass(frozen=True, slots=True)
class SideFile:
    """An array of joblib before 0.10, in a file of its own."""

    name: str


@dataclass(frozen=True, slots=True)
class Storage:
    """A storage of torch, by the name it has in its file."""

    key: str
    size: int | None  # bytes as its type says, if the type is known


@dataclass(slots=True)
class _Made:
    """The result of a call that did not take place."""

    name: str | None  # of the callable or class
    args: Any
    state: Any = None


class _Name(str):
    """A global that was not looked up."""

    __slots__ = ()


class _Unreadable(Exception):
    """A description is longer, deeper or other than anything that is written for an array or storage."""


_MARK: Final = object()
_UNKNOWN: Final = object()


class Descriptions:
    """Reads the descriptions in the stream of one scanner, right after the opcode that ends each of them."""

    def __init__(self, scanner: Scanner) -> None:
        self._scanner = scanner
        self._recalled: dict[int, tuple[tuple[int, int], Any]] = {}  # memo index -> (span, value)
        self._opcodes = 0

    def array(self) -> Array | SideFile:
        """The array that the object built last stands for. `PayloadError` if it makes no sense."""
        made = self._top()
        state = made.state if isinstance(made, _Made) else None
        if isinstance(state, dict):
            name = state.get("filename")
            if isinstance(name, str):
                return SideFile(name)
            size = _items_size(state.get("dtype"), state.get("shape"))
            if size is not _UNKNOWN:
                return Array(size, state.get("numpy_array_alignment_bytes") is not None)
        raise PayloadError(
            "joblib's description of an array cannot be read, so nobody knows how many bytes follow",
            self._scanner.position,
        )

    def storage(self) -> Storage | None:
        """The storage whose persistent id was read last; None if it is the id of something else."""
        try:
            parts = self._top()
        except PayloadError:
            return None
        if not isinstance(parts, tuple) or len(parts) < 5 or parts[0] != "storage" or not isinstance(parts[2], str):
            return None
        kind, count = parts[1], parts[4]
        name = kind.rpartition(".")[2] if isinstance(kind, _Name) else ""
        width = _STORAGE_WIDTHS.get(name.removesuffix("Storage"))
        known = width is not None and isinstance(count, int) and 0 <= count <= _LARGEST
        return Storage(parts[2], count * width if known and width is not None else None)

    def _top(self) -> Any:
        span = self._scanner.top
        try:
            if span is None:
                raise _Unreadable
            return self._evaluate(span, _NESTING)
        except (_Unreadable, IndexError, ValueError, TypeError) as error:
            raise PayloadError("a description of an array or storage cannot be read", self._scanner.position) from error

    def _recall(self, index: int, nesting: int) -> Any:
        span = self._scanner.span(index)
        if span is None:
            raise _Unreadable
        known = self._recalled.get(index)
        if known is None or known[0] != span:
            known = self._recalled[index] = (span, self._evaluate(span, nesting - 1))
        return known[1]

    def _evaluate(self, span: tuple[int, int], nesting: int) -> Any:
        """The value that the opcodes of a node make."""
        code = self._scanner.code(*span) if span[1] - span[0] <= _LONGEST and nesting else None
        if code is None:
            raise _Unreadable
        stack: list[Any] = []
        at = 0
        while at < len(code):
            name, fixed, width = LAYOUT.get(code[at], ("", 0, 0))
            start = at + 1 + width
            if fixed >= 0:
                end = at = start + fixed
            elif width:
                end = at = start + int.from_bytes(code[at + 1 : start], "little")
            else:
                end = code.index(b"\n", start)
                if name in ("GLOBAL", "INST"):
                    end = code.index(b"\n", end + 1)
                at = end + 1
            self._opcodes += 1
            if at > len(code) or self._opcodes > self._scanner.position + _FREE:
                raise _Unreadable
            self._step(name, code[start:end], stack, nesting)
        value = stack.pop()
        if value is _MARK:
            raise _Unreadable
        return value

    def _step(self, name: str, argument: bytes, stack: list[Any], nesting: int) -> None:
        if name in PUTS:
            return
        if name in GETS:
            stack.append(self._recall(_integer(name, argument), nesting))
        elif name in TEXTS:
            stack.append(argument.decode("utf-8", "replace"))
        elif name in OLD_TEXTS:
            stack.append((unquote(argument) if name == "STRING" else argument).decode("latin-1"))
        elif name in INTS:
            stack.append(_integer(name, argument))
        elif name in CONSTANTS:
            stack.append(CONSTANTS[name])
        elif name == "MARK":
            stack.append(_MARK)
        elif name == "EMPTY_TUPLE":
            stack.append(())
        elif name in _TUPLES:
            stack.append(_pop(stack, _TUPLES[name]))
        elif name == "TUPLE":
            stack.append(_pop_mark(stack))
        elif name == "GLOBAL":
            stack.append(_Name(argument.decode("utf-8", "replace").replace("\n", ".")))
        elif name == "STACK_GLOBAL":
            module, attribute = _pop(stack, 2)
            stack.append(_Name(f"{module}.{attribute}"))
        elif name in ("REDUCE", "NEWOBJ"):
            callee, args = _pop(stack, 2)
            if callee == "copyreg._reconstructor" or callee == "copy_reg._reconstructor":
                callee = args[0] if isinstance(args, tuple) and args else None
            stack.append(_Made(str(callee) if isinstance(callee, _Name) else None, args))
        elif name == "BUILD":
            made, state = _pop(stack, 2)
            if isinstance(made, _Made):
                made = _Made(made.name, made.args, state)
            stack.append(made)
        elif name == "EMPTY_DICT":
            stack.append({})
        elif name == "DICT":
            stack.append(_with_entries({}, _pop_mark(stack)))
        elif name in ("SETITEM", "SETITEMS"):
            entries = _pop(stack, 2) if name == "SETITEM" else _pop_mark(stack)
            (container,) = _pop(stack, 1)
            stack.append(_with_entries(container, entries))
        elif name == "BINPERSID":
            pass  # the value is what the id says
        elif name in _EFFECTS:
            taken, to_mark, pushed = _EFFECTS[name]
            if to_mark:
                _pop_mark(stack)
            _pop(stack, taken)
            stack.extend([_UNKNOWN] * pushed)
        else:
            raise _Unreadable


def _effect(op: pickletools.OpcodeInfo) -> tuple[int, bool, int]:
    """(values an opcode takes below a mark or without one, whether it takes all down to a mark, values it pushes)."""
    if pickletools.markobject not in op.stack_before:
        return len(op.stack_before), False, len(op.stack_after)
    return op.stack_before.index(pickletools.markobject), True, len(op.stack_after)


_EFFECTS: Final = {op.name: _effect(op) for op in pickletools.opcodes}
_TUPLES: Final = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


def _pop(stack: list[Any], count: int) -> tuple[Any, ...]:
    values = tuple(stack[len(stack) - count :]) if count else ()
    if len(values) != count or any(value is _MARK for value in values):
        raise _Unreadable
    del stack[len(stack) - count :]
    return values


def _pop_mark(stack: list[Any]) -> tuple[Any, ...]:
    place = next((k for k in range(len(stack) - 1, -1, -1) if stack[k] is _MARK), None)
    if place is None:
        raise _Unreadable
    values = tuple(stack[place + 1 :])
    del stack[place:]
    return values


def _with_entries(container: Any, entries: tuple[Any, ...]) -> Any:
    """A dict, with more entries; those whose keys are no strings are of no use here."""
    if not isinstance(container, dict):
        return _UNKNOWN
    for key, value in zip(entries[::2], entries[1::2], strict=True):
        if isinstance(key, str):
            container[str(key)] = value
    return container


def _integer(name: str, argument: bytes) -> int:
    if name in ("INT", "LONG", "GET"):
        if len(argument) > 24:
            raise _Unreadable
        return int(argument.rstrip(b"L"))
    return int.from_bytes(argument, "little", signed=name in ("BININT", "LONG1"))


def _items_size(dtype: Any, shape: Any) -> Any:
    """Bytes of an array's items; None if they are objects, `_UNKNOWN` if it is not clear."""
    if not isinstance(shape, tuple) or len(shape) > _DIMENSIONS or not isinstance(dtype, _Made):
        return _UNKNOWN
    if dtype.name is None or not dtype.name.startswith("numpy") or not isinstance(dtype.args, tuple) or not dtype.args:
        return _UNKNOWN
    state = dtype.state if isinstance(dtype.state, tuple) else ()
    code = dtype.args[0] if isinstance(dtype.args[0], str) else ""
    flags = state[7] if len(state) > 7 else 0
    if code[:1] == "O" or (isinstance(flags, int) and flags & 1):  # NPY_ITEM_HASOBJECT
        return None
    size = state[5] if len(state) > 5 else -1
    if not isinstance(size, int) or size < 0:
        digits = code[1:] if not isinstance(dtype.args[0], _Name) else ""
        if not digits.isdecimal() or len(digits) > 10:
            return _UNKNOWN
        size = int(digits)
    for length in shape:
        if not isinstance(length, int) or length < 0:
            return _UNKNOWN
        size *= length
    return size if size <= _LARGEST else _UNKNOWN
