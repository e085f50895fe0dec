"""The native graph: nodes, memo references, sizes and dominators of one payload."""

from typing import NamedTuple

from fastcap._native.scanner import Tables

NO_INDEX: int
OPERAND: int
ITEM: int
PAIR: int
STATE: int
DISCARD: int
PICKLE: int
RAW: int

class NodeView(NamedTuple):
    """One node. Sizes in bytes."""

    index: int  # type: ignore[assignment]  # hides tuple.index, as any field of that name does
    op: str  # name in pickletools' spelling: "EMPTY_DICT", "REDUCE"…; "FILE" for several pickles, "RAW" for raw bytes
    start: int  # net offset (without PROTO, FRAME, STOP)
    end: int
    parent: int  # -1 for the root
    role: int  # OPERAND, ITEM, PAIR, STATE, DISCARD, PICKLE, RAW
    position: int  # which operand, item, or 2 * pair (+ 1 for the value)
    arg: int  # containers: items or pairs; calls: the callable or -1; NEXT_BUFFER: its number; aliases: the target
    memo: int  # memo index or -1
    count: int  # type: ignore[assignment]  # nodes in the subtree, itself included
    self_size: int
    subtree_size: int
    retained_size: int
    dominator: int  # index of the immediate dominator; -1 for the root

class Edge(NamedTuple):
    """A child or a memo reference of a node."""

    role: int
    position: int
    target: int
    is_reference: bool

class Graph:
    """Array of nodes in stream order, which is depth-first preorder. Node 0 is the root."""

    def __init__(self, tables: Tables, /) -> None: ...
    def __len__(self) -> int: ...
    @property
    def reference_count(self) -> int: ...
    @property
    def payload_size(self) -> int: ...  # stream_size + buffer_size
    @property
    def stream_size(self) -> int: ...
    @property
    def buffer_size(self) -> int: ...
    @property
    def overhead(self) -> int: ...
    @property
    def protocol(self) -> int: ...  # highest PROTO seen (0 if none: then 0 or 1 by the opcodes)
    @property
    def pickle_count(self) -> int: ...
    @property
    def tail(self) -> str: ...  # why the bytes behind the last pickle are not one; "" if there are none
    def node(self, index: int, /) -> NodeView: ...
    def edges(self, index: int, /, min_size: int = 0, limit: int = -1, references: bool = True) -> list[Edge]:
        """Children (with subtree_size >= min_size) and references of a node, in place order; at most `limit`."""
    def next_sibling(self, index: int, /) -> int: ...  # -1 if none
    def previous_sibling(self, index: int, /) -> int: ...  # -1 if none
    def referrers(self, index: int, /, limit: int = 10) -> list[int]:
        """Nodes holding a memo reference to this one, in stream order, at most `limit`."""
    def referrer_count(self, index: int, /) -> int: ...
    def dominated(self, index: int, /, min_size: int = 0, limit: int = -1) -> list[int]:
        """Nodes whose immediate dominator is this one, retained_size >= min_size, biggest first."""
    def code(self, start: int, end: int, /) -> bytes:
        """The stream's bytes [start, end) (net offsets); long arguments are cut: what is left out is simply missing."""
    def holes(self, start: int, end: int, /) -> list[tuple[int, int]]:
        """(net offset, length) of what `code` left out there."""
    def stream_offset(self, net: int, /) -> int: ...
    def last_push(self, start: int, end: int, /) -> int:
        """Net offset of the last opcode that pushes a value in [start, end), which holds no node; -1 if none."""
    def select(self, opcodes: bytes, /, min_size: int = 0, limit: int = -1, min_arg: int = 0) -> list[int]:
        """Nodes that one of these opcodes made, subtree_size >= min_size, arg >= min_arg, in order, at most `limit`."""
    def select_kinds(self, keys: list[int], /, min_size: int = 0, limit: int = -1) -> list[int]:
        """Nodes of these kinds (keys of `type_keys`), subtree_size >= min_size, in stream order, at most `limit`."""
    def type_keys(self) -> list[tuple[int, str, int]]:
        """(key, op, example): the distinct kinds of node: by callable for calls, else by opcode."""
    def type_totals(self, meanings: dict[int, int], /) -> dict[int, tuple[int, int]]:
        """key -> (count, bytes). Meanings: 0 own row, 1 absorbs everything below it, 2 glue: counts with its parent."""
    def dominators(self, thoroughly: bool = False) -> bytes:
        """uint32 each, native order; NO_INDEX for the root. Without the short cut if `thoroughly` (for tests)."""
    def sizes(self) -> tuple[bytes, bytes, bytes]: ...  # self, subtree, retained: uint64 each (tests)
