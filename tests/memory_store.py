"""A store in this process: parts are pickles in a dict."""

import itertools
import pickle

import fastcap

_PARTS = {}  # number -> pickle
_numbers = itertools.count()


class MemoryStore:
    """Keeps what it was given: ``puts`` has (object, info) in the order of the puts."""

    def __init__(self, protocol=None):
        self.protocol = protocol
        self.puts = []

    def put(self, obj, info):
        number = next(_numbers)
        _PARTS[number] = fastcap.dumps(obj, self.protocol)
        self.puts.append((obj, info))
        return fetch, (number,)

    @property
    def objects(self):
        return [obj for obj, _ in self.puts]

    @property
    def paths(self):
        return [info.path for _, info in self.puts]


def fetch(number):
    return pickle.loads(_PARTS[number])
