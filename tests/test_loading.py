"""`fastcap.load` with replacements, with placeholders for Ray's handles, and for what cannot be imported."""

import asyncio
import base64
import copy
import functools
import io
import pickle
import subprocess
import sys
import types

import cloudpickle
import pytest
import strategies
from hypothesis import given
from hypothesis import strategies as st

import fastcap
from fastcap import NotRestored, Placeholder, Unrestorable, load, loads
from fastcap.errors import EditError
from fastcap.paths import parse

PROTOCOLS = range(pickle.HIGHEST_PROTOCOL + 1)


class Bomb:
    """Cannot be loaded: what replaces it must do so before."""

    loaded = []

    def __init__(self, name="bomb"):
        self.name = name

    def __reduce__(self):
        return explode, (self.name,)


def explode(name):
    Bomb.loaded.append(name)
    raise RuntimeError(f"{name} was loaded")


@pytest.fixture(autouse=True)
def no_bomb_goes_off():
    Bomb.loaded.clear()
    yield
    assert not Bomb.loaded


# --- nothing asked for ------------------------------------------------------------------------------------------------


def test_plain_loading_is_pickles():
    data = pickle.dumps([1, {"a": (2,)}])
    assert loads(data) == load(io.BytesIO(data)) == [1, {"a": (2,)}]
    file = io.BytesIO(data + pickle.dumps("second"))
    assert [load(file), load(file)] == [[1, {"a": (2,)}], "second"]
    buffers = []
    data = pickle.dumps(pickle.PickleBuffer(b"abc"), 5, buffer_callback=buffers.append)
    assert bytes(loads(data, buffers=buffers)) == b"abc"
    assert loads(b"S'\\xe9'\n.", encoding="latin-1") == "é"
    with pytest.raises(pickle.UnpicklingError):
        loads(b"\x80\x04Q.")
    with pytest.raises(EOFError):
        loads(b"")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"missing": "placeholders"}, "missing is None or 'placeholder'"),
        ({"handles": "drop"}, "handles is None, 'placeholder', 'error' or a function"),
        ({"handles": 3}, "handles is None, 'placeholder', 'error' or a function"),
    ],
)
def test_wrong_options(options, message):
    with pytest.raises(ValueError, match=message):
        loads(pickle.dumps(1), **options)


# --- replace ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_replaced_parts_are_not_executed(protocol):
    value = object()
    obj = {"a": Bomb(), "b": [1, (Bomb(), 2)], "c": types.SimpleNamespace(x=Bomb(), y=3)}
    data = pickle.dumps(obj, protocol)
    replace = {"obj['a']": value, "obj['b'][1][0]": None, "obj['c'].x": [value]}
    found = loads(data, replace=replace)
    assert found["a"] is value
    assert found["b"] == [1, (None, 2)]
    assert found["c"].x == [value]
    assert found["c"].y == 3
    assert load(io.BytesIO(data), replace=replace)["a"] is value


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_references_get_the_value_too(protocol):
    shared = [1, 2]
    value = {"new": True}
    obj = {"first": shared, "second": (shared, 1), "third": {"x": shared}}
    for path in ("obj['first']", "obj['second'][0]", "obj['third']['x']"):
        found = loads(pickle.dumps(obj, protocol), replace={path: value})
        assert found["first"] is found["second"][0] is found["third"]["x"] is value


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_what_others_refer_to_stays(protocol):
    inner = [1]
    obj = {"a": {"inner": inner, "bomb": Bomb()}, "b": inner}
    found = loads(pickle.dumps(obj, protocol), replace={"obj['a']": "gone"})
    assert found == {"a": "gone", "b": [1]}
    ring = {"value": 1}
    ring["self"] = ring
    found = loads(pickle.dumps([ring, {"ring": ring}], protocol), replace={"obj[0]": "gone"})
    assert found == ["gone", {"ring": "gone"}]


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_strings_and_names_are_replaced_in_their_place_only(protocol):
    text, blob = "".join(("te", "xt")), bytes(bytearray(b"blob"))
    obj = {"a": text, text: 1, "b": [text], "c": blob, "d": [blob], "e": Point, "f": Point(3)}
    data = pickle.dumps(obj, protocol)
    found = loads(data, replace={"obj['a']": "new", "obj['c']": None, "obj['e']": "class", "obj['f'].x": 4})
    assert (found["a"], found["text"], found["b"]) == ("new", 1, ["text"])
    if protocol >= 3:  # before, bytes were made by a call
        assert (found["c"], found["d"]) == (None, [b"blob"])
    assert (found["e"], type(found["f"]), found["f"].x) == ("class", Point, 4)


class Point:
    def __init__(self, x):
        self.x = x


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_numbers_and_the_root(protocol):
    obj = {"lr": 0.1, "on": True, "none": None, "n": [1, 2, 3]}
    data = pickle.dumps(obj, protocol)
    found = loads(data, replace={"obj['lr']": 0.2, "obj['on']": "off", "obj['none']": 1, "obj['n'][1]": 5})
    assert found == {"lr": 0.2, "on": "off", "none": 1, "n": [1, 5, 3]}
    for root in ([Bomb()], Bomb(), "text", 5, None):
        assert loads(pickle.dumps(root, protocol), replace={"obj": "all"}) == "all"
    assert loads(data, replace={}) == obj


def test_closures_defaults_and_globals():
    bomb = Bomb()

    def step(x, scale=2):
        return bomb, x * scale

    data = cloudpickle.dumps(step)
    value = object()
    found = loads(data, replace={"step<closure bomb>": value, "step<default scale>": 5})
    assert found(3) == (value, 15)


def test_paths_that_are_not_there():
    data = pickle.dumps({"train_loop_config": {"tracker": [1], "lr": [2]}})
    wrong = {
        "obj['train_loop_confg']": r"obj has no \['train_loop_confg'\].* mean \['train_loop_config'\]",
        "obj['train_loop_config']['traker']": r"obj\['train_loop_config'\] has no .* mean \['tracker'\]",
        "obj['train_loop_config'].zzz": r"has no \.zzz",
        "x['train_loop_config']": "obj",
        "obj[": "not a path",
    }
    for path, message in wrong.items():
        with pytest.raises(EditError, match=message) as caught:
            loads(data, replace={path: 1})
        assert caught.value.paths == (path,)


def test_streams_with_persistent_ids_are_refused():
    class Pickler(pickle.Pickler):
        def persistent_id(self, obj):
            return "id" if isinstance(obj, Bomb) else None

    file = io.BytesIO()
    Pickler(file).dump([Bomb(), [1]])
    with pytest.raises(EditError, match="persistent ids of its own"):
        loads(file.getvalue(), replace={"obj[1]": 1})


def test_out_of_band_buffers():
    buffers = []
    obj = {"a": [pickle.PickleBuffer(b"one")], "b": pickle.PickleBuffer(b"two"), "c": pickle.PickleBuffer(b"three")}
    data = pickle.dumps(obj, 5, buffer_callback=buffers.append)
    found = loads(data, replace={"obj['a']": "gone"}, buffers=iter(buffers))
    assert found["a"] == "gone"
    assert bytes(found["b"]) == b"two"
    assert bytes(found["c"]) == b"three"


def test_compressed_and_broken_data():
    import gzip

    with pytest.raises(EditError, match="compressed with gzip"):
        loads(gzip.compress(pickle.dumps([[1]])), replace={"obj[0]": 1})
    with pytest.raises(fastcap.PayloadError):
        loads(b"no pickle", replace={"obj[0]": 1})
    with pytest.raises(EditError, match="2 pickles"):
        loads(pickle.dumps(1) * 2, replace={"obj": 1})


# --- Ray's handles ----------------------------------------------------------------------------------------------------
# As Ray 2.60 writes them: {"tracker": an actor handle, "data": an object reference, "again": both}.

WITH_HANDLES = base64.b64decode(
    "gAWVQAIAAAAAAAB9lCiMB3RyYWNrZXKUjBpyYXkuX3ByaXZhdGUuc2VyaWFsaXphdGlvbpSMGl9hY3Rvcl9oYW5kbGVfZGVzZXJpYWxpemVylJOU"
    "QhYBAAAKEA2FScesXio5saFrugEAAAASGP//////////////////////////AQAAABpLChz8OXYePnYgefpQkvZJXbIVF4CAVYpIv052s5NxEgkx"
    "OTIuMC4yLjIY9YMCIhwBAAAA////////////////////////////////IgQBAAAAMjsSOQoCbWsSB1RyYWNrZXIaCF9faW5pdF9fIiA5NWNjNGMy"
    "MWQ1YjA0OGQxYjU2NWU4NTRiNDBjNGJjNzoc//////////8NhUnHrF4qObGha7oBAAAAAQAAAEIBMFIEYm9zc1okYTgxMThlMTItMDM1Yi00MDkw"
    "LWFkZTAtY2IyODBmNWIwMDFiaP///////////wFwAZSJhpRSlIwEZGF0YZRoAowYX29iamVjdF9yZWZfZGVzZXJpYWxpemVylJOUKEMcAP//////"
    "//////////////////8BAAAAAeH1BZSMAJRDSwoc/Dl2Hj52IHn6UJL2SV2yFReAgFWKSL9OdrOTcRIJMTkyLjAuMi4yGPWDAiIcAQAAAP//////"
    "/////////////////////////5RDJRIDEgE0Ghz8OXYePnYgefpQkvZJXbIVF4CAVYpIv052s5NxIBCUTnSUUpSMBWFnYWlulF2UKGgHaBBldS4="
)
ACTOR_ID = "0d8549c7ac5e2a39b1a16bba01000000"
OBJECT_ID = "00ffffffffffffffffffffffffffffffffffffff0100000001e1f505"


def test_handles_become_placeholders():
    found = loads(WITH_HANDLES, handles="placeholder")
    actor, ref = found["tracker"], found["data"]
    assert isinstance(actor, Unrestorable)
    assert (actor.path, actor.kind, actor.id) == ("obj['tracker']", "ActorHandle", ACTOR_ID)
    assert actor.reason == "the actor of class Tracker named 'boss' belongs to the cluster it was pickled in"
    assert (ref.path, ref.kind, ref.id) == ("obj['data']", "ObjectRef", OBJECT_ID)
    assert found["again"][0] is actor
    assert found["again"][1] is ref
    assert load(io.BytesIO(WITH_HANDLES), handles="placeholder") == found


def test_use_of_a_placeholder_says_what_to_do():
    actor = loads(WITH_HANDLES, handles="placeholder")["tracker"]
    for use in (
        lambda: actor.ping.remote(),
        lambda: actor(),
        lambda: actor.remote,
        lambda: asyncio.run(wait_for(actor)),
    ):
        with pytest.raises(NotRestored, match=r"replace=\{\"obj\['tracker'\]\": \.\.\.\}"):
            use()
    assert "ActorHandle" in repr(actor)
    assert not hasattr(actor, "ping")
    for copied in (
        pickle.loads(pickle.dumps(actor)),
        copy.copy(actor),
        copy.deepcopy(actor),
        loads(fastcap.dumps(actor)),
    ):
        assert copied == actor
        assert hash(copied) == hash(actor)
    assert actor != loads(WITH_HANDLES, handles="placeholder")["data"]
    assert actor != 1


async def wait_for(what):
    return await what


def test_handles_from_a_function():
    asked = []

    def new(dead):
        asked.append(dead)
        return f"new {dead.kind}"

    assert loads(WITH_HANDLES, handles=new) == {
        "tracker": "new ActorHandle", "data": "new ObjectRef", "again": ["new ActorHandle", "new ObjectRef"],
    }  # fmt: skip
    assert [dead.path for dead in asked] == ["obj['tracker']", "obj['data']"]
    with pytest.raises(ZeroDivisionError):
        loads(WITH_HANDLES, handles=lambda dead: 1 / 0)


def test_handles_as_errors():
    with pytest.raises(NotRestored, match="2 handles of Ray") as caught:
        loads(WITH_HANDLES, handles="error")
    assert caught.value.paths == ("obj['tracker']", "obj['data']")
    assert isinstance(pickle.loads(pickle.dumps(caught.value)), NotRestored)
    with pytest.raises(NotRestored, match="1 handle of Ray") as caught:
        loads(WITH_HANDLES, handles="error", replace={"obj['tracker']": 1})
    assert caught.value.paths == ("obj['data']",)
    found = loads(WITH_HANDLES, handles="error", replace={"obj['tracker']": 1, "obj['data']": 2})
    assert found == {"tracker": 1, "data": 2, "again": [1, 2]}
    nested = loads(WITH_HANDLES, handles="placeholder", replace={"obj['again']": 3})
    assert nested["again"] == 3
    assert nested["tracker"].path == "obj['tracker']"
    assert loads(pickle.dumps({"x": 1}), handles="error") == {"x": 1}


def test_handles_need_no_ray():
    code = (
        "import sys; sys.modules['ray'] = None\n"
        "import fastcap\n"
        f"found = fastcap.loads({WITH_HANDLES!r}, handles='placeholder')\n"
        "print(found['tracker'].id, found['data'].kind)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == [ACTOR_ID, "ObjectRef"]


def test_handles_of_the_installed_ray():
    ray = pytest.importorskip("ray", reason="Ray is not installed")
    code = """
import ray, sys
@ray.remote(num_cpus=0)
class Tracker:
    def ping(self): return 1
ray.init("local", num_cpus=1, include_dashboard=False, log_to_driver=False, object_store_memory=10**8)
actor, ref = Tracker.options(name="boss").remote(), ray.put([1])
data = ray.cloudpickle.dumps({"tracker": actor, "data": ref, "again": [actor, ref], "method": actor.ping})
print(data.hex(), actor._actor_id.hex(), ref.hex())
ray.shutdown()
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    data, actor_id, object_id = run.stdout.split()
    assert not ray.is_initialized()
    found = loads(bytes.fromhex(data), handles="placeholder")
    assert (found["tracker"].id, found["data"].id) == (actor_id, object_id)
    assert "class Tracker named 'boss'" in found["tracker"].reason
    assert found["again"] == [found["tracker"], found["data"]]
    assert not ray.is_initialized()


# --- what cannot be imported ------------------------------------------------------------------------------------------

GONE = """
import collections
import enum

class Plain:
    def __init__(self, x):
        self.x = x
    def __eq__(self, other):
        return type(self) is type(other) and vars(self) == vars(other)
    __hash__ = None

class Slots:
    __slots__ = ("a", "b")

class Numbers(list):
    pass

class Table(dict):
    pass

class Pair(tuple):
    pass

class Color(enum.Enum):
    RED = 1

class Made:
    def __new__(cls, *args, **kwargs):
        made = super().__new__(cls)
        made.given = args, kwargs
        return made
    def __init__(self, *args, **kwargs):
        pass
    def __getnewargs_ex__(self):
        return (1, 2), {"k": 3}

class Base:
    tag = "base"

Point = collections.namedtuple("Point", "x y")

def set_state(obj, state):
    obj.state = state

class WithSetter:
    def __reduce__(self):
        return WithSetter, (), self.state, None, None, set_state

class Outer:
    class Inner:
        pass
    @classmethod
    def make(cls):
        return "made"

def function(x):
    return x + 1
"""
CHECK = """
import gone_library as g
import pickle, sys

def check(found):
    assert found["plain"] == g.Plain({"a": [1]}), found
    assert type(found["numbers"]) is g.Numbers and found["numbers"] == [1, g.Plain([1])]
    assert type(found["table"]) is g.Table and found["table"]["shared"] is found["numbers"][1]
    assert type(found["pair"]) is g.Pair and found["pair"] == (1, 2)
    assert type(found["slots"]) is g.Slots and (found["slots"].a, found["slots"].b) == (1, 2)
    assert found["color"] is g.Color.RED and found["point"] == g.Point(1, 2)
    assert type(found["made"]) is g.Made and found["made"].given == ((1, 2), {"k": 3})
    assert type(found["setter"]) is g.WithSetter and found["setter"].state == [5]
    assert found["function"] is g.function and found["class"] is g.Plain
    assert type(found["inner"]) is g.Outer.Inner and found["bound"]() == "made"
    assert found["partial"]() == 4 and found["known"] == {1, 2} and type(found["dict"][1]) is g.Plain
    if "lambda" in found:
        assert found["lambda"]() == 3 and found["module"] is g
        assert found["sub"].say() == ("base", 2) and found["sub"].mine == g.Plain(3)

for line in sys.stdin:
    check(pickle.loads(bytes.fromhex(line)))
assert "fastcap" not in sys.modules
print("all right")
"""


@pytest.fixture
def gone(tmp_path, monkeypatch):
    """Objects of a module that is there while they are pickled; what checks them in another process, which has it."""
    (tmp_path / "gone_library.py").write_text(GONE)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    import gone_library as g

    shared = g.Plain([1])
    slots = g.Slots()
    slots.a, slots.b = 1, 2
    setter = g.WithSetter()
    setter.state = [5]
    plain = {
        "plain": g.Plain({"a": [1]}), "numbers": g.Numbers([1, shared]), "table": g.Table(shared=shared),
        "pair": g.Pair((1, 2)), "slots": slots, "color": g.Color.RED, "point": g.Point(1, 2), "made": g.Made(1, 2, k=3),
        "setter": setter, "function": g.function, "class": g.Plain, "inner": g.Outer.Inner(), "bound": g.Outer.make,
        "partial": functools.partial(g.function, 3), "known": {1, 2}, "dict": {1: g.Plain(0)},
    }  # fmt: skip

    class Sub(g.Base):
        mine = g.Plain(3)

        def say(self):
            return self.tag, g.function(1)

    by_value = {**plain, "sub": Sub(), "lambda": lambda: g.function(g.Plain(2).x), "module": g}
    payloads = {}
    for protocol in PROTOCOLS:
        if protocol >= 2:  # slots
            payloads[f"pickle {protocol}"] = pickle.dumps(plain, protocol)
        if protocol >= 4:
            payloads[f"cloudpickle {protocol}"] = cloudpickle.dumps(by_value, protocol)
    monkeypatch.undo()
    del sys.modules["gone_library"]

    def check(pickles):
        environment = {"PYTHONPATH": f"{tmp_path}", "PATH": ""}
        lines = "\n".join(data.hex() for data in pickles)
        run = subprocess.run(
            [sys.executable, "-c", CHECK], input=lines, capture_output=True, text=True, env=environment, timeout=120
        )
        assert run.returncode == 0, run.stderr[-3000:]
        assert run.stdout == "all right\n"

    return payloads, check


def test_placeholders_keep_what_they_are(gone):
    payloads, check = gone
    check(payloads.values())  # the check itself
    again = []
    for name, data in payloads.items():
        with pytest.raises(ModuleNotFoundError):
            loads(data)
        found = loads(data, missing="placeholder")
        assert load(io.BytesIO(data), missing="placeholder").keys() == found.keys()
        assert all(
            isinstance(found[key], Placeholder) for key in ("plain", "table", "color", "point", "made", "function")
        )
        assert found["known"] == {1, 2}
        again += [cloudpickle.dumps(found), fastcap.dumps(found), cloudpickle.dumps(copy.deepcopy(found))]
        if name.startswith("pickle"):
            again.append(pickle.dumps(found))
        again.append(fastcap.dumps(loads(again[-1], missing="placeholder")))  # and once more
    check(again)


def test_placeholders_show_their_state(gone):
    payloads, _ = gone
    found = loads(payloads["pickle 5"], missing="placeholder")
    assert found["plain"].state == {"x": {"a": [1]}}
    assert found["numbers"].items[0] == 1
    assert found["table"].pairs == [("shared", found["numbers"].items[1])]
    assert found["pair"].args == ((1, 2),)
    assert found["made"].kwargs == {"k": 3}
    assert found["function"].name == "gone_library:function"
    assert found["plain"].made_by is found["class"]
    assert repr(found["plain"]) == "<Placeholder made by gone_library:Plain>"
    assert repr(found["function"]) == "<Placeholder gone_library:function>"


def test_placeholders_cannot_be_used(gone):
    payloads, _ = gone
    found = loads(payloads["cloudpickle 5"], missing="placeholder")
    for use in (lambda: found["plain"].x, lambda: found["function"](1), lambda: setattr(found["plain"], "x", 1)):
        with pytest.raises(NotRestored, match="gone_library"):
            use()
    with pytest.raises(NotRestored, match="gone_library"):
        found["lambda"]()
    with pytest.raises(TypeError):
        Placeholder()
    copied = copy.copy(found["numbers"])
    copied.items.append(5)
    assert len(found["numbers"].items) == 2


def test_replace_and_handles_and_placeholders_together(gone):
    payloads, _ = gone
    data = payloads["pickle 5"]
    found = loads(data, missing="placeholder", replace={"obj['plain']": "mine"}, handles="error")
    assert found["plain"] == "mine"
    assert isinstance(found["color"], Placeholder)


@given(strategies.objects(), st.sampled_from(range(2, 6)))
def test_what_can_be_imported_is_loaded_as_ever(made, protocol):
    try:
        data = cloudpickle.dumps(made, protocol)
    except Exception:
        return
    assert strategies.difference(pickle.loads(data), loads(data, missing="placeholder")) is None


@given(strategies.nested_builtins(), st.sampled_from(PROTOCOLS), st.randoms(use_true_random=False))
def test_a_value_is_where_its_path_says(made, protocol, dice):
    data = pickle.dumps(made, protocol)
    rows = [row.path for row in fastcap.scan(data).nodes if row.type not in ("more", "str", "bytes")]
    path = dice.choice(rows)
    value = object()
    found = loads(data, replace={path: value})
    for step in parse(path).steps:
        if step.kind != "item":  # a member of a set, an object that is a key
            return
        found = found[step.value]
    assert found is value


def test_other_errors_are_not_hidden():
    with pytest.raises(ZeroDivisionError):
        loads(pickle.dumps(Fails()), missing="placeholder")
    with pytest.raises(pickle.UnpicklingError):
        loads(b"\x80\x04h\x05.", missing="placeholder")
    with pytest.raises(IndexError):
        loads(b"\x80\x04R.", missing="placeholder")


class Fails:
    def __reduce__(self):
        return divide, (1, 0)


def divide(x, y):
    return x / y


def test_names_of_old_protocols():
    found = loads(b"cgone_library\nPlain\n.", missing="placeholder")
    assert found.name == "gone_library:Plain"
    found = loads(b"(i__builtin__\nnot_there\n.", missing="placeholder")
    assert found.made_by.name == "builtins:not_there"
    found = loads(b"(cgone_library\nPlain\nK\x01o.", missing="placeholder")
    assert (found.made_by.name, found.args) == ("gone_library:Plain", (1,))
