"""Labels and phrases: each kind of object is named as people know it, and nothing is executed to find out."""

import collections
import dataclasses
import datetime
import decimal
import enum
import functools
import importlib.util
import io
import logging
import pickle
import re
import sys
import types
import uuid

import cloudpickle
import numpy as np
import pytest

from fastcap import inert
from fastcap.analysis import analyze, scan
from fastcap.explain import TABLE, canonical
from fastcap.pickling import FLAVORS
from fastcap.report import ViewOptions

EVERYTHING = ViewOptions(min_size=1, top=10_000)
BLOB = bytes(5000)


def rows_of(obj, **how):
    report = scan(cloudpickle.dumps(obj, how.pop("protocol", 5)), options=EVERYTHING, **how)
    return {row.path: row for row in report.nodes}


class Plain:
    def __init__(self, **attributes):
        vars(self).update(attributes)


class Slotted:
    __slots__ = ("data", "other")

    def __init__(self):
        self.data, self.other = BLOB, 1


class SlottedWithDict(Slotted):
    def __init__(self):
        super().__init__()
        self.extra = bytearray(5001)


class WithState:
    def __getstate__(self):
        return ("state", BLOB)

    def __setstate__(self, state):
        pass


class Keywords:
    def __new__(cls, *args, **kwargs):
        return super().__new__(cls)

    def __getnewargs_ex__(self):
        return (BLOB,), {"key": bytearray(BLOB)}


class Odd(enum.Enum):
    ONE = 1


def make_captures():
    cell, shared = bytes(5001), bytes(5002)

    def inner():
        return shared

    def outer(x, y=bytes(5003), *, z=bytes(5004)):
        """Has everything."""
        return cell, inner, shared

    outer.note = bytes(5005)
    return outer


def make_class():
    captured = bytes(5001)

    class Base:
        weights = bytearray(5002)

    class Model(Base):
        table = [BLOB]

        def step(self):
            return captured

        @staticmethod
        def helper(x=bytes(5003)):
            return x

        @property
        def prop(self, y=bytes(5004)):
            return y

    return Model


OF_A_FUNCTION = {
    "outer<closure cell>": ("bytes", "closure", "cell"),
    "outer<closure inner>": ("function", "closure", "inner"),
    "outer<closure inner><closure shared>": ("bytes", "closure", "shared"),
    "outer<default y>": ("bytes", "default", "y"),
    "outer<default z>": ("bytes", "default", "z"),
    "outer.note": ("bytes", None, None),
    "outer.__code__": ("code", None, None),
}


@pytest.mark.parametrize("flavor", FLAVORS)
@pytest.mark.parametrize("protocol", range(2, 6))
def test_function(flavor, protocol):
    if importlib.util.find_spec(flavor.partition(".")[0]) is None:
        pytest.skip(f"{flavor.partition('.')[0]} is not installed")
    report = analyze(make_captures(), flavor=flavor, protocol=protocol, options=EVERYTHING)
    line = make_captures.__code__.co_firstlineno + 6
    rows = {row.path: row for row in report.nodes}
    assert report.target == "outer"
    assert report.type == "function"
    assert report.what.endswith(f"test_explain.py:{line}")
    for path, (kind, _, _) in OF_A_FUNCTION.items():
        assert rows[path].type == kind, path
    captures = {capture.path: capture for capture in report.captures}
    for path, (kind, how, name) in OF_A_FUNCTION.items():
        if kind == "bytes":
            assert (captures[path].how, captures[path].name) == (how, name)
    shared = captures["outer<closure inner><closure shared>"]
    assert shared.shared_by == ("outer<closure shared>",)
    assert (shared.by, shared.captured, shared.captured_type) == ("outer<closure inner>", shared.path, "bytes")
    assert captures["outer<default y>"].line == line
    assert captures["outer<default y>"].file.endswith("test_explain.py")


def make_generated_classes():
    """Classes with methods that a library has written; the second of each pair has one of its own, too."""
    @dataclasses.dataclass(order=True)
    class Data:
        table = BLOB
        number: int = 0

    @dataclasses.dataclass(order=True)
    class Mixed:
        table = BLOB
        number: int = 0

        def own(self):
            return self.number

    @functools.total_ordering
    class Ordered:
        table = BLOB

        @property
        def own(self):
            return 1

        def __lt__(self, other):
            return False

    pair = collections.namedtuple("pair", "left right")
    pair.table = BLOB
    return [(Data, None), (Mixed, Mixed.own), (Ordered, Ordered.own.fget), (pair, None)]


def test_generated_methods_have_no_location():
    for cls, own in make_generated_classes():
        explainer = scan(cloudpickle.dumps(cls)).explainer
        where = explainer.subject(0).where()
        if own is None:
            assert where == (None, None), cls
        else:
            assert where[0].endswith("test_explain.py"), cls
            assert where[1] == own.__code__.co_firstlineno
        methods = [row for row in analyze(cls, options=EVERYTHING).nodes if row.type == "function" and row.depth == 1]
        for row in methods:
            code = getattr(cls, row.label[1:]).__code__
            if code.co_filename.startswith("<"):
                assert row.what == f"function {code.co_name}", row.path
        assert methods or cls.__name__ == "Ordered"


def test_attributes_of_a_class_are_not_said_to_be_where_its_methods_are():
    for cls, own in make_generated_classes():
        capture = next(c for c in analyze(cls).captures if c.name == "table")
        assert capture.line is None
        assert (capture.file is not None) == (own is not None)


def test_wrapped_functions_keep_their_location():
    def decorate(function):
        @functools.wraps(function)
        def wrapper():
            return function()

        return wrapper

    wrapped = decorate(make_class)
    assert analyze(wrapped).what.endswith(f"test_explain.py:{wrapped.__code__.co_firstlineno}")


def test_global_through_a_helper():
    space = {"__name__": "__main__"}
    exec("EMBED = bytes(5000)\ndef lookup(): return EMBED\ndef train(): return lookup()", space)
    rows = rows_of(space["train"])
    assert rows["train<global lookup>"].type == "function"
    assert rows["train<global lookup><global EMBED>"].what == "bytes of 5,000"


CODE_ARGUMENTS = {
    "3.7": (2, 0, 2, 1, 3, b"code", (None,), (), ("a", "b"), "old.py", "work", 42, b"", ("free",), ()),
    "3.8 to 3.10": (2, 0, 0, 2, 1, 3, b"code", (None,), (), ("a", "b"), "old.py", "work", 42, b"", ("free",), ()),
    "3.11 on": (
        2, 0, 0, 2, 1, 3, b"code", (None,), (), ("a", "b"), "old.py", "work", "f.work", 42, b"", b"", ("free",), ()
    ),
}


class Reduced:
    """Pickles as a call."""

    def __init__(self, *value):
        self.value = value

    def __reduce__(self):
        return self.value


@pytest.mark.parametrize("layout", CODE_ARGUMENTS)
def test_layouts_of_code_objects(layout):
    cp = cloudpickle.cloudpickle
    code = Reduced(types.CodeType, CODE_ARGUMENTS[layout])
    cell = Reduced(cp._make_cell, (BLOB,))
    rows = rows_of(Reduced(cp._make_function, (code, {}, "work", (bytearray(BLOB),), (cell,))))
    assert rows["work"].what == "function old.py:42"
    assert rows["work<closure free>"].type == "bytes"
    assert rows["work<default b>"].type == "bytearray"


def test_class():
    rows = rows_of(make_class())
    assert (rows["Model"].type, rows["Model"].what) == ("class", f"class {__name__}.Model")
    assert rows["Model<base 0>"].type == "class"
    assert rows["Model<base 0>.weights"].type == "bytearray"
    assert rows["Model.table[0]"].type == "bytes"
    assert rows["Model.step<closure captured>"].type == "bytes"
    assert rows["Model.helper.__func__<default x>"].type == "bytes"
    assert rows["Model.prop.fget<default y>"].type == "bytes"
    captures = {capture.path: capture for capture in analyze(make_class()).captures}
    weights = captures["Model<base 0>.weights"]
    assert (weights.how, weights.name) == ("class attribute", "weights")
    assert captures["Model.step<closure captured>"].by == "Model.step"


def test_members_of_a_namedtuple():
    pair = collections.namedtuple("pair", "left right")
    rows = rows_of([pair(BLOB, bytearray(BLOB)), pair(1, BLOB + b"1")])
    assert rows["obj[0].left"].type == "bytes"
    assert rows["obj[0].right"].type == "bytearray"
    assert rows["obj[1].right"].what == "bytes of 5,001"


def test_attributes_that_are_called_as_those_of_torch():
    assert "obj._buffers['a']" in rows_of(Plain(_buffers={"a": BLOB}, _modules={"b": bytearray(BLOB)}))


def test_dynamic_enum_and_its_member():
    class Color(enum.Enum):
        RED = bytes(5001)
        BLUE = bytes(5002)

    rows = rows_of(Color)
    assert rows["Color"].type == "enum class"
    assert rows["Color.BLUE"].what == "bytes of 5,002"
    rows = rows_of({"c": Color.RED})
    assert (rows["obj['c']"].type, rows["obj['c']"].what) == ("Color", f"{__name__}.Color instance")
    assert rows["obj['c'].__class__.BLUE"].what == "bytes of 5,002"


def test_module_by_value():
    module = types.ModuleType("made_up")
    module.table = BLOB
    rows = rows_of({"m": module, "ref": sys})
    assert rows["obj['m']"].what == "module made_up (by value)"
    assert rows["obj['m'].table"].type == "bytes"
    assert rows["obj['ref']"].what == "module sys (by reference)"


INSTANCES = {
    "attribute": (
        lambda: Plain(data=BLOB, **{"odd name": bytearray(BLOB)}),
        {".data": "bytes", ".'odd name'": "bytearray"},
    ),
    "slots": (Slotted, {".data": "bytes"}),
    "slots and dict": (SlottedWithDict, {".data": "bytes", ".extra": "bytearray"}),
    "state of another kind": (WithState, {"<state>": "tuple", "<state>[1]": "bytes"}),
    "keywords of __new__": (Keywords, {"<arg 0>": "bytes", "<keyword key>": "bytearray"}),
    "enum member": (lambda: Odd.ONE, {}),
}


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("name", INSTANCES)
def test_instance(name, protocol):
    if name.startswith("slots") and protocol < 2:
        pytest.skip("protocols 0 and 1 refuse slots")
    make, expected = INSTANCES[name]
    if name == "keywords of __new__" and protocol < 4:
        pytest.skip("a partial before protocol 4")
    obj = make()
    report = scan(pickle.dumps([obj], protocol), options=EVERYTHING)
    rows = {row.path.removeprefix("obj[0]"): row for row in report.nodes if row.path != "obj"}
    kind = type(obj).__name__
    assert rows[""].type == kind
    assert rows[""].what == f"{type(obj).__module__}.{kind} instance"
    for path, type_name in expected.items():
        assert rows[path].type == type_name


def test_old_style_instances_of_protocol_0():
    stream = b"(S'one'\nimod\nCls\n(dS'data'\nS'" + b"x" * 100 + b"'\nsb."
    report = scan(stream, options=EVERYTHING)
    assert report.what == "mod.Cls instance"
    assert report.find("obj.data").type == "str"
    assert report.find("obj<arg 0>").what == "str 'one'"
    report = scan(b"(cmod\nCls\nS'one'\no}S'data'\nS'two'\nsb.", options=EVERYTHING)
    assert report.what == "mod.Cls instance"
    assert report.find("obj<arg 0>").what == "str 'one'"
    assert report.find("obj.data").what == "str 'two'"


@pytest.mark.parametrize("protocol", range(6))
def test_containers(protocol):
    obj = {
        "list": [1, BLOB + b"1"], "tuple": (1, BLOB + b"2"), "set": {BLOB + b"3"}, "frozen": frozenset([BLOB + b"4"]),
        "ordered": collections.OrderedDict(k=BLOB + b"5"), "default": collections.defaultdict(list, k=BLOB + b"6"),
        "deque": collections.deque([1, BLOB + b"7"]), 3: BLOB + b"8", (1, "x"): BLOB + b"9", None: BLOB,
        2.5: BLOB + b"10", True: BLOB + b"11", b"raw": BLOB + b"12",
    }  # fmt: skip
    report = scan(pickle.dumps(obj, protocol))
    for path in ["['list'][1]", "['tuple'][1]", "['ordered']['k']", "['default']['k']", "['deque'][1]", "[3]",
                 "[(1, 'x')]", "[None]", "[2.5]", "[True]", "['set']<member 0>", "['frozen']<member 0>"]:
        assert report.find("obj" + path).type == "bytes", path
    if protocol > 2:
        assert report.find("obj[b'raw']").type == "bytes"


def test_partial_and_bound_method():
    def work(x, table=None):
        return x

    rows = rows_of({"p": functools.partial(work, BLOB, table=bytearray(BLOB)), "m": Plain(data=BLOB + b"1").__init__})
    assert rows["obj['p'].func"].type == "function"
    assert rows["obj['p']<arg 0>"].type == "bytes"
    assert rows["obj['p']<keyword table>"].type == "bytearray"
    assert rows["obj['m']<self>.data"].type == "bytes"
    capture = analyze({"p": functools.partial(print, BLOB)}).captures[0]
    assert (capture.path, capture.how) == ("obj['p']<arg 0>", "argument")
    capture = analyze(Plain(data=BLOB).__init__, name="method").captures[0]
    assert (capture.path, capture.how, capture.captured_type) == ("method<self>.data", "self", "Plain")


ARRAYS = {
    "ndarray float64 (3, 4)": np.zeros((3, 4)),
    "ndarray >float32 (3,)": np.zeros(3, ">f4"),
    "ndarray bool (2,)": np.zeros(2, bool),
    "ndarray datetime64[ns] (2,)": np.zeros(2, "M8[ns]"),
    "ndarray (x, y) (2,)": np.zeros(2, [("x", "f4"), ("y", "i8")]),
    "ndarray U5 (2,)": np.zeros(2, "U5"),
    "ndarray object (2,)": np.array([1, None], object),
    "numpy scalar float32": np.float32(1),
}


@pytest.mark.parametrize("what", ARRAYS)
@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_arrays(what, protocol):
    assert scan(pickle.dumps(ARRAYS[what], protocol)).what == what
    assert scan(pickle.dumps([ARRAYS[what], ARRAYS[what].copy()], protocol)).find("obj[1]").what == what


def test_arrays_out_of_band():
    buffers = []
    stream = pickle.dumps(np.zeros((30, 40)), protocol=5, buffer_callback=buffers.append)
    report = scan(stream, buffers=buffers and [9600])
    assert (report.what, report.buffer_size) == ("ndarray float64 (30, 40)", 9600)
    assert [row.type for row in report.nodes] == ["ndarray"]


def test_elements_of_object_arrays():
    report = scan(pickle.dumps(np.array([[1, BLOB], [2, 3]], object)))
    assert report.find("obj[(0, 1)]").type == "bytes"


VALUES = {
    "datetime 2024-02-29 12:30:45": datetime.datetime(2024, 2, 29, 12, 30, 45),
    "date 2024-02-29": datetime.date(2024, 2, 29),
    "timedelta(1, 2, 3)": datetime.timedelta(1, 2, 3),
    "Decimal('1.50')": decimal.Decimal("1.50"),
    "UUID 12345678-1234-5678-1234-567812345678": uuid.UUID("12345678123456781234567812345678"),
    "logger a.b": logging.getLogger("a.b"),
    "StringIO of 3 bytes": io.StringIO("abc"),
    "str 'text'": "text",
    "bytes of 5,000": BLOB,
    "b'short'": b"short",
    "range(1, 9, 2)": range(1, 9, 2),
}


@pytest.mark.parametrize("what", VALUES)
def test_values(what):
    assert scan(cloudpickle.dumps(VALUES[what])).what == what


def test_pandas():
    pd = pytest.importorskip("pandas", reason="pandas is not installed")
    frame = pd.DataFrame({"alpha": np.arange(300), "beta": ["x"] * 300})
    assert scan(pickle.dumps(frame)).what == "DataFrame (300, 2): 'alpha', 'beta'"
    assert scan(pickle.dumps(frame.set_index(pd.date_range("2020", periods=300)))).what.startswith("DataFrame (300, 2)")
    assert scan(pickle.dumps(pd.Series(np.arange(40.0)))).what == "Series (40,)"
    assert scan(pickle.dumps(pd.Index(np.arange(40.0)))).what == "Index (40,)"


def test_torch():
    torch = pytest.importorskip("torch", reason="torch is not installed")
    model = torch.nn.Sequential(torch.nn.Linear(100, 50), torch.nn.ReLU())
    model.named = torch.nn.Linear(50, 60)
    report = scan(pickle.dumps(model))
    assert report.find("obj[0].weight").what.endswith("(50, 100)")
    assert report.find("obj.named.weight").type == "parameter"
    model.register_buffer("mean", torch.ones(3))
    assert scan(pickle.dumps(model)).find("obj.mean").type == "tensor"
    assert scan(pickle.dumps(torch.zeros(3, 4))).type == "tensor"


def test_pyarrow():
    pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    assert scan(pickle.dumps(pa.table({"a": [1, 2, 3]}))).what == "pyarrow Table"
    assert scan(pickle.dumps(pa.array([1, 2, 3]))).what == "pyarrow Array (3,)"


def test_scipy():
    sparse = pytest.importorskip("scipy.sparse", reason="scipy is not installed")
    assert scan(pickle.dumps(sparse.csr_matrix(np.eye(7)))).what == "csr_matrix (7, 7)"


def test_text_file_is_named_as_what_it_was(tmp_path):
    (tmp_path / "log.txt").write_text("line\n" * 1000)
    with open(tmp_path / "log.txt") as file:
        report = scan(cloudpickle.dumps({"log": file}))
    assert report.captures[0].path == "obj['log']"
    assert report.captures[0].type == "text file"


@pytest.mark.parametrize("name", ["_object_ref_deserializer", "_actor_handle_deserializer"])
def test_ray_handles(name):
    stream = f"cray._private.serialization\n{name}\n(S'abc'\ntR.".encode()
    assert scan(stream).what in ("Ray object reference", "Ray actor handle")


def test_unknown_reducer():
    report = scan(b"\x80\x04cnowhere.at_all\nrebuild\n(C\x05abcdeK\x01t\x85R}(X\x01\x00\x00\x00kC\x03xyzub.")
    assert (report.type, report.what) == ("rebuild", "made by nowhere.at_all.rebuild")
    assert report.find("obj<arg 0>[0]").type == "bytes"
    assert report.find("obj.k").type == "bytes"
    assert "nowhere" not in sys.modules


def test_nothing_is_imported_or_executed():
    names = sorted({tuple(name.split(":")) for name in TABLE if ":" in name})
    stream = b"(" + b"".join(f"cfastcap_test_{module}\n{name}\n)R".encode() for module, name in names)
    before = set(sys.modules)
    report = scan(stream + b"cos\nsystem\n(S'exit 1'\ntRl.", options=EVERYTHING)
    assert len(report.nodes) > len(names)
    assert set(sys.modules) == before


@pytest.mark.parametrize(("name", "expected"), [
    ("ray.cloudpickle.cloudpickle._make_cell", "cloudpickle:_make_cell"),
    ("joblib.externals.cloudpickle.cloudpickle_fast._make_cell", "cloudpickle:_make_cell"),
    ("cloudpickle.cloudpickle._make_cell", "cloudpickle:_make_cell"),
    ("numpy.core.multiarray._reconstruct", "numpy:_reconstruct"),
    ("ray.actor.ActorHandle._deserialization_helper", "ray:_deserialization_helper"),
    ("functools.partial", "functools.partial"),
    (None, None),
])
def test_canonical_names(name, expected):
    assert canonical(name) == expected


def test_self_containing_objects_have_finite_paths():
    a: list = [BLOB]
    a.append((a, {"back": a}))
    report = scan(pickle.dumps(a), options=EVERYTHING)
    assert {row.path for row in report.nodes} >= {"obj", "obj[0]", "obj[1]", "obj[1][1]"}
    assert report.find("obj[1][0][0]").path == "obj[0]"
    function = make_recursive()
    assert scan(cloudpickle.dumps(function)).find("loop<closure data>").type == "bytes"


def make_recursive():
    data = BLOB

    def loop(n):
        return loop(n - 1) if n else data

    return loop


def huge_dict():
    return dict.fromkeys(range(200_000), 1) | {"last": bytes(10**8)}


def keys_by_reference():
    keys = [f"key {i}" for i in range(1000)]
    return [keys, dict.fromkeys(keys[:-1], 1) | {keys[-1]: bytes(10**6)}]


HOSTILE = {
    "one value behind very many": (huge_dict, "obj['last']"),
    "10 MB keys": (lambda: {"k" * 10**7: bytes(10**8), "k" * (10**7 - 1) + "l": 1}, "obj['kkkk"),
    "keys by reference": (keys_by_reference, "obj[1]['key 999']"),
    "deep nesting": (lambda: functools.reduce(lambda inner, _: [inner], range(400), bytes(10**6)), "obj"),
    "wide tuple": (lambda: tuple(bytes([i % 256]) * 50 for i in range(50_000)), "obj"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_work_is_bounded(name, monkeypatch):
    make, path = HOSTILE[name]
    count = 0
    real = inert.Reader._instruction

    def counting(*args):
        nonlocal count
        count += 1
        return real(*args)

    monkeypatch.setattr(inert.Reader, "_instruction", counting)
    report = scan(pickle.dumps(make()))
    assert report.captures[0].path.startswith(path)
    assert len(report.captures[0].path) < 1000
    assert len(report.nodes) <= 500
    assert count < 320 * (len(report.nodes) + len(report.captures) + 1)


def test_hostile_strings_are_printable():
    nasty = {"\x1b[31mred\u202e\n\0": BLOB, "\ud800": BLOB + b"1", "a" * 100 + "\n": BLOB + b"2"}
    report = scan(pickle.dumps(Plain(**nasty), 4))
    for row in report.nodes:
        assert row.path.isprintable()
        assert row.label.isprintable()
        assert row.what.isprintable()
        assert report.find(row.path) is not None or row.type == "more"


def test_columns_of_a_dataframe():
    """A block says which columns it holds; a column that is alone of its type has a path like any entry."""
    pd = pytest.importorskip("pandas", reason="pandas is not installed")
    frame = pd.DataFrame(
        {"a": np.arange(300.0), "n": np.arange(300), "b": np.arange(300.0), "c": pd.Categorical(["u", "v"] * 150)},
        index=pd.date_range("2020", periods=300),
    )
    report = analyze({"df": frame})
    whats = {row.path.removeprefix("obj['df']"): row.what for row in report.nodes if row.type != "more"}
    assert whats["<block 0>"] == "columns 'a', 'b': ndarray float64 (2, 300)"
    assert whats["['n']"] == "column 'n': ndarray int64 (1, 300)"
    assert whats["['c']"] == "column 'c': Categorical (300,)"
    assert whats[".index"] == "DatetimeIndex (300,)"
    for row in report.nodes:
        assert row.type == "more" or report.find(row.path).what == row.what
    assert [capture.path for capture in report.captures] == ["obj['df']"]  # people think of it as one thing
    assert sum(row.self_size for row in report.nodes) + report.overhead == report.payload_size
    unnamed = analyze(pd.DataFrame(np.zeros((300, 3))))
    assert unnamed.find("obj<block 0>").what == "block of a DataFrame: ndarray float64 (3, 300)"


def test_columns_of_a_wide_dataframe():
    """More columns than are looked at: their blocks have no names, and all sizes are there."""
    pd = pytest.importorskip("pandas", reason="pandas is not installed")
    frame = pd.DataFrame({f"c{k}": np.arange(3) for k in range(500)} | {"x": ["text"] * 3})
    report = scan(pickle.dumps(frame))
    assert report.find("obj<block 0>").what.startswith("block of a DataFrame")
    assert sum(row.self_size for row in report.nodes) + report.overhead == report.payload_size


def test_fields_of_a_frozen_dataclass_with_slots():
    """Its state is a list; the names are those of its class, if that goes by value."""

    @dataclasses.dataclass(frozen=True, slots=True)
    class Point:
        name: str
        data: bytes
        number: int = 3

    report = analyze([Point("x" * 100, 4 * BLOB)])  # from 3.13 on the class itself takes more than one of them
    assert report.find("obj[0].data").type == "bytes"
    assert report.find("obj[0].name").type == "str"
    assert report.captures[0].path == "obj[0].data"
    assert report.find("obj[0]<state>[1]") is None


def test_tensors_that_are_part_of_a_storage():
    torch = pytest.importorskip("torch", reason="torch is not installed")
    whole = torch.arange(1 << 17)
    report = scan(pickle.dumps({"part": whole[:10], "p": torch.nn.Parameter(whole.float()[:7])}))
    assert re.fullmatch(r"tensor( int64)? \(10,\), part of a storage of 1\.0 MiB", report.find("obj['part']").what)
    assert re.search(r"\(7,\), part of a storage of 512\.\d KiB$", report.find("obj['p']").what)
    for near in (whole, whole[: 1 << 16], whole.reshape(2, -1).t(), whole[:0].clone(), whole.bool(), whole.double()):
        assert "storage" not in scan(pickle.dumps(near)).what
