"""The exceptions fastcap raises on purpose."""

from __future__ import annotations


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
