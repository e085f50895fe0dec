"""The case that this project began with, at its real size: each run in a process and a cluster of its own."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import fastcap

pytest.importorskip("ray", reason="Ray is not installed")
pytest.importorskip("ray.tune", reason="Ray Tune is not installed")

ROOT = Path(__file__).parent.parent

PROGRAM = """
import gc, json, os, sys, threading, time
import numpy as np
import ray
from ray import tune
import fastcap.ray

mode, size, num_samples, storage = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]


def anonymous():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("RssAnon"))


class Trainer:
    def __init__(self):
        self.data = np.ones(size // 8)
        self.rate = 0.5

    def make(self):
        def train_func(config):
            with open("/proc/self/status") as file:
                own = next(int(line.split()[1]) * 1024 for line in file if line.startswith("RssAnon"))
            return {"loss": self.rate + float(self.data[:1000].sum() + self.data[-1000:].sum()), "anonymous": own}

        return train_func


ray.init("local", num_cpus=2, object_store_memory=1_500_000_000, include_dashboard=False, logging_level="ERROR")
sizes = []
import ray.tune.registry as registry
manager = ray._private.function_manager
if mode != "plain":
    fastcap.ray.install(slim=mode == "slim")
own_check, own_put = manager.check_oversized_function, registry._internal_kv_put
manager.check_oversized_function = lambda pickled, *rest: (sizes.append(len(pickled)), own_check(pickled, *rest))[1]
registry._internal_kv_put = lambda key, value, **rest: (sizes.append(len(value)), own_put(key, value, **rest))[1]
tune.Tuner(lambda config: {"loss": 1}, run_config=tune.RunConfig(storage_path=storage, verbose=0)).fit()  # imports
sizes.clear()
trainer = Trainer()
before, peak, done = anonymous(), [0], threading.Event()


def watch():
    while not done.wait(0.002):
        peak[0] = max(peak[0], anonymous())


threading.Thread(target=watch, daemon=True).start()
answer = {}
try:
    results = tune.Tuner(
        trainer.make(), tune_config=tune.TuneConfig(num_samples=num_samples),
        run_config=tune.RunConfig(storage_path=storage, verbose=0),
    ).fit()
    answer["losses"] = [result.metrics["loss"] for result in results]
    answer["workers"] = [result.metrics["anonymous"] for result in results]
except Exception as error:
    answer["error"] = type(error).__name__
    answer["message"] = str(error)
done.set()
answer["growth"] = peak[0] - before
answer["sizes"] = sizes
answer["entries"] = fastcap.ray.report().to_dict()["entries"]
with open(storage + "/answer.json", "w") as file:
    json.dump(answer, file)
"""


def run(mode, size, num_samples, folder):
    script = folder / "program.py"
    script.write_text(PROGRAM)
    environment = {**os.environ, "PYTHONPATH": str(Path(fastcap.__file__).parent.parent)}
    done = subprocess.run(
        [sys.executable, str(script), mode, str(size), str(num_samples), str(folder)],
        capture_output=True, text=True, timeout=280, env=environment, cwd=folder,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((folder / "answer.json").read_text())


SIZE = 800_000_000
FOUND = "ndarray float64 (100000000,)"


@pytest.mark.long
@pytest.mark.parametrize("num_samples", [1, 2])
def test_slimmed(num_samples, tmp_path):
    answer = run("slim", SIZE, num_samples, tmp_path)
    assert answer["losses"] == [2000.5] * num_samples
    assert len(answer["sizes"]) >= 2
    assert max(answer["sizes"]) < 100_000
    (entry,) = answer["entries"]
    assert entry["size"] >= SIZE
    assert entry["what"] == FOUND
    assert answer["growth"] < 0.1 * SIZE  # beyond the store's copy, which is no memory of the driver's own
    assert max(answer["workers"]) < 0.5 * SIZE  # they share the store's


@pytest.mark.long
@pytest.mark.parametrize(("size", "error"), [(SIZE, "TuneError"), (200_000_000, "ValueError")])
def test_as_ray_fails(size, error, tmp_path):
    """Beyond 512 MiB in the registry, below that in the actor class."""
    answers = {}
    for mode in ("plain", "explain"):
        folder = tmp_path / mode
        folder.mkdir()
        answers[mode] = run(mode, size, 1, folder)
        assert answers[mode]["error"] == error
    assert "ndarray" not in answers["plain"]["message"]
    message = answers["explain"]["message"].replace("\n    ", " ")
    assert message.startswith(answers["plain"]["message"][:40])
    assert "<closure self>.data" in message
    assert f"ndarray float64 ({size // 8},)" in message
    assert "program.py:" in message


SESSIONS = """
import threading
import numpy as np
import ray
import fastcap.ray

data = np.ones(1_000_000)


def start():
    ray.init("local", num_cpus=2, object_store_memory=200 << 20, include_dashboard=False, logging_level="ERROR")


def make(number):
    def use():
        return number + data.sum()

    return ray.remote(use)


@ray.remote
def kept():
    return data.sum()


fastcap.ray.install()
start()
assert ray.get(kept.remote()) == 1_000_000
first = fastcap.ray.report().entries[0].ref
results, functions = [], [make(number) for number in range(8)]
threads = [threading.Thread(target=lambda each=each: results.append(ray.get(each.remote()))) for each in functions]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert sorted(results) == [number + 1_000_000 for number in range(8)]
(entry,) = fastcap.ray.report().entries
assert entry.ref == first and entry.export_count == 9, entry
ray.shutdown()
assert fastcap.ray.report().entries == ()
start()
assert fastcap.ray.report().entries == ()
assert ray.get(kept.remote()) == 1_000_000  # put anew
(entry,) = fastcap.ray.report().entries
assert entry.ref != first or entry.export_count == 1
fastcap.ray.uninstall()
fastcap.ray.install("1 KiB")
assert ray.get(kept.options(num_cpus=0.5).remote()) == 1_000_000
assert len(kept._pickled_function) < 10_000
del functions
"""


@pytest.mark.long
def test_two_sessions_and_many_threads(tmp_path):
    script = tmp_path / "sessions.py"
    script.write_text(SESSIONS)
    environment = {**os.environ, "PYTHONPATH": str(Path(fastcap.__file__).parent.parent)}
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=280, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr


CLIENT = """
import subprocess, sys
import numpy as np
import ray
import fastcap.ray

if sys.argv[1] == "server":
    ray.init("local", num_cpus=1, object_store_memory=200 << 20, include_dashboard=False, logging_level="ERROR")
    import ray.util.client.server.server as servers
    server = servers.serve("127.0.0.1", int(sys.argv[2]))
    code = subprocess.call([sys.executable, __file__, "client", sys.argv[2]])
    server.stop(0)
    raise SystemExit(code)
constants = ray._private.ray_constants
constants.FUNCTION_SIZE_WARN_THRESHOLD = constants.FUNCTION_SIZE_ERROR_THRESHOLD = 10**7
fastcap.ray.install()
ray.init(f"ray://127.0.0.1:{sys.argv[2]}")
large, fitting = np.ones(2_000_000), np.ones(400_000)


@ray.remote
def use_large():
    return large.sum()


@ray.remote
def use_fitting():
    return fitting.sum()


try:
    use_large.remote()
except ValueError as error:
    assert "is too large" in str(error) and "use_large<global large>" in str(error), error
else:
    raise SystemExit("no error")
assert ray.get(use_fitting.remote()) == 400_000
assert fastcap.ray.report().entries == ()
try:
    fastcap.ray.with_captures(lambda config: fitting)
except fastcap.FastcapError as error:
    assert "Ray Client" in str(error), error
else:
    raise SystemExit("no error")
"""


@pytest.mark.long
def test_ray_client(tmp_path):
    pytest.importorskip("grpc", reason="Ray Client needs grpcio")
    script = tmp_path / "client.py"
    script.write_text(CLIENT)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {**os.environ, "PYTHONPATH": str(Path(fastcap.__file__).parent.parent)}
    done = subprocess.run(
        [sys.executable, str(script), "server", str(port)], capture_output=True, text=True, timeout=280, env=environment
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("size", ["4"])
def test_the_example(size, tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(Path(fastcap.__file__).parent.parent), "DATA_MIB": size}
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "slim_tune.py"), str(tmp_path)],
        capture_output=True, text=True, timeout=280, env=environment, cwd=tmp_path,
    )  # fmt: skip
    assert "losses: [0.1, 0.2]" in done.stdout, done.stdout + done.stderr
    assert f"fastcap has put 1 object of {size}.0 MiB into Ray's object store" in done.stdout
