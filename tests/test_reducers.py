"""The native reducers against the ones they stand in for: same bytes, same errors, for every copy of cloudpickle."""

import abc
import asyncio
import collections
import concurrent.futures
import contextlib
import dataclasses
import enum
import functools
import gc
import importlib
import io
import json
import logging
import os.path
import pickle
import subprocess
import sys
import threading
import types
import typing
import weakref
import xml.etree.ElementTree

import pytest

from fastcap._native.reducers import SHAPES, Flavor, Reducer, shape_digest

COPIES = ("cloudpickle", "ray.cloudpickle", "joblib.externals.cloudpickle", "pyspark.cloudpickle")


@functools.cache
def flavor_of(name):
    try:
        module = importlib.import_module(f"{name}.cloudpickle")
    except ImportError as error:
        pytest.skip(f"no {name}: {error}")
    return Flavor(module, module.Pickler)


@pytest.fixture(params=COPIES)
def flavor(request):
    return flavor_of(request.param)


def native_dumps(flavor, obj, protocol=None):
    """What the flavor's own pickler writes when it asks the native code for functions, classes, code and cells."""

    class Hooked(flavor.pickler_class):
        dispatch_table = flavor.with_stand_ins(flavor.pickler_class.dispatch_table)

        def reducer_override(self, obj):
            return reducer.reduce(self, obj)

    reducer = Reducer(flavor, flavor.pickler_class)
    file = io.BytesIO()
    Hooked(file, protocol=protocol).dump(obj)
    return file.getvalue()


def outcome(function, *args):
    try:
        return function(*args)
    except Exception as error:
        return type(error), str(error)


def check(flavor, obj, protocols=(2, 3, 4, 5)):
    outcome(flavor.module.dumps, obj)  # the first dump of an instance gives its class a __slotnames__
    for protocol in protocols:
        expected = outcome(flavor.module.dumps, obj, protocol)
        assert outcome(native_dumps, flavor, obj, protocol) == expected
    return expected


# ---- objects -----------------------------------------------------------------------------------------------------

BIG = list(range(50))
OTHER = {"x": BIG}
T = typing.TypeVar("T")


def by_reference():
    return BIG


def dynamic(source, name, module="dynamic_test_module", **namespace):
    """The object called `name` that `source` defines in a module that cannot be imported."""
    namespace = {"__name__": module, **namespace}
    exec(source, namespace)
    return namespace[name]


def make_closure(a, b=2):
    def inner(x, *args, y=3, **kwargs):
        return a + b + x + y + len(BIG) + len(os.path.sep)

    return inner


def make_pair():
    shared = []

    def push(x):
        shared.append(x)

    def pull():
        return shared.pop()

    return push, pull


def make_recursive():
    def even(n):
        return n == 0 or odd(n - 1)

    def odd(n):
        return n != 0 and even(n - 1)

    return even


def make_empty_cell():
    if False:
        late = 1

    def inner():
        return late

    return inner


def make_nested():
    def outer():
        def middle():
            def inner():
                global WRITTEN
                WRITTEN = xml.etree.ElementTree.XML("<a/>")
                return BIG, OTHER

            return inner

        return [middle for _ in range(3) if json]

    return outer


def make_attributes():
    @functools.wraps(by_reference)
    def wrapped():
        return by_reference()

    wrapped.note = {"k": 1}
    wrapped.self_reference = wrapped
    return wrapped


def make_annotated():
    def annotated(a: int, b: "str" = "x", *, c: list[int] = [1]) -> T:
        """Some documentation."""
        yield a

    return annotated


def make_coroutines():
    async def coroutine():
        await asyncio.sleep(0)

    async def generator():
        yield await coroutine()

    return coroutine, generator


def make_plain_class():
    class Plain:
        """Doc."""

        attribute = BIG

        def method(self):
            return super().__repr__() + str(__class__)

        @classmethod
        def build(cls):
            return cls()

        @staticmethod
        def static():
            return BIG

        @property
        def prop(self):
            return 1

        @prop.setter
        def prop(self, value):
            pass

        class Inner:
            pass

    return Plain


def make_class_tree():
    class Meta(type):
        def __new__(mcls, name, bases, namespace, **kwargs):
            return super().__new__(mcls, name, bases, {**namespace, "made_by": "Meta"})

        def __init__(cls, name, bases, namespace, **kwargs):
            super().__init__(name, bases, namespace)

    class Base(metaclass=Meta):
        registry = []

        def __init_subclass__(cls, **kwargs):
            super().__init_subclass__()
            Base.registry.append(cls.__name__)

        def method(self):
            return 1

    class Mixin:
        method = Base.method

        def other(self):
            return self

    class Child(Base, Mixin, option=1):
        method = Base.method
        other = Mixin.other

    return Child


def make_slots():
    class One:
        __slots__ = "only"

    class Many:
        __slots__ = ("a", "b", "__weakref__")  # noqa: RUF023

        def get(self):
            return self.a

    class WithDict(Many):
        __slots__ = ("c", "__dict__")  # noqa: RUF023

    return One, Many, WithDict


def make_abc():
    class Abstract(abc.ABC):
        @abc.abstractmethod
        def run(self): ...

        @property
        @abc.abstractmethod
        def value(self): ...

    class Concrete(Abstract):
        def run(self):
            return 1

        value = 3

    Abstract.register(int)
    isinstance(1, Abstract)
    return Abstract, Concrete


def make_enums():
    class Colour(enum.Enum):
        RED = 1
        BLUE = "b"
        CRIMSON = 1  # noqa: PIE796

        def method(self):
            return self.value

    class Mask(enum.IntFlag):
        A = enum.auto()
        B = enum.auto()

    class Word(str, enum.Enum):
        X = "x"

    return Colour, Mask, Word, Colour.RED, Mask.A | Mask.B


def make_dataclasses():
    @dataclasses.dataclass
    class Point:
        x: int
        y: list = dataclasses.field(default_factory=list)
        kind: typing.ClassVar[str] = "p"

    @dataclasses.dataclass(frozen=True, slots=True)
    class Frozen:
        z: float = 0.0

    return Point, Frozen, Point(1)


def make_typing():
    class Box(typing.Generic[T]):
        def get(self) -> T: ...

    class Sub(Box[int]):
        pass

    class Row(typing.NamedTuple):
        a: int
        b: str = "b"

    class Speaks(typing.Protocol):
        def speak(self) -> str: ...

    class Movie(typing.TypedDict, total=False):
        title: str

    return Box, Sub, Box[int], Row, Row(1), Speaks, Movie, T, list[T]


def make_wrapped_dict_property():
    class Odd:
        @property
        def __dict__(self):
            return {}

    return Odd


def make_cached_property():
    class Cached:
        @functools.cached_property
        def value(self):
            return 1

        @functools.lru_cache  # noqa: B019
        def method(self):
            return 2

    return Cached


class PlainMeta(type):
    pass


OBJECTS = {
    "lambda": lambda: lambda: 0,
    "closure": lambda: make_closure([1]),
    "closures_of_one_code": lambda: [make_closure(i) for i in range(5)],
    "pair_sharing_a_cell": make_pair,
    "recursive": make_recursive,
    "empty_cell": make_empty_cell,
    "nested_code": make_nested,
    "attributes": make_attributes,
    "annotated": make_annotated,
    "coroutines": make_coroutines,
    "defaults": lambda: dynamic("def f(a=[1], *, b={2: 3}): return a, b", "f"),
    "one_letter_names": lambda: dynamic("def f(x): return x", "f"),
    "non_latin_name": lambda: dynamic("def й(): return я", "й", я=1),
    "cells": lambda: [types.CellType(), types.CellType(1), make_closure.__code__],
    "code": lambda: make_nested.__code__,
    "extended_arguments": lambda: dynamic("def f():\n" + "".join(f" g{i}; h.a{i}\n" for i in range(700)), "f", g5=1),
    "store_and_delete_global": lambda: dynamic("def f():\n global a, b\n a = 1\n del b", "f", a=1, b=2),
    "by_reference": lambda: [by_reference, PlainMeta, Flavor.reduce_class, collections.OrderedDict, json.dumps],
    "builtin_types": lambda: [type(None), type(...), type(NotImplemented), types.FunctionType, types.CodeType, int],
    "packages": lambda: dynamic(
        "def f(): return concurrent.futures.ThreadPoolExecutor, xml.etree.ElementTree, os.path",
        "f", concurrent=concurrent, xml=xml, os=os),
    "package_in_closure": lambda: (lambda pkg: lambda: pkg.etree.ElementTree)(xml),
    "module_method": lambda: [types.MethodType(make_closure(1), 5)],
    "dynamic_module": lambda: dynamic_module(),
    "plain_class": make_plain_class,
    "plain_instance": lambda: make_plain_class()(),
    "class_tree": make_class_tree,
    "slots": make_slots,
    "abc": make_abc,
    "enums": make_enums,
    "dataclasses": make_dataclasses,
    "typing": make_typing,
    "dict_property": make_wrapped_dict_property,
    "cached_property": make_cached_property,
    "namedtuple": lambda: dynamic("import collections; N = collections.namedtuple('N', 'a b')", "N"),
    "no_module": lambda: dynamic("class A: pass", "A", module=None),
    "logger": lambda: [logging.getLogger("a.b"), logging.getLogger()],
    "weakset": lambda: weakref.WeakSet(),
    "getset": lambda: [types.FunctionType.__code__, types.MappingProxyType({1: 2})],
    "file": lambda: sys.stdout,
    "lock_in_closure": lambda: (lambda lock: lambda: lock)(threading.Lock()),
    "generator_object": lambda: (x for x in ()),
    "weakref_in_global": lambda: dynamic("def f(): return ref", "f", ref=weakref.ref(make_plain_class)),
    "partial": lambda: functools.partial(make_closure(1), 2),
    "exception_class": lambda: dynamic("class E(ValueError):\n def __init__(self, a): self.a = a", "E"),
}


def dynamic_module():
    module = types.ModuleType("dynamic_thing")
    exec("import json\nx = [1]\ndef f(): return x, g\ndef g(): return json", module.__dict__)
    return [module, module.f]


@pytest.mark.parametrize("name", OBJECTS)
def test_same_bytes(flavor, name):
    check(flavor, OBJECTS[name]())


def test_every_function_of_the_installed_copies_is_recognised(flavor):
    if sys.version_info >= (3, 14):
        pytest.skip("the native reducers are not in use on this Python")
    for name, shapes in SHAPES.items():
        owner = flavor.module.Pickler if name.startswith("Pickler.") else flavor.module
        function = getattr(owner, name.rpartition(".")[2], pickle._getattribute)
        assert shape_digest(function) in shapes, name


GROUPS = {"reference", "function arguments", "function state", "class", "code", "cell"}


def test_native_code_is_in_use(flavor, monkeypatch):
    if sys.version_info >= (3, 14):
        pytest.skip("the native reducers are not in use on this Python")
    assert flavor.native == GROUPS
    assert flavor.hooks() is not None
    for name, lost in {
        "_whichmodule": {"reference"},
        "_make_empty_cell": {"function arguments"},
        "_walk_global_ops": {"function state"},
        "_enum_getstate": {"class"},
        "_code_reduce": set(),  # the dispatch table still has the module's own
    }.items():
        with monkeypatch.context() as patch:
            patch.setattr(flavor.module, name, lambda *args: None)
            assert flavor.native == GROUPS - lost
    assert flavor.native == GROUPS


def test_a_change_of_a_function_changes_its_shape():
    def original(a, b=1):
        """Documented."""
        return [a.name for _ in "text"] + [b]

    def same(a, b=1):
        """Documented otherwise."""

        return [a.name for _ in "text"] + [b]

    assert shape_digest(original) == shape_digest(same)
    for changed in (
        lambda a, b=2: [a.name for _ in "text"] + [b],
        lambda a, b=1: [a.other for _ in "text"] + [b],
        lambda a, b=1: [a.name for _ in "other"] + [b],
        lambda a, c=1: [a.name for _ in "text"] + [c],
        lambda a, *, b=1: [a.name for _ in "text"] + [b],
        lambda a, b=1, *c: [a.name for _ in "text"] + [b],
    ):
        assert shape_digest(changed) != shape_digest(original)


def test_a_loaded_function_pickles_to_the_same_bytes(flavor):
    for make in (make_closure, make_nested, make_plain_class, make_dataclasses):
        obj = make([1]) if make is make_closure else make()
        loaded = pickle.loads(flavor.module.dumps(obj))
        check(flavor, loaded)


# ---- names and modules -------------------------------------------------------------------------------------------


def renamed(**attributes):
    def function():
        return BIG

    for name, value in attributes.items():
        setattr(function, name, value)
    return function


class Text(str):
    __slots__ = ()


@pytest.mark.parametrize(
    "attributes",
    [
        {"__module__": None},
        {"__module__": None, "__qualname__": "by_reference"},
        {"__module__": "__main__"},
        {"__module__": "no.such.module"},
        {"__module__": 5},
        {"__module__": []},
        {"__module__": "json", "__qualname__": "dumps"},
        {"__module__": "json", "__qualname__": "dumps.nothing"},
        {"__module__": "json", "__qualname__": ""},
        {"__module__": "json", "__qualname__": "."},
        {"__module__": Text("json"), "__qualname__": Text("dumps")},
        {"__qualname__": Text("text"), "__name__": Text("text")},
        {"__qualname__": "a.<locals>.b"},
        {"__qualname__": "<locals>"},
        {"__name__": "", "__qualname__": ""},
        {"__name__": "é"},
        {"__doc__": 5},
        {"__doc__": None},
        {"__annotations__": {}},
    ],
)
def test_odd_names(flavor, attributes):
    check(flavor, renamed(**attributes))


def test_lying_class_attribute(flavor):
    class Proxy:
        def __init__(self, target):
            object.__setattr__(self, "target", target)

        @property
        def __class__(self):
            return type(self.target)

        def __getattr__(self, name):
            return getattr(self.target, name)

        def __reduce_ex__(self, protocol):
            raise NotImplementedError

    check(flavor, Proxy(make_closure(1)))
    check(flavor, Proxy(by_reference))


def test_a_function_without_module_is_found_by_search(flavor, monkeypatch):
    module = types.ModuleType("fastcap_search_target")
    function = renamed(__module__=None, __qualname__="holder.function")
    module.holder = types.SimpleNamespace(function=function)
    check(flavor, function)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    check(flavor, function)
    # With torch loaded, the search of the C pickler ends in an error of torch.classes: then both have to fail.
    assert outcome(native_dumps, flavor, function) == outcome(flavor.module.dumps, function)
    module.holder.function = None
    check(flavor, function)


def test_search_survives_odd_modules(flavor, monkeypatch):
    class Raising(types.ModuleType):
        def __getattribute__(self, name):
            if name == "needle":
                raise RuntimeError("no")
            return super().__getattribute__(name)

    class Importing(types.ModuleType):
        def __getattr__(self, name):
            sys.modules["fastcap_imported_while_searching"] = types.ModuleType("x")
            raise AttributeError(name)

    function = renamed(__module__=None, __qualname__="needle")
    lazy = types.ModuleType("fastcap_lazy")
    lazy.__getattr__ = lambda name: function if name == "needle" else None
    monkeypatch.setitem(sys.modules, "fastcap_raising", Raising("fastcap_raising"))
    monkeypatch.setitem(sys.modules, "fastcap_importing", Importing("fastcap_importing"))
    monkeypatch.setitem(sys.modules, "fastcap_bare", types.ModuleType.__new__(types.ModuleType))
    monkeypatch.setitem(sys.modules, "fastcap_not_a_module", object())
    monkeypatch.setitem(sys.modules, "fastcap_none", None)
    monkeypatch.delitem(sys.modules, "fastcap_imported_while_searching", raising=False)
    check(flavor, function)
    monkeypatch.setitem(sys.modules, "fastcap_lazy", lazy)
    check(flavor, function)
    sys.modules.pop("fastcap_imported_while_searching", None)


def test_by_value_modules(flavor, monkeypatch):
    package = types.ModuleType("fastcap_by_value")
    module = types.ModuleType("fastcap_by_value.sub")
    monkeypatch.setitem(sys.modules, package.__name__, package)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec("def f(): return 1\nclass C: pass\nimport typing\nT = typing.TypeVar('T')", module.__dict__)
    things = [module.f, module.C, module.T, module]
    for thing in things:
        assert b"fastcap_by_value" in check(flavor, thing)
    before = [flavor.module.dumps(thing) for thing in things]
    for registered in (package, module):
        flavor.module.register_pickle_by_value(registered)
        try:
            for thing, by_name in zip(things, before):
                assert check(flavor, thing) != by_name
        finally:
            flavor.module.unregister_pickle_by_value(registered)
    assert [native_dumps(flavor, thing) for thing in things] == before


# ---- submodules --------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def package(name, submodules, **attributes):
    top = types.ModuleType(name)
    top.__package__ = name
    for attribute, value in attributes.items():
        setattr(top, attribute, value)
    added = {name: top, **{f"{name}.{sub}": types.ModuleType(f"{name}.{sub}") for sub in submodules}}
    sys.modules.update(added)
    try:
        yield top
    finally:
        for key in added:
            sys.modules.pop(key, None)


def test_submodules_follow_sys_modules(flavor):
    with package("fastcap_pkg", ["a", "b", "a.deep", "c.deep"]) as top:
        function = dynamic("def f(): return p.a, p.b, p.deep, p.c.late", "f", p=top)
        check(flavor, function)
        first = native_dumps(flavor, function)
        sys.modules["fastcap_pkg.late"] = types.ModuleType("fastcap_pkg.late")
        try:
            check(flavor, function)
            assert native_dumps(flavor, function) != first
        finally:
            del sys.modules["fastcap_pkg.late"]
        assert native_dumps(flavor, function) == first
        # The order of sys.modules is the order of the pickle.
        moved = sys.modules.pop("fastcap_pkg.a")
        sys.modules["fastcap_pkg.a"] = moved
        assert native_dumps(flavor, function) != first
        check(flavor, function)
        # Another object under the same key.
        sys.modules["fastcap_pkg.b"] = types.ModuleType("other")
        check(flavor, function)


@pytest.mark.parametrize("value", ["", None, 0, "x"])
def test_packages_are_told_by_their_package_attribute(flavor, value):
    with package("fastcap_pkg", ["a"], __package__=value) as top:
        check(flavor, dynamic("def f(): return p.a", "f", p=top))


def test_odd_keys_of_sys_modules(flavor, monkeypatch):
    with package("fastcap_pkg", ["a"]) as top:
        function = dynamic("def f(): return p.a", "f", p=top)
        for key in (None, 5, Text("fastcap_pkg.b")):
            monkeypatch.setitem(sys.modules, key, top)
            check(flavor, function)
            monkeypatch.delitem(sys.modules, key)
        for name in (5, None, Text("fastcap_pkg")):
            top.__name__ = name
            check(flavor, function)
        del top.__name__
        check(flavor, function)


def test_another_sys_modules(flavor, monkeypatch):
    class Modules(dict):
        pass

    with package("fastcap_pkg", ["a", "b"]) as top:
        function = dynamic("def f(): return p.a, p.b", "f", p=top)
        check(flavor, function)
        for kind in (dict, Modules):
            copy = kind(sys.modules)
            del copy["fastcap_pkg.b"]
            with monkeypatch.context() as patch:
                patch.setattr(sys, "modules", copy)
                check(flavor, function)
        check(flavor, function)


def test_closures_after_an_import_in_between(flavor):
    with package("fastcap_pkg", []) as top:
        closures = [(lambda p, i: lambda: (p.m1, p.m5, i))(top, i) for i in range(10)]
        for index, closure in enumerate(closures):
            name = f"fastcap_pkg.m{index}"
            sys.modules[name] = types.ModuleType(name)
            check(flavor, closure)
        for index in range(10):
            del sys.modules[f"fastcap_pkg.m{index}"]


# ---- functions with odd insides ----------------------------------------------------------------------------------


class Namespace(dict):
    def __contains__(self, key):
        return key == "virtual" or super().__contains__(key)

    def __getitem__(self, key):
        return "made up" if key == "virtual" else super().__getitem__(key)


def test_globals_of_a_dict_subclass(flavor):
    code = dynamic("def f(): return virtual, real, __name__", "f").__code__
    check(flavor, types.FunctionType(code, Namespace(real=1, __name__="n"), "f"))


def test_functions_sharing_globals_share_them_in_one_pickler(flavor):
    namespace = {"__name__": "n", "__file__": "file", "__path__": ["p"]}
    exec("def f(): return g\ndef g(): return x\nx = [1]", namespace)
    check(flavor, [namespace["f"], namespace["g"]])


def test_globals_ref_of_the_pickler_is_used(flavor):
    function = make_closure(1)
    for globals_ref in ({}, {id(function.__globals__): {"__name__": "given"}}, {id(function.__globals__): {}}):
        expected = {key: dict(value) for key, value in globals_ref.items()}
        pickler = flavor.pickler_class(io.BytesIO())
        pickler.globals_ref = expected
        reduced = pickler._function_getnewargs(function)
        target = types.SimpleNamespace(globals_ref=globals_ref)
        native = Reducer(flavor, flavor.pickler_class).reduce(target, function)[1]
        assert native[:4] == reduced[:4]
        assert globals_ref == expected
        assert native[1] is globals_ref[id(function.__globals__)]


def test_malformed_code(flavor):
    """Code whose global instruction names no name: both say so in the same way."""
    code = dynamic("def f(): return g", "f").__code__
    check(flavor, types.FunctionType(code.replace(co_names=()), {}, "f"))


def test_unhashable_and_unequal_metaclass(flavor):
    class Unhashable(type):
        __hash__ = None

    class Raising(type):
        def __eq__(cls, other):
            raise RuntimeError("no comparison")

        def __hash__(cls):
            return 5

    class Named(type):
        def __getattribute__(cls, name):
            return {"__qualname__": 5, "__name__": "other"}.get(name) or super().__getattribute__(name)

    class NoNames(type):
        def __getattribute__(cls, name):
            if name in ("__qualname__", "__name__", "__module__", "__bases__"):
                raise AttributeError(name)
            return super().__getattribute__(name)

    for meta in (Unhashable, Raising, Named, NoNames):
        check(flavor, types.new_class("Class", (), {"metaclass": meta}))


def test_class_with_a_name_that_is_no_text(flavor):
    cls = make_plain_class()
    cls_with_odd_key = type("Odd", (), {5: 1, "a": 2})
    check(flavor, cls_with_odd_key)
    cls.__slots__ = ["not", "real"]
    check(flavor, cls)
    cls.__slots__ = "missing"
    check(flavor, cls)


def test_enum_without_its_members(flavor):
    class Broken(enum.Enum):
        A = 1

    del Broken._member_map_
    check(flavor, Broken)


# ---- user code that gets in the way ------------------------------------------------------------------------------


class Intruder:
    """Runs code whenever somebody asks for its class, as isinstance does."""

    def __init__(self, action):
        self.__dict__["action"] = action

    @property
    def __class__(self):
        self.__dict__["action"]()
        return Intruder

    def __reduce__(self):
        return (int, ())


def test_functions_that_change_while_they_are_reduced(flavor):
    def make():
        def action():
            namespace.pop("b", None)
            namespace["c"] = [1]
            function.__defaults__ = None
            function.__kwdefaults__ = None
            function.__dict__.clear()
            function.__code__ = (lambda: 5).__code__
            function.__qualname__ = "renamed"
            sys.modules.pop("fastcap_gone", None)
            sys.modules["fastcap_come"] = types.ModuleType("fastcap_come")
            gc.collect()

        sys.modules["fastcap_gone"] = types.ModuleType("fastcap_gone")
        namespace = {"__name__": "n", "b": [2], "c": [3], "x": xml}
        exec("def f(p=[1], *, q=[2]): return a, b, c, x, x.etree", namespace)
        function = namespace["f"]
        function.note = [1]
        namespace["a"] = Intruder(action)
        return function

    def forget():
        sys.modules.pop("fastcap_come", None)

    try:
        for reduce in (lambda f: reduce_with(flavor, f)[:3], lambda f: flavor.pickler_class(io.BytesIO())
                       .reducer_override(f)[:3]):
            forget()
            code, state = reduce(make())[1][0], reduce(make())[2]
            assert code.co_names == ("a", "b", "c", "x", "etree")
            assert list(state[1]["__globals__"]) == ["a", "b", "c", "x"]
    finally:
        forget()


def reduce_with(flavor, obj):
    _, reduce = flavor.hooks()
    return reduce(None, obj)


def test_classes_that_change_while_they_are_reduced(flavor):
    class Meta(type):
        def __getattribute__(cls, name):
            if name == "__bases__" and "extra" in type.__getattribute__(cls, "__dict__"):
                type.__delattr__(cls, "extra")
                gc.collect()
            return super().__getattribute__(name)

    def make():
        return Meta("Changing", (), {"extra": [1], "other": 2, "__module__": "nowhere"})

    expected = flavor.module._class_reduce(make())
    found = reduce_with(flavor, make())
    assert list(found[2][0]) == list(expected[2][0])


def test_modules_whose_package_attribute_runs_code(flavor, monkeypatch):
    class Package(types.ModuleType):
        @property
        def __package__(self):
            sys.modules[f"fastcap_pkg.n{len(sys.modules)}"] = self
            gc.collect()
            return "fastcap_pkg"

    try:
        function = dynamic("def f(): return p.a", "f", p=Package("fastcap_pkg"))
        monkeypatch.setitem(sys.modules, "fastcap_pkg.a", types.ModuleType("fastcap_pkg.a"))
        assert reduce_with(flavor, function)[2][1]["_cloudpickle_submodules"] == [sys.modules["fastcap_pkg.a"]]
    finally:
        for name in [name for name in sys.modules if name.startswith("fastcap_pkg.n")]:
            del sys.modules[name]


@pytest.mark.parametrize("raising", ["__class__", "__package__", "__name__"])
def test_errors_out_of_modules_reach_the_caller(flavor, raising):
    class Package(types.ModuleType):
        def __getattribute__(self, name):
            if name == raising:
                raise ZeroDivisionError(name)
            return super().__getattribute__(name)

    module = Package("fastcap_pkg")
    module.__dict__["__package__"] = "fastcap_pkg"
    check(flavor, dynamic("def f(): return p.a", "f", p=module))


# ---- patches win -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "patch"),
    [
        ("_should_pickle_by_reference", lambda own: lambda obj, name=None: own(obj, name) and obj is not by_reference),
        ("_whichmodule", lambda own: lambda obj, name: None),
        ("_function_getstate", lambda own: lambda func: ({"patched": 1}, own(func)[1])),
        ("_find_imported_submodules", lambda own: lambda code, dependencies: [json]),
        ("_extract_code_globals", lambda own: lambda code: {"BIG": None}),
        ("_class_getstate", lambda own: lambda cls: ({"patched": 1}, {})),
        ("_extract_class_dict", lambda own: lambda cls: {"patched": 1}),
        ("_code_reduce", lambda own: lambda code: (str, ("code",))),
        ("_make_empty_cell", lambda own: lambda: types.CellType("patched")),
        ("_get_or_create_tracker_id", lambda own: lambda cls: "patched"),
        ("_make_function", lambda own: json.dumps),
        ("_is_registered_pickle_by_value", lambda own: lambda module: module.__name__ == __name__),
    ],
)
def test_a_patched_module_function_is_called(flavor, monkeypatch, name, patch):
    objects = [by_reference, make_closure(1), make_plain_class(), make_enums()]
    plain = [native_dumps(flavor, obj) for obj in objects]
    monkeypatch.setattr(flavor.module, name, patch(getattr(flavor.module, name)))
    patched = [check(flavor, obj, (5,)) for obj in objects]
    if name != "_code_reduce":  # reached through the dispatch table, which holds the function itself
        assert patched != plain
    monkeypatch.undo()
    assert [native_dumps(flavor, obj) for obj in objects] == plain


def test_overridden_methods_are_called(flavor):
    class Marking(flavor.pickler_class):
        def _function_getnewargs(self, func):
            return (*super()._function_getnewargs(func)[:2], None, None, None)

    class Plain(flavor.pickler_class):
        pass

    class Overriding(flavor.pickler_class):
        def reducer_override(self, obj):
            return NotImplemented

    assert not flavor.keeps_function_methods(Marking)
    assert flavor.keeps_override(Marking)
    assert flavor.keeps_function_methods(Plain)
    assert flavor.keeps_override(Plain)
    assert not flavor.keeps_override(Overriding)
    pickler = Marking(io.BytesIO())
    assert Reducer(flavor, Marking).reduce(pickler, make_closure(1))[1][4] is None


# ---- threads and memory ------------------------------------------------------------------------------------------


def test_threads_while_modules_come_and_go(flavor):
    stop = threading.Event()
    failures = []
    with package("fastcap_pkg", ["a", "b"]) as top:
        function = dynamic("def f(): return p.a, p.b, p.churn", "f", p=top)
        shared = [function, make_plain_class(), *(make_closure(i) for i in range(20))]
        stable = [flavor.module.dumps(obj) for obj in shared[1:]]

        def churn():
            count = 0
            while not stop.is_set():
                count += 1
                sys.modules[f"fastcap_other{count % 7}"] = types.ModuleType("x")
                sys.modules.pop(f"fastcap_other{(count + 3) % 7}", None)

        def work():
            try:
                for _ in range(60):
                    native_dumps(flavor, function)
                    assert [native_dumps(flavor, obj) for obj in shared[1:]] == stable
            except BaseException as error:
                failures.append(error)

        churner = threading.Thread(target=churn)
        workers = [threading.Thread(target=work) for _ in range(8)]
        interval = sys.getswitchinterval()
        sys.setswitchinterval(1e-5)
        try:
            for thread in (churner, *workers):
                thread.start()
            for thread in workers:
                thread.join()
        finally:
            stop.set()
            churner.join()
            sys.setswitchinterval(interval)
            for count in range(7):
                sys.modules.pop(f"fastcap_other{count}", None)
    assert not failures


def test_no_leak(flavor):
    def round_trip():
        _, reduce = flavor.hooks()
        function = dynamic("def f(a=[1]):\n def g(): return x, a\n return g", "f", x=1)
        cls = dynamic("class C:\n a = 1\n def m(self): return super()", "C")
        for obj in (function, function(), cls, by_reference, make_closure(1)):
            reduce(None, obj)
        flavor.reduce_code(function.__code__)
        flavor.reduce_cell(types.CellType(1))
        flavor.reduce_cell(types.CellType())
        return weakref.ref(function.__code__), weakref.ref(cls)

    for _ in range(10):
        references = round_trip()
    gc.collect()
    assert [reference() for reference in references] == [None, None]
    before = sys.getallocatedblocks()
    for _ in range(300):
        round_trip()
    gc.collect()
    assert sys.getallocatedblocks() - before < 300


def test_functions_of_main(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import sys; sys.path[:0] = sys.argv[1:]\n"
        "import cloudpickle.cloudpickle as module\n"
        "from test_reducers import Flavor, native_dumps\n"
        "X = [1]\n"
        "def f(): return X, g\n"
        "def g(): return f\n"
        "class C:\n"
        "    def method(self): return g, C\n"
        "flavor = Flavor(module, module.Pickler)\n"
        "for obj in (f, C, C(), [f, g, C.method]):\n"
        "    assert native_dumps(flavor, obj) == module.dumps(obj)\n"
        "print('same')\n"
    )
    here = os.path.dirname(__file__)
    run = subprocess.run([sys.executable, script, here, os.path.dirname(here)], capture_output=True, text=True)
    assert run.stdout == "same\n", run.stderr
