"""How Ray fails without fastcap, and what it says with it: against a real, small Ray whose limits are small, too."""

import os
import threading

import numpy as np
import pytest

ray = pytest.importorskip("ray", reason="Ray is not installed")
tune = pytest.importorskip("ray.tune", reason="Ray Tune is not installed")

import fastcap.ray  # noqa: E402

TITLE = "fastcap on what is in it:"
RESULTS = "results"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    ray.init(
        num_cpus=2, object_store_memory=200 << 20, include_dashboard=False, logging_level="ERROR", log_to_driver=False
    )
    yield str(tmp_path_factory.mktemp(RESULTS))
    ray.shutdown()


@pytest.fixture(autouse=True)
def small_limits(cluster, monkeypatch):
    """Ray reads them from this module whenever it looks."""
    constants = ray._private.ray_constants
    monkeypatch.setattr(constants, "FUNCTION_SIZE_WARN_THRESHOLD", 200_000)
    monkeypatch.setattr(constants, "FUNCTION_SIZE_ERROR_THRESHOLD", 1_000_000)
    yield
    fastcap.ray.uninstall()


class Trainer:
    """The first case of this project: a function that needs a number of its trainer takes all of it along."""

    def __init__(self, size):
        self.data = np.zeros(size // 8)
        self.rate = 0.5

    def make(self):
        def train_func(config):
            return {"loss": self.rate * config.get("x", 1) + float(self.data.sum())}

        return train_func


Trainer.__module__ = "__main__"


def run_tuner(trainable, cluster, num_samples=1, **settings):
    config = tune.RunConfig(storage_path=cluster, verbose=0)
    tune_config = tune.TuneConfig(num_samples=num_samples, **settings)
    return tune.Tuner(trainable, tune_config=tune_config, run_config=config).fit()


def failure(function, *errors):
    with pytest.raises(errors) as caught:
        function()
    return caught.value


def in_closure(thing):
    def use():
        return thing

    return use


def as_remote_function(size):
    return ray.remote(Trainer(size).make()).remote({})


def as_actor(size):
    function = Trainer(size).make()

    @ray.remote
    class Worker:
        def run(self):
            return function({})

    return Worker.remote()


@pytest.mark.parametrize("export", [as_remote_function, as_actor])
@pytest.mark.parametrize("explain", [False, True])
def test_too_large(export, explain):
    if explain:
        fastcap.ray.install(slim=False)
    error = failure(lambda: export(2_000_000), ValueError)
    assert type(error) is ValueError
    message = str(error)
    assert "is too large (1 MiB > FUNCTION_SIZE_ERROR_THRESHOLD=0 MiB)" in message
    assert (TITLE in message) is explain
    if explain:
        assert "<closure self>.data" in message.replace("\n      ", "")
        assert "ndarray float64 (250000,)" in message
        assert "1.9 MiB" in message
        assert "Trainer captured as `self` at " in message
        assert f"{os.path.basename(__file__)}:" in message
        assert "instead: " in message


def test_only_what_trips_is_looked_at(monkeypatch):
    fastcap.ray.install(slim=False)
    monkeypatch.setattr(fastcap, "scan", lambda *args: 1 / 0)
    monkeypatch.setattr(fastcap, "analyze", lambda *args: 1 / 0)
    assert ray.get(as_remote_function(100_000)) == {"loss": 0.5}
    with pytest.raises(ZeroDivisionError):
        as_remote_function(2_000_000)


@pytest.mark.parametrize("explain", [False, True])
def test_warnings(explain, monkeypatch):
    pushed = []
    monkeypatch.setattr(
        ray._private.utils, "push_error_to_driver", lambda worker, kind, message, job_id=None: pushed.append(message)
    )
    if explain:
        fastcap.ray.install(slim=False)
    assert ray.get(as_remote_function(400_000)) == {"loss": 0.5}
    assert len(pushed) == 1
    assert "is very large" in pushed[0]
    assert ("<closure self>.data" in pushed[0]) is explain
    if explain:
        ray._private.utils.push_error_to_driver(None, "other", "of something else")
        assert pushed[1] == "of something else"


@pytest.mark.parametrize("explain", [False, True])
@pytest.mark.parametrize("num_samples", [1, 2])
def test_tune_loses_its_actor(explain, num_samples, cluster):
    """Ray 2.60 says nothing but that the actor is not managed."""
    if explain:
        fastcap.ray.install(slim=False)
    error = failure(lambda: run_tuner(Trainer(2_000_000).make(), cluster, num_samples), ValueError)
    message = str(error)
    assert message.startswith("Tracked actor is not managed by this event manager")
    assert ("The actor ImplicitFunc is too large" in message) is explain
    assert ("<closure self>.data" in message) is explain


@pytest.mark.parametrize("explain", [False, True])
def test_too_large_for_grpc(explain, cluster, monkeypatch):
    import ray.tune.registry as registry
    from ray.exceptions import RpcError

    own_put = registry._internal_kv_put

    def put(key, value, **options):
        if len(value) > 1_000_000:
            raise RpcError("Sent message larger than max (800008883 vs. 536870912)", rpc_code=8)
        return own_put(key, value, **options)

    monkeypatch.setattr(registry, "_internal_kv_put", put)
    if explain:
        fastcap.ray.install(slim=False)
    error = failure(lambda: run_tuner(Trainer(2_000_000).make(), cluster), tune.TuneError)
    assert "too large for grpc resource limit" in str(error)
    assert "larger than max (800008883 vs. 536870912)" in str(error)
    assert ("<closure self>.data" in str(error)) is explain
    registry._global_registry._to_flush.clear()


UNPICKLABLE = {"names": ["a"], "lock": threading.Lock()}


def use_in_function():
    ray.remote(in_closure(UNPICKLABLE)).remote()


def use_in_actor():
    class Worker:
        things = UNPICKLABLE

    ray.remote(Worker).remote()


def use_in_put():
    ray.put([UNPICKLABLE])


def use_as_argument():
    ray.remote(lambda x: 1).remote(UNPICKLABLE)


def use_in_tuner():
    tune.Tuner(lambda config: UNPICKLABLE)


def use_in_registry():
    tune.register_trainable("broken", lambda config: UNPICKLABLE)


@pytest.mark.parametrize(
    "use", [use_in_function, use_in_actor, use_in_put, use_as_argument, use_in_tuner, use_in_registry]
)
def test_what_cannot_be_pickled(use):
    plain = failure(use, TypeError)
    with fastcap.ray.installed():
        explained = failure(use, TypeError)
    assert type(explained) is type(plain)
    assert TITLE not in str(plain)
    assert TITLE in str(explained)
    message = str(explained).replace("\n      ", "")
    assert "FC101" in message
    assert "['lock']" in message
    with fastcap.ray.installed(explain=False):
        assert TITLE not in str(failure(use, TypeError))


def test_verdict_on_what_slimming_leaves(cluster):
    """An instance of somebody's class stays, and is named."""

    class Row:
        def __init__(self, number):
            self.number = number

    Row.__module__ = "__main__"
    table = [Row(i) for i in range(100_000)]
    with fastcap.ray.installed():
        error = failure(lambda: ray.remote(in_closure(table)).remote(), ValueError)
    assert "use<closure thing>" in str(error)
    assert "list of 100,000" in str(error)


def test_ray_client_messages():
    client = pytest.importorskip("ray.util.client.common", reason="Ray Client is not installed")
    payload = ray.cloudpickle.dumps(Trainer(2_000_000).make())

    def check():
        client.check_oversized_function(payload, "f", "remote function", None)

    assert TITLE not in str(failure(check, ValueError))
    with fastcap.ray.installed():
        assert "<closure self>.data" in str(failure(check, ValueError))
