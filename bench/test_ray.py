"""What exports cost under `fastcap.ray.install`, and what Ray pickles faster: in one process, in turns.

By processor time: what Ray's other processes do is none of it, and the machine may do something else in between.
"""

import datetime
import time

import numpy as np
import pytest

from bench import targets

ray = pytest.importorskip("ray", reason="Ray is not installed")

import fastcap.ray  # noqa: E402

SIZE = 800_000_000


@pytest.fixture(scope="module")
def cluster():
    ray.init("local", num_cpus=1, object_store_memory=int(2.2 * SIZE), include_dashboard=False, logging_level="ERROR")
    yield
    fastcap.ray.uninstall()
    ray.shutdown()


def in_turns(ledger, workload, contenders, rounds):
    """``contenders`` are functions that do their work and return the seconds of it; the first round is not counted."""
    for number in range(rounds + 1):
        for name, run in list(contenders.items())[:: 1 if number % 2 else -1]:
            seconds = run()
            if number:
                ledger.seconds.setdefault((workload, name), []).append(seconds)


def timed(work, loops=1):
    start = time.process_time()
    for _ in range(loops):
        work()
    return (time.process_time() - start) / loops


def first_call(function):
    """The seconds in which a new remote function is exported and a task submitted."""
    remote = ray.remote(function)
    results = []
    seconds = timed(lambda: results.append(remote.remote()))
    ray.get(results)
    return seconds


def let_go():
    time.sleep(2)  # the raylet is told once a second


def test_export_of_a_large_function(cluster, ledger):
    data = np.random.default_rng(0).random(SIZE // 8)

    def make(thing):
        def use():
            return len(thing)

        return use

    def slim():
        with fastcap.ray.installed():
            seconds = first_call(make(data))
            assert fastcap.ray.report().size > SIZE
        let_go()
        return seconds

    def put_and_small():
        refs = []
        seconds = timed(lambda: refs.append(ray.put(data))) + first_call(make([1]))
        refs.clear()
        let_go()
        return seconds

    in_turns(ledger, targets.RAY_LARGE, {"slim": slim, "put and small": put_and_small}, 5)


def small_function():
    factor, names = 3, ["loss", "accuracy"]

    def train(config):
        return {name: factor * config[name] for name in names}

    return train


def installed(settings, work, loops):
    def run():
        if settings is None:
            return timed(work, loops)
        with fastcap.ray.installed(**settings):
            work()
            return timed(work, loops)

    return run


CHOICES = {"Ray": None, "installed, not native": {"native": False}, "installed": {}}


def test_exports_of_small_functions(cluster, ledger):
    import ray.remote_function as module

    function = small_function()

    def export():
        module.pickle_dumps(function, "cannot be pickled")

    contenders = {name: installed(settings, export, 2000) for name, settings in CHOICES.items()}
    in_turns(ledger, targets.RAY_SMALL, contenders, 9)


def test_put_of_datetimes(cluster, ledger):
    """Ray packs plain dicts and lists by itself; what is in them beyond text and numbers it pickles."""
    start = datetime.datetime(2024, 1, 1)
    times = [start + datetime.timedelta(seconds=i) for i in range(20_000)]

    def put():
        ray.put(times)

    contenders = {name: installed(settings, put, 5) for name, settings in CHOICES.items()}
    in_turns(ledger, targets.RAY_PUT, contenders, 7)


class Event:
    def __init__(self, number):
        self.number = number
        self.text = f"event {number}"


def test_put_of_instances(cluster, ledger):
    events = [Event(i) for i in range(20_000)]

    def put():
        ray.put(events)

    contenders = {name: installed(settings, put, 5) for name, settings in CHOICES.items()}
    in_turns(ledger, targets.RAY_INSTANCES, contenders, 7)
