"""The pytest plugin, in runs of its own: marker, fixture, settings, xdist, and what it costs who does not use it."""

import importlib.metadata
import io
import os
import pickle
import sys
import threading
from pathlib import Path

import cloudpickle
import pytest

import fastcap
from fastcap import record
from fastcap.errors import PayloadError
from fastcap.pickling import CloudPickler, NativeMixin, dump, dumps, install, uninstall, watch_dumps
from fastcap.record import recording

pytest_plugins = ["pytester"]

PACKAGE = Path(fastcap.__file__).parent.parent
INSTALLED = any(entry.value == "fastcap.pytest_plugin" for entry in importlib.metadata.entry_points(group="pytest11"))
LOAD = () if INSTALLED else ("-p", "fastcap.pytest_plugin")

TRAINER = """
import cloudpickle
import fastcap
import pytest

class Trainer:
    def __init__(self, size=3_000_000):
        self.data = bytes(size)
        self.rate = 0.1
    def make_step(self):
        def step(x):
            return x * self.rate
        return step
"""


@pytest.fixture
def run(pytester, monkeypatch):
    """Runs pytest on the given test code in another process; returns its result and its whole output."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(PACKAGE), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("COLUMNS", "110")
    # With CI or BUILD_NUMBER set, pytest repeats whole failures in its summary.
    for name in ("PYTEST_ADDOPTS", "PYTEST_PLUGINS", "FORCE_COLOR", "PYTEST_XDIST_WORKER", "CI", "BUILD_NUMBER"):
        monkeypatch.delenv(name, raising=False)

    def run(code, *arguments):
        pytester.makepyfile(test_it=TRAINER + code)
        others = ["no:cacheprovider", "no:benchmark", "no:hypothesispytest"] + ["no:xdist"] * ("-n" not in arguments)
        options = [option for name in others for option in ("-p", name)]
        result = pytester.runpytest_subprocess("--strict-markers", *options, *LOAD, *arguments)
        return result, "\n".join([*result.outlines, *result.errlines])

    return run


# ---- the marker

DUMPS = {
    "cloudpickle.dumps": "cloudpickle.dumps(obj)",
    "cloudpickle.dump": "import io; cloudpickle.dump(obj, io.BytesIO())",
    "CloudPickler": "import io; cloudpickle.CloudPickler(io.BytesIO()).dump(obj)",
    "fastcap.dumps": "fastcap.dumps(obj)",
    "fastcap.Pickler": "import io; fastcap.Pickler(io.BytesIO()).dump(obj)",
    "installed": "with fastcap.installed('cloudpickle'): cloudpickle.dumps(obj)",
    "thread": "import threading; t = threading.Thread(target=cloudpickle.dumps, args=(obj,)); t.start(); t.join()",
    "out of band": "import pickle; cloudpickle.dumps(pickle.PickleBuffer(obj.data), 5, [].append)",
    "in a try": "try: cloudpickle.dumps(obj)\n    except BaseException: pass",
}


def test_limit(run):
    code = "pytestmark = pytest.mark.limit_payload(pytest.LIMIT)\n" + "".join(
        f"def test_{number}():\n    obj = Trainer()\n    {statement}\n"
        for number, statement in enumerate(DUMPS.values())
    )
    result, output = run(code.replace("pytest.LIMIT", "'1 MiB'"))
    result.assert_outcomes(failed=len(DUMPS))
    assert output.count("\nthe test pickled a payload over its limit of 1.0 MiB\n\n2.9 MiB (3,00") == len(DUMPS)
    assert output.count(" B) pickled by cloudpickle") == len(DUMPS)
    result, _ = run(code.replace("pytest.LIMIT", "'4 MiB'"))
    result.assert_outcomes(passed=len(DUMPS))


def test_failure_is_the_report(run):
    result, output = run("""
@pytest.mark.limit_payload("1 MiB")
def test_step():
    step = Trainer().make_step()
    cloudpickle.dumps(step)
""")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines([
        "the test pickled a payload over its limit of 1.0 MiB",
        "2.9 MiB (3,0*) pickled by cloudpickle at test_it.py:17",
        "step  function test_it.py:10",
        "payload 2.9 MiB (3,0*): over limit_payload (1.0 MiB) 2.9 times",
        "*step<closure self>.data*",
        "*Trainer captured as `self` at test_it.py:10",
    ])  # fmt: skip
    assert "Traceback" not in output
    assert "fastcap/" not in output.replace(str(PACKAGE), "")


def test_each_payload_counts_by_itself(run):
    result, output = run("""
@pytest.mark.limit_payload("4 MiB")
def test_many_small():
    for _ in range(5):
        cloudpickle.dumps(Trainer())

@pytest.mark.limit_payload("1 MiB")
def test_many_big():
    for _ in range(5):
        cloudpickle.dumps(Trainer())
        cloudpickle.dumps(1)
""")
    result.assert_outcomes(passed=1, failed=1)
    assert "the test pickled 5 payloads over its limit of 1.0 MiB" in output
    assert "[2 more]" in output


def test_what_does_not_count(run):
    result, _ = run("""
@pytest.fixture
def prepared():
    return cloudpickle.dumps(Trainer())

@pytest.mark.limit_payload("1 MiB")
def test_fixtures_and_analyses(prepared, payload):
    fastcap.analyze(Trainer())
    payload.assert_under(Trainer(), "4 MiB")
    with pytest.raises(TypeError):
        cloudpickle.dumps([Trainer(), (x for x in ())])

def test_without_limit():
    cloudpickle.dumps(Trainer())
""")
    result.assert_outcomes(passed=2)


def test_failing_test_keeps_its_failure(run):
    result, output = run("""
@pytest.mark.limit_payload("1 MiB")
def test_step():
    cloudpickle.dumps(Trainer())
    assert 1 == 2, "mine"
""")
    result.assert_outcomes(failed=1)
    assert "AssertionError: mine" in output
    assert "the test pickled a payload over its limit" in output  # in a section of the failure


def test_skips_and_xfails(run):
    result, _ = run("""
@pytest.mark.limit_payload("1 MiB")
def test_skipped():
    pytest.skip("no")

@pytest.mark.xfail(strict=True)
@pytest.mark.limit_payload("1 MiB")
def test_expected():
    cloudpickle.dumps(Trainer())
""")
    result.assert_outcomes(skipped=1, xfailed=1)


def test_closest_marker_counts(run):
    result, _ = run("""
pytestmark = pytest.mark.limit_payload("1 MiB")

def test_module():
    cloudpickle.dumps(Trainer())

@pytest.mark.limit_payload("4 MiB")
def test_wider():
    cloudpickle.dumps(Trainer())

@pytest.mark.limit_payload(None)
def test_none():
    cloudpickle.dumps(Trainer())

@pytest.mark.limit_payload(4_000_000)
class TestNumbers:
    def test_number(self):
        cloudpickle.dumps(Trainer())
""")
    result.assert_outcomes(failed=1, passed=3)


def test_limit_for_all_tests(run, pytester):
    pytester.makeini("[pytest]\nfastcap_limit_payload = 1 MiB\n")
    result, output = run("""
def test_plain():
    cloudpickle.dumps(Trainer())

@pytest.mark.limit_payload(None)
def test_none():
    cloudpickle.dumps(Trainer())
""")
    result.assert_outcomes(failed=1, passed=1)
    assert "over its limit of 1.0 MiB" in output


@pytest.mark.parametrize(
    ("marker", "message"),
    [
        ("", '@pytest.mark.limit_payload: write limit_payload("1 MiB")'),
        ("()", '@pytest.mark.limit_payload: write limit_payload("1 MiB")'),
        ("('1 MiB', 2)", '@pytest.mark.limit_payload: write limit_payload("1 MiB")'),
        ("('many')", "@pytest.mark.limit_payload: 'many' is not a size"),
        ("(-1)", "@pytest.mark.limit_payload: a size cannot be negative: -1"),
    ],
)
def test_wrong_markers_fail(run, marker, message):
    result, output = run(f"@pytest.mark.limit_payload{marker}\ndef test_it():\n    pass\n")
    result.assert_outcomes(failed=1)
    assert message in output
    assert "During handling" not in output


def test_wrong_ini(run, pytester):
    pytester.makeini("[pytest]\nfastcap_limit_payload = lots\n")
    result, output = run("def test_it():\n    pass\n")
    result.assert_outcomes(failed=1)
    assert "fastcap_limit_payload: 'lots' is not a size" in output


FAKE_FLAVOR = """
import sys, types
def put_in_place(name):
    # A copy of cloudpickle that is imported only now.
    package = types.ModuleType(name)
    sys.modules[name] = package
"""


def test_copy_that_comes_too_late_is_told(run):
    result, output = run(FAKE_FLAVOR + """
@pytest.mark.limit_payload("1 MiB")
def test_late():
    put_in_place("ray.cloudpickle")
""")
    result.assert_outcomes(failed=1)
    assert "the test imported ray.cloudpickle" in output
    assert "Import it before the test runs" in output


def test_ray(run):
    pytest.importorskip("ray", reason="Ray is not installed")
    result, output = run("""
import ray.cloudpickle
@pytest.mark.limit_payload("1 MiB")
def test_export():
    ray.cloudpickle.dumps(Trainer().make_step())

@pytest.mark.limit_payload("1 MiB")
def test_object_store():
    ray.cloudpickle.dumps(Trainer(), protocol=5, buffer_callback=lambda buffer: False)

@pytest.mark.limit_payload("1 MiB", objects=True)
def test_object_store_counted():
    ray.cloudpickle.dumps(Trainer(), protocol=5, buffer_callback=lambda buffer: False)
""", "-v")  # fmt: skip
    result.assert_outcomes(failed=2, passed=1)
    assert "test_object_store PASSED" in output
    assert "pickled by ray.cloudpickle at test_it.py:" in output


def test_under_xdist(run):
    pytest.importorskip("xdist", reason="pytest-xdist is not installed")
    result, output = run("""
@pytest.mark.limit_payload("1 MiB")
def test_marker():
    cloudpickle.dumps(Trainer().make_step())

def test_fixture(payload):
    payload.assert_under(Trainer().make_step(), "1 MiB")

def test_fine(payload):
    payload.assert_under([1], "1 MiB")
""", "-n", "2")  # fmt: skip
    result.assert_outcomes(failed=2, passed=1)
    assert output.count("step<closure self>.data") >= 2
    assert "over its limit of 1.0 MiB" in output
    assert "more than max_size, 1.0 MiB" in output


# ---- the fixture


def test_assert_under(run):
    result, _ = run("""
def test_over(payload):
    payload.assert_under(Trainer().make_step(), "1 MiB", name="job")

def test_under(payload):
    report = payload.assert_under(Trainer(), 4_000_000, protocol=4)
    assert report.payload_size > 3_000_000
    assert report.protocol == 4
""")
    result.assert_outcomes(failed=1, passed=1)
    result.stdout.fnmatch_lines([
        ">*payload.assert_under(Trainer().make_step(), *",
        "E*Failed: job pickles to 2.9 MiB (3,0*), more than max_size, 1.0 MiB",
        "E*job<closure self>.data*",
        "test_it.py:15: Failed",
    ])  # fmt: skip


def test_assert_under_takes_the_size_of_the_project(run, pytester):
    code = "def test_it(payload):\n    payload.assert_under(Trainer())\n"
    result, output = run(code)
    result.assert_outcomes(failed=1)
    assert "ValueError: give a size" in output
    pytester.makepyprojecttoml('[tool.fastcap]\nmax-size = "1 MiB"\n')
    result, output = run(code)
    result.assert_outcomes(failed=1)
    assert "more than max_size, 1.0 MiB" in output
    pytester.makepyprojecttoml('[tool.fastcap]\nmax-size = "4 MiB"\n')
    run(code)[0].assert_outcomes(passed=1)


def test_assert_picklable(run):
    result, output = run("""
import threading

def test_lock(payload):
    payload.assert_picklable({"a": [threading.Lock()]})

def test_fine(payload):
    assert payload.assert_picklable(Trainer().make_step()).node_count > 5
""")
    result.assert_outcomes(failed=1, passed=1)
    assert "obj cannot be pickled" in output
    assert "lock" in output


# Whatever rules there are: what they find is put in the place of findings here.
PORTABLE = """
from dataclasses import replace
from fastcap import checking
from fastcap.report import Finding

ROWS = [
    Finding("FC299", "error", "obj['handle']", 0, "an actor handle is dead in another cluster"),
    Finding("FC298", "warning", "obj['x']", 0, "this is a waste"),
]

@pytest.fixture(autouse=True)
def rows(monkeypatch):
    def analyze(*args, **options):
        report = fastcap.analyze(*args, **options)
        details = replace(report.details, findings=tuple(ROWS))
        return report.changed(make_details=lambda: details)
    monkeypatch.setattr(checking, "analyze", analyze)

def test_portable(payload):
    payload.assert_portable({})

def test_picklable(payload):
    assert len(payload.assert_picklable({}).findings) == 2
"""


def test_assert_portable(run, pytester):
    result, output = run(PORTABLE)
    result.assert_outcomes(failed=1, passed=1)
    assert "obj will not work in another process, for one part of it" in output
    assert "FC299" in output
    assert "FC298" not in output.partition("Findings")[2]
    pytester.makepyprojecttoml('[tool.fastcap]\nignore = ["FC299"]\n')
    run(PORTABLE)[0].assert_outcomes(passed=2)


def test_flavor(run, pytester):
    pytest.importorskip("joblib.externals.cloudpickle", reason="joblib and its cloudpickle are not installed")
    code = """
class Marked:
    pass

def test_it(payload):
    import joblib.externals.cloudpickle as flavor
    flavor.CloudPickler.dispatch[Marked] = lambda obj: (str, ("m" * 5000,))
    assert (payload.assert_picklable(Marked()).payload_size > 5000) is {expected}
    assert payload.assert_picklable(Marked(), flavor="joblib.externals.cloudpickle").payload_size > 5000
"""
    run(code.replace("{expected}", "False"))[0].assert_outcomes(passed=1)
    pytester.makeini("[pytest]\nfastcap_flavor = joblib.externals.cloudpickle\n")
    run(code.replace("{expected}", "True"))[0].assert_outcomes(passed=1)


# ---- what it costs


def test_nothing_is_loaded_by_a_run_that_does_not_use_it(pytester, run):
    pytester.makeconftest("""
import sys
def pytest_unconfigure():
    libraries = ("fastcap", "cloudpickle", "rich", "numpy")
    print("loaded:", *(name for name in sys.modules if name.split(".")[0] in libraries))
""")
    (pytester.path / "plain").mkdir()
    (pytester.path / "plain" / "test_plain.py").write_text("def test_plain():\n    pass\n")
    result, _ = run("", "-s", str(pytester.path / "plain"))
    result.assert_outcomes(passed=1)
    loaded = next(line for line in result.outlines if "loaded:" in line).partition("loaded:")[2].split()
    assert sorted(loaded) == ["fastcap", "fastcap.errors", "fastcap.pytest_plugin"]


def test_marker_and_settings_are_listed(run):
    _, output = run("", "--markers")
    assert "@pytest.mark.limit_payload(size, *, objects=False): fail if the test pickles anything bigger" in output
    _, output = run("", "--fixtures")
    assert 'payload.assert_under(obj, "1 MiB")' in output


# ---- recording, on which the marker stands


def test_recording_is_exact():
    obj = {"a": bytes(50_000), "b": [1, 2]}
    with recording() as found:
        data = cloudpickle.dumps(obj)
        again = dumps(obj)
        file = io.BytesIO()
        dump(obj, file)
        CloudPickler(file).dump(obj)
        cloudpickle.CloudPickler(file).dump(obj)
    assert data == again
    assert file.getvalue() == 3 * data
    assert [each.stream_size for each in found.dumps] == [len(data)] * 5
    assert [each.report.payload_size for each in found.dumps] == [len(data)] * 5
    assert all(each.where.startswith(__file__) for each in found.dumps)
    cloudpickle.dumps(obj)
    assert len(found.dumps) == 5


def test_recording_counts_out_of_band_buffers():
    buffers = []
    with recording() as found:
        dumps([pickle.PickleBuffer(bytes(1000)), pickle.PickleBuffer(bytes(10))], 5, buffers.append)
        dumps(pickle.PickleBuffer(bytes(1000)), 5, lambda buffer: True)
    assert len(buffers) == 2
    first, second = found.dumps
    assert (first.buffer_size, first.has_buffer_callback) == (1010, True)
    assert first.report.payload_size == first.payload_size
    assert second.buffer_size == 0
    assert second.stream_size > 1000


def test_recording_of_several_dumps_by_one_pickler():
    shared = [bytes(5000)]
    for make in (CloudPickler, cloudpickle.CloudPickler):
        file = io.BytesIO()
        with recording() as found:
            pickler = make(file)
            pickler.dump(shared)
            first_size = file.tell()
            pickler.dump([shared])
        assert [each.stream_size for each in found.dumps] == [first_size, file.tell() - first_size]
        assert [each.report.payload_size for each in found.dumps] == [each.payload_size for each in found.dumps]
        pickler.dump(shared)  # later, and not recorded
        assert len(found.dumps) == 2


class Mixed(NativeMixin, cloudpickle.CloudPickler):
    pass


def test_recording_of_subclasses():
    class Mine(cloudpickle.CloudPickler):
        def reducer_override(self, obj):
            return super().reducer_override(obj)

    for make in (Mine, Mixed):
        with recording() as found:
            make(io.BytesIO()).dump([1, 2])
        assert len(found.dumps) == 1
        assert found.dumps[0].report.payload_size == found.dumps[0].payload_size


class Refusing:
    def write(self, data):
        raise PayloadError("not for me", 0)

    def finish(self):
        raise PayloadError("not for me", 0)


def test_what_cannot_be_scanned_is_pickled_all_the_same(monkeypatch):
    monkeypatch.setattr(record, "Scanner", Refusing)
    with recording() as found:
        data = cloudpickle.dumps([1])
    assert pickle.loads(data) == [1]
    assert [(each.stream_size, each.report) for each in found.dumps] == [(len(data), None)]


class Nested:
    def __reduce__(self):
        return bytes, (cloudpickle.dumps(bytes(3000)),)


def test_nested_and_failing_dumps():
    with recording() as found:
        cloudpickle.dumps(Nested())
        with pytest.raises(TypeError):
            cloudpickle.dumps([bytes(10), threading.Lock()])
        cloudpickle.dumps(1)
    inner, outer, last = (each.payload_size for each in found.dumps)
    assert 3000 < inner < outer
    assert last < 100


def test_recordings_can_be_nested_and_installation_is_undone():
    own = cloudpickle.CloudPickler.__dict__["dump"]
    with recording() as outer:
        with recording(min_size=1000) as inner:
            cloudpickle.dumps(1)
            cloudpickle.dumps(bytes(2000))
        cloudpickle.dumps(2)
    assert (len(outer.dumps), len(inner.dumps)) == (3, 1)
    assert cloudpickle.CloudPickler.__dict__["dump"] is own
    install("cloudpickle")
    try:
        with recording() as found:
            cloudpickle.dumps(1)
        assert len(found.dumps) == 1
        assert cloudpickle.CloudPickler.__dict__["dump"] is not own
    finally:
        uninstall("cloudpickle")


def test_recording_in_many_threads():
    def work(size):
        for _ in range(50):
            cloudpickle.dumps(bytes(size))

    with recording() as found:
        threads = [threading.Thread(target=work, args=(1000 * number,)) for number in range(1, 5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    sizes = sorted(each.payload_size // 1000 for each in found.dumps)
    assert sizes == sorted(number for number in range(1, 5) for _ in range(50))
    assert all(each.report.payload_size == each.payload_size for each in found.dumps)


def test_a_watcher_may_decline():
    seen = []
    with watch_dumps(lambda obj, flavor, has_buffer_callback, file: seen.append((obj, flavor, has_buffer_callback))):
        data = dumps([1])
    assert pickle.loads(data) == [1]
    assert seen == [([1], "cloudpickle", False)]
    assert sys.getrefcount(seen[0][0]) < 4
