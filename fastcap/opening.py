"""Feeds a scanner from a path, bytes or a file object, plain or compressed, without loading it.

Blocks are read one at a time; the payload of a long argument is skipped by seeking where the file can seek. What is
compressed is decompressed block by block, and a stream that grows into far more structure than its file can account for
is refused: a pickle bomb ends in a `PayloadError`, not in memory.

Files of ``joblib.dump`` and ``torch.save`` hold arrays and storages outside their opcodes; those count as parts of the
objects that own them (see `fastcap.external`).
"""

from __future__ import annotations

import bz2
import errno
import importlib
import io
import itertools
import lzma
import os
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, BinaryIO, Final, Protocol, Union

from fastcap._native.scanner import PAUSE_ARRAY, PAUSE_PERSISTENT, PAUSE_STOP, Scanner, Tables
from fastcap.errors import FastcapError, PayloadError
from fastcap.external import Descriptions, SideFile, Storage

BLOCK = 1 << 20
"""Bytes read at a time."""

_WORTH_SKIPPING = 1 << 16
_AFTER_SKIPPING = 1 << 10  # bytes read first after something was skipped: the next argument may be as long

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


@contextmanager
def plain_blocks(source: Source) -> Iterator[tuple[str | None, Iterator[bytes | memoryview]]]:
    """How a source is compressed ("gzip", "zip"…; None: it is not), and its blocks, decompressed unless it is a zip.

    Raises `fastcap.PayloadError` where the data is damaged, `MissingLibrary` if decompression needs a package.
    """
    with ExitStack() as stack:
        if isinstance(source, (str, os.PathLike)):
            given: _Input = _File(stack.enter_context(open(source, "rb", buffering=0)))
        else:
            given = _File(source) if hasattr(source, "read") else _Bytes(memoryview(source).cast("B"))
        kind = _format_of(given.peek(8))
        if kind is None or kind == "zip":
            yield kind, iter(lambda: given.read(BLOCK), b"")
        else:
            yield kind, _blocks_of(given, kind, stack)


@dataclass
class _Way:
    """How a source is read."""

    shared_memo: bool = False  # its pickles were written by one pickler
    plain: bool = False  # all of it is opcodes, whatever it looks like
    found: str = ""  # the library whose bytes between or behind the opcodes were found


def _scan_twice(
    make: Callable[[], _Input], sizes: list[int], progress: Progress | None
) -> tuple[Tables, tuple[str, ...]]:
    """Scan, and once more if the first way of reading was not the right one and the source can be read again.

    A later pickle may refer to an earlier one's memo, as one `pickle.Pickler` writes them. And what looks like a file
    of joblib or an old one of torch may be an ordinary pickle that only names their classes.
    """
    source, way = make(), _Way()
    try:
        tables, notes = _scan_stream(source, sizes, progress, way)
    except PayloadError as error:
        if not way.found or not source.seekable:
            raise
        source.rewind()
        try:
            tables, notes = _scan_stream(make(), sizes, progress, _Way(plain=True))
        except PayloadError:
            raise error from None
        if tables.tail and way.found != "torch":
            raise
        return tables, notes
    if not tables.memo_missed or not source.seekable:
        return tables, notes
    source.rewind()
    shared, more_notes = _scan_stream(make(), sizes, progress, _Way(shared_memo=True))
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
        if type(block) is bytes:
            return block
        if block is None:
            raise BlockingIOError("the file is in non-blocking mode and has no data; give fastcap a blocking file")
        if not isinstance(block, (bytes, bytearray, memoryview)):
            raise TypeError(f"read() returned {type(block).__name__}: open the file in binary mode")
        return bytes(block)

    def skip(self, count: int) -> int:
        assert self.size is not None  # which it is where the file can seek
        ahead = 0
        if self._ahead:
            ahead = min(count, len(self._ahead))
            self._ahead = self._ahead[ahead:]
        left = self.size - self.done  # less than nothing if the file has grown
        there = count if count <= left else max(ahead, left)
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
    b"ZF0x": "zlib (joblib before 0.10)",
    b"\x78\x01": "zlib",
    b"\x78\x5e": "zlib",
    b"\x78\x9c": "zlib",
    b"\x78\xda": "zlib",
}
"""How a file begins -> its format. No pickle begins like that: one of the first bytes is no opcode, or no length."""


def _format_of(head: bytes) -> str | None:
    return next((kind for magic, kind in _MAGICS.items() if head.startswith(magic)), None)


def _scan_stream(
    source: _Input, sizes: list[int], progress: Progress | None, way: _Way
) -> tuple[Tables, tuple[str, ...]]:
    kind = _format_of(source.peek(8))
    if kind is None:
        feeder = _Feeder(way, sizes, head=source.peek(_LEGACY_HEAD), expected_size=source.size or 0)
        return _feed(source, progress, feeder), feeder.notes()
    if kind == "zip":
        return _scan_zip(source, sizes, progress, way)
    with _decompressed(source, kind) as blocks:
        head = next(blocks, b"")
        # Of a pipe nobody knows how long it is: there only the growth per byte read so far is checked.
        most = 0xFFFFFFFE if source.size is None else source.size * _NODES_PER_BYTE + _NODES_FREE
        feeder = _Feeder(way, sizes, head=head[:_LEGACY_HEAD], max_nodes=most)

        def done() -> int:
            if progress is not None:
                progress(source.done, source.size)
            return source.done

        tables = _feed_blocks(itertools.chain([head], blocks), feeder, done)
        return tables, (f"decompressed with {kind}", *feeder.notes())


def _feed(source: _Input, progress: Progress | None, feeder: _Feeder) -> Tables:
    """The whole of a plain source into a scanner."""
    size = BLOCK
    while True:
        block = source.read(size)
        if not block:
            break
        if size < BLOCK:
            size *= 2
        feeder.write(block)
        if source.seekable and (pending := feeder.pending) >= _WORTH_SKIPPING:
            while (wanted := feeder.wanted) and (head := source.read(wanted)):
                feeder.write(head)
            if not wanted:
                feeder.skip(source.skip(pending))
                size = _AFTER_SKIPPING
        if progress is not None:
            progress(source.done, source.size)
    return feeder.finish()


def _feed_blocks(blocks: Iterable[bytes], feeder: _Feeder, done: Callable[[], int]) -> Tables:
    """The whole of a compressed source into a scanner; ``done`` says how many compressed bytes were read."""
    for block in blocks:
        try:
            feeder.write(block)
        except PayloadError as error:
            if "more than" not in error.reason:
                raise
            raise PayloadError(f"{error.reason}; if this is no bomb, decompress the file first", error.offset) from None
        if feeder.structure > done() * _STRUCTURE_PER_BYTE + _STRUCTURE_FREE:
            raise PayloadError(
                f"{done():,} compressed bytes hold {feeder.structure:,} bytes of structure; if this is no bomb, "
                "decompress the file first", feeder.position
            )  # fmt: skip
    return feeder.finish()


# --- between and behind the opcodes ----------------------------------------------------------------------------------

_LEGACY_MAGIC: Final = b"\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."  # LONG1 of torch.serialization.MAGIC_NUMBER, and STOP
_LEGACY_HEAD = 32
_LEGACY_PICKLES = 5  # magic number, version, system, the object, keys of the storages; then the storages
_LEGACY_COUNT = 8  # bytes in front of each storage, which say how many elements it has


class _Feeder:
    """Writes blocks into a scanner; passes over arrays of joblib and storages of torch, and gives them their owners."""

    def __init__(
        self,
        way: _Way,
        sizes: list[int],
        *,
        head: bytes = b"",
        max_nodes: int = 0xFFFFFFFE,
        expected_size: int = 0,
        storages: dict[str, int] | None = None,
    ) -> None:
        self.structure = 0  # bytes written that were neither payload of an argument nor passed over
        self._way = way
        self._max_nodes = max_nodes
        self._storages = storages  # key -> bytes, of a zip file of torch
        self._legacy = not way.plain and storages is None and _LEGACY_MAGIC in head
        pauses = 0 if way.plain else PAUSE_ARRAY
        if self._legacy or storages is not None:
            pauses |= PAUSE_PERSISTENT
        if self._legacy:
            pauses |= PAUSE_STOP
        self._scanner = Scanner(
            sizes, max_nodes=max_nodes, shared_memo=way.shared_memo, expected_size=expected_size, pauses=pauses
        )
        self._descriptions = Descriptions(self._scanner)
        # what stands between the opcodes: perhaps a byte that says how many more there are, then bytes to pass over,
        # or a pickle of its own
        self._length_missing = False
        self._left = 0
        self._passed = 0
        self._inner: Scanner | None = None
        self._side_files: list[str] = []
        self._side_file_count = 0
        # storages of torch
        self._attached: dict[str, int] = {}
        self._behind: int | None = None  # bytes behind the last pickle of a legacy file, once it has been reached

    @property
    def position(self) -> int:
        """Bytes of the source taken so far."""
        inner = self._inner.position if self._inner is not None else 0
        return self._scanner.position + self._passed + inner + (self._behind or 0)

    @property
    def pending(self) -> int:
        """Bytes that come next and that nobody needs to see."""
        if self._behind is not None:
            return 1 << 62
        if self._inner is not None:
            return self._inner.pending
        if self._length_missing:
            return 0
        return self._left or self._scanner.pending

    @property
    def wanted(self) -> int:
        """Bytes that have to be seen before the pending ones may be skipped."""
        if self._behind is not None or self._left:
            return 0
        return (self._inner or self._scanner).wanted

    def skip(self, count: int) -> None:
        """Take so many bytes, at most `pending`, without seeing them."""
        if self._behind is not None:
            self._behind += count
        elif self._inner is not None:
            self._inner.skip(count)
        elif self._left:
            self._pass_over(count)
        else:
            self._scanner.skip(count)

    def write(self, data: bytes | memoryview) -> None:
        """Take the next block."""
        view = memoryview(data)
        while view:
            taken = 0
            if self._behind is not None:
                taken = len(view)
                self._behind += taken
            elif self._length_missing:
                self._length_missing = False
                self._left += view[0] + 1
            elif self._left:
                taken = min(self._left, len(view))
                self._pass_over(taken)
            elif self._inner is not None:
                taken = self._write_inner(self._inner, view)
            else:
                pending = self._scanner.pending
                taken = self._scanner.write(view)
                self.structure += max(0, taken - pending)
                if self._scanner.paused:
                    self._paused()
            view = view[taken:]

    def _write_inner(self, inner: Scanner, view: memoryview) -> int:
        """To the pickle that stands in place of an array of objects."""
        pending = inner.pending
        try:
            taken = inner.write(view)
        except PayloadError as error:
            offset = self._scanner.position + error.offset
            raise PayloadError(f"{error.reason} (in an array of objects)", offset) from None
        self.structure += max(0, taken - pending)
        if inner.paused:
            self._inner = None
            self._scanner.raw(inner.position)
        return taken

    def _pass_over(self, count: int) -> None:
        self._left -= count
        self._passed += count
        if not self._left:
            size, self._passed = self._passed, 0
            self._scanner.raw(size)

    def _paused(self) -> None:
        if self._scanner.paused == PAUSE_ARRAY:
            self._way.found = "joblib"
            self._expect_array()
        elif self._scanner.paused == PAUSE_PERSISTENT:
            self._attach_storage()
        elif self._scanner.pickle_count == _LEGACY_PICKLES:
            self._behind = 0

    def _expect_array(self) -> None:
        array = self._descriptions.array()
        if isinstance(array, SideFile):
            self._side_file_count += 1
            if len(self._side_files) < 3:
                self._side_files.append(array.name)
        elif array.size is None:
            self._inner = Scanner(max_nodes=self._max_nodes, pauses=PAUSE_STOP)
        else:
            self._left = array.size
            self._length_missing = array.padded

    def _attach_storage(self) -> None:
        storage = self._descriptions.storage()
        if storage is None or storage.key in self._attached:
            return
        self._way.found = "torch"
        size = self._storages.get(storage.key) if self._storages is not None else _legacy_size(storage)
        if size is not None:
            self._attached[storage.key] = size
            self._scanner.attach_buffer(size)

    def finish(self) -> Tables:
        """The tables. `PayloadError` if the source ends in the middle of something."""
        if self._length_missing or self._left or self._inner is not None:
            what = "an array" if self._inner is None else "an array of objects"
            missing = f", {self._left:,} bytes before its end" if self._left else ""
            raise PayloadError(f"the stream ends in the middle of {what}{missing}", self.position)
        expected = sum(self._attached.values())
        if self._legacy and expected != (self._behind or 0):
            raise PayloadError(
                f"{self._behind or 0:,} bytes follow the pickles of this file of torch.save, while its storages have "
                f"{expected:,}", self.position
            )  # fmt: skip
        return self._scanner.finish()

    def notes(self) -> tuple[str, ...]:
        """Remarks about what was found."""
        notes = []
        if self._side_file_count:
            names = ", ".join(repr(name[:60]) for name in self._side_files)
            more = ", …" if self._side_file_count > len(self._side_files) else ""
            notes.append(
                f"a file of joblib before 0.10: {self._side_file_count:,} arrays are in files of their own, which do "
                f"not count here: {names}{more}"
            )
        if self._attached:
            notes.append(
                f"a file of torch.save: its {len(self._attached):,} tensor storages of "
                f"{sum(self._attached.values()):,} bytes count as out-of-band buffers"
            )
        if self._storages is not None:
            unused = self._storages.keys() - self._attached.keys()
            if unused:
                size = sum(self._storages[key] for key in unused)
                notes.append(f"{len(unused):,} more storages of {size:,} bytes belong to no object and do not count")
        return tuple(notes)


def _legacy_size(storage: Storage) -> int | None:
    return None if storage.size is None else storage.size + _LEGACY_COUNT


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
    if kind.startswith("zlib ("):
        # "ZF", the length in hexadecimal, padded to 19 characters; one more under Python 2
        source.read(22 if source.peek(22).endswith(b" ") else 21)
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


_DEFLATE_RATIO = 1032  # bytes at most that deflate makes of one: two bits stand for a run of 258

# What `zipfile` raises for archives that are damaged, encrypted or compressed in ways it does not know.
_ZIP_ERRORS: Final = (
    zipfile.BadZipFile, NotImplementedError, RuntimeError, ValueError, OverflowError, struct.error, zlib.error,
    lzma.LZMAError, EOFError,
)  # fmt: skip


def _scan_zip(source: _Input, sizes: list[int], progress: Progress | None, way: _Way) -> tuple[Tables, tuple[str, ...]]:
    """The pickle in a file of ``torch.save``: a zip archive of ``*/data.pkl`` and one member per tensor storage."""
    if not source.seekable:
        raise PayloadError("a zip archive (torch.save?) can only be read from a file that can seek", 0)
    try:
        with zipfile.ZipFile(source.rest()) as archive:
            members = archive.infolist()
            pickles = [info for info in members if info.filename.rpartition("/")[2] == "data.pkl"]
            if len(pickles) != 1:
                raise PayloadError(
                    "a zip archive, but not of torch.save: it has no data.pkl; unpack it and name the pickle in it", 0
                )
            folder = pickles[0].filename[: -len("data.pkl")] + "data/"
            storages = {
                info.filename[len(folder) :]: _member_size(info, source)
                for info in members
                if info.filename.startswith(folder)
            }
            most = min(0xFFFFFFFE, pickles[0].compress_size * _NODES_PER_BYTE + _NODES_FREE)
            feeder = _Feeder(way, sizes, max_nodes=most, storages=storages)
            with archive.open(pickles[0]) as file:
                if pickles[0].compress_type == zipfile.ZIP_STORED:
                    tables = _feed(_File(file), progress, feeder)
                else:
                    tables = _feed_blocks(iter(lambda: file.read(BLOCK), b""), feeder, lambda: pickles[0].compress_size)
    except PayloadError:
        raise
    except _ZIP_ERRORS as error:
        raise PayloadError(f"a damaged or encrypted zip archive: {error}", 0) from error
    except OSError as error:
        if error.errno not in (None, errno.EINVAL):  # bz2 has its own without a number; a seek to nowhere is invalid
            raise
        raise PayloadError(f"a damaged zip archive: {error}", 0) from error
    return tables, feeder.notes()


def _member_size(info: zipfile.ZipInfo, source: _Input) -> int:
    """Bytes of a storage, as far as the archive can hold them; torch itself never compresses."""
    stored = info.compress_type == zipfile.ZIP_STORED
    most = info.compress_size if stored else info.compress_size * _DEFLATE_RATIO
    if info.compress_size > (source.size or 0) or info.file_size > most:
        raise PayloadError("a damaged zip archive: a storage is larger than the file", info.header_offset)
    return info.file_size
