"""File objects that behave as some do, and what holds for every report on a file."""

import io

from fastcap.analysis import scan
from fastcap.errors import PayloadError


class Pipe:
    """A file object that can only read, and gives less than asked for."""

    def __init__(self, data, most=10_007):
        self.inner, self.most = io.BytesIO(data), most

    def read(self, size=-1):
        return self.inner.read(min(size, self.most) if size >= 0 else self.most)


class Counting(io.BytesIO):
    """Counts the bytes that are really read."""

    taken = 0

    def read(self, size=-1):
        block = super().read(size)
        self.taken += len(block)
        return block


def check_sums(report):
    assert sum(row.self_size for row in report.nodes) + report.overhead == report.payload_size
    assert report.nodes[0].subtree_size + report.overhead == report.payload_size
    assert report.stream_size + report.buffer_size == report.payload_size
    return report


def scan_any(data):
    """Whether the bytes gave a report; it adds up, or there is a `PayloadError` with an offset."""
    try:
        report = scan(data)
    except PayloadError as error:
        assert error.offset >= 0  # noqa: PT017
        return False
    check_sums(report)
    return True
