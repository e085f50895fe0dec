"""Slimming: which parts go to a store, and that what is loaded is what was dumped, sharing included."""

import collections
import gc
import io
import pickle
import sys
import weakref

import corpus
import numpy as np
import pytest
import strategies
from hypothesis import given
from memory_store import MemoryStore
from strategies import difference

import fastcap
from fastcap._native.pickler import Pickler as Encoder
from fastcap.record import recording
from fastcap.slimming import is_data

SMALLEST = 300
BIG = np.arange(300_000, dtype=float)


@pytest.fixture
def store():
    return MemoryStore()


def reloaded(obj, store, **options):
    """What comes back, which must be what went; the payload must be small."""
    data = fastcap.dumps(obj, store=store, **options)
    loaded = pickle.loads(data)
    assert difference(obj, loaded) is None
    assert len(data) < 8000
    return loaded


class Trainer:
    def __init__(self):
        self.data = np.ones(200_000)
        self.rate = 0.1

    def make(self):
        return lambda: (self.data, self.rate)


def make_closure(value):
    return lambda: value


def make_default(value):
    def function(x=value):
        return x

    return function


def make_global(value):
    namespace = {"__name__": "__main__", "value": value}
    exec("def function(): return value", namespace)
    return namespace["function"]


def make_class(value):
    return type("Holder", (), {"__module__": "__main__", "value": value, "get": lambda self: self.value})


HOLDERS = {
    "closure": (make_closure, lambda f: f()),
    "default": (make_default, lambda f: f()),
    "global": (make_global, lambda f: f()),
    "class attribute": (make_class, lambda cls: cls().get()),
    "partial": (lambda value: corpus.functools.partial(make_closure(None), value), lambda p: p.args[0]),
    "bound method": (lambda value: make_class(value)().get, lambda method: method()),
    "instance": (lambda value: corpus.Plain(value=value), lambda made: made.value),
    "list with code": (lambda value: [make_closure(0), value], lambda made: made[1]),
    "dict value": (lambda value: {"code": make_closure(0), "value": value}, lambda made: made["value"]),
    "function attribute": (lambda value: setattr(f := make_closure(0), "value", value) or f, lambda f: f.value),
}

VALUES = {
    "ndarray": lambda: np.arange(20_000.0),
    "transposed ndarray": lambda: np.arange(20_000.0).reshape(40, 500).T,
    "strided ndarray": lambda: np.arange(40_000.0)[::2],
    "structured ndarray": lambda: np.zeros(10_000, dtype=[("a", "f8"), ("b", "U2")]),
    "ndarray of objects": lambda: np.array([[i] for i in range(20_000)] + [None], dtype=object),
    "bytes": lambda: b"x" * 150_000,
    "bytearray": lambda: bytearray(150_000),
    "str": lambda: "x" * 150_000,
    "non-ASCII str": lambda: "ß" * 150_000,
    "list": lambda: list(range(30_000)),
    "dict": lambda: {i: str(i) for i in range(20_000)},
    "set": lambda: set(range(30_000)),
    "frozenset": lambda: frozenset(range(30_000)),
    "tuple": lambda: tuple(range(30_000)),
    "deque": lambda: collections.deque(range(30_000)),
    "ordered dict": lambda: collections.OrderedDict((i, str(i)) for i in range(20_000)),
    "dates": lambda: [corpus.datetime.date(2000, 1, 1 + i % 28) for i in range(10_000)],
    "mixture": lambda: {"a": [np.ones(20_000), {"b": bytes(10)}], "c": ("x", {1, 2})},
    "DataFrame": lambda: pytest.importorskip("pandas").DataFrame({"a": np.ones(20_000), "b": ["x"] * 20_000}),
    "Series": lambda: pytest.importorskip("pandas").Series(np.ones(20_000)),
    "Arrow table": lambda: pytest.importorskip("pyarrow").table({"a": np.ones(20_000)}),
    "sparse matrix": lambda: pytest.importorskip("scipy.sparse").eye(10_000, format="csr"),
    "tensor": lambda: pytest.importorskip("torch").ones(40_000),
    "state dict": lambda: pytest.importorskip("torch").nn.Linear(200, 200).state_dict(),
    "module": lambda: pytest.importorskip("torch").nn.Linear(200, 200),
}


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_every_kind_of_data_goes(value, protocol, store):
    made = value()
    data = fastcap.dumps(make_closure(made), protocol, store=store, min_size="60 KiB")
    assert len(data) < 5000
    [(obj, info)] = store.puts
    assert obj is made
    assert not info.temporary
    assert info.path == "<lambda><closure value>"
    loaded = pickle.loads(data)()
    assert type(loaded) is type(made)
    if isinstance(made, (set, frozenset, dict)):
        assert loaded.keys() == made.keys() if isinstance(made, dict) else loaded == made
    elif not type(made).__module__.startswith(("torch", "pandas", "pyarrow", "scipy")):
        assert difference(made, loaded) is None


@pytest.mark.parametrize(("hold", "get"), HOLDERS.values(), ids=HOLDERS)
@pytest.mark.parametrize("compact", [False, True])
def test_every_kind_of_capture(hold, get, compact, store):
    data = fastcap.dumps(hold(BIG), store=store, compact=compact)
    assert len(data) < 5000
    assert len(store.puts) == 1
    assert store.objects[0] is BIG
    assert np.array_equal(get(pickle.loads(data)), BIG)


class Slotted:
    __slots__ = ("value",)

    def __init__(self, value):
        self.value = value


ONLY_HOLDERS = {
    **{name: hold for name, (hold, _) in HOLDERS.items()},
    "slots": Slotted,
    "object with code": lambda value: corpus.Plain(code=make_closure(0), inner=corpus.Plain(deep=[{"x": value}])),
    "list subclass": lambda value: corpus.ListSubclass([make_closure(0), value]),
    "dict subclass": lambda value: corpus.DictSubclass(a=make_closure(0), b=value),
    "default dict": lambda value: collections.defaultdict(make_closure(0), x=value),
    "tuple": lambda value: (make_closure(0), value),
    "object array": lambda value: np.array([make_closure(0), [value]], dtype=object),
    "exception": lambda value: ValueError(make_closure(0), value),
    "named tuple": lambda value: corpus.Point(make_closure(0), value),
}


@pytest.mark.parametrize("hold", ONLY_HOLDERS.values(), ids=ONLY_HOLDERS)
@pytest.mark.parametrize("value", [
    lambda: np.ones(200_000), lambda: [1.5] * 200_000, lambda: np.ones((400, 500)).T, lambda: np.ones(400_000)[::2],
    lambda: bytearray(2_000_000), lambda: "x" * 2_000_000,
], ids=["array", "list", "transposed", "strided", "bytearray", "str"])
def test_parts_that_nobody_else_holds_last(hold, value, store):
    made = hold(value())
    data = fastcap.dumps(made, store=store)
    assert len(data) < 5000
    assert [info.temporary for _, info in store.puts] == [False]
    again = MemoryStore()
    fastcap.dumps(made, store=again)
    assert again.objects[0] is store.objects[0]


def test_a_part_is_described(store):
    fastcap.dumps(Trainer().make(), store=store)
    [(_, info)] = store.puts
    assert (info.path, info.type, info.what) == ("<lambda><closure self>.data", "ndarray", "ndarray float64 (200000,)")
    assert 1_600_000 < info.size < 1_600_200


def test_the_root_can_be_a_part(store):
    assert difference(BIG, reloaded(BIG, store)) is None
    assert store.paths == ["obj"]


def test_what_is_shared_stays_shared(store):
    shared = [1] * 600_000
    made = [make_closure(shared), {"x": shared}, make_closure(shared)]
    first, second, third = pickle.loads(fastcap.dumps(made, store=store))
    assert len(store.puts) == 1
    assert first() is second["x"] is third()


def test_inside_and_outside_of_a_subtree(store):
    """The dict could go as a whole, but for the array in it that someone else refers to."""
    shared = np.ones(200_000)
    made = [make_closure(0), {"a": shared, "b": np.zeros(200_000)}, shared]
    loaded = reloaded(made, store)
    assert loaded[1]["a"] is loaded[2]
    assert sorted(store.paths) == ["obj[1]['a']", "obj[1]['b']"]


def test_a_small_shared_part_keeps_its_parent_here(store):
    shared = [1, 2]
    made = [make_closure(0), {"a": shared, "b": np.zeros(200_000)}, {"c": shared, "d": np.zeros(200_000)}, shared]
    loaded = reloaded(made, store)
    assert loaded[1]["a"] is loaded[2]["c"] is loaded[3]
    assert sorted(store.paths) == ["obj[1]['b']", "obj[2]['d']"]


def test_names_texts_and_dtypes_tear_nothing(store):
    dtype = np.dtype([("name", "f8")])
    made = [make_closure(0), {"key": np.zeros(200_000, dtype)}, {"key": np.ones(200_000, dtype)}, "key", np.ones(1)]
    reloaded(made, store)
    assert sorted(store.paths) == ["obj[1]", "obj[2]"]


def test_cycles(store):
    ring = [np.zeros(200_000)]
    ring.append({"ring": ring})
    loaded = reloaded([make_closure(0), ring], store)
    assert loaded[1][1]["ring"] is loaded[1]
    assert store.paths == ["obj[1]"]
    made = [make_closure(0), {"big": np.zeros(200_000)}]
    made[1]["back"] = made
    loaded = reloaded(made, store)
    assert loaded[1]["back"] is loaded
    assert store.paths[1:] == ["obj[1]['big']"]


def test_deep_nesting(store):
    deep = np.zeros(200_000)
    for _ in range(20_000):
        deep = [deep]
    data = fastcap.dumps([make_closure(0), deep], store=store)
    assert len(data) < 5000
    assert len(store.puts) == 1


def test_big_tensors_are_only_looked_at(store, monkeypatch):
    """Not copied, as torch does when it pickles a tensor, unless they stay."""
    torch = pytest.importorskip("torch")

    class Keeps:
        def put(self, obj, info):
            kept.append(obj)
            return list, ()

    kept, plain = [], torch.ones(400_000)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", None)
        for tensor in (plain, torch.nn.Parameter(plain), plain.bfloat16(), plain > 0):
            for compact in (False, True):
                kept.clear()
                made = [tensor, make_closure(0)]
                assert len(fastcap.dumps(made, store=Keeps(), min_size="100 KiB", compact=compact)) < 2000
                assert len(kept) == 1
                assert kept[0] is tensor
    shared = torch.arange(400_000)
    for tensor in (shared[10:], shared.reshape(400, 1000).T, torch.complex(torch.ones(200_000), torch.ones(1)).conj()):
        loaded = pickle.loads(fastcap.dumps([tensor, make_closure(0)], store=store))[0]
        assert torch.equal(loaded, tensor)
    marked = torch.ones(400_000)
    marked.mark = Behaves(1)
    loaded = pickle.loads(fastcap.dumps([marked, Copies()], store=store))
    assert loaded[0].mark.data == 1
    assert torch.equal(loaded[0], plain)


def test_stores_that_split_get_the_smallest_parts(store):
    torch = pytest.importorskip("torch")
    store.split = True
    tensors = [torch.full((300_000,), number) for number in range(3)]
    arrays = [np.full(200_000, number) for number in range(3)]
    made = {"tensors": {"a": tensors[0], "b": tensors[1:]}, "arrays": arrays, "list": list(range(400_000)), "x": [[1]]}
    loaded = pickle.loads(fastcap.dumps(made, store=store))
    assert {id(obj) for obj in store.objects} == {id(obj) for obj in (*tensors, *arrays, made["list"])}
    assert all(map(torch.equal, [loaded["tensors"]["a"], *loaded["tensors"]["b"]], tensors))
    assert loaded["list"] == made["list"]
    assert all(map(np.array_equal, loaded["arrays"], arrays))


class OwnArray(np.ndarray):
    pass


class Behaves:
    def __init__(self, data):
        self.data = data


@pytest.mark.parametrize("made", [
    lambda: [np.ones(200_000), Behaves(1)],
    lambda: [np.ones(200_000), make_closure(1)],
    lambda: [np.ones(200_000), corpus.Color.RED],
    lambda: collections.defaultdict(Behaves, {"a": np.ones(200_000), "b": np.ones(200_000)}),
])
def test_what_is_not_only_data_is_looked_into(made, store):
    value = made()
    parts = list(value.values()) if isinstance(value, dict) else value[:1]
    reloaded(value, store)
    assert sorted(map(id, store.objects)) == sorted(map(id, parts))


def test_instances_of_own_classes_stay(store):
    made = np.ones(200_000).view(OwnArray)
    loaded = pickle.loads(fastcap.dumps([made], store=store))
    assert difference([made], loaded) is None
    assert [type(part) for part in store.objects] == [bytes]  # which its reducer has made


@pytest.mark.parametrize("name", ["numpy.ndarray", "collections.OrderedDict", "builtins.set", "pyarrow.lib.Table"])
def test_reconstructors_of_data(name):
    assert is_data(name)


@pytest.mark.parametrize("name", [
    "builtins.eval", "builtins.getattr", "cloudpickle.cloudpickle._make_function", "numpy_like.ndarray",
    "__main__.Thing",
    "ray.actor.ActorHandle", "pyarrow._fs.S3FileSystem", "numpy.random._pickle.__randomstate_ctor", "functools.partial",
])
def test_other_names_are_no_data(name):
    assert not is_data(name)


# ---- temporaries: objects that a reducer makes for the dump ----------------------------------------------------------


class Copies:
    """Its state is made anew each time it is asked for."""

    calls = 0

    def __init__(self):
        self.data = np.arange(200_000.0)

    def __getstate__(self):
        type(self).calls += 1
        return {"data": self.data.copy(), "rest": [1, 2, 3]}

    def __setstate__(self, state):
        self.data = state["data"]


class CopiesAndKeeps(Copies):
    def __init__(self):
        super().__init__()
        self.kept = np.ones(300_000)

    def __getstate__(self):
        return {**super().__getstate__(), "kept": self.kept}

    def __setstate__(self, state):
        super().__setstate__(state)
        self.kept = state["kept"]


class BytesState:
    def __init__(self):
        self.text = "text" * 500_000

    def __reduce__(self):
        return rebuild_bytes_state, (self.text.encode(),)


def rebuild_bytes_state(data):
    made = BytesState()
    made.text = data.decode()
    return made


class Items(collections.UserList):
    """Its items come out of an iterator, and none of them lives on."""

    def __reduce__(self):
        return Items, (), None, (np.full(200_000, value) for value in self.data)


@pytest.mark.parametrize("made_by", [Copies, CopiesAndKeeps, BytesState])
@pytest.mark.parametrize("compact", [False, True])
def test_temporaries_go_too(made_by, compact, store):
    made = [made_by(), made_by()]
    data = fastcap.dumps(made, store=store, compact=compact)
    assert len(data) < 5000
    assert sum(info.temporary for _, info in store.puts) == 2
    assert len(store.puts) == (4 if made_by is CopiesAndKeeps else 2)
    assert difference(pickle.loads(fastcap.dumps(made)), pickle.loads(data)) is None


def test_temporaries_out_of_an_iterator(store):
    data = fastcap.dumps(Items([1, 2, 3]), store=store)
    assert len(data) < 2000
    assert [value.max() for value in pickle.loads(data)] == [1, 2, 3]
    assert [info.temporary for _, info in store.puts] == [True] * 3


def test_temporaries_die_with_the_dump():
    class Forgetful:
        def put(self, obj, info):
            references.append(weakref.ref(obj))
            return list, ()

    references = []
    fastcap.dumps(Copies(), store=Forgetful())
    gc.collect()
    assert [reference() for reference in references] == [None]


class Lasting(Copies):
    """Looks as if its state lasted: somebody else refers to it, until the next one is made."""

    last = None

    def __getstate__(self):
        state = super().__getstate__()
        type(self).last = state["data"]
        return state


def test_an_object_that_only_seemed_to_last(store):
    data = fastcap.dumps([Lasting(), 1], store=store)
    assert len(data) < 2000
    assert np.array_equal(pickle.loads(data)[0].data, np.arange(200_000.0))


class Moody(Copies):
    """Gives another kind of state each time."""

    def __getstate__(self):
        state = super().__getstate__()
        if type(self).calls % 2:
            return state
        return {"rest": state, "data": state["data"]}


def test_reducers_that_change_their_mind(store):
    for start in range(2):
        Moody.calls = start
        assert np.array_equal(pickle.loads(fastcap.dumps([Moody()], store=store))[0].data, np.arange(200_000.0))


# ---- options ---------------------------------------------------------------------------------------------------------


def test_small_payloads_are_done_in_one_pass(store):
    Copies.calls = 0
    made = Copies()
    data = fastcap.dumps(made, store=store, min_size="2 MiB")
    assert Copies.calls == 1
    assert data == fastcap.dumps(made)
    assert not store.puts


def test_lasting_objects_take_two_passes(store):
    calls = []

    class Counted:
        def __reduce__(self):
            calls.append(self)
            return list, ()

    fastcap.dumps([Counted(), BIG], store=store)
    assert len(calls) == 2


@pytest.mark.parametrize("size", [300_000, "300k", "292.9 KiB"])
def test_min_size(size, store):
    made = [make_closure(0), bytes(400_000), bytes(200_000)]
    data = fastcap.dumps(made, store=store, min_size=size)
    assert store.paths == ["obj[1]"]
    assert pickle.loads(data)[1:] == made[1:]


@pytest.mark.parametrize("size", [-1, 1.5, True, b"1", "much"])
def test_senseless_sizes(size, store):
    with pytest.raises(ValueError, match="size"):
        fastcap.dumps(1, store=store, min_size=size)


def test_a_size_needs_a_store():
    with pytest.raises(TypeError, match="there is no store"):
        fastcap.dumps(1, min_size=100)
    with pytest.raises(TypeError, match="there is no store"):
        fastcap.dump(1, io.BytesIO(), min_size=100)


def test_no_store():
    with pytest.raises(TypeError, match=r"a store has a method put\(obj, info\), which 'dict' objects lack"):
        fastcap.dumps(1, store={})


def test_a_store_that_declines():
    class Choosy:
        def put(self, obj, info):
            return None

    assert fastcap.dumps([BIG, 1], store=Choosy()) == fastcap.dumps([BIG, 1])


@pytest.mark.parametrize("value", [1, (list,), (1, ()), (list, []), (list, (), 1)])
def test_a_store_that_says_nonsense(value):
    class Bad:
        def put(self, obj, info):
            return value

    with pytest.raises(TypeError, match=r"Bad\.put must return"):
        fastcap.dumps(BIG, store=Bad())


def test_a_store_that_fails():
    class Full:
        def put(self, obj, info):
            raise OSError("no space")

    with pytest.raises(OSError, match="no space"):
        fastcap.dumps(BIG, store=Full())


def test_dump_writes_the_same(store):
    file = io.BytesIO()
    fastcap.dump([make_closure(0), BIG], file, store=store)
    assert len(file.getvalue()) < 2000
    assert np.array_equal(pickle.loads(file.getvalue())[1], BIG)
    small = io.BytesIO()
    fastcap.dump([1], small, store=store)
    assert small.getvalue() == fastcap.dumps([1])


def test_buffers_that_stay_go_out_of_band(store):
    made = [make_closure(0), np.ones(200_000), np.ones(1000)]
    buffers = []
    data = fastcap.dumps(made, 5, buffers.append, store=store)
    assert store.paths == ["obj[1]"]
    assert len(buffers) == 1
    assert difference(made[1:], pickle.loads(data, buffers=buffers)[1:]) is None


def test_failures_are_those_of_dumps(store):
    for made in [sys._getframe(), [BIG, sys._getframe()]]:
        with pytest.raises(TypeError, match="frame"):
            fastcap.dumps(made, store=store)
    assert not store.puts

    class Endless:
        def __reduce__(self):
            return list, (Endless(),)

    with pytest.raises(pickle.PicklingError, match="recursion"):
        fastcap.dumps(Endless(), store=store)


def test_watchers_see_one_dump(store):
    with recording() as recorded:
        data = [fastcap.dumps(made, store=store) for made in ([make_closure(0), BIG], [1])]
    stored, *dumped = [dump.payload_size for dump in recorded.dumps]
    assert stored > BIG.nbytes
    assert dumped == list(map(len, data))


@pytest.mark.parametrize("flavor", ["ray.cloudpickle", "joblib.externals.cloudpickle"])
def test_flavors(flavor, store):
    module = pytest.importorskip(flavor, reason=f"{flavor} is not installed")
    data = fastcap.dumps(Trainer().make(), store=store, flavor=flavor)
    assert len(data) < 5000
    assert np.array_equal(module.loads(data)()[0], np.ones(200_000))


def test_patched_flavor(store, monkeypatch):
    """Where somebody has replaced the flavor's pickler, that one is used."""
    import cloudpickle.cloudpickle

    class Own(cloudpickle.cloudpickle.Pickler):
        def reducer_override(self, obj):
            if type(obj) is Behaves:
                return list, ((1, 2),)
            return super().reducer_override(obj)

    monkeypatch.setattr(cloudpickle.cloudpickle, "Pickler", Own)
    loaded = pickle.loads(fastcap.dumps([Behaves(3), BIG], store=store))
    assert loaded[0] == [1, 2]
    assert store.objects[0] is BIG


# ---- any object ------------------------------------------------------------------------------------------------------


@given(strategies.objects())
def test_any_object_comes_back_the_same(made):
    for protocol in range(2, 6):
        for compact in (False, True):
            data = fastcap.dumps(made, protocol, store=MemoryStore(protocol), min_size=SMALLEST, compact=compact)
            expected = pickle.loads(fastcap.dumps(made, protocol))
            assert difference(expected, pickle.loads(data)) is None


@pytest.mark.kinds(lambda kind: kind.loads and kind.deterministic)
@pytest.mark.parametrize("flavor", ["cloudpickle", "ray.cloudpickle"])
def test_corpus_comes_back_the_same(kind, flavor):
    pytest.importorskip(flavor, reason=f"{flavor} is not installed")
    made = kind.make()
    for protocol in range(max(2, kind.protocol), 6) if flavor == "cloudpickle" else [5]:
        pickle.loads(fastcap.dumps(made, protocol, flavor=flavor))
        expected = pickle.loads(fastcap.dumps(made, protocol, flavor=flavor))
        data = fastcap.dumps(made, protocol, store=MemoryStore(protocol), min_size=SMALLEST, flavor=flavor)
        assert difference(expected, pickle.loads(data)) is None


# ---- the encoder -----------------------------------------------------------------------------------------------------


def encoder_into(file, **hooks):
    encoder = Encoder(file, 5)
    for name, value in hooks.items():
        setattr(encoder, name, value)
    return encoder


@pytest.mark.parametrize("value", [1, "x", [], (), (list,), (1, ()), (list, []), (list, (), None, None, None, None, 1)])
def test_replacements_that_are_none(value):
    made = [1]
    with pytest.raises(pickle.PicklingError):
        encoder_into(io.BytesIO(), _replacements={id(made): value}).dump([made])


@pytest.mark.parametrize("value", [1, (), (1,), (1, 2), (1, "x"), (1, 2, 3)])
def test_records_that_are_none(value):
    made = Behaves([1])
    copyreg_like = encoder_into(io.BytesIO(), _recorded={id(made): value}, dispatch_table={Behaves: lambda obj: None})
    with pytest.raises((pickle.PicklingError, TypeError, ValueError)):
        copyreg_like.dump([made])


@pytest.mark.parametrize("name", ["_replacements", "_recorded"])
@pytest.mark.parametrize("value", [1, [], ()])
def test_hooks_of_the_wrong_type(name, value):
    with pytest.raises(TypeError):
        encoder_into(io.BytesIO(), **{name: value})


class Meddles:
    """Changes the hooks of the encoder that is pickling it."""

    def __init__(self, change):
        self.change = change

    def __reduce_ex__(self, protocol):
        self.change()
        return list, ((), ), None, self.items()

    def items(self):
        for _ in range(3):
            self.change()
            yield [[] for _ in range(5)]


@pytest.mark.parametrize("change", [
    lambda encoder: encoder._replacements.clear() if encoder._replacements else None,
    lambda encoder: setattr(encoder, "_replacements", None),
    lambda encoder: setattr(encoder, "_replacements", dict.fromkeys(range(100), (list, ()))),
    lambda encoder: encoder._recorded.clear() if encoder._recorded else None,
    lambda encoder: setattr(encoder, "_recorded", None),
    lambda encoder: setattr(encoder, "_recorded", {}),
])
def test_hooks_that_change_in_the_midst(change):
    part = [bytes(10)]
    made = []
    file = io.BytesIO()
    encoder = encoder_into(file, _replacements={id(part): (dict, ())}, _recorded={})
    made += [part, Meddles(lambda: change(encoder)), Behaves(1), Meddles(lambda: change(encoder)), part]
    encoder.dump(made)
    loaded = pickle.loads(file.getvalue())
    assert loaded[0] == {}
    assert loaded[1] == loaded[3] == [[[]] * 5] * 3
    assert loaded[4] is loaded[0]


def test_records_make_dumps_meet_the_same_objects():
    made = [Copies(), Items([1, 2])]
    recorded = {}
    seen = []
    for _ in range(2):
        file = io.BytesIO()
        encoder = encoder_into(file, _recorded=recorded)
        encoder.dump(made)
        seen.append([id(obj) for obj in encoder._memo_objects() if isinstance(obj, np.ndarray)])
        assert difference(pickle.loads(fastcap.dumps(made)), pickle.loads(file.getvalue())) is None
    assert seen[0] == seen[1]
    assert len(seen[0]) == 3


def test_a_replaced_object_may_be_found_by_persistent_ids_no_more():
    class Persistent(Encoder):
        def persistent_id(self, obj):
            asked.append(obj)
            return "kept" if obj == "kept" else None

    asked, file, part = [], io.BytesIO(), ["part"]
    encoder = Persistent(file, 5)
    encoder._replacements = {id(part): (dict, ())}
    encoder.dump([part, "kept", part])
    assert part not in asked

    class Unpickler(pickle.Unpickler):
        def persistent_load(self, name):
            return name

    loaded = Unpickler(io.BytesIO(file.getvalue())).load()
    assert loaded == [{}, "kept", {}]
    assert loaded[0] is loaded[2]
