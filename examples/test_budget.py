"""A budget for what a closure takes along: it is passed over until `train_func` captures a rate, not a Trainer."""

import cloudpickle
import pytest


class Trainer:
    def __init__(self):
        self.data = bytes(2_000_000)
        self.rate = 0.1

    def make(self):
        def train_func():
            return self.rate

        return train_func


@pytest.mark.limit_payload("1 MiB")
def test_what_is_sent():
    cloudpickle.dumps(Trainer().make())


def test_closure(payload):
    payload.assert_under(Trainer().make(), "4 MiB")
