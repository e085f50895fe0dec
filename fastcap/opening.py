"""Feeds a scanner from a path, bytes or a file object, plain or compressed, without loading it.

Blocks are read one at a time; the payload of a long argument is skipped by seeking where the file can seek. What is
compressed is decompressed block by block, and a stream that grows into far more structure than its file can account for
is refused: a pickle bomb ends in a `PayloadError`, not in memory.
"""

from __future__ import annotations

import bz2
import importlib
import io
import lzma
import os
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, BinaryIO, Final, Protocol, Union

from fastcap._native.scanner import Scanner, Tables
from fastcap.errors import FastcapError, PayloadError

BLOCK = 1 << 20
"""Bytes read at a time."""

_HEAD = 1024  # bytes of an argument that are always handed over before the rest is skipped
_WORTH_SKIPPING = 1 << 18

# What a compressed file may grow into, per byte of it and on top of that. Payload bytes of arguments, which are only
# counted, do not matter here: what costs memory is structure. JSON-like pickles stay well below.
_NODES_PER_BYTE = 16
_NODES_FREE = 1_000_000
_STRUCTURE_PER_BYTE = 60
_STRUCTURE_FREE = 16 << 20


class _Readable(Protocol):
    def read(self, size: int = ..., /) -> bytes: ...


Source = Union[str, "os.PathLike[str]", bytes, bytearray, memoryview, BinaryIO, _Readable]
Progress = Callable[[int, "int | None"], None]


class MissingLibrary(FastcapError, ImportError):
    """A file needs a library that is not installed."""


def scan_source(
    source: Source,
    *,
    buffers: Iterable[Any] | None = None,
    progress: Progress | None = None,
) -> tuple[Tables, tuple[str, ...]]:
    """The tables of a pickle, and remarks about how it was read.

    ``buffers`` are out-of-band buffers or their sizes in bytes. Raises `fastcap.PayloadError` where the bytes are no
    pickle, `MissingLibrary` if decompression needs a package, `OSError` where reading fails.
    """
    sizes = [buffer if isinstance(buffer, int) else memoryview(buffer).nbytes for buffer in buffers or ()]
    if isinstance(source, (str, os.PathLike)):
        with open(source, "rb", buffering=0) as file:
            return _scan_twice(lambda: _File(file), sizes, progress)
    if hasattr(source, "read"):
        return _scan_twice(lambda: _File(source), sizes, progress)
    data = memoryview(source).cast("B")  # TypeError says what was given instead
    return _scan_twice(lambda: _Bytes(data), sizes, progress)


def _scan_twice(
    make: Callable[[], _Input], sizes: list[int], progress: Progress | None
) -> tuple[Tables, tuple[str, ...]]:
    """Scan, and once more if a later pickle refers to an earlier one's memo, as one `pickle.Pickler` writes them."""
    first = make()
    tables, notes = _scan_stream(first, sizes, progress, shared_memo=False)
    if not tables.memo_missed or not first.seekable:
        return tables, notes
    first.rewind()
    shared, more_notes = _scan_stream(make(), sizes, progress, shared_memo=True)
    return (shared, (*more_notes, "its pickles share one memo")) if not shared.tail else (tables, notes)


class _Input:
    """Blocks of a source, with a look at its beginning and a way to pass over bytes."""

    size: int | None = None  # bytes from the first one on, if known
    seekable = False
    start = 0  # position of the first byte in the file behind it

    def __init__(self) -> None:
        self.done = 0
        self._ahead = b""

    def peek(self, count: int) -> bytes:
        while len(self._ahead) < count:
            block = self._read(count - len(self._ahead))
            if not block:
                break
            self._ahead += bytes(block)
        return self._ahead[:count]

    def read(self, count: int) -> bytes | memoryview:
        """The next bytes, at most ``count``; nothing at the end."""
        block: bytes | memoryview
        if self._ahead:
            block, self._ahead = self._ahead[:count], self._ahead[count:]
        else:
            block = self._read(count)
        self.done += len(block)
        return block

    def skip(self, count: int) -> int:
        """Pass over bytes without reading them; returns how many there were."""
        raise NotImplementedError

    def _read(self, count: int) -> bytes | memoryview:
        raise NotImplementedError

    def rest(self) -> BinaryIO:
        """What is left as a file object."""
        raise NotImplementedError

    def rewind(self) -> None:
        """Go back to the first byte, so that the source can be opened again. Only where it can seek."""


class _Bytes(_Input):
    seekable = True

    def __init__(self, data: memoryview) -> None:
        super().__init__()
        self.data = data
        self.at = 0
        self.size = len(data)

    def _read(self, count: int) -> memoryview:
        block = self.data[self.at : self.at + count]
        self.at += len(block)
        return block

    def skip(self, count: int) -> int:
        ahead = len(self._ahead)
        there = min(count, len(self.data) - self.at + ahead)
        self._ahead = self._ahead[there:]
        self.at += max(0, there - ahead)
        self.done += there
        return there

    def rest(self) -> BinaryIO:
        return io.BytesIO(self.data[self.at - len(self._ahead) :])


class _File(_Input):
    """A binary file object, read from where it stands. Only plain ``read`` is needed; ``seek`` is used if it works."""

    def __init__(self, file: Any) -> None:
        super().__init__()
        self.file = file
        try:
            self.seekable = bool(file.seekable())
            self.start = file.tell() if self.seekable else 0
            if self.seekable:
                end = file.seek(0, io.SEEK_END)
                file.seek(self.start)
                self.size = max(0, end - self.start)
        except (AttributeError, OSError, ValueError):
            self.seekable, self.size, self.start = False, None, 0

    def _read(self, count: int) -> bytes:
        block = self.file.read(count)
        if block is None:
            raise BlockingIOError("the file is in non-blocking mode and has no data; give fastcap a blocking file")
        if not isinstance(block, (bytes, bytearray, memoryview)):
            raise TypeError(f"read() returned {type(block).__name__}: open the file in binary mode")
        return bytes(block)

    def skip(self, count: int) -> int:
        assert self.seekable
        ahead = min(count, len(self._ahead))
        self._ahead = self._ahead[ahead:]
        assert self.size is not None
        there = ahead + max(0, min(count - ahead, self.size - self.done - ahead))
        if there > ahead:
            self.file.seek(there - ahead, io.SEEK_CUR)
        self.done += there
        return there

    def rewind(self) -> None:
        self.file.seek(self.start)

    def rest(self) -> BinaryIO:
        if self.seekable:
            self.file.seek(self.start + self.done)
            self._ahead = b""
            return self.file  # type: ignore[no-any-return]
        return io.BufferedReader(_Joined(self))


class _Joined(io.RawIOBase):
    """An input as a raw file object."""

    def __init__(self, source: _Input) -> None:
        self.source = source

    def readable(self) -> bool:
        return True

    def readinto(self, target: Any) -> int:
        block = self.source.read(len(target))
        target[: len(block)] = block
        return len(block)


# --- formats ---------------------------------------------------------------------------------------------------------

_MAGICS: Final = {
    b"\x1f\x8b": "gzip",
    b"BZh": "bz2",
    b"\xfd7zXZ\x00": "xz",
    b"\x5d\x00\x00": "lzma",
    b"\x04\x22\x4d\x18": "lz4",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"PK\x03\x04": "zip",
    b"\x78\x01": "zlib",
    b"\x78\x5e": "zlib",
    b"\x78\x9c": "zlib",
    b"\x78\xda": "zlib",
}
"""How a file begins -> its format. No pickle begins like that: one of the first bytes is no opcode, or no length."""


def _format_of(head: bytes) -> str | None:
    return next((kind for magic, kind in _MAGICS.items() if head.startswith(magic)), None)


def _scan_stream(
    source: _Input, sizes: list[int], progress: Progress | None, shared_memo: bool
) -> tuple[Tables, tuple[str, ...]]:
    kind = _format_of(source.peek(8))
    if kind is None:
        return _feed(source, progress, Scanner(sizes, shared_memo=shared_memo, expected_size=source.size or 0)), ()
    if kind == "zip":
        return _scan_zip(source, progress)
    with _decompressed(source, kind) as blocks:
        return _feed_blocks(blocks, source, sizes, progress, shared_memo), (f"decompressed with {kind}",)


def _feed(source: _Input, progress: Progress | None, scanner: Scanner) -> Tables:
    """The whole of a plain source into a scanner."""
    while True:
        block = source.read(BLOCK)
        if not block:
            break
        try:
            scanner.write(block)
        except PayloadError as error:
            if b"NumpyArrayWrapper" not in bytes(block):
                raise
            raise PayloadError(
                f"{error.reason}; this is a file of joblib.dump with array data between its opcodes: "
                "load it and analyze the object, or write it with cloudpickle", error.offset
            ) from None  # fmt: skip
        if source.seekable and scanner.pending >= _WORTH_SKIPPING:
            # The scanner may want the beginning of the argument: it gets a little more before the rest is skipped.
            wanted = _HEAD
            while wanted and (head := source.read(wanted)):
                scanner.write(head)
                wanted -= len(head)
            if not wanted:
                scanner.skip(source.skip(scanner.pending))
        if progress is not None:
            progress(source.done, source.size)
    return scanner.finish()


def _feed_blocks(
    blocks: Iterator[bytes], source: _Input, sizes: list[int], progress: Progress | None, shared_memo: bool
) -> Tables:
    # Of a pipe nobody knows how long it is: there only the growth per byte read so far is checked.
    most = 0xFFFFFFFE if source.size is None else source.size * _NODES_PER_BYTE + _NODES_FREE
    scanner = Scanner(sizes, max_nodes=most, shared_memo=shared_memo)
    structure = 0
    for block in blocks:
        structure += max(0, len(block) - scanner.pending)
        if structure > source.done * _STRUCTURE_PER_BYTE + _STRUCTURE_FREE:
            raise PayloadError(
                f"{source.done:,} compressed bytes hold {structure:,} bytes of structure; if this is no bomb, "
                "decompress the file first", scanner.position
            )  # fmt: skip
        try:
            scanner.write(block)
        except PayloadError as error:
            if "more than" not in error.reason:
                raise
            raise PayloadError(f"{error.reason}; if this is no bomb, decompress the file first", error.offset) from None
        if progress is not None:
            progress(source.done, source.size)
    return scanner.finish()


@contextmanager
def _decompressed(source: _Input, kind: str) -> Iterator[Iterator[bytes]]:
    with ExitStack() as stack:
        yield _blocks_of(source, kind, stack)


def _blocks_of(source: _Input, kind: str, stack: ExitStack) -> Iterator[bytes]:
    if kind == "zstd":
        return _zstd_blocks(source, stack)
    if kind == "lz4":
        frame = _library("lz4.frame", "lz4", "lz4")
        return _member_blocks(source, kind, frame.LZ4FrameDecompressor, (RuntimeError,))
    if kind == "bz2":
        return _member_blocks(source, kind, bz2.BZ2Decompressor, (OSError,))
    if kind in ("xz", "lzma"):
        return _member_blocks(source, kind, lzma.LZMADecompressor, (lzma.LZMAError,))
    window = 31 if kind == "gzip" else zlib.MAX_WBITS
    return _member_blocks(source, kind, lambda: _Inflater(window), (zlib.error,))


class _Inflater:
    """`zlib.decompressobj` with the interface of the other decompressors."""

    def __init__(self, window: int) -> None:
        self._inner = zlib.decompressobj(window)
        self._waiting = b""

    def decompress(self, data: bytes, max_length: int) -> bytes:
        block = self._inner.decompress(self._waiting + data, max_length)
        self._waiting = self._inner.unconsumed_tail
        return block

    @property
    def needs_input(self) -> bool:
        return not self._waiting

    @property
    def eof(self) -> bool:
        return self._inner.eof

    @property
    def unused_data(self) -> bytes:
        return self._inner.unused_data


def _member_blocks(
    source: _Input, kind: str, make: Callable[[], Any], errors: tuple[type[Exception], ...]
) -> Iterator[bytes]:
    """Decompressed blocks of at most `BLOCK` bytes; members may follow one another, as in ``cat a.gz b.gz``."""
    decompressor, fresh, data = make(), True, b""
    while True:
        if not data:
            data = bytes(source.read(BLOCK))
            if not data and (fresh or decompressor.eof):
                return
            if not data and decompressor.needs_input:
                raise PayloadError(f"the {kind} data ends in the middle", source.done)
        try:
            block = decompressor.decompress(data, BLOCK)
        except errors as error:
            raise PayloadError(f"damaged {kind} data: {error}", source.done) from error
        fresh, data = False, b""
        while True:
            if block:
                yield block
            if decompressor.eof or decompressor.needs_input:
                break
            try:
                block = decompressor.decompress(b"", BLOCK)
            except errors as error:
                raise PayloadError(f"damaged {kind} data: {error}", source.done) from error
        if decompressor.eof:
            data = (decompressor.unused_data or b"").lstrip(b"\0" if kind == "gzip" else b"")
            decompressor, fresh = make(), True


def _zstd_blocks(source: _Input, stack: ExitStack) -> Iterator[bytes]:
    try:
        standard = importlib.import_module("compression.zstd")  # Python 3.14
    except ImportError:
        library = _library("zstandard", "zstd", "zstandard")
        file = stack.enter_context(
            library.ZstdDecompressor().stream_reader(_Joined(source), read_across_frames=True, closefd=False)
        )
        return _file_blocks(file, source, "zstd", (library.ZstdError,))
    return _member_blocks(source, "zstd", standard.ZstdDecompressor, (standard.ZstdError,))


def _file_blocks(file: Any, source: _Input, kind: str, errors: tuple[type[Exception], ...]) -> Iterator[bytes]:
    while True:
        try:
            block = file.read(BLOCK)
        except errors as error:
            raise PayloadError(f"damaged {kind} data: {error}", source.done) from error
        if not block:
            return
        yield block


def _library(module: str, kind: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingLibrary(
            f"the file is compressed with {kind}: install the {package} package, or fastcap[compression]"
        ) from error


# --- torch.save ------------------------------------------------------------------------------------------------------


def _scan_zip(source: _Input, progress: Progress | None) -> tuple[Tables, tuple[str, ...]]:
    """The pickle in a file of ``torch.save``: a zip archive of ``*/data.pkl`` and one member per tensor storage."""
    if not source.seekable:
        raise PayloadError("a zip archive (torch.save?) can only be read from a file that can seek", 0)
    try:
        with zipfile.ZipFile(source.rest()) as archive:
            pickles = [info for info in archive.infolist() if info.filename.rpartition("/")[2] == "data.pkl"]
            if len(pickles) != 1:
                raise PayloadError(
                    "a zip archive, but not of torch.save: it has no data.pkl; unpack it and name the pickle in it", 0
                )
            folder = pickles[0].filename[: -len("data.pkl")] + "data/"
            storages = [info for info in archive.infolist() if info.filename.startswith(folder)]
            with archive.open(pickles[0]) as file:
                inner = _File(file)
                tables = _feed(inner, progress, Scanner(max_nodes=pickles[0].file_size + _NODES_FREE))
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, zlib.error) as error:
        raise PayloadError(f"a damaged or encrypted zip archive: {error}", 0) from error
    total = sum(info.file_size for info in storages)
    return tables, (
        f"a file of torch.save: sizes are those of {pickles[0].filename}; besides it the archive holds "
        f"{len(storages):,} tensor storages of {total:,} bytes",
    )
