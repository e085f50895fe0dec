"""What there is to pickle: a table of small payload kinds, each a function that makes a fresh object.

``KINDS`` holds every kind by name. A kind says which libraries it needs, from which protocol on it can be pickled,
which opcodes it exists to exercise, and whether two dumps of one object give the same bytes. ``FAILING`` holds objects
that cloudpickle refuses, with the type of its exception. ``payloads()`` turns the table into streams, written by
cloudpickle and by plain pickle, in-band and out-of-band; ``raw_streams()`` adds streams that no Python 3 pickler
writes for an ordinary object but that a reader has to accept.

Functions and classes that are to be pickled by value are local to a function, or are executed as a script would be
(``as_script``), which makes them members of ``__main__``. This module knows nothing of fastcap.
"""

import abc
import builtins
import collections
import contextvars
import copyreg
import dataclasses
import datetime
import decimal
import enum
import fractions
import functools
import importlib.util
import io
import itertools
import logging
import math
import operator
import os.path
import pathlib
import pickle
import random
import re
import struct
import sys
import tempfile
import textwrap
import threading
import types
import typing
import uuid
import weakref
import xml.etree.ElementTree
import zoneinfo
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import cloudpickle
import numpy as np

BIG = 200 * 1024  # bytes: more than the 64 KiB at which a frame is closed
PROTOCOLS = range(pickle.HIGHEST_PROTOCOL + 1)


@dataclasses.dataclass(frozen=True)
class Kind:
    """One kind of payload.

    ``protocol`` is the lowest that can hold it; ``opcodes`` are names from pickletools that its protocol-5 in-band
    stream contains; ``plain`` says that plain pickle can write it too; ``buffers`` that protocol 5 can move parts of
    it out of band; ``loads`` that the stream can be loaded.

    ``deterministic`` says that all dumps of one object are equal bytes. Where it ``settles``, that holds from the
    second dump on: ``copyreg`` leaves ``__slotnames__`` on a class when it first reduces an instance of it, and a class
    pickled by value takes it along. ``repeatable`` says that the dumps of two objects made one after the other are
    equal but for cloudpickle's tracker ids (see ``without_tracker_ids``).
    """

    name: str
    make: Callable[[], Any]
    needs: tuple[str, ...] = ()
    protocol: int = 0
    opcodes: tuple[str, ...] = ()
    plain: bool = False
    deterministic: bool = True
    settles: bool = False
    repeatable: bool = True
    buffers: bool = False
    loads: bool = True
    python: tuple[int, int] = (3, 10)

    @property
    def missing(self) -> str | None:
        """Why this kind can't be made here, or None."""
        if sys.version_info < self.python:
            return f"{self.name}: needs Python {self.python[0]}.{self.python[1]}"
        for library in self.needs:
            if importlib.util.find_spec(library) is None:
                return f"{self.name}: needs {library}, which is not installed"
        return None


KINDS: dict[str, Kind] = {}
FAILING: dict[str, tuple[Callable[[], Any], type[BaseException]]] = {}


def kind(name: str, **facts: Any) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """Enter the decorated function, which makes a fresh object, into KINDS."""

    def enter(make: Callable[[], Any]) -> Callable[[], Any]:
        if name in KINDS:
            raise ValueError(f"two kinds are called {name!r}")
        KINDS[name] = Kind(name, make, **facts)
        return make

    return enter


def failing(name: str, error: type[BaseException]) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """Enter a function whose result cloudpickle refuses with ``error`` into FAILING."""

    def enter(make: Callable[[], Any]) -> Callable[[], Any]:
        FAILING[name] = make, error
        return make

    return enter


def plain_kind(name: str, make: Callable[[], Any], *opcodes: str, **facts: Any) -> None:
    """Enter a kind that plain pickle can write as well."""
    kind(name, opcodes=opcodes, plain=True, **facts)(make)


def available(*tags: str) -> list[Kind]:
    """The kinds that can be made here; with tags, those that have every one (``plain``, ``buffers``, ...) set."""
    return [entry for entry in KINDS.values() if not entry.missing and all(getattr(entry, tag) for tag in tags)]


def as_script(source: str, **names: Any) -> dict[str, Any]:
    """The namespace that ``source`` leaves when it runs as a script: what it defines belongs to ``__main__``."""
    namespace = {"__name__": "__main__", "__builtins__": builtins, **names}
    exec(compile(textwrap.dedent(source), "script.py", "exec"), namespace)
    return namespace


# ---------------------------------------------------------------------------------------------------------------------
# Builtins

plain_kind("None", lambda: None, "NONE")
plain_kind("booleans", lambda: [True, False], "NEWTRUE", "NEWFALSE")
plain_kind(
    "integers around every width",
    lambda: [sign * (1 << bits) + step for bits in (0, 7, 8, 15, 16, 31, 32, 63, 64, 255) for sign in (1, -1)
             for step in (-1, 0, 1)],
    "BININT1", "BININT2", "BININT", "LONG1",
)
plain_kind("long of over 255 bytes", lambda: [1 << 2040, -(1 << 2047), 1 << 4000], "LONG4")
plain_kind("long of 40,000 bits", lambda: 3 ** 25_000, "LONG4",
           protocol=2)  # the text form has too many digits
plain_kind(
    "floats", lambda: [0.0, -0.0, 1.5, math.pi, 1e308, 5e-324, math.inf, -math.inf], "BINFLOAT"
)
plain_kind("float nan", lambda: float("nan"), "BINFLOAT")
plain_kind("complex", lambda: [1j, complex(-0.0, math.inf)], "REDUCE")
plain_kind("empty containers", lambda: [[], {}, (), set(), frozenset(), "", b"", bytearray()],
           "EMPTY_LIST", "EMPTY_DICT", "EMPTY_TUPLE", "EMPTY_SET", "FROZENSET", "BYTEARRAY8")
plain_kind("tuples of 1 to 5", lambda: [(1,), (1, 2), (1, 2, 3), (1, 2, 3, 4), (1, 2, 3, 4, 5)],
           "TUPLE1", "TUPLE2", "TUPLE3", "TUPLE", "MARK")
plain_kind("strings", lambda: ["", "a", "\x00", "ä", "漢字", "\U0001f600", "x" * 255, "y" * 256, "é" * 128,
                               "line\nbreak", "back\\slash", "\x1a\r", "quote'\""],
           "SHORT_BINUNICODE", "BINUNICODE")
plain_kind("surrogates", lambda: ["\ud800", "a\udcffb", "\udfff\ud800"], "SHORT_BINUNICODE")
plain_kind("bytes of every length class",
           lambda: [bytes(n) for n in (0, 1, 255, 256, 65535, 65536)] + [bytes(range(256))],
           "SHORT_BINBYTES", "BINBYTES")
plain_kind("bytearrays of every length class",
           lambda: [bytearray(n) for n in (0, 1, 255, 256, 65535, 65536)] + [bytearray(range(256))], "BYTEARRAY8")
plain_kind("bytes across a frame limit", lambda: ["before", b"\xfe" * BIG, "after"], "BINBYTES", "FRAME")
plain_kind("bytearray across a frame limit", lambda: ["before", bytearray(BIG), "after"], "BYTEARRAY8")
plain_kind("string across a frame limit", lambda: ["before", "s" * BIG, "after"], "BINUNICODE")
plain_kind("wide string across a frame limit", lambda: ["before", "\U0001f600" * (BIG // 4), "after"], "BINUNICODE")
plain_kind("small items over many frames", lambda: [f"item {i}" for i in range(12_000)], "FRAME", "MEMOIZE")
plain_kind("payloads around the frame limit",
           lambda: [bytes(n) for n in range(65_536 - 16, 65_536 + 2, 3)], "BINBYTES")
plain_kind("list of one", lambda: ["x"], "APPEND")
plain_kind("dict of one", lambda: {"x": 1}, "SETITEM")
plain_kind("lists around the batch limit", lambda: [list(range(n)) for n in (1, 2, 999, 1000, 1001, 2001)], "APPENDS")
plain_kind("dicts around the batch limit",
           lambda: [{i: -i for i in range(n)} for n in (1, 2, 999, 1000, 1001, 2001)], "SETITEMS")
plain_kind("sets around the batch limit", lambda: [set(range(n)) for n in (1, 2, 999, 1000, 1001, 2001)], "ADDITEMS")
plain_kind("frozenset of 1,500", lambda: frozenset(range(1500)), "FROZENSET")
plain_kind("more than 255 memo entries", lambda: (lambda words: words + words)([f"w{i}" for i in range(300)]),
           "BINGET", "LONG_BINGET")
plain_kind("dict with keys of every kind",
           lambda: {None: 0, True: 1, 2: 2, 3.5: 3, "four": 4, b"five": 5, (6, "x"): 6, frozenset({7}): 7, 8j: 8})
plain_kind("nested builtins", lambda: {"a": [1, {"b": (2.5, [None, {"c": {"d": [(), [], {}]}}])}],
                                       "e": {1, 2, 3}, "f": frozenset({"g", ("h", 1)}), "i": [[[[[["deep"]]]]]]})
plain_kind("JSON-like records", lambda: [{"id": i, "name": f"user {i}", "tags": ["a", "b"], "score": i / 7,
                                          "active": i % 2 == 0, "address": {"city": "Bern", "zip": None}}
                                         for i in range(120)], "BINGET")
plain_kind("lists 200 deep", lambda: functools.reduce(lambda inner, _: [inner], range(200), []))
plain_kind("tuples 200 deep", lambda: functools.reduce(lambda inner, _: (inner,), range(200), ()))
plain_kind("dicts 100 deep", lambda: functools.reduce(lambda inner, i: {"next": inner, "i": i}, range(100), {}))
plain_kind("singletons", lambda: [Ellipsis, NotImplemented, None])
plain_kind("builtin types", lambda: [int, str, list, dict, type, object, ValueError])
plain_kind("types of singletons", lambda: [type(None), type(Ellipsis), type(NotImplemented)], "REDUCE")
kind("types without a name in builtins", loads=False)(
    lambda: [types.FunctionType, types.CellType, type({}.keys()), type(iter([]))]
)
plain_kind("slices and ranges", lambda: [slice(None), slice(1, 2, 3), range(10), range(0, -5, -2)], "REDUCE")
plain_kind("iterators", lambda: [iter([1, 2]), iter((3,)), iter({"k": 1}), iter("str"), reversed([1, 2]),
                                 enumerate("ab"), zip([1], [2]), map(abs, [-1])])
plain_kind("memoized temporaries", lambda: [str(i) + "!" for i in range(50)] + [bytes([i]) * 3 for i in range(50)])


@kind("shared objects", plain=True, opcodes=("BINGET",))
def shared_objects():
    inner, text, number = ["shared"], "".join(["te", "xt"]), 1 << 70
    pair = (inner, text)
    return {"list": [inner, inner], "text": [text, text, "".join(["te", "xt"])], "long": [number, number],
            "pair": (pair, pair), "empty": [(), (), frozenset(), frozenset()], "bytes": [b"b" * 9] * 3}


@kind("recursive list", plain=True, opcodes=("BINGET",))
def recursive_list():
    items = [1]
    items.append(items)
    return items


@kind("recursive dict", plain=True, opcodes=("BINGET",))
def recursive_dict():
    table = {}
    table["self"] = table
    table["list"] = [table]
    return table


@kind("recursive tuple", plain=True, opcodes=("POP", "BINGET"))
def recursive_tuple():
    pair = ([],)
    pair[0].append(pair)
    return pair


@kind("recursive long tuple", plain=True, opcodes=("POP_MARK", "BINGET"))
def recursive_long_tuple():
    items = (1, [], 2, 3, "x")
    items[1].append(items)
    return items


@kind("recursive tuples in each other", plain=True, opcodes=("POP",))
def recursive_tuples_nested():
    box = []
    inner = (box, "inner")
    outer = (inner, inner, "outer")
    box += [outer, inner]
    return [outer, box, inner]


@kind("recursive tuple through a dict", plain=True, opcodes=("POP",))
def recursive_tuple_dict():
    table = {}
    pair = (table, 1, 2)
    table["pair"] = pair
    return pair


@kind("recursive set", plain=True, opcodes=("BINGET", "EMPTY_SET"))
def recursive_set():
    member = Plain()
    member.home = {member}
    return member.home


@kind("recursive frozenset", plain=True, opcodes=("POP_MARK", "BINGET"))
def recursive_frozenset():
    member = Plain()
    member.home = frozenset({member})
    return member.home


@kind("recursive instance", plain=True, opcodes=("BUILD", "BINGET"))
def recursive_instance():
    node = Plain()
    node.me, node.children = node, [node, Plain(parent=node)]
    return node


@kind("recursive instance through items", plain=True, protocol=2, opcodes=("APPENDS", "SETITEM", "BINGET"))
def recursive_subclasses():
    items, table = ListSubclass(), DictSubclass()
    items.extend([items, table])
    table["items"] = items
    return [items, table]


@kind("linked list of 50", plain=True, opcodes=("BUILD",))
def linked_list():
    head = None
    for i in range(50):
        head = Plain(value=i, next=head)
    return head


# ---------------------------------------------------------------------------------------------------------------------
# Instances of importable classes, and every form of a reduce value


class Plain:
    """An instance dict and nothing else."""

    def __init__(self, **attributes):
        self.__dict__.update(attributes)


class ListSubclass(list):
    pass


class DictSubclass(dict):
    pass


class SetSubclass(set):
    pass


class FrozensetSubclass(frozenset):
    pass


class TupleSubclass(tuple):
    pass


class IntSubclass(int):
    pass


class FloatSubclass(float):
    pass


class StrSubclass(str):
    pass


class BytesSubclass(bytes):
    pass


class BytearraySubclass(bytearray):
    pass


class Slotted:
    __slots__ = ("x", "y")


class SlottedChild(Slotted):
    __slots__ = ("z",)


class SlotsAndDict:
    __slots__ = ("__dict__", "x")


class SlottedChildWithDict(Slotted):
    pass


class PrivateSlot:
    __slots__ = ("__hidden", "__weakref__")

    def __init__(self, value):
        self.__hidden = value


class StateDict:
    def __getstate__(self):
        return {"from": "getstate", "n": 3}


class StateOther:
    state = "never set"

    def __init__(self, state):
        self.state = state

    def __getstate__(self):
        return self.state

    def __setstate__(self, state):
        self.state = state


class StatePair:
    """State of the two-tuple form: a dict and slots."""

    __slots__ = ("__dict__", "a", "b")

    def __getstate__(self):
        return {"d": 1}, {"a": 2, "b": [3]}


class NewArgs:
    def __new__(cls, *args):
        self = super().__new__(cls)
        self.args = args
        return self

    def __getnewargs__(self):
        return self.args


class NewArgsEx:
    def __new__(cls, *args, **kwargs):
        self = super().__new__(cls)
        self.args, self.kwargs = args, kwargs
        return self

    def __getnewargs_ex__(self):
        return self.args, self.kwargs


class KeywordOnly(int):
    def __new__(cls, *, value):
        return super().__new__(cls, value)

    def __getnewargs_ex__(self):
        return (), {"value": int(self)}


class Reduce:
    """Reduces to whatever it is given."""

    def __init__(self, value):
        self.value = value

    def __reduce__(self):
        return self.value


class Newobj:
    def __reduce__(self):
        return copyreg.__newobj__, (Newobj,), {"a": 1}


class NewobjEx:
    def __new__(cls, value=None):
        return super().__new__(cls)

    def __reduce__(self):
        return copyreg.__newobj_ex__, (NewobjEx, (), {"value": [1]})


class ReduceEx:
    def __reduce_ex__(self, protocol):
        return StrSubclass, (f"protocol {protocol}",), {"seen": protocol}


class Bag:
    """Takes state, list items and dict items."""

    def __init__(self, *args):
        self.args, self.items, self.table = args, [], {}

    def append(self, item):
        self.items.append(item)

    def extend(self, items):
        self.items.extend(items)

    def __setitem__(self, key, value):
        self.table[key] = value


def set_state(bag, state):
    bag.state = ("set by set_state", state)


def make_bag(*args):
    return Bag(*args)


class Registered:
    """Pickled by a reducer in copyreg's dispatch table."""

    def __init__(self, value):
        self.value = value


copyreg.pickle(Registered, lambda self: (Registered, (self.value,)))


class Extension1:
    pass


class Extension2:
    pass


class Extension4:
    pass


def extension_function():
    return "extension"


# Codes from the range that is left to private use, one for each width of the opcode.
copyreg.add_extension(__name__, "Extension1", 0xF3)
copyreg.add_extension(__name__, "extension_function", 0xF4)
copyreg.add_extension(__name__, "Extension2", 0xFFF3)
copyreg.add_extension(__name__, "Extension4", 0xFFFFF3)

A_SINGLETON = Reduce("A_SINGLETON")


class Outer:
    class Inner:
        class Innermost:
            pass

        def method(self):
            return "inner"


class Color(enum.Enum):
    RED = 1
    GREEN = "g"
    ALSO_RED = 1  # noqa: PIE796


class Permission(enum.Flag):
    READ = 1
    WRITE = 2
    EXECUTE = 4


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 10


class Point(NamedTuple):
    x: int
    y: float = 0.5


LegacyPoint = collections.namedtuple("LegacyPoint", "x y")


@dataclasses.dataclass
class Record:
    name: str
    values: list = dataclasses.field(default_factory=list)
    total: float = 0.0


@dataclasses.dataclass(frozen=True)
class FrozenRecord:
    key: int
    nested: Record | None = None


@dataclasses.dataclass(slots=True)
class SlottedRecord:
    a: int
    b: str = "b"


@dataclasses.dataclass(frozen=True, slots=True)
class FrozenSlottedRecord:
    a: int
    b: tuple = ()


class Temperature:
    def __init__(self, celsius):
        self._celsius = celsius

    @property
    def celsius(self):
        return self._celsius

    @classmethod
    def boiling(cls):
        return cls(100)

    @staticmethod
    def unit():
        return "C"

    def raised(self, by):
        return Temperature(self._celsius + by)

    @functools.cached_property
    def kelvin(self):
        return self._celsius + 273.15


def module_function(x, y=1):
    return x + y


plain_kind("instance", lambda: Plain(a=1, b=[2], c={"d": 3}), "NEWOBJ", "BUILD")
plain_kind("instance without state", lambda: Plain(), "NEWOBJ")
plain_kind("instances of one class", lambda: [Plain(index=i, text=f"t{i}") for i in range(40)], "BINGET", "BUILD")
plain_kind("instances with other attributes in other orders",
           lambda: [Plain(a=1, b=2), Plain(b=2, a=1), Plain(c=3), Plain(**{"not an identifier": 1})])
plain_kind("instance of object", lambda: object(), "NEWOBJ")


@kind("instance whose dict is shared", plain=True, opcodes=("BINGET",))
def shared_instance_dict():
    one, two = Plain(), Plain()
    two.__dict__ = one.__dict__
    one.x = [1]
    return [one, two, one.__dict__]


@kind("instance with non-string attributes", plain=True)
def odd_attributes():
    odd = Plain()
    odd.__dict__.update({1: "one", (2,): "two"})
    return odd


@kind("slots", plain=True, protocol=2, opcodes=("NEWOBJ", "TUPLE2", "BUILD"))
def slots():
    full, half, empty, child = Slotted(), Slotted(), Slotted(), SlottedChild()
    full.x, full.y, half.y, child.x, child.z = 1, [2], "y", "x", full
    return [full, half, empty, child]


@kind("slots and dict", plain=True, protocol=2, opcodes=("TUPLE2", "BUILD"))
def slots_and_dict():
    both, only_slot, inherited = SlotsAndDict(), SlotsAndDict(), SlottedChildWithDict()
    both.x, both.extra, only_slot.x, inherited.x, inherited.extra = 1, "extra", 2, 3, 4
    return [both, only_slot, inherited]


plain_kind("private slot", lambda: PrivateSlot([1]), "BUILD", protocol=2)
plain_kind("__getstate__ returning a dict", lambda: StateDict(), "BUILD")
plain_kind("__getstate__ returning other things",
           lambda: [StateOther(s) for s in (0, None, False, "text", [1], (1, 2), {"k": 1}, {}, (), "")], "BUILD")
plain_kind("__getstate__ returning a pair", lambda: StatePair(), "TUPLE2", "BUILD")
plain_kind("__getnewargs__", lambda: [NewArgs(), NewArgs(1), NewArgs(1, [2], "3")], "NEWOBJ")
plain_kind("__getnewargs_ex__", lambda: [NewArgsEx(1, k=[2]), KeywordOnly(value=5)], "NEWOBJ_EX")
plain_kind("__getnewargs_ex__ without keywords", lambda: NewArgsEx(1, 2), "NEWOBJ")
plain_kind("reduce to a pair", lambda: Reduce((make_bag, (1, "two"))), "REDUCE")
plain_kind("reduce to a triple", lambda: Reduce((make_bag, (), {"state": [1]})), "REDUCE", "BUILD")
plain_kind("reduce to a 4-tuple", lambda: Reduce((make_bag, (), None, iter(["a", "b", "c"]))), "APPENDS",
           deterministic=False)  # the iterator is spent by the first dump
plain_kind("reduce to a 5-tuple", lambda: Reduce((make_bag, (), None, None, iter([("k", 1), ("l", 2)]))), "SETITEMS",
           deterministic=False)
plain_kind("reduce with one list item and one pair",
           lambda: Reduce((make_bag, (), {"s": 1}, iter(["a"]), iter([("k", 1)]))), "APPEND", "SETITEM",
           deterministic=False)
plain_kind("reduce with more items than a batch",
           lambda: Reduce((make_bag, (), None, iter(range(1001)), ((i, i) for i in range(1001)))),
           "APPENDS", "SETITEMS", deterministic=False)
plain_kind("reduce with a state setter", lambda: Reduce((make_bag, (1,), {"state": 1}, None, None, set_state)),
           "REDUCE", "POP")
plain_kind("reduce to the name of a global", lambda: [A_SINGLETON, A_SINGLETON], "STACK_GLOBAL")
plain_kind("reduce through copyreg.__newobj__", lambda: Newobj(), "NEWOBJ", "BUILD")
plain_kind("reduce through copyreg.__newobj_ex__", lambda: NewobjEx(), "NEWOBJ_EX")
plain_kind("__reduce_ex__ that looks at the protocol", lambda: ReduceEx(), "REDUCE", "BUILD")
plain_kind("copyreg dispatch table", lambda: [Registered(1), Registered([2])], "REDUCE")
plain_kind("extension registry", lambda: [Extension1, Extension2, Extension4, Extension1(), extension_function],
           "EXT1", "EXT2", "EXT4")
plain_kind("nested class", lambda: [Outer.Inner, Outer.Inner.Innermost, Outer.Inner()], "STACK_GLOBAL")
plain_kind("list subclass", lambda: ListSubclass([1, 2]), "NEWOBJ", "APPENDS")
plain_kind("dict subclass", lambda: DictSubclass(a=1), "NEWOBJ", "SETITEM")
plain_kind("set subclasses", lambda: [SetSubclass({1}), FrozensetSubclass({2})], "REDUCE")
plain_kind("subclasses of atoms",
           lambda: [IntSubclass(5), FloatSubclass(2.5), StrSubclass("s"), BytesSubclass(b"b"),
                    BytearraySubclass(b"ba"), TupleSubclass((1, 2))])
plain_kind("enum members", lambda: [Color.RED, Color.GREEN, Color.ALSO_RED, Level.LOW, Level.HIGH], "REDUCE")
plain_kind("flags", lambda: [Permission.READ, Permission.READ | Permission.WRITE, Permission(0)], "REDUCE")
plain_kind("enum class by reference", lambda: [Color, Level, re.RegexFlag.I])
plain_kind("namedtuples", lambda: [Point(1), Point(2, [3]), LegacyPoint("x", "y")], "NEWOBJ")
plain_kind("dataclasses", lambda: [Record("r", [1, 2]), FrozenRecord(1, Record("n"))], "BUILD")
plain_kind("slotted dataclasses", lambda: [SlottedRecord(1), FrozenSlottedRecord(2, (3,))], "BUILD", protocol=2)
plain_kind("dates and times", lambda: [
    datetime.date(2024, 2, 29), datetime.time(23, 59, 59, 999_999), datetime.time(1, fold=1),
    datetime.datetime(2024, 1, 2, 3, 4, 5, 6), datetime.datetime(2024, 1, 2, tzinfo=datetime.timezone.utc),
    datetime.timedelta(days=-1, microseconds=1), datetime.timezone(datetime.timedelta(hours=2), "X")], "REDUCE")
plain_kind("time zones", lambda: zoneinfo.ZoneInfo("UTC"), needs=("tzdata",))
plain_kind("decimals and fractions",
           lambda: [decimal.Decimal("1.50"), decimal.Decimal("-Infinity"), decimal.Decimal("sNaN"),
                    fractions.Fraction(-1, 3)], "REDUCE")
plain_kind("UUIDs", lambda: [uuid.UUID(int=i) for i in (0, 1 << 127)], "NEWOBJ")
plain_kind("paths", lambda: [pathlib.Path("/a/b.txt"), pathlib.PurePosixPath("c"), pathlib.PureWindowsPath("d:/e")])
plain_kind("collections", lambda: [
    collections.Counter("abracadabra"), collections.OrderedDict(b=1, a=2), collections.defaultdict(list, k=[1]),
    collections.deque([1, 2, 3], maxlen=5), collections.deque("ab"), collections.ChainMap({"a": 1}, {"b": 2}),
    collections.UserDict(x=1), collections.UserList([1]), collections.UserString("u")])
plain_kind("exceptions", lambda: [ValueError("v", 1), KeyError("k"), OSError(2, "No such file", "name"),
                                  UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"), StopIteration([1])], "REDUCE")
plain_kind("compiled regular expressions", lambda: [re.compile(r"\d+(?P<x>a)", re.I), re.compile(b"b")])
plain_kind("random state", lambda: random.Random(5))
plain_kind("partials", lambda: [functools.partial(int, "10", base=2),
                                functools.partial(functools.partial(module_function, 1), y=2)], "BUILD")
plain_kind("builtin functions and methods", lambda: [len, math.sin, [1].append, "sep".join, dict.fromkeys, str.upper])
plain_kind("bound methods", lambda: [Temperature(1).raised, Temperature.boiling, Temperature.unit], "REDUCE")
plain_kind("unbound methods", lambda: [Outer.Inner.method, Temperature.raised, str.join])
plain_kind("functions by reference", lambda: [module_function, os.path.join, functools.reduce], "STACK_GLOBAL")
plain_kind("operators", lambda: [operator.itemgetter(1, 2), operator.attrgetter("a.b"), operator.methodcaller("m", 1)])
plain_kind("string and bytes streams", lambda: [io.StringIO("text"), io.BytesIO(b"bytes")], "BUILD", protocol=2)
plain_kind("simple namespace", lambda: types.SimpleNamespace(a=1, b=types.SimpleNamespace()), "BUILD")
plain_kind("element tree", lambda: xml.etree.ElementTree.fromstring("<a k='v'><b>text</b></a>"), "BUILD", protocol=2)
plain_kind("generic aliases", lambda: [list[int], dict[str, list[int]], tuple[int, ...]])
plain_kind("typing objects", lambda: [typing.List[int], typing.Optional[str],  # noqa: UP006, UP045
                                      typing.Union[int, str, None], typing.Any,  # noqa: UP007
                                      typing.Callable[[int], str], typing.Literal["a", 1]])


@kind("cached property already computed", plain=True, opcodes=("BUILD",))
def cached_property():
    warm = Temperature(20)
    warm.kelvin  # noqa: B018
    return [warm, Temperature(30)]


@kind("exception with notes, cause and attributes", plain=True, python=(3, 11), opcodes=("BUILD",))
def exception_with_notes():
    try:
        try:
            raise KeyError("inner")
        except KeyError as inner:
            raise ValueError("outer", [1]) from inner
    except ValueError as error:
        error.add_note("a note")
        error.extra = {"k": 1}
        return error.with_traceback(None)


@kind("exception group", plain=True, python=(3, 11))
def exception_group():
    return eval("ExceptionGroup('group', [ValueError(1), TypeError('two')])")


@kind("partial that holds itself", plain=True, opcodes=("BUILD", "BINGET"))
def recursive_partial():
    call = functools.partial(module_function)
    call.__setstate__((module_function, ([call],), {}, {"me": call}))
    return call


@kind("state that refers back", plain=True, opcodes=("BINGET",))
def state_cycle():
    box = StateOther(None)
    box.state = [box, (box,)]
    return box


@kind("reduce whose state refers back through a setter", plain=True, opcodes=("POP", "BINGET"))
def setter_cycle():
    state = {}
    bag = Reduce((make_bag, (), state, None, None, set_state))
    state["me"] = bag
    return bag


# ---------------------------------------------------------------------------------------------------------------------
# Functions by value

A_GLOBAL = {"global": [1, 2, 3]}
A_GLOBAL_ARRAY = np.arange(1000.0)

kind("lambda", opcodes=("REDUCE",))(lambda: lambda x: x + 1)
kind("nested lambdas")(lambda: lambda x: lambda y: lambda z: x + y + z)


@kind("function with defaults", opcodes=("REDUCE", "POP"))
def function_with_defaults():
    def scaled(x, by=[1, 2], *rest, key="k", table={"a": 1}, **more):
        return x, by, rest, key, table, more

    return scaled


@kind("function with annotations and a doc string")
def annotated_function():
    def annotated(x: int, y: "list[str] | None" = None) -> dict[str, int]:
        """Say what it does."""
        return {y[0]: x}

    return annotated


@kind("function with attributes")
def function_with_attributes():
    def tagged():
        return tagged

    tagged.calls, tagged.registry = 3, {"tagged": [1]}
    return tagged


@kind("closure", opcodes=("REDUCE", "POP"))
def closure():
    lr, table = 0.1, {"a": [1, 2]}

    def step(x):
        return x * lr + len(table)

    return step


@kind("closure over an array", buffers=True)
def closure_over_array():
    weights = np.arange(500.0)

    def predict(x):
        return weights @ x

    return predict


@kind("closure over a large array", opcodes=("BYTEARRAY8",), buffers=True)
def closure_over_large_array():
    weights = np.arange(BIG // 8, dtype=np.float64)

    def predict(x):
        return weights * x

    return predict


@kind("closure with an empty cell")
def empty_cell():
    def outer(define):
        if define:
            later = 1

        def inner():
            return later

        return inner

    return outer(False)


@kind("closures that share a cell")
def shared_cell():
    count = 0

    def increase():
        nonlocal count
        count += 1
        return count

    def current():
        return count

    return [increase, current]


@kind("recursive closure", opcodes=("BINGET",))
def recursive_closure():
    def factorial(n):
        return 1 if n < 2 else n * factorial(n - 1)

    return factorial


@kind("closures that hold each other", opcodes=("BINGET",))
def mutual_closures():
    def even(n):
        return n == 0 or odd(n - 1)

    def odd(n):
        return n != 0 and even(n - 1)

    return even, odd


@kind("closure that captures self", buffers=True)
def closure_over_self():
    class Trainer:
        def __init__(self):
            self.data, self.config = np.ones(300), {"lr": 0.1}

        def training_function(self):
            def train():
                return self.config["lr"] * self.data

            return train

    return Trainer().training_function()


@kind("closure that holds itself in a container")
def closure_in_container():
    registry = {}

    def registered():
        return registry

    registry["me"] = registered
    return registered


@kind("function that uses globals")
def function_with_globals():
    def lookup(i):
        return A_GLOBAL["global"][i], module_function(i), math.pi

    return lookup


@kind("function that uses a global array", buffers=True)
def function_with_global_array():
    return lambda i: A_GLOBAL_ARRAY[i]


@kind("functions of a script that share globals", opcodes=("BINGET",))
def script_functions():
    script = as_script("""
        TABLE = {"a": [1, 2, 3]}
        UNUSED = bytes(1000)

        def helper(i):
            return TABLE["a"][i]

        def train(config):
            return helper(config["i"]) + len(TABLE)

        def recursive(n):
            return n and recursive(n - 1)
    """)
    return [script["train"], script["helper"], script["recursive"]]


@kind("script function that uses a submodule")
def script_submodule():
    return as_script("""
        import xml.etree
        import os.path
        import concurrent.futures

        def parse(text):
            return xml.etree.ElementTree.fromstring(text), os.path.join("a", "b"), concurrent.futures.Future
    """)["parse"]


@kind("script function whose nested code uses globals")
def script_nested_code():
    return as_script("""
        import json
        SCALE = [2]

        def outer():
            def inner(x):
                return [json.dumps(SCALE[0] * i) for i in range(x)]
            return inner
    """)["outer"]


@kind("script function that stores and deletes globals")
def script_global_stores():
    return as_script("""
        state = {"n": 0}

        def bump():
            global state, missing
            state = {"n": state["n"] + 1}
            del missing
    """)["bump"]


@kind("decorated function")
def decorated_function():
    def logged(func):
        @functools.wraps(func)
        def wrapper(*args, **kwargs):
            return func(*args, **kwargs)

        return wrapper

    @logged
    @logged
    def work(x):
        """Work."""
        return x

    return work


@kind("cached function of a script")
def cached_function():
    def square(x):
        return x * x

    return functools.lru_cache(maxsize=None)(square).__wrapped__


@kind("generator and async functions")
def generator_and_async():
    def generate(n):
        sent = yield n
        yield from range(sent)

    async def fetch(x):
        async with x as y:
            return [z async for z in y]

    async def stream():
        yield await fetch(None)

    return [generate, fetch, stream]


@kind("function with every kind of constant")
def function_constants():
    def constants(x):
        return [1, 2.5, 3j, "s", b"b", None, True, ..., (1, (2, "t")), 1 << 70, x in {1, 2, 3}, lambda: (4, 5)]

    return constants


@kind("function with try, with and match statements")
def function_with_tables():
    def complicated(value, path):
        try:
            with open(path) as file:
                match value:
                    case {"k": [first, *_]}:
                        return first, file.read()
                    case str() | bytes():
                        return value
        except (OSError, ValueError) as error:
            raise RuntimeError(f"{value!r:>{10}}") from error
        finally:
            value = None

    return complicated


@kind("functions over one code object", opcodes=("BINGET",))
def functions_over_one_code():
    def make(i):
        return lambda x: x + i

    return [make(i) for i in range(30)]


@kind("functions with one globals dict of their own", opcodes=("BINGET",))
def functions_with_own_globals():
    own = {"__name__": "not_importable", "__builtins__": builtins, "K": [1]}
    exec("def f(): return K, g\ndef g(): return f, K", own)
    return [own["f"], own["g"]]


@kind("function without a module")
def function_without_module():
    own = {"__builtins__": builtins}
    exec("def f(): return 1", own)
    return own["f"]


@kind("partials of closures", buffers=True)
def partial_of_closure():
    base = [1, 2]

    def add(a, b, *, c):
        return base[a] + b + c

    return [functools.partial(add, 1, c=np.ones(3)), functools.partial(functools.partial(add, 0), b=base)]


@kind("code object")
def code_object():
    return compile("x = [i for i in range(3)]\ndef f(a, /, b, *, c): return a", "<made>", "exec")


@kind("cells")
def cells():
    cell = types.CellType([1])
    cell.cell_contents.append(cell)
    return [cell, types.CellType()]


@kind("bound methods of local classes")
def local_bound_methods():
    class Local:
        def __init__(self):
            self.rows = [1, 2]

        def method(self):
            return self.rows

        @classmethod
        def build(cls):
            return cls()

        @staticmethod
        def static():
            return 1

    return [Local().method, Local.build, Local.static, Local.method]


@kind("method bound to an array", plain=True, buffers=True)
def array_method():
    return np.arange(10).sum


@kind("function registered by value", plain=True, settles=True)
def registered_by_value():
    name = "corpus_registered_module"
    module = sys.modules[name] = types.ModuleType(name)
    source = "LIMIT = [10]\ndef f(x): return g(x) + LIMIT[0]\ndef g(x): return x\nclass C:\n    k = LIMIT"
    exec(source, module.__dict__)
    cloudpickle.register_pickle_by_value(module)
    return [module.f, module.C, module.C()]


# ---------------------------------------------------------------------------------------------------------------------
# Dynamic classes


@kind("dynamic class", opcodes=("REDUCE", "POP"))
def dynamic_class():
    class Local:
        """A doc string."""

        attribute = [1, 2]
        annotated: int = 3

        def __init__(self, x=1):
            self.x = x

        def method(self):
            return self.x + self.attribute[0]

    return Local


@kind("instance of a dynamic class")
def dynamic_instance():
    local = dynamic_class()
    return [local(), local([5]), local]


@kind("script dataclass instances", protocol=2, opcodes=("BINGET", "BUILD"))
def script_dataclasses():
    script = as_script("""
        import dataclasses

        @dataclasses.dataclass
        class Sample:
            x: int
            y: float = 0.5
            tags: list = dataclasses.field(default_factory=list)

        @dataclasses.dataclass(frozen=True, slots=True, kw_only=True, order=True)
        class Key:
            a: int
            b: str = "b"
    """)
    return [script["Sample"](i, i / 2) for i in range(5)] + [script["Key"](a=1)]


@kind("dynamic dataclass with class variables and init variables", protocol=2, settles=True)
def dynamic_dataclass():
    @dataclasses.dataclass
    class Local:
        size: dataclasses.InitVar[int]
        count: typing.ClassVar[int] = 0
        rows: list = dataclasses.field(default_factory=list, repr=False, metadata={"unit": "m"})
        _: dataclasses.KW_ONLY = None
        scale: float = 1.0

        def __post_init__(self, size):
            self.rows = [0] * size

    return [Local, Local(3)]


@kind("dynamic class hierarchy")
def dynamic_hierarchy():
    class Base:
        def __init__(self):
            self.who = "base"

        def hello(self):
            return ["Base"]

    class Left(Base):
        def hello(self):
            return ["Left", *super().hello()]

    class Right(Base):
        def hello(self):
            return ["Right", *super(Right, self).hello()]  # noqa: UP008

    class Bottom(Left, Right):
        def hello(self):
            return ["Bottom", *super().hello(), __class__.__name__]

    return [Bottom(), Base]


@kind("dynamic metaclass", settles=True)
def dynamic_metaclass():
    class Meta(type):
        def __new__(mcls, name, bases, namespace):
            namespace["made_by"] = "Meta"
            return super().__new__(mcls, name, bases, namespace)

        def method(cls):
            return cls.__name__

    class Local(metaclass=Meta):
        pass

    return [Local, Local()]


@kind("dynamic ABC", settles=True)
def dynamic_abc():
    class Shape(abc.ABC):
        @abc.abstractmethod
        def area(self):
            ...

        @property
        @abc.abstractmethod
        def name(self):
            ...

    class Square(Shape):
        def area(self):
            return 4

        @property
        def name(self):
            return "square"

    Shape.register(dict)
    return [Shape, Square, Square()]


@kind("dynamic generic class", settles=True, opcodes=("BINGET",))
def dynamic_generic():
    item = TypeVar("item")

    class Box(Generic[item]):
        def __init__(self, value):
            self.value = value

    class IntBox(Box[int]):
        pass

    return [Box, Box[str], IntBox(1), Box(2)]


@kind("dynamic protocol", settles=True)
def dynamic_protocol():
    @typing.runtime_checkable
    class Sized(Protocol):
        limit: int

        def size(self) -> int:
            ...

    class Impl(Sized):
        limit = 3

        def size(self) -> int:
            return 1

    return [Sized, Impl, Impl()]


@kind("dynamic enum")
def dynamic_enum():
    class Mode(enum.Enum):
        FAST = 1
        SLOW = "s"

        def describe(self):
            return self.name.lower()

    class Bits(enum.IntFlag):
        A = 1
        B = 2

    return [Mode, Mode.FAST, Mode.SLOW, Bits.A | Bits.B, {Mode.FAST: 1}]


@kind("dynamic enum with an alias", loads=False)
def dynamic_enum_alias():
    class Mode(enum.Enum):
        FAST = 1
        ALIAS = 1  # noqa: PIE796

    return [Mode.ALIAS, Mode]


@kind("dynamic slots", protocol=2, settles=True)
def dynamic_slots():
    class Base:
        __slots__ = ("a",)

        def __init__(self):
            self.a = 1

    class Child(Base):
        __slots__ = "b"

    child = Child()
    child.b = [3]
    return [child, Base()]


@kind("dynamic class with a private slot", protocol=2, loads=False)
def dynamic_private_slot():
    class Local:
        __slots__ = ("__hidden",)

        def __init__(self):
            self.__hidden = 2

    return Local()


@kind("dynamic named tuple")
def dynamic_named_tuple():
    class Local(NamedTuple):
        a: int
        b: list = [1]

        def total(self):
            return self.a

    legacy = collections.namedtuple("legacy", "x y", defaults=[5])
    return [Local(1), legacy(1), Local]


@kind("class attribute arrays", buffers=True)
def class_attribute_arrays():
    class Model:
        weights = np.ones((20, 30))
        bias: typing.ClassVar = np.zeros(4)

        def forward(self, x):
            return self.weights @ x + self.bias

    return Model


@kind("methods with closures", buffers=True)
def methods_with_closures():
    scale, data = 3, np.arange(100)

    class Scaled:
        def apply(self, x):
            return x * scale + data.sum()

        def chain(self):
            return Scaled().apply(1)

    return Scaled


@kind("descriptors")
def descriptors():
    class Descriptor:
        def __init__(self, name):
            self.name = name

        def __get__(self, instance, owner):
            return self.name

        def __set_name__(self, owner, name):
            self.set_name = name

    class Owner:
        field = Descriptor("field")

        def __init__(self):
            self._x = 1

        @property
        def x(self):
            """The x."""
            return self._x

        @x.setter
        def x(self, value):
            self._x = value

        partial = functools.partialmethod(dict.fromkeys, (1,))

    return [Owner, Owner().x, Descriptor("d")]


def class_with_cached_property():
    class Cached:
        @functools.cached_property
        def value(self):
            return [1]

    return Cached


if sys.version_info >= (3, 12):
    kind("class with a cached property")(class_with_cached_property)
else:  # until then the property holds a lock
    failing("class with a cached property", TypeError)(class_with_cached_property)


@kind("class with __init_subclass__ and a class keyword")
def init_subclass():
    class Base:
        def __init_subclass__(cls, key="default", **kwargs):
            super().__init_subclass__(**kwargs)
            cls.key = key

    class Child(Base, key="child"):
        pass

    return [Child]


@kind("class that subclasses builtins")
def builtin_subclasses():
    class Table(dict):
        def __missing__(self, key):
            return key

    class Items(list):
        pass

    class Error(ValueError):
        def __init__(self, message, code=1):
            super().__init__(message)
            self.code = code

    items = Items([1])
    items.attribute = "a"
    return [Table(a=1), items, Error("message", 2)]


@kind("class with reduce methods of its own")
def class_with_reduce():
    class Interned:
        def __init__(self, key):
            self.key = key

        def __reduce__(self):
            return type(self), (self.key,)

    class Stateful:
        def __getstate__(self):
            return ("state", 1)

        def __setstate__(self, state):
            self.state = state

    return [Interned("a"), Stateful()]


@kind("class held by its own attribute", settles=True, opcodes=("BINGET",))
def recursive_class():
    class Node:
        registry: typing.ClassVar[dict] = {}

        def __init__(self):
            self.kind = Node

    Node.registry["Node"] = Node
    Node.root = Node()
    return Node


@kind("nested dynamic class")
def nested_dynamic_class():
    class Level1:
        class Level2:
            class Level3:
                x = 1

        def make(self):
            return self.Level2.Level3()

    return Level1.Level2.Level3()


@kind("class made by type()")
def class_made_by_type():
    return type("Made", (Plain,), {"x": 1, "f": lambda self: self.x, "__module__": "__main__"})


@kind("class with static and class methods over closures")
def class_with_wrapped_methods():
    offset = 5

    class Local:
        @staticmethod
        def static(x):
            return x + offset

        @classmethod
        def create(cls):
            return cls, offset

    return Local


@kind("typed dict")
def typed_dict():
    return as_script("""
        import typing

        class Movie(typing.TypedDict, total=False):
            title: str
            year: int

        def f(m: Movie) -> "Movie":
            return Movie(title="t")
    """)["f"]


@kind("generic class with type parameters", python=(3, 12))
def type_parameters():
    return as_script("""
        class Box[T: (int, str)]:
            def get(self, x: T) -> T:
                return x

        def first[U](items: list[U]) -> U:
            return items[0]
    """)["first"]


@kind("type variables")
def type_variables():
    free = TypeVar("free")
    bound = TypeVar("bound", bound=dict[str, int], covariant=True)
    return [free, free, bound, TypeVar("choice", int, str)]


# ---------------------------------------------------------------------------------------------------------------------
# Modules, descriptors on their own, views, files, loggers

kind("modules", opcodes=("REDUCE",))(lambda: [math, os.path, collections.abc, np.linalg])
kind("loggers", plain=True)(lambda: [logging.getLogger("corpus.child"), logging.getLogger()])
kind("views of dicts")(lambda: [{"a": 1}.keys(), {"a": 2}.values(), {"a": 3}.items(),
                                collections.OrderedDict(b=1).keys(), collections.OrderedDict(b=2).values(),
                                collections.OrderedDict(b=3).items()])
kind("mapping proxy")(lambda: types.MappingProxyType({"a": [1]}))
kind("memoryview")(lambda: [memoryview(b"abc"), memoryview(bytearray(5))[1:3]])
kind("properties and methods on their own")(
    lambda: [property(lambda self: 1, None, None, "doc"), classmethod(lambda cls: cls), staticmethod(len)]
)
kind("slot and getset descriptors")(lambda: [type(Temperature).__dict__["__dict__"], types.FunctionType.__code__])


@kind("dynamic module")
def dynamic_module():
    module = types.ModuleType("corpus_dynamic", "its doc")
    exec("X = [1]\ndef f(): return X\nclass C:\n    def g(self): return f()", module.__dict__)
    return [module, module.f, module.C]


@kind("weak set", repeatable=False, opcodes=("REDUCE",))
def weak_set():
    members = [Plain(i=i) for i in range(3)]
    return members, weakref.WeakSet(members)


@kind("text file", repeatable=False, protocol=2)
def text_file():
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as made:
        made.write("line 1\nline 2\n")
        made.flush()
        file = open(made.name)  # noqa: SIM115
        file.readline()
        return file


# ---------------------------------------------------------------------------------------------------------------------
# numpy


class Subarray(np.ndarray):
    def __array_finalize__(self, source):
        self.unit = getattr(source, "unit", None)


def array_kind(name, make, **facts):
    kind(name, **{"plain": True, "buffers": True, **facts})(make)


array_kind("C array", lambda: np.arange(24, dtype=np.int32).reshape(2, 3, 4))
array_kind("Fortran array", lambda: np.asfortranarray(np.arange(24.0).reshape(4, 6)))
array_kind("strided array", lambda: np.arange(100.0)[::3], buffers=False)
array_kind("reversed and transposed arrays",
           lambda: [np.arange(10)[::-1], np.arange(24).reshape(2, 3, 4).transpose(1, 0, 2), np.ones((2, 3)).T])
array_kind("0-d array", lambda: np.array(5.5))
array_kind("empty arrays", lambda: [np.empty((0,)), np.empty((3, 0, 2)), np.zeros(0, dtype="U5")])
array_kind("read-only array", lambda: read_only(np.arange(50)))
array_kind("array that views bytes", lambda: np.frombuffer(b"\x01\x02\x03\x04" * 8, dtype=np.int32))
array_kind("structured array",
           lambda: np.array([(1, 2.5, "ab")] * 4, dtype=[("i", "i4"), ("f", "<f8"), ("s", "U3")]))
array_kind("record array", lambda: np.rec.array([(1, 2.0), (3, 4.0)], dtype=[("a", int), ("b", float)]), buffers=False)
array_kind("object array", lambda: np.array([None, "s", [1], {"k": np.ones(2)}], dtype=object))
array_kind("dates in arrays", lambda: np.array(["2024-01-01", "NaT"], dtype="datetime64[D]"), buffers=False)
array_kind("time deltas in arrays", lambda: np.arange(4, dtype="timedelta64[ms]"), buffers=False)
array_kind("text and bytes arrays", lambda: [np.array(["ab", "cde"]), np.array([b"x", b"yz"])])
array_kind("boolean, complex and half arrays",
           lambda: [np.array([True, False]), np.array([1j, 2]), np.arange(4, dtype=np.float16)])
array_kind("big-endian array", lambda: np.arange(5, dtype=">i4"))
array_kind("array across a frame limit", lambda: ["before", np.arange(BIG, dtype=np.uint8), "after"])
array_kind("one array twice", lambda: (lambda a: [a, a, {"a": a}])(np.arange(40.0)))
array_kind("views of one array", lambda: (lambda a: [a, a[10:20], a.reshape(5, 8)])(np.arange(40.0)))
array_kind("arrays in containers", lambda: {"w": [np.ones((3, 3)) * i for i in range(5)], "b": (np.zeros(2),)})
array_kind("masked array", lambda: np.ma.array([1, 2, 3], mask=[0, 1, 0]), buffers=False)
array_kind("matrix", lambda: np.asmatrix(np.eye(2)), buffers=False)
plain_kind("numpy scalars",
           lambda: [np.float64(1.5), np.int32(-4), np.bool_(True), np.str_("s"), np.bytes_(b"b"), np.float16(2),
                    np.complex128(1j), np.datetime64("2024-01-01"), np.timedelta64(5, "s"), np.uint64(1 << 63)])
plain_kind("dtypes", lambda: [np.dtype("f8"), np.dtype(">i4"), np.dtype([("a", "i4"), ("b", "U3", (2,))]),
                              np.dtype("datetime64[ns]"), np.dtype(("i4", (2, 3)))])
plain_kind("ufuncs and functions of numpy", lambda: [np.add, np.mean, np.float64, np.ndarray, np.random.normal])


def read_only(array):
    array.flags.writeable = False
    return array


@kind("array subclass", plain=True)
def array_subclass():
    made = np.arange(6.0).view(Subarray)
    made.unit = "m"
    return made


@kind("memory-mapped array", plain=True)
def memory_map():
    with tempfile.NamedTemporaryFile() as file:
        made = np.memmap(file.name, dtype=np.int16, mode="w+", shape=(4, 5))
        made[:] = 7
        return made


@kind("numpy random generators", plain=True)
def random_generators():
    return [np.random.default_rng(5), np.random.RandomState(5), np.random.PCG64(5)]


class Chunk:
    """Hands its bytes over as a buffer, out of band where that is wanted."""

    def __init__(self, data):
        self.data = data

    def __reduce_ex__(self, protocol):
        if protocol >= 5:
            return Chunk, (pickle.PickleBuffer(self.data),)
        return Chunk, (bytes(self.data),)


plain_kind("picklebuffer of bytes", lambda: [Chunk(b"read only"), Chunk(b"")], "SHORT_BINBYTES", buffers=True)
plain_kind("picklebuffer of a bytearray", lambda: [Chunk(bytearray(b"writable")), Chunk(bytearray())], "BYTEARRAY8",
           buffers=True)
plain_kind("picklebuffer of one object twice", lambda: (lambda data: [Chunk(data), Chunk(data), data])(b"shared" * 9),
           "BINGET", buffers=True)
plain_kind("picklebuffer of a memoryview", lambda: Chunk(memoryview(bytearray(300))[50:250]), buffers=True)
plain_kind("picklebuffer across a frame limit", lambda: ["before", Chunk(bytes(BIG)), "after"], "BINBYTES",
           buffers=True)
kind("bare picklebuffer", protocol=5, plain=True, buffers=True)(lambda: pickle.PickleBuffer(b"bare"))


# ---------------------------------------------------------------------------------------------------------------------
# Other libraries


def library_kind(name, *needs, **facts):
    return kind(name, **{"needs": needs, "plain": True, **facts})


@library_kind("pandas frame", "pandas", buffers=True)
def pandas_frame():
    import pandas as pd

    return pd.DataFrame({"i": range(50), "f": np.arange(50) / 3, "s": [f"s{i}" for i in range(50)],
                         "t": pd.date_range("2024", periods=50), "b": [True, False] * 25})


@library_kind("pandas series", "pandas", buffers=True)
def pandas_series():
    import pandas as pd

    return [pd.Series(np.arange(20.0), name="x"), pd.Series(["a", None], dtype=object),
            pd.Series([1, None], dtype="Int64")]


@library_kind("pandas categorical and multi-index", "pandas", buffers=True)
def pandas_categorical():
    import pandas as pd

    index = pd.MultiIndex.from_product([["a", "b"], [1, 2, 3]], names=["k", "n"])
    return pd.DataFrame({"c": pd.Categorical(list("xyxyxy")), "v": range(6)}, index=index)


@library_kind("pandas object columns", "pandas")
def pandas_objects():
    import pandas as pd

    return pd.DataFrame({"o": [{"k": 1}, [2], None], "a": [np.ones(2), np.ones(3), "x"]}, dtype=object)


@library_kind("pandas scalars", "pandas")
def pandas_scalars():
    import pandas as pd

    return [pd.Timestamp("2024-01-01", tz="UTC"), pd.Timedelta("1D"), pd.Period("2024-01"), pd.Interval(0, 1), pd.NaT,
            pd.NA, pd.Index(["a", "b"]), pd.RangeIndex(5)]


@library_kind("closure over a pandas frame", "pandas", plain=False, buffers=True)
def pandas_closure():
    import pandas as pd

    frame = pd.DataFrame({"x": np.arange(1000.0)})

    class Holder:
        table = frame

    return lambda: (frame.sum(), Holder)


@library_kind("torch tensors", "torch", repeatable=False)
def torch_tensors():
    import torch

    base = torch.arange(24.0).reshape(4, 6)
    grad = torch.ones(3, requires_grad=True)
    return [base, base[1:3], base.t(), torch.tensor(5), torch.arange(5, dtype=torch.bfloat16), grad,
            torch.nn.Parameter(torch.zeros(2)), torch.tensor([True])]


@library_kind("torch module and state dict", "torch", repeatable=False)
def torch_module():
    import torch

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU(), torch.nn.BatchNorm1d(3))
    return [model, model.state_dict(), torch.optim.SGD(model.parameters(), lr=0.1).state_dict()]


@library_kind("local torch module", "torch", plain=False, repeatable=False)
def local_torch_module():
    import torch

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(3, 2)

        def forward(self, x):
            return torch.relu(self.layer(x))

    return Net()


@library_kind("arrow table", "pyarrow", buffers=True)
def arrow_table():
    import pyarrow as pa

    return pa.table({"i": list(range(100)), "s": [f"s{i}" for i in range(100)], "n": [None, 1.5] * 50})


@library_kind("sparse matrices", "scipy", buffers=True)
def sparse_matrices():
    import scipy.sparse

    dense = np.eye(20)
    return [scipy.sparse.csr_matrix(dense), scipy.sparse.coo_array(dense), scipy.sparse.lil_matrix(dense)]


@library_kind("sklearn estimators", "sklearn", buffers=True)
def sklearn_estimators():
    from sklearn.ensemble import RandomForestRegressor
    from sklearn.linear_model import LinearRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    x, y = np.arange(40.0).reshape(20, 2), np.arange(20.0)
    return [make_pipeline(StandardScaler(), LinearRegression()).fit(x, y),
            RandomForestRegressor(n_estimators=2, random_state=0).fit(x, y)]


@library_kind("attrs instances", "attrs", plain=False, protocol=2)
def attrs_instances():
    import attrs

    @attrs.define
    class Slotted:
        a: int
        b: list = attrs.field(factory=list)

    @attrs.frozen(slots=False)
    class Frozen:
        c: dict

    return [Slotted(1), Frozen({"k": 2})]


@library_kind("pydantic models", "pydantic", plain=False, repeatable=False, protocol=2)
def pydantic_models():
    import pydantic

    class Config(pydantic.BaseModel):
        lr: float = 0.1
        layers: list[int] = [1, 2]

        @pydantic.field_validator("lr")
        @classmethod
        def positive(cls, value):
            return abs(value)

    return Config(lr=-1)


@library_kind("joblib delayed call", "joblib")
def joblib_delayed():
    import joblib

    return joblib.delayed(module_function)(1, y=2)


# ---------------------------------------------------------------------------------------------------------------------
# What cloudpickle refuses


@failing("lock", TypeError)
def lock():
    return {"outer": [threading.Lock()]}


@failing("generator", TypeError)
def generator():
    return [1], (i for i in range(3))


@failing("weak reference", TypeError)
def weak_reference():
    target = Plain()
    return target, weakref.ref(target)


@failing("context variable", TypeError)
def context_variable():
    return {"var": contextvars.ContextVar("corpus")}


@failing("closure over a lock", TypeError)
def closure_over_lock():
    guard = threading.Lock()
    return lambda: guard.acquire()


@failing("attribute that raises in __getstate__", ZeroDivisionError)
def raising_getstate():
    class Local:
        def __getstate__(self):
            return 1 / 0

    return [Local()]


@failing("attribute that raises in __reduce_ex__", LookupError)
def raising_reduce():
    class Local:
        def __reduce_ex__(self, protocol):
            raise LookupError("reduce")

    return {"k": Local()}


@failing("reduce value that is no tuple", pickle.PicklingError)
def reduce_to_number():
    return Reduce(5)


@failing("reduce value too short", pickle.PicklingError)
def reduce_too_short():
    return Reduce((make_bag,))


@failing("reduce value too long", pickle.PicklingError)
def reduce_too_long():
    return Reduce((make_bag, (), None, None, None, None, None))


@failing("reduce value whose callable can't be called", pickle.PicklingError)
def reduce_uncallable():
    return Reduce((5, ()))


@failing("reduce value whose arguments are no tuple", pickle.PicklingError)
def reduce_args_list():
    return Reduce((make_bag, [1]))


@failing("reduce to a name that does not exist", pickle.PicklingError)
def reduce_missing_global():
    return Reduce("NO_SUCH_GLOBAL")


@failing("reduce value whose list items are no iterator", pickle.PicklingError)
def reduce_items_no_iterator():
    return Reduce((make_bag, (), None, [1, 2]))


@failing("__newobj__ with a class that is not its own", pickle.PicklingError)
def newobj_wrong_class():
    return Reduce((copyreg.__newobj__, (ListSubclass,)))


@failing("binary file", TypeError)
def binary_file():
    return open(os.devnull, "rb", buffering=0)


@failing("text file for writing", pickle.PicklingError)
def text_file_for_writing():
    return open(os.devnull, "w")


@failing("buffer that is not contiguous", pickle.PicklingError)
def strided_buffer():
    return pickle.PickleBuffer(memoryview(bytes(10))[::2])


@failing("reduce that never ends", pickle.PicklingError)
def endless_reduce():
    class Endless:
        def __reduce__(self):
            return make_bag, (Endless(),)

    return Endless()


# ---------------------------------------------------------------------------------------------------------------------
# Streams


TRACKER_ID = re.compile(rb"(\x8c\x20|X\x20\0\0\0)([0-9a-f]{32})(?=[\x94qr])")


def without_tracker_ids(stream: bytes) -> bytes:
    """The stream with cloudpickle's random class tracker ids numbered by first appearance.

    Two objects that were made alike then have equal streams, where the identifiers are the only difference.
    """
    seen: dict[bytes, bytes] = {}

    def numbered(match: "re.Match[bytes]") -> bytes:
        return match[1] + seen.setdefault(match[2], b"%032x" % len(seen))

    return TRACKER_ID.sub(numbered, stream)


class Payload(NamedTuple):
    """A stream and its out-of-band buffers, with how it came about."""

    name: str  # "kind, writer"
    protocol: int
    stream: bytes
    buffers: list[pickle.PickleBuffer] | None


class IdentifyingPickler(pickle.Pickler):
    """Writes instances of Plain as persistent identifiers."""

    def persistent_id(self, obj):
        if not isinstance(obj, Plain):
            return None
        return "plain" if self.ascii_only else ("plain", sorted(vars(obj)))

    def __init__(self, file, protocol):
        super().__init__(file, protocol)
        self.ascii_only = protocol == 0


def payloads(
    protocols: Iterable[int] = PROTOCOLS, kinds: Iterable[Kind] | None = None, flavor: Any = cloudpickle
) -> Iterator[Payload]:
    """Every kind in every protocol that can hold it, in-band and (protocol 5) out-of-band.

    ``flavor`` is the cloudpickle module that writes protocols 2 to 5; plain pickle writes protocols 0 and 1, and a
    variant of 2 to 5, where it can. Kinds that can't be made here are left out.
    """
    chosen = list(available() if kinds is None else kinds)
    for entry, protocol in itertools.product(chosen, protocols):
        if protocol < entry.protocol:
            continue
        if entry.plain:
            yield Payload(f"{entry.name}, pickle", protocol, pickle.dumps(entry.make(), protocol), None)
        if protocol < 2:
            continue
        yield Payload(f"{entry.name}, cloudpickle", protocol, flavor.dumps(entry.make(), protocol), None)
        if protocol >= 5 and entry.buffers:
            buffers: list[pickle.PickleBuffer] = []
            stream = flavor.dumps(entry.make(), protocol, buffer_callback=buffers.append)
            yield Payload(f"{entry.name}, out of band", protocol, stream, buffers)


def raw_streams() -> Iterator[Payload]:
    """Well-formed streams that no Python 3 pickler writes for an ordinary object."""
    hand_written = {
        "python 2 strings": (1, b"(S'ab\\x00'\nU\x02cdT\x03\x00\x00\x00efgt."),
        "python 2 instance": (0, b"(i" + __name__.encode() + b"\nPlain\np0\n."),
        "python 2 instance with arguments": (0, b"(S'a'\nI5\ni" + __name__.encode() + b"\nBag\np0\n(dp1\nb."),
        "python 2 OBJ": (1, b"(c" + __name__.encode() + b"\nBag\nq\x00K\x01K\x02o."),
        "text longs and booleans": (0, b"(L123456789012345678901L\nL5\nI01\nI00\nI-7\nF1.5\nt."),
        "DUP": (2, b"\x80\x02]2\x94\x86.".replace(b"\x94", b"")),
        "POP of an item": (2, b"\x80\x02]K\x010."),
        "POP of a mark": (2, b"\x80\x02](K\x01K\x021."),
        "POP on a mark": (2, b"\x80\x02](0."),
        "8-byte lengths": (4, b"\x80\x04\x8e" + struct.pack("<Q", 3) + b"abc\x8d" + struct.pack("<Q", 2) + b"de\x86."),
        "long memo indices": (2, b"\x80\x02]r\x00\x01\x00\x00j\x00\x01\x00\x00\x86."),
        "memo overwritten": (2, b"\x80\x02]q\x00]q\x00h\x00\x87."),
        "memo index with gaps": (2, b"\x80\x02]q\xfa]q\x05h\xfah\x05\x86\x86\x86."),
        "nested frames of odd sizes": (4, b"\x80\x04\x95" + struct.pack("<Q", 2) + b"]\x94\x95" + struct.pack("<Q", 4)
                                       + b"K\x01a."),
        "two empty frames": (4, b"\x80\x04" + 2 * (b"\x95" + bytes(8)) + b"N."),
        "PROTO twice": (2, b"\x80\x02\x80\x02N."),
        "no PROTO": (0, b"]."),
        "empty APPENDS and SETITEMS": (2, b"\x80\x02](e}(u\x86."),
        "empty LIST, DICT and TUPLE": (0, b"((l(dt."),
    }
    for name, (protocol, stream) in hand_written.items():
        yield Payload(f"{name}, hand-written", protocol, stream, None)
    for protocol in PROTOCOLS:
        file = io.BytesIO()
        IdentifyingPickler(file, protocol).dump([Plain(a=1), {"k": Plain(b=2)}, Plain()])
        yield Payload("persistent identifiers, pickle", protocol, file.getvalue(), None)
    for protocol in PROTOCOLS:
        file = io.BytesIO()
        fast = pickle.Pickler(file, protocol)
        fast.fast = True
        fast.dump([["no"], {"memo": ("at", "all")}, b"bytes"])
        yield Payload("fast mode, pickle", protocol, file.getvalue(), None)
    for protocol in PROTOCOLS:
        file = io.BytesIO()
        writer = pickle.Pickler(file, protocol)
        shared = ["kept in the memo"]
        writer.dump(shared)
        writer.dump([shared, "second dump"])
        # The second stream alone would refer to the memo of the first one: only both together are well-formed.
        yield Payload("two dumps of one pickler, pickle", protocol, file.getvalue(), None)
