"""What a running program pickles: each dump with its sizes, where it was made, and a report on those that are big."""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from fastcap._native.scanner import Scanner
from fastcap.analysis import report_on
from fastcap.errors import PayloadError
from fastcap.pickling import FLAVORS, installed, watch_dumps
from fastcap.report import Report

_PACKAGE = os.path.dirname(os.path.abspath(__file__)) + os.sep


@dataclass(frozen=True, slots=True)
class Dump:
    """One payload that was pickled. Sizes are in bytes."""

    flavor: str  # the copy of cloudpickle, one of `fastcap.pickling.FLAVORS`
    stream_size: int
    buffer_size: int  # of out-of-band buffers (PEP 574)
    has_buffer_callback: bool  # whether buffers could go out of band
    where: str | None  # file:line of the caller's code, None if there is none on the stack
    report: Report | None  # None if the stream could not be scanned

    @property
    def payload_size(self) -> int:
        """Stream and buffers."""
        return self.stream_size + self.buffer_size


@dataclass(slots=True)
class Recording:
    """What was pickled so far: the dumps that are bigger than asked for, and flavors that came too late."""

    min_size: int
    dumps: list[Dump] = field(default_factory=list)
    missed: tuple[str, ...] = ()  # flavors that were imported meanwhile: what they pickled is not known


@contextmanager
def recording(min_size: int = -1) -> Iterator[Recording]:
    """Record what fastcap and the copies of cloudpickle that are imported pickle meanwhile, in all threads.

    Their dumps are done by fastcap's pickler, which writes the same bytes. Dumps whose payload is not bigger than
    ``min_size`` bytes are left out; so is what `fastcap.analyze` writes, which goes nowhere. The report on a dump is
    made from the very bytes that were written.
    """
    found = Recording(min_size)
    there = {name for name in FLAVORS if name in sys.modules}

    def start(obj: object, flavor: str, has_buffer_callback: bool, file: Any) -> _Watch | None:
        return None if isinstance(file, Scanner) else _Watch(found, flavor, has_buffer_callback)

    with ExitStack() as stack:
        for name in there:
            with suppress(ImportError):  # a copy of cloudpickle that is too old for fastcap to stand in for it
                stack.enter_context(installed(name))
        stack.enter_context(watch_dumps(start))
        try:
            yield found
        finally:
            found.missed = tuple(name for name in FLAVORS if name in sys.modules and name not in there)


class _Watch:
    """Scans one dump while it is written."""

    def __init__(self, found: Recording, flavor: str, has_buffer_callback: bool) -> None:
        self.found = found
        self.flavor = flavor
        self.has_buffer_callback = has_buffer_callback
        self.scanner: Scanner | None = Scanner()
        self.stream_size = self.buffer_size = 0

    def write(self, data: Any) -> None:
        self.stream_size += memoryview(data).nbytes
        self.scan("write", data)

    def add_buffer(self, size: int) -> None:
        self.buffer_size += size
        self.scan("add_buffer", size)

    def scan(self, method: str, argument: Any) -> None:
        """What the scanner does not like must not get in the way of the program."""
        if self.scanner is not None:
            try:
                getattr(self.scanner, method)(argument)
            except PayloadError:
                self.scanner = None

    def finish(self) -> None:
        if self.stream_size + self.buffer_size <= self.found.min_size:
            return
        report = None
        if self.scanner is not None:
            with suppress(PayloadError):
                report = report_on(self.scanner.finish())
        dump = Dump(self.flavor, self.stream_size, self.buffer_size, self.has_buffer_callback, _caller(), report)
        self.found.dumps.append(dump)


def _caller() -> str | None:
    """``file:line`` of the innermost frame that is neither ours nor of an installed library or the standard one."""
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith((_PACKAGE, "<", *_library_folders())):
            return f"{file}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return None


def _library_folders() -> list[str]:
    return [sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")]
