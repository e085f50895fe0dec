"""Folders that saves are kept in: local ones, and whatever fsspec can reach.

All names are relative, ``parts/0123abcd``, and made by fastcap. A local folder never follows a symbolic link below its
root, so that nothing in it can lead out of it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import stat
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from fastcap.errors import SaveError

PARTS, MANIFESTS = "parts", "manifests"
_TEMPORARY = "temporary"  # files that are being written
FOLDERS = (PARTS, MANIFESTS, _TEMPORARY)  # all that a save has in its folder, but for the lock
_LOCK = "lock"
_STEP = 1 << 17  # bytes of one write: a big one has the kernel look for big pages (ext4 of Linux 6.18: 3 times as long)
_LEASES = "leases"
_PATIENCE = 600.0  # seconds that reading and writing wait for those who remove
_MAX_LEASE = 24 * 3600.0  # seconds after which a save into a remote folder counts as dead


@dataclass(frozen=True, slots=True)
class Entry:
    """A file in a folder."""

    name: str  # relative to the folder
    size: int  # bytes


class Busy(SaveError):
    """Somebody else is at work in the folder."""


class Folder(Protocol):
    """Where a save is kept. Errors are OSError, FileNotFoundError for a file that is not there."""

    url: str
    is_local: bool
    has_locks: bool  # whether `removing` keeps others out; otherwise only those that have begun before

    def prepare(self) -> None:
        """Make the folder ready to be written to."""

    def reading(self) -> contextlib.AbstractContextManager[None]:
        """Keep others from removing files meanwhile, where there are locks and the folder has one."""

    def writing(self) -> contextlib.AbstractContextManager[None]:
        """Keep others from removing files meanwhile. The folder is prepared."""

    def removing(self, wait: float) -> contextlib.AbstractContextManager[None]:
        """Keep others from reading and writing meanwhile; `Busy` if they still do after ``wait`` seconds."""

    def read(self, name: str, max_size: int) -> bytes:
        """A whole file; ValueError if it is bigger than ``max_size`` bytes."""

    def read_into(self, name: str, view: memoryview) -> None:
        """Read a file into memory of just its size; ValueError if it has another one."""

    def size(self, name: str) -> int | None:
        """Bytes of a file, None if it is not there."""

    def write(self, name: str, data: bytes | memoryview) -> None:
        """Write a file, whole or not at all, in the place of one that is there."""

    def sync(self, names: Sequence[str]) -> None:
        """Wait until files are on the disk."""

    def entries(self, name: str) -> list[Entry]:
        """The files below a sub-folder, at any depth; none if it is not there."""

    def remove(self, name: str) -> None:
        """Remove a file, if it is there."""

    def clean(self, *, everything: bool) -> None:
        """Remove what broken writes have left, empty sub-folders and, with ``everything``, the folder if it is new."""


def open_folder(url: str | os.PathLike[str]) -> Folder:
    """The folder at a path, or at any URL that fsspec knows. Nothing is touched yet.

    Raises `SaveError` for a URL of an unknown kind, or if fsspec is needed and not installed.
    """
    text = os.fspath(url)
    if not isinstance(text, str):
        raise TypeError(f"a folder is a path or a URL, not {text!r}")
    scheme, separator, rest = text.partition("://")
    if not separator and "::" not in text:
        return LocalFolder(text)
    if scheme == "file":
        return LocalFolder(rest)
    try:
        import fsspec
    except ImportError as error:
        raise SaveError(f"{text} needs fsspec: pip install 'fastcap[store]'") from error
    try:
        system, root = fsspec.core.url_to_fs(text)
    except (ValueError, ImportError) as error:
        raise SaveError(f"cannot open {text}: {error}") from error
    return RemoteFolder(text, system, root)


# ---- local -----------------------------------------------------------------------------------------------------------


class LocalFolder:
    """A folder of this machine's file systems."""

    is_local = True
    has_locks = True

    def __init__(self, path: str) -> None:
        self.url = path
        self.root = os.path.abspath(path)
        self._safe: set[str] = set()  # sub-folders that are there and no links
        self._made: list[str] = []  # the folder and those above it that were not there, the innermost first

    def prepare(self) -> None:
        folder = self.root
        while not os.path.isdir(folder):
            self._made.append(folder)
            folder = os.path.dirname(folder)
        for folder in reversed(self._made):
            with contextlib.suppress(FileExistsError):
                os.mkdir(folder)
        self._enter(_TEMPORARY, make=True)
        flags = os.O_RDONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        os.close(os.open(os.path.join(self.root, _LOCK), flags, 0o666))

    def reading(self) -> contextlib.AbstractContextManager[None]:
        if os.path.lexists(os.path.join(self.root, _LOCK)):
            return self._locked(fcntl.LOCK_SH, _PATIENCE)
        return contextlib.nullcontext()

    def writing(self) -> contextlib.AbstractContextManager[None]:
        return self._locked(fcntl.LOCK_SH, _PATIENCE)

    def removing(self, wait: float) -> contextlib.AbstractContextManager[None]:
        return self._locked(fcntl.LOCK_EX, wait)

    @contextlib.contextmanager
    def _locked(self, kind: int, wait: float) -> Iterator[None]:
        # A lock needs no right to write, which who only reads may not have.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        descriptor = os.open(os.path.join(self.root, _LOCK), flags)
        try:
            self._lock(descriptor, kind, wait)
            self._safe.clear()  # somebody may have tidied up before
            yield
        finally:
            os.close(descriptor)  # gives the lock back

    def _lock(self, descriptor: int, kind: int, wait: float) -> None:
        deadline = time.monotonic() + wait
        while True:
            try:
                fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
                return
            except BlockingIOError as error:
                if time.monotonic() >= deadline:
                    who = "a save or restore" if kind == fcntl.LOCK_EX else "fastcap gc"
                    raise Busy(f"{who} is at work in {self.url}: try again when it has ended") from error
            time.sleep(0.02)

    def _path(self, name: str) -> str:
        """Where a file is; OSError if a link is on the way."""
        folder, _, file = name.rpartition("/")
        if folder:
            self._enter(folder, make=False)
        return os.path.join(self.root, folder, file)

    def _enter(self, folder: str, *, make: bool) -> None:
        """Make sure that a sub-folder is there and that no link is on the way."""
        if folder in self._safe:
            return
        at = self.root
        for part in folder.split("/"):
            at = os.path.join(at, part)
            if make:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(at)
            if not stat.S_ISDIR(os.lstat(at).st_mode):
                raise NotADirectoryError(errno.ENOTDIR, "not a folder, or a link to one", at)
        self._safe.add(folder)

    @contextlib.contextmanager
    def opened(self, name: str) -> Iterator[tuple[int, int]]:
        """Open a regular file to read it: (descriptor, bytes)."""
        # A pipe in the place of a file would keep us waiting.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        path = self._path(name)
        descriptor = os.open(path, flags)
        try:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode):
                raise OSError(errno.EINVAL, "not a regular file", path)
            yield descriptor, found.st_size
        finally:
            os.close(descriptor)

    def read(self, name: str, max_size: int) -> bytes:
        with self.opened(name) as (descriptor, size):
            if size > max_size:
                raise ValueError(f"{name} has {size:,} bytes, more than {max_size:,}")
            data = bytearray(size)
            return bytes(data[: _fill(descriptor, memoryview(data))])

    def read_into(self, name: str, view: memoryview) -> None:
        with self.opened(name) as (descriptor, size):
            if size != len(view) or _fill(descriptor, view) != size:
                raise ValueError(f"{name} has {size:,} bytes in the place of {len(view):,}")

    def size(self, name: str) -> int | None:
        try:
            found = os.lstat(self._path(name))
        except (FileNotFoundError, NotADirectoryError):
            return None
        return found.st_size if stat.S_ISREG(found.st_mode) else None

    def write(self, name: str, data: bytes | memoryview) -> None:
        self._enter(_TEMPORARY, make=True)
        self._enter(name.rpartition("/")[0], make=True)
        temporary = self._path(f"{_TEMPORARY}/{uuid.uuid4().hex}")
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        try:
            try:
                rest = memoryview(data)
                while rest:
                    rest = rest[os.write(descriptor, rest[:_STEP]) :]
            finally:
                os.close(descriptor)
            os.rename(temporary, self._path(name))
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise

    def sync(self, names: Sequence[str]) -> None:
        for name in names:
            self._sync_path(self._path(name))
        for folder in {name.rpartition("/")[0] for name in names}:
            while folder:
                self._sync_path(self._path(f"{folder}/"))
                folder = folder.rpartition("/")[0]
        for folder in [self.root, *map(os.path.dirname, self._made)] if names else ():
            self._sync_path(os.path.join(folder, ""))  # itself may be a link

    def _sync_path(self, path: str) -> None:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # file systems that cannot sync folders
                raise
        finally:
            os.close(descriptor)

    def entries(self, name: str) -> list[Entry]:
        found = []
        open_folders = [name]
        while open_folders:
            folder = open_folders.pop()
            try:
                with os.scandir(self._path(f"{folder}/")) as scanned:
                    for entry in scanned:
                        if entry.is_dir(follow_symlinks=False):
                            open_folders.append(f"{folder}/{entry.name}")
                        else:
                            size = entry.stat(follow_symlinks=False).st_size
                            found.append(Entry(f"{folder}/{entry.name}", size))
            except FileNotFoundError:
                continue
        return sorted(found, key=lambda entry: entry.name)

    def remove(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path(name))

    def clean(self, *, everything: bool) -> None:
        for entry in self.entries(_TEMPORARY):
            self.remove(entry.name)
        self._safe.clear()
        for name in FOLDERS:
            for folder, _, _ in os.walk(os.path.join(self.root, name), topdown=False):  # does not follow links below it
                if not os.path.islink(os.path.join(self.root, name)):
                    with contextlib.suppress(OSError):
                        os.rmdir(folder)  # if it is empty
        if everything and self._made and os.listdir(self.root) == [_LOCK]:
            self.remove(_LOCK)
        for folder in self._made if everything else ():
            with contextlib.suppress(OSError):
                os.rmdir(folder)

    def map_files(self, names: Sequence[str], chunk_size: int, size: int) -> memoryview:
        """Files one after the other in memory: pages are read when they are touched, and copied when written to.

        All files but the last have ``chunk_size`` bytes, a multiple of the page size. ValueError if one has another
        size. Somebody who cuts a mapped file off ends the process with SIGBUS where it touches what is gone.
        """
        # Memory of the whole size, over which the files are mapped one by one. It goes as a whole when nobody refers
        # to it any more; what is mapped over it goes along. Also for one file: mmap.mmap would keep it open.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
        memory = mmap.mmap(-1, size, flags=flags)
        start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        for number, name in enumerate(names):
            offset = number * chunk_size
            length = min(chunk_size, size - offset)
            with self.opened(name) as (descriptor, found):
                _check_size(name, found, length)
                place = _map(start + offset, length, protection, mmap.MAP_PRIVATE | _MAP_FIXED, descriptor, 0)
            if place != start + offset:
                raise OSError(ctypes.get_errno(), f"cannot map: {os.strerror(ctypes.get_errno())}", name)
        return memoryview(memory)


_MAP_FIXED = 0x10  # the same on Linux and macOS, and not in the module mmap
_map: Any = ctypes.CDLL(None, use_errno=True).mmap
_map.restype = ctypes.c_size_t
_map.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)


def _check_size(name: str, found: int, expected: int) -> None:
    if found != expected:
        raise ValueError(f"{name} has {found:,} bytes in the place of {expected:,}")


def _fill(descriptor: int, view: memoryview) -> int:
    """Read until a buffer is full or the file ends; returns the number of bytes."""
    done = 0
    while done < len(view):
        count = os.readv(descriptor, [view[done:]])
        if count == 0:
            break
        done += count
    return done


# ---- remote ----------------------------------------------------------------------------------------------------------


class RemoteFolder:
    """A folder of an fsspec file system.

    Such systems have no locks. A save leaves a note (a *lease*) while it runs, which `removing` looks for.
    """

    is_local = False
    has_locks = False

    def __init__(self, url: str, system: Any, root: str) -> None:
        self.url = url
        self.system = system
        self.root = root.rstrip("/")
        self._made: set[str] = set()

    def prepare(self) -> None:
        self._make(self.root)

    def _make(self, folder: str) -> None:
        if folder not in self._made:
            self.system.makedirs(folder, exist_ok=True)
            self._made.add(folder)

    def reading(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        name = f"{_LEASES}/{uuid.uuid4().hex}"
        self.write(name, f"{time.time():.0f}".encode())
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                self.remove(name)

    @contextlib.contextmanager
    def removing(self, wait: float) -> Iterator[None]:
        deadline = time.monotonic() + wait
        while self._leased():
            if time.monotonic() >= deadline:
                raise Busy(
                    f"a save is at work in {self.url}, or was killed less than {_MAX_LEASE / 3600:.0f} hours ago: "
                    f"remove {self.root}/{_LEASES} if none is"
                )
            time.sleep(0.5)
        yield

    def _leased(self) -> bool:
        now = time.time()
        leased = False
        for entry in self.entries(_LEASES):
            try:
                started = float(self.read(entry.name, 100))
            except (OSError, ValueError):
                continue
            if now - started < _MAX_LEASE:
                leased = True
            else:
                self.remove(entry.name)
        return leased

    def _path(self, name: str) -> str:
        return f"{self.root}/{name}"

    def read(self, name: str, max_size: int) -> bytes:
        path = self._path(name)
        size = self.system.size(path)
        if size is not None and size > max_size:
            raise ValueError(f"{name} has {size:,} bytes, more than {max_size:,}")
        data: bytes = self.system.cat_file(path)
        return data

    def read_into(self, name: str, view: memoryview) -> None:
        data = self.system.cat_file(self._path(name), end=len(view) + 1)
        if len(data) != len(view):
            raise ValueError(f"{name} has {len(data):,} bytes or more in the place of {len(view):,}")
        view[:] = data

    def size(self, name: str) -> int | None:
        try:
            found = self.system.size(self._path(name))
        except FileNotFoundError:
            return None
        return None if found is None else int(found)

    def write(self, name: str, data: bytes | memoryview) -> None:
        path = self._path(name)
        self._make(path.rpartition("/")[0])
        # Object stores show an object when all of it is there. A file system that does not may be left with a part of
        # a file: of another size, for which nobody will take it.
        self.system.pipe_file(path, bytes(data))

    def sync(self, names: Sequence[str]) -> None:
        """What fsspec has written is written."""

    def entries(self, name: str) -> list[Entry]:
        self.system.invalidate_cache()
        try:
            found = self.system.find(self._path(name), detail=True)
        except FileNotFoundError:
            return []
        # Some systems give paths with a leading slash, and some without.
        strip = len(self.root.lstrip("/")) + 1
        entries = [Entry(path.lstrip("/")[strip:], int(info["size"] or 0)) for path, info in found.items()]
        return sorted(entries, key=lambda entry: entry.name)

    def remove(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self.system.rm_file(self._path(name))

    def clean(self, *, everything: bool) -> None:
        """Where folders are real, empty ones stay."""
