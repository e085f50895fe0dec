"""Digests of big blocks of memory, at about the speed of memory."""

from typing_extensions import Buffer

def digest(data: Buffer, /) -> bytes:
    """16 bytes: XXH64 with two seeds."""

def copy_digest(source: Buffer, target: Buffer, /) -> bytes:
    """Copy a buffer to the beginning of another one, and return the digest of the copy."""
