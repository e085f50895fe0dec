"""Reading pickles from paths, bytes and file objects, compressed or not."""

import bz2
import copy
import gzip
import io
import lzma
import os
import pickle
import subprocess
import sys
import textwrap
import zipfile
import zlib
from pathlib import Path

import numpy as np
import pytest
from sources import Counting, Pipe

from fastcap.analysis import scan
from fastcap.errors import PayloadError
from fastcap.opening import BLOCK, MissingLibrary, scan_source

ROOT = Path(__file__).parent.parent
OBJECT = {"rows": [{"id": i, "name": f"user {i}"} for i in range(2000)], "blob": bytes(3 * BLOCK), "tail": [1, 2, 3]}
DATA = pickle.dumps(OBJECT, protocol=5)


def facts(report):
    return report.payload_size, report.node_count, report.nodes


EXPECTED = facts(scan(DATA))


def lz4(data):
    return pytest.importorskip("lz4.frame", reason="lz4 is not installed").compress(data)


def zstd(data):
    return pytest.importorskip("zstandard", reason="zstandard is not installed").ZstdCompressor().compress(data)


COMPRESSORS = {
    "gzip": gzip.compress,
    "bz2": bz2.compress,
    "xz": lzma.compress,
    "lzma": lambda data: lzma.compress(data, lzma.FORMAT_ALONE),
    "zlib": zlib.compress,
    "lz4": lz4,
    "zstd": zstd,
}


@pytest.mark.parametrize("make", [bytes, bytearray, memoryview, io.BytesIO, Pipe, lambda data: Pipe(data, 1 << 30)])
def test_every_kind_of_source(make):
    assert facts(scan(make(DATA))) == EXPECTED


@pytest.mark.parametrize("as_path", [str, os.fspath, lambda path: path])
def test_paths(tmp_path, as_path):
    (tmp_path / "x.pkl").write_bytes(DATA)
    assert facts(scan(as_path(tmp_path / "x.pkl"))) == EXPECTED


def test_array_of_other_items_as_source():
    padded = DATA + b"\0" * (-len(DATA) % 8)
    assert scan(np.frombuffer(padded, dtype="i8")).node_count >= EXPECTED[1]


def test_from_where_the_file_stands():
    file = io.BytesIO(b"header" + DATA)
    file.seek(6)
    assert facts(scan(file)) == EXPECTED


def test_a_text_file_is_refused(tmp_path):
    (tmp_path / "x.pkl").write_text("(lp0\n.")
    with open(tmp_path / "x.pkl") as file, pytest.raises(TypeError, match="binary"):
        scan(file)


def test_non_blocking_file_without_data():
    class Dry:
        def read(self, size=-1):
            return None

    with pytest.raises(BlockingIOError):
        scan(Dry())


def test_payload_is_skipped_not_read():
    file = Counting(pickle.dumps([bytes(64 * BLOCK), "end"], protocol=4))
    assert scan(file).payload_size > 64 * BLOCK
    assert file.taken < 3 * BLOCK


def test_payloads_one_after_the_other_are_skipped_too():
    file = Counting(pickle.dumps([[bytes(BLOCK), i] for i in range(50)], protocol=4))
    assert scan(file).payload_size == len(file.getvalue())
    assert file.taken < 5 * BLOCK


def scan_elsewhere(path):
    """(peak memory in KiB, payload size or error) of a scan in a process of its own; fastcap alone takes 40,000 KiB."""
    code = textwrap.dedent(r"""
        import re, sys
        import fastcap
        try:
            report = fastcap.scan(sys.argv[1])
            result = report.payload_size, len(report.nodes)
        except fastcap.PayloadError as error:
            result = error
        # Not ru_maxrss, which a process inherits from the one that started it.
        print(re.search(r"VmHWM:\s*(\d+)", open("/proc/self/status").read())[1], result)
    """)
    result = subprocess.run(
        [sys.executable, "-c", code, path], capture_output=True, text=True, check=True, cwd=ROOT
    )
    peak, _, message = result.stdout.partition(" ")
    return int(peak), message.strip()


without_sanitizer = pytest.mark.skipif(
    "libasan" in os.environ.get("LD_PRELOAD", ""), reason="AddressSanitizer holds freed memory back"
)


@without_sanitizer
def test_a_file_larger_than_memory(tmp_path):
    path = tmp_path / "sparse.pkl"
    with open(path, "wb") as file:
        file.write(b"\x80\x05](")
        for _ in range(4):
            file.write(b"\x8e" + (1 << 33).to_bytes(8, "little"))
            file.seek(1 << 33, io.SEEK_CUR)
            file.write(b"}(\x8c\x01aK\x01u")
        file.write(b"e.")
    report = scan(path)
    assert report.payload_size == path.stat().st_size > 1 << 35
    assert report.find("obj[0]").retained_size == (1 << 33) + 9
    assert len(report.nodes) > 4
    peak, message = scan_elsewhere(path)
    assert message == f"({report.payload_size}, {len(report.nodes)})"
    assert peak < 100_000


@pytest.mark.parametrize("make", [bytes, io.BytesIO, Pipe])
@pytest.mark.parametrize("size", [0, 1, 10, 1000, len(DATA) // 2, len(DATA) - 10, len(DATA) - 1])
def test_truncated(make, size):
    with pytest.raises(PayloadError) as caught:
        scan(make(DATA[:size]))
    assert 0 <= caught.value.offset <= size


def test_a_claim_that_the_file_cannot_hold(tmp_path):
    path = tmp_path / "claim.pkl"
    path.write_bytes(b"\x80\x04\x8e" + (1 << 60).to_bytes(8, "little") + b"x" * 5000)
    for source in (path, path.read_bytes(), Pipe(path.read_bytes())):
        with pytest.raises(PayloadError):
            scan(source)


@pytest.mark.parametrize("codec", COMPRESSORS)
@pytest.mark.parametrize("make", [bytes, io.BytesIO, Pipe])
def test_compressed(codec, make):
    report = scan(make(COMPRESSORS[codec](DATA)))
    assert facts(report) == EXPECTED
    assert report.notes == (f"decompressed with {codec}",)


@pytest.mark.parametrize("codec", ["gzip", "bz2", "xz", "zstd"])
def test_members_one_after_the_other(codec):
    compress = COMPRESSORS[codec]
    assert facts(scan(compress(DATA[:5000]) + compress(DATA[5000:]))) == EXPECTED


@pytest.mark.parametrize("codec", COMPRESSORS)
def test_damaged(codec):
    data = bytearray(COMPRESSORS[codec](DATA))
    with pytest.raises(PayloadError):
        scan(bytes(data[: len(data) // 2]))
    data[len(data) // 2 :] = os.urandom(len(data) // 2)
    with pytest.raises(PayloadError):
        scan(bytes(data))


@pytest.mark.parametrize(("codec", "module"), [("lz4", "lz4.frame"), ("zstd", "zstandard")])
def test_missing_library_is_named(monkeypatch, codec, module):
    data = COMPRESSORS[codec](DATA)
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setitem(sys.modules, "compression.zstd", None)
    with pytest.raises(MissingLibrary, match=r"fastcap\[compression\]"):
        scan(data)


@pytest.mark.parametrize("opcodes", [b"]", b"(", b"N", b"]\x94", b"]2"])
def test_bombs_are_refused_early(opcodes):
    bomb = gzip.compress(b"\x80\x04" + opcodes * (80_000_000 // len(opcodes)), 1)
    with pytest.raises(PayloadError, match="bomb") as caught:
        scan(bomb)
    assert caught.value.offset < 40_000_000


@without_sanitizer
@pytest.mark.parametrize("opcodes", [b"(", b"(N", b"]"])
def test_a_bomb_takes_little_memory(tmp_path, opcodes):
    """A few ten kilobytes that unpack to 60 MB of structure."""
    bomb = gzip.compress(b"\x80\x04" + opcodes * (60_000_000 // len(opcodes)), 9)
    (tmp_path / "bomb.gz").write_bytes(bomb)
    peak, message = scan_elsewhere(tmp_path / "bomb.gz")
    assert "bomb" in message
    assert peak < 150_000


@pytest.mark.parametrize("value", [0.0, [], "a"])
def test_many_equal_things_that_compress_well_are_no_bomb(value):
    data = pickle.dumps([copy.copy(value) for _ in range(900_000)], 5)
    assert scan(gzip.compress(data)).payload_size == len(data)


def test_a_big_blob_that_compresses_well_is_no_bomb():
    report = scan(gzip.compress(pickle.dumps([bytes(200 << 20)], protocol=4), 1))
    assert report.payload_size > 200 << 20


@pytest.mark.parametrize("make", [bytes, io.BytesIO, Pipe, gzip.compress, lambda data: Pipe(bz2.compress(data))])
def test_several_pickles(make):
    data = DATA + pickle.dumps("second") + pickle.dumps([3])
    report = scan(make(data))
    assert (report.pickle_count, report.payload_size, report.type) == (3, len(data), "file")
    assert report.find("obj<pickle 1>").type == "str"
    assert report.find("obj<pickle 0>['blob']").type == "bytes"


@pytest.mark.parametrize("make", [bytes, io.BytesIO, gzip.compress])
def test_pickles_that_share_a_memo(make):
    file = io.BytesIO()
    pickler = pickle.Pickler(file, 2)  # from protocol 4 on, MEMOIZE does not say which entry it makes
    shared = ["shared", "list"]
    pickler.dump([shared])
    pickler.dump({"again": shared})
    report = scan(make(file.getvalue()))
    assert report.pickle_count == 2
    assert report.find("obj<pickle 0>[0]").shared_by == ("obj<pickle 1>['again']",)
    assert any("share one memo" in note for note in report.notes)


def test_bytes_behind_the_last_pickle_are_counted_and_reported():
    report = scan(pickle.dumps([1]) + b"\xff" * 1000)
    assert report.payload_size == len(pickle.dumps([1])) + 1000
    assert any("no pickle" in note for note in report.notes)
    assert sum(row.self_size for row in report.nodes) + report.overhead == report.payload_size


def test_progress_ends_at_the_end():
    seen = []
    scan(io.BytesIO(DATA), progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (len(DATA), len(DATA))
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    seen.clear()
    scan(Pipe(DATA), progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (len(DATA), None)


def test_buffers_by_size_or_by_value():
    buffers = []
    stream = pickle.dumps([np.arange(1000), np.ones(50)], protocol=5, buffer_callback=buffers.append)
    by_value = scan(stream, buffers=[buffer.raw() for buffer in buffers])
    by_size = scan(stream, buffers=[8000, 400])
    assert facts(by_value) == facts(by_size)
    assert by_value.buffer_size == 8400
    assert by_value.find("obj[0]").what == "ndarray int64 (1000,)"
    with pytest.raises(ValueError, match="buffers"):
        scan(stream, buffers=[8000, 400, 1])


def test_other_zip_files(tmp_path):
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
        archive.writestr("readme.txt", "nothing to see")
    with pytest.raises(PayloadError, match=r"no data\.pkl"):
        scan(tmp_path / "x.zip")
    with pytest.raises(PayloadError, match="seek"):
        scan(Pipe((tmp_path / "x.zip").read_bytes()))
    with pytest.raises(PayloadError, match="damaged"):
        scan(b"PK\x03\x04" + bytes(100))


def test_missing_file(tmp_path):
    with pytest.raises(FileNotFoundError):
        scan(tmp_path / "nothing.pkl")


def test_tables_come_with_the_notes():
    tables, notes = scan_source(DATA)
    assert (tables.stream_size, notes) == (len(DATA), ())


def test_bytes_behind_a_pickle_count_as_such():
    stream = pickle.dumps({"a": [1, 2, 3]})
    for tail in (b"garbage", b"\0" * 10_000):
        report = scan(stream + tail)
        types = {row.type: (row.count, row.size) for row in report.types}
        assert types["raw bytes"] == (1, len(tail))
        assert "file" not in types or types["file"] == (1, 0)
        assert sum(row.size for row in report.types) + report.overhead == report.payload_size
    two = {row.type: (row.count, row.size) for row in scan(stream + stream).types}
    assert "raw bytes" not in two
    assert two["file"][0] == 1
