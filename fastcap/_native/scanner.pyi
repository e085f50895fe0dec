"""The native scanner: a file-like reader of pickle streams that executes and imports nothing."""

from typing import Any, NamedTuple

from typing_extensions import Buffer

class Block:
    """Memory that the scanner filled, lent to others through the buffer protocol."""

    def __len__(self) -> int: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...

class Tables(NamedTuple):
    """What a scan found, for `fastcap._native.graph.Graph`; the first five are buffers of the structs in nodes.pxd."""

    nodes: Any
    references: Any
    skeleton: Any
    holes: Any
    overheads: Any
    buffer_sizes: list[int]
    stream_size: int
    protocol: int
    pickle_count: int
    memo_missed: bool
    tail: str

PAUSE_ARRAY: int
PAUSE_PERSISTENT: int
PAUSE_STOP: int

class Scanner:
    """File-like: give it a stream through ``write`` (in chunks of any size), then call ``finish``.

    Raises `fastcap.PayloadError`, with the offset, where the bytes are not a pickle stream.
    """

    def __init__(
        self,
        buffer_sizes: list[int] | None = None,
        *,
        max_nodes: int = 0xFFFFFFFE,
        shared_memo: bool = False,
        expected_size: int = 0,
        pauses: int = 0,
    ) -> None: ...
    def write(self, data: Buffer, /) -> int: ...
    def add_buffer(self, size: int, /) -> None: ...
    def skip(self, count: int, /) -> None: ...
    def raw(self, count: int, /) -> None: ...
    def attach_buffer(self, size: int, /) -> None: ...
    def span(self, memo_index: int, /) -> tuple[int, int] | None: ...
    def code(self, start: int, end: int, /) -> bytes | None: ...
    def finish(self) -> Tables: ...
    @property
    def pending(self) -> int: ...
    @property
    def wanted(self) -> int: ...
    @property
    def position(self) -> int: ...
    @property
    def paused(self) -> int: ...
    @property
    def top(self) -> tuple[int, int] | None: ...
    @property
    def pickle_count(self) -> int: ...
