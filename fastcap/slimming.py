"""Takes oversized parts out of a payload while it is pickled, and puts them into a store.

Which parts is decided on the graph of the payload, not by type. The dominator tree is walked from the root, and cut at
the first node that

- retains at least ``min_size`` bytes,
- is closed: nothing outside refers into it, and it refers to nothing outside, so that what is shared stays shared
  (names that are looked up, short texts and dtypes do not count: any number of copies of them are the same thing),
- is pure data: made by reconstructors of the standard library, NumPy, pandas, PyArrow, SciPy or PyTorch (`is_data`)
  only; no code that goes by value, no instance of anybody's class, no handle of a cluster,
- is an object of its own: not the arguments or the state that a reducer gave for another object.

The first pass pickles into a scanner, which counts big buffers by reference: no payload is held. The second one pickles
with those objects replaced by what the store says. They are recognised by identity, and a reducer may well make its
objects anew each time it is asked. Where such a temporary is to be cut, the first pass is done again and keeps what
reducers return, for the second one to use: both meet the very same objects.

A payload of less than ``min_size`` is done after one pass, with nothing analysed.
"""

from __future__ import annotations

import io
import pickletools
import sys
from collections import ChainMap
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from pickle import PickleBuffer
from typing import Any, Final

import numpy

from fastcap._native.graph import OPERAND, Graph
from fastcap._native.pickler import Pickler
from fastcap._native.scanner import Scanner, Tables
from fastcap.explain import Explainer
from fastcap.inert import BYTES, CALLS, EXTENSIONS, GETS, GLOBALS, OLD_TEXTS, PERSISTENT, TEXTS
from fastcap.pickling import BufferCallback, Writable, dump_prepared, write_dumped
from fastcap.report import as_size
from fastcap.stores import PartInfo, ReduceValue, Store

MIN_SIZE: Final = 1 << 20
"""Bytes a part takes at least to be taken out, unless the caller says otherwise."""

_SHORT = 4096  # bytes of a text up to which it may be here and there
_MANY = 1000  # references to an object that are looked at, to tell whether it is temporary
_SHORTEST = 300  # bytes a part takes at least, whatever the caller says: its stand-in is no smaller

# Struct Node and struct Ref of nodes.pxd.
_NODE = numpy.dtype([
    ("start", "u8"), ("end", "u8"), ("parent", "u4"), ("count", "u4"), ("place", "u4"), ("arg", "u4"), ("memo", "u4"),
    ("op", "u1"), ("flags", "u1"), ("unused", "u2"),
])
_REF = numpy.dtype([("source", "u4"), ("target", "u4"), ("place", "u4")])
_NO_INDEX = 0xFFFFFFFF


# ---- what is data ----------------------------------------------------------------------------------------------------

_PACKAGES: Final = frozenset({"numpy", "pandas", "pyarrow", "scipy", "torch", "ml_dtypes"})
_MODULES: Final = frozenset({
    "_codecs", "array", "collections", "copyreg", "datetime", "_datetime", "decimal", "_decimal", "fractions",
    "ipaddress", "pathlib", "pathlib._local", "uuid", "zoneinfo",
})
_NAMES: Final = frozenset({
    *(f"builtins.{name}" for name in (
        "bool", "bytearray", "bytes", "complex", "dict", "float", "frozenset", "int", "list", "object", "range", "set",
        "slice", "str", "tuple",
    )),
    "pickle.PickleBuffer", "re._compile", "re.Pattern", "types.SimpleNamespace",
})
# What those packages have of code, connections and random state.
_NO_DATA: Final = ("pyarrow._fs", "pyarrow.fs", "pyarrow._flight", "pyarrow.flight", "torch.distributed", "torch.jit",
                   "numpy.random", "torch.fx", "torch.multiprocessing")


def is_data(name: str) -> bool:
    """Whether the global called ``module.name`` makes data of data, the same in each process that calls it."""
    if name in _NAMES:
        return True
    module = name.rpartition(".")[0]
    if module in _MODULES:
        return True
    return module.partition(".")[0] in _PACKAGES and not any(
        module == other or module.startswith(f"{other}.") for other in _NO_DATA
    )


# ---- which parts -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Cut:
    """A node to take out."""

    index: int
    memo: int  # memo index
    size: int  # bytes it retains
    temporary: bool


def _codes(names: Iterable[str]) -> list[int]:
    wanted = frozenset(names)
    return [ord(op.code) for op in pickletools.opcodes if op.name in wanted]


_CALL_CODES = _codes(CALLS)
_GLOBAL_CODES = _codes(GLOBALS)
_TEXT_CODES = frozenset(_codes({*TEXTS, *OLD_TEXTS, *BYTES}))
_STRANGE_CODES = [0, *_codes({*PERSISTENT, *EXTENSIONS, "OBJ", "INST"})]  # 0: a file of several pickles, raw bytes
_NO_PART_CODES = frozenset(_codes({*GLOBALS, *GETS}))


class Shape:
    """What the nodes of a payload are as parts: closed or not, data or not. ``objects`` are those by memo index."""

    def __init__(self, tables: Tables, objects: list[Any]) -> None:
        self.objects = objects
        self.graph = Graph(tables)
        self.idom = numpy.frombuffer(self.graph.dominators(), numpy.uint32)  # the graph has checked its tables by now
        self.nodes = numpy.frombuffer(tables.nodes, _NODE)
        self.refs = numpy.frombuffer(tables.references, _REF)
        self.explainer = Explainer(self.graph)

    @cached_property
    def _strange(self) -> Any:
        """For each node how many nodes before it are no data, or refer to what is none; and the same for their end."""
        strange = numpy.isin(self.nodes["op"], _STRANGE_CODES)
        names = numpy.flatnonzero(numpy.isin(self.nodes["op"], _GLOBAL_CODES))
        for index in names:
            name = self.explainer.reader.global_name(int(index))
            strange[index] = name is None or not is_data(name)
        others = names[strange[names]]
        strange[self.refs["source"][numpy.isin(self.refs["target"], others)]] = True
        return numpy.concatenate([[0], numpy.cumsum(strange)])

    @cached_property
    def _calls(self) -> Any:
        """The nodes that stand for calls, in rising order."""
        return numpy.flatnonzero(numpy.isin(self.nodes["op"], _CALL_CODES))

    @cached_property
    def _loose(self) -> Any:
        """For each node whether it may be here and there: a name that is looked up, short text or bytes, a dtype."""
        nodes = self.nodes
        loose = numpy.isin(nodes["op"], _GLOBAL_CODES)
        loose |= numpy.isin(nodes["op"], list(_TEXT_CODES)) & (nodes["end"] - nodes["start"] <= _SHORT)
        calls = self._calls
        for callee in numpy.unique(nodes["arg"][calls]):
            name = None if callee == _NO_INDEX else self.explainer.reader.global_name(int(callee))
            if name in ("numpy.dtype", "_codecs.encode"):  # the latter: bytes, up to protocol 2
                made = calls[nodes["arg"][calls] == callee]
                loose[made[nodes["end"][made] - nodes["start"][made] <= _SHORT]] = True
        return loose

    @cached_property
    def _entered(self) -> Any:
        """For each node its immediate dominator, where it must not be reached from elsewhere."""
        return numpy.where(self._loose, _NO_INDEX, self.idom)

    @cached_property
    def _earliest(self) -> Any:
        """For each node the first one that it refers to, and must not be torn from."""
        earliest = numpy.full(len(self.nodes), _NO_INDEX, numpy.uint32)
        refs = self.refs[~self._loose[self.refs["target"]]]
        numpy.minimum.at(earliest, refs["source"], refs["target"])
        return earliest

    def is_closed(self, index: int) -> bool:
        """Whether no reference leads into the subtree of a node or out of it, but to what may be here and there.

        A node that is reached from outside the subtree has an immediate dominator in front of the subtree.
        """
        end = index + int(self.nodes["count"][index])
        inside = self._entered[index + 1 : end]
        if len(inside) and inside.min() < index:
            return False
        return bool(self._earliest[index:end].min() >= index)

    def is_data(self, index: int) -> bool:
        """Whether all of a node's subtree is data: by the names in it, and by the types of the objects."""
        end = index + int(self.nodes["count"][index])
        if self._strange[index] != self._strange[end]:
            return False
        calls = self._calls[slice(*numpy.searchsorted(self._calls, (index, end)))]
        memo = self.nodes["memo"][calls]
        kinds = set(map(type, map(self.objects.__getitem__, memo[memo != _NO_INDEX].tolist())))
        return all(is_data(f"{kind.__module__}.{kind.__qualname__}") for kind in kinds)

    def is_object(self, index: int) -> bool:
        """Whether a node is a text, or an object that people know, and not what a reducer has said of another one."""
        node = self.nodes[index]
        if node["memo"] == _NO_INDEX or int(node["op"]) in _NO_PART_CODES:
            return False
        if type(self.objects[node["memo"]]) is PickleBuffer:
            return False
        place = self.explainer.place(index)
        return place is not None and (place.head == index or int(node["op"]) in _TEXT_CODES)

    def holders(self, index: int, limit: int) -> list[int]:
        """The nodes that refer to one, its parent included, once for each reference; at most ``limit`` + 1."""
        parent = [int(self.nodes["parent"][index])] if index else []
        return parent + self.graph.referrers(index, limit)

    def memo(self, index: int) -> int | None:
        """The memo index of a node."""
        memo = int(self.nodes["memo"][index])
        return None if memo == _NO_INDEX else memo


class _Liveness:
    """Which of the objects of a dump would be there without it."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.objects = shape.objects  # the only list that holds them
        self.known: dict[int, bool] = {0: False}

    def is_temporary(self, index: int) -> bool:
        """Whether nobody refers to the object of a node but the list of objects and other temporaries.

        Right or not, the payload will be: a temporary that is taken for lasting is not met by the second pass.
        """
        open_nodes = [index]
        while open_nodes:
            node = open_nodes[-1]
            holders = self.shape.holders(node, _MANY) if node not in self.known else None
            if holders is None:
                pass
            elif len(holders) > _MANY:
                self.known[node] = False
            else:
                # Holders behind the node got hold of it later, some of them in a cycle: nothing waits for them.
                unknown = [holder for holder in holders if holder < node and holder not in self.known]
                if unknown:
                    open_nodes.extend(unknown)
                    continue
                self.known[node] = self._others(node) <= sum(
                    self.known.get(holder, True) for holder in holders if self.shape.memo(holder) is not None
                )
            open_nodes.pop()
        return self.known[index]

    def _others(self, node: int) -> int:
        """References to the object of a node that the list of objects does not hold."""
        memo = self.shape.memo(node)
        if memo is None:  # a tuple of the pickler's own
            return 0
        # One reference is the list's, one this call's, and one that of each buffer that is passed to the reconstructor.
        return sys.getrefcount(self.objects[memo]) - 2 - self._buffers(node)

    def _buffers(self, node: int) -> int:
        """How many of the arguments of the call that makes an object are views of its own memory."""
        own = self.shape.memo(node)
        if own is None or int(self.shape.nodes["op"][node]) not in _CALL_CODES:
            return 0
        graph = self.shape.graph
        args = [edge.target for edge in graph.edges(node, 0, 3, False) if edge.role == OPERAND and edge.position]
        parts = [edge.target for index in args for edge in graph.edges(index, 0, 8, False)]
        memos = [memo for memo in map(self.shape.memo, parts) if memo is not None]
        return sum(_is_view_of(self.objects[memo], self.objects[own]) for memo in memos)


def _is_view_of(buffer: Any, obj: Any) -> bool:
    """Whether an argument of a reconstructor is a buffer that keeps the object alive, as those of arrays do."""
    if type(buffer) is not PickleBuffer:
        return False
    try:
        with memoryview(buffer) as view:
            owner: Any = view.obj
    except (BufferError, ValueError):  # of no memory any more
        return False
    for _ in range(3):  # an array, or a view of it that its reducer has made
        if owner is obj:
            return True
        owner = getattr(owner, "base", None)
    return False


def find_cuts(
    shape: Shape, min_size: int, is_temporary: Callable[[int], bool], *, split: bool = False
) -> list[Cut]:
    """The nodes to take out. A temporary is one of them only if nothing that lasts is taken out below it.

    With ``split`` that holds for all nodes: the lowest ones are taken out.
    """
    graph = shape.graph
    cuts: list[Cut] = []
    lasting_count = 0
    open_nodes: list[tuple[int, Cut | None]] = [(0, None)]
    last_resorts: list[tuple[int, int]] = []  # cuts and lasting cuts before each node that waits for those below it
    while open_nodes:
        index, last_resort = open_nodes.pop()
        if last_resort is not None:
            before, lasting_before = last_resorts.pop()
            if lasting_count == lasting_before:
                cuts[before:] = [last_resort]  # in the place of temporaries in it
                lasting_count += not last_resort.temporary
            continue
        size = graph.node(index).retained_size
        if size < min_size:
            continue
        if shape.is_object(index) and shape.is_data(index) and shape.is_closed(index):
            memo = int(shape.nodes["memo"][index])
            cut = Cut(index, memo, size, is_temporary(index))
            if not cut.temporary and not split:
                cuts.append(cut)
                lasting_count += 1
                continue
            open_nodes.append((index, cut))
            last_resorts.append((len(cuts), lasting_count))
        open_nodes.extend((below, None) for below in reversed(graph.dominated(index, min_size)))
    return cuts


# ---- the two passes --------------------------------------------------------------------------------------------------


class _Sink:
    """A file that keeps a payload while it is smaller than ``limit`` bytes, and then only scans it."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.size = 0
        self.chunks: list[bytes] = []
        self.scanner: Scanner | None = None

    def write(self, data: Any) -> None:
        if self.scanner is None:
            self.size += len(data)
            if self.size < self.limit:
                # What is written by reference could change.
                self.chunks.append(data if type(data) is bytes else bytes(data))
                return
            self.scanner = Scanner()
            for chunk in self.chunks:
                self.scanner.write(chunk)
            self.chunks.clear()
        self.scanner.write(data)


def _measure_tensors(encoder: Pickler, min_size: int, protocol: int | None) -> None:
    """Have a first pass see the memory of big tensors, where torch would copy it twice, into what torch.save writes.

    Such a pass is over when one comes up: the payload is not small, and its bytes are only counted.
    """
    torch: Any = sys.modules.get("torch")
    rebuild = getattr(sys.modules.get("torch._utils"), "_rebuild_tensor_v2", None)
    tensor_type = getattr(torch, "Tensor", None)
    table: Any = getattr(encoder, "dispatch_table", None)
    if table is None or rebuild is None or tensor_type is None or tensor_type in table or protocol not in (None, 5, -1):
        return

    def reduce(tensor: Any) -> Any:
        try:
            size = tensor.numel() * tensor.element_size()
            plain = tensor.device.type == "cpu" and tensor.layout is torch.strided and tensor.is_contiguous()
            if plain and size >= min_size and size == tensor.untyped_storage().nbytes() and not tensor.__dict__:
                view = tensor.detach().flatten().view(torch.uint8).numpy()
                return rebuild, (PickleBuffer(view), 0, tuple(tensor.shape))
        except (AttributeError, RuntimeError, TypeError):
            pass  # a tensor of a special kind
        return tensor.__reduce_ex__(5)

    encoder.dispatch_table = ChainMap({tensor_type: reduce}, *getattr(table, "maps", [table]))


class _Slimmer:
    """One dump into a store."""

    def __init__(
        self, obj: Any, store: Store, min_size: int | str | None, protocol: int | None, compact: bool, flavor: str
    ) -> None:
        if not callable(getattr(store, "put", None)):
            raise TypeError(f"a store has a method put(obj, info), which {type(store).__qualname__!r} objects lack")
        self.obj = obj
        self.store = store
        self.split = bool(getattr(store, "split", False))
        self.min_size = max(_SHORTEST, _min_size(min_size))
        self.protocol = protocol
        self.compact = compact
        self.flavor = flavor
        self.encoder: Pickler | None = None  # of the last pass
        self.first_pass = True  # whose reduce values need only be of the right size
        self.recorded: dict[int, tuple[Any, tuple[Any, ...]]] | None = None
        self.replacements: dict[int, ReduceValue] = {}
        self.replaced: list[Any] = []  # whose ids those are

    def small_payload(self) -> bytes | None:
        """The payload if it is smaller than the smallest part. Otherwise what is to be taken out is in the store."""
        sink = _Sink(self.min_size)
        self._dump(sink, self.compact)
        if sink.scanner is None:
            self.first_pass = False
            return b"".join(sink.chunks)
        if self.compact:  # which leaves objects out of the memo: only an exact dump says which object a node is
            sink = _Sink(0)
            self._dump(sink)
        self.first_pass = False
        shape = self._shape(sink)
        if shape is not None:
            cuts = find_cuts(shape, self.min_size, _Liveness(shape).is_temporary, split=self.split)
            if any(cut.temporary for cut in cuts):
                self._record([shape.objects[cut.memo] for cut in cuts if not cut.temporary])
            else:
                self._put(shape, cuts)
        return None

    def payload(self) -> bytes:
        """The payload without what was taken out."""
        data = self._second_pass()
        if self.recorded is None and (missed := self._missed()):
            # Not so lasting after all.
            self._record([obj for obj in self.replaced if id(obj) not in missed])
            data = self._second_pass()
        return data

    def setup(self, encoder: Pickler) -> None:
        """Prepare the encoder of a pass."""
        self.encoder = encoder
        if self.first_pass:
            _measure_tensors(encoder, self.min_size, self.protocol)
        if self.recorded is not None:
            encoder._recorded = self.recorded
        if self.replacements:
            encoder._replacements = self.replacements

    def _dump(self, file: Writable, compact: bool = False) -> None:
        dump_prepared(
            self.obj, file, self.protocol, compact=compact, flavor=self.flavor, setup=self.setup, watched=False
        )

    def _second_pass(self) -> bytes:
        with io.BytesIO() as file:
            self._dump(file, self.compact)
            return file.getvalue()

    def _shape(self, sink: _Sink) -> Shape | None:
        """What a first pass has found; None if nodes and objects do not fit together."""
        if sink.scanner is None or self.encoder is None:
            return None
        objects = self.encoder._memo_objects()
        self.encoder = None
        shape = Shape(sink.scanner.finish(), objects)
        memo = shape.nodes["memo"]
        # An object that is memoized twice (a quirk of CPython's pickler, kept) shifts the numbers of those behind it.
        highest = int(memo[memo != _NO_INDEX].max(initial=0))
        return shape if highest < len(objects) else None

    def _record(self, lasting: list[Any]) -> None:
        """Do the first pass again and keep what reducers return. ``lasting``: what is to be cut anyway."""
        self.first_pass = False
        self.replacements = {}
        self.recorded = {}
        sink = _Sink(0)
        self._dump(sink)
        shape = self._shape(sink)
        if shape is not None:
            objects, memo, known = shape.objects, shape.nodes["memo"], set(map(id, lasting))
            cuts = find_cuts(
                shape, self.min_size, lambda index: id(objects[int(memo[index])]) not in known, split=self.split
            )
            self._put(shape, cuts)

    def _put(self, shape: Shape, cuts: list[Cut]) -> None:
        for cut in cuts:
            obj = shape.objects[cut.memo]
            subject = shape.explainer.subject(cut.index)
            path = shape.explainer.path(cut.index) or "(too deep for a path)"
            info = PartInfo(path, subject.type, subject.what, cut.size, cut.temporary)
            self.replaced.append(obj)
            value = self.store.put(obj, info)
            if value is not None:
                self.replacements[id(obj)] = _checked(value, self.store)

    def _missed(self) -> set[int]:
        """The ids of objects that the last pass was to replace and has not met."""
        if not self.replacements or self.encoder is None:
            return set()
        return self.replacements.keys() - set(map(id, self.encoder._memo_objects()))


def _min_size(size: int | str | None) -> int:
    if size is None:
        return MIN_SIZE
    try:
        return as_size(size)
    except TypeError as error:
        raise ValueError(f"min_size: {error}") from None


def _checked(value: Any, store: Store) -> ReduceValue:
    if not isinstance(value, tuple) or len(value) != 2 or not callable(value[0]) or not isinstance(value[1], tuple):
        kind = type(store).__qualname__
        raise TypeError(f"{kind}.put must return (callable, tuple of arguments), not {value!r:.100}")
    return value[0], value[1]


def slim_dumps(
    obj: Any,
    store: Store,
    min_size: int | str | None,
    protocol: int | None,
    buffer_callback: BufferCallback | None,
    compact: bool,
    flavor: str,
) -> bytes:
    """`fastcap.dumps` with a store."""
    with io.BytesIO() as file:
        slim_dump(obj, file, store, min_size, protocol, buffer_callback, compact, flavor)
        return file.getvalue()


def slim_dump(
    obj: Any,
    file: Writable,
    store: Store,
    min_size: int | str | None,
    protocol: int | None,
    buffer_callback: BufferCallback | None,
    compact: bool,
    flavor: str,
) -> None:
    """`fastcap.dump` with a store. Buffers count like everything else; those that stay go to ``buffer_callback``."""
    slimmer = _Slimmer(obj, store, min_size, protocol, compact, flavor)
    data = slimmer.small_payload()
    if buffer_callback is not None:
        # It may be asked only once for each buffer, so this pass is the last.
        dump_prepared(
            obj, file, protocol, buffer_callback, compact=compact, flavor=flavor, setup=slimmer.setup, watched=True
        )
        return
    write_dumped(obj, file, slimmer.payload() if data is None else data, flavor=flavor)
