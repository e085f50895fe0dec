"""Saves an object as a small payload and big parts that later saves share, and restores it.

A folder holds any number of saves by name::

    manifests/NAME.json     what a save consists of: blobs, with their sizes and digests
    parts/DIGEST            chunks of blobs; the file's name is the digest of its content
    lock                    held while somebody reads, writes or removes
    temporary/              files that are being written

A *blob* is a run of bytes: the payload, the memory of an array, the pickle of a part. It is cut into chunks of 2 MiB
(`chunk_size`), each a file of its own: a save writes only the chunks that no file has yet, whatever part of a big array
has changed, and a restore maps the chunks one after the other into memory. Which objects become parts is decided as for
any store (`fastcap.slimming`), but as far down as there are parts of ``min_size``: what changes together is apart from
what does not.

Chunks are written first, each to a temporary file that is renamed; the manifest is renamed last, when all chunks are on
the disk. So a save is there as a whole or not at all, and the one before it stays until then.
"""

from __future__ import annotations

import contextlib
import errno
import json
import mmap
import os
import re
import sys
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final

from fastcap import __version__
from fastcap._native.digest import copy_digest
from fastcap._native.digest import digest as digest_of
from fastcap.errors import DamagedSave, SaveError
from fastcap.folders import MANIFESTS, PARTS, Folder, LocalFolder, open_folder
from fastcap.loading import loads
from fastcap.paths import parse
from fastcap.pickling import dumps
from fastcap.slimming import slim_dumps
from fastcap.stores import PartInfo, ReduceValue

LATEST: Final = "latest"
_FORMAT: Final = 1
_DIGEST: Final = "xxh64x2"  # see `fastcap._native.digest`
_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._=+-]{0,150}")
_HEX: Final = re.compile(r"[0-9a-f]{32}")
_MAX_MANIFEST: Final = 1 << 30  # bytes; one that long stands for 30 TB
_PROTOCOL: Final = 5
_MAX_SIZE: Final = 1 << 60  # bytes of a blob
_CHUNK: Final = 1 << 21  # bytes: small enough that a change costs little, and a multiple of every page size
_MANY_CHUNKS: Final = 2048  # of one blob; bigger blobs have bigger chunks
_SEPARATE: Final = 1 << 16  # bytes from which on a buffer, or the pickle of a part, is a blob of its own
_MAPPED: Final = 1 << 20  # bytes from which on a blob is mapped and not read
_THREADS: Final = min(16, (os.cpu_count() or 1) + 2)


def chunk_size(size: int) -> int:
    """Bytes of the chunks of a blob of ``size`` bytes: 2 MiB, for blobs of more than 4 GiB a power of two more."""
    chunk = _CHUNK
    while chunk * _MANY_CHUNKS < size:
        chunk *= 2
    return chunk


def _part_name(digest: str) -> str:
    return f"{PARTS}/{digest}"


# ---- manifests -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Blob:
    """A run of bytes in a folder."""

    size: int  # bytes
    digests: tuple[str, ...]  # of its chunks
    path: str = ""  # of the object in the payload that it belongs to, for messages

    def to_dict(self) -> dict[str, Any]:
        """As it is in a manifest."""
        return {"size": self.size, "digests": list(self.digests), "path": self.path}

    @classmethod
    def from_dict(cls, value: Any) -> Blob:
        """Read it from anything; ValueError for what is none."""
        size, digests, path = value["size"], value["digests"], value["path"]
        if type(size) is not int or not 0 <= size <= _MAX_SIZE or not isinstance(digests, list):
            raise ValueError("a blob of no size")
        if not isinstance(path, str):
            raise ValueError("a blob of no name")
        if len(digests) != -(-size // chunk_size(size)):
            raise ValueError(f"{len(digests)} chunks for {size:,} bytes")
        for digest in digests:
            if not isinstance(digest, str) or not _HEX.fullmatch(digest):
                raise ValueError(f"{digest!r:.80} is no digest")
        return cls(size, tuple(digests), path)

    def chunks(self) -> Iterator[tuple[str, int, int]]:
        """(digest, offset, length) of each chunk."""
        step = chunk_size(self.size)
        for number, digest in enumerate(self.digests):
            yield digest, number * step, min(step, self.size - number * step)


@dataclass(frozen=True, slots=True)
class _Pickle:
    """A pickle in a folder: blobs by number."""

    stream: int
    buffers: tuple[int, ...]  # out-of-band (PEP 574)


@dataclass(frozen=True, slots=True)
class _Manifest:
    """One save."""

    flavor: str
    blobs: tuple[Blob, ...]
    payload: _Pickle | None  # None for what a `DirectoryStore` keeps for payloads that are elsewhere

    def to_json(self) -> bytes:
        facts = {
            "format": _FORMAT,
            "fastcap": __version__,
            "python": ".".join(map(str, sys.version_info[:3])),
            "digest": _DIGEST,
            "flavor": self.flavor,
            "size": sum(blob.size for blob in self.blobs),
            "payload": None if self.payload is None else [self.payload.stream, *self.payload.buffers],
            "blobs": [blob.to_dict() for blob in self.blobs],
        }
        return json.dumps({**facts, "checksum": _checksum(facts)}, indent=1).encode()

    @classmethod
    def from_json(cls, data: bytes, what: str) -> _Manifest:
        try:
            facts = json.loads(data)
            checksum = facts.pop("checksum")
            if facts["format"] != _FORMAT or facts["digest"] != _DIGEST:
                raise DamagedSave(f"{what} is of another format: it was written by fastcap {facts['fastcap']!s:.40}")
            blobs = tuple(Blob.from_dict(blob) for blob in facts["blobs"])
            flavor, numbers = facts["flavor"], facts["payload"]
            if not isinstance(flavor, str):
                raise ValueError("no flavor")
            if numbers is not None and not all(type(n) is int and 0 <= n < len(blobs) for n in numbers):
                raise ValueError("the payload is not there")
            if checksum != _checksum(facts):
                raise ValueError("its checksum is another one")
            payload = None if numbers is None else _Pickle(numbers[0], tuple(numbers[1:]))
        except DamagedSave:
            raise
        except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
            raise DamagedSave(f"{what} is damaged: {type(error).__name__}: {error!s:.200}") from error
        return cls(flavor, blobs, payload)


def _checksum(facts: dict[str, Any]) -> str:
    return digest_of(json.dumps(facts, sort_keys=True).encode()).hex()


def _manifest_name(name: str) -> str:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError(f"{name!r:.200} cannot be the name of a save: letters, digits and ._=+- are fine, up to 150")
    return f"{MANIFESTS}/{name}.json"


def _read_manifest(folder: Folder, name: str) -> _Manifest:
    file = _manifest_name(name)
    try:
        data = folder.read(file, _MAX_MANIFEST)
    except FileNotFoundError as error:
        names = ", ".join(_names(folder))
        others = f": there are {names}" if names else ""
        raise SaveError(f"no save called {name!r} in {folder.url}{others}") from error
    except ValueError as error:
        raise DamagedSave(f"{folder.url}: {error}") from error
    except OSError as error:
        raise SaveError(f"cannot read {folder.url}: {error}") from error
    return _Manifest.from_json(data, f"{file} of {folder.url}")


def _names(folder: Folder) -> list[str]:
    try:
        entries = folder.entries(MANIFESTS)
    except OSError:
        return []
    return [entry.name[len(MANIFESTS) + 1 : -5] for entry in entries if entry.name.endswith(".json")]


# ---- writing ---------------------------------------------------------------------------------------------------------


class _Writer:
    """Writes blobs into a folder, several chunks at a time."""

    def __init__(self, folder: Folder) -> None:
        self.folder = folder
        self.pool = ThreadPoolExecutor(_THREADS, "fastcap-save")
        self.lock = threading.Lock()
        self.local = threading.local()
        self.seen: set[str] = set()  # digests of chunks that are there, or being written
        self.new: dict[str, int] = {}  # digest -> bytes of the chunks that have been written
        self.reused_size = 0  # bytes of chunks that were there
        self.futures: list[Future[str]] = []
        self.pending: list[tuple[int, str, int, int]] = []  # size, path, and which futures: of each blob
        self.sources: list[memoryview] = []  # memory of each blob, where it may have to be written again

    def add(self, data: Any, path: str) -> int:
        """Write a blob; returns its number. The memory must stay as it is until `finish`."""
        view = memoryview(data).cast("B")
        step = chunk_size(len(view))
        first = len(self.futures)
        for offset in range(0, len(view), step):
            self.futures.append(self.pool.submit(self._write, view[offset : offset + step]))
        self.pending.append((len(view), path, first, len(self.futures)))
        if not self.folder.has_locks:
            self.sources.append(view)
        return len(self.pending) - 1

    def _write(self, view: memoryview) -> str:
        # Other threads may change the memory: what is hashed has to be what is written. A copy, in memory used again.
        own: bytearray | None = getattr(self.local, "memory", None)
        if own is None or len(own) < len(view):
            own = self.local.memory = bytearray(len(view))
        digest = copy_digest(view, own).hex()
        data = memoryview(own)[: len(view)]
        with self.lock:
            if digest in self.seen:
                return digest
            self.seen.add(digest)
        name = _part_name(digest)
        if self.folder.size(name) == len(data):
            with self.lock:
                self.reused_size += len(data)
            return digest
        self.folder.write(name, data)
        with self.lock:
            self.new[digest] = len(data)
        return digest

    def finish(self) -> tuple[Blob, ...]:
        """Wait until all blobs are written; raises what went wrong with the first one that is not."""
        done, _ = wait(self.futures, return_when=FIRST_EXCEPTION)
        for future in done:
            future.result()
        return tuple(
            Blob(size, tuple(future.result() for future in self.futures[first:end]), path)
            for size, path, first, end in self.pending
        )

    def sync(self) -> None:
        """Wait until what was written is on the disk."""
        names = [_part_name(digest) for digest in self.new]
        share = -(-len(names) // _THREADS) or 1
        for future in [self.pool.submit(self.folder.sync, names[i : i + share]) for i in range(0, len(names), share)]:
            future.result()

    def repair(self, blobs: Iterable[Blob]) -> None:
        """Write again what somebody has removed in the meantime, where no lock could keep them from it."""
        there = {entry.name: entry.size for entry in self.folder.entries(PARTS)}
        for blob, view in zip(blobs, self.sources):
            for digest, offset, length in blob.chunks():
                if there.get(_part_name(digest)) != length:
                    data = bytes(view[offset : offset + length])
                    if digest_of(data).hex() != digest:
                        raise SaveError(f"{blob.path or 'the payload'} was changed while it was saved")
                    self.folder.write(_part_name(digest), data)

    def close(self) -> None:
        """Give up what is not written yet."""
        self.pool.shutdown(wait=True, cancel_futures=True)

    def undo(self) -> None:
        """Remove what was written, if nobody else can be relying on it; else that is left to `gc`."""
        if not self.folder.has_locks:
            return
        with contextlib.suppress(OSError, DamagedSave):
            try:
                with self.folder.removing(0.0):
                    needed = _needed(self.folder)
                    for digest in self.new:
                        if digest not in needed:
                            self.folder.remove(_part_name(digest))
                    self.folder.clean(everything=True)
            except FileNotFoundError:  # not even a lock
                self.folder.clean(everything=True)


class _Saver:
    """The store of one save: parts become blobs, and the payload has their numbers."""

    split = True

    def __init__(self, writer: _Writer, flavor: str) -> None:
        self.writer = writer
        self.flavor = flavor
        self.count = 0

    def put(self, obj: Any, info: PartInfo, /) -> ReduceValue:
        self.count += 1
        if type(obj) is bytes:
            return _load_bytes, (self.writer.add(obj, info.path),)
        stream, buffers = self.write(obj, info.path)
        return _load_part, (info.path, stream, buffers)

    def write(self, obj: Any, path: str) -> tuple[bytes | int, tuple[int, ...]]:
        """Pickle a part: (its pickle, or the number of that blob, the numbers of its buffers)."""
        buffers: list[int] = []
        stream = dumps(obj, _PROTOCOL, self.collect(buffers, path), compact=True, flavor=self.flavor)
        return stream if len(stream) < _SEPARATE else self.writer.add(stream, path), tuple(buffers)

    def collect(self, buffers: list[int], path: str) -> Callable[[Any], bool]:
        """A buffer callback that makes blobs of big buffers."""

        def take(buffer: Any) -> bool:
            view = buffer.raw()
            if view.nbytes < _SEPARATE:
                return True  # stays in the stream
            buffers.append(self.writer.add(view, path))
            return False

        return take


@dataclass(frozen=True, slots=True)
class SaveReport:
    """What a save has written. Sizes are in bytes."""

    url: str
    name: str
    size: int  # of the payload and all parts
    written_size: int  # of the chunks that were not there yet
    reused_size: int  # of those that were
    part_count: int  # objects that are apart from the payload


def save(
    obj: Any,
    url: str | os.PathLike[str],
    *,
    name: str = LATEST,
    min_size: int | str | None = None,
    flavor: str = "cloudpickle",
    sync: bool = True,
) -> SaveReport:
    """Save an object in a folder: a payload, and beside it the parts of it that take at least ``min_size`` (1 MiB).

    ``url`` is a path, or a URL that fsspec knows (``pip install 'fastcap[store]'``). A folder may hold many saves,
    which share what is equal in them; one of the same ``name`` is replaced, at once, when the new one is complete. With
    ``sync`` the disk has everything by then, so that not even a loss of power can leave less than one complete save.

    Raises what `fastcap.dumps` raises; `SaveError` where the folder cannot be written to: then nothing is left behind.
    """
    file = _manifest_name(name)
    folder = open_folder(url)
    writer = _Writer(folder)
    saver = _Saver(writer, flavor)
    complete = False
    try:
        with contextlib.ExitStack() as stack:
            with _errors(f"cannot save to {folder.url}"):
                folder.prepare()
                stack.enter_context(folder.writing())
            stack.callback(writer.close)
            buffers: list[int] = []
            stream = slim_dumps(obj, saver, min_size, _PROTOCOL, saver.collect(buffers, ""), False, flavor)
            with _errors(f"cannot save to {folder.url}"):
                payload = _Pickle(writer.add(stream, ""), tuple(buffers))
                manifest = _Manifest(flavor, writer.finish(), payload)
                if sync:
                    writer.sync()
                folder.write(file, manifest.to_json())
                complete = True
                if sync:
                    folder.sync([file])
                if not folder.has_locks:
                    writer.repair(manifest.blobs)
    finally:
        if not complete:
            writer.close()
            writer.undo()
    size, written = sum(blob.size for blob in manifest.blobs), sum(writer.new.values())
    return SaveReport(folder.url, name, size, written, writer.reused_size, saver.count)


@contextlib.contextmanager
def _errors(doing: str) -> Iterator[None]:
    """Make an OSError a `SaveError` that says what was being done."""
    try:
        yield
    except SaveError:
        raise
    except OSError as error:
        reason = error.strerror or str(error) or type(error).__name__
        raise SaveError(f"{doing}: {reason}") from error


class DirectoryStore:
    """A store for `fastcap.dumps` that keeps parts as files, for as long as somebody wants: see `fastcap.save`.

    Payloads that refer to them are loaded with ``pickle.loads``, by whoever has fastcap and can reach ``url``. Nobody
    but you knows when the last of those payloads is gone: then remove the files ``manifests/NAME.*`` in the folder and
    run ``fastcap gc``. ``name`` is made up where it is not given.
    """

    split = True

    def __init__(
        self, url: str | os.PathLike[str], *, name: str | None = None, flavor: str = "cloudpickle", sync: bool = True
    ) -> None:
        self.folder = open_folder(url)
        self.url = self.folder.root if isinstance(self.folder, LocalFolder) else self.folder.url
        self.name = f"store-{uuid.uuid4().hex[:12]}" if name is None else name
        self.flavor = flavor
        self.sync = sync
        _manifest_name(self.name)

    def put(self, obj: Any, info: PartInfo, /) -> ReduceValue:
        """Write an object; each one has a manifest of its own."""
        file = _manifest_name(f"{self.name}.{uuid.uuid4().hex}")
        writer = _Writer(self.folder)
        complete = False
        try:
            with contextlib.ExitStack() as stack:
                with _errors(f"cannot write to {self.url}"):
                    self.folder.prepare()
                    stack.enter_context(self.folder.writing())
                stack.callback(writer.close)
                stream, buffers = _Saver(writer, self.flavor).write(obj, info.path)
                with _errors(f"cannot write to {self.url}"):
                    manifest = _Manifest(self.flavor, writer.finish(), None)
                    if self.sync:
                        writer.sync()
                    self.folder.write(file, manifest.to_json())
                    complete = True
                    if self.sync:
                        self.folder.sync([file])
                    if not self.folder.has_locks:
                        writer.repair(manifest.blobs)
        finally:
            if not complete:
                writer.close()
                writer.undo()
        return _load_stored, (self.url, [blob.to_dict() for blob in manifest.blobs], stream, buffers)


# ---- reading ---------------------------------------------------------------------------------------------------------


class _Reader:
    """The blobs of a save, read or mapped into memory; several chunks at a time."""

    def __init__(self, folder: Folder, blobs: tuple[Blob, ...], *, mapped: bool, verify: bool | None) -> None:
        self.folder = folder
        self.blobs = blobs
        self.mapped = mapped
        self.verify_read = verify is not False
        self.verify_mapped = bool(verify)
        self.inner: dict[str, dict[str, Any]] = {}  # path of a part -> replacements in it
        self.loading: dict[str, Any] = {}  # options of `fastcap.loads`
        self.pool = ThreadPoolExecutor(_THREADS, "fastcap-restore")
        self.memory: list[memoryview] = []
        self.futures: list[list[Future[None]]] = []

    def start(self) -> None:
        """Map what is to be mapped, and begin to read the rest. Memory is taken only for files that are there."""
        for blob in self.blobs:
            self._check_sizes(blob)
            if self.mapped and blob.size >= _MAPPED and isinstance(self.folder, LocalFolder):
                self.memory.append(self._map(blob, self.folder))
                checks: Iterable[tuple[str, int, int]] = blob.chunks() if self.verify_mapped else ()
                work = self._verify
            else:
                # Not a bytearray, which would be filled with zeros first. Nor shared with processes that are forked.
                private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
                memory = mmap.mmap(-1, blob.size, flags=private) if blob.size else b""
                self.memory.append(memoryview(memory))
                checks, work = blob.chunks(), self._read
            view = self.memory[-1]
            self.futures.append(
                [
                    self.pool.submit(work, blob, digest, view[offset : offset + length])
                    for digest, offset, length in checks
                ]
            )

    def get(self, number: int) -> memoryview:
        """The memory of a blob, when it is complete."""
        if not 0 <= number < len(self.blobs):
            raise DamagedSave(f"{self.folder.url}: there is no blob {number}")
        for future in self.futures[number]:
            future.result()
        return self.memory[number]

    def load(self, stream: memoryview | bytes, buffers: Iterable[int], replace: Mapping[str, Any] | None) -> Any:
        """Unpickle."""
        options = {**self.loading, "replace": replace} if replace else self.loading
        token = _reader.set(self)
        try:
            return loads(stream, buffers=[self.get(number) for number in buffers], **options)
        finally:
            _reader.reset(token)

    def close(self) -> None:
        """Read no more."""
        self.pool.shutdown(wait=True, cancel_futures=True)

    def _check_sizes(self, blob: Blob) -> None:
        if not self.folder.is_local:
            return  # where looking is as slow as reading
        for digest, _, length in blob.chunks():
            size = self.folder.size(_part_name(digest))
            if size != length:
                found = "is missing" if size is None else f"has {size:,} bytes in the place of {length:,}"
                raise self._damaged(blob, digest, found)

    def _map(self, blob: Blob, folder: LocalFolder) -> memoryview:
        names = [_part_name(digest) for digest in blob.digests]
        try:
            return folder.map_files(names, chunk_size(blob.size), blob.size)
        except (OSError, ValueError) as error:
            if isinstance(error, OSError) and error.errno == errno.ENOMEM:
                raise SaveError(f"{self.folder.url}: more than this system can map, restore without mmap") from error
            raise self._damaged(blob, "", f"cannot be mapped: {error}") from error

    def _read(self, blob: Blob, digest: str, view: memoryview) -> None:
        try:
            self.folder.read_into(_part_name(digest), view)
        except FileNotFoundError as error:
            raise self._damaged(blob, digest, "is missing") from error
        except (OSError, ValueError) as error:
            raise self._damaged(blob, digest, f"cannot be read: {error}") from error
        if self.verify_read:
            self._verify(blob, digest, view)

    def _verify(self, blob: Blob, digest: str, view: memoryview) -> None:
        if digest_of(view).hex() != digest:
            raise self._damaged(blob, digest, "was altered: its digest is another one")

    def _damaged(self, blob: Blob, digest: str, what: str) -> DamagedSave:
        part = f"{_part_name(digest)} " if digest else ""
        return DamagedSave(f"{self.folder.url}: {blob.path or 'the payload'}: {part}{what}")


_reader: ContextVar[_Reader | None] = ContextVar("fastcap reader", default=None)


def _current_reader() -> _Reader:
    reader = _reader.get()
    if reader is None:
        raise SaveError("this payload has parts beside it: fastcap.restore loads it, with the folder it is in")
    return reader


def _load_part(path: str, stream: bytes | int, buffers: tuple[int, ...]) -> Any:
    """In payloads of saves: a part."""
    reader = _current_reader()
    data = reader.get(stream) if isinstance(stream, int) else stream
    return reader.load(data, buffers, reader.inner.get(path))


def _load_bytes(number: int) -> bytes:
    """In payloads of saves: a bytes object."""
    return bytes(_current_reader().get(number))


def _load_stored(url: str, blobs: list[Any], stream: bytes | int, buffers: tuple[int, ...]) -> Any:
    """In payloads of a `DirectoryStore`: a part."""
    folder = open_folder(url)
    with folder.reading():
        reader = _Reader(folder, tuple(map(Blob.from_dict, blobs)), mapped=False, verify=None)
        try:
            reader.start()
            return reader.load(reader.get(stream) if isinstance(stream, int) else stream, buffers, None)
        finally:
            reader.close()


def restore(
    url: str | os.PathLike[str],
    *,
    name: str = LATEST,
    replace: Mapping[str, Any] | None = None,
    mmap: bool = False,
    verify: bool | None = None,
    **options: Any,
) -> Any:
    """The object that `save` has saved in a folder.

    ``replace`` and further options are those of `fastcap.load`; the paths are those in the object that was saved, also
    where it lies in parts. What is at the path of a value in ``replace`` is not loaded.

    With ``mmap=True`` a local folder's big arrays are mapped, not read: they take neither time nor memory until they
    are used. They can be written to, which changes nothing in the folder. The folder must not be changed by anything
    but fastcap while they live.

    What is read is held against its digest. What is mapped is not: that would be reading it. Only its size is checked,
    unless ``verify=True`` says to read it once after all; ``verify=False`` checks sizes only.

    Loading executes code that the payload names: restore only what you trust. Raises `SaveError` if there is no such
    save, `DamagedSave` with the name of the part if something is missing, cut off or altered.
    """
    folder = open_folder(url)
    with contextlib.ExitStack() as stack:
        with _errors(f"cannot read {folder.url}"):
            stack.enter_context(folder.reading())
        manifest = _read_manifest(folder, name)
        if manifest.payload is None:
            raise SaveError(f"{name!r} in {folder.url} is no save, but parts of payloads that are elsewhere")
        reader = _Reader(folder, manifest.blobs, mapped=mmap, verify=verify)
        stack.callback(reader.close)
        with _errors(f"cannot read {folder.url}"):
            reader.start()
        reader.loading = options
        outer, reader.inner = _split(replace or {}, {blob.path for blob in manifest.blobs if blob.path})
        return reader.load(reader.get(manifest.payload.stream), manifest.payload.buffers, outer)


def _split(replace: Mapping[str, Any], parts: set[str]) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Replacements in the payload, and those in each part by its path."""
    outer: dict[str, Any] = {}
    inner: dict[str, dict[str, Any]] = {}
    steps = {}
    for path in parts if replace else ():
        with contextlib.suppress(ValueError):  # of a part that is too deep for a path
            steps[parse(path).steps] = path
    for path, value in replace.items():
        own = parse(path).steps
        part = next((steps[own[:length]] for length in range(len(own)) if own[:length] in steps), None)
        if part is None:
            outer[path] = value
        else:
            rest = "".join(map(str, own[len(parse(part).steps) :]))
            inner.setdefault(part, {})[f"obj{rest}"] = value
    return outer, inner


# ---- removing --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class GcReport:
    """What `gc` has removed, and left. Sizes are in bytes."""

    url: str
    removed_count: int
    removed_size: int
    kept_count: int
    kept_size: int


def saves(url: str | os.PathLike[str]) -> list[str]:
    """The names of the saves in a folder."""
    return _names(open_folder(url))


def gc(
    url: str | os.PathLike[str], *, drop: Iterable[str] = (), dry_run: bool = False, wait: float = 0.0
) -> GcReport:
    """Remove the parts in a folder that no save needs, after the saves named in ``drop``.

    Does nothing while somebody saves or restores: raises `SaveError` if that goes on for ``wait`` seconds. Remote
    folders have no locks; there a save that runs meanwhile checks at its end that all of its parts are there. Raises
    `DamagedSave` if a manifest cannot be read, for then nobody knows what it needs.
    """
    folder = open_folder(url)
    names = [_manifest_name(name) for name in drop]
    with _errors(f"cannot clean up {folder.url}"):
        try:
            removing = folder.removing(wait)
            with removing:
                for file in names:
                    if folder.size(file) is None:
                        raise SaveError(f"{folder.url} has no {file}")
                needed = _needed(folder, names)
                found = [(entry, entry.name.rpartition("/")[2] in needed) for entry in folder.entries(PARTS)]
                if not dry_run:
                    for file in names:
                        folder.remove(file)
                    for entry, wanted in found:
                        if not wanted:
                            folder.remove(entry.name)
                    folder.clean(everything=False)
        except FileNotFoundError as error:
            raise SaveError(f"there are no saves in {folder.url}") from error
    kept = [entry.size for entry, wanted in found if wanted]
    removed = [entry.size for entry, wanted in found if not wanted]
    return GcReport(folder.url, len(removed), sum(removed), len(kept), sum(kept))


def _needed(folder: Folder, without: Iterable[str] = ()) -> set[str]:
    """The digests of all chunks that any save refers to."""
    needed: set[str] = set()
    dropped = set(without)
    for name in _names(folder):
        if _manifest_name(name) not in dropped:
            for blob in _read_manifest(folder, name).blobs:
                needed.update(blob.digests)
    return needed
