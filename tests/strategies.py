"""Hypothesis strategies for things to pickle and for broken streams, and ``isomorphic``, which compares object graphs.

``objects()`` is the widest strategy: nested builtins with sharing and cycles, instances, functions and dynamic classes.
``flow_graphs()`` makes what the dominator pass works on. ``broken_streams()`` makes bytes that are nearly a pickle.
"""

import builtins
import collections
import copyreg
import dataclasses
import enum
import functools
import math
import operator
import pickle
import pickletools
import struct
import sys
import types
import typing
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import corpus
import numpy as np
from hypothesis import strategies as st

# ---------------------------------------------------------------------------------------------------------------------
# Leaves

texts = st.one_of(
    st.text(max_size=8),
    st.text(st.characters(), max_size=4),  # with surrogates
    st.sampled_from(["", "a", "é", "x" * 255, "x" * 256, "\ud800", "__main__", "name"]),
)
sizes = st.sampled_from([0, 1, 2, 127, 128, 255, 256, 257, 1000, 70_000])
atoms = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-(1 << 70), 1 << 70),
    st.sampled_from([(1 << bits) + step for bits in (8, 16, 31, 32, 63, 2040) for step in (-1, 0, 1)]),
    st.floats(),
    st.complex_numbers(),
    texts,
    st.binary(max_size=8),
    st.sampled_from([Ellipsis, NotImplemented, int, len, ValueError, math.pi]),
    st.sampled_from([corpus.Color.RED, corpus.module_function, corpus.Outer.Inner]),
)
hashables = st.one_of(
    st.none(), st.booleans(), st.integers(), texts, st.binary(max_size=4), st.tuples(st.integers(), texts),
    st.frozensets(st.integers(), max_size=3),
)
leaves = st.one_of(
    atoms,
    st.builds(bytes, sizes),
    st.builds(bytearray, sizes),
    st.builds(range, st.integers(-5, 5), st.integers(-5, 50)),
    st.builds(slice, st.none() | st.integers(), st.none() | st.integers()),
    st.datetimes(),
    st.timedeltas(),
    st.dates(),
    st.decimals(),
    st.fractions(),
    st.uuids(),
    st.builds(np.float64, st.floats()),
    st.builds(lambda n, dtype: np.arange(n).astype(dtype), st.integers(0, 40), st.sampled_from(["i4", "f8", "U3"])),
    st.builds(lambda n: np.arange(n * n).reshape(n, n).T, st.integers(0, 5)),
    st.builds(corpus.Chunk, st.binary(max_size=20)),
    st.builds(corpus.Chunk, st.builds(bytearray, st.integers(0, 20))),
)

# ---------------------------------------------------------------------------------------------------------------------
# Object graphs


def by_parts(parts: Sequence[Any]) -> dict[str, Any]:
    return {f"a{index}": part for index, part in enumerate(parts)}


def make_slotted(parts):
    made = corpus.Slotted()
    for name, part in zip(("x", "y"), parts):
        setattr(made, name, part)
    return made


def make_slots_and_dict(parts):
    made = corpus.SlotsAndDict()
    for name, part in zip(("x", "extra", "more"), parts):
        setattr(made, name, part)
    return made


def hashable_parts(parts):
    return [part for part in parts if isinstance(part, (int, str, bytes, float, type(None), corpus.Plain))]


# From a list of parts to one object that holds them.
BUILDERS: dict[str, Callable[[list], Any]] = {
    "list": list,
    "tuple": tuple,
    "dict": by_parts,
    "dict by number": lambda parts: dict(enumerate(parts)),
    "dict by value": lambda parts: dict.fromkeys(hashable_parts(parts), parts),
    "set": lambda parts: set(hashable_parts(parts)),
    "frozenset": lambda parts: frozenset(hashable_parts(parts)),
    "instance": lambda parts: corpus.Plain(**by_parts(parts)),
    "slots": make_slotted,
    "slots and dict": make_slots_and_dict,
    "list subclass": corpus.ListSubclass,
    "dict subclass": lambda parts: corpus.DictSubclass(by_parts(parts)),
    "state": lambda parts: corpus.StateOther(tuple(parts)),
    "new arguments": lambda parts: corpus.NewArgs(*parts),
    "new arguments by keyword": lambda parts: corpus.NewArgsEx(*parts[:1], **by_parts(parts[1:])),
    "registered": corpus.Registered,
    "dataclass": lambda parts: corpus.Record("r", parts),
    "slotted dataclass": lambda parts: corpus.FrozenSlottedRecord(len(parts), tuple(parts)),
    "named tuple": lambda parts: corpus.Point(*[*parts, None, None][:2]),
    "partial": lambda parts: functools.partial(corpus.module_function, *parts),
    "deque": collections.deque,
    "default dict": lambda parts: collections.defaultdict(list, by_parts(parts)),
    "ordered dict": lambda parts: collections.OrderedDict(by_parts(parts)),
    "exception": lambda parts: ValueError(*parts),
    "simple namespace": lambda parts: types.SimpleNamespace(**by_parts(parts)),
    "object array": lambda parts: object_array(parts),
}


def object_array(parts):
    made = np.empty(len(parts), dtype=object)
    for index, part in enumerate(parts):
        made[index] = part
    return made


def close_cycle(holder: Any, target: Any) -> None:
    """Make ``holder`` refer to ``target`` too, where it can still be changed."""
    match holder:
        case list() | collections.deque():
            holder.append(target)
        case dict():
            holder["cycle"] = target
        case corpus.Plain() | corpus.SlotsAndDict() | types.SimpleNamespace() | corpus.ListSubclass():
            holder.cycle = target
        case types.FunctionType():
            holder.__dict__["cycle"] = target
        case type():
            if holder.__module__ == "__main__":
                holder.cycle = target


@st.composite
def graphs(draw: st.DrawFn, makers: Sequence[str] = tuple(BUILDERS), max_nodes: int = 12, code: bool = False) -> Any:
    """An object graph with sharing and cycles: every node holds leaves and nodes made before it.

    With ``code`` some nodes are functions and classes that are pickled by value.
    """
    nodes: list[Any] = []
    for _ in range(draw(st.integers(1, max_nodes))):
        part = leaves if not nodes else st.one_of(leaves, st.sampled_from(nodes))
        parts = draw(st.lists(part, max_size=5))
        if code and draw(st.integers(0, 2)) == 0:
            nodes.append(draw(st.sampled_from([draw_function, draw_class]))(draw, parts))
        else:
            nodes.append(BUILDERS[draw(st.sampled_from(makers))](parts))
    for _ in range(draw(st.integers(0, 3))):
        close_cycle(draw(st.sampled_from(nodes)), draw(st.sampled_from(nodes)))
    return nodes[-1] if draw(st.booleans()) else nodes


def nested_builtins() -> st.SearchStrategy[Any]:
    """Lists, tuples, dicts, sets and frozensets with sharing and cycles."""
    return graphs(makers=("list", "tuple", "dict", "dict by number", "dict by value", "set", "frozenset"))


def instances() -> st.SearchStrategy[Any]:
    """Graphs of instances of importable classes of many forms, and builtins."""
    return graphs()


def draw_function(draw: st.DrawFn, parts: list[Any]) -> types.FunctionType:
    """A function of ``__main__`` that holds each of ``parts`` as a closure, global, default or attribute."""
    places = [draw(st.sampled_from(["closure", "global", "default", "keyword", "attribute"])) for _ in parts]
    held = {place: [part for part, where in zip(parts, places) if where == place]
            for place in ("closure", "global", "default", "keyword", "attribute")}
    cells = [f"c{i}" for i in range(len(held["closure"]))]
    known = [f"g{i}" for i in range(len(held["global"]))]
    defaults = [f"d{i}=None" for i in range(len(held["default"]))]
    keywords = [f"k{i}=None" for i in range(len(held["keyword"]))]
    signature = ", ".join([*defaults, "*rest", *keywords])
    used = ", ".join([*cells, *known, *draw(st.lists(st.sampled_from(
        ["0", "'text'", "None", "f", "len(rest)", "missing", "(1, 2)", "[i for i in rest]", "lambda: f"]
    ), max_size=3))])
    form = draw(st.sampled_from(["return", "yield", "async"]))
    body = "yield" if form == "yield" else "return"
    source = (
        f"def outer({', '.join(cells)}):\n"
        f"    {'async ' if form == 'async' else ''}def f({signature}):\n"
        f"        {body} ({used})\n"
        f"    return f\n"
    )
    namespace = {"__name__": "__main__", "__builtins__": builtins, **dict(zip(known, held["global"]))}
    exec(compile(source, "made.py", "exec"), namespace)
    made = namespace["outer"](*held["closure"])
    made.__defaults__ = tuple(held["default"]) or None
    made.__kwdefaults__ = {f"k{i}": part for i, part in enumerate(held["keyword"])} or None
    made.__dict__.update(by_parts(held["attribute"]))
    if draw(st.booleans()):
        made.__doc__ = draw(texts)
    return made


BASES: list[tuple[type, ...]] = [(), (), (corpus.Plain,), (dict,), (list,), (ValueError,), (int,), (corpus.Slotted,)]


class Metaclass(type):
    """A metaclass that is pickled by reference."""


def draw_class(draw: st.DrawFn, parts: list[Any]) -> Any:
    """A class of ``__main__`` that holds ``parts`` as attributes and in its methods; or an instance of it."""
    own = [part for part in parts if isinstance(part, type) and part.__module__ == "__main__"
           and not issubclass(part, (int, list, dict, ValueError, enum.Enum)) and type(part) is type]
    bases = tuple(own[:1]) if own and draw(st.booleans()) else draw(st.sampled_from(BASES))
    method = draw_function(draw, parts[:2])
    namespace: dict[str, Any] = {"__module__": "__main__", "method": method, **by_parts(parts)}
    for extra in draw(st.sets(st.sampled_from(["property", "static", "class", "slots", "annotations", "doc"]))):
        match extra:
            case "property":
                namespace["prop"] = property(method, doc="doc")
            case "static":
                namespace["static"] = staticmethod(method)
            case "class":
                namespace["build"] = classmethod(method)
            case "slots":
                if bases in [(), (corpus.Plain,), (corpus.Slotted,)]:
                    namespace["__slots__"] = draw(st.sampled_from([("s",), ("s", "t"), ()]))
            case "annotations":
                namespace["__annotations__"] = {"a0": int, "b": "list[int]"}
            case "doc":
                namespace["__doc__"] = "What it is."
    metaclass = draw(st.sampled_from([type, type, type, Metaclass]))
    made = metaclass("Made", bases, namespace)
    if draw(st.booleans()):
        return made
    instance = made()
    if hasattr(instance, "__dict__"):
        instance.__dict__.update(by_parts(parts[1:]))
    return instance


@st.composite
def functions(draw: st.DrawFn) -> types.FunctionType:
    """A function pickled by value whose closure, globals, defaults and attributes hold a random graph."""
    return draw_function(draw, draw(st.lists(graphs(max_nodes=4, code=True), max_size=4)))


@st.composite
def classes(draw: st.DrawFn) -> Any:
    """A class pickled by value, or an instance of one, whose attributes hold a random graph."""
    return draw_class(draw, draw(st.lists(graphs(max_nodes=4, code=True), max_size=4)))


def objects() -> st.SearchStrategy[Any]:
    """Anything: graphs of builtins, instances, functions and classes."""
    return st.one_of(nested_builtins(), instances(), graphs(code=True), functions(), classes())


# ---------------------------------------------------------------------------------------------------------------------
# Flow graphs


@dataclasses.dataclass(frozen=True)
class FlowGraph:
    """A tree in preorder with memo references as extra edges, as the scanner's node table holds it.

    ``parents[i]`` is the parent of node ``i`` (-1 for the root, node 0). An edge ``(source, target)`` stands for a GET
    inside ``source``, after its children: its target may be any node that began before ``source`` ends, ancestors of
    ``source`` and ``source`` itself included.
    """

    parents: tuple[int, ...]
    edges: tuple[tuple[int, int], ...]
    sizes: tuple[int, ...]  # self sizes in bytes

    @property
    def ends(self) -> list[int]:
        """For each node one more than its last descendant."""
        ends = list(range(1, len(self.parents) + 1))
        for node in range(len(self.parents) - 1, 0, -1):
            ends[self.parents[node]] = max(ends[self.parents[node]], ends[node])
        return ends

    def to_object(self) -> list:
        """Lists in lists whose pickle has this very node table: one node a list, one memo reference an edge."""
        nodes: list[list] = [[] for _ in self.parents]
        for node, parent in enumerate(self.parents):
            if parent >= 0:
                nodes[parent].append(nodes[node])
        for source, target in self.edges:
            nodes[source].append(nodes[target])
        return nodes[0]

    def to_networkx(self) -> Any:
        """The same as a networkx.DiGraph."""
        import networkx

        graph = networkx.DiGraph()
        graph.add_nodes_from(range(len(self.parents)))
        graph.add_edges_from((parent, node) for node, parent in enumerate(self.parents) if parent >= 0)
        graph.add_edges_from(self.edges)
        return graph


@st.composite
def flow_graphs(draw: st.DrawFn, max_nodes: int = 40) -> FlowGraph:
    """Random FlowGraphs, from chains to stars, with up to twice as many memo references as nodes."""
    count = draw(st.integers(1, max_nodes))
    parents, path = [-1], [0]
    for node in range(1, count):
        del path[draw(st.integers(1, len(path))):]
        parents.append(path[-1])
        path.append(node)
    bare = FlowGraph(tuple(parents), (), ())
    edges = []
    for source in draw(st.lists(st.integers(0, count - 1), max_size=2 * count)):
        edges.append((source, draw(st.integers(0, bare.ends[source] - 1))))
    node_sizes = draw(st.lists(st.integers(0, 1000), min_size=count, max_size=count))
    return FlowGraph(tuple(parents), tuple(edges), tuple(node_sizes))


# ---------------------------------------------------------------------------------------------------------------------
# Broken streams


@functools.cache
def sample_streams() -> list[bytes]:
    """Short streams of every protocol from the corpus, as raw material for broken ones."""
    quick = [entry for entry in corpus.available() if not entry.needs]
    streams = {p.stream for p in [*corpus.payloads(kinds=quick), *corpus.raw_streams()] if len(p.stream) < 4000}
    return sorted(streams, key=lambda stream: (len(stream), corpus.without_tracker_ids(stream)))


def mutate(stream: bytes, edit: str, at: int, length: int, data: bytes) -> bytes:
    """The stream after one edit; ``at`` and ``length`` are taken modulo what there is."""
    at %= len(stream) + 1
    end = min(len(stream), at + length)
    match edit:
        case "truncate":
            return stream[:at]
        case "overwrite":
            return stream[:at] + data + stream[at + len(data):]
        case "insert":
            return stream[:at] + data + stream[at:]
        case "delete":
            return stream[:at] + stream[end:]
        case "repeat":
            return stream[:end] + stream[at:end] * 3 + stream[end:]
        case "swap":
            return stream[end:] + stream[at:end] + stream[:at]
    raise ValueError(edit)


EDITS = ("truncate", "overwrite", "insert", "delete", "repeat", "swap")
OPCODES = [opcode.code.encode("latin-1") for opcode in pickletools.opcodes]
claims = st.sampled_from([0, 1, 255, 1 << 16, (1 << 31) - 1, 1 << 31, (1 << 32) - 1])
huge_claims = st.sampled_from([1 << 32, 1 << 60, (1 << 63) - 1, 1 << 63, (1 << 64) - 1])
fragments = st.one_of(
    st.binary(min_size=1, max_size=9),
    st.sampled_from(OPCODES),
    st.builds(lambda code, size: code + struct.pack("<I", size), st.sampled_from([b"B", b"X", b"T", b"r", b"j", b"\x8b",
                                                                               b"\x84"]), claims),
    st.builds(lambda code, size: code + struct.pack("<Q", size), st.sampled_from([b"\x8d", b"\x8e", b"\x95", b"\x96"]),
              huge_claims),
)


@st.composite
def broken_streams(draw: st.DrawFn) -> bytes:
    """A stream of the corpus after up to five edits, or a random row of opcodes and claims of length."""
    if draw(st.integers(0, 4)) == 0:
        return b"".join(draw(st.lists(fragments, max_size=30)))
    stream = draw(st.sampled_from(sample_streams()))
    for _ in range(draw(st.integers(1, 5))):
        stream = mutate(stream, draw(st.sampled_from(EDITS)), draw(st.integers(0, 1 << 20)), draw(st.integers(0, 40)),
                        draw(fragments))
    return stream


# ---------------------------------------------------------------------------------------------------------------------
# Isomorphism

# Compared by type and value: pickle does not keep the identity of the first, and that of the second only a strict
# comparison asks for.
VALUES = (type(None), bool, int, float, type(Ellipsis), type(NotImplemented))
TEXTS = (str, bytes)
BUFFERS = (bytearray, memoryview, pickle.PickleBuffer)
SETS = (set, frozenset, weakref.WeakSet)
BUILTINS = (types.GetSetDescriptorType, types.BuiltinFunctionType, types.MethodDescriptorType,
            types.WrapperDescriptorType)
VIEWS = tuple(type(view) for made in ({}, collections.OrderedDict())
              for view in (made.keys(), made.values(), made.items()))
FUNCTION_FIELDS = ("__code__", "__defaults__", "__kwdefaults__", "__closure__", "__name__", "__qualname__",
                   "__module__", "__doc__", "__annotations__", "__dict__")
CODE_FIELDS = ("co_argcount", "co_posonlyargcount", "co_kwonlyargcount", "co_flags", "co_code", "co_names",
               "co_varnames", "co_freevars", "co_cellvars", "co_name", "co_firstlineno")
# What the interpreter, abc or copyreg put into a class, and what differs between two classes made alike.
CLASS_INTERNALS = {"__dict__", "__weakref__", "_abc_impl", "__slotnames__", "__firstlineno__", "__static_attributes__"}

Parts = list[tuple[str, Any]]  # (step of a path, part)


def difference(a: Any, b: Any, *, strict: bool = False) -> str | None:
    """Where two object graphs differ, as ``path: what``; None if they are isomorphic.

    Isomorphic graphs have equal values and types in the same places, and the same sharing: two places hold one object
    in ``a`` exactly where they hold one object in ``b``. Numbers, None and the like are compared by value alone, since
    pickle does not keep their identity. Members of sets are paired greedily, which is enough for members that are told
    apart by what they hold.

    ``strict`` also compares what an original need not have in common with what is loaded, while two loads of the same
    thing do: the identity of strings and bytes, and the strides and writability of arrays.
    """
    return Comparison(strict).run(a, b, "root")


def isomorphic(a: Any, b: Any, *, strict: bool = False) -> bool:
    """Whether ``difference`` finds none."""
    return difference(a, b, strict=strict) is None


class Comparison:
    """A search for the first difference between two object graphs."""

    def __init__(self, strict: bool) -> None:
        self.strict = strict
        self.forth: dict[int, Any] = {}  # id of an object in a -> its partner in b
        self.back: dict[int, Any] = {}  # id of an object in b -> its partner in a
        self.storages: dict[int, tuple[int, int]] = {}  # torch storage in a -> that in b, distance between their data

    def run(self, a: Any, b: Any, path: str) -> str | None:
        stack, sets = [(a, b, path)], []
        while stack or sets:
            if not stack:  # sets come last: by then most of their members have their partners
                found = self.pair_members(*sets.pop())
                if found:
                    return found
                continue
            a, b, path = stack.pop()
            kind = type(a)
            if kind is not type(b):
                if kind.__name__ != type(b).__name__ or kind in VALUES + TEXTS:
                    return f"{path}: {kind.__name__} became {type(b).__name__}"
                stack.append((kind, type(b), f"type({path})"))
            if kind in VALUES:
                if not same_value(a, b):
                    return f"{path}: {a!r:.80} became {b!r:.80}"
                continue
            if kind in TEXTS and a != b:
                return f"{path}: {a!r:.80} became {b!r:.80}"
            # The interpreter shares empty and one-character objects as it likes.
            if kind in (*TEXTS, tuple, frozenset) and (len(a) < (2 if kind in TEXTS else 1) or
                                                       (kind in TEXTS and not self.strict)):
                if len(a) != len(b):
                    return f"{path}: {len(a)} parts became {len(b)}"
                continue
            known = self.pair(a, b)
            if known is False:
                return f"{path}: other sharing of {kind.__name__} {a!r:.60}"
            if known or kind in TEXTS or a is b:
                continue
            if isinstance(a, SETS):
                if len(a) != len(b):
                    return f"{path}: {len(a)} members became {len(b)}"
                sets.append((a, b, path))
            if any(self.pair(*owned) is False for owned in zip(owned_dicts(a), owned_dicts(b))):
                return f"{path}: other sharing of its dict"
            found = self.content_difference(a, b)
            if found:
                return f"{path}{found}"
            parts_a, parts_b = parts_of(a), parts_of(b)
            steps_a, steps_b = [step for step, _ in parts_a], [step for step, _ in parts_b]
            if steps_a != steps_b:
                return f"{path}: parts {steps_a!r:.200} became {steps_b!r:.200}"
            stack += [(part, parts_b[i][1], path + step) for i, (step, part) in enumerate(parts_a)][::-1]
        return None

    def pair(self, a: Any, b: Any) -> bool | None:
        """None for two objects without a partner so far (now they have), True for known partners, False otherwise.

        Partners are kept alive, so that no id is used again for another object.
        """
        if id(a) not in self.forth and id(b) not in self.back:
            self.forth[id(a)], self.back[id(b)] = b, a
            return None
        return self.forth.get(id(a), self) is b and self.back.get(id(b), self) is a

    def pair_members(self, a: Any, b: Any, path: str) -> str | None:
        """Find a partner for each member of a set by trial."""
        left = list(b)
        for member in a:
            for position, candidate in enumerate(left):
                if type(member) in VALUES + TEXTS and member != candidate:
                    continue
                trial = Comparison(self.strict)
                trial.forth, trial.back, trial.storages = dict(self.forth), dict(self.back), dict(self.storages)
                if trial.run(member, candidate, path) is None:
                    self.forth, self.back, self.storages = trial.forth, trial.back, trial.storages
                    del left[position]
                    break
            else:
                return f"{path}: no partner for member {member!r:.60}"
        return None

    def content_difference(self, a: Any, b: Any) -> str | None:
        """Differences in what is not made of parts: raw bytes, layouts, storages."""
        if isinstance(a, BUFFERS):
            return None if bytes(a) == bytes(b) else ": other bytes"
        if isinstance(a, np.ndarray):
            same_order = a.flags.c_contiguous or a.flags.f_contiguous
            for field in ("dtype", "shape", *(["strides", "flags.writeable"] if self.strict else []),
                          *(["flags.c_contiguous", "flags.f_contiguous"] if same_order else [])):
                before, after = (operator.attrgetter(field)(array) for array in (a, b))
                if before != after:
                    return f".{field}: {before} became {after}"
            return None if a.dtype.hasobject or a.tobytes() == b.tobytes() else ": other elements"
        if isinstance(a, types.CodeType):
            # Names, bytes and tuples of them have no identity of their own: some versions make them anew, some share.
            fields = (f".{field}: {getattr(a, field)} became {getattr(b, field)}"
                      for field in CODE_FIELDS if getattr(a, field) != getattr(b, field))
            return next(fields, None)
        if isinstance(a, BUILTINS):
            return None if a.__name__ == b.__name__ else f": {a!r:.80} became {b!r:.80}"
        if is_tensor(a):
            return self.tensor_difference(a, b)
        return None

    def tensor_difference(self, a: Any, b: Any) -> str | None:
        for field in ("dtype", "shape", "requires_grad", "layout", "device"):
            if getattr(a, field) != getattr(b, field):
                return f".{field}: {getattr(a, field)} became {getattr(b, field)}"
        if str(a.layout) != "torch.strided":
            a, b = a.to_dense(), b.to_dense()
        elif a.numel():
            if a.stride() != b.stride():
                return f".stride(): {a.stride()} became {b.stride()}"
            # Tensors over one storage stay over one storage, equally far apart.
            place = b.untyped_storage().data_ptr(), a.data_ptr() - b.data_ptr()
            if self.storages.setdefault(a.untyped_storage().data_ptr(), place) != place:
                return ": other sharing of its storage"
        raw = [tensor.detach().contiguous().clone().untyped_storage().tolist() for tensor in (a, b)]
        return None if raw[0] == raw[1] else ": other elements"


def parts_of(obj: Any) -> Parts:
    """What an object is made of, in order."""
    kind = type(obj)
    if kind in (list, tuple) or kind in VIEWS:
        return [(f"[{i}]", part) for i, part in enumerate(obj)]
    if kind in (dict, types.MappingProxyType):
        return items_of(obj)
    if isinstance(obj, SETS):
        return [] if kind is weakref.WeakSet else items_of(getattr(obj, "__dict__", {}))
    if kind is types.FunctionType:
        # Globals are compared by identity, as owned_dicts, and here by name: a copy holds only names that are used.
        used = sorted(global_names(obj.__code__) & set(obj.__globals__))
        return [(f".{field}", getattr(obj, field)) for field in FUNCTION_FIELDS] + [
            (f"<global {name}>", obj.__globals__[name]) for name in used]
    if isinstance(obj, type):
        return class_parts(obj)
    if kind is types.CellType:
        try:
            return [("<cell>", obj.cell_contents)]
        except ValueError:
            return [("<empty cell>", None)]
    if kind is types.CodeType:
        return [(f".co_consts[{i}]", part) for i, part in enumerate(obj.co_consts)]
    if kind is types.ModuleType:
        if sys.modules.get(obj.__name__) is obj:
            return [(f"<module {obj.__name__}>", None)]
        return items_of({name: part for name, part in vars(obj).items() if name != "__builtins__"})
    if kind is types.MethodType:
        return [(".__func__", obj.__func__), (".__self__", obj.__self__)]
    if kind in (staticmethod, classmethod):
        return [(".__func__", obj.__func__)]
    if kind is property:
        return [(f".{name}", getattr(obj, name)) for name in ("fget", "fset", "fdel", "__doc__")]
    if kind is weakref.ReferenceType:
        return [("()", obj())]
    if kind is typing.TypeVar:
        return [(f".{name}", getattr(obj, name))
                for name in ("__name__", "__bound__", "__constraints__", "__covariant__", "__contravariant__")]
    if kind is types.BuiltinFunctionType:
        return [] if isinstance(obj.__self__, types.ModuleType) else [(".__self__", obj.__self__)]
    if isinstance(obj, np.ndarray) and kind.__reduce__ is np.ndarray.__reduce__:
        return [(f"[{i}]", part) for i, part in enumerate(obj.flat)] if obj.dtype.kind == "O" else []
    if kind in BUFFERS or kind in BUILTINS or is_tensor(obj):
        return []
    return reduce_parts(obj)


def class_parts(cls: type) -> Parts:
    found: Any = sys.modules.get(cls.__module__)
    for name in cls.__qualname__.split("."):
        found = getattr(found, name, None)
    if found is cls:
        return [(f"<class {cls.__module__}.{cls.__qualname__}>", None)]
    slots = {name for name, part in vars(cls).items() if isinstance(part, types.MemberDescriptorType)}
    hidden = CLASS_INTERNALS | slots
    return [(".__name__", cls.__name__), (".__bases__", cls.__bases__), (".__class__", type(cls)),
            *items_of({name: vars(cls)[name] for name in sorted(vars(cls)) if name not in hidden})]


def reduce_parts(obj: Any) -> Parts:
    """The parts of a reduce value; its tuples and iterators have no identity of their own."""
    reducer = copyreg.dispatch_table.get(type(obj))
    value = reducer(obj) if reducer else obj.__reduce_ex__(4)
    if isinstance(value, str):
        return [(f"<global {value}>", None)]
    func, args, state, items, pairs, setter = [*value, None, None, None, None][:6]
    parts: Parts = [("<reducer>", func), *((f"<argument {i}>", arg) for i, arg in enumerate(args))]
    if type(state) is tuple and len(state) == 2 and type(state[1]) is dict:  # an instance dict and the slots
        state, slots = state
        parts += items_of(slots)
    if state is not None and state is getattr(obj, "__dict__", None):
        parts += items_of(state)
    else:
        parts.append(("<state>", state))
    parts += [(f"[{i}]", part) for i, part in enumerate(items if items is not None else ())]
    return [*parts, *items_of(dict(pairs) if pairs is not None else {}), ("<setter>", setter)]


def owned_dicts(obj: Any) -> list[dict]:
    """Dicts that may be shared with others, while their items are compared as parts of ``obj``."""
    if isinstance(obj, types.FunctionType):
        return [obj.__globals__]
    if isinstance(obj, (type, types.ModuleType)) or type(getattr(obj, "__dict__", None)) is not dict:
        return []
    return [obj.__dict__]


def items_of(mapping: Any) -> Parts:
    parts: Parts = []
    for key, value in mapping.items():
        parts += [("<key>", key), (f"[{key!r:.40}]" if type(key) in VALUES + TEXTS else "[...]", value)]
    return parts


def same_value(a: Any, b: Any) -> bool:
    """Equal, and for floats equal bit by bit but for the payload of a NaN."""
    if isinstance(a, float):
        return (math.isnan(a) and math.isnan(b)) or (a == b and math.copysign(1, a) == math.copysign(1, b))
    return bool(a == b)


def is_tensor(obj: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(obj, torch.Tensor)


def global_names(code: types.CodeType) -> set[str]:
    """The names that a code object and the code in it may look up as globals."""
    nested = (const for const in code.co_consts if isinstance(const, types.CodeType))
    return set(code.co_names).union(*map(global_names, nested))
