"""Edited pickles: loading one equals loading the original and editing it in memory, sharing included."""

import contextlib
import io
import pickle
import types

import cloudpickle
import pytest
import strategies
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import difference

from fastcap import EditError
from fastcap._native.graph import Graph
from fastcap._native.scanner import Scanner
from fastcap.editing import Editor
from fastcap.paths import Shortened, parse

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
    elif kind == "attr" and isinstance(obj, type) and not name.startswith("__"):
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


@settings(max_examples=4 * settings().max_examples)
@given(strategies.objects(), st.sampled_from(PROTOCOLS), st.randoms(use_true_random=False))
def test_dropping_is_what_it_is_in_memory(made, protocol, random):
    stream = dump(made, protocol)
    if stream is None:
        return
    with Editor(stream) as editor:
        paths = all_paths(editor)
    random.shuffle(paths)
    for path in paths[:4]:
        with contextlib.suppress(EditError):
            check_edit(stream, path)


@settings(max_examples=2 * settings().max_examples)
@given(strategies.objects(), st.sampled_from(PROTOCOLS), st.randoms(use_true_random=False))
def test_replacing_is_what_it_is_in_memory(made, protocol, random):
    stream = dump(made, protocol)
    if stream is None:
        return
    with Editor(stream) as editor:
        paths = all_paths(editor)
    random.shuffle(paths)
    shared = ["shared"]
    for path in paths[:4]:
        check_edit(stream, path, ({"new": shared, "again": [shared, 1.5]},))


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
