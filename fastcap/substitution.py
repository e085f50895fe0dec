"""Puts values in place of parts of a pickle while it is loaded.

The parts are cut out of the stream before it is loaded (see `fastcap.editing`), and persistent ids put there: what they
held is never executed, and the values need not be picklable.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO, Final

from fastcap._native.graph import Graph
from fastcap.editing import Editor, Pickled
from fastcap.errors import EditError, NotRestored
from fastcap.handles import Handle, find_handles
from fastcap.inert import BYTES, EXTENSIONS, GLOBALS, OLD_TEXTS, TEXTS, Reader
from fastcap.opening import scan_source
from fastcap.paths import parse
from fastcap.placeholders import Unrestorable

_LISTED: Final = 10  # handles that a message lists


def substitute(
    data: Any, replace: Mapping[str, Any], handles: str | Callable[[Unrestorable], Any] | None, options: dict[str, Any]
) -> tuple[BinaryIO, Callable[[Any], Any]]:
    """The stream with persistent ids in place of parts, as a file, and what gives the value of an id.

    ``replace`` and ``handles`` are those of `fastcap.load`; ``options`` are those of `pickle.load`, and lose the
    buffers that the stream no longer has.
    """
    if not (handles in (None, "placeholder", "error") or callable(handles)):
        raise ValueError(f"handles is None, 'placeholder', 'error' or a function, not {handles!r}")
    buffers = options.get("buffers")
    if buffers is not None:
        buffers = options["buffers"] = list(buffers)
    with Editor(data, buffers=buffers) as editor:
        if editor.graph.select(b"PQ", limit=1):
            raise EditError("the stream has persistent ids of its own, which only the program that wrote it can load")
        values = _Values(handles)
        replaced = {replace_path(editor, path, id_opcodes(values.add(value))) for path, value in replace.items()}
        found = find_handles(editor.explainer, apart_from=tuple(replace)) if handles is not None else []
        found = [handle for handle in found if handle.node not in replaced]
        for handle in found:
            editor.replace_node(handle.node, id_opcodes(values.add_handle(handle)))
        if not replace and not found:
            return io.BytesIO(data), values.get
        written = io.BytesIO()
        summary = editor.write(written)
        if summary.compression is not None:
            raise EditError(f"the pickle is compressed with {summary.compression}: decompress it before it is loaded")
    if buffers is not None:
        options["buffers"] = [buffers[number] for number in summary.buffers]
    if found and handles == "error":
        values.refuse_handles(written.getvalue())
    written.seek(0)
    return written, values.get


class _Values:
    """What persistent ids stand for: values that were given, and handles."""

    def __init__(self, handles: str | Callable[[Unrestorable], Any] | None) -> None:
        self._values: list[Any] = []
        self._handles: dict[int, Handle] = {}  # those that nobody has asked for yet
        self._make = handles if callable(handles) else None

    def add(self, value: Any) -> int:
        self._values.append(value)
        return len(self._values) - 1

    def add_handle(self, handle: Handle) -> int:
        number = self.add(None)
        self._handles[number] = handle
        return number

    def get(self, number: Any) -> Any:
        """The value of a persistent id; a function that makes values for handles is called once for each."""
        handle = self._handles.pop(number, None)
        if handle is not None:
            placeholder = handle.placeholder()
            self._values[number] = placeholder if self._make is None else self._make(placeholder)
        return self._values[number]

    def refuse_handles(self, stream: Any) -> None:
        """Raise `NotRestored` if a handle is left in the stream: what was replaced may have held all of them."""
        tables, _ = scan_source(stream)
        graph = Graph(tables)
        reader = Reader(graph)
        views = map(graph.node, graph.select(b"Q"))
        numbers = {reader.atom_at(view.start, view.end) for view in views}
        left = [handle.placeholder() for number, handle in self._handles.items() if number in numbers]
        if left:
            listed = "".join(f"\n  {each.path}  {each.kind} {each.id}" for each in left[:_LISTED])
            more = f"\n  [{len(left) - _LISTED:,} more]" if len(left) > _LISTED else ""
            raise NotRestored(
                f"the pickle holds {_count(len(left), 'handle')} of Ray; give values with replace={{path: value}}, or "
                f"handles='placeholder':{listed}{more}",
                tuple(each.path for each in left),
            )


def id_opcodes(number: int) -> bytes:
    """Opcodes that push what a persistent id stands for."""
    return b"J%bQ" % number.to_bytes(4, "little")


_WITHOUT_IDENTITY: Final = (TEXTS | OLD_TEXTS | BYTES | GLOBALS | EXTENSIONS) - {"BYTEARRAY8"}
"""Opcodes of what a pickler shares because it happens to be one object: equal strings, names of classes."""


def replace_path(editor: Editor, path: str, opcodes: bytes) -> int | None:
    """Put what a few opcodes push in place of what is at a path, for all that refer to it; returns the node it was.

    Strings, bytes and names are replaced at the path only, like numbers, bools and None, which are no nodes; then None
    is returned. `EditError` if there is nothing, with what is like it.
    """
    try:
        parsed = parse(path)
    except ValueError as error:
        raise EditError(str(error), (path,)) from None
    explainer = editor.explainer
    index = explainer.find(parsed.steps) if parsed.root == explainer.root_name else None
    if index is not None:
        index = explainer.reader.resolve(index)
    if index is None or explainer.reader.view(index).op in _WITHOUT_IDENTITY:
        editor.replace(path, Pickled(opcodes if opcodes[:1] == b"\x80" else b"\x80\x02%b." % opcodes))
        return None
    editor.replace_node(index, opcodes)
    return index


def _count(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
