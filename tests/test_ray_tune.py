"""Tune and Train: what trainables capture goes through the object store once, and never into a file."""

import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import fastcap

ray = pytest.importorskip("ray", reason="Ray is not installed")
tune = pytest.importorskip("ray.tune", reason="Ray Tune is not installed")

import fastcap.ray  # noqa: E402

SIZE = 2_000_000  # bytes that are captured, beyond the limit of an export, which is made small here
SMALL = 100_000  # of what is exported after all


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    ray.init(
        num_cpus=2, object_store_memory=200 << 20, include_dashboard=False, logging_level="ERROR", log_to_driver=False
    )
    yield str(tmp_path_factory.mktemp("results"))
    fastcap.ray.uninstall()
    ray.shutdown()


@pytest.fixture(autouse=True)
def slimming(cluster, monkeypatch):
    monkeypatch.setattr(ray._private.ray_constants, "FUNCTION_SIZE_WARN_THRESHOLD", 1_000_000)
    monkeypatch.setattr(ray._private.ray_constants, "FUNCTION_SIZE_ERROR_THRESHOLD", 1_000_001)
    fastcap.ray.install()
    yield
    fastcap.ray.uninstall()


@pytest.fixture
def exports(monkeypatch):
    """Sizes of what goes to Ray's key-value store."""
    import ray.tune.registry as registry

    sizes = []
    own_check, own_put = ray._private.function_manager.check_oversized_function, registry._internal_kv_put

    def check(pickled, *args):
        sizes.append(len(pickled))
        return own_check(pickled, *args)

    def put(key, value, **options):
        sizes.append(len(value))
        return own_put(key, value, **options)

    monkeypatch.setattr(ray._private.function_manager, "check_oversized_function", check)
    monkeypatch.setattr(registry, "_internal_kv_put", put)
    return sizes


class Trainer:
    def __init__(self, size=SIZE):
        self.data = np.ones(size // 8)
        self.rate = 0.5

    def make(self):
        def train_func(config):
            return {"loss": self.rate * config.get("x", 1) + float(self.data.sum())}

        return train_func

    def fit(self, storage, **settings):
        return fit(self.make(), storage, **settings)


Trainer.__module__ = "__main__"


def fit(trainable, storage, *, failures=0, config=None, name=None, **settings):
    run_config = tune.RunConfig(
        storage_path=storage, verbose=0, name=name, failure_config=tune.FailureConfig(max_failures=failures)
    )
    return tune.Tuner(
        trainable, param_space=config, tune_config=tune.TuneConfig(**settings), run_config=run_config
    ).fit()


def losses(results):
    assert [result.error for result in results] == [None] * len(results)
    return [result.metrics["loss"] for result in results]


def entries():
    return fastcap.ray.report().to_dict()["entries"]


@pytest.mark.parametrize("num_samples", [1, 2])
def test_a_function_that_captures_its_trainer(num_samples, cluster, exports):
    trainer = Trainer()
    assert losses(trainer.fit(cluster, num_samples=num_samples)) == [0.5 + SIZE // 8] * num_samples
    assert len(exports) >= 1 + num_samples - 1
    assert max(exports) < SMALL
    (entry,) = entries()
    assert entry["path"].endswith("<closure self>.data")
    assert entry["name"] == "train_func"
    assert entry["export_count"] >= 2


def holding(data):
    """A class trainable that captures data in each way a class can."""

    class Holding(tune.Trainable):
        kept = data * 2

        def setup(self, config):
            self.total = float(data.sum() + self.kept.sum())
            self.count = 0

        def step(self):
            self.count += 1
            return {"loss": self.total / self.count, "done": self.count == 4}

        def save_checkpoint(self, folder):
            Path(folder, "count").write_text(str(self.count))

        def load_checkpoint(self, folder):
            self.count = int(Path(folder, "count").read_text())

        def reset_config(self, config):
            self.count = 0
            return True

    Holding.__module__ = "__main__"
    return Holding


def test_class_trainables_asha_and_reused_actors(cluster, exports):
    data = np.ones(SIZE // 8)
    scheduler = tune.schedulers.ASHAScheduler(metric="loss", mode="min", max_t=4, grace_period=1, reduction_factor=2)
    results = fit(
        holding(data), cluster, num_samples=4, scheduler=scheduler, reuse_actors=True, max_concurrent_trials=2
    )
    assert all(loss in [3 * len(data) / count for count in (1, 2, 3, 4)] for loss in losses(results))
    assert max(exports) < SMALL
    assert {entry["path"].rpartition(".")[2] for entry in entries()} == {"setup<closure data>", "kept"}


@pytest.mark.long
def test_paused_trials(cluster):
    """Hyperband pauses trials: their actors go, and come again."""
    data = np.ones(SIZE // 8)
    scheduler = tune.schedulers.HyperBandScheduler(metric="loss", mode="min", max_t=4)
    results = fit(holding(data), cluster, num_samples=3, scheduler=scheduler)
    assert [result.error for result in results] == [None] * 3
    assert len(entries()) == 2


def test_failures_and_retries(cluster, tmp_path):
    data = np.ones(SIZE // 8)
    mark = str(tmp_path / "failed")

    def fragile(config):
        if not os.path.exists(f"{mark}{config['x']}"):
            open(f"{mark}{config['x']}", "w").close()
            if config["x"]:
                os._exit(1)  # the worker is gone
            raise RuntimeError("once")
        return {"loss": float(data.sum())}

    results = fit(fragile, cluster, failures=2, config={"x": tune.grid_search([0, 1])})
    assert losses(results) == [len(data)] * 2
    assert len(os.listdir(tmp_path)) == 2
    assert len(entries()) == 1


def test_with_parameters_and_resources(cluster, exports):
    captured, given = np.ones(SIZE // 8), np.full(SIZE // 8, 2.0)

    def train_func(config, given=None):
        return {"loss": float(captured.sum() + given.sum())}

    trainable = tune.with_resources(tune.with_parameters(train_func, given=given), {"cpu": 1})
    assert losses(fit(trainable, cluster, num_samples=2)) == [3 * len(captured)] * 2
    assert max(exports) < SMALL
    assert [entry["path"].rpartition("<")[2] for entry in entries()] == ["closure captured>"]


def test_registered_before_ray_is_started(tmp_path):
    """What Tune registers without a cluster is kept whole, and slimmed when there is one."""
    script = tmp_path / "early.py"
    script.write_text(
        "import numpy as np, ray, fastcap.ray\n"
        "fastcap.ray.install()\n"
        "from ray import tune\n"
        "import ray.tune.registry as registry\n"
        "data = np.ones(1_000_000)\n"
        "@ray.remote\n"
        "def early(): return float(data.sum())\n"
        "tune.register_trainable('early', lambda config: {'loss': float(data.sum())})\n"
        "assert not ray.is_initialized()\n"
        "assert max(map(len, registry._global_registry._to_flush.values())) > 8_000_000\n"
        "ray.init(num_cpus=1, object_store_memory=100 << 20, include_dashboard=False, logging_level='ERROR')\n"
        "key = registry._make_key(registry._global_registry.prefix, 'trainable_class', 'early')\n"
        "assert len(registry._internal_kv_get(key)) < 100_000\n"
        "config = tune.RunConfig(storage_path=__file__ + '.results', verbose=0)\n"
        "results = tune.Tuner('early', run_config=config).fit()\n"
        "assert results[0].metrics['loss'] == ray.get(early.remote()) == 1_000_000, results[0]\n"
        "print(fastcap.ray.report())\n"
        "(entry,) = fastcap.ray.report().to_dict()['entries']\n"
        "assert entry['export_count'] == 3, entry\n"
        "ray.shutdown()\n"
        "assert fastcap.ray.report().entries == ()\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=180, env=environment, cwd=tmp_path
    )
    assert run.returncode == 0, run.stdout + run.stderr


def files_below(folder):
    return [path for path in Path(folder).rglob("*") if path.is_file()]


def test_files_stay_self_contained(cluster, tmp_path):
    """Nothing that a run writes refers to the object store, and the run is restored in a new cluster."""
    trainer = Trainer()
    results = fit(trainer.make(), str(tmp_path), name="run", num_samples=2, config={"x": tune.uniform(0, 1)})
    before = sorted(losses(results))
    assert len(entries()) == 1
    ref = bytes.fromhex(entries()[0]["ref"])
    files = files_below(tmp_path / "run")
    assert "tuner.pkl" in [path.name for path in files]
    for path in files:
        data = path.read_bytes()
        assert ref not in data, path
        assert ref.hex().encode() not in data, path
        assert b"fastcap" not in data, path
        if path.suffix == ".pkl":
            assert "FC202" not in {finding.code for finding in fastcap.scan(path).findings}
    script = tmp_path / "restore.py"
    script.write_text(
        "import sys, numpy as np, ray\n"
        "from ray import tune\n"
        "data = np.ones(10)\n"
        "def train_func(config): return {'loss': float(data.sum())}\n"
        "ray.init(num_cpus=1, object_store_memory=100 << 20, include_dashboard=False, logging_level='ERROR')\n"
        "results = tune.Tuner.restore(sys.argv[1], trainable=train_func, resume_errored=True).fit()\n"
        "print('losses', sorted(result.metrics['loss'] for result in results))\n"
    )
    run = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "run")], capture_output=True, text=True, timeout=180, cwd=tmp_path
    )
    assert f"losses {before}" in run.stdout, run.stdout + run.stderr


def test_tune_goes_on_after_uninstall(cluster):
    trainer = Trainer(200_000)
    fastcap.ray.install("64 KiB")
    assert len(trainer.fit(cluster)) == 1
    fastcap.ray.uninstall()
    assert losses(trainer.fit(cluster)) == [0.5 + 25_000]


# ---- one trainable, nothing installed --------------------------------------------------------------------------------


def test_with_captures_of_a_function(cluster, exports):
    fastcap.ray.uninstall()
    lean = fastcap.ray.with_captures(Trainer().make())
    assert lean.__name__ == "train_func"
    assert losses(fit(lean, cluster, num_samples=2)) == [0.5 + SIZE // 8] * 2
    assert max(exports) < SMALL
    assert [entry["export_count"] for entry in entries()] == [1]
    assert ray.get(ray.remote(lean).remote({"x": 2})) == {"loss": 1 + SIZE // 8}


def test_with_captures_of_a_class(cluster, exports):
    fastcap.ray.uninstall()
    data = np.ones(SIZE // 8)
    lean = fastcap.ray.with_captures(holding(data))
    assert issubclass(lean, tune.Trainable)
    assert lean.__name__ == "Holding"
    assert losses(fit(lean, cluster, num_samples=2)) == [3 * len(data) / 4] * 2
    assert max(exports) < SMALL

    class Plain:
        def __init__(self, factor):
            self.factor = factor

        async def total(self):
            return float(data.sum()) * self.factor

        @staticmethod
        def constant():
            return data[0]

    Plain.__module__ = "__main__"
    actor = ray.remote(fastcap.ray.with_captures(Plain)).remote(2)
    assert ray.get(actor.total.remote()) == 2 * len(data)
    assert ray.get(actor.constant.remote()) == 1


def test_with_captures_of_nothing_big():
    def small(config):
        return 1

    assert fastcap.ray.with_captures(small) is small
    with pytest.raises(TypeError, match="function or a class"):
        fastcap.ray.with_captures(3)


# ---- Train -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def train_v1(monkeypatch):
    monkeypatch.setenv("RAY_TRAIN_V2_ENABLED", "0")
    monkeypatch.setenv("RAY_TRAIN_ENABLE_V2_MIGRATION_WARNINGS", "0")
    return pytest.importorskip("ray.train.data_parallel_trainer", reason="Ray Train v1 is not installed")


def test_train_v1(train_v1, cluster, tmp_path, exports):
    """A subclass that captures, defined where fit is called, with data in its loop and a large configuration."""
    from ray import train
    from ray.air.config import RunConfig, ScalingConfig

    data = np.ones(SIZE // 8)
    kept = np.full(SIZE // 8, 3.0)

    def loop(config):
        rows = sum(len(batch["id"]) for batch in train.get_dataset_shard("train").iter_batches())
        train.report({"loss": float(data.sum() + config["table"].sum()), "rows": rows})

    class MyTrainer(train_v1.DataParallelTrainer):
        def setup(self):
            assert kept.sum() == 3 * len(kept)
            super().setup()

    trainer = MyTrainer(
        loop, train_loop_config={"table": np.full(SIZE // 8, 2.0)},
        scaling_config=ScalingConfig(num_workers=1, trainer_resources={"CPU": 0}),
        datasets={"train": ray.data.range(8)},
        run_config=RunConfig(storage_path=str(tmp_path), name="run"),
    )  # fmt: skip
    result = trainer.fit()
    assert result.metrics["loss"] == 3 * len(data)
    assert result.metrics["rows"] == 8
    assert max(exports) < SMALL
    assert [entry["path"].rpartition("<")[2] for entry in entries()] == ["closure kept>"]
    for name in ("trainer.pkl", "tuner.pkl"):
        content = (tmp_path / "run" / name).read_bytes()
        assert b"fastcap" not in content
        assert "FC202" not in {finding.code for finding in fastcap.scan(tmp_path / "run" / name).findings}
    cls, parameters = pickle.loads((tmp_path / "run" / "trainer.pkl").read_bytes())
    assert cls.__name__ == "MyTrainer"
    assert parameters["train_loop_config"]["table"].sum() == 2 * len(data)


@pytest.mark.long
def test_train_v2(cluster, tmp_path, exports):
    pytest.importorskip("ray.train.v2", reason="Ray Train v2 is not installed")
    code = (
        "import sys, numpy as np, ray, fastcap.ray\n"
        "from ray import train\n"
        "from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer\n"
        "class Owner:\n"
        "    def __init__(self): self.data = np.ones(1_000_000)\n"
        "    def fit(self):\n"
        "        def loop(config):\n"
        "            open(config['folder'] + '/loss', 'w').write(str(self.data.sum() + config['table'].sum()))\n"
        "        return DataParallelTrainer(\n"
        "            loop, train_loop_config={'table': np.ones(1_000_000), 'folder': sys.argv[1]},\n"
        "            scaling_config=train.ScalingConfig(num_workers=1),\n"
        "            run_config=train.RunConfig(storage_path=sys.argv[1], name='run')).fit()\n"
        "ray.init(num_cpus=2, object_store_memory=200 << 20, include_dashboard=False, logging_level='ERROR')\n"
        "fastcap.ray.install()\n"
        "assert Owner().fit().error is None\n"
    )
    script = tmp_path / "train_v2.py"
    script.write_text(code)
    environment = {**os.environ, "RAY_TRAIN_V2_ENABLED": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.run(
        [sys.executable, str(script), str(tmp_path)], capture_output=True, text=True, timeout=240, env=environment
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert (tmp_path / "loss").read_text() == "2000000.0"
