"""Files of joblib.dump: arrays stand between the opcodes, and belong to the objects that hold them."""

import io
import os
import pickle
import random
import struct
import subprocess
import sys
import time
import tracemalloc
import zlib

import numpy as np
import pytest
from sources import Counting, Pipe, check_sums, scan_any

from fastcap.analysis import scan
from fastcap.errors import PayloadError
from fastcap.opening import BLOCK

joblib = pytest.importorskip("joblib", reason="joblib is not installed")

OBJECT = {
    "big": np.arange(60_000.0).reshape(200, 300),
    "plain": [1, 2, "three"],
    "fortran": np.asfortranarray(np.ones((30, 4), "f4")),
    "text": np.array(["a", "bcd"]),
    "objects": np.array([{"a": 1}, None, "x" * 2000], dtype=object),
    "record": np.zeros(5, dtype=[("x", "i4"), ("y", "f8", (2,))]),
    "empty": np.zeros((0, 3)),
    "scalar": np.array(3.5),
    "date": np.array(["2020-01-01"], "M8[s]"),
    "big endian": np.arange(4, dtype=">i8"),
    "bool": np.ones(9, bool),
    "void": np.zeros(3, "V7"),
    "complex": np.zeros(3, "c16"),
    "after": np.ones(7),
}
WHAT = {
    "big": "ndarray float64 (200, 300)",
    "fortran": "ndarray float32 (30, 4)",
    "text": "ndarray U3 (2,)",
    "objects": "ndarray object (3,)",
    "record": "ndarray (x, y) (5,)",
    "empty": "ndarray float64 (0, 3)",
    "scalar": "ndarray float64 ()",
    "date": "ndarray datetime64[s] (1,)",
    "big endian": "ndarray >int64 (4,)",
    "bool": "ndarray bool (9,)",
    "after": "ndarray float64 (7,)",
}


def dump(obj, **options):
    file = io.BytesIO()
    joblib.dump(obj, file, **options)
    return file.getvalue()


def without_alignment(monkeypatch):
    """As joblib 1.1 and older wrote: the array follows at once."""
    original = joblib.numpy_pickle.NumpyArrayWrapper.__init__

    def init(self, *args, **kwargs):
        original(self, *args, **kwargs)
        del self.numpy_array_alignment_bytes

    monkeypatch.setattr(joblib.numpy_pickle.NumpyArrayWrapper, "__init__", init)


class Unaligned(io.RawIOBase):
    """A target that cannot tell where it is: joblib then writes no padding."""

    def __init__(self):
        self.data = bytearray()

    def writable(self):
        return True

    def write(self, data):
        self.data += data
        return memoryview(data).nbytes

    def tell(self):
        raise io.UnsupportedOperation


def facts(report):
    return report.payload_size, report.node_count, report.nodes, report.captures


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_arrays_have_their_bytes(protocol):
    data = dump(OBJECT, protocol=protocol)
    report = check_sums(scan(data))
    assert (report.payload_size, report.notes, report.pickle_count) == (len(data), (), 1)
    assert {key: report.find(f"obj[{key!r}]").what for key in WHAT} == WHAT
    assert report.captures[0].path == "obj['big']"
    for key, value in OBJECT.items():
        found = report.find(f"obj[{key!r}]")
        least = len(pickle.dumps(value, 5)) if key == "objects" else getattr(value, "nbytes", 0)
        assert least <= found.retained_size <= found.subtree_size < least + 1000, key


@pytest.mark.parametrize("change", ["", "no padding", "no position"])
def test_alignments(monkeypatch, change):
    if change == "no padding":
        without_alignment(monkeypatch)
    data = dump(OBJECT)
    if change == "no position":
        file = Unaligned()
        joblib.dump(OBJECT, file)
        data = bytes(file.data)
    report = check_sums(scan(data))
    assert report.payload_size == len(data)
    assert {key: report.find(f"obj[{key!r}]").what for key in WHAT} == WHAT
    loaded = joblib.load(io.BytesIO(data))
    assert np.array_equal(loaded["after"], OBJECT["after"])


@pytest.mark.parametrize("compress", [1, 3, ("zlib", 9), ("gzip", 3), ("bz2", 3), ("lzma", 3), ("xz", 3), ("lz4", 3)])
@pytest.mark.parametrize("make", [bytes, io.BytesIO, Pipe])
def test_compressed(compress, make):
    if compress == ("lz4", 3):
        pytest.importorskip("lz4", reason="lz4 is not installed")
    report = check_sums(scan(make(dump(OBJECT, compress=compress))))
    assert report.find("obj['big']").retained_size >= OBJECT["big"].nbytes
    assert {key: report.find(f"obj[{key!r}]").what for key in WHAT} == WHAT
    assert len(report.notes) == 1


@pytest.mark.parametrize("make", [io.BytesIO, Pipe, lambda data: Pipe(data, 1), lambda data: Pipe(data, 7)])
def test_any_chunks_give_the_same(make):
    data = dump({key: value for key, value in OBJECT.items() if key != "big"})
    assert facts(scan(make(data))) == facts(scan(data))


def test_a_dropped_array_shrinks_the_file_by_what_it_retains():
    obj = {"a": np.ones(5000), "b": [np.zeros((40, 40)), "text"], "c": np.arange(900)}
    whole = scan(dump(obj))
    for key in ("a", "c"):
        less = dump({name: value for name, value in obj.items() if name != key})
        retained = whole.find(f"obj[{key!r}]").retained_size
        # what the first array describes (class, names, dtype) is written once; padding varies by up to 16 bytes
        assert abs(whole.payload_size - len(less) - retained) < 60


def test_array_bytes_are_skipped_not_read():
    file = Counting(dump([np.zeros(64 * BLOCK // 8), "end", np.zeros(8 * BLOCK, "u1"), np.ones(3)]))
    report = check_sums(scan(file))
    assert report.payload_size == len(file.getvalue())
    assert file.taken < 5 * BLOCK


def test_arrays_that_look_like_opcodes():
    """Every opcode, a whole pickle, another joblib file: bytes of an array mean nothing."""
    inner = dump([np.ones(3)])
    arrays = [np.frombuffer(data, "u1") for data in (b".", bytes(range(256)), pickle.dumps([1]), inner)]
    data = dump([*arrays, {"last": arrays}])
    report = check_sums(scan(data))
    assert (report.payload_size, report.pickle_count) == (len(data), 1)
    assert report.find("obj[4]['last'][3]").what == f"ndarray uint8 ({len(inner)},)"


def test_estimator():
    ensemble = pytest.importorskip("sklearn.ensemble", reason="scikit-learn is not installed")
    model = ensemble.RandomForestRegressor(5, max_depth=4, random_state=0).fit(np.eye(50), np.arange(50))
    model.training_data = np.zeros((300, 300))
    data = dump(model)
    report = check_sums(scan(data))
    assert report.payload_size == len(data)
    assert report.type == "RandomForestRegressor"
    assert report.captures[0].path == "obj.training_data"
    assert sum(row.type == "ndarray" for row in report.types) == 1


def test_data_frame():
    pandas = pytest.importorskip("pandas", reason="pandas is not installed")
    data = dump({"frame": pandas.DataFrame({"x": np.arange(1000.0), "y": ["text"] * 1000}), "n": 1})
    report = check_sums(scan(data))
    assert report.payload_size == len(data)
    assert report.find("obj['frame']").retained_size > 0.9 * len(data)


def test_two_dumps_in_one_file():
    file = io.BytesIO()
    joblib.dump({"a": np.ones(1000)}, file)
    joblib.dump([np.zeros(2000)], file)
    report = check_sums(scan(file.getvalue()))
    assert (report.pickle_count, report.payload_size) == (2, len(file.getvalue()))
    assert report.find("obj<pickle 0>['a']").what == "ndarray float64 (1000,)"
    assert report.find("obj<pickle 1>[0]").what == "ndarray float64 (2000,)"


def test_a_copy_of_joblib_in_another_package():
    data = dump([np.ones(1000)], protocol=2).replace(b"joblib.numpy_pickle", b"sklearn.externals.joblib.numpy_pickle")
    report = check_sums(scan(data))
    assert report.payload_size == len(data)
    assert report.find("obj[0]").what == "ndarray float64 (1000,)"


def test_an_ordinary_pickle_of_the_wrapper():
    """No array follows where pickle itself wrote the object that joblib writes in place of an array."""
    wrapper = joblib.numpy_pickle.NumpyArrayWrapper(np.ndarray, (1000,), "C", np.dtype("f8"))
    data = pickle.dumps([wrapper, wrapper, "end"])
    for source in (data, io.BytesIO(data)):
        report = check_sums(scan(source))
        assert report.payload_size == len(data)
    with pytest.raises(PayloadError):
        scan(Pipe(data))


def test_files_of_joblib_before_0_10():
    class NDArrayWrapper:
        def __init__(self, name):
            self.filename, self.subclass, self.allow_mmap = name, np.ndarray, True

    NDArrayWrapper.__module__, NDArrayWrapper.__qualname__ = "joblib.numpy_pickle", "NDArrayWrapper"
    found = joblib.numpy_pickle.NDArrayWrapper
    try:
        joblib.numpy_pickle.NDArrayWrapper = NDArrayWrapper
        data = pickle.dumps({"a": NDArrayWrapper("x.pkl_01.npy"), "b": NDArrayWrapper("x.pkl_02.npy"), "c": [1]})
    finally:
        joblib.numpy_pickle.NDArrayWrapper = found
    report = check_sums(scan(data))
    assert report.find("obj['b']").what == "ndarray in the file 'x.pkl_02.npy'"
    (note,) = report.notes
    assert "2 arrays are in files of their own" in note
    assert "'x.pkl_01.npy', 'x.pkl_02.npy'" in note


@pytest.mark.parametrize("space", [b"", b" "])
def test_compressed_files_of_joblib_before_0_10(space):
    stream = pickle.dumps(["x" * 1000, 1])
    data = b"ZF" + hex(len(stream)).encode().ljust(19) + space + zlib.compress(stream)
    for source in (data, Pipe(data)):
        report = check_sums(scan(source))
        assert (report.payload_size, report.notes) == (len(stream), ("decompressed with zlib (joblib before 0.10)",))


@pytest.mark.parametrize("make", [bytes, io.BytesIO, Pipe])
def test_truncated(make):
    data = dump(OBJECT)
    for size in [*range(0, 1200, 17), len(data) // 2, *range(len(data) - 3000, len(data), 13), len(data) - 1]:
        with pytest.raises(PayloadError) as caught:
            scan(make(data[:size]))
        assert 0 <= caught.value.offset <= size
    with pytest.raises(PayloadError, match="in the middle of an array"):
        scan(make(data[: len(data) // 2]))


def write_wrapper(shape, dtype=None):
    wrapper = joblib.numpy_pickle.NumpyArrayWrapper(np.ndarray, shape, "C", np.dtype("f8") if dtype is None else dtype)
    return pickle.dumps([wrapper])[:-2]


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((1 << 60,), None), ((1 << 40, 1 << 40), None), ((-1,), None), (("x",), None), ((2,) * 5000, None), (5, None),
     ((5,), "f8"), ((5,), ()), ((5,), {"a": 1}), ((5,), "x" * 100_000)],
)  # fmt: skip
def test_descriptions_that_make_no_sense(shape, dtype):
    data = write_wrapper(shape, dtype) + b"\1\1" + bytes(1000)
    tracemalloc.start()
    try:
        for source in (data, Pipe(data)):
            with pytest.raises(PayloadError):
                scan(source)
        assert tracemalloc.get_traced_memory()[1] < 20 << 20
    finally:
        tracemalloc.stop()


def test_a_description_that_refers_to_itself():
    head = write_wrapper((3,))
    # ``wrapper.__setstate__({"shape": <the list that holds the wrapper>})``: memo entry 0
    data = head.rpartition(b"\x8c\x05shape")[0] + b"\x8c\x05shapeh\x00ub."
    assert data[2:3] == b"\x95"
    data = data[:3] + struct.pack("<Q", len(data) - 11) + data[11:]  # its frame is shorter now
    with pytest.raises(PayloadError, match="description"):
        scan(Pipe(data))
    assert scan(data).payload_size == len(data)  # read again as the ordinary pickle that it is


def test_many_descriptions_that_share_a_large_part():
    """Each costs what it has in opcodes, not what it refers to."""
    dtype = np.dtype([(f"field {i}", "f8") for i in range(1000)])
    few, many = (dump([np.zeros(1, dtype) for _ in range(count)]) for count in (200, 2000))
    times = []
    for data in (few, many):
        start = time.perf_counter()
        check_sums(scan(data))
        times.append(time.perf_counter() - start)
    assert times[1] < 40 * times[0] + 1


@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_random_changes(protocol, long_run):
    rng = random.Random(protocol)
    original = dump({key: value for key, value in OBJECT.items() if key != "big"}, protocol=protocol)
    survived = 0
    rounds = 20_000 if long_run else 1500
    for _ in range(rounds):
        data = bytearray(original)
        for _ in range(rng.choice([1, 1, 2, 5])):
            data[rng.randrange(len(data))] = rng.randrange(256)
        if rng.random() < 0.1:
            del data[rng.randrange(len(data)) :]
        survived += scan_any(bytes(data))
    assert 0 < survived < rounds


class Evil:
    def __init__(self, folder):
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (self.folder,)


def test_nothing_is_imported_or_executed(tmp_path):
    (tmp_path / "x.joblib").write_bytes(dump([Evil(str(tmp_path / "made")), np.ones(100), Evil(str(tmp_path / "too"))]))
    code = (
        "import sys; from fastcap.analysis import scan; r = scan(sys.argv[1]); r.nodes, r.captures, r.types\n"
        "assert r.find('obj[1]').what == 'ndarray float64 (100,)'\n"
        "assert not {'joblib', 'torch'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, tmp_path / "x.joblib"], check=True)
    assert os.listdir(tmp_path) == ["x.joblib"]
