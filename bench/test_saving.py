"""Saves against what the operating system and pickle do with the same bytes, in turns, by the clock.

Threads work on both sides, or none, and disks make everybody wait: processor time would not tell. The folder is on the
disk of ``--basetemp`` or, where that is not given, of the temporary folder. ``cp`` leaves it to the system when to
write to the disk, and so does a save with ``sync=False``, which is what it is held against. "copy and sync" and a save
with ``sync=True`` wait for the disk.
"""

import os
import pickle
import shutil
import subprocess
import time

import numpy as np
import pytest

import fastcap
from bench import targets

MIB = 1 << 20
ARRAY = 32 * MIB


def arrays(size):
    """That many bytes of random arrays, of 32 MiB each."""
    make = np.random.default_rng(0)
    return {f"array{number}": make.random(ARRAY // 8) for number in range(size // ARRAY)}


def timed(work):
    start = time.perf_counter()
    result = work()
    seconds = time.perf_counter() - start
    del result
    return seconds


def in_turns(ledger, workload, contenders, rounds):
    """Measure in turns, forth and back; ``contenders`` are functions that prepare and return what is measured."""
    for number in range(rounds):
        for name, prepare in list(contenders.items())[:: 1 if number % 2 else -1]:
            ledger.seconds.setdefault((workload, name), []).append(timed(prepare()))


@pytest.mark.parametrize("size", [1024 * MIB])
def test_save(size, tmp_path, ledger, request):
    made = arrays(size)
    source, copy, folder = tmp_path / "source", tmp_path / "copy", tmp_path / "save"
    with open(source, "wb") as file:
        for array in made.values():
            file.write(array)

    def copying(sync):
        copy.unlink(missing_ok=True)
        os.sync()

        def run():
            subprocess.run(["cp", source, copy], check=True)
            if sync:
                with open(copy, "rb") as file:
                    os.fsync(file.fileno())

        return run

    def saving(sync):
        shutil.rmtree(folder, ignore_errors=True)
        os.sync()
        return lambda: fastcap.save(made, folder, sync=sync)

    in_turns(ledger, targets.SAVE_WORKLOAD, {
        "cp": lambda: copying(False),
        "save": lambda: saving(False),
        "copy and sync": lambda: copying(True),
        "save and sync": lambda: saving(True),
    }, request.config.getoption("--rounds") or 3)

    def unchanged():
        return lambda: fastcap.save(made, folder)

    in_turns(ledger, targets.SAVE_WORKLOAD, {"save of the same": unchanged}, 3)


@pytest.mark.parametrize("size", [2048 * MIB])
def test_restore(size, tmp_path, ledger, request):
    made = arrays(size)
    file, folder = tmp_path / "file.pkl", tmp_path / "save"
    with open(file, "wb") as written:
        pickle.dump(made, written, 5)
    fastcap.save(made, folder, sync=False)
    expected = made["array3"][:10].tolist()
    del made
    assert fastcap.restore(folder, mmap=True)["array3"][:10].tolist() == expected

    def load():
        with open(file, "rb") as opened:
            return pickle.load(opened)

    in_turns(ledger, targets.RESTORE_WORKLOAD, {
        "pickle.load": lambda: load,
        "restore, mapped": lambda: lambda: fastcap.restore(folder, mmap=True),
        "restore, mapped and verified": lambda: lambda: fastcap.restore(folder, mmap=True, verify=True),
        "restore": lambda: lambda: fastcap.restore(folder),
    }, request.config.getoption("--rounds") or 3)
