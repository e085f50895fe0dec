"""Edited pickles: loading one equals loading the original and editing it in memory, sharing included."""

import bz2
import contextlib
import dataclasses
import errno
import functools
import gzip
import io
import lzma
import os
import pickle
import pickletools
import random
import re
import resource
import signal
import struct
import subprocess
import sys
import time
import tracemalloc
import types
import zlib
from collections import namedtuple
from copy import deepcopy

import cloudpickle
import corpus
import pytest
import strategies
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import difference

import fastcap
from fastcap import EditError, PayloadError
from fastcap._native.editor import Program, Rewriter
from fastcap._native.graph import Graph
from fastcap._native.scanner import Scanner
from fastcap.cli import main
from fastcap.editing import Editor, Pickled, parse_replacement, replace_nodes
from fastcap.opening import scan_source
from fastcap.paths import Shortened, parse
from fastcap.writing import written_beside

PROTOCOLS = range(2, 6)


def graph_of(stream):
    scanner = Scanner()
    scanner.write(stream)
    graph = Graph(scanner.finish())
    own, subtree, retained = (memoryview(sizes).cast("Q").tolist() for sizes in graph.sizes())
    assert sum(own) + graph.overhead == len(stream)
    assert subtree[0] + graph.overhead == len(stream)
    assert retained[0] == sum(own)
    return graph


def all_paths(editor, most=200):
    """Paths of a payload, those that lead through references too, about so many."""
    root = editor.explainer.path(0)
    found, level = [], [root]
    seen = set()
    while level and len(found) < most:
        following = []
        for path in level:
            index = editor.explainer.find(parse(path).steps)
            if index is None or editor.explainer.reader.resolve(index) in seen:
                continue
            seen.add(editor.explainer.reader.resolve(index))
            following += editor.below(path)
        found += following
        level = following
    return found


# --- in memory -------------------------------------------------------------------------------------------------------


class Unsupported(Exception):
    """A path whose meaning in memory this module does not know."""


def literal(value):
    if isinstance(value, Shortened):
        raise Unsupported
    return value


def cell_of(function, name):
    return function.__closure__[function.__code__.co_freevars.index(name)]


def step_into(obj, step):
    kind, value = step.kind, literal(step.value)
    try:
        if kind == "attr":
            if isinstance(obj, (type, types.FunctionType)):
                return vars(obj)[value]
            if type(obj) in (types.MethodType, types.MappingProxyType):
                raise Unsupported
            return getattr(obj, value)
        if kind == "item" and isinstance(obj, (list, tuple, dict)):
            return obj[value]
        if kind == "closure":
            return cell_of(obj, value).cell_contents
        if kind == "global":
            return obj.__globals__[value]
        if kind == "default":
            return default_of(obj, value)
        if kind == "self":
            return obj.__self__
    except (KeyError, AttributeError, IndexError, TypeError, ValueError) as error:
        raise Unsupported from error
    raise Unsupported


def default_of(function, name):
    if name in (function.__kwdefaults__ or {}):
        return function.__kwdefaults__[name]
    code = function.__code__
    names = code.co_varnames[code.co_argcount - len(function.__defaults__ or ()):code.co_argcount]
    return function.__defaults__[names.index(name)]


def edit_in_memory(obj, step, put):
    """Drop what a step leads to, or put something in its place; ``put`` is a tuple of the value, or empty."""
    kind, name = step.kind, literal(step.value)
    step_into(obj, step)
    if isinstance(obj, (corpus.Bag, BaseException, types.ModuleType)) or hasattr(type(obj), "__setstate__"):
        raise Unsupported  # they make of their state what they like
    if kind == "item" and type(obj) in (list, dict) and (type(obj) is list or put or name in obj):
        if put:
            obj[name] = put[0]
        else:
            del obj[name]
    elif kind == "attr" and name in getattr(obj, "__dict__", ()) and not isinstance(obj, type):
        if put:
            obj.__dict__[name] = put[0]
        else:
            del obj.__dict__[name]
    elif kind == "attr" and type(obj) is type and not name.startswith("_"):
        if put:
            setattr(obj, name, put[0])
        else:
            delattr(obj, name)
    elif kind == "closure":
        cell_of(obj, name).cell_contents = put[0] if put else None
    elif kind == "global":
        obj.__globals__[name] = put[0] if put else None
    elif kind == "default":
        value = put[0] if put else None
        if name in (obj.__kwdefaults__ or {}):
            obj.__kwdefaults__[name] = value
        else:
            code = obj.__code__
            names = code.co_varnames[code.co_argcount - len(obj.__defaults__):code.co_argcount]
            obj.__defaults__ = tuple(
                value if known == name else held for known, held in zip(names, obj.__defaults__))
    else:
        raise Unsupported


def expected(stream, path, put=()):
    """The object that an edited pickle has to load to."""
    holder = pickle.loads(stream)
    steps = parse(path).steps
    target = holder
    for step in steps[:-1]:
        target = step_into(target, step)
    edit_in_memory(target, steps[-1], put)
    return holder


def check_edit(stream, path, put=()):
    """One edit in the stream and in memory; whether the path's meaning in memory is known."""
    try:
        wanted = expected(stream, path, put)
    except Unsupported:
        return False
    with Editor(stream) as editor:
        if put:
            editor.replace(path, put[0])
        else:
            editor.drop(path)
        output = io.BytesIO()
        summary = editor.write(output)
    edited = output.getvalue()
    assert summary.new_size == len(edited)
    assert summary.old_size == len(stream)
    graph_of(edited)
    loaded = pickle.loads(edited)
    try:
        found = difference(wanted, loaded)
    except (AttributeError, TypeError) as error:
        # objects that cannot be reduced any more without what was dropped cannot be compared either
        with pytest.raises(type(error)):
            difference(wanted, expected(stream, path, put))
        return False
    assert found is None, path
    return True


def dump(obj, protocol):
    try:
        return cloudpickle.dumps(obj, protocol)
    except Exception:
        return None


def some_paths(made, protocol, dice):
    """The pickle of an object and four paths in it; none if it cannot be pickled."""
    stream = dump(made, protocol)
    if stream is None:
        return b"", []
    with Editor(stream) as editor:
        paths = all_paths(editor)
    dice.shuffle(paths)
    return stream, paths[:4]


@settings(max_examples=4 * settings().max_examples)
@given(strategies.objects(), st.sampled_from(PROTOCOLS), st.randoms(use_true_random=False))
def test_dropping_is_what_it_is_in_memory(made, protocol, dice):
    stream, paths = some_paths(made, protocol, dice)
    for path in paths:
        with contextlib.suppress(EditError):
            check_edit(stream, path)


@settings(max_examples=2 * settings().max_examples)
@given(strategies.objects(), st.sampled_from(PROTOCOLS), st.randoms(use_true_random=False))
def test_replacing_is_what_it_is_in_memory(made, protocol, dice):
    stream, paths = some_paths(made, protocol, dice)
    shared = ["shared"]
    for path in paths:
        check_edit(stream, path, ({"new": shared, "again": [shared, 1.5]},))


def without_member(root, owner, position):
    """A copy of an object graph in which one tuple is a member shorter, wherever it is referred to."""
    memo: dict = {}
    shorter = tuple(deepcopy(part, memo) for k, part in enumerate(owner) if k != position)
    if id(owner) in memo:  # it contains itself
        raise Unsupported
    memo[id(owner)] = shorter
    return deepcopy(root, memo)


@settings(max_examples=2 * settings().max_examples)
@given(strategies.nested_builtins(), st.sampled_from(range(6)), st.randoms(use_true_random=False))
def test_tuples_become_shorter(made, protocol, dice):
    stream = pickle.dumps(made, protocol)
    loaded = pickle.loads(stream)
    with Editor(stream) as editor:
        paths = all_paths(editor)
    dice.shuffle(paths)
    for path in paths[:6]:
        steps = parse(path).steps
        with contextlib.suppress(Unsupported):
            owner = loaded
            for step in steps[:-1]:
                owner = step_into(owner, step)
            if type(owner) is not tuple:
                continue
            wanted = without_member(loaded, owner, steps[-1].value)
            edited = fastcap.edit(stream, drop=path)
            graph_of(edited)
            assert difference(wanted, pickle.loads(edited)) is None, path


# --- what an edit means ----------------------------------------------------------------------------------------------


class Plain:
    def __init__(self, **attributes):
        self.__dict__.update(attributes)


class Slotted:
    __slots__ = ("a", "b")


Pair = namedtuple("Pair", "first second")


def edited(obj, *drop, protocol=None, **replace):
    """What an object loads to after its pickle has been edited."""
    return pickle.loads(fastcap.edit(cloudpickle.dumps(obj, protocol), drop=drop, **replace))


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
def test_a_member_of_a_tuple(size, protocol):
    whole = tuple(f"member {k}" for k in range(size))
    for k in range(size):
        stream = fastcap.edit(pickle.dumps([whole, whole], protocol), drop=f"obj[0][{k}]")
        found = pickle.loads(stream)
        assert found == [whole[:k] + whole[k + 1:]] * 2
        assert found[0] is found[1]
        assert pickle._loads(stream) == found


def test_arity_opcodes_of_tuples():
    stream = fastcap.edit(pickle.dumps((1, 2, 3), 2), drop=["obj[0]", "obj[2]"])
    assert [op.name for op, _, _ in pickletools.genops(stream)] == ["PROTO", "BININT1", "TUPLE1", "BINPUT", "STOP"]
    stream = fastcap.edit(pickle.dumps((1,), 4), drop="obj[0]")
    assert [op.name for op, _, _ in pickletools.genops(stream)] == ["PROTO", "EMPTY_TUPLE", "MEMOIZE", "STOP"]


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("make", [set, frozenset])
def test_a_member_of_a_set(make, protocol):
    whole = make(["a", "b", 3, ("c", 4)])
    stream = pickle.dumps(whole, protocol)
    with Editor(stream) as editor:
        paths = [path for path in all_paths(editor) if path.count("<") == 1 and "[" not in path.partition(">")[2]]
    left = [pickle.loads(fastcap.edit(stream, drop=path)) for path in paths if "member" in path]
    if protocol >= 4:
        assert len(left) == 4
        assert set.union(*map(set, left)) == whole
    assert all(len(one) == 3 and one < whole for one in left)


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("count", [1, 2, 1000, 1001, 2005])
def test_batches_of_lists_and_dicts(count, protocol):
    numbers, entries = list(range(count)), {f"k{i}": i for i in range(count)}
    for k in {0, count - 1, count // 2}:
        found = edited_plain({"list": numbers, "dict": entries}, f"obj['list'][{k}]", f"obj['dict']['k{k}']", protocol)
        assert found == {"list": numbers[:k] + numbers[k + 1:], "dict": {n: v for n, v in entries.items() if v != k}}


def edited_plain(obj, *rest):
    *drop, protocol = rest
    stream = fastcap.edit(pickle.dumps(obj, protocol), drop=drop)
    graph_of(stream)
    assert pickle._loads(stream) == pickle.loads(stream)
    return pickle.loads(stream)


def test_nothing_is_appended_or_set_where_nothing_is_left():
    stream = fastcap.edit(pickle.dumps({"a": [1], "b": [2, 3], "c": {"d": 4}, "e": {5}}), drop=[
        "obj['a'][0]", "obj['b'][0]", "obj['b'][1]", "obj['c']['d']", "obj['e']<member 0>"])
    assert pickle.loads(stream) == {"a": [], "b": [], "c": {}, "e": set()}
    names = [op.name for op, _, _ in pickletools.genops(stream)]
    assert names.count("MARK") == names.count("SETITEMS") == 1
    assert not {"APPEND", "APPENDS", "SETITEM", "ADDITEMS"} & set(names)


@pytest.mark.parametrize("protocol", range(2, 6))
def test_attributes(protocol):
    slotted = Slotted()
    slotted.a, slotted.b = [1], [2]
    found = edited([Plain(x=1, y=[2]), slotted, Plain(z=3)], "obj[0].y", "obj[1].a", "obj[2].z", protocol=protocol)
    assert vars(found[0]) == {"x": 1}
    assert not hasattr(found[1], "a")
    assert found[1].b == [2]
    assert vars(found[2]) == {}


def test_a_state_that_is_no_dict_goes_with_its_build():
    stream = pickle.dumps(corpus.StateOther(("state", 1)) if hasattr(corpus, "StateOther") else None)
    with Editor(stream) as editor:
        (path,) = [path for path in all_paths(editor) if path.endswith("<state>")]
    assert "BUILD" not in [op.name for op, _, _ in pickletools.genops(fastcap.edit(stream, drop=path))]


def make_function():
    big = ["closure"]

    def inner(x, y="default", *, z="keyword"):
        return big, KNOWN, x, y, z

    inner.note = ["attribute"]
    return inner


KNOWN = ["global"]


def test_what_code_needs_becomes_none():
    function = make_function()
    by_value = types.FunctionType(
        function.__code__, {"KNOWN": KNOWN, "__name__": "__main__", "__builtins__": __builtins__}, "inner",
        function.__defaults__, function.__closure__)
    by_value.__kwdefaults__, by_value.__module__ = {"z": "keyword"}, "__main__"
    by_value.note = ["attribute"]
    assert edited(by_value)(1) == (["closure"], ["global"], 1, "default", "keyword")
    for path, wanted in {
        "inner<closure big>": (None, ["global"], 1, "default", "keyword"),
        "inner<global KNOWN>": (["closure"], None, 1, "default", "keyword"),
        "inner<default y>": (["closure"], ["global"], 1, None, "keyword"),
        "inner<default z>": (["closure"], ["global"], 1, "default", None),
    }.items():
        found = edited(by_value, path)
        assert found(1) == wanted, path
        assert found.note == ["attribute"]
    assert not hasattr(edited(by_value, "inner.note"), "note")
    assert edited(Pair(1, [2]), "obj<arg 1>") == Pair(1, None)
    assert edited(functools.partial(print, 1, [2], sep=""), "obj<arg 0>").args == (None, [2])
    assert edited(functools.partial(print, 1, [2], sep=""), "obj<keyword sep>").keywords == {}


@pytest.mark.skipif(sys.version_info < (3, 11), reason="frozen dataclasses with slots restore themselves from 3.11 on")
def test_fields_in_a_state_that_is_a_list_become_none():
    made = dataclasses.make_dataclass("Made", ["first", "second"], frozen=True, slots=True)
    made.__module__ = "__main__"
    with Editor(cloudpickle.dumps(made(["a"], ["b"]))) as editor:
        paths = [path for path in all_paths(editor) if path in ("obj.first", "obj.second")]
    assert paths
    found = edited(made(["a"], ["b"]), "obj.first")
    assert (found.first, found.second) == (None, ["b"])


def test_elements_of_an_array_become_none():
    numpy = pytest.importorskip("numpy", reason="numpy is not installed")
    array = numpy.array([[["a"], None], [["b"], 3]], dtype=object)
    for protocol in PROTOCOLS:
        stream = pickle.dumps({"array": array}, protocol)
        with Editor(stream) as editor:
            paths = [path for path in all_paths(editor) if path.startswith("obj['array'][")]
        assert paths
        found = pickle.loads(fastcap.edit(stream, drop=paths[0]))["array"]
        assert found.shape == (2, 2)
        assert (found[0, 0], found[1, 0]) == (None, ["b"])


@pytest.mark.parametrize(("obj", "path", "word"), [
    (Plain(a=1).__init__, "obj<self>", "needs its object"),
    ([1], "obj", "nothing left"),
])
def test_what_cannot_be_dropped(obj, path, word):
    with pytest.raises(EditError, match=word) as error:
        fastcap.edit(cloudpickle.dumps(obj), drop=path)
    assert error.value.paths == (path,)
    assert pickle.loads(pickle.dumps(error.value)).paths == (path,)


def test_the_object_of_a_method_can_be_replaced():
    other = Plain(a=2)
    assert edited(Plain(a=1).__init__, replace={"obj<self>": other}).__self__.a == 2


def test_a_place_that_is_not_there():
    stream = pickle.dumps({"config": {"data": 1}, "number": 5})
    for path, word in {
        "obj['confg']['data']": "has no ['confg']: did you mean ['config']",
        "obj['config']['dota']": "obj['config'] has no ['dota']: did you mean ['data']",
        "obj['number'].real": "obj['number'] has no parts",
        "root['config']": "its root is called obj",
    }.items():
        with pytest.raises(EditError) as error:
            fastcap.edit(stream, drop=path)
        assert word in str(error.value)
    with pytest.raises(ValueError, match="not a path"):
        fastcap.edit(stream, drop="obj[")


def test_a_key_that_is_set_twice():
    stream = b"\x80\x04}(\x8c\x01aK\x01\x8c\x01aK\x02\x8c\x01bK\x03u."
    assert pickle.loads(stream) == {"a": 2, "b": 3}
    assert pickle.loads(fastcap.edit(stream, drop="obj['a']")) == {"b": 3}
    assert pickle.loads(fastcap.edit(stream, replace={"obj['a']": 7})) == {"a": 7, "b": 3}


# --- references ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", range(6))
def test_the_first_reference_that_is_left_gets_the_definition(protocol):
    inner = ["inner"]
    shared = [inner, Plain(inner=inner), (inner, "text")]
    whole = {"first": [shared, inner], "second": (shared,), "third": [inner, shared, shared[1]]}
    for drop in (["obj['first']"], ["obj['first']", "obj['second']"], ["obj['first'][0]", "obj['third'][1]"],
                 ["obj['second'][0]"], ["obj['first'][0][0]"], ["obj['first'][0]", "obj['first'][1]"]):
        wanted = deepcopy(whole)
        for path in drop:
            if path == "obj['second'][0]":
                wanted["second"] = ()
            else:
                *above, last = parse(path).steps
                owner = wanted
                for step in above:
                    owner = step_into(owner, step)
                edit_in_memory(owner, last, ()) if len(drop) == 1 or type(owner) is dict else None
                if len(drop) > 1 and type(owner) is list:
                    owner[last.value] = ...
        for name in ("first", "third"):
            if name in wanted:
                wanted[name] = [part for part in wanted[name] if part is not ...]
        stream = fastcap.edit(pickle.dumps(whole, protocol), drop=drop)
        assert difference(wanted, pickle.loads(stream)) is None, drop
        graph_of(stream)


@pytest.mark.parametrize("protocol", range(6))
def test_what_contains_itself_moves_too(protocol):
    loop: list = []
    recursive = (loop, "text")
    loop += [recursive, ["more"]]
    for keep in (recursive, loop, loop[1], [loop, recursive], [recursive, loop]):
        found = pickle.loads(fastcap.edit(pickle.dumps({"a": [recursive], "b": keep}, protocol), drop="obj['a']"))
        assert difference({"b": keep}, found) is None
        found = pickle.loads(fastcap.edit(pickle.dumps({"a": [loop], "b": keep}, protocol), drop="obj['a']"))
        assert difference({"b": keep}, found) is None


def test_a_long_chain_of_references_moves():
    chain = [["end"]]
    for _ in range(50_000):
        chain.append([chain[-1]])
    stream = pickle.dumps({"a": chain, "b": chain[-1]})
    with Editor(stream) as editor:
        editor.drop("obj['a']")
        link = pickle.load(editor.open())["b"]
    for _ in range(50_000):
        (link,) = link
    assert link == ["end"]


def test_deeply_nested_parts_move_from_the_inside_out():
    nested = [[0]]
    for k in range(30_000):
        nested.append([nested[-1], k])
    stream = fastcap.dumps({"a": nested[-1], "b": nested})
    found = pickle.loads(fastcap.edit(stream, drop="obj['a']"))["b"]
    assert found[0] == [0]
    assert all(found[k + 1][0] is found[k] and found[k + 1][1] == k for k in range(30_000))


def test_a_part_that_is_dropped_where_it_is_written_is_dropped_where_it_moves():
    shared = {"keep": 1, "big": ["x"] * 3}
    stream = pickle.dumps({"a": shared, "b": [shared, shared]})
    found = pickle.loads(fastcap.edit(stream, drop=["obj['a']", "obj['b'][0]['big']"]))
    assert found == {"b": [{"keep": 1}] * 2}
    assert found["b"][0] is found["b"][1]
    found = pickle.loads(fastcap.edit(stream, drop=["obj['a']"], replace={"obj['b'][1]['big']": [2.5]}))
    assert found == {"b": [{"keep": 1, "big": [2.5]}] * 2}


def test_replacing_one_place_leaves_the_others():
    shared = ["shared"]
    found = pickle.loads(fastcap.edit(pickle.dumps([shared, shared, shared]), replace={"obj[0]": 1, "obj[2]": "x"}))
    assert found == [1, ["shared"], "x"]


def test_replacing_a_node_replaces_it_everywhere():
    shared = ["shared"]
    for protocol in range(2, 6):
        stream = pickle.dumps({"a": shared, "b": [shared, (shared,)]}, protocol)
        with Editor(stream) as editor:
            index = editor.explainer.find(parse("obj['a']").steps)
        pieces = {b"N": None, b"](K\x01K\x02e": [1, 2], pickle.dumps({"new": 1}, protocol): {"new": 1}}
        for opcodes, wanted in pieces.items():
            with replace_nodes(stream, {index: opcodes}) as file:
                found = pickle.load(file)
            assert found == {"a": wanted, "b": [wanted, (wanted,)]}
            assert found["a"] is found["b"][0] is found["b"][1][0]
    with Editor(stream) as editor, pytest.raises(IndexError):
        editor.replace_node(10_000, b"N")
    with Editor(stream) as editor, pytest.raises(PayloadError):
        editor.replace_node(0, b"aa")


def test_a_node_becomes_a_persistent_identifier():
    class Loader(pickle.Unpickler):
        def persistent_load(self, pid):
            return f"loaded {pid}"

    stream = pickle.dumps({"a": Plain(x=1), "b": 2})
    with Editor(stream) as editor:
        editor.replace_node(editor.explainer.find(parse("obj['a']").steps), b"\x8c\x03oneQ")
        assert Loader(editor.open()).load() == {"a": "loaded one", "b": 2}


def test_replacements_bring_their_own_memo():
    shared = ["shared", "text"]
    value = [shared, {"again": shared}, ("text", shared)]
    before = {"a": [1], "b": {"c": shared}, "d": shared}
    for protocol in range(2, 6):
        stream = pickle.dumps(before, protocol)
        found = pickle.loads(fastcap.edit(stream, replace={"obj['a']": value, "obj['b']": value}))
        assert difference({"a": deepcopy(value), "b": deepcopy(value), "d": shared}, found) is None
        piece = pickle.dumps(value, protocol)
        for source in (piece, io.BytesIO(piece)):
            found = pickle.loads(fastcap.edit(stream, replace={"obj['a'][0]": Pickled(source)}))
            assert difference({**before, "a": [deepcopy(value)]}, found) is None


def test_a_piece_of_another_protocol():
    stream = pickle.dumps({"a": 1}, 2)
    with pytest.raises(EditError, match="pickle it again with protocol 2"):
        fastcap.edit(stream, replace={"obj['a']": Pickled(pickle.dumps(Plain(), 3))})
    assert pickle.loads(fastcap.edit(stream, replace={"obj['a']": Pickled(pickle.dumps([1], 5))})) == {"a": [1]}
    edited_stream = fastcap.edit(pickle.dumps({"a": 1}, 3), replace={"obj['a']": Pickled(pickle.dumps({1}, 5))})
    assert edited_stream[:2] == b"\x80\x05"
    assert pickle.loads(edited_stream) == {"a": {1}}
    with pytest.raises(EditError, match="out-of-band"):
        fastcap.edit(stream, replace={"obj['a']": Pickled(b"\x80\x05\x97.")})


def test_the_root_can_be_replaced():
    assert pickle.loads(fastcap.edit(pickle.dumps({"a": 1}), replace={"obj": [1, 2]})) == [1, 2]


# --- any stream ------------------------------------------------------------------------------------------------------

# Loading gives each instance a copy of a dict that they share in the pickle, and as the original.
SHARED_STATE = ("instance whose dict is shared",)
ODD = ("DUP", "memo overwritten", "two dumps of one pickler")


def opcodes_of(stream):
    """Opcodes and arguments, without frames."""
    operations = [(op.name, arg) for op, arg, _ in pickletools.genops(stream) if op.name not in ("FRAME", "PROTO")]
    return [(name, "nan" if arg != arg else arg) for name, arg in operations]


def test_a_pickle_that_is_not_changed_stays_what_it_is(corpus_payloads):
    for payload in corpus_payloads:
        if payload.name.startswith(ODD):
            with pytest.raises(EditError):
                Editor(payload.stream)
            continue
        with Editor(payload.stream, buffers=[buffer.raw() for buffer in payload.buffers or ()]) as editor:
            output = io.BytesIO()
            summary = editor.write(output)
        stream = output.getvalue()
        assert summary.new_size == len(stream)
        assert summary.unused_buffers == ()
        assert summary.buffers == tuple(range(len(payload.buffers or ())))
        if "memo ind" in payload.name:  # their numbers become those that picklers write
            before = [op.replace("LONG_", "") for op, _ in opcodes_of(payload.stream)]
            assert [op for op, _ in opcodes_of(stream)] == before
        else:
            assert opcodes_of(stream) == opcodes_of(payload.stream), payload.name
        if payload.stream.count(b"\x95") < 2:
            assert len(stream) <= len(payload.stream)


def test_every_payload_can_be_edited_anywhere(corpus_payloads, long_run):
    dice = random.Random(6)
    counts = dict.fromkeys(("edited", "compared", "refused"), 0)
    for payload in corpus_payloads:
        if payload.name.startswith(ODD):
            continue
        kind = corpus.KINDS.get(payload.name.rpartition(",")[0])
        with Editor(payload.stream) as editor:
            paths = all_paths(editor, 60)
        for path in dice.sample(paths, min(5 if long_run else 1, len(paths))):
            put = (["new", "new"],) if dice.random() < 0.5 else ()
            try:
                stream = fastcap.edit(payload.stream, drop=[] if put else path, replace={path: put[0]} if put else {})
            except EditError:
                counts["refused"] += 1
                continue
            counts["edited"] += 1
            graph_of(stream)
            assert opcodes_of(stream)[-1][0] == "STOP"
            # Not everything is loaded: what gets None in the place of an argument may do anything.
            known = kind is not None and kind.loads and kind.name not in SHARED_STATE
            if known and not payload.buffers and "<" not in path:
                counts["compared"] += check_edit(payload.stream, path, put)
    assert counts["compared"] > 200
    assert counts["edited"] > 10 * counts["refused"]


@settings(max_examples=2 * settings().max_examples)
@given(strategies.objects(), st.sampled_from(PROTOCOLS), st.randoms(use_true_random=False))
def test_a_part_leaves_with_its_retained_size(made, protocol, dice):
    stream, paths = some_paths(made, protocol, dice)
    for path in paths:
        if path[-1] == "]" and path.count("[") == 1:
            check_size(stream, path)


def check_size(stream, path):
    report = fastcap.scan(stream)
    row = report.find(path)
    with Editor(stream) as editor:
        key = editor._find(path)
        if row is None or len(key) != 1 or row.shared_by or key[0].slot.kind != 1:
            return
        editor.drop(path)
        summary = editor.measure()
        slots = editor._reader.slots(key[0].parent)
        extra = 0
        if key[0].slot.role == 2:  # a dict entry takes its key along
            number = editor._other(key[0])
            start, end, target, kind = slots.slot(number)[2:6]
            extra = editor.graph.node(target).retained_size if kind == 1 else end - start
    shrunk = summary.old_size - summary.new_size
    # frame header, marks and batch opcodes, and 3 bytes for each memo reference that becomes short
    assert row.retained_size + extra <= shrunk + 8
    assert shrunk <= row.retained_size + extra + 9 + 4 + 3 * editor.graph.reference_count


def test_a_big_part_leaves_with_its_retained_size():
    words = ["in every part"]
    parts = {
        f"part {k}": [{"name": f"{k} {i}", "words": words, "bytes": bytes(i)} for i in range(400)] for k in range(9)
    }
    for protocol in PROTOCOLS:
        stream = pickle.dumps(parts, protocol)
        report = fastcap.scan(stream)
        for k in range(9):
            retained = report.find(f"obj['part {k}']").retained_size
            shrunk = len(stream) - len(fastcap.edit(stream, drop=f"obj['part {k}']"))
            assert 0 <= shrunk - retained - len("part 0") < 0.06 * retained


def test_frames_are_whole():
    data = [os.urandom(size) for size in (10, 600, 5000, 70_000, 200_000, 3)] + [f"text {i}" for i in range(20_000)]
    for protocol in range(6):
        stream = fastcap.edit(pickle.dumps({"a": data, "b": data[3]}, protocol), drop=["obj['a'][1]", "obj['a'][3]"])
        wanted = data[:1] + data[2:3] + data[4:]
        assert pickle._loads(stream) == pickle.loads(stream) == {"a": wanted, "b": data[3]}
        frames = ends = 0
        for op, argument, at in pickletools.genops(stream):
            if op.name == "FRAME":
                assert at >= ends
                ends = at + 9 + argument
                frames += 1
        assert (frames > 3) == (protocol >= 4)
        assert len(stream) >= ends


def test_memo_references_become_wider_and_narrower():
    rows = [[f"text {i}"] for i in range(600)]
    for protocol in range(6):
        stream = pickle.dumps({"a": rows[:300], "b": rows[::-1], "c": rows}, protocol)
        with Editor(stream) as editor:
            editor.drop("obj['a']")
            editor.drop("obj['b'][7]")
            edited_stream = b"".join(map(bytes, editor.blocks()))
        found = pickle.loads(edited_stream)
        backwards = rows[::-1]
        assert difference({"b": backwards[:7] + backwards[8:], "c": rows}, found) is None
        for op, argument, _ in pickletools.genops(edited_stream):
            assert op.name not in ("LONG_BINGET", "LONG_BINPUT") or argument > 255


# --- buffers and persistent identifiers ------------------------------------------------------------------------------


def test_buffers_that_are_dropped_or_moved():
    data = [bytearray(b"%d" % k * 10) for k in range(4)]
    holders = [pickle.PickleBuffer(part) for part in data]
    buffers: list = []
    shared = ["shared", holders[0]]
    stream = pickle.dumps({"a": shared, "b": holders[1], "c": [holders[2], shared], "d": holders[3]}, 5,
                          buffer_callback=buffers.append)
    with Editor(stream, buffers=buffers) as editor:
        editor.drop("obj['a']")
        editor.drop("obj['b']")
        output = io.BytesIO()
        summary = editor.write(output)
    assert summary.buffers == (2, 0, 3)
    assert summary.unused_buffers == (1,)
    found = pickle.loads(output.getvalue(), buffers=[buffers[number] for number in summary.buffers])
    left = found["c"][0], found["c"][1][1], found["d"]
    assert list(map(bytes, left)) == [data[2], data[0], data[3]]


def test_persistent_identifiers_and_extensions_are_copied():
    for protocol in range(2, 6):
        file = io.BytesIO()
        corpus.IdentifyingPickler(file, protocol).dump({"a": [1, 2], "b": [corpus.Plain(x=1), 3]})
        stream = fastcap.edit(file.getvalue(), drop=["obj['a'][0]", "obj['b'][1]"])
        assert "BINPERSID" in [op.name for op, _, _ in pickletools.genops(stream)]
    stream = b"\x80\x02}(U\x01a\x82\x07U\x01bK\x01U\x01c\x83\x07\x01u."
    assert fastcap.edit(stream, drop="obj['b']") == b"\x80\x02}(U\x01a\x82\x07U\x01c\x83\x07\x01u."


# --- Ray's handles ---------------------------------------------------------------------------------------------------


class Stand:
    """Is pickled under a name of the same form as Ray's."""

    def __init__(self, maker):
        self.maker = maker

    def __reduce__(self):
        return self.maker, (b"handle", None)


def stand_actor(*_):
    raise AssertionError("a handle was loaded")


def stand_reference(*_):
    raise AssertionError("a reference was loaded")


def with_handles(protocol):
    handle, reference = Stand(stand_actor), Stand(stand_reference)
    stream = pickle.dumps({"a": handle, "b": [handle, reference, 1], "c": Plain(r=reference)}, protocol)
    here = __name__.encode()
    makers = {b"stand_actor": b"_actor_handle_deserializer", b"stand_reference": b"_object_ref_deserializer"}
    for name, rays in makers.items():
        stream = stream.replace(b"c%b\n%b\n" % (here, name), b"cray._private.serialization\n%b\n" % rays)
    return stream


@pytest.mark.parametrize("protocol", [2, 3])
def test_handles_are_dropped(protocol):
    stream = with_handles(protocol)
    found = pickle.loads(fastcap.edit(stream, handles="drop"))
    assert (found["a"], found["b"], found["c"].r) == (None, [None, None, 1], None)


@pytest.mark.parametrize("protocol", [2, 3])
def test_handles_become_placeholders(protocol):
    stream = fastcap.edit(with_handles(protocol), handles="placeholder")
    found = pickle.loads(stream)
    assert found["a"] is found["b"][0]
    assert found["c"].r is found["b"][1]
    first, second = found["b"][:2]
    assert isinstance(first, fastcap.Unrestorable)
    assert (first.path, first.kind) == ("obj['a']", "ActorHandle")
    assert (second.path, second.kind) == ("obj['b'][1]", "ObjectRef")
    assert second.id == (b"handle".hex() if protocol > 2 else "")
    graph_of(stream)
    with Editor(with_handles(protocol)) as editor:
        assert editor.drop_handles() == 2
        assert [change.action for change in editor.measure().changes] == ["set to None"] * 2


# --- sources and targets ---------------------------------------------------------------------------------------------

OBJECT = {"a": [1, 2, 3], "big": os.urandom(300_000), "text": ["t" * 3000, "u" * 700]}
PACKERS = {"gzip": (gzip.compress, gzip.decompress), "bz2": (bz2.compress, bz2.decompress),
           "xz": (lzma.compress, lzma.decompress), "zlib": (zlib.compress, zlib.decompress),
           "lzma": (lambda data: lzma.compress(data, lzma.FORMAT_ALONE), lzma.decompress)}
with contextlib.suppress(ImportError):
    import lz4.frame
    PACKERS["lz4"] = (lz4.frame.compress, lz4.frame.decompress)
with contextlib.suppress(ImportError):
    import zstandard
    PACKERS["zstd"] = (zstandard.compress, lambda data: zstandard.ZstdDecompressor().decompressobj().decompress(data))


class Pipe(io.RawIOBase):
    """A file that cannot seek and gives little at a time."""

    def __init__(self, data):
        self.inner = io.BytesIO(data)

    def readable(self):
        return True

    def readinto(self, target):
        return self.inner.readinto(memoryview(target)[:4099])


def test_sources(tmp_path):
    stream = pickle.dumps(OBJECT)
    wanted = {**OBJECT, "a": [1, 3]}
    path = tmp_path / "a.pkl"
    path.write_bytes(stream)
    behind = io.BytesIO(b"header" + stream)
    behind.seek(6)
    with open(path, "rb") as file:
        for source in (stream, bytearray(stream), memoryview(stream), path, str(path), file, io.BytesIO(stream), behind,
                       Pipe(stream), io.BufferedReader(Pipe(stream))):
            assert pickle.loads(fastcap.edit(source, drop="obj['a'][1]")) == wanted, source
    assert path.read_bytes() == stream


@pytest.mark.parametrize("compression", PACKERS)
def test_compressed_files_are_compressed_again(compression, tmp_path):
    pack, unpack = PACKERS[compression]
    path = tmp_path / "a.pkl"
    path.write_bytes(pack(pickle.dumps(OBJECT)))
    summary = fastcap.edit(path, path, drop="obj['a'][1]")
    assert summary.compression == compression
    assert pickle.loads(unpack(path.read_bytes())) == {**OBJECT, "a": [1, 3]}
    assert os.listdir(tmp_path) == ["a.pkl"]


def test_a_big_compressed_file_is_spooled(monkeypatch):
    monkeypatch.setattr("fastcap.editing._IN_MEMORY", 10_000)
    stream = pickle.dumps(OBJECT)
    found = gzip.decompress(fastcap.edit(gzip.compress(stream), drop="obj['a'][1]"))
    assert pickle.loads(found) == {**OBJECT, "a": [1, 3]}
    assert pickle.loads(fastcap.edit(Pipe(stream), drop="obj['a']")) == {k: v for k, v in OBJECT.items() if k != "a"}


@pytest.mark.parametrize(("stream", "word"), [
    (pickle.dumps(1) + pickle.dumps(2), "holds 2 pickles"),
    (pickle.dumps(1) + b"\xff\xff", "holds 1 pickles and other bytes"),
    (b"PK\x03\x04" + bytes(100), "zip"),
    (b"\x80\x02]2\x86.", "DUP"),
    (b"\x80\x02]q\x00]q\x00h\x00\x87.", "set twice"),
    (b"\x80\x02]q\x00h\x00q\x01\x86.", "second name"),
    (b"\x80\x02]r\x00\x00\x00\x10.", "out of all proportion"),
])
def test_what_cannot_be_edited_is_refused(stream, word):
    with pytest.raises(EditError, match=word):
        fastcap.edit(stream)


def test_files_of_joblib_and_torch_are_refused(tmp_path):
    joblib = pytest.importorskip("joblib", reason="joblib is not installed")
    numpy = pytest.importorskip("numpy")
    joblib.dump({"a": numpy.zeros(1000)}, tmp_path / "a.joblib")
    with pytest.raises(EditError, match="joblib"):
        fastcap.edit(tmp_path / "a.joblib", drop="obj['a']")


def test_a_source_that_becomes_shorter(tmp_path):
    path = tmp_path / "a.pkl"
    for size in (300_000, 3000):
        path.write_bytes(pickle.dumps({"a": 1, "big": bytes(size)}))
        with Editor(path) as editor:
            editor.drop("obj['a']")
            os.truncate(path, size // 2)
            with pytest.raises(PayloadError, match="shorter"):
                editor.write(io.BytesIO())


def test_a_file_appears_whole_or_not_at_all(tmp_path):
    path = tmp_path / "a.pkl"
    path.write_bytes(b"before")
    path.chmod(0o640)
    with pytest.raises(OSError, match="full"), written_beside(str(path)) as file:
        file.write(b"half")
        raise OSError(errno.ENOSPC, "full")
    with pytest.raises(KeyboardInterrupt), written_beside(str(path), backup=True) as file:
        raise KeyboardInterrupt
    assert os.listdir(tmp_path) == ["a.pkl"]
    assert path.read_bytes() == b"before"
    with written_beside(str(path), backup=True) as file:
        file.write(b"after")
    assert sorted(os.listdir(tmp_path)) == ["a.pkl", "a.pkl.bak"]
    assert (path.read_bytes(), (tmp_path / "a.pkl.bak").read_bytes()) == (b"after", b"before")
    assert path.stat().st_mode & 0o777 == 0o640
    with pytest.raises(FileExistsError), written_beside(str(path), backup=True):
        pass


def test_a_link_stays_a_link(tmp_path):
    real, link = tmp_path / "real.pkl", tmp_path / "link.pkl"
    real.write_bytes(pickle.dumps([1, 2]))
    link.symlink_to(real)
    fastcap.edit(link, link, drop="obj[0]")
    assert link.is_symlink()
    assert pickle.loads(real.read_bytes()) == [2]


def test_memory_does_not_grow_with_what_is_copied(tmp_path):
    path = tmp_path / "a.pkl"
    with open(path, "wb") as file:
        pickle.dump({"drop": [bytes(1 << 24)] * 2, "keep": [bytes(1 << 26), "t" * (1 << 24)], "a": 1}, file)
    tracemalloc.start()
    try:
        summary = fastcap.edit(path, tmp_path / "b.pkl", drop="obj['drop']")
        assert tracemalloc.get_traced_memory()[1] < 72 << 20  # of which 58 MiB are reserved, not used
    finally:
        tracemalloc.stop()
    assert summary.new_size > (1 << 26) + (1 << 24)


def test_arguments_of_edit(tmp_path):
    stream = pickle.dumps({"a": 1, "b": [2]})
    assert pickle.loads(fastcap.edit(stream)) == {"a": 1, "b": [2]}
    target = io.BytesIO()
    summary = fastcap.edit(stream, target, drop="trainer['b']", name="trainer")
    assert pickle.loads(target.getvalue()) == {"a": 1}
    (change,) = summary.changes
    assert (change.path, change.action, change.what) == ("trainer['b']", "dropped", "list of 1")


def test_measuring_writes_nothing():
    stream = pickle.dumps(OBJECT)
    with Editor(stream) as editor:
        editor.drop("obj['text']")
        measured = editor.measure()
        assert measured.new_size == len(b"".join(map(bytes, editor.blocks())))
        assert editor.summary() == measured


def test_what_else_refers_to_a_part_is_named():
    shared = ["shared"]
    with Editor(pickle.dumps({"a": shared, "b": {"c": shared}})) as editor:
        editor.drop("obj['a']")
        (change,) = editor.measure().changes
        assert (change.size, change.kept_at) == (0, "obj['b']['c']")
        editor.drop("obj['b']['c']")
        changes = editor.measure().changes
        assert [change.kept_at for change in changes] == [None, None]
        assert changes[0].size > 10


@pytest.mark.parametrize(("text", "path", "value"), [
    ("obj['a']=1", "obj['a']", 1),
    ("obj['a=b'].c = [1, null]", "obj['a=b'].c", [1, None]),
    ('f<closure x>="="', "f<closure x>", "="),
])
def test_replacements_on_the_command_line(text, path, value):
    assert parse_replacement(text) == (path, value)


@pytest.mark.parametrize(("text", "word"), [("obj", "PATH=VALUE"), ("obj[=1", "PATH=VALUE"), ("obj=x", "not JSON")])
def test_replacements_that_are_none(text, word):
    with pytest.raises(ValueError, match=word):
        parse_replacement(text)
    assert parse_replacement("obj=@a=b.pkl") == ("obj", Pickled("a=b.pkl"))


# --- hostile streams -------------------------------------------------------------------------------------------------


def try_to_edit(stream, dice):
    """Edit a stream somewhere, or refuse it; whatever comes out can be scanned."""
    try:
        with Editor(stream) as editor:
            paths = all_paths(editor, 20)
            nodes = len(editor.graph)
            for path in dice.sample(paths, min(3, len(paths))):
                with contextlib.suppress(EditError):
                    editor.drop(path) if dice.random() < 0.7 else editor.replace(path, [1])
            for _ in range(dice.randrange(3)):
                editor.replace_node(dice.randrange(nodes), dice.choice([b"N", b"](K\x01K\x02e"]))
            output = io.BytesIO()
            summary = editor.write(output)
    except (PayloadError, EditError):
        return False
    assert summary.new_size == len(output.getvalue())
    graph_of(output.getvalue())
    return True


@settings(max_examples=10 * settings().max_examples)
@given(strategies.broken_streams(), st.randoms(use_true_random=False))
def test_broken_streams_are_edited_or_refused(stream, dice):
    try_to_edit(stream, dice)


def test_flipped_bytes_are_edited_or_refused(long_run):
    dice = random.Random(5)
    streams = strategies.sample_streams()
    count = 0
    for _ in range(30_000 if long_run else 1500):
        stream = bytearray(dice.choice(streams))
        for _ in range(dice.randrange(1, 4)):
            stream[dice.randrange(len(stream))] = dice.randrange(256)
        count += try_to_edit(bytes(stream[: dice.randrange(len(stream))] if dice.random() < 0.1 else stream), dice)
    assert count > 100


def test_parts_that_blow_up_are_refused():
    """Tuples that contain themselves many times over: each way in would be written once more."""
    loop: list = []
    layer: tuple = (loop,)
    for _ in range(30):
        layer = (layer, layer)
    loop.append(layer)
    stream = pickle.dumps({"a": loop, "b": layer})
    found = pickle.loads(fastcap.edit(stream, drop="obj['a']"))
    assert found["b"][0] is found["b"][1]


def test_the_native_core_checks_what_it_is_given():
    tables, _ = scan_source(pickle.dumps(["a", "b"]))
    graph = Graph(tables)
    program = Program(graph, tables)
    with pytest.raises(TypeError):
        program.__init__(graph, tables)
    with pytest.raises(IndexError):
        program.slots(len(graph))
    slots = program.slots(0)
    with pytest.raises(IndexError):
        slots.slot(len(slots))
    with pytest.raises(IndexError):
        slots.consumer(7)
    for cut in [(0, 10_000, -1, -1), (5, 5, -1, -1), (0, 3, 0, -1), (0, 3, -1, 99), (-1, 3, -1, -1)]:
        with pytest.raises((ValueError, OverflowError)):
            Rewriter(program, [cut], [], None, None, None, framed=False)
    rewriter = Rewriter(program, [(1, 3, -1, -1)], [], lambda data: rewriter.step(), None, None, framed=False)
    with pytest.raises((ValueError, IndexError)):  # in the middle of an opcode; or a step within a step
        while rewriter.step():
            pass
    with pytest.raises(ValueError, match="one step at a time"):
        rewriter.step()


def test_a_reader_that_gives_too_little():
    stream = pickle.dumps(["x" * 2000])
    tables, _ = scan_source(stream)
    program = Program(Graph(tables), tables)
    rewriter = Rewriter(program, [], [], lambda _: None, lambda *_: b"short", None, framed=True)
    with pytest.raises(ValueError, match="gave 5 bytes"):
        rewriter.step()


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("value", [[1], "text", {"k": ("v",)}, types.SimpleNamespace(a=1), 148, (), b"\x94."])
def test_what_was_edited_can_be_edited_again(protocol, value):
    """The memo has one entry for a value, also where a piece brings its own."""
    shared = [2, 3]
    stream = pickle.dumps({"a": shared, "b": [shared, shared], "c": "other"}, protocol)
    for _ in range(3):
        with Editor(stream) as editor:
            node = editor.explainer.find(parse("obj['a']").steps)
            if node is not None:
                editor.replace_node(editor.explainer.reader.resolve(node), pickle.dumps(value, protocol))
            editor.replace("obj['c']", value)
            file = io.BytesIO()
            editor.write(file)
        stream = file.getvalue()
        graph_of(stream)
        loaded = pickle.loads(stream)
        assert loaded == {"a": value, "b": [value, value], "c": value}
        assert loaded["a"] is loaded["b"][0] is loaded["b"][1]


# --- the command -----------------------------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Runs `fastcap edit` in a folder with a pickle in it; returns the exit code and what was said."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.pkl").write_bytes(pickle.dumps(OBJECT))

    def call(*arguments):
        code = main(["edit", *arguments])
        printed, said = capsys.readouterr()
        assert printed == ""
        return code, said

    return call


def test_command_drops_and_replaces(run, tmp_path):
    (tmp_path / "b.pkl").write_bytes(pickle.dumps({"other": (1,)}))
    code, said = run("a.pkl", "-o", "out.pkl", "--drop", "obj['big']", "--drop", "obj['a'][0]",
                     "--replace", "obj['text'][1]={\"x\": null}", "--replace", "obj['text'][0]=@b.pkl")
    assert code == 0
    assert pickle.loads((tmp_path / "out.pkl").read_bytes()) == {"a": [2, 3], "text": [{"other": (1,)}, {"x": None}]}
    assert "obj['big'] dropped: bytes of 300,000, 293.0 KiB" in said
    assert "obj['text'][1] replaced: str" in said
    assert re.search(r"the pickle is now \d+ B instead of 29\d\.\d KiB", said)
    assert sorted(os.listdir(tmp_path)) == ["a.pkl", "b.pkl", "out.pkl"]


def test_command_in_place(run, tmp_path):
    before = (tmp_path / "a.pkl").read_bytes()
    assert run("a.pkl", "--in-place", "--backup", "--drop", "obj['big']")[0] == 0
    assert (tmp_path / "a.pkl.bak").read_bytes() == before
    assert pickle.loads((tmp_path / "a.pkl").read_bytes()) == {"a": OBJECT["a"], "text": OBJECT["text"]}
    code, said = run("a.pkl", "--in-place", "--backup", "--drop", "obj['a']")
    assert code == 2
    assert "a.pkl.bak exists already" in said
    assert run("a.pkl", "--in-place", "--drop", "obj['a']")[0] == 0
    assert sorted(os.listdir(tmp_path)) == ["a.pkl", "a.pkl.bak"]


def test_command_dry_run(run, tmp_path):
    code, said = run("a.pkl", "--dry-run", "--drop", "obj['big']")
    assert code == 0
    assert "obj['big'] would be dropped" in said
    assert "the pickle would be" in said
    assert os.listdir(tmp_path) == ["a.pkl"]


def test_command_drops_handles(run, tmp_path):
    (tmp_path / "h.pkl").write_bytes(with_handles(2))
    code, said = run("h.pkl", "-o", "out.pkl", "--drop-handles")
    assert code == 0
    assert "obj['a'] set to None: Ray actor handle" in said
    assert pickle.loads((tmp_path / "out.pkl").read_bytes())["b"] == [None, None, 1]
    assert run("h.pkl", "-o", "out.pkl", "--keep-handles-as-placeholders")[0] == 0
    found = pickle.loads((tmp_path / "out.pkl").read_bytes())
    assert isinstance(found["a"], fastcap.Unrestorable)
    assert (found["a"].path, found["a"].kind) == ("obj['a']", "ActorHandle")
    code, said = run("a.pkl", "-o", "out.pkl", "--drop-handles")
    assert (code, "there are no handles" in said) == (0, True)


@pytest.mark.parametrize(("arguments", "word"), [
    (["a.pkl", "--drop", "obj['a']"], "say where the edited pickle goes"),
    (["a.pkl", "-o", "x", "--in-place", "--drop", "obj['a']"], "say where the edited pickle goes"),
    (["a.pkl", "-o", "x"], "nothing to do"),
    (["a.pkl", "-o", "x", "--backup", "--drop", "obj['a']"], "--backup is for --in-place"),
    (["-", "--in-place", "--drop", "obj['a']"], "--in-place is for files"),
    (["a.pkl", "-o", "a.pkl", "--drop", "obj['a']"], "would overwrite FILE"),
    (["a.pkl", "-o", "no/x", "--drop", "obj['a']"], "there is no directory"),
    (["a.pkl", "-o", "x", "--drop", "obj['b']"], "obj has no ['b']"),
    (["a.pkl", "-o", "x", "--drop", "obj["], "not a path"),
    (["a.pkl", "-o", "x", "--drop", "obj"], "nothing left"),
    (["a.pkl", "-o", "x", "--replace", "obj['a']=x"], "is not JSON"),
    (["a.pkl", "-o", "x", "--replace", "obj['a']"], "is not PATH=VALUE"),
    (["a.pkl", "-o", "x", "--replace", "obj['a']=@no.pkl"], "cannot read no.pkl"),
    (["a.pkl", "-o", "x", "--replace", "obj['a']=@text.txt"], "text.txt is not a pickle"),
    (["text.txt", "-o", "x", "--drop", "obj"], "text.txt is not a pickle"),
    (["empty", "-o", "x", "--drop", "obj"], "empty is empty"),
    (["no.pkl", "-o", "x", "--drop", "obj"], "no file no.pkl"),
    (["two.pkl", "-o", "x", "--drop", "obj"], "holds 2 pickles"),
    (["json:loads", "-o", "x", "--drop", "obj"], "edit takes the file of a pickle"),
    (["a.pkl", "-o", "/dev/full", "--drop", "obj['a']"], "cannot write /dev/full: No space left on device"),
    (["a.pkl", "-o", "/proc/x.pkl", "--drop", "obj['a']"], "cannot write /proc/x.pkl"),
    (["a.pkl", "-o", "x", "--drop-handles", "--keep-handles-as-placeholders"], "exclude each other"),
])
def test_command_explains_what_is_wrong(run, tmp_path, arguments, word):
    (tmp_path / "text.txt").write_bytes(b"this is no pickle")
    (tmp_path / "two.pkl").write_bytes(pickle.dumps(1) * 2)
    (tmp_path / "empty").write_bytes(b"")
    before = sorted(os.listdir(tmp_path))
    code, said = run(*arguments)
    assert code == 2
    assert word in said
    assert said.count("\n") == 1
    assert sorted(os.listdir(tmp_path)) == before


def command(*arguments, **options):
    package = os.path.dirname(os.path.dirname(fastcap.__file__))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([package, os.environ.get("PYTHONPATH", "")])}
    return subprocess.Popen([sys.executable, "-m", "fastcap", "edit", *arguments], env=environment,
                            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options)


def test_command_between_pipes():
    process = command("-", "-o", "-", "--drop", "obj['a'][1]")
    printed, said = process.communicate(gzip.compress(pickle.dumps(OBJECT)))
    assert process.returncode == 0
    assert pickle.loads(gzip.decompress(printed)) == {**OBJECT, "a": [1, 3]}
    assert b"compressed with gzip" in said


def write_huge(path):
    """A sparse file of 64 GiB that is a pickle."""
    size = 64 << 30
    with open(path, "wb") as file:
        file.write(b"\x80\x05}(\x8c\x01aK\x01\x8c\x01b\x8e" + struct.pack("<Q", size))
        file.seek(size, os.SEEK_CUR)
        file.write(b"u.")


def test_command_leaves_nothing_behind_when_it_is_interrupted(tmp_path):
    write_huge(tmp_path / "a.pkl")
    process = command("a.pkl", "-o", "out.pkl", "--drop", "obj['a']", cwd=tmp_path)
    end = time.monotonic() + 60
    while len(os.listdir(tmp_path)) == 1 and time.monotonic() < end:
        time.sleep(0.01)
    assert len(os.listdir(tmp_path)) == 2
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert said == b"fastcap: interrupted\n"
    assert os.listdir(tmp_path) == ["a.pkl"]


def test_command_leaves_nothing_behind_when_the_disk_is_full(tmp_path):
    write_huge(tmp_path / "a.pkl")
    limit = 3 << 20  # bytes: a process may not write longer files
    process = command("a.pkl", "-o", "out.pkl", "--drop", "obj['a']", cwd=tmp_path,
                      preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)))
    _, said = process.communicate(timeout=60)
    assert process.returncode == 2
    assert said == b"fastcap: cannot write out.pkl: File too large\n"
    assert os.listdir(tmp_path) == ["a.pkl"]
