"""Files of torch.save, new and old: the storages of tensors count, with the objects that refer to them."""

import gzip
import io
import pickle
import random
import zipfile

import pytest
from sources import check_sums, scan_any

from fastcap.analysis import scan
from fastcap.errors import PayloadError
from fastcap.opening import BLOCK

torch = pytest.importorskip("torch", reason="torch is not installed")


def model():
    return torch.nn.Sequential(torch.nn.Linear(40, 30), torch.nn.ReLU(), torch.nn.Linear(30, 2))


def state():
    weight = torch.zeros(300, 40)
    return {
        "layer.weight": weight,
        "view": weight[3],
        "tied": weight,
        "step": 3,
        **{str(dtype): torch.ones(100, dtype=dtype) for dtype in DTYPES},
    }


DTYPES = [
    torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8,
    torch.bool, torch.complex64, torch.complex128,
]  # fmt: skip
NEW, OLD = {}, {"_use_new_zipfile_serialization": False}
LAYOUTS = [{**layout, "pickle_protocol": protocol} for layout in (NEW, OLD) for protocol in (2, 4, 5)]


def save(obj, **options):
    file = io.BytesIO()
    torch.save(obj, file, **options)
    return file.getvalue()


def storages_of(data):
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return [info for info in archive.infolist() if "/data/" in info.filename]


def pickle_of(data):
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("/data.pkl"))
        return archive.read(name)


@pytest.mark.parametrize("options", LAYOUTS)
def test_storages_belong_to_their_tensors(options):
    obj = state()
    data = save(obj, **options)
    report = check_sums(scan(data))
    old = "_use_new_zipfile_serialization" in options
    root = "obj<pickle 3>" if old else "obj"
    if old:
        assert report.payload_size == len(data)
    else:
        assert report.payload_size == len(pickle_of(data)) + sum(info.file_size for info in storages_of(data))
    owned = {name: value for name, value in obj.items() if name not in ("view", "tied", "step")}
    for name, value in owned.items():
        found = report.find(f"{root}[{name!r}]")
        size = value.untyped_storage().nbytes()
        assert size <= found.retained_size <= found.subtree_size < size + 250, name
        assert found.type == "tensor"
    assert report.find(f"{root}['view']").retained_size < 250  # the storage counts once, with the tensor written first
    assert report.find(f"{root}['layer.weight']").shared_by == (f"{root}['tied']",)
    assert report.captures[0].path == f"{root}['layer.weight']"
    assert report.captures[0].what == "tensor float32 (300, 40)"
    (note,) = report.notes
    assert f"{len(owned)} tensor storages" in note


@pytest.mark.parametrize("options", [NEW, OLD])
def test_modules(options):
    obj = model()
    data = save(obj, **options)
    report = check_sums(scan(data))
    root = "obj<pickle 3>" if options else "obj"
    found = report.find(f"{root}[0]")
    assert found.type == "Linear"
    assert found.retained_size > 30 * 40 * 4 + 30 * 4
    assert report.buffer_size == sum(p.untyped_storage().nbytes() for p in obj.parameters()) + (32 if options else 0)


@pytest.mark.parametrize("options", [NEW, OLD])
def test_a_dropped_tensor_shrinks_the_file(options):
    obj = {"a": torch.zeros(5000), "b": torch.zeros(3000, dtype=torch.float64), "c": [torch.zeros(700)]}
    whole = scan(save(obj, **options))
    for name in obj:
        less = scan(save({key: value for key, value in obj.items() if key != name}, **options))
        root = "obj<pickle 3>" if options else "obj"
        retained = whole.find(f"{root}[{name!r}]").retained_size
        assert abs(whole.payload_size - less.payload_size - retained) < 150


@pytest.mark.parametrize("options", [NEW, OLD])
def test_every_kind_of_source(tmp_path, options):
    data = save(state(), **options)
    (tmp_path / "m.pt").write_bytes(data)
    expected = scan(data)
    for source in (tmp_path / "m.pt", io.BytesIO(data), bytearray(data)):
        report = scan(source)
        assert (report.payload_size, report.nodes) == (expected.payload_size, expected.nodes)


def test_old_files_through_pipes_and_compressed():
    class Pipe:
        def __init__(self, data, most):
            self.inner, self.most = io.BytesIO(data), most

        def read(self, size=-1):
            return self.inner.read(min(size, self.most))

    data = save(state(), **OLD)
    expected = scan(data)
    for source in (Pipe(data, 1), Pipe(data, 10_007), gzip.compress(data)):
        report = check_sums(scan(source))
        assert (report.payload_size, report.nodes) == (expected.payload_size, expected.nodes)


def test_storages_of_old_files_are_skipped_not_read():
    class Counting(io.BytesIO):
        taken = 0

        def read(self, size=-1):
            block = super().read(size)
            self.taken += len(block)
            return block

    file = Counting(save([torch.zeros(16 * BLOCK // 4)], **OLD))
    assert scan(file).payload_size == len(file.getvalue())
    assert file.taken < 3 * BLOCK


@pytest.mark.parametrize("change", [-1000, -1, 1, 1000])
def test_old_file_of_another_length(change):
    """Then nobody knows whose bytes they are: they count as what follows the pickles."""
    data = save(state(), **OLD)
    data = data[:change] if change < 0 else data + bytes(change)
    report = check_sums(scan(data))
    assert report.payload_size == len(data)
    assert (report.buffer_size, report.find("obj<raw 0>").type) == (0, "raw bytes")
    assert any("no pickle" in note for note in report.notes)


def test_old_file_cut_within_its_pickles():
    data = save({"a": torch.zeros(5), "b": list(range(1000))}, **OLD)
    at = data.index(b"storage")
    report = check_sums(scan(data[: at + 2000]))
    assert report.payload_size == at + 2000
    with pytest.raises(PayloadError):
        scan(data[:10])


def test_one_pickle_and_a_tail_is_a_file_of_one_pickle():
    assert scan(pickle.dumps([1]) + b"\xff" * 10).what == "file of 1 pickle"


def rewritten(data, change):
    """The archive with its members changed: ``change(name, bytes)`` gives bytes, or None to leave it out."""
    file = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(file, "w") as new:
        for info in old.infolist():
            content = change(info.filename, old.read(info))
            if content is not None:
                new.writestr(info.filename, content, zipfile.ZIP_STORED)
    return file.getvalue()


def test_storages_that_nobody_names_or_that_are_missing():
    data = save({"a": torch.zeros(100), "b": torch.zeros(200)})
    without = rewritten(data, lambda name, content: None if name.endswith("/data/1") else content)
    report = check_sums(scan(without))
    assert report.buffer_size == 400
    other = rewritten(data, lambda name, content: pickle.dumps(["nothing"]) if name.endswith("data.pkl") else content)
    report = check_sums(scan(other))
    assert (report.buffer_size, report.find("obj[0]").type) == (0, "str")
    assert any("2 more storages of 1,200 bytes belong to no object" in note for note in report.notes)


def test_a_compressed_archive():
    data = save({"a": torch.zeros(100), "words": ["word"] * 1000})
    file = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as new:
        for info in old.infolist():
            new.writestr(info.filename, old.read(info))
    assert scan(file.getvalue()).payload_size == scan(data).payload_size


def test_a_bomb_in_an_archive_is_refused():
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive, \
            archive.open("x/data.pkl", "w") as member:  # fmt: skip
        member.write(b"\x80\x04")
        for _ in range(80):
            member.write(b"]" * 1_000_000)
    with pytest.raises(PayloadError, match="bomb") as caught:
        scan(file.getvalue())
    assert caught.value.offset < 40_000_000


@pytest.mark.parametrize("options", [NEW, OLD])
def test_random_changes(options, long_run):
    rng = random.Random(str(options))
    original = save({"a": torch.zeros(100), "b": [torch.zeros(3), torch.ones(2, dtype=torch.int64)]}, **options)
    places = [place for place in range(len(original)) if original[place] or rng.random() < 0.05]
    survived, rounds = 0, 20_000 if long_run else 1000
    for _ in range(rounds):
        data = bytearray(original)
        for _ in range(rng.choice([1, 1, 2, 5])):
            data[rng.choice(places)] = rng.randrange(256)
        if rng.random() < 0.1:
            del data[rng.randrange(len(data)) :]
        survived += scan_any(bytes(data))
    assert 0 < survived < rounds


@pytest.mark.parametrize("options", [NEW, OLD])
def test_every_truncation(options):
    data = save({"a": torch.zeros(10)}, **options)
    for size in range(len(data)):
        scan_any(data[:size])
