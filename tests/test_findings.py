"""What cannot be pickled: all of it in one pass, by path, and without touching anything."""

import asyncio
import contextvars
import copy
import functools
import io
import pickle
import pickletools
import queue
import socket
import sqlite3
import threading
import weakref

import cloudpickle
import pytest

import fastcap
from fastcap import analyze
from fastcap._native.graph import Graph
from fastcap._native.scanner import Scanner
from fastcap.explain import UNPICKLABLE
from fastcap.findings import Failures
from fastcap.pickling import DumpBroken, trace

LOCK = threading.Lock()
REQUEST = contextvars.ContextVar("request")


class Refuses:
    """An object whose own method raises."""

    def __getstate__(self):
        raise PermissionError("may not leave this host")


class Holder:
    """A user's class with attributes."""

    def __init__(self, **attributes):
        self.__dict__.update(attributes)

    def use(self):
        return self


class Slotted:
    __slots__ = ("lock", "name")


def a_generator():
    yield 1


async def a_coroutine():
    return 1


def errors(report):
    """path -> message of what cannot be pickled."""
    return {row.path: row.message for row in report.findings if row.code == "FC101"}


def run_trace(obj, protocol=None):
    """(stream, failures) of an analysis."""
    stream, failures = io.BytesIO(), Failures()
    trace(obj, stream, protocol, on_unpicklable=failures.report, reducers={})
    return stream.getvalue(), failures


def coroutine():
    made = a_coroutine()
    made.close()
    return made


KINDS = {
    "lock": threading.Lock,
    "rlock": threading.RLock,
    "condition": threading.Condition,
    "event": threading.Event,
    "local": threading.local,
    "thread": lambda: threading.Thread(target=print),
    "socket": socket.socket,
    "binary file": lambda: open("/dev/null", "rb"),  # noqa: SIM115 - the file itself is what counts
    "written file": lambda: open("/dev/null", "w"),  # noqa: SIM115
    "generator": a_generator,
    "coroutine": coroutine,
    "queue": queue.Queue,
    "simple queue": queue.SimpleQueue,
    "connection": lambda: sqlite3.connect(":memory:"),
    "context variable": lambda: REQUEST,
    "context": contextvars.copy_context,
    "weak dict": weakref.WeakValueDictionary,
    "frame": lambda: __import__("sys")._getframe(),
    "event loop": asyncio.new_event_loop,
    "own error": Refuses,
}


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize("what", KINDS)
def test_kinds(what):
    thing = KINDS[what]()
    with pytest.raises(Exception):  # noqa: B017 - whatever it is: it cannot be pickled
        cloudpickle.dumps(thing)
    found = errors(analyze(Holder(job={"x": [1, thing]}), name="holder"))
    assert list(found) == ["holder.job['x'][1]"], found
    assert type(thing).__name__.lstrip("_") in found["holder.job['x'][1]"]
    if hasattr(thing, "close"):
        thing.close()


def in_closure(thing):
    def job():
        return thing

    return job


def in_default(thing):
    def job(x=thing):
        return x

    return job


def in_keyword_default(thing):
    def job(*, x=thing):
        return x

    return job


def in_class_attribute(thing):
    class Local:
        attribute = thing

    return Local


def in_slot(thing):
    made = Slotted()
    made.lock, made.name = thing, "n"
    return made


def uses_global():
    return LOCK


uses_global.__module__ = "__main__"  # by value, as in a script

PLACES = {
    "closure": (in_closure, "job<closure thing>"),
    "default": (in_default, "job<default x>"),
    "keyword default": (in_keyword_default, "job<default x>"),
    "class attribute": (in_class_attribute, "Local.attribute"),
    "slot": (in_slot, "obj.lock"),
    "global": (lambda _: uses_global, "uses_global<global LOCK>"),
    "partial": (lambda thing: functools.partial(print, thing, key=thing), "obj<arg 0>"),
    "partial keyword": (lambda thing: functools.partial(print, key=thing), "obj<keyword key>"),
    "bound method": (lambda thing: Holder(lock=thing).use, "obj<self>.lock"),
    "lambda in a dict": (lambda thing: {"f": lambda: thing}, "obj['f']<closure thing>"),
    "dict": (lambda thing: {"k": thing}, "obj['k']"),
    "list": (lambda thing: [1, thing, 2], "obj[1]"),
    "tuple": (lambda thing: (1, 2, 3, thing), "obj[3]"),
    "pair": (lambda thing: (1, thing), "obj[1]"),
    "set": (lambda thing: {thing}, "obj<member 0>"),
    "frozen set": (lambda thing: frozenset([thing]), "obj<member 0>"),
    "dict key": (lambda thing: {thing: 1}, "obj<key 0>"),
    "nested instances": (lambda thing: Holder(a=Holder(b=Holder(c=thing))), "obj.a.b.c"),
    "root": (lambda thing: thing, "obj"),
}


@pytest.mark.parametrize("protocol", [2, 4, 5])
@pytest.mark.parametrize("place", PLACES)
def test_places(place, protocol):
    make, path = PLACES[place]
    if place == "frozen set" and protocol < 4:
        pytest.skip("a call of frozenset with a list, in this protocol")
    if place in ("set",) and protocol < 4:
        pytest.skip("a call of set with a list, in this protocol")
    obj = make(LOCK)
    report = analyze(obj, protocol=protocol)
    assert list(errors(report)) == [path]
    assert report.find(path) is not None
    assert sum(row.self_size for row in report.nodes) + report.overhead == report.payload_size


def test_ten_blockers_in_one_pass():
    things = [KINDS[kind]() for kind in ("lock", "rlock", "local", "socket", "generator", "queue", "connection")]
    things += [Refuses(), weakref.WeakValueDictionary(), contextvars.copy_context()]
    names = [f"part{k}" for k in range(len(things))]
    obj = Holder(**dict(zip(names, things)), good=list(range(1000)))
    found = errors(analyze(obj, name="trainer"))
    assert set(found) == {f"trainer.{name}" for name in names}
    assert len(found) == 10
    things[3].close()
    things[6].close()


def test_who_captured_it_is_told():
    found = analyze(in_closure(LOCK)).findings[0]
    assert (found.code, found.severity, found.path) == ("FC101", "error", "job<closure thing>")
    line = in_closure.__code__.co_firstlineno + 1
    assert "_thread.lock cannot be pickled (TypeError: cannot pickle '_thread.lock' object)" in found.message
    assert "captured as closure `thing` by job at " in found.message
    assert f"test_findings.py:{line}" in found.message
    assert found.replacement == "inside job: thing = threading.Lock()"


def test_an_instance_of_the_standard_library_is_named_itself():
    """Not its lock, which is nobody's attribute."""
    found = errors(analyze(Holder(q=queue.Queue())))
    assert list(found) == ["obj.q"]
    assert "queue.Queue cannot be pickled: it holds _thread.lock" in found["obj.q"]


def test_a_container_of_the_users_is_looked_into():
    assert list(errors(analyze(Holder(locks=[{"a": LOCK}])))) == ["obj.locks[0]['a']"]


def test_the_same_object_twice_is_one_finding():
    report = analyze([LOCK, LOCK])
    assert list(errors(report)) == ["obj[0]"]
    assert report.find("obj[0]").shared_by == ("obj[1]",)


def test_dumps_raises_as_ever():
    with pytest.raises(TypeError, match=r"cannot pickle '_thread\.lock'"):
        fastcap.dumps([LOCK])
    analyze([LOCK])
    with pytest.raises(TypeError, match=r"cannot pickle '_thread\.lock'"):
        fastcap.dumps([LOCK])


def test_nothing_is_mutated():
    obj = Holder(a=[1, LOCK], b={"k": Refuses()})
    before = copy.copy(obj.__dict__)
    before_list, before_dict = list(obj.a), dict(obj.b)
    analyze(obj).findings  # noqa: B018
    assert obj.__dict__ == before
    assert (obj.a, obj.b) == (before_list, before_dict)


class Yields:
    """Items that come to an end with an exception."""

    def __init__(self, items, pairs=False):
        self.items, self.pairs = items, pairs

    def __reduce__(self):
        def give():
            yield from self.items
            raise ConnectionError("gone")

        return (dict, (), None, None, give()) if self.pairs else (list, (), None, give())


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("count", [0, 1, 2, 3, 999, 1000, 1001, 2500])
@pytest.mark.parametrize("pairs", [False, True])
def test_iterators_that_fail_midway(count, pairs, protocol):
    items = [(k, k) for k in range(count)] if pairs else list(range(count))
    stream, failures = run_trace(["before", Yields(items, pairs), "after"], protocol)
    assert [failure.error for failure in failures] == ["ConnectionError: gone"]
    assert [failure.type.rpartition(".")[2] for failure in failures] == ["Yields"]
    pickletools.dis(stream, io.StringIO())  # which checks the stack and the memo
    scanner = Scanner()
    scanner.write(stream)
    Graph(scanner.finish())
    loaded = loads_with_stand_ins(stream)
    assert (loaded[0], loaded[2]) == ("before", "after")
    assert len(loaded[1]) == count + 1


class StandIn:
    def __init__(self, number):
        self.number = number


def loads_with_stand_ins(stream):
    class Unpickler(pickle.Unpickler):
        def find_class(self, module, name):
            return StandIn if f"{module}.{name}" == UNPICKLABLE else super().find_class(module, name)

    return Unpickler(io.BytesIO(stream)).load()


@pytest.mark.parametrize("protocol", range(2, 6))
def test_all_but_the_stand_ins_is_as_it_was(protocol):
    shared = [1, 2]
    obj = {"a": shared, "lock": LOCK, "b": shared, "c": (LOCK, Refuses(), "text"), "big": b"x" * 200_000}
    stream, failures = run_trace(obj, protocol)
    loaded = loads_with_stand_ins(stream)
    assert list(loaded) == list(obj)
    assert loaded["a"] == shared
    assert loaded["a"] is loaded["b"]
    assert loaded["lock"] is loaded["c"][0]
    assert [each.number for each in loaded["c"][:2]] == [0, 1]
    assert (loaded["c"][2], loaded["big"]) == ("text", obj["big"])
    assert len(failures) == 2


@pytest.mark.parametrize("protocol", range(6))
def test_where_nothing_fails_the_stream_is_that_of_dumps(protocol):
    obj = [Holder(a=1), {"k": (1.5, "t", b"b" * 100_000)}, Holder, [Holder(b=2)] * 3, in_closure(3), print]
    stream, failures = run_trace(obj, protocol)
    assert (stream, failures) == (fastcap.dumps(obj, protocol), [])


class Grows:
    def __init__(self, target):
        self.target = target

    def __reduce__(self):
        self.target[len(self.target) + 100] = 0
        return int, ()


@pytest.mark.parametrize("count", [1, 3, 1500])
def test_a_dict_that_changes_meanwhile(count):
    changing = {}
    changing.update(dict.fromkeys(range(count), 1))
    changing["grow"] = Grows(changing)
    changing["last"] = 1
    report = analyze({"d": changing, "n": LOCK})
    found = errors(report)
    assert set(found) == {"obj['d']", "obj['n']"}
    assert "dict changes while it is pickled (RuntimeError: dictionary changed size" in found["obj['d']"]


def test_bad_reduce_values():
    class Bad:
        def __init__(self, value):
            self.value = value

        def __reduce__(self):
            return self.value

    values = [5, (), (print,), (1, ()), (print, 1), (print, (), None, 3), (print, (), None, None, 3), "no_such_name"]
    values += [(copy.copy, (), None, None, None, 4), (print, (), None, None, None, None, None)]
    found = errors(analyze([Bad(value) for value in values]))
    assert set(found) == {f"obj[{k}]" for k in range(len(values))}


def test_names_that_have_no_place_in_old_protocols():
    """What was begun of a name is taken back."""
    module = type(fastcap)("fastcap_tests_ünicode")
    module.thing = type("thing", (), {"__module__": module.__name__})
    import sys

    sys.modules[module.__name__] = module
    try:
        stream, failures = run_trace(["a", module.thing, "b"], 2)
    finally:
        del sys.modules[module.__name__]
    loaded = loads_with_stand_ins(stream)
    assert (loaded[0], loaded[2], loaded[1].number) == ("a", "b", 0)
    assert "identifier" in failures[0].error


def test_nesting_without_end_ends():
    class Endless:
        def __reduce__(self):
            return Endless, (Endless(),)

    report = analyze(Endless())
    assert [row.code for row in report.findings] == ["FC102"]
    assert "RecursionError" in report.findings[0].message
    assert report.payload_size < 100


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, MemoryError])
def test_what_is_no_failure_of_an_object_is_passed_on(error):
    class Raises:
        def __reduce__(self):
            raise error

    with pytest.raises(error):
        analyze([Raises()])
    assert analyze([1]).findings == ()


def test_a_file_that_fails_is_no_unpicklable_object():
    class Full:
        def write(self, data):
            raise OSError("disk full")

    failures = Failures()
    with pytest.raises(DumpBroken) as caught:
        trace([b"x" * 100_000, LOCK], Full(), on_unpicklable=failures.report, reducers={})
    assert isinstance(caught.value.__cause__, OSError)
    assert failures == []


def test_a_hook_that_fails_ends_the_dump():
    def hook(obj, error):
        raise ZeroDivisionError

    with pytest.raises(DumpBroken) as caught:
        trace([[LOCK]], io.BytesIO(), on_unpicklable=hook, reducers={})
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_an_exception_that_cannot_be_told():
    class Mute(Exception):
        def __str__(self):
            raise RuntimeError

    class Raises:
        def __reduce__(self):
            raise Mute

    assert "cannot be pickled (Mute)" in next(iter(errors(analyze(Raises())).values()))


def test_many_failures():
    report = analyze([threading.Lock() for _ in range(3000)])
    found = errors(report)
    assert len(found) == 50  # as many as a reader can bear
    assert sum("[2,950 more FC101]" in message for message in found.values()) == 1
    assert sum(row.self_size for row in report.nodes) + report.overhead == report.payload_size


@pytest.mark.parametrize("flavor", ["cloudpickle", "joblib.externals.cloudpickle"])
def test_flavors(flavor):
    pytest.importorskip(f"{flavor}.cloudpickle", reason=f"{flavor} is not installed")
    assert list(errors(analyze({"f": in_closure(LOCK)}, flavor=flavor))) == ["obj['f']<closure thing>"]


def test_a_patched_flavor(monkeypatch):
    class Patched(cloudpickle.Pickler):
        pass

    monkeypatch.setattr(cloudpickle.cloudpickle, "Pickler", Patched)
    assert list(errors(analyze({"a": LOCK, "f": in_closure(LOCK)}))) == ["obj['a']"]


def test_a_report_lets_go_of_the_objects():
    class Thing:
        pass

    thing = Thing()
    gone = weakref.ref(thing)
    report = analyze([thing])
    del thing
    assert gone() is not None
    report.findings  # noqa: B018
    assert gone() is None


def test_a_state_setter_belongs_to_its_function():
    """Also where the next thing in the stream is a memo reference, as after the first of two functions."""
    report = analyze((in_closure(LOCK), in_closure(1)))
    assert list(errors(report)) == ["obj[0]<closure thing>"]
    report = analyze([in_closure([1, 2, 3]), in_closure("x" * 1000)])
    assert report.find("obj[0]<closure thing>").type == "list"
    assert report.find("obj[1]<closure thing>").type == "str"


def test_findings_in_json():
    report = analyze(in_closure(LOCK))
    again = fastcap.analysis.Report.from_dict(report.to_dict())
    assert again.findings == report.findings
    assert report.to_dict()["findings"][0]["code"] == "FC101"


SPIED = (
    "__getattribute__", "__eq__", "__hash__", "__repr__", "__str__", "__len__", "__iter__", "__bool__", "__contains__",
    "__getitem__", "__array__", "__reduce_ex__",
)  # fmt: skip


def spy_on(base, asked, **members):
    """A class that tells which of its methods are called, by whomever."""

    def method(name):
        def spied(self, *args):
            asked.append(name)
            return getattr(base, name)(self, *args)

        return spied

    names = [name for name in SPIED if hasattr(base, name)]
    return type("Spy", (base,), {"__module__": "__main__", **{name: method(name) for name in names}, **members})


def objects_that_notice(asked):
    """(what it is, object) of objects that note whatever is asked of them or of their classes."""
    import sys
    import types

    import numpy as np

    class Meta(type):
        def __getattribute__(cls, name):
            asked.append(name)
            return super().__getattribute__(name)

        def __instancecheck__(cls, obj):
            asked.append("instancecheck")
            return False

    class Lazy(types.ModuleType):
        def __getattribute__(self, name):
            asked.append(name)
            return super().__getattribute__(name)

    sys.modules["fastcap_lazy"] = Lazy("fastcap_lazy")
    space = {"__name__": "__main__", "lazy": sys.modules["fastcap_lazy"]}
    exec(
        "def uses():\n    def inner(): return lazy.sub.x\n    return getattr(lazy, str(inner))\n"
        "def method(self): return self.rate\n"
        "def closure(self): return lambda: self.rate",
        space,
    )
    trainer = spy_on(object, asked, method=space["method"])()
    object.__setattr__(trainer, "data", np.zeros(300_000))
    object.__setattr__(trainer, "rate", 1)
    yield "instance", trainer
    yield "bound method", types.MethodType(space["method"], trainer)
    yield "closure", space["closure"](trainer)
    yield "list", spy_on(list, asked)([k / 7 for k in range(200_000)])
    yield "dict", spy_on(dict, asked)(a=1)
    yield "array", (np.arange(300_000) / 7).view(spy_on(np.ndarray, asked))
    yield "class", Meta("Noted", (), {"__module__": "__main__", "__slots__": ("a",), "run": space["method"]})
    yield "its instance", Meta("Noted", (), {"__module__": "__main__", "run": space["method"]})()
    yield "module", space["uses"]
    with_lock = spy_on(object, asked)()
    object.__setattr__(with_lock, "lock", LOCK)
    yield "with a lock", with_lock


def test_findings_ask_live_objects_for_nothing():
    """Beyond what pickling them does: no attribute is looked up, no comparison made, no method called."""
    asked = []
    seen = 0
    for what, obj in objects_that_notice(asked):
        report = analyze({"first": obj, "second": obj})
        asked.clear()
        report.findings  # noqa: B018
        assert asked == [], what
        seen += 1
    assert seen == 10


@pytest.mark.parametrize("name", ["__class__", "__repr__", "__eq__", "__hash__", "__getattr__", "__len__", "__bool__"])
def test_objects_whose_methods_raise(name):
    def method(self, *args):
        raise RuntimeError(name)

    members = {name: property(method) if name == "__class__" else method}
    raises = type("Raises", (), {"__reduce_ex__": lambda self, protocol: (list, ((LOCK,),)), **members})
    # cloudpickle asks each object whether it is a function, and so for its __class__
    first = "obj[0]" if name == "__class__" else "obj[0][0]"
    assert set(errors(analyze([raises(), Refuses()]))) == {first, "obj[1]"}
