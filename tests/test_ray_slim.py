"""What remote functions and actors drag along goes through Ray's object store: against a real, small Ray."""

import asyncio
import functools
import gc
import hashlib
import logging
import os
import time

import numpy as np
import pytest

import fastcap

ray = pytest.importorskip("ray", reason="Ray is not installed")

import fastcap.ray  # noqa: E402
from fastcap.ray.parts import SHELF  # noqa: E402

SIZE = 100_000  # of what is captured, in bytes at least; min_size is 64 KiB


@pytest.fixture(scope="module")
def cluster():
    ray.init(
        num_cpus=2, object_store_memory=200 << 20, include_dashboard=False, logging_level="ERROR", log_to_driver=False,
        _system_config={"object_spilling_threshold": 1.0},
    )  # fmt: skip
    yield ray
    fastcap.ray.uninstall()
    ray.shutdown()


@pytest.fixture(autouse=True)
def slimming(cluster):
    fastcap.ray.install("64 KiB")
    yield
    fastcap.ray.uninstall()


def entries():
    return fastcap.ray.report().to_dict()["entries"]


def export_size(remote_function):
    return len(remote_function._pickled_function)


def in_closure(thing):
    def use(task):
        return task(thing)

    return use


# ---- what is captured ------------------------------------------------------------------------------------------------


def frames():
    pd = pytest.importorskip("pandas", reason="pandas is not installed")
    return pd.DataFrame({"n": np.arange(SIZE / 8), "s": [f"row {i}" for i in range(SIZE // 8)]})


def arrow_table():
    pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    return pa.table({"n": list(range(SIZE // 4)), "s": ["text"] * (SIZE // 4)})


def sparse():
    sp = pytest.importorskip("scipy.sparse", reason="scipy is not installed")
    return sp.random(500, 500, density=0.2, random_state=1, format="csr")


def tensor():
    return pytest.importorskip("torch", reason="torch is not installed").arange(SIZE // 4, dtype=None)


def state_dict():
    torch = pytest.importorskip("torch", reason="torch is not installed")
    return torch.nn.Sequential(torch.nn.Linear(200, 200), torch.nn.Linear(200, 10)).state_dict()


KINDS = {
    "array": lambda: np.arange(SIZE / 8),
    "structured array": lambda: np.ones(SIZE // 4, [("a", "f4"), ("b", "i8")]),
    "bytes": lambda: os.urandom(SIZE),
    "text": lambda: "déjà vu " * SIZE,
    "list": lambda: [f"item {i}" for i in range(SIZE // 8)],
    "dict": lambda: {f"key {i}": [i, i / 3] for i in range(SIZE // 16)},
    "set": lambda: set(range(10**9, 10**9 + SIZE)),
    "tuple": lambda: tuple(range(SIZE)),
    "mixture": lambda: {"arrays": [np.ones(9000), np.zeros((3, 5000))], "names": ["x"] * 9000, "raw": bytes(70_000)},
    "frame": frames,
    "table": arrow_table,
    "sparse": sparse,
    "tensor": tensor,
    "state_dict": state_dict,
}


def fingerprint(obj):
    """The same for equal objects in any process."""
    if type(obj).__module__.startswith("torch"):
        return fingerprint(obj.numpy())
    if isinstance(obj, np.ndarray):
        return (obj.dtype.str, obj.shape, hashlib.md5(obj.tobytes()).hexdigest())
    if isinstance(obj, dict):
        return [(key, fingerprint(value)) for key, value in obj.items()]
    if isinstance(obj, (list, tuple)):
        return [fingerprint(value) for value in obj[:50]] + [len(obj)]
    if isinstance(obj, set):
        return fingerprint(sorted(obj))
    if hasattr(obj, "to_pydict"):
        return fingerprint(obj.to_pydict())
    if hasattr(obj, "toarray"):
        return fingerprint(obj.toarray())
    if hasattr(obj, "to_numpy"):
        return [str(obj.dtypes.to_dict()), fingerprint(obj.to_numpy().tolist())]
    return obj if isinstance(obj, (int, float)) else hashlib.md5(repr(obj).encode()).hexdigest()


fingerprint.__module__ = "__main__"  # workers do not have this file


@pytest.mark.parametrize("what", KINDS)
def test_what_is_captured(what):
    thing = KINDS[what]()
    remote = ray.remote(in_closure(thing))
    assert ray.get(remote.remote(fingerprint)) == fingerprint(thing)
    assert export_size(remote) < 10_000
    assert sum(entry["size"] for entry in entries()) >= SIZE // 2
    assert len(entries()) == 1 or what == "table"  # Ray may take a table apart
    for entry in entries():
        assert entry["name"] == "use"
        assert entry["path"].startswith("use<closure thing>")
        assert str(os.getpid()) in entry["where"]


def test_arrays_are_read_only_and_in_shared_memory():
    thing = np.arange(SIZE / 8)

    @ray.remote
    def look():
        return thing.flags.writeable, thing.flags.owndata

    assert ray.get(look.remote()) == (False, False)


def test_writable():
    thing, more = np.zeros(SIZE // 8), {"inner": np.zeros(SIZE // 8)}

    @ray.remote
    def write():
        thing[0] += 1
        more["inner"][0] += 1
        return thing[0], more["inner"][0]

    fastcap.ray.install("64 KiB", writable=True)
    assert ray.get(write.remote()) == (1, 1)
    assert len(entries()) == 2


# ---- how it is captured ----------------------------------------------------------------------------------------------

GLOBAL = np.arange(SIZE / 8)


class Trainer:
    """Stays with the driver: its methods and closures over it go by value."""

    def __init__(self, data):
        self.data = data
        self.rate = 2.0

    def closure(self):
        def train():
            return float(self.data.sum()) * self.rate

        return train

    def method(self):
        return float(self.data.sum()) * self.rate


class Settings:
    kept = GLOBAL.copy()

    @classmethod
    def total(cls):
        return float(cls.kept.sum()) * 2


Trainer.__module__ = Settings.__module__ = "__main__"


def use_global():
    return float(GLOBAL.sum()) * 2


use_global.__module__ = "__main__"


def use_default(data=GLOBAL):
    return float(data.sum()) * 2


use_default.__module__ = "__main__"


def use_argument(data, factor):
    return float(data.sum()) * factor


use_argument.__module__ = "__main__"

HOW = {
    "self": (lambda: Trainer(GLOBAL.copy()).closure(), "train<closure self>.data"),
    "global": (lambda: use_global, "use_global<global GLOBAL>"),
    "default": (lambda: use_default, "use_default<default data>"),
    "partial": (lambda: functools.partial(use_argument, GLOBAL, factor=2), "call<closure function><arg 0>"),
    "bound method": (lambda: Trainer(GLOBAL.copy()).method, "call<closure function><self>.data"),
    "class attribute": (lambda: Settings.total, "call<closure function><self>.kept"),
}


def called(function):
    def call():
        return function()

    return call


@pytest.mark.parametrize("how", HOW)
def test_how_it_is_captured(how):
    make, path = HOW[how]
    function = make()
    remote = ray.remote(function if path.partition("<")[0] != "call" else called(function))
    assert ray.get(remote.remote()) == float(GLOBAL.sum()) * 2
    assert export_size(remote) < 20_000
    assert [entry["path"] for entry in entries()] == [path]


def test_actor_classes():
    data = np.arange(SIZE / 8)

    @ray.remote
    class Holder:
        kept = np.ones(SIZE // 8)

        def __init__(self, factor):
            self.factor = factor

        def total(self):
            return float(data.sum() + self.kept.sum()) * self.factor

    actors = [Holder.remote(i) for i in (1, 2)]
    total = data.sum() + SIZE // 8
    assert ray.get([actor.total.remote() for actor in actors]) == [total, 2 * total]
    assert len(entries()) == 2
    assert all(entry["name"] == "Holder" and entry["export_count"] == 1 for entry in entries())


def test_async_and_named_actors_and_pools():
    data = np.arange(SIZE / 8)

    @ray.remote(num_cpus=0)
    class Counter:
        async def total(self, factor):
            await asyncio.sleep(0)
            return float(data.sum()) * factor

    named = Counter.options(name="counter").remote()
    assert ray.get(named.total.remote(2)) == data.sum() * 2
    assert ray.get(ray.get_actor("counter").total.remote(3)) == data.sum() * 3
    pool = ray.util.ActorPool([Counter.remote(), Counter.remote()])
    found = list(pool.map(lambda actor, factor: actor.total.remote(factor), [1, 2, 3, 4]))
    assert found == [data.sum() * factor for factor in (1, 2, 3, 4)]
    assert len(entries()) == 1


def test_restarts_and_retries(tmp_path):
    data = np.arange(SIZE / 8)
    mark = str(tmp_path / "mark")

    @ray.remote(num_cpus=0, max_restarts=1, max_task_retries=2)
    class Fragile:
        def total(self, die):
            if die and not os.path.exists(mark + "actor"):
                open(mark + "actor", "w").close()
                os._exit(1)
            return float(data.sum())

    @ray.remote(max_retries=2)
    def fragile():
        if not os.path.exists(mark + "task"):
            open(mark + "task", "w").close()
            os._exit(1)
        return float(data.sum())

    actor = Fragile.remote()
    assert ray.get([actor.total.remote(False), actor.total.remote(True)]) == [data.sum()] * 2
    assert ray.get(fragile.remote()) == data.sum()
    assert os.path.exists(mark + "actor")
    assert os.path.exists(mark + "task")
    assert len(entries()) == 1
    assert entries()[0]["export_count"] == 2


# ---- identity --------------------------------------------------------------------------------------------------------


def test_definitions_share_what_they_share():
    shared = np.arange(SIZE / 8)

    @ray.remote(num_cpus=0)
    class Host:
        def place(self, function):
            return function()

        def places(self):
            return shared.ctypes.data, id(shared)

    @ray.remote
    def first():
        return os.getpid(), id(shared)

    @ray.remote
    def second():
        return os.getpid(), id(shared)

    host = Host.remote()
    assert ray.get(host.places.remote())
    pairs = {}
    for _ in range(20):
        for function in (first, second):
            pid, place = ray.get(function.remote())
            pairs.setdefault(pid, set()).add(place)
    assert all(len(places) == 1 for places in pairs.values())  # one object in each process
    assert len(entries()) == 1
    assert entries()[0]["export_count"] == 3


def test_an_array_that_is_used_inside_and_outside():
    inner = np.arange(SIZE / 8)
    outer = {"one": inner, "two": [inner, np.ones(SIZE // 8)]}

    @ray.remote
    def same():
        return outer["one"] is outer["two"][0] is inner, outer["two"][1].sum()

    assert ray.get(same.remote()) == (True, SIZE // 8)
    assert export_size(same) < 10_000


def test_one_function_is_exported_once():
    remote = ray.remote(in_closure(np.arange(SIZE / 8)))
    assert len(set(ray.get([remote.remote(len) for _ in range(5)]))) == 1
    (entry,) = entries()
    assert entry["export_count"] == 1


@pytest.mark.parametrize("what", ["array", "list", "bytes", "frame", "tensor"])
def test_one_put_for_many_functions(what):
    thing = KINDS[what]()
    functions = [ray.remote(in_closure(thing)) for _ in range(3)]
    assert len(set(ray.get([function.remote(len) for function in functions]))) == 1
    (entry,) = entries()
    assert entry["export_count"] == 3


def test_what_has_changed_is_put_again():
    array, items = np.zeros(SIZE // 8), ["zero"] * SIZE

    def total():
        return float(array.sum()), items.count("one")

    assert ray.get(ray.remote(total).remote()) == (0, 0)
    array[5] = 1
    items[7] = "one"
    assert ray.get(ray.remote(total).remote()) == (1, 1)
    array.shape = (2, -1)
    assert ray.get(ray.remote(lambda: array.shape).remote()) == array.shape


class Copying:
    """Pickles a new copy each time."""

    def __init__(self, data):
        self.data = data

    def __getstate__(self):
        return {"data": self.data.copy()}


Copying.__module__ = "__main__"


def test_what_is_made_anew_for_each_dump_is_put_once():
    held = Copying(np.arange(SIZE / 8))
    functions = [ray.remote(in_closure(held)) for _ in range(3)]
    for function in functions:
        assert ray.get(function.remote(lambda held: held.data.sum())) == held.data.sum()
    (entry,) = entries()
    assert entry["export_count"] == 3
    held.data[0] = 7
    assert ray.get(ray.remote(in_closure(held)).remote(lambda held: held.data[0])) == 7


# ---- what is chosen --------------------------------------------------------------------------------------------------


def test_only_and_skip():
    array, text = np.arange(SIZE / 8), "x" * SIZE

    def use():
        return float(array.sum()) + len(text)

    seen = []

    def is_array(obj, info):
        seen.append((info.path, info.type, info.size))
        return isinstance(obj, np.ndarray)

    for choice, paths in [({"only": is_array}, ["use<closure array>"]), ({"skip": is_array}, ["use<closure text>"])]:
        fastcap.ray.install("64 KiB", **choice)
        SHELF.clear()
        assert ray.get(ray.remote(use).remote()) == array.sum() + SIZE
        assert [entry["path"] for entry in entries()] == paths
    assert {row[:2] for row in seen} == {("use<closure array>", "ndarray"), ("use<closure text>", "str")}


def test_small_things_stay():
    small = np.zeros(4000)
    remote = ray.remote(in_closure(small))
    assert ray.get(remote.remote(len)) == 4000
    assert export_size(remote) > 32_000
    assert entries() == []


def test_behaviour_and_handles_stay():
    """What has behaviour or belongs to a cluster is left where it is; its data goes."""
    ref = ray.put(1)
    holder = [Copying(np.arange(SIZE / 8)), ref, np.arange(SIZE / 8)]

    @ray.remote
    def use():
        return type(holder[0]).__name__, ray.get(holder[1]), float(holder[2].sum())

    assert ray.get(use.remote()) == ("Copying", 1, float(holder[2].sum()))
    assert sorted(entry["path"] for entry in entries()) == ["use<closure holder>[0].data", "use<closure holder>[2]"]


def test_predicates_that_fail_leave_it_to_ray(caplog):
    fastcap.ray.install("64 KiB", only=lambda obj, info: 1 / 0)
    remote = ray.remote(in_closure(np.arange(SIZE / 8)))
    with caplog.at_level(logging.WARNING, "fastcap.ray"):
        assert ray.get(remote.remote(len)) == SIZE // 8
    assert entries() == []
    assert "ZeroDivisionError" in caplog.text


# ---- how long it lives -----------------------------------------------------------------------------------------------


def references():
    return set(ray._private.worker.global_worker.core_worker.get_all_reference_counts())


def wait_until(condition, seconds=20):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "nothing has changed"
        time.sleep(0.05)


def held_references():
    return {bytes.fromhex(entry["ref"]) for entry in entries()}


def test_parts_go_with_the_definition():
    remote = ray.remote(in_closure(np.arange(SIZE / 8)))
    assert ray.get(remote.remote(len)) == SIZE // 8
    (ref,) = [entry["ref"] for entry in entries()]
    assert any(ref in str(key) for key in references())
    del remote
    gc.collect()
    wait_until(lambda: entries() == [])
    assert not any(ref in str(key) for key in references())  # Ray has not pinned it either


def test_actor_classes_let_go_of_their_parts():
    data = np.arange(SIZE / 8)

    class Holder:
        def total(self):
            return float(data.sum())

    actor = ray.remote(num_cpus=0)(Holder).remote()
    del Holder
    assert ray.get(actor.total.remote()) == data.sum()
    gc.collect()
    wait_until(lambda: entries() == [])
    assert ray.get(actor.total.remote()) == data.sum()  # it has loaded its class


def test_pending_work_keeps_parts():
    @ray.remote(num_cpus=0)
    class Gate:
        def __init__(self):
            self.open = asyncio.Event()

        async def wait(self):
            await self.open.wait()

        async def let_go(self):
            self.open.set()

    gate = Gate.remote()
    remote = ray.remote(in_closure(np.arange(SIZE / 8)))
    result = remote.remote(len)
    waiting = gate.wait.remote()
    ray.get(result)
    del remote
    gc.collect()
    assert len(entries()) == 1  # something is pending that this driver has started
    ray.get(gate.let_go.remote())
    ray.get(waiting)
    wait_until(lambda: entries() == [])


def test_a_function_that_was_sent_away_keeps_its_parts():
    remote = ray.remote(in_closure(np.arange(SIZE / 8)))
    assert ray.get(remote.remote(len)) == SIZE // 8

    @ray.remote(num_cpus=0)
    class Elsewhere:
        def keep(self, function):
            self.function = function

        def call(self):
            return ray.get(self.function.remote(len))

    elsewhere = Elsewhere.remote()
    ray.get(elsewhere.keep.remote(remote))
    del remote
    gc.collect()
    assert len(entries()) == 1
    assert ray.get(elsewhere.call.remote()) == SIZE // 8


def test_uninstall_lets_go_and_functions_go_on():
    data = np.arange(SIZE / 8)
    remote = ray.remote(in_closure(data))

    @ray.remote(num_cpus=0)
    class Holder:
        def total(self):
            return float(data.sum())

    assert ray.get(remote.remote(len)) == SIZE // 8
    assert ray.get(Holder.remote().total.remote()) == data.sum()
    before = references()
    fastcap.ray.uninstall()
    assert entries() == []
    assert len(references()) < len(before)
    assert ray.get(remote.options(num_cpus=1).remote(len)) == SIZE // 8
    assert ray.get(Holder.remote().total.remote()) == data.sum()
    assert export_size(remote) > SIZE


def test_a_lost_part_says_what_it_was():
    remote = ray.remote(in_closure(np.arange(SIZE / 8)))
    remote.options(resources={"none such": 1}).remote(len)  # exported, and loaded by nobody
    SHELF.clear()
    time.sleep(1.5)  # the raylet is told once a second
    with pytest.raises(ray.exceptions.RayTaskError) as caught:
        ray.get(remote.remote(len), timeout=60)
    message = str(caught.value)
    assert "use<closure thing> (ndarray float64 (12500,), 97.8 KiB) is not in Ray's object store any more" in message
    assert f"use was exported by process {os.getpid()}" in message
    assert "export the definition again" in message


def test_store_and_disk_full(caplog, monkeypatch):
    def put(value, **options):
        raise ray.exceptions.ObjectStoreFullError("full")

    remote = ray.remote(in_closure(np.arange(SIZE / 8)))
    monkeypatch.setattr(ray, "put", put)
    with caplog.at_level(logging.WARNING, "fastcap.ray"):
        result = remote.remote(len)
    monkeypatch.undo()
    assert ray.get(result) == SIZE // 8
    assert export_size(remote) > SIZE
    assert "use<closure thing> (97.8 KiB) stays in the payload" in caplog.text
    assert entries() == []


# ---- other ways in ---------------------------------------------------------------------------------------------------


def test_a_store_of_ones_own():
    from fastcap.stores import RayStore

    fastcap.ray.uninstall()
    data = [{"weights": np.arange(SIZE / 8)}, Copying(np.zeros(1))]
    store = RayStore()
    payload = fastcap.dumps(data, store=store, min_size=SIZE // 2)
    assert len(payload) < 5000
    loaded = fastcap.loads(payload)
    assert np.array_equal(loaded[0]["weights"], data[0]["weights"])
    assert loaded[0]["weights"].flags.writeable is False
    assert [entry["path"] for entry in entries()] == ["obj[0]"]
    store.release()
    assert entries() == []


def test_without_a_cluster():
    import subprocess
    import sys

    code = (
        "import numpy as np, fastcap, fastcap.ray, fastcap.stores\n"
        "data = np.ones(200_000)\n"
        "for work in (lambda: fastcap.dumps(data, store=fastcap.stores.RayStore()),\n"
        "             lambda: fastcap.ray.with_captures(lambda: data)):\n"
        "    try: work()\n"
        "    except fastcap.FastcapError as error: assert 'call ray.init() before' in str(error)\n"
        "    else: raise SystemExit('no error')\n"
        "assert fastcap.ray.report().entries == ()\n"
        "print(fastcap.ray.report())\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_native_pickling():
    import fastcap.pickling

    seen = []
    with fastcap.pickling.watch_dumps(lambda obj, flavor, buffers, file: seen.append(flavor)):
        ray.get(ray.put({"a": Copying(np.zeros(3))}))
        assert "ray.cloudpickle" in seen
        fastcap.ray.install(native=False)
        seen.clear()
        ray.get(ray.put({"a": 1}))
        assert seen == []


def test_workers_need_no_fastcap():
    @ray.remote(runtime_env={"env_vars": {"PYTHONPATH": ""}})
    def loaded(thing=None):
        import sys

        return sorted(name for name in sys.modules if name.partition(".")[0] == "fastcap"), len(data)

    data = np.arange(SIZE / 8)
    assert ray.get(loaded.remote()) == ([], SIZE // 8)
