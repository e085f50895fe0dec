"""What the benchmarks pickle and scan; also the program of the process that does it.

Run as a program (``python bench/workloads.py NAME``) it makes one workload and then answers requests: one JSON object a
line on standard input, one on standard output. So every row is measured in a process of its own, where the classes and
functions of this file belong to ``__main__`` as those of a user's script do, and where just those modules are loaded
that the row is about. A request names a contender; the answer holds its seconds for one call, or its peak memory.
"""

import atexit
import collections
import dataclasses
import datetime
import decimal
import enum
import functools
import gc
import importlib
import io
import json
import os
import pickle
import pickletools
import random
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

MIB = 1 << 20


@dataclasses.dataclass(frozen=True)
class Workload:
    """One thing to pickle: ``make()`` makes it, once ``loaded`` modules are imported.

    ``loops`` is the number of calls that one measurement of a fast contender takes; ``rounds`` that of measurements.
    """

    name: str
    make: Callable[[], Any]
    loaded: tuple[str, ...] = ()
    loops: int = 1
    rounds: int = 7


WORKLOADS: dict[str, Workload] = {}


def workload(name: str, **facts: Any) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """Enter the decorated function into WORKLOADS."""

    def enter(make: Callable[[], Any]) -> Callable[[], Any]:
        WORKLOADS[name] = Workload(name, make, **facts)
        return make

    return enter


@dataclasses.dataclass
class Row:
    number: int
    share: float
    name: str
    values: list


class Color(enum.Enum):
    RED = "red"
    GREEN = "green"


class Size(enum.IntEnum):
    SMALL = 1
    LARGE = 2


TABLE = {"scale": 2, "offsets": [1, 2, 3]}


@workload("100k dataclass instances")
def dataclass_instances():
    return [Row(i, i * 0.5, f"n{i % 50}", [i, None]) for i in range(100_000)]


@workload("100k JSON-like dicts")
def json_like_dicts():
    return [{"id": i, "name": f"user-{i}", "email": f"user-{i}@example.com", "active": i % 3 == 0, "score": i / 7,
             "tags": ["a", "b", f"t{i % 10}"]} for i in range(100_000)]


@workload("1M distinct str")
def distinct_strings():
    return [f"string number {i}" for i in range(1_000_000)]


@workload("dict of 1M ints")
def dict_of_ints():
    return {i: i * 3 for i in range(1_000_000)}


@workload("100k datetime")
def datetimes():
    start = datetime.datetime(2024, 1, 1)
    return [start + datetime.timedelta(seconds=i) for i in range(100_000)]


@workload("100k Decimal")
def decimals():
    return [decimal.Decimal(i) / 100 for i in range(100_000)]


@workload("100k np.float64")
def numpy_scalars():
    import numpy as np

    return list(np.arange(100_000) / 7)


@workload("100k pairs of enum members")
def enum_pairs():
    colors, sizes = list(Color), list(Size)
    return [(colors[i % 2], sizes[i // 2 % 2]) for i in range(100_000)]


def closures(count):
    """Closures over one code object that uses a package, for whose submodules cloudpickle looks in sys.modules."""
    import numpy as np

    def make(i):
        def step(x, y=i, *, key="k"):
            return np.abs(x) + y + TABLE["scale"] + i + os.getpid() + len(key)

        return step

    return [make(i) for i in range(count)]


@workload("500 closures, few modules", loaded=("numpy",), rounds=9)
def closures_few_modules():
    return closures(500)


@workload("500 closures, thousands of modules",
          loaded=("numpy", "torch", "pandas", "sklearn.ensemble", "scipy.stats", "ray", "pyarrow"), rounds=3)
def closures_many_modules():
    return closures(500)


@workload("300 different functions")
def different_functions():
    namespace: dict[str, Any] = {"__name__": "__main__", "TABLE": TABLE, "json": json}
    source = "".join(
        f"def f{i}(x, y={i}, *rest, key='k{i}'):\n"
        f"    '''Step {i}.'''\n"
        f"    total = x * {i} + y\n"
        f"    for item in rest:\n"
        f"        total += item if item > {i} else TABLE['scale']\n"
        f"    return json.dumps(total), key, [total + n for n in range({i % 7})]\n"
        for i in range(300)
    )
    exec(compile(source, "script.py", "exec"), namespace)
    return [namespace[f"f{i}"] for i in range(300)]


@workload("200 dynamic classes")
def dynamic_classes():
    def make(i):
        class Step(Base):
            """A step."""

            number = i
            limits: tuple = (i, i + 1)

            def run(self, x: int = 3) -> int:
                return self.number + x + i

            @property
            def double(self):
                return self.number * 2

            @classmethod
            def build(cls):
                return cls()

        return Step

    return [make(i) for i in range(200)]


class Base:
    def describe(self):
        return type(self).__name__


@workload("10k dumps of one small closure", loops=10_000)
def small_closure():
    rate, names = 0.1, ["a", "b"]

    def step(config):
        return config["x"] * rate + len(names) + TABLE["scale"]

    return step


@workload("closure over a 100 MiB ndarray", rounds=9)
def closure_over_array():
    import numpy as np

    data = np.random.default_rng(0).random(100 * MIB // 8)

    def train(config):
        return data[config["i"]]

    return train


@workload("50 MB torch tensor", rounds=9)
def torch_tensor():
    import torch

    return torch.arange(12_500_000, dtype=torch.float32)


@workload("closure over 8 GiB of np.zeros", rounds=3)
def closure_over_zeros():
    import numpy as np

    data = np.zeros(8 * 1024 * MIB, dtype=np.uint8)
    return lambda i: data[i]


def nodes(count):
    """A payload of ``count`` nodes: lists of strings, with memo references."""
    shared = ["shared"]
    return [[f"s{i}", shared, [i]] for i in range(count // 3)]


workload("1e5 nodes")(functools.partial(nodes, 100_000))
workload("1e7 nodes", rounds=3)(functools.partial(nodes, 10_000_000))


# ---------------------------------------------------------------------------------------------------------------------
# Contenders: each takes what make() made and gives the function to measure, which takes nothing


class Unavailable(Exception):
    """What a contender needs does not exist here."""


def part_of(module: str, name: str) -> Any:
    """An attribute of a module, imported only now."""
    try:
        found = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise Unavailable(f"{module}.{name}: {error}") from None
    return found


def dump_with(module: str, **options: Any) -> Callable[[Any], Callable[[], Any]]:
    def prepare(obj: Any) -> Callable[[], Any]:
        return functools.partial(part_of(module, "dumps"), obj, **options)

    return prepare


def stream_of(obj: Any) -> bytes:
    import cloudpickle

    return cloudpickle.dumps(obj, 5)


def scan_graph(obj: Any) -> Callable[[], Any]:
    """The stream into a graph, as fastcap.scan does before it looks at anything."""
    stream, scanner, graph = stream_of(obj), part_of("fastcap._native.scanner", "Scanner"), part_of(
        "fastcap._native.graph", "Graph")

    def run():
        reader = scanner()
        reader.write(stream)
        return graph(reader.finish())

    return run


def scan_dominators(obj: Any) -> Callable[[], Any]:
    """With sizes and dominators, and in fresh memory: earlier graphs are kept, so that theirs is not used again."""
    scan, kept = scan_graph(obj), []

    def run():
        kept.append(scan())
        kept[-1].sizes()

    return run


def scan_only(obj: Any) -> Callable[[], Any]:
    """The stream into the node table."""
    stream, scanner = stream_of(obj), part_of("fastcap._native.scanner", "Scanner")

    def run():
        reader = scanner()
        reader.write(stream)
        return reader.finish()

    return run


def scan_report(obj: Any) -> Callable[[], Any]:
    """The whole report: tree, captures, types and limits are made when they are looked at."""
    scan, stream = part_of("fastcap", "scan"), stream_of(obj)
    return lambda: scan(stream).details


def genops(obj: Any) -> Callable[[], Any]:
    stream = stream_of(obj)
    return lambda: collections.deque(pickletools.genops(stream), maxlen=0)


def loads(obj: Any) -> Callable[[], Any]:
    return functools.partial(pickle.loads, stream_of(obj))


def analyze(obj: Any) -> Callable[[], Any]:
    return functools.partial(part_of("fastcap", "analyze"), obj)


def asizeof(obj: Any) -> Callable[[], Any]:
    return functools.partial(part_of("pympler.asizeof", "asizeof"), obj)


CONTENDERS: dict[str, Callable[[Any], Callable[[], Any]]] = {
    "cloudpickle": dump_with("cloudpickle"),
    "pickle": dump_with("pickle", protocol=5),
    "exact": dump_with("fastcap"),
    "compact": dump_with("fastcap", compact=True),
    "analyze": analyze,
    "asizeof": asizeof,
    "genops": genops,
    "loads": loads,
    "scan": scan_only,
    "scan and graph": scan_graph,
    "dominators": scan_dominators,
    "scan and report": scan_report,
}


# ---------------------------------------------------------------------------------------------------------------------
# A file of mostly buffers

CHUNK_SIZE, CHUNK_COUNT = 4 * MIB, 1024


def write_sparse_file(path: str) -> None:
    """A pickle of 1,024 bytes objects of 4 MiB each in a list, whose zeros take no room on the disk."""
    with open(path, "wb") as file:
        file.write(b"\x80\x05]\x94(")
        for _ in range(CHUNK_COUNT):
            file.write(b"B" + CHUNK_SIZE.to_bytes(4, "little"))
            file.seek(CHUNK_SIZE, os.SEEK_CUR)
            file.write(b"\x94")
        file.write(b"e.")


def skip_through(path: str) -> int:
    """The least that has to be done: read every opcode and length, seek over every buffer."""
    size = 0
    with open(path, "rb") as file:
        file.seek(5)
        while file.read(1) == b"B":
            length = int.from_bytes(file.read(4), "little")
            file.seek(length, os.SEEK_CUR)
            file.read(1)
            size += length
    return size


def read_through(path: str) -> int:
    """Read every byte of the file, a MiB at a time."""
    size, block = 0, bytearray(MIB)
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(block):
            size += count
    return size


@workload("4 GiB file of mostly buffers", rounds=5)
def sparse_file():
    folder = tempfile.TemporaryDirectory(prefix="fastcap-bench-")
    atexit.register(folder.cleanup)
    path = os.path.join(folder.name, "sparse.pkl")
    write_sparse_file(path)
    return path


CONTENDERS |= {
    "skip through": lambda path: functools.partial(skip_through, path),
    "read through": lambda path: functools.partial(read_through, path),
    "scan file": lambda path: functools.partial(part_of("fastcap", "scan"), path),
}


# ---------------------------------------------------------------------------------------------------------------------
# The process


def measure_time(run: Callable[[], Any], loops: int) -> float:
    """Seconds of processor time for one call; the cyclic collector rests, as it does in timeit.

    Everything measured here runs in one thread. Its processor time does not count what other processes take from it.
    """
    gc.collect()
    gc.disable()
    try:
        start = time.process_time()
        for _ in range(loops):
            run()
        return (time.process_time() - start) / loops
    finally:
        gc.enable()


def memory_status(field: str) -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(field))


def measure_memory(run: Callable[[], Any]) -> dict[str, int]:
    """Bytes of resident memory that one call takes at its peak beyond what was there before, its result included."""
    import ctypes

    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the peak starts anew from here (proc_pid_clear_refs(5))
    before = memory_status("VmRSS")
    result = run()
    peak = memory_status("VmHWM") - before
    return {"peak": max(peak, 0), "result": len(result) if isinstance(result, bytes) else 0}


def warm_up(contender: str) -> None:
    """Let a contender import and build what it needs once: dump something of every sort, and little of it."""
    CONTENDERS[contender]([closures(1), Row(1, 0.5, "n", []), Color.RED, datetime.date.min, decimal.Decimal(1)])()


def serve(name: str, requests: io.TextIOBase, answers: io.TextIOBase) -> None:
    entry = WORKLOADS[name]
    answer: dict[str, Any] = {}
    try:
        for module in entry.loaded:
            try:
                importlib.import_module(module)
            except ImportError as error:
                raise Unavailable(str(error)) from None
        random.seed(0)
        made = entry.make()
    except (Unavailable, ImportError) as error:
        answer = {"unavailable": str(error)}
    print(json.dumps(answer | {"modules": len(sys.modules)}), file=answers, flush=True)
    prepared: dict[str, Callable[[], Any]] = {}
    for line in requests:
        request = json.loads(line)
        contender = request["contender"]
        try:
            if request.get("warm_up"):
                warm_up(contender)
            if contender not in prepared:
                prepared.clear()  # what another contender keeps is in the way of this one
                prepared[contender] = CONTENDERS[contender](made)
            run = prepared[contender]
            if request.get("memory"):
                answer = measure_memory(run)
            else:
                answer = {"seconds": measure_time(run, request.get("loops", 1))}
            if contender == "asizeof":
                answer["result"] = run()
        except Unavailable as error:
            answer = {"unavailable": str(error)}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    # What a workload or a contender prints must not get among the answers.
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    serve(sys.argv[1], sys.stdin, channel)
