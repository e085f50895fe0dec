"""The native core of `fastcap.editing`: what a node's opcodes consume, and writing a pickle anew with cuts."""

from collections.abc import Callable, Iterable, Sequence

from typing_extensions import Buffer

from fastcap._native.graph import Graph
from fastcap._native.scanner import Tables

ATOM: int
CHILD: int
REFERENCE: int

class Program:
    """The opcodes of one complete pickle; ``graph`` is the graph that was built on the tables."""

    def __init__(self, graph: Graph, tables: Tables, /) -> None: ...
    @property
    def framed(self) -> bool: ...
    @property
    def protocol(self) -> int: ...
    def slots(self, index: int, /) -> Slots: ...

class Slots:
    """The values that the opcodes of one node consume, in that order. Offsets are net offsets."""

    def __len__(self) -> int: ...
    def slot(self, number: int, /) -> tuple[int, int, int, int, int, int, int, int]:
        """(role, position, start, end, target, kind, opcode, consumer); ``target`` is -1 for an atom."""
    def consumer(self, number: int, /) -> tuple[int, int, int, int, int]:
        """(net offset of its MARK or -1, its net offset, first slot, slots, opcode)."""
    def candidates(self, text: bytes | None, number: int | None, /) -> list[int]:
        """Numbers of the slots that a look-up by name has to look at."""
    def at(self, role: int, position: int, /) -> int: ...  # -1 if there is none

class Rewriter:
    """Writes a program with cuts; see editor.pyx."""

    def __init__(
        self,
        program: Program,
        cuts: Iterable[tuple[int, int, int, int]],
        pieces: Sequence[bytes | Program],
        write: Callable[[bytes], object],
        read: Callable[[int, int, int], Buffer],
        copy: Callable[[int, int, int], object],
        *,
        framed: bool,
    ) -> None: ...
    def step(self) -> bool: ...
    @property
    def written(self) -> int: ...
    @property
    def moved(self) -> list[int]: ...
    @property
    def buffers(self) -> list[int]: ...
