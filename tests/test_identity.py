"""The whole pickler against cloudpickle: exact mode writes its bytes, compact mode loads to the same graph.

For every flavor that is installed here. To hold it to another version of cloudpickle, put that first on PYTHONPATH.
"""

import importlib
import importlib.util
import pickle
from collections.abc import Callable
from typing import Any

import cloudpickle
import corpus
import pytest
import strategies
from hypothesis import given, settings
from strategies import difference

fastcap = pytest.importorskip("fastcap")
if importlib.util.find_spec("fastcap._native.pickler") is None:
    pytest.skip("the native pickler is not built", allow_module_level=True)

FLAVORS = ["cloudpickle", "ray.cloudpickle", "joblib.externals.cloudpickle", "pyspark.cloudpickle"]
PROTOCOLS = range(2, 6)


@pytest.fixture(params=FLAVORS)
def flavor(request):
    return request.param


@pytest.fixture
def module(flavor):
    return pytest.importorskip(flavor, reason=f"{flavor} is not installed")


def result(dumps: Callable[..., bytes], *args: Any, **options: Any) -> bytes | type[BaseException]:
    """The bytes, or the type of the exception."""
    try:
        return dumps(*args, **options)
    except Exception as error:
        return type(error)


def numbered(outcome: bytes | type[BaseException]) -> bytes | type[BaseException]:
    return corpus.without_tracker_ids(outcome) if isinstance(outcome, bytes) else outcome


def protocols_of(kind: corpus.Kind, flavor: str = "cloudpickle") -> range:
    """Those that can hold the kind; for copies of cloudpickle, which differ in nothing that depends on it, the last."""
    lowest = max(kind.protocol, PROTOCOLS.start) if flavor == "cloudpickle" else pickle.HIGHEST_PROTOCOL
    return range(lowest, PROTOCOLS.stop)


@pytest.mark.kinds(lambda kind: kind.repeatable)
def test_first_dump_is_identical(kind, flavor, module):
    """Each pickler dumps an object that nobody has dumped yet, and whose class nobody knows."""
    for protocol in protocols_of(kind, flavor):
        expected = result(module.dumps, kind.make(), protocol)
        assert numbered(result(fastcap.dumps, kind.make(), protocol, flavor=flavor)) == numbered(expected)


@pytest.mark.kinds(lambda kind: kind.deterministic)
def test_dumps_of_one_object_are_identical(kind, flavor, module):
    made = kind.make()
    for protocol in protocols_of(kind, flavor):
        first, second = (result(module.dumps, made, protocol) for _ in range(2))
        assert first == second or kind.settles
        assert result(fastcap.dumps, made, protocol, flavor=flavor) == second
        assert result(module.dumps, made, protocol) == second


@pytest.mark.kinds(lambda kind: kind.deterministic and kind.buffers)
def test_out_of_band_dumps_are_identical(kind, flavor, module):
    made = kind.make()
    module.dumps(made, 5)
    expected, found = [], []
    stream = module.dumps(made, 5, buffer_callback=expected.append)
    assert fastcap.dumps(made, 5, buffer_callback=found.append, flavor=flavor) == stream
    assert list(map(bytes, map(pickle.PickleBuffer.raw, found))) == list(
        map(bytes, map(pickle.PickleBuffer.raw, expected)))


def test_failures_are_of_the_same_type(failing, flavor, module):
    make, _ = failing
    for protocol in PROTOCOLS:
        expected = result(module.dumps, make(), protocol)
        found = result(fastcap.dumps, make(), protocol, flavor=flavor)
        assert numbered(found) == numbered(expected)


# Plain pickle gives each tensor a storage of its own; compact mode keeps the storages of the original from protocol 5
# on, where it can write them as buffers.
SHARES_MORE = {"torch tensors", "torch module and state dict"}


@pytest.mark.kinds(lambda kind: kind.loads and kind.deterministic)
def test_compact_dump_loads_to_the_same_graph(kind):
    made = kind.make()
    for protocol in protocols_of(kind):
        fastcap.dumps(made, protocol)
        exact, compact = fastcap.dumps(made, protocol), fastcap.dumps(made, protocol, compact=True)
        assert len(compact) <= len(exact)
        shares_more = protocol >= 5 and kind.name in SHARES_MORE
        expected = made if shares_more else pickle.loads(exact)
        assert difference(expected, pickle.loads(compact), strict=not shares_more) is None


def test_compact_dump_of_iterators_is_no_larger():
    for kind in corpus.available():
        if not kind.deterministic:  # spent by the first dump, so that each mode gets an object of its own
            exact, compact = fastcap.dumps(kind.make()), fastcap.dumps(kind.make(), compact=True)
            assert len(compact) <= len(exact)
            assert difference(pickle.loads(exact), pickle.loads(compact), strict=True) is None


@settings(max_examples=5 * settings().max_examples)  # 250, or 50,000 with --long
@given(strategies.objects())
def test_random_objects_are_identical(made):
    cloudpickle.dumps(made)
    for protocol in PROTOCOLS:
        assert fastcap.dumps(made, protocol) == cloudpickle.dumps(made, protocol)


@given(strategies.objects())
def test_random_objects_load_to_the_same_graph_from_compact_dumps(made):
    fastcap.dumps(made)
    exact, compact = fastcap.dumps(made), fastcap.dumps(made, compact=True)
    assert len(compact) <= len(exact)
    assert difference(pickle.loads(exact), pickle.loads(compact), strict=True) is None
