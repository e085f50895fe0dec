"""Parts that other processes hold or want: detached actors, Serve, other nodes, other drivers, nested tasks."""

import os
import subprocess
import sys
import time

import numpy as np
import pytest

ray = pytest.importorskip("ray", reason="Ray is not installed")

import fastcap.ray  # noqa: E402

SIZE = 200_000


@pytest.fixture(scope="module")
def cluster():
    """Two nodes; what needs the resource "far" runs on the other one."""
    from ray.cluster_utils import Cluster

    found = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "object_store_memory": 100 << 20})
    found.add_node(num_cpus=1, resources={"far": 2}, object_store_memory=100 << 20)
    path = os.pathsep.join([os.path.dirname(os.path.dirname(fastcap.__file__)), os.environ.get("PYTHONPATH", "")])
    ray.init(
        address=found.address, namespace="tests", logging_level="ERROR", log_to_driver=False,
        runtime_env={"env_vars": {"PYTHONPATH": path}},
    )  # fmt: skip
    yield found
    fastcap.ray.uninstall()
    ray.shutdown()
    found.shutdown()


@pytest.fixture(autouse=True)
def slimming(cluster):
    fastcap.ray.install("64 KiB")
    yield
    fastcap.ray.uninstall()


def entries():
    return fastcap.ray.report().to_dict()["entries"]


def in_closure(thing):
    def use(task):
        return task(thing)

    return use


def driver(cluster, code, *arguments):
    """Run another driver in the same cluster."""
    head = (
        "import sys, os, time, numpy as np, ray, fastcap.ray\n"
        "path = {'PYTHONPATH': os.environ['PYTHONPATH']}\n"
        f"ray.init({cluster.address!r}, namespace='tests', logging_level='ERROR', log_to_driver=False)\n"
        "fastcap.ray.install('64 KiB')\n"
    )
    path = os.pathsep.join([os.path.dirname(os.path.dirname(fastcap.__file__)), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path}
    run = subprocess.run(
        [sys.executable, "-c", head + code, *arguments], capture_output=True, text=True, timeout=120, env=environment
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


def test_the_other_node_gets_it(cluster):
    data = np.arange(SIZE / 8)

    @ray.remote(resources={"far": 1}, num_cpus=0)
    def look():
        return ray.get_runtime_context().get_node_id(), float(data.sum()), data.flags.owndata

    node, total, owndata = ray.get(look.remote())
    assert node != ray.get_runtime_context().get_node_id()
    assert (total, owndata) == (data.sum(), False)
    (entry,) = entries()
    assert ray.get_runtime_context().get_node_id()[:12] in entry["where"]


@pytest.mark.long
def test_a_lost_node_loses_nothing_that_the_driver_has(cluster):
    data = np.arange(SIZE / 8)
    node = cluster.add_node(num_cpus=1, resources={"shaky": 1}, object_store_memory=80 << 20)

    @ray.remote(resources={"shaky": 1}, num_cpus=0)
    def there():
        return float(data.sum())

    assert ray.get(there.remote()) == data.sum()
    cluster.remove_node(node)
    assert ray.get(there.options(resources={"far": 1}).remote()) == data.sum()


def test_a_second_driver(cluster):
    """Two drivers have parts of their own, and neither takes the other's away."""
    data = np.arange(SIZE / 8)

    @ray.remote(num_cpus=0)
    class Server:
        def total(self):
            return float(data.sum())

    server = Server.options(name="server").remote()
    assert ray.get(server.total.remote()) == data.sum()
    printed = driver(
        cluster,
        "data = np.ones(100_000)\n"
        "@ray.remote\n"
        "def use(): return float(data.sum())\n"
        "print(ray.get(use.remote()), ray.get(ray.get_actor('server').total.remote()))\n"
        "print(len(fastcap.ray.report().entries))\n",
    )
    assert printed.split() == ["100000.0", str(data.sum()), "1"]
    assert ray.get(Server.remote().total.remote()) == data.sum()


def test_detached_actors_outlive_their_driver(cluster):
    """Also one that is restarted when the driver is gone, and one whose class was exported for another use before."""
    printed = driver(
        cluster,
        "data = np.ones(100_000)\n"
        "@ray.remote(num_cpus=0, max_restarts=2, max_task_retries=2)\n"
        "class Server:\n"
        "    def total(self): return float(data.sum())\n"
        "    def die(self): os._exit(1)\n"
        "assert ray.get(Server.remote().total.remote()) == 100_000\n"
        "print(fastcap.ray.report())\n"
        "actor = Server.options(name='outliving', lifetime='detached').remote()\n"
        "assert ray.get(actor.total.remote()) == 100_000\n"
        "print(fastcap.ray.report())\n",
    )
    assert "owned by process" in printed
    assert "owned by the detached actor 'parts' (namespace 'fastcap')" in printed
    time.sleep(1)
    actor = ray.get_actor("outliving")
    assert ray.get(actor.total.remote(), timeout=60) == 100_000
    actor.die.options(max_task_retries=0).remote()
    time.sleep(1)
    assert ray.get(actor.total.remote(), timeout=60) == 100_000
    ray.kill(actor)


def test_nested_tasks_with_the_setup_hook(cluster):
    printed = driver(
        cluster,
        "ray.shutdown()\n"
        f"ray.init({cluster.address!r}, logging_level='ERROR', log_to_driver=False, runtime_env={{'env_vars': path,\n"
        "    'worker_process_setup_hook': fastcap.ray.worker_process_setup_hook('32 KiB', native=False)})\n"
        "@ray.remote\n"
        "def outer():\n"
        "    import fastcap.ray\n"
        "    data = np.ones(100_000)\n"
        "    @ray.remote(num_cpus=0)\n"
        "    def inner(): return float(data.sum())\n"
        "    total = ray.get(inner.remote())\n"
        "    (entry,) = fastcap.ray.report().to_dict()['entries']\n"
        "    return total, len(inner._pickled_function), entry['path'], fastcap.ray._current.settings.min_size\n"
        "total, size, path, min_size = ray.get(outer.remote())\n"
        "assert size < 10_000, size\n"
        "print(total, path, min_size)\n",
    )
    assert printed.split() == ["100000.0", "inner<closure", "data>", str(32 << 10)]


def test_a_setup_hook_that_captures(cluster):
    printed = driver(
        cluster,
        "ray.shutdown()\n"
        "data = np.ones(100_000)\n"
        "def hook():\n"
        "    os.environ['TOTAL'] = str(data.sum())\n"
        f"ray.init({cluster.address!r}, logging_level='ERROR', log_to_driver=False,\n"
        "    runtime_env={'worker_process_setup_hook': hook})\n"
        "@ray.remote\n"
        "def look(): return os.environ['TOTAL']\n"
        "print(ray.get(look.remote()))\n"
        "print([entry.name for entry in fastcap.ray.report().entries])\n",
    )
    assert printed.splitlines()[0] == "100000.0"


@pytest.mark.long
def test_serve(cluster):
    """Replicas are started by a controller that does not know this driver, also when it has ended."""
    serve = pytest.importorskip("ray.serve", reason="Ray Serve is not installed")
    printed = driver(
        cluster,
        "from ray import serve\n"
        "data = np.ones(100_000)\n"
        "class Model:\n"
        "    def __init__(self, bias): self.bias = bias\n"
        "    def __call__(self, factor): return float(data.sum() + self.bias.sum()) * factor\n"
        "    def die(self): os._exit(1)\n"
        "app = serve.deployment(Model, ray_actor_options={'num_cpus': 0}).bind(np.ones(50_000))\n"
        "handle = serve.run(app, name='app', route_prefix=None)\n"
        "print(handle.remote(2).result(timeout_s=60))\n"
        "print(sorted((entry.size, entry.where[-50:]) for entry in fastcap.ray.report().entries))\n",
    )
    assert printed.splitlines()[0] == "300000.0"
    assert printed.count("actor 'parts'") == 2
    handle = serve.get_app_handle("app")
    assert handle.remote(3).result(timeout_s=60) == 450_000
    handle.die.remote()
    deadline = time.monotonic() + 60
    while True:  # the replica that takes its place
        try:
            assert handle.remote(1).result(timeout_s=30) == 150_000
            break
        except Exception:
            assert time.monotonic() < deadline
            time.sleep(0.5)
    serve.shutdown()
