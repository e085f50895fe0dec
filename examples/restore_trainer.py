"""A Trainer that is given the handle of an actor, fails, and is restored in another cluster.

Run it twice: the second time, Ray's own restore would raise AssertionError, for the actor is gone.
"""

import os
import sys

os.environ["RAY_TRAIN_V2_ENABLED"] = "0"

import ray
from ray import train
from ray.train import RunConfig, ScalingConfig
from ray.train.data_parallel_trainer import DataParallelTrainer

import fastcap.ray

STORAGE = os.path.abspath(sys.argv[1] if len(sys.argv) > 1 else "results")


@ray.remote(num_cpus=0)
class Tracker:
    def count(self, step):
        print("step", step, flush=True)


def loop(config):
    for step in range(3):
        ray.get(config["tracker"].count.remote(step))
        train.report({"step": step})
        if step == 1 and not os.path.exists(os.path.join(STORAGE, "failed")):
            open(os.path.join(STORAGE, "failed"), "w").close()
            raise RuntimeError("the cluster goes down")


def make():
    config = {"tracker": Tracker.remote(), "lr": 0.1}
    run_config = RunConfig(name="exp", storage_path=STORAGE)
    return DataParallelTrainer(
        loop, train_loop_config=config, scaling_config=ScalingConfig(num_workers=1), run_config=run_config
    )


def restore():
    for part in fastcap.ray.restore_trainer(f"{STORAGE}/exp", dry_run=True):
        print(part)
    config = {"tracker": Tracker.remote(), "lr": 0.1}
    return fastcap.ray.restore_trainer(f"{STORAGE}/exp", train_loop_config=config)


if __name__ == "__main__":
    ray.init("local", num_cpus=2, include_dashboard=False)
    trainer = restore() if os.path.exists(f"{STORAGE}/exp") else make()
    print("last step:", trainer.fit().metrics["step"])
