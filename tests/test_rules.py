"""Each rule: what fires it, a near miss that does not, and whether the line to write instead helps."""

import pathlib
import pickle
import sys
import threading
import types

import cloudpickle
import numpy as np
import pytest

import fastcap
from fastcap import analyze, scan
from fastcap.findings import CHECKS
from fastcap.rules import RULES, describe_rules

MIB = 1 << 20
DOCS = pathlib.Path(__file__).resolve().parent.parent / "docs" / "rules.md"


def found(report, code):
    """path -> the line to write instead, for the findings of one code."""
    return {row.path: row.replacement for row in report.findings if row.code == code}


def both(obj, code):
    """The same findings about the live object and the file that its pickle makes."""
    live, file = found(analyze(obj), code), found(scan(fastcap.dumps(obj)), code)
    assert list(live) == list(file)
    return live


def script(source, **names):
    """What a script defines, as it would be in ``__main__``."""
    module = types.ModuleType("__main__")
    module.__dict__.update(names)
    exec(source, module.__dict__)
    return module


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


# --- FC102: see test_findings ----------------------------------------------------------------------------------------


def test_102_near_miss():
    deep = []
    for _ in range(100_000):
        deep = [deep]
    assert found(analyze(deep), "FC102") == {}


# --- FC2 (handles: see test_handles) ---------------------------------------------------------------------------------


def test_203_names_in_main(monkeypatch):
    made = script("class Config:\n    pass")
    monkeypatch.setitem(sys.modules, "__main__", made)
    stream = pickle.dumps({"config": made.Config()})
    assert found(scan(stream), "FC203") == {"obj['config']": "move Config to a module that workers have"}
    # cloudpickle, as the explanation says, sends the class along
    assert both({"config": made.Config()}, "FC203") == {}


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


def test_207_memory_maps(tmp_path):
    path = tmp_path / "big.npy"
    np.save(path, np.zeros(MIB))
    mapped = {"data": np.load(path, mmap_mode="r")}
    line = found(analyze(mapped, name="mapped"), "FC207")["mapped['data']"]
    assert repr(str(path)) in line
    names = {"mapped": mapped, "np": np}
    exec(line, names)
    assert isinstance(mapped["data"], np.memmap)
    assert found(analyze({"path": str(path)}), "FC207") == {}  # where the line stands: in the code that uses it
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


def test_209_absolute_paths():
    assert list(both([pathlib.PosixPath("/data/x"), pathlib.PosixPath("data/x")], "FC209")) == ["obj[0]"]


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


def test_every_rule_has_a_test():
    text = pathlib.Path(__file__).read_text(encoding="utf-8")
    handles = pathlib.Path(__file__).with_name("test_handles.py").read_text(encoding="utf-8")
    missing = [code for code in RULES if code not in text + handles]
    assert missing == []


def test_thresholds_follow_min_size():
    from fastcap.report import ViewOptions

    config = {"x": [k / 7 for k in range(20_000)]}
    assert found(analyze(config), "FC308") == {}
    assert list(found(analyze(config, options=ViewOptions(min_size=100_000)), "FC308")) == ["obj['x']"]
