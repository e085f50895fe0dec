"""What does not load as it was: each rule fires, near misses do not, and the line to write instead helps.

What a finding says is compared with what another process makes of cloudpickle's own bytes.
"""

import enum
import sys
import types

import cloudpickle
import numpy as np
import pytest
from rulebook import found, load_elsewhere, script

import fastcap
from fastcap import analyze, scan


def codes(report):
    return sorted({row.code for row in report.findings})


# --- FC210: classes that cannot be rebuilt ---------------------------------------------------------------------------

KEYWORD = """
class Stage:
    def __init_subclass__(cls, /, key{}, **rest):
        super().__init_subclass__(**rest)
        cls.key = key
class Resize(Stage, key="resize"):
    pass
"""

BROKEN = {
    "keyword of __init_subclass__": KEYWORD.format(""),
    "keyword-only parameter": KEYWORD.replace("/, key{}", "*, key"),
    "keyword of a metaclass": "class Meta(type):\n"
    "    def __new__(mcls, name, bases, space, *, key): return super().__new__(mcls, name, bases, space)\n"
    "    def __init__(cls, name, bases, space, **rest): pass\n"
    "class Resize(metaclass=Meta, key=1): pass",
    "keyword of a metaclass's __init__": "class Meta(type):\n"
    "    def __new__(mcls, name, bases, space, **rest): return super().__new__(mcls, name, bases, space)\n"
    "    def __init__(cls, name, bases, space, *, key): pass\n"
    "class Resize(metaclass=Meta, key=1): pass",
    "keyword of __prepare__": "class Meta(type):\n"
    "    @classmethod\n"
    "    def __prepare__(mcls, name, bases, *, key): return {}\n"
    "    def __new__(mcls, name, bases, space, **rest): return super().__new__(mcls, name, bases, space)\n"
    "    def __init__(cls, name, bases, space, **rest): pass\n"
    "class Resize(metaclass=Meta, key=1): pass",
    "private slot": "class Resize:\n    __slots__ = ('__key', 'rest')",
    "abstract base": "import abc" + KEYWORD.format("").replace("class Stage:", "class Stage(abc.ABC):"),
    "slots that nobody lists": "class Resize:\n    __slots__ = iter(['key'])",
    "a type of C": "import json.encoder\n"
    "Resize = json.encoder.c_make_encoder",
}
if sys.version_info >= (3, 11):
    BROKEN["flag without single bits"] = "import enum\nclass Resize(enum.IntFlag):\n    LOW = 12\n    TOP = 35"

SOUND = {
    "keyword with a default": KEYWORD.format("=None"),
    "keyword with a default, of its own only": KEYWORD.replace("/, key{}", "*, key=None"),
    "metaclass that gives the keyword": "class Meta(type):\n"
    "    def __new__(mcls, name, bases, space, **rest):\n"
    "        return super().__new__(mcls, name, bases, space, **({'key': 1} if bases else {}))\n"
    "    def __init__(cls, name, bases, space, **rest): pass\n"
    + KEYWORD.format("").replace("class Resize(Stage,", "class Resize(Stage, metaclass=Meta,"),
    "the base itself": KEYWORD.format("") + "Resize = Stage",
    "slots": "class Resize:\n    __slots__ = ('_key', '__dict__', '__weakref__')",
    "slots of a base": "class Base:\n    __slots__ = ('key',)\nclass Resize(Base):\n    __slots__ = 'other'",
    "exception": "class Resize(ValueError):\n    pass",
    "methods of another C type": "class Resize:\n    add = list.append\n    real = complex.real",
    "subclass of a C type": "import collections\nclass Resize(collections.deque):\n    pass",
    "flag with single bits": "import enum\nclass Resize(enum.IntFlag):\n    LOW = 1\n    TOP = 6",
    "enum": "import enum\nclass Resize(enum.Enum):\n    LOW = 12\n    TOP = 35",
    "flag without members": "import enum\nclass Resize(enum.Flag):\n    pass",
    "abstract class": "import abc\nclass Resize(abc.ABC):\n    @abc.abstractmethod\n    def run(self): pass",
    "generic class": "import typing\nT = typing.TypeVar('T')\nclass Resize(typing.Generic[T]):\n    pass",
}


@pytest.mark.parametrize("what", BROKEN)
def test_210_classes_that_cannot_be_rebuilt(what):
    cls = script(BROKEN[what]).Resize
    error = load_elsewhere(cloudpickle.dumps(cls))
    assert error.partition(":")[0] in ("TypeError", "AttributeError")
    report = analyze({"cls": cls})
    assert list(found(report, "FC210")) == ["obj['cls']"]
    row = next(row for row in report.findings if row.code == "FC210")
    assert row.severity == "error"
    assert f"({error.partition(':')[0]}: " in row.message
    assert cls.__name__ in row.message


@pytest.mark.parametrize("what", SOUND)
def test_210_near_misses(what):
    cls = script(SOUND[what]).Resize
    stream = cloudpickle.dumps(cls)
    assert load_elsewhere(stream, "loaded.__name__") in ("Resize", "Stage")
    assert found(analyze({"cls": cls}), "FC210") == {}
    assert found(scan(stream), "FC210") == {}


@pytest.mark.parametrize("what", ["keyword of __init_subclass__", "keyword-only parameter", "private slot"])
def test_210_in_a_file(what):
    stream = cloudpickle.dumps({"cls": script(BROKEN[what]).Resize})
    assert list(found(scan(stream), "FC210")) == ["obj['cls']"]


def test_210_in_an_instance():
    """The path is that of the class."""
    made = script(BROKEN["private slot"])
    assert list(found(analyze([made.Resize()]), "FC210")) == ["obj[0].__class__"]


def test_210_replacements():
    line = found(analyze(script(KEYWORD.format("")).Resize), "FC210")["Resize"]
    assert line.startswith("a default for `key` in Stage.__init_subclass__, such as key=None, or move Resize")
    better = script(SOUND["keyword with a default"]).Resize
    assert load_elsewhere(fastcap.dumps(better), "loaded.key") == "resize"
    line = found(analyze(script(BROKEN["private slot"]).Resize), "FC210")["Resize"]
    assert line == "in Resize: a slot with one underscore, _key"
    better = script("class Resize:\n    __slots__ = ('_key', 'rest')").Resize
    assert load_elsewhere(fastcap.dumps(better), "loaded.__slots__") == ("_key", "rest")


@pytest.mark.skipif(sys.version_info < (3, 11), reason="before Python 3.11 all members of a flag are listed")
def test_210_replacement_of_a_flag():
    made = script(BROKEN["flag without single bits"])
    ((path, line),) = found(analyze(made.Resize.TOP, name="top"), "FC210").items()
    assert path.endswith(".__class__")
    assert line == "give Resize a member for each bit: A = 1, B = 2"
    better = script("import enum\nclass Resize(enum.IntFlag):\n    A = 1\n    B = 2\n    TOP = 3").Resize
    assert load_elsewhere(fastcap.dumps(better.TOP), "int(loaded)") == 3


def test_210_looks_at_a_class_without_running_it():
    class Meta(type):
        def __getattribute__(cls, name):
            if name not in ("__module__", "__qualname__", "__name__", "__dict__", "__bases__", "__mro__"):
                log.append(name)
            return super().__getattribute__(name)

    log = []
    made = Meta("Made", (), {"__module__": "__main__"})
    analyze(made).findings  # noqa: B018
    pickled = list(log)
    log.clear()
    fastcap.dumps(made)
    assert pickled == log  # what pickling itself asks for


# --- FC211: what is left out -----------------------------------------------------------------------------------------


def test_211_aliases_of_enums():
    class Unit(enum.Enum):
        METRE = "m"
        METER = METRE

    class Plain(enum.Enum):
        METRE = "m"

    assert load_elsewhere(cloudpickle.dumps(Unit), "list(loaded.__members__)") == ["METRE"]
    report = analyze([Unit, Plain])
    line = found(report, "FC211")
    assert list(line) == ["obj[0]"]
    assert line["obj[0]"].startswith("move Unit to a module")
    assert "METER" in report.findings[0].message


def test_211_replacement_of_an_enum(tmp_path, monkeypatch):
    source = "import enum\nclass Unit(enum.Enum):\n    METRE = METER = 'm'\n"
    (tmp_path / "fastcap_units.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    import fastcap_units

    try:
        assert found(analyze(fastcap_units.Unit), "FC211") == {}
        stream = fastcap.dumps(fastcap_units.Unit)
    finally:
        del sys.modules["fastcap_units"]
    assert load_elsewhere(stream, "list(loaded.__members__)", path=tmp_path) == ["METRE", "METER"]


def test_211_attributes_of_arrays():
    source = (
        "import numpy as np\n"
        "class Signal(np.ndarray):\n"
        "    def __array_finalize__(self, obj): self.rate = getattr(obj, 'rate', None)\n"
    )
    carry = (
        "    def __reduce__(self):\n"
        "        call, args, state = super().__reduce__()\n"
        "        return call, args, (state, self.rate)\n"
        "    def __setstate__(self, state):\n"
        "        super().__setstate__(state[0]); self.rate = state[1]\n"
    )
    made = np.arange(4.0).view(script(source).Signal)
    assert found(analyze([made]), "FC211") == {}  # nothing is set
    made.rate = 44100
    assert load_elsewhere(cloudpickle.dumps(made), "loaded.rate") is None
    assert found(analyze([made]), "FC211") == {"obj[0]": "in Signal: __reduce__ and __setstate__ that carry rate"}
    better = np.arange(4.0).view(script(source + carry).Signal)
    better.rate = 44100
    assert found(analyze([better]), "FC211") == {}
    assert load_elsewhere(fastcap.dumps(better), "loaded.rate") == 44100


def test_211_near_misses_of_arrays(tmp_path):
    np.save(tmp_path / "x.npy", np.zeros(10))
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    near = [np.ma.array([1, 2], mask=[0, 1]), np.rec.array([(1, 2.0)]), np.zeros(3), mapped]
    assert found(analyze(near), "FC211") == {}


def test_211_gradients():
    torch = pytest.importorskip("torch", reason="torch is not installed")
    x = torch.tensor([2.0], requires_grad=True)
    assert found(analyze({"x": x}), "FC211") == {}
    (x * x).backward()
    report = analyze({"x": x, "y": torch.ones(2), "p": torch.nn.Parameter(torch.ones(2))})
    assert [(row.path, row.severity) for row in report.findings if row.code == "FC211"] == [("obj['x']", "note")]
    assert found(report, "FC211")["obj['x']"].startswith("grad = obj['x'].grad beside it")
    pair = {"x": x, "grad": x.grad}
    loaded = fastcap.loads(fastcap.dumps(pair))
    loaded["x"].grad = loaded["grad"]
    assert loaded["x"].grad.item() == 4


# --- FC212: submodules -----------------------------------------------------------------------------------------------

SUBMODULE = """
import {0}
import {0}.{1}
def outer():
    {2}
    def inner(): return {0}.{1}.__name__
    return inner()
def direct():
    return {0}.{1}.__name__
def computed(name="{1}"):
    {2}
    return getattr({0}, name).__name__
def constant():
    return getattr({0}, "__name__")
"""


def test_212_submodules_of_nested_functions():
    made = script(SUBMODULE.format("wsgiref", "headers", "pass"))
    error = load_elsewhere(cloudpickle.dumps(made.outer), "loaded()")
    assert error == "AttributeError: module 'wsgiref' has no attribute 'headers'"
    assert found(analyze(made.outer), "FC212") == {"outer": "inside outer: import wsgiref.headers"}
    report = analyze(made.computed)
    assert [(row.code, row.severity) for row in report.findings] == [("FC212", "note")]
    better = script(SUBMODULE.format("wsgiref", "headers", "import wsgiref.headers"))
    for name in ("outer", "computed"):
        assert load_elsewhere(fastcap.dumps(vars(better)[name]), "loaded()") == "wsgiref.headers"


@pytest.mark.parametrize("name", ["direct", "constant"])
def test_212_near_misses(name):
    made = script(SUBMODULE.format("wsgiref", "headers", "pass"))
    assert found(analyze(vars(made)[name]), "FC212") == {}


def test_212_submodules_that_the_package_imports():
    for package, submodule in (("numpy", "linalg"), ("collections", "abc"), ("json", "decoder")):
        made = script(SUBMODULE.format(package, submodule, "pass"))
        assert found(analyze(made.outer), "FC212") == {}


# --- FC213: variables that are no longer shared ----------------------------------------------------------------------

COUNTER = """
def build():
    total = {0}
    def add(k):
        {1}total{2} += k
    def read():
        return total{2}
    return add, read
def build_quiet():
    total = 0
    def add(k): return total + k
    def read(): return total
    return add, read
"""


def test_213_nonlocal_variables():
    made = script(COUNTER.format("0", "nonlocal total; ", ""))
    assert load_elsewhere(cloudpickle.dumps(made.build()), "(loaded[0](5), loaded[1]())[1]") == 0
    line = found(analyze(made.build()), "FC213")["obj[0]"]
    assert line == "keep total in an object that both hold: total = [total], and total[0] in both"
    better = script(COUNTER.format("[0]", "", "[0]"))
    assert found(analyze(better.build()), "FC213") == {}
    assert load_elsewhere(fastcap.dumps(better.build()), "(loaded[0](5), loaded[1]())[1]") == 5
    assert found(analyze(made.build()[0]), "FC213") == {}  # alone
    assert found(analyze(made.build_quiet()), "FC213") == {}  # nobody writes
    assert found(analyze([made.build()[0], made.build()[1]]), "FC213") == {}  # two variables


def test_213_methods_share_the_cell_of_their_class():
    made = script(
        "class Base:\n    def a(self): return super().__init__()\n    def b(self): return __class__\n"
    )
    assert found(analyze(made.Base), "FC213") == {}


def test_213_globals_of_modules_by_value():
    def module(source):
        made = types.ModuleType("scratch")
        exec(source, made.__dict__)
        return made

    written = module("x = 1\ndef f(y):\n    global x\n    x += y\n    return x\n")
    assert load_elsewhere(cloudpickle.dumps(written), "(loaded.f(8), loaded.x)") == (9, 1)
    assert list(found(analyze({"m": written}), "FC213")) == ["obj['m']"]
    better = module("x = [1]\ndef f(y):\n    x[0] += y\n    return x[0]\n")
    assert found(analyze({"m": better}), "FC213") == {}
    assert load_elsewhere(fastcap.dumps(better), "(loaded.f(8), loaded.x)") == (9, [9])
