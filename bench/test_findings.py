"""What stops an object from being pickled: fastcap.analyze and ray.util.inspect_serializability. What findings cost.

The objects are of the kinds that bug reports are about. ``right`` in the extra information says whether the culprit is
named: for inspect_serializability, whether it is in a path of its failure set (Ray 2.60 has paths). Where there are
cases in ../shared/cases, those that cannot be pickled are looked at as well, each in a process where it is the script.
"""

import contextlib
import gc
import io
import json
import os
import pathlib
import queue
import sqlite3
import subprocess
import sys
import threading
import time
import weakref

import pytest

import fastcap.analysis
from bench.workloads import WORKLOADS
from fastcap import analyze


class Holder:
    def __init__(self, **attributes):
        self.__dict__.update(attributes)


class Refuses:
    def __getstate__(self):
        raise RuntimeError("may not leave this host")


class Store:
    connection = sqlite3.connect(":memory:")


Store.__module__ = "__main__"


def in_closure(thing):
    def job():
        return thing

    return job


def ten():
    things = [threading.Lock() for _ in range(8)] + [queue.Queue(), Refuses()]
    return Holder(**{f"part{k}": thing for k, thing in enumerate(things)}, rows=[Holder(a=k) for k in range(200)])


CASES = {
    "lock in a closure": (lambda: in_closure(threading.Lock()), ["thing"]),
    "queue in an attribute": (lambda: Holder(job=Holder(inbox=queue.Queue())), ["inbox"]),
    "connection of a class": (lambda: {"task": Store()}, ["connection"]),
    "own error in a list": (lambda: {"models": [Refuses()]}, ["models"]),
    "weak dict": (lambda: Holder(cache=weakref.WeakValueDictionary()), ["cache"]),
    "lock deep in data": (lambda: {"rows": [Holder(a=k) for k in range(2000)], "z": [[[threading.Lock()]]]}, ["z"]),
    "ten blockers": (ten, [f"part{k}" for k in range(10)]),
}


def named_by_fastcap(obj):
    return [row.path for row in analyze(obj).findings if row.code == "FC101"]


def named_by_ray(obj):
    inspect_serializability = pytest.importorskip("ray.util", reason="Ray is not installed").inspect_serializability
    with contextlib.redirect_stdout(io.StringIO()):
        _, failures = inspect_serializability(obj, depth=5)
    return [" -> ".join(map(str, failure.path)) for failure in failures]


@pytest.mark.parametrize("who", ["fastcap", "ray"])
@pytest.mark.parametrize("case", CASES)
def test_find_blockers(benchmark, case, who):
    make, culprits = CASES[case]
    obj = make()
    find = named_by_fastcap if who == "fastcap" else named_by_ray
    names = benchmark.pedantic(find, args=(obj,), rounds=5, warmup_rounds=1)
    right = sum(any(culprit in name for name in names) for culprit in culprits)
    benchmark.extra_info["right"] = f"{right} of {len(culprits)}"
    benchmark.extra_info["named"] = names[:12]
    if who == "fastcap":
        assert right == len(culprits) == len(names)


ROOT = pathlib.Path(__file__).resolve().parent.parent
FILES = sorted((ROOT.parent / "shared" / "cases").glob("[0-9][0-9][0-9]_*.py"))
UNPICKLABLE = [file for file in FILES if 'EXPECT = "unpicklable"' in file.read_text(encoding="utf-8")]


@pytest.mark.parametrize("file", UNPICKLABLE, ids=lambda file: file.stem)
def test_find_blockers_of_cases(benchmark, file):
    """Both in one process, in turns; the time is fastcap's, that of Ray is in the extra information."""
    pytest.importorskip("ray.util", reason="Ray is not installed")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, str(ROOT / "tests" / "case_process.py"), "blockers", str(file)]
    answer = json.loads(subprocess.run(command, env=environment, capture_output=True, check=True).stdout)
    benchmark.pedantic(lambda: None, rounds=1)
    benchmark.extra_info.update(answer)
    assert answer["fastcap"]["right"]


COSTS = [
    "100k dataclass instances", "100k JSON-like dicts", "100k datetime", "500 closures, few modules",
    "500 closures, thousands of modules", "300 different functions", "200 dynamic classes",
    "10k dumps of one small closure", "closure over a 100 MiB ndarray",
]  # fmt: skip


@pytest.mark.parametrize("workload", COSTS)
def test_cost_of_findings(benchmark, monkeypatch, workload):
    """The whole of an analysis, report included, with and without its findings: in turns, the best of each counts."""
    obj = WORKLOADS[workload].make()
    find_all = fastcap.analysis.find_all
    taken = {"with": [], "without": []}

    def measure():
        for kind, find in (("without", lambda scene: ()), ("with", find_all)):
            monkeypatch.setattr(fastcap.analysis, "find_all", find)
            gc.collect()
            count, start = 0, time.process_time()
            while not count or time.process_time() - start < 0.05:
                analyze(obj).details  # noqa: B018
                count += 1
            taken[kind].append((time.process_time() - start) / count)

    benchmark.pedantic(measure, rounds=5, warmup_rounds=1)
    ratio = min(taken["with"]) / min(taken["without"])
    benchmark.extra_info["with / without findings"] = round(ratio, 2)
    assert ratio <= 1.5
