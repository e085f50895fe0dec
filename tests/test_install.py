"""install, uninstall, installed, CloudPickler and NativeMixin."""

import collections
import copyreg
import functools
import gc
import importlib
import io
import json
import pickle
import subprocess
import sys
import threading
import types
import weakref

import cloudpickle
import pytest

from fastcap import pickling
from fastcap._native import pickler as native
from fastcap.pickling import FLAVORS, CloudPickler, NativeMixin, install, installed, uninstall


@pytest.fixture(params=FLAVORS)
def flavor(request):
    try:
        importlib.import_module(f"{request.param}.cloudpickle")
    except ImportError as error:
        pytest.skip(f"no {request.param}: {error}")
    return request.param


def modules_of(flavor):
    return [sys.modules[flavor], sys.modules[f"{flavor}.cloudpickle"]]


def snapshot(flavor):
    cls = sys.modules[f"{flavor}.cloudpickle"].Pickler
    return [dict(vars(module)) for module in modules_of(flavor)], dict(vars(cls))


@pytest.fixture(autouse=True)
def restored():
    """Every test leaves the copies of cloudpickle as it found them."""
    before = {name: snapshot(name) for name in FLAVORS if name in sys.modules}
    yield
    assert not pickling._installations
    for name, (namespaces, methods) in before.items():
        now_namespaces, now_methods = snapshot(name)
        assert now_methods == methods
        for now, then in zip(now_namespaces, namespaces):
            assert {key: now[key] for key in then} == then


@pytest.fixture
def native_dumps(monkeypatch):
    """Counts the dumps that reach the native encoder."""
    counts = collections.Counter()
    own_dumps, own_dump = native.dumps, native.Pickler.dump

    def counting_dumps(*args, **kwargs):
        counts["dumps"] += 1
        return own_dumps(*args, **kwargs)

    class CountingEncoder(pickling._Encoder):
        def dump(self, obj):
            counts["dump"] += 1
            return own_dump(self, obj)

    monkeypatch.setattr(pickling._native, "dumps", counting_dumps)
    monkeypatch.setattr(pickling, "_Encoder", CountingEncoder)
    return counts


def closure(value):
    def inner():
        return value, helper

    return inner


def helper():
    return json


def local_class():
    class Local:
        def method(self):
            return super().__repr__()

    return Local


class Point:
    def __init__(self, x):
        self.x = x


def to_bytes(pickler_class, obj, **kwargs):
    file = io.BytesIO()
    pickler_class(file, **kwargs).dump(obj)
    return file.getvalue()


# ---- dumps and dump ----------------------------------------------------------------------------------------------


def test_dumps_of_each_flavor(flavor):
    module = sys.modules[flavor]
    for obj in (closure([1]), local_class(), Point(1), [1, "a", None], json, helper):
        for protocol in (None, -1, 0, 1, 2, 3, 4, 5):
            expected = module.dumps(obj, protocol)
            assert pickling.dumps(obj, protocol, flavor=flavor) == expected
            file = io.BytesIO()
            pickling.dump(obj, file, protocol, flavor=flavor)
            assert file.getvalue() == expected
            assert to_bytes(functools.partial(CloudPickler, flavor=flavor), obj, protocol=protocol) == expected


def test_loads():
    assert pickling.loads(pickling.dumps(closure(5)))()[0] == 5
    file = io.BytesIO(pickling.dumps({1: 2}))
    assert pickling.load(file) == {1: 2}


def test_default_protocol_is_the_flavors(monkeypatch):
    monkeypatch.setattr(cloudpickle.cloudpickle, "DEFAULT_PROTOCOL", 3)
    assert pickling.dumps([1]) == pickle.dumps([1], 3) == to_bytes(CloudPickler, [1])


def test_out_of_band_buffers():
    buffers, expected = [], []
    obj = [pickle.PickleBuffer(b"x" * 10), closure(1)]
    data = pickling.dumps(obj, buffer_callback=buffers.append)
    assert data == cloudpickle.dumps(obj, buffer_callback=expected.append)
    assert [bytes(b) for b in buffers] == [bytes(b) for b in expected]


def test_compact_functions_load():
    for make in (lambda: closure([1]), local_class):
        obj = make()
        data = pickling.dumps(obj, compact=True)
        assert len(data) <= len(pickling.dumps(obj))
        loaded = pickling.loads(data)
        assert loaded is obj if isinstance(obj, type) else loaded()[0] == [1]


def test_unknown_and_missing_flavors(monkeypatch):
    for function in (
        lambda name: pickling.dumps(1, flavor=name),
        lambda name: pickling.dump(1, io.BytesIO(), flavor=name),
        lambda name: CloudPickler(io.BytesIO(), flavor=name),
        install,
        uninstall,
    ):
        with pytest.raises(ValueError, match=r"unknown flavor 'cloudpickel': expected one of 'cloudpickle'"):
            function("cloudpickel")
    monkeypatch.setattr(pickling, "FLAVORS", (*FLAVORS, "absent.cloudpickle", "ancient.cloudpickle"))
    with pytest.raises(ImportError, match=r"flavor 'absent.cloudpickle' is not available: No module") as caught:
        install("cloudpickle", "absent.cloudpickle")
    assert caught.value.name == "absent.cloudpickle.cloudpickle"
    ancient = types.ModuleType("ancient.cloudpickle.cloudpickle")
    ancient.__file__ = "ancient.py"
    ancient.Pickler = cloudpickle.Pickler
    monkeypatch.setitem(sys.modules, ancient.__name__, ancient)
    with pytest.raises(ImportError, match=r"ancient.py lacks .* 3\.0 or newer"):
        pickling.dumps(1, flavor="ancient.cloudpickle")
    with pytest.raises(TypeError, match="name at least one flavor"):
        install()


class Recursing:
    def __reduce__(self):
        return self.__reduce__()


class Failing:
    def __reduce__(self):
        raise KeyError("mine")


@pytest.mark.parametrize("obj", [Recursing(), Failing(), threading.Lock(), (x for x in ()), [Recursing()]])
def test_same_exceptions(obj):
    with pytest.raises(Exception) as expected:
        cloudpickle.dumps(obj)
    for function in (
        pickling.dumps,
        lambda obj: pickling.dump(obj, io.BytesIO()),
        lambda obj: CloudPickler(io.BytesIO()).dump(obj),
    ):
        with pytest.raises(type(expected.value)) as caught:
            function(obj)
        assert type(caught.value) is type(expected.value)
        assert str(caught.value) == str(expected.value)
    with installed("cloudpickle"):
        for function in (cloudpickle.dumps, lambda obj: cloudpickle.Pickler(io.BytesIO()).dump(obj)):
            with pytest.raises(type(expected.value)):
                function(obj)


# ---- CloudPickler as a base class --------------------------------------------------------------------------------


def test_class_attributes():
    assert pickling.Pickler is CloudPickler
    assert CloudPickler.dispatch is cloudpickle.CloudPickler.dispatch
    assert CloudPickler.dispatch_table is cloudpickle.CloudPickler.dispatch_table


class Registered:
    pass


def test_registered_reducers(flavor):
    module = sys.modules[flavor]
    module.CloudPickler.dispatch[Registered] = lambda obj: (str, ("registered",))
    try:
        data = module.dumps(Registered())
        assert pickle.loads(data) == "registered"
        assert pickling.dumps(Registered(), flavor=flavor) == data
        assert to_bytes(functools.partial(CloudPickler, flavor=flavor), Registered()) == data
        with installed(flavor):
            assert module.dumps(Registered()) == data
            assert to_bytes(module.CloudPickler, Registered()) == data
            del module.CloudPickler.dispatch[Registered]
            assert pickle.loads(module.dumps(Registered())) is not None
            module.CloudPickler.dispatch[Registered] = lambda obj: (str, ("later",))
            assert pickle.loads(module.dumps(Registered())) == "later"
    finally:
        module.CloudPickler.dispatch.pop(Registered, None)


def test_classes_with_a_reducer_are_left_as_they_are(flavor):
    """A dump must not leave anything in a class that the flavor's own dump would not leave there."""
    dispatch = sys.modules[flavor].CloudPickler.dispatch

    class Overriding(CloudPickler):
        def reducer_override(self, obj):
            return (int, ()) if type(obj).__name__ == "Local" else super().reducer_override(obj)

    cls = local_class()
    dispatch[cls] = lambda obj: (int, ())
    try:
        pickling.dumps(cls(), flavor=flavor)
    finally:
        del dispatch[cls]
    assert "__slotnames__" not in vars(cls)
    to_bytes(Overriding, cls())
    assert "__slotnames__" not in vars(cls)
    sys.modules[flavor].dumps(cls())
    assert "__slotnames__" in vars(cls)


def test_replaced_code_and_cell_reducers(flavor):
    module = sys.modules[flavor]
    table = module.CloudPickler._dispatch_table
    own = dict(table)
    try:
        for kind in (types.CodeType, types.CellType):
            table[kind] = lambda obj: (str, ("mine",))
            data = module.dumps(closure(1).__closure__[0])
            assert pickling.dumps(closure(1).__closure__[0], flavor=flavor) == data
            assert pickling.dumps(closure.__code__, flavor=flavor) == module.dumps(closure.__code__)
            table[kind] = own[kind]
        assert pickling.dumps(closure(1), flavor=flavor) == module.dumps(closure(1))
    finally:
        table.update(own)


def test_copyreg_counts():
    copyreg.pickle(Registered, lambda obj: (str, ("copyreg",)))
    try:
        assert pickling.dumps(Registered()) == cloudpickle.dumps(Registered())
    finally:
        del copyreg.dispatch_table[Registered]


def subclasses(base):
    class PersistentId(base):
        def persistent_id(self, obj):
            return "found" if obj == "needle" else None

    class Override(base):
        def reducer_override(self, obj):
            if isinstance(obj, Point):
                return (int, (obj.x,))
            return super().reducer_override(obj)

    class OverrideAll(base):
        def reducer_override(self, obj):
            return (len, (type(obj).__name__,)) if isinstance(obj, (types.FunctionType, type)) else NotImplemented

    class Table(base):
        dispatch_table = {**base.dispatch_table, Point: lambda obj: (float, (obj.x,))}

    class ChainedTable(base):
        dispatch_table = base.dispatch_table.new_child({Point: lambda obj: (float, (obj.x,))})

    class InstanceTable(base):
        def __init__(self, file, **kwargs):
            self.dispatch_table = {**base.dispatch_table, Point: lambda obj: (complex, (obj.x,))}
            super().__init__(file, **kwargs)

    class FunctionReduce(base):
        def _function_reduce(self, obj):
            return (len, (obj.__name__,))

    class GetNewArgs(base):
        def _function_getnewargs(self, func):
            code, base_globals, *rest = super()._function_getnewargs(func)
            return (code, {**base_globals, "__name__": "renamed"}, *rest)

    class DynamicReduce(base):
        def _dynamic_function_reduce(self, func):
            return (*super()._dynamic_function_reduce(func)[:2],)

    class OwnDump(base):
        def dump(self, obj):
            return super().dump(["wrapped", obj])

    class Plain(base):
        __slots__ = ("note",)

    return [
        PersistentId, Override, OverrideAll, Table, ChainedTable, InstanceTable, FunctionReduce, GetNewArgs,
        DynamicReduce, OwnDump, Plain,
    ]


def payload():
    return [Point(3), "needle", closure([1]), closure([2]), local_class_once, helper, {1: "needle"}]


local_class_once = local_class()


@pytest.mark.parametrize("index", range(11))
def test_subclasses_of_cloudpickler(flavor, index):
    own = subclasses(sys.modules[flavor].CloudPickler)[index]

    class Base(CloudPickler):
        dispatch_table = sys.modules[flavor].CloudPickler.dispatch_table

        def __init__(self, file, **kwargs):
            super().__init__(file, flavor=flavor, **kwargs)

    ours = subclasses(Base)[index]
    for protocol in (2, 4, 5):
        assert to_bytes(ours, payload(), protocol=protocol) == to_bytes(own, payload(), protocol=protocol)


def test_several_dumps_share_memo_and_globals(flavor):
    def several(cls):
        file = io.BytesIO()
        pickler = cls(file)
        shared = [1]
        for obj in (shared, closure(1), shared, helper, closure(shared)):
            pickler.dump(obj)
        pickler.clear_memo()
        pickler.dump(shared)
        return file.getvalue()

    expected = several(sys.modules[flavor].CloudPickler)
    assert several(functools.partial(CloudPickler, flavor=flavor)) == expected
    with installed(flavor):
        assert several(sys.modules[flavor].CloudPickler) == expected


# ---- install -----------------------------------------------------------------------------------------------------


def test_install_routes_functions_and_classes(flavor, native_dumps):
    module = sys.modules[flavor]
    inner = sys.modules[f"{flavor}.cloudpickle"]
    objects = [closure([1]), local_class(), Point(1), helper]
    expected = [module.dumps(obj) for obj in objects]
    own_dumps, own_class = module.dumps, module.CloudPickler
    assert install(flavor) == [flavor]
    try:
        assert native_dumps.total() == 0
        assert [module.dumps(obj) for obj in objects] == expected
        assert [inner.dumps(obj) for obj in objects] == expected
        assert native_dumps == {"dumps": 8}
        for dump in (module.dump, inner.dump):
            file = io.BytesIO()
            dump(objects[0], file)
            assert file.getvalue() == expected[0]
        assert [to_bytes(module.CloudPickler, obj) for obj in objects] == expected
        assert [to_bytes(inner.Pickler, obj) for obj in objects] == expected
        assert native_dumps["dump"] == 8
        # Names that were imported before are served as well, through the class.
        assert [own_dumps(obj) for obj in objects] == expected
        assert native_dumps["dump"] == 12
        assert module.CloudPickler is inner.Pickler is own_class
        assert module.dumps.__name__ == "dumps"
        assert pickle.loads(module.dumps(module.dumps)) is module.dumps
    finally:
        uninstall(flavor)
    native_dumps.clear()
    assert [module.dumps(obj) for obj in objects] == expected
    assert to_bytes(module.CloudPickler, objects[0]) == expected[0]
    assert native_dumps.total() == 0
    assert module.dumps is own_dumps


def test_ray_reexports():
    ray_cloudpickle = pytest.importorskip("ray.cloudpickle")
    with installed("ray.cloudpickle"):
        assert ray_cloudpickle.dumps_debug(closure(1)) == ray_cloudpickle.dumps(closure(1))
        with pytest.raises(TypeError, match="failed"):
            ray_cloudpickle.dumps_debug(threading.Lock())
        assert ray_cloudpickle.dumps is ray_cloudpickle.cloudpickle.dumps
        assert ray_cloudpickle.cloudpickle_fast.dumps is ray_cloudpickle.dumps


@pytest.mark.parametrize("index", range(11))
def test_subclasses_made_before_and_after(flavor, index, native_dumps):
    base = sys.modules[flavor].CloudPickler
    before = subclasses(base)[index]
    expected = {protocol: to_bytes(before, payload(), protocol=protocol) for protocol in (2, 4, 5)}
    with installed(flavor):
        after = subclasses(base)[index]
        for protocol, data in expected.items():
            assert to_bytes(before, payload(), protocol=protocol) == data
            assert to_bytes(after, payload(), protocol=protocol) == data
        assert native_dumps["dump"] == 6
        pickler = before(io.BytesIO())
        assert isinstance(pickler, base)
        assert isinstance(pickler, pickle.Pickler)
        assert issubclass(after, base)
    for cls in (before, after):
        assert to_bytes(cls, payload(), protocol=5) == expected[5]


@pytest.mark.parametrize("index", range(11))
def test_mixin(flavor, index, native_dumps):
    base = sys.modules[flavor].CloudPickler

    class Mixed(NativeMixin, base):
        pass

    own, ours = subclasses(base)[index], subclasses(Mixed)[index]
    for protocol in (2, 4, 5):
        assert to_bytes(ours, payload(), protocol=protocol) == to_bytes(own, payload(), protocol=protocol)
    assert native_dumps["dump"] == 3
    assert issubclass(ours, pickle.Pickler)
    with installed(flavor):
        assert to_bytes(ours, payload()) == to_bytes(own, payload())


def test_mixin_needs_a_flavor():
    with pytest.raises(TypeError, match=r"Alone must also inherit from the CloudPickler of a flavor"):
        type("Alone", (NativeMixin, pickle.Pickler), {})(io.BytesIO())


def test_nesting_is_counted():
    own = cloudpickle.dumps
    install("cloudpickle")
    with installed("cloudpickle", "cloudpickle"):
        ours = cloudpickle.dumps
        assert ours is not own
    assert cloudpickle.dumps is ours
    install("cloudpickle")
    uninstall("cloudpickle")
    assert cloudpickle.dumps is ours
    uninstall("cloudpickle")
    assert cloudpickle.dumps is own
    uninstall("cloudpickle")
    assert cloudpickle.dumps is own


def test_installed_undoes_after_an_exception():
    own = cloudpickle.dumps
    with pytest.raises(KeyError), installed("cloudpickle"):
        raise KeyError
    assert cloudpickle.dumps is own


def test_all(flavor):
    names = install("all")
    try:
        assert flavor in names
        assert "cloudpickle" in names
    finally:
        uninstall("all")


def test_a_patch_on_top_stays(monkeypatch):
    own = cloudpickle.dumps
    install("cloudpickle")
    someone_elses = lambda obj: b"theirs"
    cloudpickle.dumps = someone_elses
    uninstall("cloudpickle")
    try:
        assert cloudpickle.dumps is someone_elses
        assert cloudpickle.cloudpickle.dumps is own
    finally:
        cloudpickle.dumps = own


def test_picklers_that_live_through_install_and_uninstall():
    def stream(toggle):
        file = io.BytesIO()
        pickler = cloudpickle.CloudPickler(file)
        shared = [closure(1), "text"]
        pickler.dump(shared)
        toggle(install)
        pickler.dump([shared])
        second_file = io.BytesIO()
        second = cloudpickle.CloudPickler(second_file)
        second.dump(shared)
        toggle(uninstall)
        pickler.dump([shared])
        second.dump([shared, shared])
        second.clear_memo()
        second.dump(shared)
        return file.getvalue(), second_file.getvalue()

    assert stream(lambda change: change("cloudpickle")) == stream(lambda change: None)


def test_memo_attribute():
    with installed("cloudpickle"):
        shared = [1]
        file = io.BytesIO()
        first = cloudpickle.CloudPickler(file)
        first.dump(shared)
        assert list(first.memo.copy().values()) == [(0, shared)]
        second = cloudpickle.CloudPickler(file)
        second.memo = first.memo
        second.dump(shared)
        third = cloudpickle.CloudPickler(file)
        third.memo = first.memo.copy()
        third.dump(shared)
    expected = io.BytesIO()
    first = cloudpickle.CloudPickler(expected)
    first.dump(shared)
    for _ in range(2):
        pickler = cloudpickle.CloudPickler(expected)
        pickler.memo = first.memo
        pickler.dump(shared)
    assert file.getvalue() == expected.getvalue()


def test_patched_class_is_respected(monkeypatch):
    expected = pickling.dumps(closure(1))
    with monkeypatch.context() as patch:
        patch.setattr(cloudpickle.Pickler, "persistent_id", lambda self, obj: 7 if obj == 1 else None, raising=False)
        assert pickling.dumps(closure(1)) == cloudpickle.dumps(closure(1)) != expected
        with installed("cloudpickle"):
            patched = cloudpickle.dumps(closure(1))
        assert patched == cloudpickle.dumps(closure(1))
        file = io.BytesIO()
        pickling.dump(closure(1), file)
        assert file.getvalue() == patched
        assert len(pickling.dumps(closure(1), compact=True)) <= len(patched)
    with monkeypatch.context() as patch:
        patch.setattr(cloudpickle.Pickler, "reducer_override", lambda self, obj: NotImplemented)
        with pytest.raises((AttributeError, pickle.PicklingError)):
            pickling.dumps(closure(1))
    with monkeypatch.context() as patch:
        patch.setattr(cloudpickle.cloudpickle, "Pickler", subclasses(cloudpickle.Pickler)[1])
        assert pickling.dumps(Point(1)) == cloudpickle.dumps(Point(1))
        assert pickle.loads(pickling.dumps(Point(1))) == 1
    assert pickling.dumps(closure(1)) == expected


def test_no_reference_cycles(flavor):
    gc.collect()
    gc.disable()
    try:
        with installed(flavor):
            for cls in (sys.modules[flavor].CloudPickler, *subclasses(sys.modules[flavor].CloudPickler), CloudPickler):
                pickler = cls(io.BytesIO())
                pickler.dump(helper)
                reference = weakref.ref(pickler)
                del pickler
                assert reference() is None, cls
    finally:
        gc.enable()


def test_threads_install_and_dump():
    expected = cloudpickle.dumps([closure(1), local_class_once])
    stop = threading.Event()
    failures = []

    def work():
        try:
            while not stop.is_set():
                assert cloudpickle.dumps([closure(1), local_class_once]) == expected
                assert to_bytes(cloudpickle.CloudPickler, [closure(1), local_class_once]) == expected
        except BaseException as error:
            failures.append(error)

    def toggle():
        try:
            for _ in range(100):
                with installed("cloudpickle"):
                    assert cloudpickle.dumps([closure(1), local_class_once]) == expected
        except BaseException as error:
            failures.append(error)

    workers = [threading.Thread(target=work) for _ in range(4)]
    togglers = [threading.Thread(target=toggle) for _ in range(3)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for thread in workers + togglers:
            thread.start()
        for thread in togglers:
            thread.join()
    finally:
        stop.set()
        for thread in workers:
            thread.join()
        sys.setswitchinterval(interval)
    assert not failures


def test_threads_dump_while_others_import(flavor):
    objects = [closure([1]), local_class_once, Point(closure(2)), helper, {"a": [closure(3)] * 2}]
    expected = [sys.modules[flavor].dumps(obj) for obj in objects]
    stop = threading.Event()
    failures = []

    def churn():
        count = 0
        while not stop.is_set():
            count += 1
            sys.modules[f"fastcap_churn.m{count % 50}"] = types.ModuleType("churn")
            sys.modules.pop(f"fastcap_churn.m{(count + 25) % 50}", None)

    def work():
        try:
            for _ in range(100):
                assert [pickling.dumps(obj, flavor=flavor) for obj in objects] == expected
        except BaseException as error:
            failures.append(error)

    workers = [threading.Thread(target=work) for _ in range(8)]
    churner = threading.Thread(target=churn)
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
        for name in [name for name in sys.modules if name.startswith("fastcap_churn")]:
            del sys.modules[name]
    assert not failures


def test_import_is_light():
    code = (
        "import sys, fastcap, fastcap.pickling\n"
        "print(sorted({'click', 'rich', 'ray', 'numpy', 'pyspark', 'joblib'} & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "[]\n"
