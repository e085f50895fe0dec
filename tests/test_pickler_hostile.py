"""User code that runs during a dump may do anything; the native pickler neither crashes nor leaks."""

import collections
import functools
import gc
import io
import pickle
import sys
import threading
import tracemalloc
import weakref

import pytest

from fastcap._native import pickler as native

PICKLERS = [pickle.Pickler, native.Pickler]


class Do:
    """Runs an action when it is reduced, then reduces to an empty list."""

    def __init__(self, action):
        self.action = action

    def __reduce__(self):
        self.action()
        return list, ()


class Fresh:
    """Reduces to objects that nothing else refers to."""

    def __init__(self, depth=2):
        self.depth = depth

    def __reduce__(self):
        inner = Fresh(self.depth - 1) if self.depth else ()
        return dict, (), None, None, iter([(("key", i), [inner, {i: b"x" * i}]) for i in range(3)])


class Plain:
    pass


def attempt(action):
    try:
        return action()
    except Exception as error:
        return type(error), str(error)


def dump(base, obj, protocol=5, **options):
    file = io.BytesIO()
    base(file, protocol, **options).dump(obj)
    return file.getvalue()


# ---- containers changed while they are saved


def changing_list(change, size=10, at=3):
    items = [[i] for i in range(size)]
    items[at] = Do(lambda: change(items))
    return items


def changing_dict(change, size=10, at=3):
    items = {i: [i] for i in range(size)}
    items[at] = Do(lambda: change(items))
    return items


class Key:
    def __init__(self, action):
        self.action = action

    def __hash__(self):
        return 5

    def __reduce__(self):
        self.action()
        return tuple, ()


LIST_CHANGES = {
    "clear": lambda items: items.clear(),
    "pop": lambda items: items.pop(),
    "shift": lambda items: items.pop(0),
    "append": lambda items: items.append("new") if len(items) < 20 else None,
    "replace": lambda items: items.__setitem__(slice(None), ["other"] * 5),
    "grow": lambda items: items.extend(range(3000)) if len(items) < 20 else None,
    "only": lambda items: items.__delitem__(slice(1, None)),
}
DICT_CHANGES = {
    "clear": lambda items: items.clear(),
    "pop": lambda items: items.pop(5),
    "self": lambda items: items.pop(3),
    "add": lambda items: items.update({100: 1}),
    "value": lambda items: items.update({5: "other"}),
    "swap": lambda items: (items.pop(5), items.update({100: 1})),
    "grow": lambda items: items.update({i: i for i in range(100, 3000)}),
}


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("size", [1, 2, 10, 1000, 1001])
@pytest.mark.parametrize("change", LIST_CHANGES)
def test_lists_that_change(change, size, protocol):
    at = min(3, size - 1)
    expected, got = (attempt(lambda base=base: dump(base, changing_list(LIST_CHANGES[change], size, at), protocol))
                     for base in PICKLERS)
    assert got == expected


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("change", DICT_CHANGES)
def test_dicts_that_change(change, protocol):
    expected, got = (attempt(lambda base=base: dump(base, changing_dict(DICT_CHANGES[change]), protocol))
                     for base in PICKLERS)
    assert got == expected


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("change", [*DICT_CHANGES][:5])
def test_dicts_changed_by_a_key(change, protocol):
    outcomes = []
    for base in PICKLERS:
        items = {}
        key = Key(lambda items=items: DICT_CHANGES[change](items))
        items.update({key: ["value of the key"], 3: [], 5: ["five"]})
        outcomes.append(attempt(lambda base=base, items=items: dump(base, items, protocol)))
        items = {key: ["only value"]}
        outcomes.append(attempt(lambda base=base, items=items: dump(base, items, protocol)))
    assert outcomes[:2] == outcomes[2:]


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("change", ["clear", "add", "pop"])
def test_sets_that_change(change, protocol):
    outcomes = []
    for base in PICKLERS:
        items = {1, 2, 3}
        actions = {"clear": items.clear, "add": lambda items=items: items.update(range(100)), "pop": items.pop}
        items.add(Key(actions[change]))
        outcomes.append(attempt(lambda base=base, items=items: dump(base, items, protocol)))
    assert outcomes[0] == outcomes[1]


def test_states_that_change():
    outcomes = []
    for base in PICKLERS:
        obj = Plain()
        obj.__dict__.update(a=[1], b=Do(lambda obj=obj: obj.__dict__.clear()), c=[3])
        outcomes.append(attempt(lambda base=base, obj=obj: dump(base, obj)))
        obj = Plain()
        obj.__dict__.update(a=Do(lambda obj=obj: setattr(obj, "__dict__", {"new": 1})), c=[3])
        outcomes.append(attempt(lambda base=base, obj=obj: dump(base, obj)))
        obj = Plain()
        obj.__dict__.update(a=Do(lambda obj=obj: setattr(obj, "__class__", Do)), c=[3])
        outcomes.append(attempt(lambda base=base, obj=obj: dump(base, [obj, 1])))
    assert outcomes[:3] == outcomes[3:]


def test_objects_that_only_the_container_holds():
    """The item being saved loses its last reference outside while its reducer runs."""

    class Vanishing:
        def __reduce__(self):
            items.clear()
            gc.collect()
            return list, ([1, 2],), {"self": self}

    items = [Vanishing(), "x"]
    assert pickle.dumps(0)  # the C pickler is the model, but may not be given this object twice
    with pytest.raises((TypeError, AttributeError, pickle.PicklingError)):
        native.dumps([items, Do(lambda: items.clear()), lambda: None])
    items[:] = [Vanishing()]
    assert dump(native.Pickler, items, 2)


def test_writers_that_change_what_is_saved():
    """file.write runs between two items; what it removes must not be touched any more."""
    for clear in ("list", "dict", "set", "nested"):
        big = [[f"item {i} of {clear}" * 3] for i in range(30_000)]
        obj = {"list": big, "dict": dict(enumerate(big)), "set": {value[0] for value in big},
               "nested": [big, big[:], {"k": big}]}[clear]

        class Writer:
            written = 0

            def write(self, data, obj=obj, big=big):
                self.written += len(data)
                obj.clear()
                big.clear()
                gc.collect()

        writer = Writer()
        attempt(lambda writer=writer, obj=obj: native.Pickler(writer, 4).dump(obj))
        assert writer.written > 60_000


@pytest.mark.parametrize("make", [
    lambda: bytes(100_000), lambda: bytearray(100_000), lambda: "a" * 100_000, lambda: "é" * 100_000,
    lambda: pickle.PickleBuffer(bytes(100_000)),
])
def test_writers_that_drop_the_payload(make):
    obj = [make()]

    def write(data):
        obj.clear()
        gc.collect()

    writer = type("Writer", (), {"write": staticmethod(write)})()
    pickler = native.Pickler(writer, 5)
    pickler.dump(obj)
    assert len(pickler._memo_objects()) == 2


# ---- the pickler used from within


def callbacks(run):
    """Payload and pickler class whose hooks call `run` one after the other."""

    class Hooked(native.Pickler):
        def persistent_id(self, obj):
            run(self)

        def reducer_override(self, obj):
            run(self)
            return NotImplemented

    def items(pickler_of):
        run(pickler_of())
        yield 1, [2]
        run(pickler_of())
        yield 3, 4

    class Reduced:
        def __init__(self, pickler_of):
            self.pickler_of = pickler_of

        def __reduce__(self):
            run(self.pickler_of())
            return collections.OrderedDict, (), None, None, items(self.pickler_of)

    class Writer:
        pickler = None

        def write(self, data):
            run(self.pickler)

    writer = Writer()

    def buffer_callback(buffer):
        run(writer.pickler)
        return True

    writer.pickler = Hooked(writer, 5, buffer_callback=buffer_callback)
    obj = [Reduced(lambda: writer.pickler), pickle.PickleBuffer(b"x" * 70_000), Plain(), {"k": (1, {2})},
           Reduced(lambda: writer.pickler)]
    return writer.pickler, obj


USES = {
    "dump": lambda pickler: pickler.dump([1, 2]),
    "init": lambda pickler: pickler.__init__(io.BytesIO()),
}


@pytest.mark.parametrize("use", USES)
def test_a_busy_pickler_refuses(use):
    refused = []

    def run(pickler):
        try:
            USES[use](pickler)
        except RuntimeError as error:
            refused.append(error)

    pickler, obj = callbacks(run)
    pickler.dump(obj)
    assert len(refused) > 10
    assert all("dumping" in str(error) for error in refused)
    refused.clear()
    pickler.clear_memo()
    pickler.dump([1])


@pytest.mark.parametrize("use", [
    lambda pickler: pickler.clear_memo(),
    lambda pickler: pickler.memo.clear(),
    lambda pickler: setattr(pickler, "memo", {}),
    lambda pickler: setattr(pickler, "memo", pickler.memo),
    lambda pickler: setattr(pickler, "memo", {1: (500, "x"), 2: (7, [])}),
    lambda pickler: setattr(pickler, "fast", not pickler.fast),
    lambda pickler: setattr(pickler, "bin", not pickler.bin),
    lambda pickler: setattr(pickler, "dispatch_table", {}),
    lambda pickler: pickler._memo_objects().clear(),
    lambda pickler: gc.collect(),
])
def test_everything_else_is_allowed_while_dumping(use):
    pickler, obj = callbacks(use)
    pickler.dump(obj)
    pickler.dump(obj)


def test_errors_at_every_callback():
    """Raise in the first callback, then in the second..., and find the pickler usable and nothing leaked."""
    reached = 0
    for stop in range(10_000):
        calls = 0

        def run(pickler, stop=stop):
            nonlocal calls
            calls += 1
            if calls > stop:
                raise ZeroDivisionError(stop)

        pickler, obj = callbacks(run)
        try:
            pickler.dump(obj)
        except ZeroDivisionError:
            pass
        else:
            reached = stop
            break
    assert reached > 40


def test_finalizers_that_use_the_pickler():
    log = []

    class Final:
        def __init__(self, pickler):
            self.pickler = pickler

        def __reduce__(self):
            return list, ()

        def __del__(self):
            log.append(attempt(lambda: self.pickler.dump(1)))
            self.pickler.clear_memo()
            survivors.append(self)

    survivors = []
    file = io.BytesIO()
    pickler = native.Pickler(file, 4)
    pickler.fast = True  # nothing keeps the temporaries alive
    pickler.dump([Do(lambda: None), Fresh()])

    class Temporary:
        def __reduce__(self):
            return list, (), None, iter([Final(pickler), Final(pickler), [Final(pickler)]])

    pickler.dump([Temporary(), Temporary()])
    gc.collect()
    assert len(log) == 6
    assert all(entry[0] is RuntimeError for entry in log)
    pickler.fast = False
    pickler.dump([Temporary()])
    log.clear()
    pickler.clear_memo()
    gc.collect()
    assert log


def test_temporaries_stay_until_the_dump_ends():
    """The memo keeps what reducers have made: otherwise a new object at an old address would be taken for it."""

    class Maker:
        def __init__(self, n):
            self.n = n

        def __reduce__(self):
            return list, ([[self.n], str(self.n), (self.n, "t")],)

    objs = [Maker(n) for n in range(2000)]
    assert pickle.loads(native.dumps(objs)) == [[[n], str(n), (n, "t")] for n in range(2000)]
    assert native.dumps(objs, 5) == pickle.dumps(objs, 5)


def test_one_pickler_in_many_threads():
    file = io.BytesIO()
    pickler = native.Pickler(file)
    refusals = []

    class Slow:
        def __reduce__(self):
            threading.Event().wait(0.001)
            return list, ()

    def work():
        for _ in range(20):
            try:
                pickler.dump([Slow(), Slow()])
            except RuntimeError as error:
                refusals.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert refusals
    pickler.dump(1)


def test_shared_objects_in_many_threads():
    shared = [{"key": [Plain() for _ in range(50)], "text": "é" * 100} for _ in range(50)]
    expected = pickle.dumps(shared, 5)
    results = []

    def work():
        for _ in range(10):
            results.append(native.dumps(shared, 5) == expected)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True] * 80


def test_shared_objects_in_many_threads_in_compact_mode():
    """Other threads' references come and go; whatever they do to what is left out, each result is complete."""
    shared = [{"key": [[n], f"{n}", (f"{n}", [n])], "words": [f"word {i}" for i in range(200)], "array": bytearray(5)}
              for n in range(50)]
    pair = ["pair"]
    shared += [Fresh(1), pair, pair, {f"k{n}": f"v{n}" for n in range(200)}]
    results = []

    def work():
        for _ in range(20):
            loaded = pickle.loads(native.dumps(shared, 5, compact=True))
            same = [*loaded[:50], *loaded[51:]] == [*shared[:50], *shared[51:]]
            results.append(same and loaded[51] is loaded[52])

    threads = [threading.Thread(target=work) for _ in range(8)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert results == [True] * 160


# ---- leaks


def payloads():
    """Objects that go through every kind of frame, and some that fail."""
    cycle = []
    cycle.append((cycle, {"c": cycle}))
    plain = Plain()
    plain.x = [plain]
    slotted = type("Slotted", (), {"__slots__": ("a",), "__module__": __name__, "__qualname__": "Slotted"})
    globals()["Slotted"] = slotted
    filled = slotted()
    filled.a = 1
    return [
        cycle, plain, [filled] * 2, Fresh(), {1: {2: 3}}, {1, 2, (3,)}, frozenset([1, (2,)]), "x" * 300, "é" * 300,
        "y" * 70_000, "é" * 70_000, b"z" * 70_000, bytearray(70_000), 1 << 5000, 1.5, None, [True] * 3,
        pickle.PickleBuffer(b"x"), collections.OrderedDict(a=[1]), collections.deque([1, [2]]), len, Plain, [[]] * 1500,
        {i: [] for i in range(1500)}, [str(i) for i in range(3000)], Exception("x", [1]), 1j, ValueError,
        functools.partial(print, 1), type(None), range(3),
        # These fail at some protocols, or at all.
        lambda: None, (x for x in ()), [1, [2, {"k": object.__init__.__call__}]], Do(lambda: 1 / 0), [Fresh(), Do(5)],
    ]


def dump_all(objs, protocol):
    for obj in objs:
        attempt(lambda obj=obj: native.dumps(obj, protocol))
        attempt(lambda obj=obj: dump(native.Pickler, obj, protocol))


@pytest.mark.parametrize("protocol", range(6))
def test_nothing_leaks(protocol):
    objs = payloads()
    pickler, hooked = callbacks(lambda pickler: None)
    for _ in range(3):
        dump_all(objs, protocol)
        pickler.dump(hooked)
        pickler.clear_memo()
    gc.collect()
    before = sys.getallocatedblocks()
    for _ in range(20):
        dump_all(objs, protocol)
        pickler.dump(hooked)
        pickler.clear_memo()
    gc.collect()
    assert sys.getallocatedblocks() - before < 400  # after some 1,500 dumps


def test_arrays_of_the_pickler_do_not_leak():
    """Memo, stack and buffer, which are not Python objects."""
    tracemalloc.start()
    try:
        objs = payloads()
        for _ in range(2):
            dump_all(objs, 5)
        gc.collect()
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(20):
            dump_all(objs, 5)
        gc.collect()
        assert tracemalloc.get_traced_memory()[0] - before < 60_000  # bytes, after 1,500 dumps
    finally:
        tracemalloc.stop()


def test_references_are_returned():
    class Item:
        def __reduce__(self):
            return list, (self.held,)

    item, held = Item(), [["held"]]
    item.held = held
    reference = weakref.ref(item)
    for _ in range(5):
        native.dumps([item, item, held, {"k": item}])
        with pytest.raises(TypeError):
            native.dumps([item, (held, (x for x in ()))])
    assert sys.getrefcount(held) == 3
    assert sys.getrefcount(item) == 2
    del item
    assert reference() is None


def test_no_memory_anywhere():
    """Every allocation fails once; each dump raises MemoryError or works.

    Where an import or an attribute look-up of save_global fails, the C pickler makes a PicklingError of it.
    """
    testcapi = pytest.importorskip("_testcapi", reason="needs CPython's own test helper")
    objs = [["a", (1, 2), {"k": [Plain()]}], "é" * 100, 1 << 300, Fresh(1), {1, (2,)}, [str(i) for i in range(100)],
            functools.reduce(lambda inner, _: [inner], range(300), [])]
    for obj in objs:
        expected = native.dumps(obj, 4)
        for start in range(1, 400):
            testcapi.set_nomemory(start, start + 1)
            try:
                result = native.dumps(obj, 4)
            except (MemoryError, pickle.PicklingError):
                result = None
            finally:
                testcapi.remove_mem_hooks()
            assert result is None or result == expected


@pytest.mark.long
def test_nothing_leaks_in_100_000_dumps():
    import resource

    objs = payloads()
    for _ in range(100):
        dump_all(objs, 5)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(100_000 // len(objs)):
        dump_all(objs, 5)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 20 * 1024  # KiB
