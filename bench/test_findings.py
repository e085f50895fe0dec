"""What stops an object from being pickled: fastcap.analyze against ray.util.inspect_serializability.

The objects are of the kinds that bug reports are about. ``right`` in the extra information says whether the culprit is
named: for inspect_serializability, whether it is in a path of its failure set (Ray 2.60 has paths).
"""

import contextlib
import io
import queue
import sqlite3
import threading
import weakref

import pytest

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
