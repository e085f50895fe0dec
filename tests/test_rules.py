"""Each rule: what fires it, a near miss that does not, and whether the line to write instead helps."""

import pathlib
import pickle
import subprocess
import sys
import threading
import types

import cloudpickle
import numpy as np
import pytest
from rulebook import both, found, load_elsewhere, script

import fastcap
from fastcap import analyze, scan
from fastcap.findings import CHECKS
from fastcap.rules import RULES, describe_rules

MIB = 1 << 20
DOCS = pathlib.Path(__file__).resolve().parent.parent / "docs" / "rules.md"


# --- the table -------------------------------------------------------------------------------------------------------


def test_documentation_is_made_from_the_table():
    assert DOCS.read_text(encoding="utf-8") == describe_rules(), "write describe_rules() to docs/rules.md"


def test_rules_are_complete():
    assert list(RULES) == sorted(RULES)
    assert set(CHECKS) == set(RULES)
    assert len({rule.title for rule in RULES.values()}) == len(RULES)
    for rule in RULES.values():
        assert rule.severity in ("error", "warning", "note")
        assert rule.explanation.endswith(".")
        assert rule.replacement
        assert not rule.title.endswith(".")
        assert rule.title in describe_rules()


# --- FC101 -----------------------------------------------------------------------------------------------------------


def test_101_fires_and_the_replacement_unblocks():
    made = script("class Job:\n    def __init__(self, lock): self.lock, self.n = lock, 7")
    job = made.Job(threading.Lock())
    line = found(analyze(job), "FC101")["obj.lock"]
    assert line.startswith("in Job: def __getstate__(self): return ")
    exec(line.partition(": ")[2], vars(made))
    made.Job.__getstate__ = vars(made)["__getstate__"]
    assert found(analyze(job), "FC101") == {}
    assert pickle.loads(fastcap.dumps(job)).n == 7


def test_101_replacement_in_a_function():
    made = script("def job():\n    with lock: return 5", lock=threading.Lock())
    assert found(analyze(made.job), "FC101") == {"job<global lock>": "inside job: lock = threading.Lock()"}
    better = script("import threading\ndef job():\n    lock = threading.Lock()\n    with lock: return 5")
    assert found(analyze(better.job), "FC101") == {}
    assert pickle.loads(fastcap.dumps(better.job))() == 5


def test_101_replacement_of_an_entry():
    config = {"opt": [threading.Lock(), 1]}
    line = found(analyze(config, name="config"), "FC101")["config['opt'][0]"]
    exec(line, {"config": config})
    assert found(analyze(config), "FC101") == {}


def test_101_replacement_of_a_generator():
    config = {"rows": (k for k in range(3))}
    line = found(analyze(config, name="config"), "FC101")["config['rows']"]
    exec(line, {"config": config})
    assert found(analyze(config), "FC101") == {}
    assert config == {"rows": [0, 1, 2]}


def test_101_near_miss():
    """An object with a lock that leaves it out itself."""

    class Careful:
        def __init__(self):
            self.lock = threading.Lock()

        def __getstate__(self):
            return {}

    assert found(analyze([Careful(), print, threading.Lock]), "FC101") == {}


# --- FC102, FC103 ----------------------------------------------------------------------------------------------------


class Endless:
    def __reduce__(self):
        return Endless, (Endless(),)


class Shorter:
    def __init__(self, left=3):
        self.left = left

    def __reduce__(self):
        return Shorter, (self.left,)


def test_102_fires_and_the_replacement_unblocks():
    line = found(analyze([1, {"job": Endless()}], name="jobs"), "FC102")["jobs"]
    # exceptions have notes, with the place in them, from Python 3.11 on
    where = "jobs[1]['job']" if sys.version_info >= (3, 11) else "jobs"
    assert line == f"in the class of {where}: a __reduce__ whose parts get smaller"
    assert found(analyze([1, {"job": Shorter()}]), "FC102") == {}
    assert fastcap.loads(fastcap.dumps([1, {"job": Shorter(5)}]))[1]["job"].left == 5


def nested(levels):
    head = tail = {}
    for number in range(levels):
        tail["next"] = {"value": number}
        tail = tail["next"]
    return {"chain": head, "other": list(range(10))}


def test_102_near_miss():
    deep = []
    for _ in range(100_000):
        deep = [deep]
    assert found(analyze(deep), "FC102") == {}


def test_103_nesting_that_cloudpickle_cannot_take():
    deep = nested(60_000)
    with pytest.raises(pickle.PicklingError, match="excessively deep recursion"):
        cloudpickle.dumps(deep)
    report = analyze(deep)
    line = found(report, "FC103")["obj['chain']['next']"]
    assert line == 'fastcap.install("cloudpickle")  # or fastcap.dumps'
    assert [row.severity for row in report.findings] == ["warning"]
    exec(line, {"fastcap": fastcap})
    try:
        stream = cloudpickle.dumps(deep)
    finally:
        fastcap.uninstall("cloudpickle")
    assert load_elsewhere(stream, "loaded['chain']['next']['next']['value']") == 1
    assert fastcap.check(deep).findings == report.findings  # it can be pickled


@pytest.mark.parametrize("make", [nested, lambda levels: [[k] for k in range(100 * levels)]], ids=["deep", "wide"])
def test_103_near_misses(make):
    near = make(100)
    cloudpickle.dumps(near)
    assert found(analyze(near), "FC103") == {}
    assert found(scan(fastcap.dumps(nested(60_000))), "FC103") == {}  # a file has been written, and loads


def test_103_search_is_bounded(monkeypatch):
    from fastcap.inert import Reader

    looked = []
    real = Reader.view
    monkeypatch.setattr(Reader, "view", lambda reader, index: looked.append(index) or real(reader, index))
    rows = [[[k, [k] * 300] for _ in range(3)] for k in range(20_000)]
    from fastcap.findings import CHECKS
    from fastcap.scene import Scene

    kept = []
    monkeypatch.setattr("fastcap.analysis.find_all", lambda scene: kept.append(scene) or ())
    analyze(rows).findings  # noqa: B018
    assert isinstance(kept[0], Scene)
    looked.clear()
    assert list(CHECKS["FC103"](kept[0])) == []
    assert len(looked) < 100_000


# --- FC2 (handles: see test_handles) ---------------------------------------------------------------------------------


def test_203_names_in_main(monkeypatch, tmp_path):
    made = script("class Config:\n    pass")
    monkeypatch.setitem(sys.modules, "__main__", made)
    stream = pickle.dumps({"config": made.Config()})
    assert found(scan(stream), "FC203") == {"obj['config']": "move Config to a module that workers have"}
    assert load_elsewhere(stream).startswith("AttributeError: Can't get attribute 'Config' on <module '__main__'")
    # cloudpickle, as the explanation says, sends the class along
    assert both({"config": made.Config()}, "FC203") == {}
    # and so does what the finding says
    (tmp_path / "fastcap_moved.py").write_text("class Config:\n    pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    import fastcap_moved

    monkeypatch.setitem(sys.modules, "fastcap_moved", fastcap_moved)
    stream = pickle.dumps({"config": fastcap_moved.Config()})
    assert found(scan(stream), "FC203") == {}
    assert load_elsewhere(stream, "type(loaded['config']).__name__", path=tmp_path) == "Config"


def test_204_modules_that_nobody_can_import(monkeypatch):
    module = types.ModuleType("fastcap_made_up")
    exec("class Config:\n    pass", module.__dict__)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.delattr(module, "__spec__")
    config = module.Config()
    line = found(analyze([config]), "FC204")["obj[0]"]
    assert line == "cloudpickle.register_pickle_by_value(fastcap_made_up)"
    stream = fastcap.dumps([config])
    monkeypatch.delitem(sys.modules, module.__name__)
    with pytest.raises(ModuleNotFoundError):
        pickle.loads(stream)
    assert found(scan(stream), "FC204") == {"obj[0]": "pip install fastcap_made_up"}
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(line, {"cloudpickle": cloudpickle, "fastcap_made_up": module})
    try:
        assert found(analyze([config]), "FC204") == {}
        stream = fastcap.dumps([config])
    finally:
        cloudpickle.unregister_pickle_by_value(module)
    monkeypatch.delitem(sys.modules, module.__name__)
    assert type(pickle.loads(stream)[0]).__name__ == "Config"


def test_205_local_modules(tmp_path, monkeypatch):
    (tmp_path / "fastcap_local.py").write_text("def helper():\n    return 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    import fastcap_local

    try:
        report = analyze({"f": fastcap_local.helper})
        assert [row.severity for row in report.findings] == ["note"]
        line = found(report, "FC205")["obj['f']"]
        exec(line.partition(",")[0], {"cloudpickle": cloudpickle, "fastcap_local": fastcap_local})
        assert found(analyze({"f": fastcap_local.helper}), "FC205") == {}
        cloudpickle.unregister_pickle_by_value(fastcap_local)
    finally:
        del sys.modules["fastcap_local"]


def test_2_near_misses():
    """What is installed everywhere: the standard library, site-packages, built-in names."""
    stream = [np.array, np.float64, print, threading.Thread, pathlib.PurePosixPath, cloudpickle.dumps, type(None)]
    report = analyze(stream)
    assert report.findings == ()
    assert scan(fastcap.dumps(stream)).findings == ()


def test_206_tensors_on_a_gpu():
    """As torch.save writes them: the storage is a persistent id that names the device."""
    torch = pytest.importorskip("torch", reason="torch is not installed")

    class Persistent:
        def __init__(self, device):
            self.device = device

    class Tensor:
        def __init__(self, device):
            self.device = device

        def __reduce__(self):
            return torch._utils._rebuild_tensor_v2, (Persistent(self.device), 0, (2,), (1,), False, {})

    def save(device):
        import io

        class Pickler(pickle.Pickler):
            def persistent_id(self, obj):
                if isinstance(obj, Persistent):
                    return ("storage", torch.FloatStorage, "0", obj.device, 2)
                return None

        file = io.BytesIO()
        Pickler(file, 2).dump({"w": Tensor(device)})
        return file.getvalue()

    assert found(scan(save("cuda:0")), "FC206") == {"obj['w']": "obj['w'].cpu()"}
    assert found(scan(save("cpu")), "FC206") == {}
    assert found(analyze({"w": torch.zeros(2)}), "FC206") == {}


def test_206_bytes_of_a_tensor_on_a_gpu(monkeypatch):
    """As cloudpickle writes them on a machine that has one: the same, but for the name of the device."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    weights = {"w": torch.ones(3)}
    with monkeypatch.context() as patch:
        patch.setattr(torch.serialization, "location_tag", lambda storage: "cuda:0")
        stream = cloudpickle.dumps(weights)
    if not torch.cuda.is_available():
        with pytest.raises(RuntimeError, match="deserialize object on a CUDA device"):
            pickle.loads(stream)
    report = scan(stream)
    assert found(report, "FC206") == {"obj['w']": "obj['w'].cpu()"}
    line = found(report, "FC206")["obj['w']"]
    stream = cloudpickle.dumps({"w": eval(line, {"obj": weights})})
    assert found(scan(stream), "FC206") == {}
    assert pickle.loads(stream)["w"].tolist() == [1, 1, 1]


def test_206_on_a_gpu():
    torch = pytest.importorskip("torch", reason="torch is not installed")
    if not torch.cuda.is_available():
        pytest.skip("no GPU here")
    weights = {"w": torch.ones(3, device="cuda")}
    line = both(weights, "FC206")["obj['w']"]
    weights["w"] = eval(line, {"obj": weights})
    assert both(weights, "FC206") == {}
    assert fastcap.loads(fastcap.dumps(weights))["w"].device.type == "cpu"


def test_206_devices():
    torch = pytest.importorskip("torch", reason="torch is not installed")
    config = {"device": torch.device("cuda:1")}
    line = both(config, "FC206")["obj['device']"]
    assert [row.severity for row in analyze(config).findings] == ["note"]
    exec(line, {"obj": config, "torch": torch})
    if not torch.cuda.is_available():
        assert both(config, "FC206") == {}
    assert both({"device": torch.device("cpu")}, "FC206") == {}


def test_207_memory_maps(tmp_path):
    path = tmp_path / "big.npy"
    np.save(path, np.zeros(MIB))
    mapped = {"data": np.load(path, mmap_mode="r")}
    line = found(analyze(mapped, name="mapped"), "FC207")["mapped['data']"]
    assert repr(str(path)) in line
    names = {"mapped": mapped, "np": np}
    exec(line, names)
    assert isinstance(mapped["data"], np.memmap)
    before = script("def job(): return mapped['data'].sum()", mapped=mapped)
    after = script(f"import numpy as np\ndef job():\n    mapped = {{}}\n    {line}\n    return mapped['data'].sum()")
    assert list(found(analyze(before.job), "FC207")) == ["job<global mapped>['data']"]
    assert found(analyze(after.job), "FC207") == {}
    assert analyze(after.job).payload_size < analyze(before.job).payload_size / 1000
    assert load_elsewhere(fastcap.dumps(after.job), "float(loaded())") == before.job()
    assert found(analyze({"data": np.zeros(MIB)}), "FC207") == {}


def test_208_open_text_files(tmp_path):
    path = tmp_path / "log"
    path.write_text("line\n" * 1000)
    with open(path) as log:
        holder = {"log": log}
        live, file = found(analyze(holder), "FC208"), found(scan(fastcap.dumps(holder)), "FC208")
        assert list(live) == list(file) == ["obj['log']"]
        assert live["obj['log']"].startswith(f"obj['log'] = open({str(path)!r})")
        assert analyze({"log": str(path)}).payload_size < analyze(holder).payload_size / 10
    assert found(analyze({"log": str(path)}), "FC208") == {}


def test_209_absolute_paths(tmp_path, monkeypatch):
    assert list(both([pathlib.PosixPath("/data/x"), pathlib.PosixPath("data/x")], "FC209")) == ["obj[0]"]
    monkeypatch.chdir(tmp_path)
    config = {"data": tmp_path / "in" / "rows.txt", "model": pathlib.Path("/nowhere/model.bin")}
    lines = both(config, "FC209")
    assert lines["obj['data']"].startswith("obj['data'] = pathlib.Path('in/rows.txt')")
    assert lines["obj['model']"].startswith("obj['model'] = pathlib.Path('model.bin')")
    before = fastcap.dumps(config)
    for line in lines.values():
        exec(line, {"obj": config, "pathlib": pathlib})
    assert both(config, "FC209") == {}
    # a job that runs in another directory, which holds the files
    job = tmp_path / "job"
    (job / "in").mkdir(parents=True)
    (job / "in" / "rows.txt").write_text("rows")
    assert load_elsewhere(before, "loaded['data'].read_text()", cwd=job).startswith("FileNotFoundError")
    assert load_elsewhere(fastcap.dumps(config), "loaded['data'].read_text()", cwd=job) == "rows"


# --- FC214, FC215 ----------------------------------------------------------------------------------------------------


def test_214_shared_memory():
    from multiprocessing import shared_memory

    memory = shared_memory.SharedMemory(create=True, size=64)
    items = shared_memory.ShareableList([1, 2, 3])
    try:
        memory.buf[:5] = b"hello"
        config = {"memory": memory, "items": items}
        stream = fastcap.dumps(config)
        lines = both(config, "FC214")
        assert [row.severity for row in scan(stream).findings] == ["error", "error"]
        for line in lines.values():
            exec(line, {"obj": config})
        assert config["memory"][:5] == b"hello"
        assert config["items"] == [1, 2, 3]
        assert both(config, "FC214") == {}
        assert both({"name": memory.name, "class": shared_memory.SharedMemory}, "FC214") == {}
    finally:
        memory.close()
        memory.unlink()
        items.shm.close()
        items.shm.unlink()
    assert load_elsewhere(stream).startswith("FileNotFoundError")
    assert load_elsewhere(fastcap.dumps(config), "loaded['items']") == [1, 2, 3]


def test_214_proxies_of_a_manager():
    from multiprocessing import Manager

    with Manager() as manager:
        config = {"rows": manager.list([1, 2]), "counts": manager.dict(a=1)}
        stream = fastcap.dumps(config)
        lines = both(config, "FC214")
        assert set(lines) == {"obj['rows']", "obj['counts']"}
        for line in lines.values():
            exec(line, {"obj": config})
    assert config == {"rows": [1, 2], "counts": {"a": 1}}
    assert both(config, "FC214") == {}
    assert load_elsewhere(stream).partition(":")[0] in ("FileNotFoundError", "AuthenticationError", "TypeError")
    assert load_elsewhere(fastcap.dumps(config), "loaded['counts']") == {"a": 1}


def test_214_pipes_and_what_multiprocessing_pickles():
    from multiprocessing import Pipe
    from multiprocessing.reduction import ForkingPickler

    near, far = Pipe()
    try:
        assert list(both({"end": near}, "FC214")) == ["obj['end']"]
        report = scan(bytes(ForkingPickler.dumps({"end": near})))
        assert list(found(report, "FC214")) == ["obj['end']"]  # once, and not also for the descriptor in it
    finally:
        near.close()
        far.close()
    assert both({"end": 5, "pid": 4711}, "FC214") == {}  # numbers are not guessed at


def test_214_tensors_that_multiprocessing_pickles():
    torch = pytest.importorskip("torch", reason="torch is not installed")
    pytest.importorskip("torch.multiprocessing")  # which teaches multiprocessing's pickler about tensors
    from multiprocessing.reduction import ForkingPickler

    rows = {"rows": torch.ones(3)}
    assert len(found(scan(bytes(ForkingPickler.dumps(rows))), "FC214")) == 1
    assert both(rows, "FC214") == {}
    assert load_elsewhere(fastcap.dumps(rows), "loaded['rows'].tolist()") == [1, 1, 1]


def test_214_temporary_directories_and_the_environment(monkeypatch):
    import os
    import tempfile

    monkeypatch.setenv("FASTCAP_TEST_TOKEN", "secret")
    with tempfile.TemporaryDirectory() as path:
        folder = tempfile.TemporaryDirectory(dir=path)
        stream = fastcap.dumps({"folder": folder, "env": os.environ})
        live = found(analyze({"folder": folder, "env": os.environ}), "FC214")
        severity = {row.path: row.severity for row in scan(stream).findings if row.code == "FC214"}
        folder.cleanup()
    assert severity == {"obj['folder']": "error", "obj['env']": "warning"}
    assert set(live) == set(severity)
    assert b"FASTCAP_TEST_TOKEN" in stream
    assert live["obj['env']"] == 'what is needed of it: value = os.environ["NAME"]'
    assert both({"token": os.environ["FASTCAP_TEST_TOKEN"], "path": path, "environ": dict(os.environ)}, "FC214") == {}


OTHER_CODE = {
    "3.7": (2, 0, 2, 1, 3, b"code", (None,), (), ("a",), "old.py", "work", 42, b"", (), ()),
    "3.8 to 3.10": (2, 0, 0, 2, 1, 3, b"code", (None,), (), ("a",), "old.py", "work", 42, b"", (), ()),
    "3.11 or later": (2, 0, 0, 2, 1, 3, b"code", (None,), (), ("a",), "old.py", "work", "work", 42, b"", b"", (), ()),
}


class Reduced:
    def __init__(self, *value):
        self.value = value

    def __reduce__(self):
        return self.value


@pytest.mark.parametrize("version", OTHER_CODE)
def test_215_code_of_another_python(version):
    own = "3.11 or later" if sys.version_info >= (3, 11) else "3.8 to 3.10"
    code = Reduced(types.CodeType, OTHER_CODE[version])
    stream = fastcap.dumps({"f": Reduced(cloudpickle.cloudpickle._make_function, (code, {}, "work", (), ()))})
    lines = found(scan(stream), "FC215")
    if version == own:
        assert lines == {}
    else:
        assert lines == {"obj['f']": f"load it with Python {version}, or pickle it again with the Python that loads it"}
        with pytest.raises(TypeError):
            pickle.loads(stream)
    again = fastcap.dumps(script("def work(a, b): return a").work)  # made by the Python that loads it
    assert found(scan(again), "FC215") == {}
    assert load_elsewhere(again, "loaded(1, 2)") == 1


# --- FC3 -------------------------------------------------------------------------------------------------------------

TRAINER = """
class Trainer:
    def __init__(self, data):
        self.data, self.rate, self.names = data, 0.1, ["a"]
    def whole(self):
        def train(): return show(self)
        return train
    def method(self):
        def train(): return self.step()
        return train
    def step(self):
        return self.rate
    def written(self):
        def train(): self.rate = 2
        return train
    def part(self):
        def train(): return self.rate, self.names
        return train
    def nested(self):
        def train(): return lambda: self.rate
        return train
    def data_only(self):
        def train(): return self.data
        return train
    def replaced(self):
        rate = self.rate; names = self.names
        def train(): return rate, names
        return train
"""


@pytest.fixture
def trainer():
    return script(TRAINER, show=print).Trainer(np.arange(MIB) * 3)


def test_302_self_for_an_attribute(trainer):
    line = both(trainer.part(), "FC302")["train<closure self>"]
    assert line == "names = self.names; rate = self.rate  # before train, which then uses names and rate"
    before, after = analyze(trainer.part()), analyze(trainer.replaced())
    assert after.payload_size < before.payload_size / 1000
    assert after.findings == ()
    assert found(before, "FC301") == {}  # it says the same, with less in it
    assert list(found(analyze(trainer.nested()), "FC302")) == ["train<closure self>"]


@pytest.mark.parametrize("name", ["whole", "method", "data_only", "written"])
def test_302_near_misses(trainer, name):
    """All of self is used, a method is called, the big attribute itself is read, self is changed."""
    assert found(analyze(getattr(trainer, name)()), "FC302") == {}


METHODS = """
class Trainer:
    def __init__(self, data):
        self.data, self.rate, self.names = data, 0.1, ["a"]
    def reads(self, x):
        return x * self.rate + len(self.names)
    def nested(self):
        return [(lambda: self.rate)() for _ in range(3)]
    def calls(self):
        return self.reads(1)
    def whole(self):
        return show(self)
    def writes(self):
        self.rate = 2
        return self.rate
    def inherited(self):
        return super().__repr__(), self.rate
    def hidden(self):
        return eval("self.data"), self.rate
    def keyword(self):
        return dict(self=self.rate)
    @property
    def twice(self): return 2 * self.rate
    def by_property(self):
        return self.twice
"""


def test_302_bound_methods():
    trainer = script(METHODS, show=print).Trainer(np.arange(MIB) * 3)
    line = both(trainer.reads, "FC302")["obj<self>"]
    assert line == (
        "names = self.names; rate = self.rate  # and a function in place of the method reads, which uses names and rate"
    )
    names = {"self": trainer}
    exec(line, names)
    better = script("def make(rate, names):\n    def reads(x): return x * rate + len(names)\n    return reads")
    function = better.make(names["rate"], names["names"])
    assert analyze(function).payload_size < analyze(trainer.reads).payload_size / 1000
    assert load_elsewhere(fastcap.dumps(function), "loaded(10)") == trainer.reads(10)
    assert found(analyze(trainer.reads), "FC301") == {}  # it says the same, with less in it
    assert list(found(analyze(trainer.nested), "FC302")) == ["obj<self>"]
    assert list(found(analyze({"f": trainer.keyword}), "FC302")) == ["obj['f']<self>"]


@pytest.mark.parametrize("name", ["calls", "whole", "writes", "inherited", "hidden", "by_property"])
def test_302_near_misses_of_methods(name):
    """Another method is called, all of self is used, it is changed, or read in a way that nobody sees."""
    trainer = script(METHODS, show=print).Trainer(np.arange(MIB) * 3)
    assert found(analyze(getattr(trainer, name)), "FC302") == {}


def test_302_says_less_of_a_file(trainer):
    """There only the names are known that code uses."""
    live = next(row for row in analyze(trainer.part()).findings if row.code == "FC302")
    file = next(row for row in scan(fastcap.dumps(trainer.part())).findings if row.code == "FC302")
    assert " reads only self.names and self.rate, but captures all of `self` (Trainer)" in live.message
    assert " names no attribute but self.names and self.rate, but captures all of `self`" in file.message


def test_301_big_captures():
    data = np.arange(MIB) * 5
    made = script("def train(config): return data.sum()\ndef small(): return len(few)", data=data, few=list(range(100)))
    line = both(made.train, "FC301")["train<global data>"]
    assert line == "data_ref = ray.put(data) outside, data = ray.get(data_ref) inside train"
    assert found(analyze(made.small), "FC301") == {}
    assert found(analyze({"data": data}), "FC301") == {}  # no code captured it: it is what was asked for
    source = "class ray:\n    def get(ref): return ref\ndef train(config): data = ray.get(data_ref); return data"
    better = script(source, data_ref=b"28 bytes of a reference")
    assert analyze(better.train).payload_size < analyze(made.train).payload_size / 1000


@pytest.mark.parametrize(
    ("source", "path", "line"),
    [
        ("def job(x=data): return x", "job<default x>", "def job(…, x=None), and load `x` inside where it is None"),
        ("class job:\n    weights = data", "job.weights", "set weights in __init__, or load it where it is used"),
        ("def make(x):\n    def job(): return x\n    return job\njob = make(data)", "job<closure x>",
         "x_ref = ray.put(x) outside, x = ray.get(x_ref) inside job"),
    ],
)  # fmt: skip
def test_301_says_how_it_got_in(source, path, line):
    made = script(source, data=np.arange(MIB) * 7)
    assert both(made.job, "FC301") == {path: line}


def test_303_same_bytes_twice():
    data = np.arange(MIB)
    config = {"train": data, "test": data.copy()}
    line = both(config, "FC303")["obj['test']"]
    assert line == "obj['test'] = obj['train']"
    before = analyze(config).payload_size
    exec(line, {"obj": config})
    assert analyze(config).payload_size < 0.6 * before
    other = data.copy()
    other[MIB // 2 + 12_345] += 1  # where no sample looks
    assert both({"train": data, "test": other}, "FC303") == {}
    assert both({"train": data[:1000], "test": data[:1000].copy()}, "FC303") == {}


def test_303_in_a_file_on_disk(tmp_path):
    path = tmp_path / "payload.pkl"
    path.write_bytes(fastcap.dumps({"a": b"x" * MIB, "b": bytearray(b"x" * MIB), "c": b"".join([b"x"] * MIB)}))
    assert list(found(scan(path), "FC303")) == ["obj['c']"]
    import gzip

    packed = tmp_path / "payload.pkl.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    assert found(scan(packed), "FC303") == {}  # its bytes are not at hand


def test_303_touches_little_of_what_is_big(monkeypatch):
    """Of buffers that differ where the samples are, no more is read."""
    import fastcap.waste as module

    monkeypatch.setattr(module, "_same", lambda *_: pytest.fail("compared"))
    analyze([np.arange(MIB), np.arange(MIB) + 1, np.zeros(2 * MIB)]).findings  # noqa: B018


def test_304_broadcast_arrays():
    base = np.arange(8.0) / 3
    config = {"w": np.broadcast_to(base, (MIB // 4, 8))}
    line = found(analyze(config, name="config"), "FC304")["config['w']"]
    assert line.startswith(f"config['w'] = np.broadcast_to(config['w'], ({MIB // 4}, 8))")
    small = {"w": base}
    assert analyze(small).payload_size < analyze(config).payload_size / 1000
    names = {"config": small, "np": np}
    exec(line, names)
    assert np.array_equal(small["w"], config["w"])
    assert found(analyze({"w": np.zeros((MIB // 4, 8))}), "FC304") == {}
    assert found(analyze({"w": np.zeros((2, MIB))[:, ::2]}), "FC304") == {}


def test_305_tensor_slices():
    torch = pytest.importorskip("torch", reason="torch is not installed")
    rows = {"head": torch.arange(2 * MIB)[:10]}
    line = both(rows, "FC305")["obj['head']"]
    before = analyze(rows).payload_size
    exec(line, {"obj": rows})
    assert analyze(rows).payload_size < before / 1000
    whole = torch.arange(2 * MIB)
    for near in (whole, whole[: MIB + MIB // 2], whole.reshape(2, MIB).t(), whole.float(), whole.bool()):
        assert both({"x": near}, "FC305") == {}


def test_306_arrow_slices():
    pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    numbers = pa.array(range(MIB))
    for whole in (numbers, pa.table({"n": numbers}), pa.array([f"text {k}" for k in range(MIB)])):
        rows = {"head": whole.slice(5, 10)}
        line = both(rows, "FC306")["obj['head']"]
        before = analyze(rows).payload_size
        exec(line, {"obj": rows, "pa": pa})
        assert analyze(rows).payload_size < before / 100
        assert both(rows, "FC306") == {}
        assert both({"all": whole}, "FC306") == {}


def test_307_object_arrays():
    config = {"x": np.array([k / 7 for k in range(MIB // 4)], dtype=object)}
    line = both(config, "FC307")["obj['x']"]
    before = analyze(config).payload_size
    exec(line, {"obj": config})
    assert analyze(config).payload_size < before
    assert both(config, "FC307") == {}
    assert both({"x": np.array(["a", None], dtype=object)}, "FC307") == {}


def test_308_lists_of_floats():
    config = {"x": [k / 7 for k in range(MIB // 4)]}
    line = both(config, "FC308")["obj['x']"]
    before = analyze(config).payload_size
    exec(line, {"obj": config, "np": np})
    assert analyze(config).payload_size < before
    assert both(config, "FC308") == {}
    assert both({"ints": list(range(MIB)), "mixed": [0.5, "x"] * MIB, "short": [0.5] * 100}, "FC308") == {}


def test_309_float64_that_fits_float32():
    rng = np.random.default_rng(0)
    config = {"x": rng.standard_normal(MIB, dtype=np.float32).astype(float)}
    line = found(analyze(config), "FC309")["obj['x']"]
    before = analyze(config).payload_size
    exec(line, {"obj": config, "np": np})
    assert analyze(config).payload_size < 0.51 * before
    for near in (rng.standard_normal(MIB), np.zeros(MIB), np.arange(MIB).astype(float), np.full(MIB, np.nan)):
        assert found(analyze({"x": near}), "FC309") == {}


def test_310_code_of_an_installed_module_by_value():
    import pluggy

    line = None
    cloudpickle.register_pickle_by_value(pluggy)
    try:
        report = analyze({"c": pluggy.PluginManager})
        line = next(iter(found(report, "FC310").values()))
        assert "pluggy" in line
    finally:
        cloudpickle.unregister_pickle_by_value(pluggy)
    after = analyze({"c": pluggy.PluginManager})
    assert found(after, "FC310") == {}
    assert after.payload_size < report.payload_size / 10


def test_311_globals_behind_helpers():
    data = np.arange(MIB) * 11
    made = script("def look_up(k): return data[k]\ndef train(config): return look_up(3)", data=data)
    assert both(made.train, "FC311") == {
        "train<global look_up><global data>": "look_up(…, data): give it `data` as an argument"
    }
    assert found(analyze(made.train), "FC301") == {}
    assert both(made.look_up, "FC311") == {}
    better = script("def look_up(k, data): return data[k]\ndef train(config, data): return look_up(3, data)")
    assert analyze(better.train).payload_size < analyze(made.train).payload_size / 1000


def test_312_tune_exports_twice():
    data = np.arange(MIB) * 13
    made = script("def train(config): return data\ndef step(x): return data\ndef tiny(config): return 1", data=data)
    assert both(made.train, "FC312") == {"train": "tune.with_parameters(train, data=data)"}
    assert both(made.step, "FC312") == {}
    assert both(made.tiny, "FC312") == {}


LONG_CODE = """
def make(k):
    def job(x):
        {}
        return x + k
    return job
"""


def test_313_docstrings_and_line_tables(tmp_path):
    text = '\'\'\'' + "What it does, at length. " * 400 + '\'\'\''
    made = [script(LONG_CODE.format(text)).make(k) for k in range(5)]
    report = analyze(made)
    line = found(report, "FC313")["obj"]
    assert line == "python -OO -X no_debug_ranges, or install the code on the workers"
    assert found(scan(fastcap.dumps(made)), "FC313") == found(report, "FC313")
    plain = [script(LONG_CODE.format("pass")).make(k) for k in range(5)]
    assert found(analyze(plain), "FC313") == {}
    assert found(analyze([*made, bytes(MIB)]), "FC313") == {}  # a small share
    assert found(analyze([text]), "FC313") == {}  # no code
    # what the line says
    job = LONG_CODE.format(text) + "import cloudpickle\nprint(len(cloudpickle.dumps(make(1))))"
    (tmp_path / "job.py").write_text(job)
    sizes = [int(run_python(*options, tmp_path / "job.py")) for options in ((), ("-OO", "-X", "no_debug_ranges"))]
    assert sizes[1] < sizes[0] / 4


def run_python(*arguments):
    return subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.PIPE, timeout=60).stdout


def test_every_rule_has_a_test():
    names = ("test_rules.py", "test_handles.py", "test_fidelity.py")
    text = "".join(pathlib.Path(__file__).with_name(name).read_text(encoding="utf-8") for name in names)
    missing = [code for code in RULES if code not in text]
    assert missing == []


def test_thresholds_follow_min_size():
    from fastcap.report import ViewOptions

    config = {"x": [k / 7 for k in range(20_000)]}
    assert found(analyze(config), "FC308") == {}
    assert list(found(analyze(config, options=ViewOptions(min_size=100_000)), "FC308")) == ["obj['x']"]
