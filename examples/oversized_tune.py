"""A Trainer whose training function closes over `self` and so takes a large array along that it never uses.

fastcap analyze examples/oversized_tune.py:train_func    what is in the payload, and why; needs no Ray
python examples/oversized_tune.py --run                  what Ray Tune says about it; needs Ray

The environment variable DATA_MIB sets the size of the array (800).
"""

import os
import sys

import numpy as np


class Trainer:
    def __init__(self, data, config):
        self.data = data
        self.config = config

    def as_trainable(self):
        # The closure needs one number. It holds `self`, and with it everything that the Trainer holds.
        def train_func(config):
            return {"loss": self.config["offset"] / config["rate"]}

        return train_func


DATA_MIB = int(os.environ.get("DATA_MIB", "800"))
train_func = Trainer(np.zeros(DATA_MIB * 2**17), {"offset": 2.0}).as_trainable()


def run():
    try:
        from ray import tune
    except ImportError:
        sys.exit("This part needs Ray: pip install 'ray[tune]'")
    tune.Tuner(train_func, param_space={"rate": 0.1}).fit()


if __name__ == "__main__":
    if sys.argv[1:] == ["--run"]:
        run()
    else:
        print(__doc__)
