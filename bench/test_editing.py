"""What editing a file costs: against copying what is left, in memory, and for each node of a stream of small ones."""

import json
import os
import pathlib
import pickle
import shutil
import statistics
import subprocess
import sys
import time

import pytest

from fastcap.editing import Editor, edit

ROOT = pathlib.Path(__file__).resolve().parent.parent
PART = 16 << 20  # bytes of one array of the big file
MOST_MEMORY = 100_000_000  # bytes


def write_trainer(path, dropped, kept):
    """A pickle like that of a trainer, with so many arrays in an oversized dict and in what is to be kept."""
    block = os.urandom(1 << 20) * (PART >> 20)
    with open(path, "wb") as file:
        pickle.Pickler(file, 5).dump({
            "config": {"lr": 0.1, "layers": [{"size": k, "name": f"layer {k}"} for k in range(1000)]},
            "cache": {f"part {k}": bytearray(block) for k in range(dropped)},
            "weights": [bytearray(block) for _ in range(kept)],
        })


def peak_of(code):
    """Peak memory of a process that runs some code, in bytes. (getrusage counts what its parent had, too.)"""
    program = f"{code}\nprint(next(line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM')))"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-c", program]
    return 1024 * int(subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True).stdout)


def seconds(action):
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def test_slim_a_big_file(benchmark, tmp_path):
    """2 GiB, of which half is dropped: the time of copying the other half, in turns; and peak memory."""
    source, target, copy = tmp_path / "trainer.pkl", tmp_path / "small.pkl", tmp_path / "copy.pkl"
    write_trainer(source, 64, 64)
    edit(source, target, drop="obj['cache']")
    ratios = []

    def copy_through():
        with open(target, "rb", buffering=0) as read, open(copy, "wb", buffering=0) as write:
            shutil.copyfileobj(read, write, 1 << 20)

    def measure():
        for path in (target, copy):
            path.unlink(missing_ok=True)
        edit_time = seconds(lambda: edit(source, target, drop="obj['cache']"))
        ratios.append(edit_time / seconds(copy_through))

    benchmark.pedantic(measure, rounds=5, warmup_rounds=1)
    peak = peak_of(f"import fastcap\nfastcap.edit({str(source)!r}, {str(target)!r}, drop=\"obj['cache']\")")
    benchmark.extra_info["edit / copy of what is left"] = [round(ratio, 2) for ratio in sorted(ratios)]
    benchmark.extra_info["peak memory"] = peak
    benchmark.extra_info["sizes"] = json.dumps([source.stat().st_size, target.stat().st_size])
    assert peak < MOST_MEMORY
    assert statistics.median(ratios) < 1.5


def test_nodes_a_second(benchmark):
    """1.2 million nodes in 16 MB, of which a third is dropped; references move."""
    rows = [{"id": k, "name": f"user-{k}", "tags": ["a", "b"], "place": (k, k + 0.5)} for k in range(300_000)]
    stream = pickle.dumps({"drop": rows[:100_000], "keep": rows[100_000:], "again": rows[50_000:50_100]}, 5)
    with Editor(stream) as editor:
        editor.drop("obj['drop']")
        nodes = len(editor.graph)

        def write():
            for _ in editor.blocks():
                pass

        benchmark.pedantic(write, rounds=5, warmup_rounds=1)
        writing = benchmark.stats.stats.min
    whole = min(seconds(lambda: edit(stream, drop="obj['drop']")) for _ in range(3))
    loading = min(seconds(lambda: pickle.loads(stream)) for _ in range(3))
    benchmark.extra_info["million nodes a second, written"] = round(nodes / writing / 1e6, 1)
    benchmark.extra_info["million nodes a second, scanned, found and written"] = round(nodes / whole / 1e6, 1)
    benchmark.extra_info["of the time of pickle.loads"] = round(whole / loading, 2)


@pytest.mark.parametrize("count", [100_000, 1_000_000])
def test_look_up_in_a_big_dict(benchmark, count):
    stream = pickle.dumps({f"key {k}": [k] for k in range(count)})

    def look_up():
        with Editor(stream) as editor:
            start = time.process_time()
            editor.drop(f"obj['key {count - 1}']")
            taken.append(time.process_time() - start)

    taken: list[float] = []
    benchmark.pedantic(look_up, rounds=3)
    benchmark.extra_info["ns an entry"] = round(min(taken) / count * 1e9, 1)
