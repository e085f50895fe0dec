"""The trainable of oversized_tune.py, run by Ray Tune: it captures its Trainer, and with it an array of 800 MiB.

Without the line that installs fastcap, Ray 2.60 ends with "Tracked actor is not managed by this event manager".
"""

import os
import sys

import numpy as np
import ray
from ray import tune

import fastcap.ray

DATA_MIB = int(os.environ.get("DATA_MIB", "800"))


class Trainer:
    def __init__(self):
        self.data = np.zeros((DATA_MIB << 20) // 8)
        self.rate = 0.1

    def fit(self, storage):
        def train_func(config):
            return {"loss": self.rate * config["x"]}

        run_config = tune.RunConfig(storage_path=storage, verbose=0)
        return tune.Tuner(train_func, param_space={"x": tune.grid_search([1, 2])}, run_config=run_config).fit()


def main(storage):
    fastcap.ray.install()
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    results = Trainer().fit(storage)
    print("losses:", sorted(result.metrics["loss"] for result in results))
    print(fastcap.ray.report())


if __name__ == "__main__":
    main(os.path.abspath(sys.argv[1] if len(sys.argv) > 1 else "results"))
