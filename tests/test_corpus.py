"""The corpus holds what its names say, and ``isomorphic`` tells equal graphs from others."""

import copy
import functools
import io
import operator
import pickle
import pickletools
import random
import types

import cloudpickle
import corpus
import networkx
import numpy as np
import pytest
import strategies
from hypothesis import given
from hypothesis import strategies as st
from strategies import difference, isomorphic

# ---------------------------------------------------------------------------------------------------------------------
# The corpus


def opcodes_of(stream: bytes) -> set[str]:
    """The names of all opcodes in a file of one or more pickles."""
    file, names = io.BytesIO(stream), set()
    while file.tell() < len(stream):
        names |= {opcode.name for opcode, _, _ in pickletools.genops(file)}
    return names


def test_there_are_kinds_enough():
    assert len(corpus.KINDS) >= 200
    assert len(corpus.available()) >= 190, [entry.missing for entry in corpus.KINDS.values() if entry.missing]


def test_kind_contains_its_opcodes(kind):
    assert set(kind.opcodes) <= opcodes_of(cloudpickle.dumps(kind.make(), 5))


def test_kind_needs_its_protocol(kind):
    """Every protocol from the stated one on can hold it, and where the stated one is above 0, the one below can't."""
    for protocol in corpus.PROTOCOLS:
        if protocol >= kind.protocol:
            cloudpickle.dumps(kind.make(), protocol)
    if kind.protocol:
        with pytest.raises((TypeError, ValueError, pickle.PicklingError)):
            pickle.loads(cloudpickle.dumps(kind.make(), kind.protocol - 1))


def test_kind_is_plain(kind):
    if kind.plain:
        pickle.dumps(kind.make(), 5)
    else:
        with pytest.raises((pickle.PicklingError, TypeError, AttributeError)):
            pickle.dumps(kind.make(), 5)


@pytest.mark.kinds(lambda kind: kind.buffers)
def test_kind_has_buffers(kind):
    buffers = []
    stream = cloudpickle.dumps(kind.make(), 5, buffer_callback=buffers.append)
    assert buffers
    assert "NEXT_BUFFER" in opcodes_of(stream)


def test_kind_is_deterministic(kind):
    made = kind.make()
    one, two, three = (cloudpickle.dumps(made, 5) for _ in range(3))
    assert (one == two) == (kind.deterministic and not kind.settles)
    assert two == three


@pytest.mark.kinds(lambda kind: kind.repeatable)
def test_kind_is_repeatable(kind):
    one, two = (corpus.without_tracker_ids(cloudpickle.dumps(kind.make(), 5)) for _ in range(2))
    assert one == two


@pytest.mark.kinds(lambda kind: kind.loads)
def test_kind_loads_alike_every_time(kind):
    """Two loads of one stream are isomorphic to each other in everything."""
    for protocol in (2, 5):
        if protocol >= kind.protocol:
            stream = cloudpickle.dumps(kind.make(), protocol)
            assert difference(pickle.loads(stream), pickle.loads(stream), strict=True) is None


# What loads as another thing than it was, each for a reason.
CHANGES = {
    "reduce to a pair", "reduce to a triple", "reduce to a 4-tuple", "reduce to a 5-tuple",  # Reduce becomes a Bag
    "reduce with one list item and one pair", "reduce with more items than a batch", "reduce with a state setter",
    "reduce whose state refers back through a setter", "reduce to the name of a global",
    "__getstate__ returning a dict", "__getstate__ returning a pair", "__reduce_ex__ that looks at the protocol",
    "__getstate__ returning other things",  # __setstate__ isn't called for a false state
    "reduce through copyreg.__newobj__", "reduce through copyreg.__newobj_ex__", "class with reduce methods of its own",
    "memoryview", "picklebuffer of a memoryview", "bare picklebuffer",  # bytes and bytearrays afterwards
    "text file",  # a StringIO afterwards
    "instance whose dict is shared",  # BUILD fills a new dict for each instance
    "closures that share a cell",  # cloudpickle makes each function cells of its own
    "slot and getset descriptors",  # looked up on the class, which evaluates some of them
    "torch tensors", "torch module and state dict",  # each tensor gets a storage of its own
    "array subclass",  # __array_finalize__ runs without the unit
    "memory-mapped array",  # plain memory afterwards
    "iterators",  # reduce to an iterator over other containers
    "picklebuffer of bytes", "picklebuffer of a bytearray", "picklebuffer of one object twice",
    "picklebuffer across a frame limit",
}


@pytest.mark.kinds(lambda kind: kind.loads and kind.name not in CHANGES)
def test_kind_survives(kind):
    """What is loaded is isomorphic to the original."""
    made = kind.make()
    loaded = pickle.loads(cloudpickle.dumps(made, 5))
    assert difference(made, loaded) is None


def test_failing_kind_fails(failing):
    make, error = failing
    with pytest.raises(error) as caught:
        cloudpickle.dumps(make())
    assert caught.type is error


def test_payloads_cover_every_opcode(corpus_payloads):
    """The corpus has every opcode that any pickler writes; the rest occurs in raw streams."""
    written, raw = set(), set()
    raw_names = {payload.name for payload in corpus.raw_streams()}
    for payload in corpus_payloads:
        (raw if payload.name in raw_names else written).update(opcodes_of(payload.stream))
    every = {opcode.name for opcode in pickletools.opcodes}
    unwritten = {"DUP", "INST", "OBJ", "STRING", "BINSTRING", "SHORT_BINSTRING", "BINUNICODE8", "BINBYTES8",
                 "PERSID", "BINPERSID"}
    assert every - written == unwritten
    assert unwritten <= raw


def test_payloads_load(corpus_payloads):
    """Every payload is well-formed: plain pickle loads it."""

    class Loader(pickle.Unpickler):
        def persistent_load(self, identifier):
            return identifier

    for payload in corpus_payloads:
        entry = corpus.KINDS.get(payload.name.rpartition(",")[0])
        if entry is None or entry.loads:
            Loader(io.BytesIO(payload.stream), buffers=payload.buffers).load()


def test_payloads_name_kind_protocol_and_writer():
    kinds = [corpus.KINDS["recursive list"], corpus.KINDS["C array"], corpus.KINDS["slots"]]
    assert [(payload.name, payload.protocol) for payload in corpus.payloads(range(1, 6, 4), kinds)] == [
        ("recursive list, pickle", 1), ("recursive list, pickle", 5), ("recursive list, cloudpickle", 5),
        ("C array, pickle", 1), ("C array, pickle", 5), ("C array, cloudpickle", 5), ("C array, out of band", 5),
        ("slots, pickle", 5), ("slots, cloudpickle", 5),
    ]


def test_tracker_ids_are_numbered():
    class Local:
        pass

    stream = cloudpickle.dumps([Local, Local()], 4)
    assert corpus.without_tracker_ids(stream) != stream
    assert len(corpus.without_tracker_ids(stream)) == len(stream)
    assert corpus.without_tracker_ids(b"\x8c\x20" + b"f" * 32 + b"\x94") == b"\x8c\x20" + b"0" * 32 + b"\x94"


BY_VALUE = ["closure", "function that uses globals", "functions of a script that share globals",
            "function registered by value", "functions with one globals dict of their own", "methods with closures",
            "dynamic class", "script dataclass instances", "dynamic enum", "dynamic module"]


@pytest.mark.parametrize("name", BY_VALUE)
def test_by_value_kinds_are_by_value(name):
    """They carry code or a class body, and don't look themselves up by name."""
    stream = cloudpickle.dumps(corpus.KINDS[name].make(), 4)
    made_by = {arg for opcode, arg, _ in pickletools.genops(stream) if opcode.name == "SHORT_BINUNICODE"}
    assert made_by & {"_make_function", "_make_skeleton_class", "_make_skeleton_enum", "dynamic_subimport"}


# ---------------------------------------------------------------------------------------------------------------------
# isomorphic


def pair_shared():
    inner = [1]
    return [inner, inner]


def cycle(length):
    first = []
    last = first
    for _ in range(length - 1):
        last.append([])
        last = last[0]
    last.append(first)
    return first


def strided(values):
    return np.array(values, dtype=np.int64)


def closure_over(cell):
    return types.FunctionType((lambda: cell).__code__, {}, closure=(cell,))


def two_functions(shared_globals):
    one = {"__name__": "m", "K": [1]}
    two = one if shared_globals else dict(one)
    code = compile("def f(): return K", "f", "exec").co_consts[0]
    return [types.FunctionType(code, one), types.FunctionType(code, two)]


def two_instances(shared_dict):
    one, two = corpus.Plain(x=1), corpus.Plain(x=1)
    if shared_dict:
        two.__dict__ = one.__dict__
    return [one, two]


def plain_with(value):
    return corpus.Plain(a=value, b=[value])


DIFFERENT = {
    "number": (lambda: 1, lambda: 2),
    "type of number": (lambda: 1, lambda: True),
    "float sign": (lambda: 0.0, lambda: -0.0),
    "text": (lambda: "abc", lambda: "abd"),
    "bytes and text": (lambda: b"abc", lambda: "abc"),
    "length": (lambda: [1], lambda: [1, 1]),
    "list and tuple": (lambda: [1], lambda: (1,)),
    "empty tuple": (lambda: (), lambda: (1,)),
    "order of keys": (lambda: {"a": 1, "b": 2}, lambda: {"b": 2, "a": 1}),
    "type of key": (lambda: {1: 1}, lambda: {1.0: 1}),
    "sharing lost": (pair_shared, lambda: [[1], [1]]),
    "sharing added": (lambda: [[1], [1]], pair_shared),
    "sharing of an instance": (lambda: plain_with([1]), lambda: corpus.Plain(a=[1], b=[[1]])),
    "sharing with the other one": (lambda: (lambda x, y: [x, y, x])([1], [1]),
                                   lambda: (lambda x, y: [x, y, y])([1], [1])),
    "length of a cycle": (lambda: cycle(2), lambda: cycle(3)),
    "shared instance dict": (lambda: two_instances(True), lambda: two_instances(False)),
    "attribute name": (lambda: corpus.Plain(a=1), lambda: corpus.Plain(b=1)),
    "class": (corpus.Plain, corpus.StateDict),
    "slot": (lambda: corpus.SlottedRecord(1), lambda: corpus.SlottedRecord(2)),
    "list item of a subclass": (lambda: corpus.ListSubclass([1]), lambda: corpus.ListSubclass([2])),
    "set member": (lambda: {1, 2}, lambda: {1, 3}),
    "member of a frozenset": (lambda: frozenset("ab"), lambda: frozenset("ac")),
    "instance in a set": (lambda: {corpus.Plain(a=1)}, lambda: {corpus.Plain(a=2)}),
    "sharing in a set": (
        lambda: (lambda x: [{corpus.Plain(a=x)}, x])([1]), lambda: [{corpus.Plain(a=[1])}, [1]],
    ),
    "bytearray": (lambda: bytearray(b"a"), lambda: bytearray(b"b")),
    "element": (lambda: strided([1, 2]), lambda: strided([1, 3])),
    "dtype": (lambda: strided([1, 2]), lambda: strided([1, 2]).astype(np.int32)),
    "shape": (lambda: np.zeros((2, 3)), lambda: np.zeros((3, 2))),
    "order of an array": (lambda: np.zeros((2, 3)), lambda: np.zeros((2, 3), order="F")),
    "element of an object array": (lambda: strategies.object_array([[1]]), lambda: strategies.object_array([[2]])),
    "sharing in an object array": (lambda: strategies.object_array(pair_shared()),
                                   lambda: strategies.object_array([[1], [1]])),
    "code": (lambda: lambda x: x + 1, lambda: lambda x: x + 2),
    "default": (lambda: lambda x=[1]: x, lambda: lambda x=[2]: x),
    "closure": (lambda: closure_over(types.CellType(1)), lambda: closure_over(types.CellType(2))),
    "empty cell": (lambda: closure_over(types.CellType()), lambda: closure_over(types.CellType(None))),
    "sharing of a cell": (lambda: [closure_over(cell) for cell in [types.CellType(1)] * 2],
                          lambda: [closure_over(types.CellType(1)) for _ in range(2)]),
    "sharing of globals": (lambda: two_functions(True), lambda: two_functions(False)),
    "class attribute": (lambda: type("C", (), {"x": [1]}), lambda: type("C", (), {"x": [2]})),
    "base": (lambda: type("C", (corpus.Plain,), {}), lambda: type("C", (dict,), {})),
    "type": (lambda: int, lambda: str),
    "bound to another": (lambda: [1].append, lambda: [2].append),
    "partial": (lambda: functools.partial(int, base=2), lambda: functools.partial(int, base=3)),
    "exception argument": (lambda: ValueError(1), lambda: ValueError(2)),
    "operator": (lambda: operator.itemgetter(1), lambda: operator.itemgetter(2)),
    "property": (lambda: property(len), lambda: property(repr)),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_different_graphs_are_told_apart(name):
    make_a, make_b = DIFFERENT[name]
    a, b = make_a(), make_b()
    assert not isomorphic(a, b)
    assert not isomorphic(b, a)
    assert not isomorphic([0, {"k": a}], [0, {"k": b}])
    for make in (make_a, make_b):
        assert difference(make(), make()) is None


def test_difference_names_the_place():
    assert difference({"a": [1, (2, 3)]}, {"a": [1, (2, 4)]}) == "root['a'][1][1]: 3 became 4"


def test_strict_compares_text_identity():
    text = "".join(["ab", "cd"])
    shared, apart = [text, text], ["".join(["ab", "cd"]), "".join(["ab", "cd"])]
    assert isomorphic(shared, apart)
    assert not isomorphic(shared, apart, strict=True)
    assert isomorphic(["a", "a"], ["a", b"a".decode()], strict=True)


def test_strict_compares_strides_and_writability():
    array, view = np.arange(5), np.arange(10)[::2]
    view[:] = array
    assert isomorphic(view, array)
    assert not isomorphic(view, array, strict=True)
    frozen = corpus.read_only(np.arange(5))
    assert isomorphic(frozen, array)
    assert not isomorphic(frozen, array, strict=True)


def test_deep_graphs_are_compared():
    deep = functools.reduce(lambda inner, _: [inner], range(100_000), [])
    other = functools.reduce(lambda inner, _: [inner], range(100_000), [1])
    assert isomorphic(deep, deep)
    assert not isomorphic(deep, other)
    for chain in (deep, other):  # taken apart from the outside: a recursive clean-up goes too deep for some versions
        while chain:
            chain = chain.pop() if isinstance(chain, list) else None


@pytest.mark.skipif(corpus.KINDS["torch tensors"].missing is not None, reason="needs torch")
def test_tensor_storages_are_compared():
    import torch

    base = torch.arange(6.0)
    views = [base[:3], base[2:]]
    assert isomorphic(views, copy.deepcopy(views))
    assert not isomorphic(views, [base[:3].clone(), base[2:].clone()])
    moved = torch.arange(6.0)
    assert not isomorphic(views, [moved[:3], torch.cat([moved, moved[2:]])[6:]])
    assert not isomorphic(torch.zeros(2, requires_grad=True), torch.zeros(2))


# ---------------------------------------------------------------------------------------------------------------------
# Strategies


@given(strategies.objects())
def test_objects_pickle_and_load_alike(made):
    """Whatever the strategy makes can be pickled, and loads to isomorphic graphs every time."""
    stream = cloudpickle.dumps(made)
    loaded = pickle.loads(stream)
    assert difference(loaded, pickle.loads(stream), strict=True) is None


@given(strategies.nested_builtins())
def test_nested_builtins_survive(made):
    assert difference(made, pickle.loads(pickle.dumps(made, 5))) is None


@given(strategies.nested_builtins(), st.randoms(use_true_random=False))
def test_deep_copies_are_isomorphic_until_changed(made, random_source: random.Random):
    other = copy.deepcopy(made)
    assert difference(made, other) is None
    lists = [part for part in walk(other) if isinstance(part, list)]
    if lists:
        random_source.choice(lists).append("changed")
        assert difference(made, other) is not None


def walk(root):
    seen, stack = {}, [root]
    while stack:
        part = stack.pop()
        if id(part) not in seen:
            seen[id(part)] = part
            stack.extend(child for _, child in strategies.parts_of(part)
                         if isinstance(part, (list, tuple, dict, set, frozenset)))
    return seen.values()


@given(strategies.flow_graphs())
def test_flow_graphs_are_preorder_trees(graph):
    ends = graph.ends
    for node, parent in enumerate(graph.parents):
        assert parent < node
        assert parent == -1 or ends[node] <= ends[parent]
    # In preorder a node that is not inside another begins after it has ended.
    for node in range(1, len(ends)):
        assert graph.parents[node] == node - 1 or ends[node - 1] == node or graph.parents[node] < node - 1
    assert all(target < ends[source] for source, target in graph.edges)
    drawn = graph.to_networkx()
    assert set(networkx.descendants(drawn, 0)) == set(range(1, len(ends)))


@given(strategies.flow_graphs())
def test_flow_graphs_pickle_to_their_tree(graph):
    """The stream of ``to_object`` holds one list for each node, in order, with its children and memo references."""
    parents: list[int] = []
    edges: list[tuple[int, int]] = []
    stack: list[tuple[str, int]] = []  # what the unpickler's stack holds: lists, fetched lists, marks
    made: dict[int, int] = {}  # memo index -> node
    for opcode, arg, _ in pickletools.genops(pickle.dumps(graph.to_object(), 2)):
        match opcode.name:
            case "EMPTY_LIST":
                stack.append(("list", len(parents)))
                parents.append(-1)
            case "BINPUT":
                made[arg] = stack[-1][1]
            case "BINGET":
                stack.append(("fetched", made[arg]))
            case "MARK":
                stack.append(("mark", -1))
            case "APPEND" | "APPENDS":
                start = len(stack) - 1
                if opcode.name == "APPENDS":
                    start = max(at for at, entry in enumerate(stack) if entry[0] == "mark")
                items = [entry for entry in stack[start:] if entry[0] != "mark"]
                del stack[start:]
                for form, node in items:
                    if form == "list":
                        parents[node] = stack[-1][1]
                    else:
                        edges.append((stack[-1][1], node))
    assert tuple(parents) == graph.parents
    assert sorted(edges) == sorted(graph.edges)


@given(strategies.broken_streams())
def test_broken_streams_are_bytes(stream):
    assert isinstance(stream, bytes)


def test_most_broken_streams_are_broken():
    """Otherwise the fuzz tests would test little."""
    outcomes = {"fine": 0, "broken": 0}
    source = random.Random(5)
    for _ in range(500):
        stream = source.choice(strategies.sample_streams())
        edit = source.choice(strategies.EDITS)
        broken = strategies.mutate(stream, edit, source.randrange(1 << 20), source.randrange(1, 30),
                                   source.randbytes(source.randrange(1, 9)))
        try:
            for _ in pickletools.genops(broken):
                pass
        except (ValueError, UnicodeError, OverflowError):
            outcomes["broken"] += 1
        else:
            outcomes["fine"] += 1
    assert outcomes["broken"] > 100
    assert outcomes["fine"] > 50  # genops looks at nothing but the opcodes: streams that only a scanner refuses
