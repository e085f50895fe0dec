"""The native pickler writes what the C pickler of the running Python writes, and refuses what it refuses."""

import collections
import copyreg
import dataclasses
import functools
import gc
import io
import itertools
import pickle
import sys
import weakref

import corpus
import pytest
import strategies
from hypothesis import given
from hypothesis import strategies as st

from fastcap._native import pickler as native

PROTOCOLS = corpus.PROTOCOLS
protocols = pytest.mark.parametrize("protocol", PROTOCOLS)


def attempt(write, *args):
    """The bytes, or the error's type and text."""
    try:
        return write(*args)
    except RecursionError:
        return RecursionError, "whose text says where CPython's stack ended"
    except Exception as error:
        return type(error), str(error)


def write_with(pickler_class, obj, protocol, prepare=None, **options):
    file = io.BytesIO()
    pickler = pickler_class(file, protocol, **options)
    if prepare is not None:
        prepare(pickler)
    pickler.dump(obj)
    return file.getvalue()


def assert_same(obj, protocol, subclass=None, prepare=None, **options):
    """Both picklers give the same bytes or the same error; `subclass` makes a class from a base class."""
    bases = [pickle.Pickler, native.Pickler]
    if subclass is not None:
        bases = [subclass(base) for base in bases]
    expected, got = (attempt(functools.partial(write_with, base, prepare=prepare, **options), obj, protocol)
                     for base in bases)
    assert got == expected
    return expected


class Plain:
    """An instance that needs nothing but object's own reduce protocol."""

    def __init__(self, x=0):
        self.x = x


# ---- whole payloads


@protocols
def test_corpus_kind_is_identical(kind, protocol):
    obj = kind.make()
    attempt(pickle.dumps, obj, protocol)  # copyreg leaves __slotnames__ on classes
    expected = assert_same(obj, protocol)
    assert attempt(native.dumps, obj, protocol) == expected
    if kind.plain and protocol >= kind.protocol:
        assert isinstance(expected, bytes)


@given(strategies.graphs(), st.sampled_from(PROTOCOLS))
def test_graphs_are_identical(obj, protocol):
    attempt(pickle.dumps, obj, protocol)
    assert attempt(native.dumps, obj, protocol) == assert_same(obj, protocol)


@given(strategies.nested_builtins(), st.sampled_from(PROTOCOLS))
def test_graphs_with_a_persistent_id_are_identical(obj, protocol):
    def subclass(base):
        class Persistent(base):
            def persistent_id(self, obj):
                return ("number", str(obj)) if type(obj) is int and obj % 2 else None

        return Persistent

    assert_same(obj, protocol, subclass)


@given(strategies.graphs(), st.sampled_from(PROTOCOLS))
def test_graphs_in_fast_mode_are_identical(obj, protocol):
    if any(strategies.is_tensor(part) for part in [obj]):
        return

    def fast(pickler):
        pickler.fast = True

    if isinstance(attempt(functools.partial(write_with, pickle.Pickler, prepare=fast), obj, protocol), bytes):
        assert_same(obj, protocol, prepare=fast)
    else:  # cycles end in one error or another
        with pytest.raises((RecursionError, ValueError, pickle.PicklingError, TypeError)):
            write_with(native.Pickler, obj, protocol, prepare=fast)


@protocols
@pytest.mark.parametrize("bits", [0, 7, 8, 15, 16, 30, 31, 32, 60, 62, 63, 64, 2032, 2039, 2040, 2047, 2048, 10000])
def test_integers_around_every_width(bits, protocol):
    numbers = [sign * (1 << bits) + step for sign in (1, -1) for step in range(-3, 4)]
    for number in numbers:
        assert_same(number, protocol)


@given(st.text(st.characters()), st.sampled_from(PROTOCOLS))
def test_text_is_identical(text, protocol):
    assert_same(text, protocol)
    assert_same((text * 300)[:70_000], protocol)


frame_items = st.lists(
    st.tuples(
        st.sampled_from(["a", "é", "漢", "\U0001f600", b"b", bytearray(b"c"), "list", "instance"]),
        st.one_of(st.integers(0, 300), st.integers(65_500, 65_560), st.integers(0, 140_000)),
    ),
    max_size=12,
)


def make_item(what, size):
    if what == "list":
        return [None] * (size % 5000)
    if what == "instance":
        return [Plain(size) for _ in range(size % 3000)]
    return what * size


@given(frame_items, st.sampled_from(PROTOCOLS))
def test_frames_are_cut_at_the_same_places(items, protocol):
    obj = [make_item(what, size) for what, size in items]
    obj.append(obj[0] if obj else None)
    assert native.dumps(obj, protocol) == assert_same(obj, protocol)


@pytest.mark.parametrize("protocol", [4, 5])
def test_frames_end_before_any_opcode(protocol):
    """The 64 KiB limit is met at every position of an instance, a tuple, a dict and a global."""
    for padding in range(65_536 - 150, 65_536, 1):
        obj = [bytes(padding // 2), bytes(padding - padding // 2), Plain(1), (1, 2), {"k": 2}, corpus.Slotted(),
               Plain(2), "x", "x", len]
        assert native.dumps(obj, protocol) == pickle.dumps(obj, protocol)


@protocols
def test_one_pickler_dumps_several_times(protocol):
    def dump_all(base):
        file, shared = io.BytesIO(), ["shared", Plain(1)]
        pickler = base(file, protocol)
        for obj in (shared, [shared, 2], shared):
            pickler.dump(obj)
        pickler.clear_memo()
        pickler.dump(shared)
        return file.getvalue()

    assert dump_all(native.Pickler) == dump_all(pickle.Pickler)


@pytest.mark.parametrize("protocol", [0, 1, 2, 3])
@pytest.mark.parametrize("fix_imports", [True, False])
def test_imports_are_fixed_alike(protocol, fix_imports):
    obj = [range, map, zip, collections.UserDict, functools.reduce, Exception, OSError, itertools.filterfalse,
           sys.intern, ModuleNotFoundError]
    assert_same(obj, protocol, fix_imports=fix_imports)


def test_damaged_import_tables_give_the_same_errors(monkeypatch):
    import _compat_pickle

    for table, key, values in (
        ("REVERSE_NAME_MAPPING", ("builtins", "range"), [1, ("a",), ("a", 1), (1, "a")]),
        ("REVERSE_IMPORT_MAPPING", "collections", [1, None]),
    ):
        for value in values:
            monkeypatch.setitem(getattr(_compat_pickle, table), key, value)
            assert_same(range, 2)
            assert_same(collections.OrderedDict, 2)


@protocols
def test_extension_registry(protocol):
    for code in (1, 255, 256, 65_535, 65_536, 0x7FFFFFFF):
        copyreg.add_extension(__name__, "Plain", code)
        try:
            assert_same([Plain(1), Plain], protocol)
        finally:
            copyreg.remove_extension(__name__, "Plain", code)


@pytest.mark.parametrize("code", [0, -1, 1 << 31, "x", None, 1 << 70])
def test_damaged_extension_registry(code, monkeypatch):
    monkeypatch.setitem(copyreg._extension_registry, (__name__, "Plain"), code)
    (expected, _), (got, _) = attempt(pickle.dumps, Plain, 2), attempt(native.dumps, Plain, 2)
    assert got is expected


# ---- buffers


class Sink:
    """Keeps the very objects it is given."""

    def __init__(self):
        self.chunks = []

    def write(self, chunk):
        self.chunks.append(chunk)

    def joined(self):
        return b"".join(bytes(chunk) for chunk in self.chunks)


@pytest.mark.parametrize("size", [65_536, 200_000])
def test_big_payloads_are_written_by_reference(size):
    text, data, array, buffer = "t" * size, bytes(size), bytearray(size), bytearray(b"\1" * size)
    obj = ["start", text, data, array, pickle.PickleBuffer(buffer),
           pickle.PickleBuffer(memoryview(data + b"!")[1:]), "end"]
    sink = Sink()
    native.Pickler(sink, 5).dump(obj)
    assert sink.joined() == pickle.dumps(obj, 5)
    assert any(chunk is data for chunk in sink.chunks)
    assert any(chunk is array for chunk in sink.chunks)
    views = [chunk for chunk in sink.chunks if isinstance(chunk, memoryview)]
    assert [len(view) for view in views] == [size, size, size]
    assert views[1].obj is buffer
    assert bytes(views[0]) == text.encode()
    buffer[0] = 7
    assert views[1][0] == 7


def test_small_output_is_gathered():
    sink = Sink()
    native.Pickler(sink, 5).dump(list(range(100_000)))
    assert all(isinstance(chunk, bytes) for chunk in sink.chunks)
    assert len(sink.chunks) < 10


def test_text_views_live_on_their_own():
    sink = Sink()
    native.Pickler(sink, 5).dump("ab" * 100_000)
    view = next(chunk for chunk in sink.chunks if isinstance(chunk, memoryview))
    gc.collect()
    assert view.readonly
    assert bytes(view) == b"ab" * 100_000
    with pytest.raises(BufferError):
        memoryview(type(view.obj)())


@pytest.mark.parametrize("answer", [None, True, False, 1])
@pytest.mark.parametrize("data", [b"x" * 10, bytearray(10), b"y" * 100_000, bytearray(100_000)])
def test_buffer_callback(answer, data):
    results = []
    for base in (pickle.Pickler, native.Pickler):
        seen = []

        def callback(buffer, seen=seen):
            seen.append(bytes(buffer))
            return answer

        buffer = pickle.PickleBuffer(data)
        results.append((write_with(base, [buffer, buffer, 1], 5, buffer_callback=callback), seen))
    assert results[0] == results[1]


def test_buffers_need_protocol_5():
    for protocol in range(5):
        assert_same(pickle.PickleBuffer(b"x"), protocol)
        assert_same(1, protocol, buffer_callback=print)


def test_odd_buffers():
    strided = memoryview(bytearray(100))[::2]
    released = pickle.PickleBuffer(b"x")
    released.release()
    for buffer in (pickle.PickleBuffer(strided), released):
        assert_same(buffer, 5)


def test_a_buffer_released_by_its_callback_is_refused():
    buffer = pickle.PickleBuffer(bytearray(100))

    def callback(given):
        given.release()
        return True

    with pytest.raises(ValueError, match="released"):
        write_with(native.Pickler, buffer, 5, buffer_callback=callback)


def test_arrays_in_every_order():
    np = pytest.importorskip("numpy")
    grid = np.arange(60_000.0).reshape(200, 300)
    for array in (grid, grid.T, np.asfortranarray(grid), grid[::2], grid[:, ::3], grid[:0]):
        assert native.dumps(array, 5) == pickle.dumps(array, 5)
        sink = Sink()
        native.Pickler(sink, 5).dump(array)
        assert sink.joined() == pickle.dumps(array, 5)


# ---- hooks


def by_table(base):
    class WithTable(base):
        dispatch_table = {Plain: lambda obj: (corpus.make_bag, (1,))}

    return WithTable


def by_chain(base):
    class WithChain(base):
        dispatch_table = collections.ChainMap({Plain: lambda obj: "A_SINGLETON"}, copyreg.dispatch_table)

    return WithChain


def by_missing(base):
    class Table(dict):
        def __missing__(self, cls):
            if cls is Plain:
                return lambda obj: (list, ((1, 2),))
            raise KeyError(cls)

    class WithMissing(base):
        dispatch_table = Table()

    return WithMissing


def by_failing_table(base):
    class Table:
        def __getitem__(self, cls):
            raise ZeroDivisionError(cls.__name__)

    class WithFailing(base):
        dispatch_table = Table()

    return WithFailing


def by_none_table(base):
    class WithNone(base):
        dispatch_table = None

    return WithNone


def by_none_reducer(base):
    class WithNoneReducer(base):
        dispatch_table = {Plain: None}

    return WithNoneReducer


def by_override(base):
    class WithOverride(base):
        def reducer_override(self, obj):
            if isinstance(obj, Plain):
                return corpus.make_bag, (7,)
            return NotImplemented

    return WithOverride


def by_none_override(base):
    class WithNoneOverride(base):
        reducer_override = None

    return WithNoneOverride


def by_persistent_id(base):
    class WithPersistentId(base):
        def persistent_id(self, obj):
            if isinstance(obj, Plain):
                return "plain", id(type(obj)) % 7, ["deep", {"er": (1, 2)}]
            return None

    return WithPersistentId


def by_text_persistent_id(base):
    class WithText(base):
        def persistent_id(self, obj):
            return {1: "one", 2: "ž"}.get(obj) if type(obj) is int else None

    return WithText


def by_none_persistent_id(base):
    class WithNonePersistentId(base):
        persistent_id = None

    return WithNonePersistentId


@protocols
@pytest.mark.parametrize("subclass", [
    by_table, by_chain, by_missing, by_failing_table, by_none_table, by_none_reducer, by_override, by_none_override,
    by_persistent_id, by_text_persistent_id, by_none_persistent_id,
])
def test_hooks(subclass, protocol):
    plain = Plain(1)
    for obj in ([plain, plain, Plain], {"a": plain, "b": (plain, {plain})}, [1, 2, 3], 2, corpus.Slotted()):
        assert_same(obj, protocol, subclass)


@protocols
def test_hooks_set_on_the_instance(protocol):
    def subclass(base):
        return type("Sub", (base,), {})

    plain = [Plain(1), Plain(2)]

    def table(pickler):
        pickler.dispatch_table = {Plain: lambda obj: (list, ((1, 2),))}

    def persistent(pickler):
        pickler.persistent_id = lambda obj: "id" if obj == 5 else None

    def override(pickler):
        pickler.reducer_override = lambda obj: (list, ()) if isinstance(obj, Plain) else NotImplemented

    assert_same(plain, protocol, prepare=table)
    for prepare in (table, persistent, override):
        assert_same([*plain, 5], protocol, subclass, prepare)


@pytest.mark.parametrize("name", ["persistent_id", "dispatch_table", "memo", "bin", "fast"])
@pytest.mark.parametrize("subclassed", [False, True])
def test_attributes_behave_alike(name, subclassed):
    def states(base):
        pickler = (type("Sub", (base,), {}) if subclassed else base)(io.BytesIO())
        steps = [
            lambda: getattr(pickler, name) and None,
            lambda: setattr(pickler, name, None) or getattr(pickler, name),
            lambda: setattr(pickler, name, len) or getattr(pickler, name),
            lambda: setattr(pickler, name, {}) or type(getattr(pickler, name)).__name__,
            lambda: delattr(pickler, name),
            lambda: delattr(pickler, name),
        ]
        outcomes = [attempt(step) for step in steps]
        return [outcome[0] if isinstance(outcome, tuple) else outcome for outcome in outcomes]

    if name in ("bin", "fast"):
        expected = states(pickle.Pickler)[:3]
        assert states(native.Pickler)[:3] == expected
    else:
        assert states(native.Pickler) == states(pickle.Pickler)


def test_an_uninitialized_pickler_refuses():
    def subclass(base):
        return type("Lazy", (base,), {"__init__": lambda self, *args, **options: None})

    assert_same(1, 4, subclass)
    assert attempt(native.Pickler, object()) == attempt(pickle.Pickler, object())
    for protocol in (6, 1 << 70, "4", 2.5):
        with pytest.raises(Exception) as expected:
            pickle.Pickler(io.BytesIO(), protocol)
        with pytest.raises(expected.type):
            native.Pickler(io.BytesIO(), protocol)


def test_initialized_again():
    def dump(base):
        first, second = io.BytesIO(), io.BytesIO()
        pickler, obj = base(first, 2), ["x"]
        pickler.dump(obj)
        pickler.__init__(second, 4)
        pickler.dump(obj)
        return first.getvalue(), second.getvalue()

    assert dump(native.Pickler) == dump(pickle.Pickler)


# ---- reduce values


class Custom:
    """Reduces to whatever it is given."""

    def __init__(self, value):
        self.value = value

    def __reduce__(self):
        return self.value() if callable(self.value) else self.value


class Spoofed:
    __class__ = int

    def __reduce__(self):
        return copyreg.__newobj__, (Spoofed,)


NEW, NEW_EX = copyreg.__newobj__, copyreg.__newobj_ex__
REDUCE_VALUES = {
    "no tuple": 5, "none": None, "empty": (), "one": (list,), "seven": (list, (), None, None, None, None, None),
    "not callable": (1, ()), "no arguments": (list, None), "list for arguments": (list, []),
    "two": (list, ((1, 2),)), "state": (Plain, (1,), {"x": 1}), "false state": (Plain, (1,), {}),
    "list items": lambda: (list, (), None, iter([1, 2, 3])), "one list item": lambda: (list, (), None, iter([1])),
    "no list items": lambda: (list, (), None, iter([])), "1000 list items": lambda: (list, (), None, iter(range(1000))),
    "1001 list items": lambda: (list, (), None, iter(range(1001))),
    "2000 list items": lambda: (list, (), None, iter(range(2000))),
    "nested list items": lambda: (list, (), None, iter([[1], (2, 3), {"4": 5}])),
    "list for items": (list, (), None, [1]),
    "dict items": lambda: (dict, (), None, None, iter([(1, 2), ([3][0], [4])])),
    "one dict item": lambda: (dict, (), None, None, iter([(1, [2])])),
    "no dict items": lambda: (dict, (), None, None, iter([])),
    "1000 dict items": lambda: (dict, (), None, None, iter([(i, i) for i in range(1000)])),
    "1001 dict items": lambda: (dict, (), None, None, iter([(i, i) for i in range(1001)])),
    "bad first pair": lambda: (dict, (), None, None, iter([1])),
    "bad second pair": lambda: (dict, (), None, None, iter([(1, 2), (3,)])),
    "bad third pair": lambda: (dict, (), None, None, iter([(1, 2), (3, 4), [5, 6]])),
    "dict for items": (dict, (), None, None, {}),
    "everything": lambda: (corpus.Bag, (), {"s": 1}, iter([1, 2]), iter([("k", "v")]), corpus.set_state),
    "setter": (corpus.Bag, (), {"s": [1]}, None, None, corpus.set_state),
    "setter without state": (corpus.Bag, (), None, None, None, corpus.set_state),
    "bad setter": (corpus.Bag, (), 1, None, None, 5),
    "newobj": (NEW, (Plain,)), "newobj empty": (NEW, ()), "newobj no class": (NEW, (1,)),
    "newobj right": lambda: (NEW, (Custom, 1, [2])), "newobj_ex": (NEW_EX, (Custom, (1,), {"a": 2})),
    "newobj_ex short": (NEW_EX, (Custom, ())), "newobj_ex no class": (NEW_EX, (1, (), {})),
    "newobj_ex args": (NEW_EX, (Custom, [], {})), "newobj_ex kwargs": (NEW_EX, (Custom, (), [])),
    "global": "REDUCE_VALUES", "missing global": "NO_SUCH_NAME", "other global": "PROTOCOLS", "dotted": "Custom.value",
    "local": "f.<locals>.g",
}
REDUCED = {name: Custom(value) for name, value in REDUCE_VALUES.items()}


@protocols
@pytest.mark.parametrize("name", REDUCE_VALUES)
def test_reduce_value(name, protocol):
    obj = REDUCED[name]
    assert_same(obj, protocol)
    assert_same([obj, obj, {"again": obj}], protocol)


@protocols
def test_wrong_class_for_newobj(protocol):
    assert_same(Spoofed(), protocol)


@protocols
def test_iterators_that_fail(protocol):
    def failing_items():
        yield 1
        yield 2
        raise ZeroDivisionError("items")

    assert_same(Custom(lambda: (list, (), None, failing_items())), protocol)
    assert_same(Custom(lambda: (dict, (), None, None, failing_items())), protocol)


class Recursive:
    """An object that is among its own constructor arguments."""

    def __init__(self, new=False):
        self.new = new
        self.holder = [self]

    def __reduce__(self):
        return (NEW, (Recursive, self.holder)) if self.new else (Recursive, (self.holder,), {"x": 1}, iter([1]))


@protocols
def test_recursive_reduce_values(protocol):
    assert_same([Recursive(), Recursive(True)], protocol)


# ---- globals


class Outer:
    class Middle:
        class Inner:
            pass

        def method(self):
            pass


class Unnamed:
    __qualname__ = "nothing.like.this"


def pretender():
    pass


def local():
    def inner():
        pass

    class Inner:
        pass

    return inner, Inner


renamed = functools.wraps(pretender)(lambda: None)
moved = type("moved", (), {"__module__": "no_such_module_anywhere"})
none_module = type("none_module", (), {"__module__": None})
odd_module = type("odd_module", (), {"__module__": 5})
ünicode = type("ünicode", (), {})
odd_name = type("odd_name", (), {})
odd_name.__qualname__ = "a\nb"


@protocols
@pytest.mark.parametrize("obj", [
    Outer, Outer.Middle, Outer.Middle.Inner, Outer.Middle.method, Unnamed, renamed, moved, none_module, odd_module,
    ünicode, odd_name, *local(), len, "".join, str.join, int.__add__, [].append, dict.fromkeys, type(None), type(...),
    type(NotImplemented), io.BytesIO, collections.OrderedDict, dataclasses.dataclass, lambda: None,
], ids=repr)
def test_globals(obj, protocol):
    def normal(outcome):
        return outcome

    assert_same(obj, protocol)
    assert_same([obj, (obj, obj)], protocol)


def test_a_module_is_found_by_search(monkeypatch):
    """Objects without __module__ are looked for in all modules."""

    class Callable:
        __slots__ = ()
        __qualname__ = __name__ = "found_function"

        def __reduce__(self):
            return "found_function"

    obj = Callable()
    Callable.__module__ = None
    monkeypatch.setattr(sys.modules["corpus"], "found_function", obj, raising=False)
    for protocol in PROTOCOLS:
        assert b"corpus" in assert_same(obj, protocol)


# ---- plain instances


@dataclasses.dataclass
class Record:
    x: int
    y: str


def fresh_classes():
    """Classes around the border of what may be written without calling __reduce_ex__; each call makes new ones."""

    class Plain:
        pass

    class Slots:
        __slots__ = ("_Slots__b", "__weakref__", "a")

    class Both(Slots):
        pass

    class ReduceEx:
        def __reduce_ex__(self, protocol):
            return list, ((protocol,),)

    class Reduce:
        def __reduce__(self):
            return list, ((1,),)

    class GetState:
        def __getstate__(self):
            return {"state": 1}

    class NoState:
        def __getstate__(self):
            return None

    class NewArgs:
        def __new__(cls, *args):
            return super().__new__(cls)

        def __getnewargs__(self):
            return 1, [2]

    class NewArgsEx(NewArgs):
        def __getnewargs_ex__(self):
            return (1,), {"k": 2}

        def __new__(cls, *args, **kwargs):
            return object.__new__(cls)

    class GetAttr:
        def __getattr__(self, name):
            raise AttributeError(name)

    class GetAttribute:
        def __getattribute__(self, name):
            if name == "__reduce_ex__":
                return lambda protocol: (list, ((protocol,),))
            return super().__getattribute__(name)

    class ClassProperty:
        @property
        def __class__(self):
            return dict

    class DictProperty:
        @property
        def __dict__(self):
            return {"from": "property"}

    class MetaGetAttribute(type):
        def __getattribute__(cls, name):
            if name == "__reduce__":
                return lambda self: 5
            return super().__getattribute__(name)

    class WithMeta(metaclass=MetaGetAttribute):
        pass

    class MetaProperty(type):
        @property
        def __reduce__(cls):
            return object.__reduce__

    class WithMetaProperty(metaclass=MetaProperty):
        pass

    class List(list):
        pass

    class Dict(dict):
        pass

    class Set(set):
        pass

    class Tuple(tuple):
        pass

    class Int(int):
        pass

    class Str(str):
        pass

    class Bytes(bytes):
        pass

    class Error(Exception):
        pass

    class Property:
        @property
        def a(self):
            return 1 / 0

    class SlotNames:
        __slots__ = ("a", "b")
        __slotnames__ = ["b", "missing"]

    class BadSlotNames:
        __slots__ = ("a",)
        __slotnames__ = "a"

    return {name: cls for name, cls in locals().items() if not issubclass(cls, type)}


CLASS_NAMES = list(fresh_classes())


def publish(monkeypatch, cls):
    """Make a local class importable."""
    cls.__qualname__ = cls.__name__
    cls.__module__ = __name__
    monkeypatch.setattr(sys.modules[__name__], cls.__name__, cls, raising=False)


def fill(obj):
    for name in ("a", "b", "_Slots__b", "text"):
        try:
            object.__setattr__(obj, name, [name])
        except (AttributeError, TypeError):
            continue
    return obj


@protocols
@pytest.mark.parametrize("name", CLASS_NAMES)
def test_instances_of_every_form(name, protocol, monkeypatch):
    expected_class, got_class = fresh_classes()[name], fresh_classes()[name]
    outcomes = []
    for base, cls in ((pickle.Pickler, expected_class), (native.Pickler, got_class)):
        publish(monkeypatch, cls)
        empty, full = cls(), fill(cls())
        outcomes.append([attempt(write_with, base, obj, protocol)
                         for obj in (empty, full, [full, empty, full, cls], {"k": (full, [empty])})])
    assert repr(outcomes[1]).split(" at 0x")[0] == repr(outcomes[0]).split(" at 0x")[0]


CHANGES = {
    "reduce_ex": lambda cls: setattr(cls, "__reduce_ex__", lambda self, protocol: (list, ((protocol,),))),
    "reduce": lambda cls: setattr(cls, "__reduce__", lambda self: (list, ((1,),))),
    "getstate": lambda cls: setattr(cls, "__getstate__", lambda self: {"changed": 1}),
    "getnewargs": lambda cls: setattr(cls, "__getnewargs__", lambda self: (1,)),
    "getnewargs_ex": lambda cls: setattr(cls, "__getnewargs_ex__", lambda self: ((1,), {})),
    "getattribute": lambda cls: setattr(cls, "__getattribute__", lambda self, name: {}[name]),
    "slotnames": lambda cls: setattr(cls, "__slotnames__", ["x"]),
    "nothing": lambda cls: setattr(cls, "unrelated", 1),
}


@pytest.mark.parametrize("where", ["class", "base"])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("protocol", [2, 5])
def test_classes_changed_between_dumps(change, where, protocol, monkeypatch):
    outcomes = []
    for base in (pickle.Pickler, native.Pickler):
        parent = type("Parent", (), {})
        child = type("Child", (parent,), {})
        publish(monkeypatch, child)
        obj = child()
        obj.x = 1
        file = io.BytesIO()
        pickler = base(file, protocol)
        pickler.dump(obj)
        pickler.clear_memo()
        CHANGES[change](child if where == "class" else parent)
        after = attempt(pickler.dump, obj)
        outcomes.append((file.getvalue(), after))
    assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize("change", CHANGES)
def test_classes_changed_during_a_dump(change, monkeypatch):
    outcomes = []
    for base in (pickle.Pickler, native.Pickler):
        cls = type("Changing", (), {})
        publish(monkeypatch, cls)
        first, last = cls(), cls()
        first.x, last.x = 1, 2

        class Changer:
            def __reduce__(self, cls=cls):
                CHANGES[change](cls)
                return list, ()

        outcomes.append(attempt(write_with, base, [first, Changer(), last], 5))
    assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize("name", ["__reduce_ex__", "__reduce__", "__getstate__", "__class__", "__getnewargs__",
                                  "__slots__", "__dict__"])
@protocols
def test_instance_attributes_that_look_like_methods(name, protocol):
    obj = Plain(1)
    obj.__dict__[name] = lambda *args: (list, ((1,),))
    got, expected = attempt(native.dumps, obj, protocol), attempt(pickle.dumps, obj, protocol)
    assert got == expected


@protocols
def test_dispatch_table_changed_during_a_dump(protocol, monkeypatch):
    def reduce_changer(changer):
        copyreg.dispatch_table[Record] = lambda obj: (list, ((1,),))
        return list, ()

    monkeypatch.setitem(copyreg.dispatch_table, Custom, reduce_changer)
    outcomes = []
    for base in (pickle.Pickler, native.Pickler):
        try:
            outcomes.append(write_with(base, [Record(1, "a"), Custom(1), Record(2, "b")], protocol))
        finally:
            copyreg.dispatch_table.pop(Record, None)
    assert outcomes[0] == outcomes[1]


def test_a_dict_of_another_kind():
    class Dict(dict):
        pass

    obj = Plain(1)
    obj.__dict__ = collections.OrderedDict(a=1)
    for protocol in PROTOCOLS:
        assert_same(obj, protocol)


def test_state_shared_between_instances():
    """The dict of one instance is an attribute of another."""
    first, second = Plain(1), Plain(2)
    second.other = first.__dict__
    first.me = first.__dict__
    for protocol in PROTOCOLS:
        assert_same([first, second, first.__dict__], protocol)


class SelfReferringMeta(type):
    """Its classes are pickled by value, together with an instance of theirs."""


def test_a_class_that_leads_to_its_instance(monkeypatch):
    cls = SelfReferringMeta("Holder", (), {})
    publish(monkeypatch, cls)
    obj = cls()
    obj.x = 1

    def subclass(base):
        class ByValue(base):
            def reducer_override(self, given):
                if given is cls:
                    return corpus.make_bag, (1,), {"instance": obj}
                return NotImplemented

        return ByValue

    for protocol in PROTOCOLS:
        assert_same([obj, obj], protocol, subclass)


# ---- memo


def test_memo_proxy():
    outcomes = []
    shared = ["shared", (1, 2)]
    for base in (pickle.Pickler, native.Pickler):
        file = io.BytesIO()
        pickler = base(file, 4)
        pickler.dump(shared)
        copied = pickler.memo.copy()
        other_file = io.BytesIO()
        other = base(other_file, 4)
        other.memo = pickler.memo
        other.dump([shared, "new"])
        third_file = io.BytesIO()
        third = base(third_file, 2)
        third.memo = copied
        third.dump([shared[1], "new", shared])
        pickler.memo.clear()
        outcomes.append((file.getvalue(), other_file.getvalue(), third_file.getvalue(), copied, pickler.memo.copy(),
                         pickle.loads(pickle.dumps(other.memo))[id(shared)][0]))
    assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize("memo", [
    {}, {1: (0, "a")}, {1: (7, "a"), 2: (9, "b")}, {1: (0, "a"), 2: (0, "b")}, {1: (300, "a")}, {1: ("x", "a")},
    {1: [0, "a"]}, {1: (0,)}, [], None, 5,
])
@protocols
def test_memos_made_by_hand(memo, protocol):
    values = [value[1] for value in memo.values() if len(value) == 2] if isinstance(memo, dict) else []

    def prepare(pickler):
        pickler.memo = memo

    obj = [*values, "more", ["and"], *values]
    expected, got = (attempt(functools.partial(write_with, base, prepare=prepare), obj, protocol)
                     for base in (pickle.Pickler, native.Pickler))
    if isinstance(expected, bytes):
        assert got == expected
    else:
        assert got[0] is expected[0]


def test_memo_objects():
    obj = [["a", "b"], ("c", {"d": "e"}), Plain(1)]
    pickler = native.Pickler(io.BytesIO(), 5)
    pickler.dump(obj)
    objects = pickler._memo_objects()
    assert {id(value): (index, value) for index, value in enumerate(objects)} == pickler.memo.copy()
    assert objects[0] is obj
    reference = pickle.Pickler(io.BytesIO(), 5)
    reference.dump(obj)
    assert [index for index, value in sorted(reference.memo.copy().values(), key=lambda entry: entry[0])] == list(
        range(len(objects)))
    assert all(objects[index] is value for index, value in reference.memo.copy().values()
               if any(value is known for known in objects))


def test_many_objects_in_the_memo():
    """The hash table grows, and probes lines of slots that several arenas share."""
    words = [f"word {i}" for i in range(200_000)]
    tuples = [(i,) for i in range(100_000)]
    obj = [words, tuples, words[::-1], tuples[::7]]
    for protocol in (2, 5):
        assert native.dumps(obj, protocol) == pickle.dumps(obj, protocol)


# ---- the native reducer


def test_native_reduce():
    asked = []

    def reduce(pickler, obj):
        asked.append(obj)
        assert isinstance(pickler, native.Pickler)
        return (corpus.make_bag, (1,)) if obj is Outer else NotImplemented

    class Proxy:
        @property
        def __class__(self):
            return type(local)

        def __reduce__(self):
            return list, ()

    proxy = Proxy()
    data = native.dumps([Outer, pretender, Plain(1), 5, "x", len, proxy], 5, native_reduce=reduce)
    assert asked == [Outer, corpus.make_bag, pretender, Plain, proxy, list]
    assert isinstance(pickle.loads(data)[0], corpus.Bag)


def test_native_reduce_by_class_and_instance():
    class Base(native.Pickler):
        def _native_reduce(self, obj):
            return "A_NAME" if obj is Outer else NotImplemented

        def reducer_override(self, obj):
            raise AssertionError("the native reducer stands for it")

    class User(Base):
        def reducer_override(self, obj):
            return (list, ()) if obj is Outer else NotImplemented

    corpus_like = type(sys)("corpus_like")
    corpus_like.A_NAME = Outer
    with pytest.raises(pickle.PicklingError, match="A_NAME"):
        write_with(Base, Outer, 5)
    assert pickle.loads(write_with(User, Outer, 5)) == []

    def prepare(pickler):
        pickler._native_reduce = lambda pickler, obj: (list, ((3,),)) if obj is Outer else NotImplemented

    assert pickle.loads(write_with(native.Pickler, Outer, 5, prepare)) == [3]


# ---- depth


def unnest(obj, step):
    """The number of levels, counted without recursion."""
    depth = 0
    while obj:
        obj = step(obj)
        depth += 1
    return depth


@pytest.mark.parametrize("depth", [100_000, pytest.param(1_000_000, marks=pytest.mark.long)])
@pytest.mark.parametrize("wrap", [
    lambda x: [x], lambda x: (x,), lambda x: {"k": x}, lambda x: (x, 1, 2, 3), lambda x: [x, 1],
    lambda x: frozenset([x]),
], ids=["list", "tuple", "dict", "tuple4", "list2", "frozenset"])
def test_deep_builtins(wrap, depth):
    obj = ()
    for _ in range(depth):
        obj = wrap(obj)
    data = native.dumps(obj, 5)
    assert len(data) > depth
    assert data.count(b"\x94") >= depth
    if isinstance(obj, (list, tuple)):
        loaded = pickle.loads(data)
        assert unnest(loaded, lambda x: x[0]) == depth
        while loaded:
            loaded = loaded[0]
    while obj:  # taken apart by hand: deallocation is not what is tested
        obj = next(iter(obj.values())) if isinstance(obj, dict) else next(iter(obj))


class Link:
    def __init__(self, next=None):
        self.next = next


class ReducedLink(Link):
    def __reduce__(self):
        return ReducedLink, (self.next,)


@pytest.mark.parametrize("cls", [Link, ReducedLink])
def test_deep_instances(cls):
    obj = None
    for _ in range(100_000):
        obj = cls(obj)
    loaded = pickle.loads(native.dumps(obj, 5))
    assert unnest(loaded, lambda x: x.next) == 100_000
    for chain in (obj, loaded):
        while chain is not None:
            chain.next, chain = None, chain.next


def test_reducers_that_never_end():
    class Endless:
        def __reduce__(self):
            return list, (Endless(),)

    class Persistent(native.Pickler):
        def persistent_id(self, obj):
            return ["id", obj]

    with pytest.raises(RecursionError):
        native.dumps(Endless())
    with pytest.raises(RecursionError):
        write_with(Persistent, 1, 4)


@pytest.mark.parametrize("make", ["list", "dict", "tuple", "instance"])
def test_fast_mode_finds_cycles(make):
    cycle = {"list": [], "dict": {}, "tuple": ([],), "instance": Plain(0)}[make]
    if make == "list":
        cycle.append(cycle)
    elif make == "dict":
        cycle["x"] = cycle
    elif make == "tuple":
        cycle[0].append(cycle)
    else:
        cycle.me = (cycle,)

    def fast(pickler):
        pickler.fast = True

    for protocol in PROTOCOLS:
        with pytest.raises((ValueError, RecursionError), match=r"cyclic objects|recursion"):
            write_with(native.Pickler, cycle, protocol, fast)


# ---- errors


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exceptions have no notes before 3.11")
def test_the_path_is_noted():
    record = Record(1, "a")
    record.lock = [0, {"key": (1, (x for x in ()))}]
    with pytest.raises(TypeError) as caught:
        native.dumps({"records": [0, record]})
    (note,) = caught.value.__notes__
    assert note == "while pickling obj['records'][1].lock[1]['key'][1]"


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exceptions have no notes before 3.11")
def test_long_paths_are_cut():
    obj = x = []
    for _ in range(10_000):
        x.append([])
        x = x[0]
    x.append(x for x in ())
    with pytest.raises(TypeError) as caught:
        native.dumps(obj)
    (note,) = caught.value.__notes__
    assert " ... " in note
    assert len(note) < 500


def test_a_pickler_is_usable_after_an_error():
    def after_error(base):
        file = io.BytesIO()
        pickler = base(file, 4)
        shared = ["s"]
        with pytest.raises(TypeError):
            pickler.dump([shared, (x for x in ())])
        file.seek(0)
        file.truncate()
        pickler.clear_memo()
        pickler.dump([shared, shared])
        return file.getvalue()

    assert after_error(native.Pickler) == after_error(pickle.Pickler)


def test_weakly_referenced_picklers_die():
    """Neither hooks nor the memo keep a pickler alive."""

    class Hooked(native.Pickler):
        def persistent_id(self, obj):
            return None

        def reducer_override(self, obj):
            return NotImplemented

    pickler = Hooked(io.BytesIO())
    pickler.dump([Plain(1), Outer])
    reference = weakref.ref(pickler)
    gc.disable()
    try:
        del pickler
        assert reference() is None
    finally:
        gc.enable()
