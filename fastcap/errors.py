"""The exceptions fastcap raises on purpose."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fastcap.report import Finding, Report


class FastcapError(Exception):
    """Base of every error that fastcap raises on purpose."""


class PayloadError(FastcapError, ValueError):
    """The bytes are not a well-formed pickle stream.

    ``offset`` is the position, in bytes from the start of the (decompressed) stream, of the opcode that is at fault.
    """

    def __init__(self, message: str, offset: int) -> None:
        super().__init__(f"{message} (at byte {offset:,})")
        self.reason = message
        self.offset = offset

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.reason, self.offset)


class EditError(FastcapError, ValueError):
    """A part of a pickle cannot be dropped or replaced; the message says which, why, and what can be done.

    ``paths`` are the paths concerned, if there are any.
    """

    def __init__(self, message: str, paths: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.paths = paths

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.paths)


class PayloadTooLarge(FastcapError, ValueError):
    """An object pickles to more than it may; the message names what is big in it.

    ``payload_size`` and ``max_size`` are in bytes; ``report`` is the report on the object, or None where the exception
    comes out of another process.
    """

    def __init__(self, message: str, payload_size: int, max_size: int, report: Report | None = None) -> None:
        super().__init__(message)
        self.payload_size = payload_size
        self.max_size = max_size
        self.report = report

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.payload_size, self.max_size)


class NotRestored(FastcapError, AttributeError):
    """Something that a pickle names does not come back where it is loaded; the message says what to give instead.

    Raised by a placeholder (`fastcap.Unrestorable`, `fastcap.Placeholder`) that is used, and by loading with
    ``handles="error"``; then ``paths`` are those of the handles.
    """

    def __init__(self, message: str, paths: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.paths = paths

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.paths)


class NotPicklable(FastcapError, TypeError):
    """An object cannot be pickled; the message says why, and by which paths.

    ``findings`` has a row for each part that cannot be, empty if the pickler stopped at the first: then ``__cause__``
    is what it raised. ``report`` is the report on the object, if there is one.
    """

    def __init__(self, message: str, findings: tuple[Finding, ...] = (), report: Report | None = None) -> None:
        super().__init__(message)
        self.findings = findings
        self.report = report

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.findings)


class SaveError(FastcapError, OSError):
    """A save could not be written, found or cleaned up; the message says where, and what to do. `fastcap.save`."""


class DamagedSave(FastcapError, ValueError):
    """A save is there, but not what was written; the message names the part. `fastcap.restore`."""


class UnknownRay(FastcapError, RuntimeError):
    """The installed Ray is not built as `fastcap.ray` expects; the message names its version and the place.

    Nothing has been changed in Ray then.
    """
