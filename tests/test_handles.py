"""Ray's handles: found in live objects without a trace in Ray, and in files that Ray wrote."""

import functools
import pickle
import subprocess
import sys

import pytest

import fastcap
from fastcap import analyze, scan

ray = pytest.importorskip("ray", reason="Ray is not installed")


@pytest.fixture(scope="module")
def cluster():
    ray.init(num_cpus=1, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
    yield ray
    ray.shutdown()


@pytest.fixture(scope="module")
def actor(cluster):
    @ray.remote(num_cpus=0)
    class Tracker:
        def ping(self):
            return "pong"

    made = Tracker.remote()
    assert ray.get(made.ping.remote()) == "pong"
    return made


@pytest.fixture(scope="module")
def reference(cluster):
    return ray.put(b"x" * 1000)


class Callback:
    def __init__(self, **attributes):
        self.__dict__.update(attributes)


def found(report):
    """path -> (code, severity) of the findings about handles."""
    return {row.path: (row.code, row.severity) for row in report.findings if row.code in ("FC201", "FC202")}


def in_closure(thing):
    def train(config):
        return thing

    return train


def places(thing):
    """(object, path of the thing in it)"""
    yield {"config": {"tracker": thing}}, "obj['config']['tracker']"
    yield Callback(tracker=thing), "obj.tracker"
    yield [1, (thing, 2)], "obj[1][0]"
    yield in_closure(thing), "train<closure thing>"
    yield functools.partial(print, key=thing), "obj<keyword key>"


@pytest.mark.parametrize("flavor", ["cloudpickle", "ray.cloudpickle"])
def test_actor_handles(actor, flavor):
    for obj, path in places(actor):
        assert found(analyze(obj, flavor=flavor)) == {path: ("FC201", "warning")}
        assert found(scan(fastcap.dumps(obj, flavor=flavor))) == {path: ("FC201", "error")}


@pytest.mark.parametrize("flavor", ["cloudpickle", "ray.cloudpickle"])
def test_object_references(reference, flavor):
    for obj, path in places(reference):
        assert found(analyze(obj, flavor=flavor)) == {path: ("FC202", "warning")}
        assert found(scan(fastcap.dumps(obj, flavor=flavor))) == {path: ("FC202", "error")}


def test_handles_inside_of_library_objects(cluster, actor, reference):
    from ray import tune
    from ray.util.actor_pool import ActorPool
    from ray.util.queue import Queue

    def train(config, data=None):
        return data

    obj = {"q": Queue(actor_options={"num_cpus": 0}), "pool": ActorPool([actor]), "method": actor.ping,
           "t": tune.with_parameters(train, data=[1, 2, 3])}  # fmt: skip
    for report in (analyze(obj), scan(ray.cloudpickle.dumps(obj))):
        paths = found(report)
        assert "obj['q'].actor" in paths
        assert "obj['pool']._idle_actors[0]" in paths
        assert "obj['method'].actor" in paths or "obj['pool']._idle_actors[0]" in paths
        assert any(path.startswith("obj['t']<closure parameter_registry>.references") for path in paths)


def test_replacements(cluster, actor, reference):
    lines = {row.path: row.replacement for row in analyze({"tracker": actor, "data": reference}, name="cfg").findings}
    assert lines["cfg['tracker']"] == 'tracker = ray.get_actor("tracker")  # by name, where it is used'
    assert lines["cfg['data']"] == "cfg['data'] = ray.get(cfg['data'])  # the value instead of the reference"
    cfg = {"data": reference}
    exec(lines["cfg['data']"], {"cfg": cfg, "ray": ray})
    assert found(analyze(cfg)) == {}


def test_what_only_looks_like_a_handle(cluster):
    """Definitions are exported anew in each cluster; ids and classes are no handles."""

    @ray.remote(num_cpus=0)
    def double(x):
        return 2 * x

    @ray.remote(num_cpus=0)
    class Acc:
        def add(self, x):
            return x

    obj = {"fn": double, "cls": Acc, "id": ray.get_runtime_context().get_node_id(), "types": [ray.ObjectRef]}
    assert found(analyze(obj)) == {}
    assert found(scan(ray.cloudpickle.dumps(obj))) == {}
    assert [row for row in analyze(obj).findings if row.severity == "error"] == []


def counts():
    """Local and submitted references by object, as the core worker has them."""
    return dict(ray._private.worker.global_worker.core_worker.get_all_reference_counts())


def contained():
    """References that a serialization in this thread has noticed, and those that were pinned for good."""
    context = ray._private.worker.global_worker.get_serialization_context()
    pinned = getattr(ray._private.worker.global_worker, "_object_pins", None)
    return set(getattr(context._thread_local, "object_refs", ())), repr(pinned)


def test_nothing_changes_in_ray(cluster, actor, reference):
    obj = {"actors": [actor, Callback(a=actor)], "refs": [reference, in_closure(reference)]}
    before = counts(), contained(), ray.available_resources().get("object_store_memory")
    for _ in range(3):
        for flavor in ("cloudpickle", "ray.cloudpickle"):
            report = analyze(obj, flavor=flavor)
            assert len(found(report)) == 2  # the others are the same objects again
            del report
    assert (counts(), contained(), ray.available_resources().get("object_store_memory")) == before
    # The comparison can tell: Ray's own pickling leaves a trace.
    ray.cloudpickle.dumps(obj)
    assert (counts(), contained()) != before[:2]


def test_handles_in_files_need_no_ray(cluster, actor, reference):
    stream = ray.cloudpickle.dumps({"tracker": actor, "data": reference})
    code = (
        "import sys; sys.modules['ray'] = None\n"
        "import fastcap\n"
        f"print(*(f'{{row.code}} {{row.path}}' for row in fastcap.scan({stream!r}).findings), sep='\\n')"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    lines = set(run.stdout.splitlines())
    assert {"FC201 obj['tracker']", "FC202 obj['data']"} <= lines


def test_size_of_a_handle_is_about_right(actor, reference):
    for thing in (actor, reference):
        real = len(ray.cloudpickle.dumps(thing))
        assert 0.5 * real <= analyze(thing).payload_size <= 2 * real


# What follows puts objects into the store, and so comes after the test that nothing changes there.


def in_another_process(stream):
    """What loading a pickle comes to in a process that is in no cluster: a type's name, or that of an exception."""
    code = (
        "import pickle, sys\n"
        "try: print(type(pickle.load(sys.stdin.buffer)).__name__)\n"
        "except Exception as error: print(type(error).__name__)"
    )
    run = subprocess.run([sys.executable, "-c", code], input=stream, capture_output=True, check=True, timeout=120)
    return run.stdout.decode().strip()


def test_replacement_of_an_actor_handle(cluster):
    """The name instead of the handle: what is pickled loads anywhere, and finds the actor where there is one."""

    @ray.remote(num_cpus=0)
    class Counter:
        def ping(self):
            return "pong"

    tracker = Counter.options(name="tracker").remote()

    def job():
        return ray.get(tracker.ping.remote())

    def better():
        import ray

        tracker = None
        exec(line, namespace := {"ray": ray})
        tracker = namespace["tracker"]
        return ray.get(tracker.ping.remote())

    line = found_lines(analyze(job))["job<closure tracker>"]
    assert line == 'tracker = ray.get_actor("tracker")  # by name, where it is used'
    # no cluster at all; in another cluster it is AssertionError
    assert in_another_process(ray.cloudpickle.dumps(job)) == "RaySystemError"
    stream = ray.cloudpickle.dumps(better)
    assert found(analyze(better)) == found(scan(stream)) == {}
    assert in_another_process(stream) == "function"
    assert ray.cloudpickle.loads(stream)() == "pong"


def found_lines(report):
    return {row.path: row.replacement for row in report.findings if row.code in ("FC201", "FC202")}


def test_312_replacement_for_tune(cluster):
    """``tune.with_parameters``: the data is in the object store, and the trainable is small."""
    np = pytest.importorskip("numpy")
    tune = pytest.importorskip("ray.tune", reason="Ray Tune is not installed")
    data = np.arange(500_000)

    def train(config):
        return {"sum": int(data.sum())}

    def better(config, data=None):
        return {"sum": int(data.sum())}

    report = analyze(train, flavor="ray.cloudpickle")
    (line,) = (row.replacement for row in report.findings if row.code == "FC312")
    assert line == "tune.with_parameters(train, data=data)"
    trainable = eval(line, {"tune": tune, "train": better, "data": data})
    after = analyze(trainable, flavor="ray.cloudpickle")
    assert [row for row in after.findings if row.code == "FC312"] == []
    assert after.payload_size < report.payload_size / 100
    assert trainable({})["sum"] == int(data.sum())


def test_handles_are_edited_out(actor, reference):
    stream = fastcap.dumps({"actor": actor, "list": [actor, reference, 1]}, flavor="ray.cloudpickle")
    found = pickle.loads(fastcap.edit(stream, handles="drop"))
    assert found == {"actor": None, "list": [None, None, 1]}
    found = pickle.loads(fastcap.edit(stream, handles="placeholder"))
    assert found["actor"] is found["list"][0]
    assert (found["actor"].kind, found["actor"].id) == ("ActorHandle", actor._actor_id.hex())
    assert (found["list"][1].kind, found["list"][1].id) == ("ObjectRef", reference.hex())
    assert "Tracker" in found["actor"].reason
