"""Files that appear whole or not at all."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, BinaryIO


def write_all(file: Any, data: bytes | memoryview) -> None:
    """Write to a file whose ``write`` may take only a part, as those without a buffer do."""
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]


@contextmanager
def written_beside(path: str, *, backup: bool = False) -> Iterator[BinaryIO]:
    """A new file beside ``path`` that takes its place when all has gone well, with its mode; else it is removed.

    With ``backup``, what was there is then found as ``path`` and ``.bak``; FileExistsError if that exists already.
    """
    path = os.path.realpath(path)
    beside, kept = f"{path}.{os.getpid()}.tmp", f"{path}.bak"
    if backup and os.path.lexists(kept):
        raise FileExistsError(errno.EEXIST, "File exists", kept)
    mine = True
    try:
        try:
            descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        except FileExistsError:
            mine = False
            raise
        with open(descriptor, "wb", buffering=0) as file:
            replaces = os.path.exists(path)
            if replaces:
                shutil.copymode(path, beside)
            yield file
            if replaces:
                os.fsync(descriptor)  # or a crash could leave neither
        if backup and replaces:
            try:
                os.link(path, kept)
            except OSError:  # a file system without hard links
                shutil.copy2(path, kept)
        os.replace(beside, path)
    except BaseException:
        # an interrupt may come as soon as the file is there
        if mine:
            with suppress(FileNotFoundError):
                os.unlink(beside)
        raise
