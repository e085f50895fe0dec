"""Saves: what is restored is what was saved, whatever happens meanwhile, and nothing else."""

import contextlib
import gc as garbage
import json
import os
import pickle
import random
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import corpus
import numpy as np
import pytest
import strategies
from hypothesis import given
from hypothesis import strategies as st
from strategies import difference

import fastcap
from fastcap import saving
from fastcap._native.digest import copy_digest, digest
from fastcap.errors import DamagedSave, SaveError
from fastcap.saving import DirectoryStore, chunk_size, gc, saves

MIB = 1 << 20


class Model:
    def __init__(self, seed=0, count=4, size=2**18):
        make = np.random.default_rng(seed)
        self.layers = {f"layer{number}": make.random(size) for number in range(count)}
        self.notes = ["a", {"b": 1}]

    def predict(self):
        return lambda: self.layers["layer0"]


def files(folder, sub="parts"):
    return sorted(path for path in (folder / sub).rglob("*") if path.is_file())


def manifest_of(folder, name="latest"):
    return json.loads((folder / "manifests" / f"{name}.json").read_text())


def rewrite(folder, change, name="latest"):
    """Change a manifest so that its checksum is right."""
    facts = manifest_of(folder, name)
    del facts["checksum"]
    change(facts)
    facts["checksum"] = saving._checksum(facts)
    (folder / "manifests" / f"{name}.json").write_text(json.dumps(facts))


# ---- there and back --------------------------------------------------------------------------------------------------


VALUES = {
    "nothing": lambda: None,
    "model": Model,
    "closure": lambda: Model().predict(),
    "big bytes": lambda: [b"x" * (5 * MIB + 17), b"", b"y"],
    "big bytearray": lambda: bytearray(3 * MIB),
    "big str": lambda: ["ß" * MIB],
    "big list": lambda: [list(range(300_000)), 1],
    "root array": lambda: np.arange(1_000_003.0),
    "transposed": lambda: [np.arange(1e6).reshape(1000, 1000).T],
    "strided": lambda: [np.arange(1e6)[::2]],
    "exactly one chunk": lambda: [np.zeros(2**18), np.ones(2**19, "u1")],
    "one byte more": lambda: [np.zeros(2**21 + 1, "u1")],
    "many small arrays": lambda: [np.arange(10_000.0) + i for i in range(40)],
    "read-only array": lambda: [np.frombuffer(bytes(range(256)) * 8192)],
    "in an instance": lambda: corpus.Plain(data=np.ones(200_000), more=[np.zeros(200_000)]),
    "shared": lambda: (lambda part: [part, {"x": part}, part])(np.arange(400_000.0)),
}


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
@pytest.mark.parametrize("mmap", [False, True])
def test_what_is_saved_comes_back(value, mmap, tmp_path):
    made = value()
    report = fastcap.save(made, tmp_path / "save")
    assert report.size == manifest_of(tmp_path / "save")["size"]
    loaded = fastcap.restore(tmp_path / "save", mmap=mmap)
    assert difference(made, loaded) is None
    assert difference(made, fastcap.restore(tmp_path / "save", mmap=mmap, verify=True)) is None
    assert not files(tmp_path / "save", "temporary")


@given(strategies.objects())
def test_any_object_comes_back(tmp_path_factory, made):
    folder = tmp_path_factory.mktemp("save")
    fastcap.save(made, folder, min_size=300, sync=False)
    expected = pickle.loads(fastcap.dumps(made, 5))
    assert difference(expected, fastcap.restore(folder)) is None
    shutil.rmtree(folder)


def test_libraries(tmp_path):
    pandas, torch = pytest.importorskip("pandas"), pytest.importorskip("torch")
    arrow, sparse = pytest.importorskip("pyarrow"), pytest.importorskip("scipy.sparse")
    frame = pandas.DataFrame({"a": np.arange(500_000.0), "b": range(500_000), "c": ["x"] * 500_000})
    made = {
        "frame": frame, "state": torch.nn.Linear(1000, 1000).state_dict(), "table": arrow.table({"a": np.arange(1e6)}),
        "sparse": sparse.random(1000, 1000, 0.5, format="csr"), "tensor": torch.arange(10**6),
    }
    report = fastcap.save(made, tmp_path)
    assert report.part_count >= 5
    for mmap in (False, True):
        loaded = fastcap.restore(tmp_path, mmap=mmap)
        assert loaded["frame"].equals(frame)
        assert loaded["table"].equals(made["table"])
        assert (loaded["sparse"] != made["sparse"]).nnz == 0
        assert torch.equal(loaded["tensor"], made["tensor"])
        assert torch.equal(loaded["state"]["weight"], made["state"]["weight"])
        loaded["tensor"] += 1
        loaded["frame"]["a"] += 1


@pytest.mark.parametrize("mmap", [False, True])
def test_arrays_can_be_written_to_and_the_folder_stays(mmap, tmp_path):
    made = Model()
    fastcap.save(made, tmp_path)
    loaded = fastcap.restore(tmp_path, mmap=mmap)
    for layer in loaded.layers.values():
        layer += 1
    assert difference(made, fastcap.restore(tmp_path, verify=True)) is None


def test_mapped_memory_outlives_its_files(tmp_path):
    made = [np.arange(1_000_000.0)]
    fastcap.save(made, tmp_path / "save")
    [array] = fastcap.restore(tmp_path / "save", mmap=True)
    view = array[10:]
    del array
    shutil.rmtree(tmp_path / "save")
    garbage.collect()
    assert np.array_equal(view, np.arange(10.0, 1_000_000.0))


def mappings():
    with open("/proc/self/maps") as file:
        return sum("/parts/" in line for line in file)


def test_mapped_memory_is_given_back(tmp_path):
    fastcap.save([np.arange(3_000_000.0)], tmp_path)
    before = mappings()
    loaded = fastcap.restore(tmp_path, mmap=True)
    assert mappings() - before >= 10
    del loaded
    garbage.collect()
    assert mappings() == before


def test_mapped_memory_takes_no_descriptors(tmp_path):
    made = [np.full(2**17 + number, number) for number in range(100)]
    fastcap.save(made, tmp_path, sync=False)
    before = len(os.listdir("/proc/self/fd"))
    loaded = fastcap.restore(tmp_path, mmap=True)
    assert mappings() >= 100
    assert len(os.listdir("/proc/self/fd")) == before
    assert difference(made, loaded) is None


@pytest.mark.parametrize("mmap", [False, True])
def test_restored_arrays_are_not_shared_with_forked_processes(mmap, tmp_path):
    fastcap.save([np.zeros(2**18)], tmp_path)
    [array] = fastcap.restore(tmp_path, mmap=mmap)
    child = os.fork()
    if child == 0:
        array[:] = 1
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert not array.any()


def test_mapping_reads_nothing(tmp_path):
    """Bytes that nobody looks at need not even be right."""
    fastcap.save([np.arange(1_000_000.0)], tmp_path)
    for path in files(tmp_path):
        if path.stat().st_size == 2 * MIB:
            path.write_bytes(bytes(2 * MIB))
    assert not fastcap.restore(tmp_path, mmap=True)[0][:1000].any()
    with pytest.raises(DamagedSave, match=r"obj\[0\]: parts/.* was altered"):
        fastcap.restore(tmp_path, mmap=True, verify=True)


def test_the_payload_alone_says_what_is_missing(tmp_path):
    fastcap.save(Model(), tmp_path)
    small = min(files(tmp_path), key=lambda path: path.stat().st_size)
    with pytest.raises(SaveError, match=r"fastcap\.restore loads it"):
        pickle.loads(small.read_bytes())


def test_replacements(tmp_path):
    made = {"big": np.ones(400_000), "small": [1, 2], "deep": {"list": ["x" * 100] * 3, "all": list(range(400_000))}}
    fastcap.save(made, tmp_path)
    try:
        fastcap.loads(pickle.dumps({"a": 1}), replace={"obj['a']": 2})
    except TypeError:
        pytest.skip("loads has no replacements here")
    loaded = fastcap.restore(tmp_path, replace={"obj['big']": 0, "obj['small'][0]": 9, "obj['deep']['all'][5]": "five"})
    assert loaded["big"] == 0
    assert loaded["small"] == [9, 2]
    assert loaded["deep"]["all"][4:7] == [4, "five", 6]
    with pytest.raises(fastcap.FastcapError, match="other"):
        fastcap.restore(tmp_path, replace={"obj['other']": 0})


# ---- several saves in one folder -------------------------------------------------------------------------------------


def test_saves_have_names(tmp_path):
    fastcap.save(1, tmp_path, name="step-1")
    fastcap.save(2, tmp_path, name="step-2")
    fastcap.save(3, tmp_path)
    assert saves(tmp_path) == ["latest", "step-1", "step-2"]
    assert [fastcap.restore(tmp_path, name=name) for name in saves(tmp_path)] == [3, 1, 2]
    with pytest.raises(SaveError, match=r"no save called 'step-3' in .*: there are latest, step-1, step-2"):
        fastcap.restore(tmp_path, name="step-3")


@pytest.mark.parametrize("name", ["", ".", "..", "../x", "/x", "a/b", ".x", "x\0", "x" * 200, "ä", None])
def test_senseless_names(name, tmp_path):
    for work in (lambda: fastcap.save(1, tmp_path, name=name), lambda: fastcap.restore(tmp_path, name=name),
                 lambda: gc(tmp_path, drop=[name])):
        with pytest.raises(ValueError, match="cannot be the name"):
            work()
    assert not list(tmp_path.iterdir())


def test_unchanged_parts_are_not_written_again(tmp_path):
    made = Model()
    first = fastcap.save(made, tmp_path, name="1")
    assert first.written_size == first.size
    inodes = {path: path.stat().st_ino for path in files(tmp_path)}
    made.notes.append("more")
    second = fastcap.save(made, tmp_path, name="2")
    assert second.written_size < 2000
    assert second.reused_size == 8 * MIB
    assert {path: path.stat().st_ino for path in inodes} == inodes


def change_a_layer(made, step):
    made.layers[f"layer{step % len(made.layers)}"][:] += 1


def change_a_range(made, step):
    array = made.layers["layer0"]
    length = len(array) // 100
    array[step * 3 * length : (step * 3 + 1) * length] += 1


@pytest.mark.parametrize(("count", "change"), [(100, change_a_layer), (1, change_a_range)])
@pytest.mark.parametrize("size", [100 * MIB, pytest.param(500 * MIB, marks=pytest.mark.long)])
def test_a_series_costs_little_more_than_one(count, change, size, tmp_path):
    """One percent changes from save to save: one of a hundred arrays, or a part of the only one."""
    made = Model(count=count, size=size // 8 // count)
    written = []
    for step in range(10):
        written.append(fastcap.save(made, tmp_path, name=f"{step}", sync=False).written_size)
        change(made, step)
    assert sum(path.stat().st_size for path in files(tmp_path)) == sum(written)
    # A changed range touches whole chunks, which are a big share of a smaller object.
    assert sum(written) <= (1.2 if size == 500 * MIB or count > 1 else 1.4) * written[0]


def test_big_blobs_have_bigger_chunks():
    assert chunk_size(0) == chunk_size(4 << 30) == 2 * MIB
    assert chunk_size((4 << 30) + 1) == 4 * MIB
    assert chunk_size(1 << 40) == 512 * MIB


# ---- gc --------------------------------------------------------------------------------------------------------------


def test_gc_removes_what_no_save_needs(tmp_path):
    made = Model()
    fastcap.save(made, tmp_path, name="old")
    made.layers["layer1"][:] = 7
    fastcap.save(made, tmp_path)
    assert gc(tmp_path).removed_count == 0
    before = files(tmp_path)
    planned = gc(tmp_path, drop=["old"], dry_run=True)
    assert files(tmp_path) == before
    done = gc(tmp_path, drop=["old"])
    assert done == planned
    assert 2 * MIB <= done.removed_size < 2 * MIB + 5000
    assert done.kept_size == sum(path.stat().st_size for path in files(tmp_path))
    assert saves(tmp_path) == ["latest"]
    assert difference(made, fastcap.restore(tmp_path)) is None


def test_gc_tidies_up(tmp_path):
    fastcap.save(1, tmp_path)
    (tmp_path / "temporary" / "left").write_bytes(b"x")
    for stray in (tmp_path / "parts" / "below" / "stray", tmp_path / "parts" / ("0" * 32)):
        stray.parent.mkdir(exist_ok=True)
        stray.write_bytes(b"x")
    assert gc(tmp_path).removed_count == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lock", "manifests", "parts"]
    assert len(files(tmp_path)) == len(list((tmp_path / "parts").iterdir())) == 1


def test_gc_needs_a_folder_with_saves(tmp_path):
    for folder in (tmp_path, tmp_path / "none"):
        with pytest.raises(SaveError, match="there are no saves in"):
            gc(folder)
    fastcap.save(1, tmp_path)
    with pytest.raises(SaveError, match=r"has no manifests/other\.json"):
        gc(tmp_path, drop=["other"])


def test_gc_keeps_its_hands_off_what_it_cannot_read(tmp_path):
    fastcap.save(Model(), tmp_path, name="a")
    fastcap.save(1, tmp_path)
    (tmp_path / "manifests" / "a.json").write_text("{")
    before = files(tmp_path)
    with pytest.raises(DamagedSave, match=r"manifests/a\.json"):
        gc(tmp_path)
    assert files(tmp_path) == before
    assert gc(tmp_path, drop=["a"]).removed_size > 8 * MIB


class Pauses:
    """Stops the save that it is part of until it is told to go on."""

    def __init__(self):
        self.reached, self.go = threading.Event(), threading.Event()

    def __reduce__(self):
        self.reached.set()
        assert self.go.wait(60)
        return list, ()


def test_gc_waits_for_saves(tmp_path):
    made = Model()
    fastcap.save([made], tmp_path)
    fastcap.save(0, tmp_path)  # now nothing needs the parts
    pauses = Pauses()
    thread = threading.Thread(target=fastcap.save, args=([made, pauses], tmp_path))
    thread.start()
    assert pauses.reached.wait(60)
    with pytest.raises(SaveError, match="a save or restore is at work in"):
        gc(tmp_path)
    pauses.go.set()
    thread.join()
    gc(tmp_path)
    assert difference(made, fastcap.restore(tmp_path)[0]) is None


# ---- several at once -------------------------------------------------------------------------------------------------


def test_writers_at_once(tmp_path):
    """Some save the same, some other things, some under one name; somebody cleans up all the time."""
    shared = np.random.default_rng(0).random(2**18)
    errors = []

    def write(number):
        try:
            own = np.random.default_rng(number).random(2**17)
            for step in range(8):
                made = [shared, own + step, number]
                fastcap.save(made, tmp_path, name=f"own{number}", sync=False)
                fastcap.save(made, tmp_path, sync=False)
                assert difference(made, fastcap.restore(tmp_path, name=f"own{number}", mmap=step % 2)) is None
                assert np.array_equal(fastcap.restore(tmp_path)[0], shared)
        except Exception as error:
            errors.append(error)

    fastcap.save([shared, shared], tmp_path)
    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    cleaned = 0
    while any(thread.is_alive() for thread in threads):
        with contextlib.suppress(SaveError):
            cleaned += gc(tmp_path).removed_count
        time.sleep(0.001)
    assert not errors
    gc(tmp_path)
    assert len(saves(tmp_path)) == 5
    for number in range(4):
        assert fastcap.restore(tmp_path, name=f"own{number}")[2] == number


KILLED = """
import sys, numpy, fastcap
folder, seed = sys.argv[1], int(sys.argv[2])
made = {"a": numpy.random.default_rng(seed).random(2**18), "b": numpy.zeros(2**18), "text": "x" * 2**20}
for version in range(1000):
    made["version"] = (seed, version)
    made["b"][:] = seed * 1000 + version
    fastcap.save(made, folder)
    print(version, flush=True)
"""


@pytest.mark.parametrize("count", [4, pytest.param(100, marks=pytest.mark.long)])
def test_killed_at_any_moment(count, tmp_path):
    """The save that was complete last is there, or a later one; and it is after a clean-up."""
    folder = tmp_path / "save"
    choose = random.Random(count)
    last = (-1, 0)
    for seed in range(count):
        process = subprocess.Popen(
            [sys.executable, "-c", KILLED, folder, str(seed)], stdout=subprocess.PIPE, text=True, env=os.environ,
        )
        for _ in range(choose.randrange(3)):
            process.stdout.readline()
        if not process.stdout.readline():
            pytest.fail("the script that saves has failed")
        time.sleep(choose.random() * 0.1)
        process.send_signal(signal.SIGKILL)
        rest = process.stdout.read().split()
        process.wait()
        loaded = fastcap.restore(folder)
        assert loaded["version"] > last
        last = loaded["version"]
        assert last[0] == seed
        if rest:
            assert last[1] >= int(rest[-1])
        assert loaded["b"].min() == loaded["b"].max() == seed * 1000 + last[1]
        if seed % 3 == 2:
            gc(folder)
            assert not files(folder, "temporary")
            assert fastcap.restore(folder)["version"] == last
    gc(folder)
    assert len(files(folder)) <= 5
    assert fastcap.restore(folder)["version"] == last


# ---- failures --------------------------------------------------------------------------------------------------------


class Fails:
    def __reduce__(self):
        raise self.error


@pytest.mark.parametrize("error", [OSError(5, "own error"), ValueError("own error"), KeyboardInterrupt("own error")])
def test_an_object_that_fails_leaves_nothing(error, tmp_path):
    made = [Model(), Fails()]
    made[1].error = error
    with pytest.raises(type(error), match="own error") as caught:
        fastcap.save(made, tmp_path / "a" / "save")
    assert not isinstance(caught.value, SaveError)
    assert not list(tmp_path.iterdir())
    fastcap.save(Model(1), tmp_path)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(type(error), match="own error"):
        fastcap.save(made, tmp_path)
    assert [path for path in sorted(tmp_path.rglob("*")) if path.name != "temporary"] == [
        path for path in before if path.name != "temporary"]


LIMITED = """
import resource, signal, sys, numpy, fastcap
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
try:
    fastcap.save([numpy.random.default_rng(1).random(2**19)], sys.argv[1])
except fastcap.SaveError as error:
    print(error)
"""


def test_a_file_that_cannot_grow(tmp_path):
    fastcap.save([np.ones(3)], tmp_path)
    before = sorted(tmp_path.rglob("*"))
    run = subprocess.run([sys.executable, "-c", LIMITED, tmp_path], capture_output=True, text=True, check=True)
    assert run.stdout == f"cannot save to {tmp_path}: File too large\n"
    assert not run.stderr
    assert set(tmp_path.rglob("*")) <= set(before)
    assert fastcap.restore(tmp_path)[0].sum() == 3


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 8 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=8m", "none", str(disk)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True).returncode != 0:
        pytest.skip("needs the right to mount a file system")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_a_full_disk(small_disk):
    folder = small_disk / "save"
    fastcap.save(Model(count=1), folder)
    used = shutil.disk_usage(small_disk).used
    with pytest.raises(SaveError, match=rf"^cannot save to {folder}: No space left on device$"):
        fastcap.save(Model(1, count=8), folder)
    assert shutil.disk_usage(small_disk).used <= used
    assert difference(Model(count=1), fastcap.restore(folder)) is None
    with pytest.raises(SaveError, match="No space left on device"):
        fastcap.save(Model(1, count=8), small_disk / "new")
    assert not (small_disk / "new").exists()


def test_a_disk_that_fills_up_at_any_file(tmp_path, monkeypatch):
    from fastcap.folders import LocalFolder

    made = Model()
    fastcap.save(1, tmp_path / "save")
    before = sorted(path for path in tmp_path.rglob("*") if path.name != "temporary")
    write = LocalFolder.write
    for number in range(7):
        left = iter(range(number))

        def limited(self, name, data):
            if next(left, None) is None:
                raise OSError(28, "No space left on device")
            write(self, name, data)

        monkeypatch.setattr(LocalFolder, "write", limited)
        if number == 6:  # four layers, the payload, the manifest
            fastcap.save(made, tmp_path / "save")
            break
        with pytest.raises(SaveError, match="No space left"):
            fastcap.save(made, tmp_path / "save")
        assert sorted(path for path in tmp_path.rglob("*") if path.name != "temporary") == before
        assert fastcap.restore(tmp_path / "save") == 1
    assert difference(made, fastcap.restore(tmp_path / "save")) is None


def test_folders_that_cannot_be_written_to(tmp_path):
    (tmp_path / "file").write_text("x")
    for target in (tmp_path / "file", tmp_path / "file" / "save", "/proc/fastcap/save"):
        with pytest.raises(SaveError, match=r"^cannot save to .*: \w"):
            fastcap.save(Model(), target)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.fixture
def read_only(tmp_path):
    """A folder that nobody can write to, with a save in it."""
    folder = tmp_path / "save"
    fastcap.save(Model(), folder)
    if os.geteuid() != 0:
        folder.chmod(0o555)
        yield folder
        folder.chmod(0o755)
        return
    bind = ["mount", "--bind", str(folder), str(folder)]
    if subprocess.run(bind, capture_output=True).returncode != 0:
        pytest.skip("needs the right to mount")
    subprocess.run(["mount", "-o", "remount,ro,bind", str(folder)], check=True)
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_read_only_folder(read_only):
    before = sorted(read_only.rglob("*"))
    with pytest.raises(SaveError, match=rf"^cannot save to {read_only}: (Read-only file system|Permission denied)$"):
        fastcap.save(Model(1), read_only)
    assert sorted(read_only.rglob("*")) == before
    for mmap in (False, True):
        assert difference(Model(), fastcap.restore(read_only, mmap=mmap)) is None


def test_nothing_there(tmp_path):
    for folder in (tmp_path, tmp_path / "none"):
        with pytest.raises(SaveError, match="no save called 'latest' in"):
            fastcap.restore(folder)
        assert saves(folder) == []
    assert not list(tmp_path.iterdir())


# ---- damage ----------------------------------------------------------------------------------------------------------


def cut_off(path):
    path.write_bytes(path.read_bytes()[:-1])


def lengthen(path):
    path.write_bytes(path.read_bytes() + b"x")


def alter(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def turn_into_link(path):
    path.rename(path.parent / "moved")
    path.symlink_to(path.parent / "moved")


def turn_into_pipe(path):
    path.unlink()
    os.mkfifo(path)


def turn_into_folder(path):
    path.unlink()
    path.mkdir()


DAMAGE = [os.unlink, cut_off, lengthen, alter, turn_into_link, turn_into_pipe, turn_into_folder]


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("mmap", [False, True])
def test_each_damaged_part_is_named(damage, mmap, tmp_path):
    made = Model()
    fastcap.save(made, tmp_path)
    copy = tmp_path / "copy"
    for path in files(tmp_path):
        name = path.relative_to(tmp_path)
        shutil.copytree(tmp_path, copy, ignore=shutil.ignore_patterns("copy"))
        damage(copy / name)
        if damage is alter and mmap and path.stat().st_size >= MIB:
            fastcap.restore(copy, mmap=True)  # mapped bytes are not read
        with pytest.raises(DamagedSave) as caught:
            fastcap.restore(copy, mmap=mmap, verify=True)
        assert str(name) in str(caught.value)
        assert str(copy) in str(caught.value)
        owner = "obj.layers" if path.stat().st_size >= MIB else "the payload"
        assert owner in str(caught.value)
        shutil.rmtree(copy)


@pytest.mark.parametrize("damage", [os.unlink, cut_off, lengthen, alter])
def test_damaged_parts_are_written_again(damage, tmp_path):
    """By a later save of the same, where the size tells."""
    made = Model()
    fastcap.save(made, tmp_path)
    damage(files(tmp_path)[0])
    fastcap.save(made, tmp_path)
    if damage is alter:
        with pytest.raises(DamagedSave, match="was altered"):
            fastcap.restore(tmp_path)
    else:
        assert difference(made, fastcap.restore(tmp_path)) is None


@given(data=st.data())
def test_a_damaged_manifest(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("save")
    made = [np.arange(200_000.0), "text"]
    fastcap.save(made, folder, sync=False)
    path = folder / "manifests" / "latest.json"
    text = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(text) - 1))
        text[at : at + data.draw(st.integers(0, 40))] = data.draw(st.binary(max_size=4))
    path.write_bytes(text)
    loaded = made
    with contextlib.suppress(DamagedSave):
        loaded = fastcap.restore(folder)
    assert difference(made, loaded) is None
    shutil.rmtree(folder)


# ---- malice ----------------------------------------------------------------------------------------------------------

FAR = "../../../../../../../../etc/passwd"


def set_digest(value):
    def change(facts):
        facts["blobs"][0]["digests"][0] = value

    return change


def set_blob(**values):
    def change(facts):
        facts["blobs"][0].update(values)

    return change


MALICE = {
    "digest that leads out": set_digest(FAR),
    "absolute digest": set_digest("/etc/passwd"),
    "digest in capitals": set_digest("A" * 32),
    "digest with a line feed": set_digest("a" * 31 + "\n"),
    "digest that is a number": set_digest(1),
    "huge size": set_blob(size=1 << 62),
    "size of many chunks": set_blob(size=1 << 50),
    "negative size": set_blob(size=-1),
    "size that is no number": set_blob(size="1"),
    "fractional size": set_blob(size=1e3),
    "no digests": set_blob(digests=[]),
    "blob that is none": lambda facts: facts.update(blobs=[1]),
    "payload that is not there": lambda facts: facts.update(payload=[1000]),
    "payload before the first": lambda facts: facts.update(payload=[-1]),
    "payload of nothing": lambda facts: facts.update(payload=[]),
    "payload that is a number": lambda facts: facts.update(payload=1),
    "payload of truths": lambda facts: facts.update(payload=[True]),
    "other format": lambda facts: facts.update(format=2),
    "other digest": lambda facts: facts.update(digest="crc32"),
    "no list": lambda facts: facts.update(blobs={}),
    "path that is none": set_blob(path=None),
}


@pytest.mark.parametrize("change", MALICE.values(), ids=MALICE)
@pytest.mark.parametrize("mmap", [False, True])
def test_a_malicious_manifest(change, mmap, tmp_path):
    fastcap.save([np.ones(200_000)], tmp_path)
    rewrite(tmp_path, change)
    with pytest.raises(DamagedSave):
        fastcap.restore(tmp_path, mmap=mmap)
    with contextlib.suppress(DamagedSave):
        gc(tmp_path)


@pytest.mark.parametrize("mmap", [False, True])
def test_a_manifest_that_claims_more_than_there_is(mmap, tmp_path):
    """Memory is taken for what is there only."""
    fastcap.save([np.ones(200_000)], tmp_path)
    count = 2048
    rewrite(tmp_path, set_blob(size=count * 2 * MIB, digests=["0" * 32] * count))
    limit = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 512 * MIB, limit[1]))
    try:
        with pytest.raises(DamagedSave):
            fastcap.restore(tmp_path, mmap=mmap)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limit)


@pytest.mark.parametrize("link", ["parts", "manifests", "manifests/latest.json", "lock", "temporary"])
def test_links_that_lead_out(link, tmp_path):
    folder, outside = tmp_path / "save", tmp_path / "outside"
    fastcap.save([np.ones(200_000)], folder)
    (folder / link).rename(outside)
    (folder / link).symlink_to(outside)
    contents = {path: path.read_bytes() for path in [outside, *outside.rglob("*")] if path.is_file()}
    for mmap in (False, True) if link != "temporary" else ():
        with pytest.raises((SaveError, DamagedSave)):
            fastcap.restore(folder, mmap=mmap, verify=True)
    # The link may be refused, or replaced; nobody goes through it.
    for work in (
        lambda: fastcap.save([np.ones(200_000), np.zeros(300_000)], folder),
        lambda: fastcap.save([np.ones(200_000), np.zeros(300_000)], folder, name="other"),
        lambda: gc(folder, drop=["latest"]),
        lambda: gc(folder),
    ):
        with contextlib.suppress(SaveError, DamagedSave):
            work()
        assert {path: path.read_bytes() for path in [outside, *outside.rglob("*")] if path.is_file()} == contents


def test_a_link_to_the_folder_itself_is_fine(tmp_path):
    fastcap.save(1, tmp_path / "save")
    (tmp_path / "link").symlink_to(tmp_path / "save")
    fastcap.save(2, tmp_path / "link")
    assert fastcap.restore(tmp_path / "save") == 2


# ---- a store for dumps -----------------------------------------------------------------------------------------------


def test_a_store_of_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made = Model().predict()
    store = DirectoryStore("store", name="trainer")
    data = fastcap.dumps(made, store=store)
    assert len(data) < 20_000
    monkeypatch.chdir("/")
    assert difference(made, pickle.loads(data)) is None
    assert len(saves(tmp_path / "store")) == 4
    assert all(name.startswith("trainer.") for name in saves(tmp_path / "store"))
    assert gc(tmp_path / "store").removed_count == 0
    with pytest.raises(SaveError, match="is no save, but parts of payloads that are elsewhere"):
        fastcap.restore(tmp_path / "store", name=saves(tmp_path / "store")[0])
    alter(files(tmp_path / "store")[0])
    with pytest.raises(DamagedSave, match="was altered"):
        pickle.loads(data)
    gc(tmp_path / "store", drop=saves(tmp_path / "store"))
    assert not files(tmp_path / "store")
    with pytest.raises(DamagedSave, match="is missing"):
        pickle.loads(data)


def test_a_store_that_cannot_write(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(SaveError, match="cannot write to"):
        fastcap.dumps(Model(), store=DirectoryStore(tmp_path / "file"))
    with pytest.raises(ValueError, match="cannot be the name"):
        DirectoryStore(tmp_path, name="../x")


def test_the_store_by_its_public_name():
    from fastcap import stores

    assert stores.DirectoryStore is DirectoryStore


# ---- fsspec ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def remote():
    fsspec = pytest.importorskip("fsspec")
    system = fsspec.filesystem("memory")
    url = f"memory://saves/{random.randrange(1 << 60)}"
    yield url, system, url.removeprefix("memory:/")
    with contextlib.suppress(FileNotFoundError):
        system.rm(url.removeprefix("memory:/"), recursive=True)


def test_any_file_system(remote):
    url, system, root = remote
    made = Model()
    first = fastcap.save(made, url)
    assert difference(made, fastcap.restore(url)) is None
    assert difference(made, fastcap.restore(url, mmap=True)) is None  # reads
    made.layers["layer1"][:] = 7
    second = fastcap.save(made, url)
    assert first.written_size > 8 * MIB
    assert second.written_size < 3 * MIB
    assert saves(url) == ["latest"]
    assert gc(url).removed_size == 2 * MIB
    assert difference(made, fastcap.restore(url)) is None
    assert not system.find(f"{root}/leases")


def test_a_remote_save_that_runs_keeps_gc_away(remote):
    url, system, root = remote
    fastcap.save(1, url)
    pauses = Pauses()
    thread = threading.Thread(target=fastcap.save, args=([pauses], url))
    thread.start()
    assert pauses.reached.wait(60)
    with pytest.raises(SaveError, match="a save is at work in"):
        gc(url)
    pauses.go.set()
    thread.join()
    assert gc(url).kept_count == 1
    system.pipe_file(f"{root}/leases/dead", b"1000")  # of long ago
    gc(url)
    assert not system.find(f"{root}/leases")


def test_a_remote_save_writes_again_what_was_removed_meanwhile(remote):
    url, system, root = remote
    made = Model()
    fastcap.save(made, url)
    fastcap.save(0, url)
    pauses = Pauses()
    thread = threading.Thread(target=fastcap.save, args=([made, pauses], url))
    thread.start()
    assert pauses.reached.wait(60)
    while len(system.find(f"{root}/parts")) < 5:
        time.sleep(0.01)
    time.sleep(0.2)
    for path in system.find(f"{root}/parts"):  # as a gc does that has looked for leases just before
        system.rm_file(path)
    pauses.go.set()
    thread.join()
    assert difference(made, fastcap.restore(url)[0]) is None


def test_remote_damage(remote):
    url, system, root = remote
    fastcap.save(Model(), url)
    path = max(system.find(f"{root}/parts"), key=system.size)
    data = system.cat_file(path)
    for damaged, message in ((data[:-1], "bytes or more in the place of"), (bytes(len(data)), "was altered")):
        system.pipe_file(path, damaged)
        with pytest.raises(DamagedSave, match=message):
            fastcap.restore(url)
    system.rm_file(path)
    with pytest.raises(DamagedSave, match="is missing"):
        fastcap.restore(url)


def test_without_fsspec(monkeypatch):
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(SaveError, match=r"s3://bucket/x needs fsspec: pip install 'fastcap\[store\]'"):
        fastcap.save(1, "s3://bucket/x")


def test_unknown_urls(tmp_path):
    pytest.importorskip("fsspec")
    with pytest.raises(SaveError, match="cannot open nothing://x"):
        fastcap.restore("nothing://x")
    with pytest.raises(TypeError, match="a folder is a path or a URL"):
        fastcap.save(1, b"x")
    fastcap.save(1, f"file://{tmp_path}/save")
    assert fastcap.restore(tmp_path / "save") == 1


# ---- digests ---------------------------------------------------------------------------------------------------------

MASK = (1 << 64) - 1
P1, P2, P3, P4, P5 = (
    0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5,
)


def xxh64(data, seed):
    """Written after the specification, one step at a time."""

    def rotate(x, n):
        return ((x << n) | (x >> (64 - n))) & MASK

    def round_(lane, word):
        return rotate((lane + word * P2) & MASK, 31) * P1 & MASK

    words = memoryview(data[: len(data) // 32 * 32]).cast("Q") if len(data) >= 32 else []
    if len(data) >= 32:
        lanes = [(seed + P1 + P2) & MASK, (seed + P2) & MASK, seed, (seed - P1) & MASK]
        for number, word in enumerate(words):
            lanes[number % 4] = round_(lanes[number % 4], word)
        hashed = sum(rotate(lane, n) for lane, n in zip(lanes, (1, 7, 12, 18))) & MASK
        for lane in lanes:
            hashed = ((hashed ^ round_(0, lane)) * P1 + P4) & MASK
    else:
        hashed = (seed + P5) & MASK
    hashed = (hashed + len(data)) & MASK
    rest = data[len(data) // 32 * 32 :]
    while len(rest) >= 8:
        hashed = (rotate(hashed ^ round_(0, int.from_bytes(rest[:8], "little")), 27) * P1 + P4) & MASK
        rest = rest[8:]
    if len(rest) >= 4:
        hashed = (rotate(hashed ^ (int.from_bytes(rest[:4], "little") * P1 & MASK), 23) * P2 + P3) & MASK
        rest = rest[4:]
    for byte in rest:
        hashed = rotate(hashed ^ (byte * P5 & MASK), 11) * P1 & MASK
    hashed = (hashed ^ hashed >> 33) * P2 & MASK
    hashed = (hashed ^ hashed >> 29) * P3 & MASK
    return hashed ^ hashed >> 32


@given(st.one_of(st.binary(max_size=200), st.integers(0, 40_000).map(lambda n: bytes(i * 7 % 256 for i in range(n)))))
def test_digests_are_two_xxh64(data):
    expected = xxh64(data, 0).to_bytes(8, "big") + xxh64(data, 0x9E3779B97F4A7C15).to_bytes(8, "big")
    assert digest(data) == digest(bytearray(data)) == digest(memoryview(b"x" + data)[1:]) == expected
    target = bytearray(len(data) + 3)
    assert copy_digest(data, target) == expected
    assert target == data + bytes(3)


@pytest.mark.parametrize(
    ("data", "known"), [(b"", "ef46db3751d8e999"), (b"a", "d24ec4f1a98c6e5b"), (b"abc", "44bc2cf5ad770999")]
)
def test_known_digests(data, known):
    assert digest(data).hex()[:16] == known


def test_digests_of_almost_equal_blocks_differ():
    block = np.zeros(1 << 12, "u1")
    found = {digest(block)}
    for at in range(len(block)):
        for bit in range(8):
            block[at] = 1 << bit
            found.add(digest(block))
        block[at] = 0
    found |= {digest(bytes(length)) for length in range(1 << 12)}
    assert len(found) == 9 * (1 << 12) + 1


@pytest.mark.parametrize("size", [0, 1, 31, 32, 33, (1 << 14) - 1, 1 << 14, (1 << 14) + 1, 3 * (1 << 14) + 31, 100_000])
def test_digests_of_copies(size):
    data = np.random.default_rng(size).bytes(size)
    target = bytearray(b"\xff" * (size + 1))
    assert copy_digest(data, target) == digest(data)
    assert target == data + b"\xff"
    with pytest.raises(ValueError, match="do not fit"):
        copy_digest(data + b"x", bytearray(size))
    with pytest.raises((BufferError, TypeError)):
        copy_digest(data, bytes(size))


@pytest.mark.parametrize("data", [1, "text", None, np.ones((4, 4))[:, ::2]])
def test_digests_need_contiguous_memory(data):
    with pytest.raises((TypeError, BufferError, ValueError)):
        digest(data)


# ---- the command line ------------------------------------------------------------------------------------------------


def test_gc_on_the_command_line(tmp_path, capsys):
    from fastcap.cli import main

    folder = str(tmp_path / "save")
    fastcap.save([np.ones(2**18)], folder, name="old")
    fastcap.save([np.zeros(2**18)], folder)
    assert main(["gc", folder, "--drop", "old", "--dry-run"]) == 0
    assert capsys.readouterr().out.startswith("would remove 1 file (2.0 MiB), kept 2 files (2.0 MiB)")
    assert main(["gc", folder, "--drop", "old"]) == 0
    assert capsys.readouterr().out.startswith("removed 1 file (2.0 MiB), kept 2 files (2.0 MiB)")
    for arguments, message in (
        ([folder, "--drop", "old"], "has no manifests/old.json"),
        ([folder, "--drop", "../x"], "cannot be the name of a save"),
        ([str(tmp_path)], f"there are no saves in {tmp_path}"),
        ([folder, "--wait", "-1"], "--wait"),
        (["nothing://x"], "cannot open nothing://x" if "fsspec" in sys.modules else "fsspec"),
    ):
        assert main(["gc", *arguments]) == 2
        assert message in capsys.readouterr().err
