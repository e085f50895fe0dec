"""Turns structure into words: what a node is, and by which path it hangs below the root.

Pickle knows calls, tuples and dicts; people know functions, closure variables and attributes. `Explainer` looks at a
graph as a tree of *objects*: a node that a person would recognise as a thing of its own (an instance, a function, an
array, a dict) is an object and gets a step in the path; nodes that exist for pickle's sake only (argument tuples,
cells, state dicts, calls of state setters) are *glue* and belong to the object above them.

Which is which depends on the reconstructor, the global that is called to build the object. `TABLE` maps its name to a
function that makes a `Subject`: type, a phrase, and a route that says for each edge below the object what lies there.
Adding a type is adding a row there. Names are canonical (see `canonical`): ``cloudpickle:_make_function`` stands for
this function in each of cloudpickle's copies.

Nothing here executes or imports anything, and each question costs a bounded number of opcodes (see `fastcap.inert`).
"""

from __future__ import annotations

import itertools
import os
import re
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any, Final, Union

from fastcap._native.graph import DISCARD, ITEM, OPERAND, PAIR, PICKLE, RAW, STATE, Edge, Graph, NodeView
from fastcap.inert import (
    ATOMS,
    BYTES,
    CALLS,
    DICTS,
    EXTENSIONS,
    GETS,
    GLOBALS,
    LISTS,
    OLD_TEXTS,
    PERSISTENT,
    SETS,
    TEXTS,
    TUPLES,
    UNREAD,
    At,
    Reader,
)
from fastcap.paths import Shortened, Step, Value, attr, format_root, is_literal, item, shorten, word
from fastcap.report import format_size

UNPICKLABLE: Final = "fastcap.findings.Unpicklable"
"""Name of the stand-in that an analysis writes for an object that cannot be pickled."""

_MAX_CHAIN = 4096
"""Ancestors that are looked at to place one node; deeper nodes have no path."""

_HEAVY_KEY = 4096
"""Bytes from which on a string that is a key counts as an object below the dict."""

_MAX_LENDERS = 256
"""Ancestors whose other holders count as holders of what is in them."""

_MAX_REFERENCES = 4096
"""References to one node that are looked at to tell who holds it."""


@dataclass(frozen=True, slots=True)
class Part:
    """An object below another one: the step that leads to it, and how code captured it."""

    step: Step
    how: str | None = None
    name: str | None = None


@dataclass(frozen=True, slots=True)
class Hidden:
    """A node that belongs to the object above it, with all that is below."""


@dataclass(frozen=True, slots=True)
class Glue:
    """A node that belongs to the object above it, while below it there may be further objects.

    ``part`` is set where the glue is only a wrapper around one object, such as a cell: references to the glue then are
    shown as references to the object.
    """

    route: Route
    part: Part | None = None


Shape = Union[Part, Hidden, Glue]  # noqa: UP007 - Glue names it
Route = Callable[[Edge, NodeView], Shape]  # (edge, the node it starts from) -> what lies there

HIDDEN: Final = Hidden()


@dataclass(frozen=True, slots=True)
class Subject:
    """What an object is. ``route`` is None where nothing below it is shown."""

    type: str
    phrase: str | Callable[[], str] = ""
    route: Route | None = None
    naming: str | Callable[[], str | None] | None = None  # name of a function, class or module
    where: Callable[[], tuple[str | None, int | None]] | None = None  # file and line of code
    glue: bool = False  # counted with its parent in totals by type
    whole: bool = False  # people think of it as one thing: among the captures it stands for its parts

    @property
    def name(self) -> str | None:
        """The name of a function, class or module as the stream has it."""
        return self.naming() if callable(self.naming) else self.naming

    @property
    def what(self) -> str:
        """The phrase, or the type where there is none."""
        return (self.phrase if isinstance(self.phrase, str) else self.phrase()) or self.type


@dataclass(frozen=True, slots=True)
class Place:
    """Where a node is among the objects."""

    head: int  # object the node is, or belongs to
    route: Route | None  # None: everything below belongs to the head
    above: int | None = None  # for a head: the object above it; None for the root
    part: Part | None = None  # for a head: how it hangs there; for glue: the wrapped object's part
    wrappers: tuple[int, ...] = ()  # for a head: glue around it whose references are references to it


@dataclass(frozen=True, slots=True)
class Failure:
    """An object that could not be pickled; a stand-in with its number is in the stream."""

    type: str  # dotted name of its class
    error: str  # type and text of the exception


@dataclass(frozen=True, slots=True)
class Origin:
    """How code captured an object, or what the object lies in."""

    how: str
    name: str | None
    captured: int  # the object that was captured
    by: int  # the function, class or partial that captured it
    depth: int  # steps below the captured object
    file: str | None
    line: int | None


class Explainer:
    """Words for the nodes of one graph. ``failures`` are those of its stand-ins, by number."""

    def __init__(self, graph: Graph, root_name: str | None = None, failures: Sequence[Failure] = ()) -> None:
        self.graph = graph
        self.reader = Reader(graph)
        self.failures = failures
        self._given_name = root_name
        # What a subject keeps refers to the explainer weakly, and the explainer to it: a report that is dropped gives
        # its graph back at once, not when the cyclic collector comes round.
        self._weak: Explainer = weakref.proxy(self)
        self._subjects: dict[int, Subject] = {}
        self._places: dict[int, Place] = {}
        self._paths: dict[int, str] = {}
        self._steps: dict[int, _Steps] = {}  # of the objects that were last looked into, at most _INDEXED

    @cached_property
    def kinds(self) -> list[tuple[int, str, int]]:
        """The distinct kinds of node, as `Graph.type_keys` gives them."""
        return self.graph.type_keys()

    # --- objects -----------------------------------------------------------------------------------------------------

    def subject(self, index: int) -> Subject:
        """What the node is, as an object of its own."""
        found = self._subjects.get(index)
        if found is None:
            found = self._subjects[index] = _subject(self._weak, index)
        return found

    @cached_property
    def root_name(self) -> str | Shortened:
        """The given name, else that of the function or class at the root, else ``obj``."""
        name = self._given_name or self._own_name(0)
        short = shorten(name) if name else "obj"
        return short if isinstance(short, (str, Shortened)) else "obj"

    def _own_name(self, index: int) -> str | None:
        subject = self.subject(index)
        if subject.type == "function":
            return Call(self, index).setter_state.get("__name__") or subject.name
        return subject.name if subject.type in ("class", "function", "reference", "enum class") else None

    def place(self, index: int) -> Place | None:
        """Where a node is; None if it is nested too deep for a path."""
        chain = []
        while index not in self._places:
            chain.append(index)
            parent = self.reader.view(index).parent
            if parent < 0:
                self._places[index] = Place(index, self.subject(index).route)
                chain.pop()
                break
            if len(chain) > _MAX_CHAIN:
                return None
            index = parent
        place = self._places[index]
        for below in reversed(chain):
            view = self.reader.view(below)
            place = self.enter(place, view.parent, Edge(view.role, view.position, below, False))
            self._places[below] = place
        return place

    def enter(self, place: Place, parent: int, edge: Edge) -> Place:
        """The place of the node an edge leads to, given that of the node it starts from."""
        shape = self.shape(place, parent, edge)
        if isinstance(shape, Part):
            wrappers = () if place.head == parent or place.part is not shape else (*place.wrappers, parent)
            if wrappers:  # the argument tuple of a cell is its only child: references go to the cell itself
                above = self.reader.view(parent).parent
                if above >= 0 and above != place.head:
                    wrappers = (*wrappers, above)
            return Place(edge.target, self.subject(edge.target).route, place.head, shape, wrappers)
        if isinstance(shape, Glue):
            return Place(place.head, shape.route, part=shape.part or place.part)
        return Place(place.head, None)

    def shape(self, place: Place, parent: int, edge: Edge) -> Shape:
        """What lies behind an edge from a node at a place."""
        view = self.reader.view(parent)
        if place.route is None or (edge.is_reference and view.op in GETS):
            return HIDDEN
        return place.route(edge, view)

    def parts(self, head: int, *, min_size: int, limit: int, most: int = 1024) -> Parts:
        """The objects directly below an object.

        Where a node has more than ``limit`` children only those of ``min_size`` or more are looked at, the biggest of
        them if that makes more than ``most``.
        """
        place = self.place(head)
        heads: list[int] = []
        own_size = own_count = 0
        complete = True
        open_nodes = [(head, True)] if place is not None else []
        while open_nodes:
            index, counted = open_nodes.pop()
            here = self._places[index]
            if counted:
                own_size += self.reader.view(index).self_size
                own_count += 1
            edges = self.graph.edges(index, 0, limit + 1, False)
            if len(edges) > limit:
                complete = counted = False  # what is the object's own among so many does not depend on min_size
                edges = self._big_children(index, max(min_size, 1), most)
            for edge in edges:
                below = self._places.get(edge.target)
                if below is None:
                    below = self._places[edge.target] = self.enter(here, index, edge)
                if below.head == edge.target:
                    heads.append(edge.target)
                elif below.route is not None:
                    open_nodes.append((edge.target, counted))
                elif counted:
                    child = self.reader.view(edge.target)
                    own_size += child.subtree_size
                    own_count += child.count
        return Parts(heads, own_size, own_count, complete)

    def _big_children(self, index: int, min_size: int, most: int) -> list[Edge]:
        """Children of at least so many bytes; if they are too many, the biggest ones and some of the others."""
        edges = self.graph.edges(index, min_size, most + 1, False)
        if len(edges) <= most:
            return edges
        while len(bigger := self.graph.edges(index, 4 * min_size, most + 1, False)) > most:
            min_size *= 4
        known = {edge.target for edge in bigger}
        others = (edge for edge in self.graph.edges(index, min_size, 2 * most, False) if edge.target not in known)
        return [*bigger, *itertools.islice(others, most - len(bigger))]

    def below(self, head: int) -> Iterator[tuple[Part, int]]:
        """All objects directly below an object, and what it refers to; not bounded, for look-ups by name."""
        place = self.place(head)
        if place is None:
            return
        seen = {head}
        open_nodes = [(head, place)]
        while open_nodes:
            index, here = open_nodes.pop()
            for edge in self.graph.edges(index):
                shape = self.shape(here, index, edge)
                if isinstance(shape, Part):
                    yield shape, edge.target
                elif isinstance(shape, Glue) and edge.target not in seen:
                    seen.add(edge.target)
                    open_nodes.append((edge.target, Place(head, shape.route, part=shape.part)))

    def find(self, steps: tuple[Step, ...]) -> int | None:
        """The object that steps from the root lead to, through references too.

        The first one, should there be several: a stream may set a key or an attribute twice.
        """
        wanted = [str(step) for step in steps]
        tried: set[tuple[int, int]] = set()
        ways = [iter((0,))]  # one iterator per step: what the steps up to there may lead to
        while ways:
            index = next(ways[-1], None)
            if index is None:
                ways.pop()
            elif len(ways) > len(wanted):
                return index
            elif (index, len(ways)) not in tried:
                tried.add((index, len(ways)))
                ways.append(self._at_step(index, wanted[len(ways) - 1]))
        return None

    def _at_step(self, index: int, wanted: str) -> Iterator[int]:
        """What lies behind a step from an object, or from what it is a reference to."""
        for start in dict.fromkeys((index, self.reader.resolve(index))):
            steps = self._steps.pop(start, None) or _Steps(self.below(start))
            self._steps[start] = steps  # the last one used comes last
            if len(self._steps) > _INDEXED:
                del self._steps[next(iter(self._steps))]
            yield from steps.at(wanted)

    # --- paths -------------------------------------------------------------------------------------------------------

    def path(self, index: int) -> str | None:
        """The path of the object a node is or belongs to; None if it is nested too deep."""
        place = self.place(index)
        if place is None:
            return None
        steps = []
        head = place.head
        while head not in self._paths:
            above = self._places[head]
            if above.above is None or above.part is None:
                self._paths[head] = format_root(self.root_name)
                break
            steps.append((head, above.part.step))
            head = above.above
        path = self._paths[head]
        for below, step in reversed(steps):
            path = self._paths[below] = path + str(step)
        return path

    def origin(self, head: int) -> Origin | None:
        """The innermost capture above an object; None if no code captured it."""
        link: int | None = head
        for depth in itertools.count():
            place = self.place(link) if link is not None else None
            if link is None or place is None or place.part is None or place.above is None:
                return None
            if place.part.how is not None:
                return self._origin(place.part, link, place.above, depth)
            link = place.above
        return None

    def origin_at(self, steps: Sequence[Step]) -> Origin | None:
        """The innermost capture on a path that may lead through references; None if no code captured the object."""
        for depth in range(len(steps)):
            above = self.find(tuple(steps[: len(steps) - depth - 1]))
            if above is None:
                return None
            above = self.reader.resolve(above)
            wanted = str(steps[len(steps) - depth - 1])
            part, target = next(((p, t) for p, t in self.below(above) if str(p.step) == wanted), (None, 0))
            if part is not None and part.how is not None:
                return self._origin(part, self.reader.resolve(target), above, depth)
        return None

    def _origin(self, part: Part, captured: int, by: int, depth: int) -> Origin:
        where = self.subject(by).where
        file, line = where() if where is not None else (None, None)
        if part.how == "class attribute":
            line = None  # that of a method: nothing says where the attribute is
        return Origin(part.how or "", part.name, captured, by, depth, file, line)

    def label(self, head: int) -> str:
        """The last step of an object's path; the root's whole path."""
        place = self.place(head)
        if place is None or place.part is None:
            return format_root(self.root_name)
        return str(place.part.step)

    def holders(self, head: int, limit: int = 10, *, inherited: bool = False) -> tuple[str, ...]:
        """Paths of those who hold a memo reference to an object, except from within itself.

        With ``inherited`` also the paths that lead to it through references to the objects that it lies in.
        """
        path = self.path(head)
        if path is None:
            return ()
        found = dict.fromkeys(self._references(head, limit))
        link = self._places[head].above if inherited else None
        for _ in range(_MAX_LENDERS):
            if link is None or len(found) > limit:
                break
            rest = path[len(self._paths[link]) :]
            found.update(dict.fromkeys(held + rest for held in self._references(link, limit, exact=True)))
            link = self._places[link].above
        found.pop(path, None)
        return tuple(itertools.islice(found, limit))

    def _references(self, head: int, limit: int, *, exact: bool = False) -> Iterator[str]:
        """The paths of the references to an object from outside of it, about so many.

        Unless they have to be exact, a place that has no path itself is shown as the object that it belongs to.
        """
        end = head + self.reader.view(head).count
        for target in (head, *self._places[head].wrappers):
            # One for each reference, in stream order: what refers to an object from inside of it comes first.
            sources = dict.fromkeys(s for s in self.graph.referrers(target, _MAX_REFERENCES) if not head <= s < end)
            for source in itertools.islice(sources, 4 * limit):
                yield from self._references_from(source, target, limit, exact)

    def _references_from(self, source: int, target: int, limit: int, exact: bool) -> Iterator[str]:
        place = self.place(source)
        base = self.path(source)
        if place is None or base is None:
            return
        hidden = place.route is None or self.reader.view(source).op in GETS
        if not hidden:
            steps: list[str] = []
            hidden = True
            for edge in self.graph.edges(source, 1 << 62, 2048):
                if edge.is_reference and edge.target == target:
                    hidden = False
                    shape = self.shape(place, source, edge)
                    part = shape.part if isinstance(shape, Glue) else shape
                    if isinstance(part, Part):
                        steps.append(str(part.step))
                        if len(steps) > limit:
                            break
            yield from (base + step for step in steps)
        if hidden and not exact:
            yield base

    # --- values ------------------------------------------------------------------------------------------------------

    def key_step(self, view: NodeView, edge: Edge) -> Step:
        """``['name']`` for the value of a dict entry."""
        value = self.key_value(self.reader.pair_key(view.index, edge))
        return word("value", edge.position // 2) if value is UNREAD else item(value)

    def key_value(self, key: Any) -> Any:
        """A key as it can stand in a path, or `UNREAD`."""
        text = self.reader.text(key.index) if isinstance(key, At) else None
        if text is not None:
            # Where the graph has not kept all of a long string, its place tells it from others that begin alike.
            return shorten(text.value, salt=text.start.to_bytes(8, "little") if text.cut else b"")
        value = self.reader.value(key)
        if isinstance(value, tuple):
            value = tuple(shorten(part) if isinstance(part, (str, bytes)) else part for part in value)
        return value if is_literal(value) else UNREAD

    def call_name(self, value: Any, nesting: int = 4) -> str | None:
        """The dotted name of a callable or class at a node, by reference or by value."""
        if not isinstance(value, At) or not nesting:
            return None
        index = self.reader.resolve(value.index)
        name = self.reader.global_name(index)
        op = self.reader.view(index).op
        if op == "BINPERSID":  # old files of torch name a module's class by ("module", class, file, source)
            parts = self.reader.contents(index, 1).get(0)
            parts = self.reader.sequence(parts.index, 4) if isinstance(parts, At) else []
            return self.call_name(parts[1], nesting - 1) if len(parts) == 4 else None
        if name is not None or op != "REDUCE":
            return name
        call = Call(self, index)
        args = call.args
        maker = canonical(self.call_name(At(call.callable), nesting - 1)) if call.callable >= 0 else None
        first = self.reader.string(args[0]) if args else None
        if maker == "cloudpickle:_builtin_type" and first is not None:
            return f"types.{first}"
        if maker == "cloudpickle:_make_skeleton_class" and len(args) > 3:
            kwargs = self.reader.pairs(args[3].index) if isinstance(args[3], At) else {}
            return f"{self.reader.string(kwargs.get('__module__')) or '__main__'}.{self.reader.string(args[1])}"
        if maker == "cloudpickle:_make_skeleton_enum" and len(args) > 4:
            return f"{self.reader.string(args[4]) or '__main__'}.{self.reader.string(args[1])}"
        if maker == "builtins.getattr" and len(args) > 1:
            owner = self.call_name(args[0], nesting - 1)
            return f"{owner}.{self.reader.string(args[1])}" if owner else None
        if maker == "builtins.type":
            return "builtins.NoneType"
        if maker == "types.MethodType" and len(args) == 2:  # a class method that goes by value
            owner, method = self.call_name(args[1], nesting - 1), self.call_name(args[0], nesting - 1)
            return f"{owner}.{short_name(method)}" if owner and method else None
        if maker == "cloudpickle:_make_function":
            return f"__main__.{self.subject(index).name}"
        return None

    def is_by_value(self, value: Any) -> bool:
        """Whether a class or callable is written out, not looked up by name."""
        if not isinstance(value, At):
            return False
        view = self.reader.view(self.reader.resolve(value.index))
        return view.op == "REDUCE" and canonical(self.reader.global_name(view.arg) if view.arg >= 0 else None) in (
            "cloudpickle:_make_skeleton_class",
            "cloudpickle:_make_skeleton_enum",
            "cloudpickle:_make_function",
        )


@dataclass(slots=True)
class Parts:
    """Objects directly below an object; what is neither in them nor in ``own_size`` was not looked at."""

    heads: list[int]
    own_size: int  # bytes of the object itself: its nodes and the glue that was looked at
    own_count: int  # nodes of those
    complete: bool  # everything was looked at


class _Steps:
    """What is below one object by its step, read only as far as look-ups have gone."""

    def __init__(self, below: Iterator[tuple[Part, int]]) -> None:
        self.below = below
        self.found: dict[str, list[int]] = {}

    def at(self, wanted: str) -> Iterator[int]:
        count = 0
        while True:
            targets = self.found.get(wanted, ())
            if count < len(targets):
                yield targets[count]
                count += 1
                continue
            part, target = next(self.below, (None, 0))
            if part is None:
                return
            self.found.setdefault(str(part.step), []).append(target)


class Call:
    """One call in the stream (REDUCE, NEWOBJ, NEWOBJ_EX, OBJ, INST) and what it is given."""

    def __init__(self, explainer: Explainer, index: int) -> None:
        self.explainer = explainer
        self.reader = explainer.reader
        self.index = index
        self.view = self.reader.view(index)

    @cached_property
    def operands(self) -> dict[int, Any]:
        """Operands of the opcode by position: callable or class, arguments, keywords."""
        return self.reader.contents(self.index, 32)

    @cached_property
    def callable(self) -> int:
        """Node of the callable or class; -1 if unknown. INST carries the name itself."""
        if self.view.op == "INST":
            return self.index
        return self.reader.resolve(self.view.arg) if self.view.arg >= 0 else -1

    @cached_property
    def name(self) -> str | None:
        """Dotted name of the callable or class."""
        return self.explainer.call_name(At(self.callable)) if self.callable >= 0 else None

    @cached_property
    def args(self) -> list[Any]:
        """The arguments, the first few of them."""
        if self.view.op == "INST":
            return [self.operands[k] for k in sorted(self.operands)]
        if self.view.op == "OBJ":
            return [self.operands[k] for k in sorted(self.operands) if k]
        given = self.operands.get(1)
        if isinstance(given, At):
            return self.reader.sequence(given.index, 32)
        return list(given) if isinstance(given, tuple) else []

    @cached_property
    def state(self) -> Any:
        """What BUILD gives to the object; None if there is no BUILD, or it comes after very many items."""
        found = None
        for edge in self.reader.graph.edges(self.index, 0, 256):
            if edge.role == STATE:
                found = At(self.reader.resolve(edge.target))
        return found

    def argument(self, position: int) -> Any:
        """An argument, `UNREAD` if there is none."""
        return self.args[position] if position < len(self.args) else UNREAD

    def text(self, position: int) -> str | None:
        """An argument that is a str."""
        return self.reader.string(self.argument(position))

    def state_items(self) -> dict[str, Any]:
        """The entries of a state that is a dict."""
        return self.reader.pairs(self.state.index) if isinstance(self.state, At) else {}

    @cached_property
    def setter_state(self) -> dict[str, Any]:
        """Entries of the slot state that cloudpickle's state setter is given, strings read."""
        return {name: self.reader.string(value) for name, value in self.setter_slots.items()}

    @cached_property
    def setter_slots(self) -> dict[str, Any]:
        """The first entries of the slot state that cloudpickle's state setter is given, as they are."""
        return self.setter_entries(1, 24)

    @cached_property
    def setter_attributes(self) -> dict[str, Any]:
        """The first entries of the ``__dict__`` that cloudpickle's state setter is given."""
        return self.setter_entries(0, 24)

    def setter_entries(self, position: int, limit: int) -> dict[str, Any]:
        """The first entries of the ``__dict__`` (0) or slot state (1) that cloudpickle's state setter is given."""
        for edge in self.reader.graph.edges(self.index, 0, 16, False):
            if edge.role == DISCARD:
                args = Call(self.explainer, edge.target).args
                state = self.reader.sequence(args[1].index, 2) if len(args) == 2 and isinstance(args[1], At) else []
                if len(state) == 2:
                    return self.reader.pairs(state[position].index, limit) if isinstance(state[position], At) else {}
        return {}


# --- names -----------------------------------------------------------------------------------------------------------

_INDEXED = 16  # objects whose parts are kept by their steps
_CLOUDPICKLE = re.compile(r"(?:.*\.)?cloudpickle\.cloudpickle(?:_fast)?\.(\w+)")
_JOBLIB = re.compile(r".*\.joblib\.numpy_pickle(?:_compat)?\.(\w+)")  # a copy, such as the one in old scikit-learn
_LIBRARIES: Final = frozenset({"numpy", "pandas", "torch", "pyarrow", "scipy", "ray", "joblib"})


def canonical(name: str | None) -> str | None:
    """The name under which `TABLE` knows a reconstructor.

    Functions of cloudpickle's copies become ``cloudpickle:name``; for libraries that move their internals about
    (``numpy.core`` and ``numpy._core``) only the library and the last name count: ``numpy:_reconstruct``.
    """
    if name is None:
        return None
    if match := _CLOUDPICKLE.fullmatch(name):
        return f"cloudpickle:{match[1]}"
    if match := _JOBLIB.fullmatch(name):
        return f"joblib:{match[1]}"
    library, _, rest = name.partition(".")
    if library in _LIBRARIES:
        return f"{library}:{rest.rpartition('.')[2]}"
    return name


def short_name(name: str | None) -> str:
    """The last part of a dotted name, ``object`` for an unknown one."""
    return (name or "object").rpartition(".")[2] or "object"


def _looks_like_class(name: str | None) -> bool:
    return short_name(name).lstrip("_")[:1].isupper()


def short_file(file: str) -> str:
    """A file name as people call it: relative to the working directory if it lies below."""
    try:
        here = os.getcwd()
    except OSError:
        return file
    return file[len(here) + 1 :] if file.startswith(here + os.sep) and len(file) > len(here) + 1 else file


def _quote(value: str | bytes, length: int = 40) -> str:
    return repr(value) if len(value) <= length else f"{value[:length]!r}…"


# --- routes ----------------------------------------------------------------------------------------------------------


def _members(part: Callable[[int, int], Shape]) -> Route:
    """Through a tuple, list or set: ``part(position, node)``."""

    def route(edge: Edge, _: NodeView) -> Shape:
        return part(edge.position, edge.target) if edge.role in (OPERAND, ITEM) else HIDDEN

    return route


def _entries(x: Explainer, part: Callable[[Any, Step, int], Shape]) -> Route:
    """Through a dict: ``part(key, step, node)`` with the key as a literal or `UNREAD`, and its ``[key]`` step."""

    def route(edge: Edge, view: NodeView) -> Shape:
        if edge.role == OPERAND and edge.position == 1 and view.op == "REDUCE":
            # an OrderedDict or the like: its constructor's arguments
            return Glue(_members(lambda _, target: Glue(route)))
        if edge.role != PAIR and not (edge.role == OPERAND and view.op == "DICT"):
            return HIDDEN
        if edge.position % 2 == 0:
            return _key(x, edge)
        key = x.key_value(x.reader.pair_key(view.index, edge))
        step = word("value", edge.position // 2) if key is UNREAD else item(key)
        return part(key, step, edge.target)

    return route


def _key(x: Explainer, edge: Edge) -> Shape:
    """A key: of the dict's own, unless it is a structure or so big that it has to be named."""
    view = x.reader.view(x.reader.resolve(edge.target))
    plain = (view.count == 1 or view.op in TEXTS or view.op in BYTES) and view.subtree_size < _HEAVY_KEY
    return HIDDEN if plain else Part(word("key", edge.position // 2))


def _attributes(x: Explainer, how: str | None = None) -> Route:
    """Through a ``__dict__``."""
    return _entries(x, lambda key, step, target: _attribute(x, key, step, target, how))


def _attribute(x: Explainer, key: Any, step: Step, target: int, how: str | None = None) -> Shape:
    if not isinstance(key, (str, Shortened)) or (isinstance(key, Shortened) and isinstance(key.start, bytes)):
        return Part(step)
    name = key if isinstance(key, str) else None
    if how is not None and x.is_by_value(At(target)):
        how = None  # a method is not what a class drags in
    return Part(attr(key), how, name if how else None)


def _call(
    *,
    args: Callable[[int, int], Shape] | None = None,
    state: Callable[[int], Shape] | None = None,
    discard: Callable[[int], Shape] | None = None,
    other: Route | None = None,
) -> Route:
    """Through a call: its arguments by position, BUILD's operand, the state setter's call; ``other`` takes the rest."""

    def route(edge: Edge, view: NodeView) -> Shape:
        if edge.role == OPERAND and args is not None:
            if view.op == "INST":
                return args(edge.position, edge.target)
            if view.op == "OBJ":
                return args(edge.position - 1, edge.target) if edge.position else HIDDEN
            if edge.position == 1:
                return Glue(_members(args))
        if edge.role == STATE and state is not None:
            return state(edge.target)
        if edge.role == DISCARD and discard is not None:
            return discard(edge.target)
        return other(edge, view) if other is not None else HIDDEN

    return route


def _setter(state: Callable[[int], Shape]) -> Callable[[int], Shape]:
    """Through the call of a state setter ``(obj, state)``."""
    route = _call(args=lambda position, target: state(target) if position == 1 else HIDDEN)
    return lambda _: Glue(route)


def _two_states(x: Explainer, first: Callable[[], Route], second: Callable[[], Route]) -> Callable[[int], Shape]:
    """Through a state that is a tuple of two dicts, or only the first one."""

    def shape(target: int) -> Shape:
        op = x.reader.view(x.reader.resolve(target)).op
        if op in DICTS:
            return Glue(first())
        if op in TUPLES:
            return Glue(_members(lambda position, _: Glue(second() if position else first())))
        return Part(word("state"))

    return shape


def _instance_state(x: Explainer, fields: Callable[[], list[str]] = list) -> Callable[[int], Shape]:
    """Through the state of an instance: a dict, a tuple of a dict and slots, a list of fields, or anything else.

    ``fields`` are the names of a dataclass with slots that is frozen: its state is a list (`dataclasses`, in
    ``_dataclass_getstate``).
    """

    def shape(target: int) -> Shape:
        view = x.reader.view(x.reader.resolve(target))
        if view.op in DICTS:
            module = cache(lambda: x.reader.pairs(view.index).keys() >= _REGISTRIES)
            return Glue(_entries(x, lambda key, step, node: _instance_attribute(x, key, step, node, module)))
        if view.op in TUPLES:
            parts = x.reader.contents(view.index, 3)
            ops = [x.reader.view(value.index).op if isinstance(value, At) else value for value in parts.values()]
            if view.arg == 2 and all(op is None or op in DICTS for op in ops) and len(ops) == 2:
                return Glue(_members(lambda _, node: Glue(_attributes(x))))
        if view.op in LISTS:
            names = fields()
            if names and len(names) == view.arg:
                return Glue(_members(lambda position, _: Part(attr(names[position]))))
        return Part(word("state"))

    return shape


_REGISTRIES: Final = frozenset({"_modules", "_parameters", "_buffers"})
"""Dicts in which a torch module keeps what it shows as its attributes."""


def _instance_attribute(x: Explainer, key: Any, step: Step, node: int, module: Callable[[], bool]) -> Shape:
    """An attribute; the submodules, parameters and buffers of a torch module are its attributes too."""
    if key in _REGISTRIES and module() and x.subject(x.reader.resolve(node)).type in ("dict", "OrderedDict"):
        return Glue(_entries(x, lambda name, inner, _: _submodule(name, inner)))
    return _attribute(x, key, step, node)


def _submodule(name: Any, step: Step) -> Shape:
    if not isinstance(name, str):
        return Part(step)
    return Part(item(int(name)) if name.isdecimal() and len(name) < 9 else attr(name))


def _cell(x: Explainer, part: Part, target: int) -> Shape:
    """A closure's cell: what it holds takes its place."""
    index = x.reader.resolve(target)
    view = x.reader.view(index)
    maker = canonical(x.reader.global_name(view.arg)) if view.op == "REDUCE" and view.arg >= 0 else None
    if maker not in ("cloudpickle:_make_cell", "cloudpickle:_make_empty_cell"):
        return part
    return Glue(_cell_route(part), part)


def _cell_route(part: Part) -> Route:
    return _call(args=lambda position, _: part if position == 0 else HIDDEN, discard=_setter(lambda _: part))


# --- subjects that opcodes make --------------------------------------------------------------------------------------


def _subject(x: Explainer, index: int) -> Subject:
    view = x.reader.view(index)
    if view.op in CALLS:
        return _call_subject(Call(x, index))
    if view.op in TEXTS or view.op in OLD_TEXTS:
        return Subject("str", lambda: _text_phrase(x, index, "str"))
    if view.op in BYTES:
        kind = "bytearray" if view.op == "BYTEARRAY8" else "bytes"
        return Subject(kind, lambda: _text_phrase(x, index, kind))
    if view.op in LISTS:
        return Subject("list", _counted("list", view.arg), _members(lambda k, _: Part(item(k))))
    if view.op in TUPLES:
        return Subject("tuple", _counted("tuple", max(view.arg, 0)), _members(lambda k, _: Part(item(k))))
    if view.op in DICTS:
        return Subject("dict", _counted("dict", view.arg), _entries(x, lambda _, step, __: Part(step)))
    if view.op in SETS:
        kind = "set" if view.op == "EMPTY_SET" else "frozenset"
        return Subject(kind, _counted(kind, view.arg), _members(lambda k, _: Part(word("member", k))))
    if view.op in GLOBALS or view.op in EXTENSIONS:
        name = x.reader.global_name(index)
        return Subject("reference", f"{name or 'a global'} (by reference)", naming=short_name(name))
    if view.op in PERSISTENT:
        return _persistent(x, index)
    if view.op in GETS:
        return _alias(x, index)
    if view.op in ATOMS:
        return Subject(ATOMS[view.op])
    if view.op == "FILE":
        return Subject("file", _counted("file", view.arg, "pickle" if view.arg == 1 else "pickles"), _file_route)
    if view.op == "RAW":
        return Subject("raw bytes", "bytes that are not pickle opcodes")
    if view.op in ("NEXT_BUFFER", "READONLY_BUFFER"):
        return Subject("buffer", f"out-of-band buffer {view.arg}" if view.arg >= 0 else "out-of-band buffer")
    return Subject(view.op.lower().replace("_", " "))


def _alias(x: Explainer, index: int) -> Subject:
    """A memo reference that holds more than its own bytes.

    BUILD and the like may stick to a reference. And an object that contains itself is written, thrown away with POP and
    fetched from the memo, because it has been built meanwhile, deep inside what was thrown away.
    """
    target = x.reader.resolve(index)
    if target == index:
        return Subject("reference", "a memo reference to itself")
    within = target > index
    meaning = x.subject(target)

    def route(edge: Edge, view: NodeView) -> Shape:
        if edge.role == DISCARD:
            child = x.reader.view(edge.target)
            args = Call(x, edge.target).args if child.op == "REDUCE" else []
            if not args or not isinstance(args[0], At) or args[0].index not in (index, target):
                return Part(word("discarded", edge.position))
        return meaning.route(edge, view) if meaning.route is not None else HIDDEN

    if within:
        return Subject(meaning.type, lambda: meaning.what, route, meaning.naming, meaning.where)
    return Subject("reference", lambda: f"the same as {x.path(target)}", route)


def _file_route(edge: Edge, _: NodeView) -> Shape:
    return Part(word("pickle" if edge.role == PICKLE else "raw" if edge.role == RAW else "part", edge.position))


def _counted(kind: str, count: int, noun: str = "") -> str:
    return f"{kind} of {count:,} {noun}".rstrip() if count >= 0 else kind


def _text_phrase(x: Explainer, index: int, kind: str) -> str:
    text = x.reader.text(index)
    if text is None:
        return kind
    prefix = "" if kind in ("str", "bytes") else f"{kind} "
    if kind == "str":
        return f"str {_quote(text.value)}"
    return f"{prefix}{_quote(text.value, 16)}" if text.size <= 16 else f"{kind} of {text.size:,}"


def _persistent(x: Explainer, index: int) -> Subject:
    operands = x.reader.contents(index, 2)
    value = x.reader.value(operands.get(0, UNREAD))
    if isinstance(value, tuple) and len(value) >= 5 and value[0] == "storage":  # torch.save's format
        kind = short_name(x.call_name(value[1]))
        return Subject("tensor storage", f"{kind} {value[2]!r} of {value[4]!r} elements, kept outside the pickle")
    return Subject("persistent id", "an object kept outside the pickle")


# --- subjects that calls make ----------------------------------------------------------------------------------------

Maker = Callable[[Call], Subject]

_GIVEN_THE_CLASS: Final = frozenset({"copyreg._reconstructor", "copyreg.__newobj__", "copyreg.__newobj_ex__"})
"""Reconstructors whose first argument is the class: it is what counts."""


def _call_subject(call: Call) -> Subject:
    if call.view.op == "REDUCE" and call.name in _GIVEN_THE_CLASS:
        named = call.explainer.call_name(call.argument(0))
        make = TABLE.get(canonical(named) or "")
        return make(call) if make in _INSTANCE_MAKERS else _instance(call, named, skip=1)
    make = TABLE.get(canonical(call.name) or "")
    if make is not None:
        return make(call)
    if call.view.op != "REDUCE" or _looks_like_class(call.name) or _makes_class(call):
        return _instance(call, call.name)
    return _reduced(call)


def _makes_class(call: Call) -> bool:
    index = call.callable
    return index >= 0 and call.explainer.is_by_value(At(index)) and call.explainer.subject(index).type != "function"


def _instance(call: Call, name: str | None, skip: int = 0, kind: str | None = None) -> Subject:
    x = call.explainer
    short = short_name(name)
    shown = short if name is None or name.startswith(("__main__.", "builtins.")) else name

    def read_fields() -> list[str | None]:
        """The names of a namedtuple's members, if its class goes by value."""
        made = x.reader.view(call.callable).op if not skip and call.callable >= 0 else ""
        names = Call(x, call.callable).setter_attributes.get("_fields") if made == "REDUCE" else None
        return [x.reader.string(each) for each in x.reader.sequence(names.index)] if isinstance(names, At) else []

    fields = cache(read_fields)

    def read_state_fields() -> list[str]:
        """The names of a dataclass's fields, if its class goes by value."""
        made = call.argument(0) if skip else At(call.callable)
        if not isinstance(made, At) or made.index < 0 or not x.is_by_value(made):
            return []
        known = Call(x, x.reader.resolve(made.index)).setter_entries(0, 64).get("__dataclass_fields__")
        return list(x.reader.pairs(known.index)) if isinstance(known, At) else []

    def args(position: int, target: int) -> Shape:
        if skip and position == 0:
            return _class_part(x, target)
        name = fields()[position] if position < len(fields()) else None
        return Part(attr(name) if name is not None else word("arg", position - skip))

    return Subject(kind or short, f"{shown} instance", _object_route(x, args, cache(read_state_fields)))


def _reduced(call: Call) -> Subject:
    """What an unknown reducer makes."""
    x = call.explainer
    name = call.name
    short = short_name(name) if name else "object"
    route = _object_route(x, lambda k, _: Part(word("arg", k)))
    return Subject(short, f"made by {name or 'an unnamed callable'}", route)


def _class_part(x: Explainer, target: int) -> Shape:
    return Part(attr("__class__")) if x.is_by_value(At(target)) else HIDDEN


def _object_route(
    x: Explainer, args: Callable[[int, int], Shape], fields: Callable[[], list[str]] = list
) -> Route:
    """Through an instance: its class if by value, arguments, items, pairs, state."""

    def other(edge: Edge, view: NodeView) -> Shape:
        if edge.role == ITEM:
            return Part(item(edge.position))
        if edge.role == PAIR:
            return _key(x, edge) if edge.position % 2 == 0 else Part(x.key_step(view, edge))
        if edge.role == OPERAND and edge.position == 0 and view.op != "INST":
            if view.op != "REDUCE":
                return _class_part(x, edge.target)
            made = x.reader.resolve(edge.target)
            if x.is_by_value(At(made)) and x.subject(made).type != "function":
                return Part(attr("__class__"))
            by_value = x.reader.view(edge.target).op in CALLS
            plain = x.call_name(At(edge.target)) is not None and not x.is_by_value(At(edge.target))
            return Part(word("callable")) if by_value and not plain else HIDDEN
        if edge.role == OPERAND and edge.position == 2:  # NEWOBJ_EX's keywords
            return Glue(_entries(x, lambda key, step, _: Part(_keyword(key, step))))
        return HIDDEN

    state = _instance_state(x, fields)
    return _call(args=args, state=state, discard=_setter(state), other=other)


def _keyword(key: Any, step: Step) -> Step:
    return word("keyword", key) if isinstance(key, (str, Shortened)) else step


def _leaf(kind: str, phrase: Callable[[Call], str] | str | None = None) -> Maker:
    """A row of the table for something with nothing to show below it."""

    def make(call: Call) -> Subject:
        return Subject(kind, phrase if isinstance(phrase, str) else (lambda: phrase(call)) if phrase else kind)

    return make


def _made(kind: str, *names: str, how: str | None = None, phrase: str | None = None) -> Maker:
    """A row for a call whose arguments are known as attributes; further ones are ``<arg n>``."""

    def make(call: Call) -> Subject:
        def args(position: int, _: int) -> Shape:
            if position >= len(names):
                return Part(word("arg", position))
            name = names[position]
            return Part(word("self"), "self", "self") if name == "self" else Part(attr(name), how)

        return Subject(kind, phrase or kind, _object_route(call.explainer, args))

    return make


def _unpicklable(call: Call) -> Subject:
    """A stand-in (see `fastcap.findings`): called what it stands for."""
    number, failures = call.argument(0), call.explainer.failures
    known = isinstance(number, int) and 0 <= number < len(failures)
    kind = failures[number].type if known else "unpicklable"
    return Subject(kind, f"{short_name(kind)}, cannot be pickled" if known else "an object that cannot be pickled")


def _glue(kind: str) -> Maker:
    """A row for calls that are part of something else wherever they stand."""

    def make(call: Call) -> Subject:
        return Subject(kind, kind, _object_route(call.explainer, lambda k, _: Part(word("arg", k))), glue=True)

    return make


def _simple(kind: str) -> Maker:
    """A row for a value whose arguments say all: ``Decimal('1.5')``."""

    def phrase(call: Call) -> str:
        values = [call.reader.value(arg) for arg in call.args]
        plain = [_quote(v) if isinstance(v, str) else repr(v) for v in values if isinstance(v, (str, int, float))]
        return f"{kind}({', '.join(plain)})" if plain and len(plain) == len(values) <= 8 else kind

    return _leaf(kind, phrase)


def _container(kind: str, contents: int | None = None) -> Maker:
    """A row for a collection; ``contents`` is the argument that holds its items, if an argument does."""

    def make(call: Call) -> Subject:
        x = call.explainer
        inner = call.argument(contents) if contents is not None else UNREAD
        count = x.reader.view(inner.index).arg if isinstance(inner, At) else -1
        if count < 0:
            count = -1

        def args(position: int, target: int) -> Shape:
            if position != contents:
                return Part(word("arg", position))
            op = x.reader.view(x.reader.resolve(target)).op
            if op in DICTS:
                return Glue(_entries(x, lambda _, step, __: Part(step)))
            if op in LISTS or op in TUPLES:
                return Glue(_members(lambda k, _: Part(item(k) if "set" not in kind else word("member", k))))
            return Part(word("arg", position))

        return Subject(kind, _counted(kind, count), _object_route(x, args))

    return make


# cloudpickle: functions

# Length of the argument tuple of types.CodeType -> positions of (argcount, varnames, filename, name, qualname,
# firstlineno, freevars). cloudpickle writes the layout of the Python that pickles.
_CODE_LAYOUTS: Final = {
    15: (0, 8, 9, 10, None, 11, 13),  # 3.7: no positional-only arguments
    16: (0, 9, 10, 11, None, 12, 14),  # 3.8 to 3.10
    18: (0, 9, 10, 11, 12, 13, 16),  # 3.11 on: qualified name, exception table
}


@dataclass(frozen=True, slots=True)
class _Code:
    """What a code object's arguments say."""

    name: str | None = None
    qualified: str | None = None  # where the code was compiled; None before Python 3.11
    file: str | None = None
    line: int | None = None
    argument_count: int = 0
    variables: tuple[Any, ...] = ()
    free: tuple[Any, ...] = field(default=())


def _read_code(x: Explainer, value: Any) -> _Code:
    if not isinstance(value, At):
        return _Code()
    call = Call(x, x.reader.resolve(value.index))
    if call.view.op != "REDUCE":
        return _Code()
    layout = _CODE_LAYOUTS.get(len(call.args))
    if layout is None:
        return _Code()
    argument_count, variables, file, name, qualified, line, free = layout
    count = call.args[argument_count]
    number = call.args[line]
    return _Code(
        call.text(name),
        call.text(qualified) if qualified is not None else None,
        call.text(file),
        number if isinstance(number, int) else None,
        count if isinstance(count, int) else 0,
        _names(x, call.args[variables]),
        _names(x, call.args[free]),
    )


def _names(x: Explainer, value: Any) -> tuple[Any, ...]:
    if value == ():
        return ()
    return tuple(x.key_value(part) for part in x.reader.sequence(value.index, 256)) if isinstance(value, At) else ()


def _where_function(call: Call, code: _Code) -> tuple[str | None, int | None]:
    """File and line of a function; (None, None) for one that was not compiled from a file.

    cloudpickle 3.1.3 writes ``<dynamic-code>`` for each file name. The globals still have that of their module, which
    holds for all but what a library has generated in the module's name.
    """
    file = code.file
    if file == "<dynamic-code>":
        base = call.argument(1)
        entries = call.reader.pairs(base.index, 8) if isinstance(base, At) else {}
        file = None if _is_generated(call, code) else call.reader.string(entries.get("__file__"))
    if not file or file.startswith("<"):
        return None, None
    return short_file(file), code.line


def _is_generated(call: Call, code: _Code) -> bool:
    """Whether a function's code comes from a string, as the methods do that dataclasses and attrs make.

    Such a function is given its qualified name by hand: its code was compiled under another one. So is a wrapper
    (`functools.wraps`), which says what it wraps.
    """
    qualified: str | None = call.setter_state.get("__qualname__")
    if qualified is None or code.name is None:
        return False
    if "__wrapped__" in call.setter_attributes:
        return False
    if code.qualified is not None:
        return code.qualified != qualified
    # Before 3.11 code has its last name only; dataclasses compile each method in the second line of a text.
    if code.name.startswith("__") and code.line is not None and code.line <= 2:
        return True
    return qualified.rpartition(".")[2] != code.name


def _function(call: Call) -> Subject:
    x = call.explainer
    code = cache(lambda: _read_code(x, call.argument(0)))

    def named(kind: str, names: tuple[Any, ...], position: int, how: str) -> Part:
        name: Value = names[position] if 0 <= position < len(names) and names[position] is not UNREAD else position
        return Part(word(kind, name), how, name if isinstance(name, str) else None)

    def closure(position: int, target: int) -> Shape:
        return _cell(x, named("closure", code().free, position, "closure"), target)

    def defaults(target: int) -> Shape:
        count = max(x.reader.view(x.reader.resolve(target)).arg, 0)
        first = code().argument_count - count
        return Glue(_members(lambda k, _: named("default", code().variables, first + k, "default")))

    def captured(kind: str) -> Callable[[int], Shape]:
        def part(key: Any, step: Step, _: int) -> Shape:
            named_step = word(kind, key) if isinstance(key, (str, Shortened)) else step
            return Part(named_step, kind, key if isinstance(key, str) else None)

        return lambda _: Glue(_entries(x, part))

    def args(position: int, target: int) -> Shape:
        if position == 0:
            return Part(attr("__code__"))
        if position == 1:
            return Glue(_entries(x, lambda key, _, node: _base_global(x, key, node)))
        if position == 3:
            return defaults(target)
        if position == 4:
            return Glue(_members(closure))
        return HIDDEN

    def slot(key: Any, step: Step, target: int) -> Shape:
        if key == "__globals__":
            return captured("global")(target)
        if key == "__closure__":
            return Glue(_members(closure))
        if key == "__defaults__":
            return defaults(target)
        if key == "__kwdefaults__":
            return captured("default")(target)
        if key in ("__name__", "__qualname__", "__module__"):
            return HIDDEN
        return _attribute(x, key, step, target)

    state = _two_states(x, lambda: _attributes(x), lambda: _entries(x, slot))

    def where() -> tuple[str | None, int | None]:
        return _where_function(call, code())

    def phrase() -> str:
        file, line = where()
        return f"function {file}:{line}" if file and line is not None else f"function {code().name or ''}".strip()

    route = _call(args=args, state=state, discard=_setter(state))
    return Subject("function", phrase, route, lambda: code().name, where)


def _base_global(x: Explainer, key: Any, node: int) -> Shape:
    """``__name__`` and the like are in each function's globals; old versions of cloudpickle put all globals there."""
    if key in ("__package__", "__name__", "__path__", "__file__"):
        return HIDDEN
    return Part(word("global", key if isinstance(key, (str, Shortened)) else node), "global", str(key))


def _code(call: Call) -> Subject:
    code = _read_code(call.explainer, At(call.index))
    return Subject("code", f"code of {code.name}" if code.name else "code")


def _plain_cell(call: Call) -> Subject:
    return Subject("cell", "cell of a closure", _cell_route(Part(attr("cell_contents"))), glue=True)


# cloudpickle: classes


def _class(call: Call) -> Subject:
    x = call.explainer
    name = x.call_name(At(call.index))

    def args(position: int, target: int) -> Shape:
        if position == 0:
            return Part(word("metaclass")) if x.is_by_value(At(target)) else HIDDEN
        if position == 2:
            return Glue(_members(lambda k, node: Part(word("base", k)) if x.is_by_value(At(node)) else HIDDEN))
        if position == 3:
            return Glue(_attributes(x))
        return HIDDEN

    return _class_subject(call, "class", name, args)


def _enum_class(call: Call) -> Subject:
    x = call.explainer

    def args(position: int, target: int) -> Shape:
        if position == 0:
            return Glue(_members(lambda k, node: Part(word("base", k)) if x.is_by_value(At(node)) else HIDDEN))
        if position == 3:
            return Glue(_attributes(x, "class attribute"))
        return HIDDEN

    return _class_subject(call, "enum class", x.call_name(At(call.index)), args)


def _class_subject(call: Call, kind: str, name: str | None, args: Callable[[int, int], Shape]) -> Subject:
    x = call.explainer
    state = _two_states(x, lambda: _attributes(x, "class attribute"), lambda: _attributes(x, "class attribute"))
    shown = name.removeprefix("__main__.") if name else "without a name"

    def where() -> tuple[str | None, int | None]:
        return _where_class(call)

    route = _call(args=args, state=state, discard=_setter(state))
    return Subject(kind, f"{kind} {shown}", route, short_name(name), where)


def _where_class(call: Call) -> tuple[str | None, int | None]:
    """Where the first of a class's own methods is; (None, None) if it has none.

    Not where the class begins: before Python 3.13 a class does not know.
    """
    x = call.explainer
    module, _, name = (x.call_name(At(call.index)) or "").rpartition(".")
    attributes = call.setter_attributes
    makers = not attributes.keys().isdisjoint(("__dataclass_fields__", "__attrs_attrs__"))
    places = []
    for head in x.parts(call.index, min_size=1 << 62, limit=64).heads:
        if x.subject(head).type in ("property", "staticmethod", "classmethod"):
            inner = Call(x, head).argument(0)
            head = x.reader.resolve(inner.index) if isinstance(inner, At) else head
        subject = x.subject(head)
        if subject.type != "function" or subject.where is None:
            continue
        function = Call(x, head)
        code = _read_code(x, function.argument(0))
        qualified = code.qualified or function.setter_state.get("__qualname__") or ""
        if qualified.split(".")[-2:] != [name, code.name]:
            continue  # a method of another class, or a wrapper around one
        if code.qualified is None:  # before 3.11 it does not show who wrote it
            base = function.argument(1)
            entries = x.reader.pairs(base.index, 8) if isinstance(base, At) else {}
            if x.reader.string(entries.get("__name__")) != module or (makers and (code.name or "").startswith("__")):
                continue
        file, line = subject.where()
        if file is not None and line is not None:
            places.append((line, file))
    line, file = min(places, default=(None, None))
    return file, line


# cloudpickle and the standard library: the rest


def _module(call: Call) -> Subject:
    x = call.explainer
    name = call.text(0)
    if len(call.args) < 2:
        return Subject("module", f"module {name} (by reference)", naming=name)
    route = _call(
        args=lambda position, _: Glue(_attributes(x, "module attribute")) if position == 1 else HIDDEN,
        state=lambda _: Glue(_attributes(x, "module attribute")),
    )
    return Subject("module", f"module {name} (by value)", route, naming=name)


def _partial(call: Call) -> Subject:
    x = call.explainer

    def keyword(key: Any, step: Step, _: int) -> Shape:
        return Part(_keyword(key, step), "argument", key if isinstance(key, str) else None)

    def state(position: int, _: int) -> Shape:
        if position == 0:
            return Part(attr("func"))
        if position == 1:
            return Glue(_members(lambda k, _: Part(word("arg", k), "argument", str(k))))
        return Glue(_entries(x, keyword)) if position == 2 else Glue(_attributes(x))

    name = x.call_name(call.argument(0))
    route = _call(
        args=lambda position, _: Part(attr("func")) if position == 0 else HIDDEN,
        state=lambda _: Glue(_members(state)),
    )
    return Subject("partial", f"partial of {short_name(name)}" if name else "partial", route)


def _getattr(call: Call) -> Subject:
    """``getattr(x, name)``: a bound method, or a name nested in a class that is pickled by reference."""
    x = call.explainer
    name = call.text(1)
    owner = x.call_name(call.argument(0))
    if owner is not None and not x.is_by_value(call.argument(0)):
        return Subject("reference", f"{owner}.{name} (by reference)", naming=name)
    return _bound(call, name, 0)


def _method(call: Call) -> Subject:
    return _bound(call, short_name(call.explainer.call_name(call.argument(0))), 1)


def _bound(call: Call, name: str | None, place_of_self: int) -> Subject:
    def args(position: int, _: int) -> Shape:
        if position == place_of_self:
            return Part(word("self"), "self", "self")
        return Part(attr("__func__")) if place_of_self else HIDDEN

    return Subject("bound method", f"bound method {name}" if name else "bound method", _call(args=args), naming=name)


def _string_io(call: Call) -> Subject:
    content = call.reader.sequence(call.state.index, 4) if isinstance(call.state, At) else []
    text = call.reader.text(content[0].index) if content and isinstance(content[0], At) else None
    kind = short_name(call.name)
    return Subject(kind, f"{kind} of {text.size:,} bytes" if text is not None else kind)


def _uuid(call: Call) -> str:
    number = call.state_items().get("int")
    if not isinstance(number, int):
        return "UUID"
    digits = f"{number & ((1 << 128) - 1):032x}"
    return f"UUID {'-'.join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))}"


def _path_phrase(call: Call) -> str:
    parts = [call.reader.string(arg) or "…" for arg in call.args]
    joined = "/".join(parts).replace("//", "/")
    return f"{short_name(call.name)} {_quote(joined)}"


def _datetime_phrase(call: Call) -> str:
    """The date in the ten bytes that `datetime` pickles (see `datetime.datetime.__reduce__`)."""
    kind = short_name(call.name)
    text = call.reader.text(call.args[0].index) if call.args and isinstance(call.args[0], At) else None
    if text is None:
        return kind
    data = text.value.encode("latin-1", "replace") if isinstance(text.value, str) else text.value
    if kind == "datetime" and len(data) == 10:
        day = f"{data[0] * 256 + data[1]:04}-{data[2] & 0x7F:02}-{data[3]:02}"
        return f"datetime {day} {data[4]:02}:{data[5]:02}:{data[6]:02}"
    if kind == "date" and len(data) == 4:
        return f"date {data[0] * 256 + data[1]:04}-{data[2]:02}-{data[3]:02}"
    return kind


def _encoded(call: Call) -> Subject:
    """``_codecs.encode(text, "latin1")``: bytes in protocols 0 to 2."""
    text = call.reader.text(call.args[0].index) if call.args and isinstance(call.args[0], At) else None
    return Subject("bytes", f"bytes of about {text.size:,}" if text is not None else "bytes")


# numpy

_DTYPE_KINDS: Final = {"f": "float", "i": "int", "u": "uint", "c": "complex"}


def _dtype_name(x: Explainer, value: Any) -> str:
    if not isinstance(value, At):
        return ""
    index = x.reader.resolve(value.index)
    if x.reader.view(index).op not in CALLS:
        return short_name(x.call_name(value)) if x.call_name(value) else ""
    call = Call(x, index)
    code = call.text(0)
    if code is None or canonical(call.name) != "numpy:dtype":
        return short_name(call.name)
    state = x.reader.sequence(call.state.index, 9) if isinstance(call.state, At) else []
    kind, width = code[:1], code[1:]
    if kind in _DTYPE_KINDS and width.isdecimal():
        order = x.reader.string(state[1]) if len(state) > 1 else None
        return f"{'>' if order == '>' else ''}{_DTYPE_KINDS[kind]}{int(width[:4]) * 8}"
    if kind in "mM" and kind:
        unit = x.reader.value(state[8]) if len(state) > 8 else None
        name = "datetime64" if kind == "M" else "timedelta64"
        if isinstance(unit, tuple) and len(unit) == 2 and isinstance(unit[1], tuple) and unit[1]:
            return f"{name}[{_byte_text(x, unit[1][0])}]"
        return name
    if kind == "V" and len(state) > 3 and isinstance(state[3], At):
        names = [x.reader.string(part) or "?" for part in x.reader.sequence(state[3].index, 8)]
        return f"({', '.join(names)})"
    return {"b": "bool", "O": "object"}.get(kind, code)


def _byte_text(x: Explainer, value: Any) -> str:
    """A short byte string as text; in protocols up to 2 it is written as ``_codecs.encode(text, "latin1")``."""
    if isinstance(value, At) and x.reader.view(x.reader.resolve(value.index)).op in CALLS:
        return Call(x, x.reader.resolve(value.index)).text(0) or "?"
    return value.decode("ascii", "replace") if isinstance(value, bytes) else "?"


def _is_object_dtype(x: Explainer, value: Any) -> bool:
    return _dtype_name(x, value) == "object"


def _array_state(call: Call) -> list[Any]:
    return call.reader.sequence(call.state.index, 6) if isinstance(call.state, At) else []


def _array_shape(call: Call) -> Any:
    """The shape of an array, as a tuple, or `UNREAD`."""
    reader = call.reader
    if canonical(call.name) == "numpy:_frombuffer":
        return reader.value(call.argument(2))
    state = _array_state(call)
    start = 1 if len(state) >= 5 else 0
    return reader.value(state[start]) if len(state) > start else UNREAD


def _array(call: Call) -> Subject:
    """``_reconstruct(type, (0,), b"b")``, with BUILD of (version, shape, dtype, is_fortran, data)."""
    x = call.explainer
    kind = short_name(x.call_name(call.argument(0)))
    state = _array_state(call)
    dtype = state[2] if len(state) > 3 else UNREAD

    def phrase() -> str:
        shape = _array_shape(call)
        return " ".join(filter(None, (kind, _dtype_name(x, dtype), _shape(shape))))

    if not _is_object_dtype(x, dtype):
        return Subject(kind, phrase)
    shape = _array_shape(call)

    def members(position: int, _: int) -> Shape:
        return Part(item(_unravel(position, shape)))

    def inside(position: int, _: int) -> Shape:
        return Glue(_members(members)) if position == 4 else HIDDEN

    return Subject(kind, phrase, _call(state=lambda _: Glue(_members(inside))))


def _unravel(position: int, shape: Any) -> Value:
    if not isinstance(shape, tuple) or len(shape) < 2 or not all(isinstance(n, int) and n > 0 for n in shape):
        return position
    places = []
    for length in reversed(shape):
        position, place = divmod(position, length)
        places.append(place)
    return tuple(reversed(places))


def _shape(shape: Any) -> str:
    return repr(shape) if isinstance(shape, tuple) and all(isinstance(n, int) for n in shape) else ""


def _from_buffer(call: Call) -> Subject:
    """``_frombuffer(buffer, dtype, shape, order)``, protocol 5, in-band or out-of-band."""
    x = call.explainer
    return Subject(
        "ndarray",
        lambda: " ".join(filter(None, ("ndarray", _dtype_name(x, call.argument(1)), _shape(_array_shape(call))))),
    )


def _scalar(call: Call) -> Subject:
    name = _dtype_name(call.explainer, call.argument(0)) or "numpy scalar"
    return Subject(name, f"numpy scalar {name}")


def _masked_array(call: Call) -> Subject:
    def phrase() -> str:
        state = _array_state(call)
        return f"MaskedArray {_shape(call.reader.value(state[1])) if len(state) > 1 else ''}".rstrip()

    return Subject("MaskedArray", phrase)


def _wrapped_array(call: Call) -> Subject:
    """``NumpyArrayWrapper``: what ``joblib.dump`` writes in place of an array, whose bytes follow."""
    x = call.explainer
    state = call.state_items()
    kind = short_name(x.call_name(state.get("subclass", UNREAD)))
    if kind in ("object", "memmap"):
        kind = "ndarray"

    def phrase() -> str:
        shape = _shape(call.reader.value(state.get("shape", UNREAD)))
        return " ".join(filter(None, (kind, _dtype_name(x, state.get("dtype", UNREAD)), shape)))

    return Subject(kind, phrase)


def _array_elsewhere(call: Call) -> Subject:
    """``NDArrayWrapper``: an array in a file of its own, as joblib did before 0.10."""
    name = call.reader.string(call.state_items().get("filename"))
    return Subject("ndarray", f"ndarray in the file {_quote(name)}" if name else "ndarray in a file of its own")


# pandas


def _length_of(x: Explainer, value: Any, nesting: int = 4) -> int | None:
    """Elements of an index or array of pandas, as far as the stream says."""
    if not isinstance(value, At) or not nesting:
        return None
    index = x.reader.resolve(value.index)
    if x.reader.view(index).op not in CALLS:
        return None
    call = Call(x, index)
    name = canonical(call.name)
    if name in ("numpy:_reconstruct", "numpy:_frombuffer"):
        shape = _array_shape(call)
        return shape[-1] if isinstance(shape, tuple) and shape and isinstance(shape[-1], int) else None
    if name == "pandas:__pyx_unpickle_NDArrayBacked":  # state: (dtype, array) or (array, dtype)
        parts = x.reader.sequence(call.state.index, 3) if isinstance(call.state, At) else []
        return next((n for n in (_length_of(x, part, nesting - 1) for part in parts) if n is not None), None)
    if name in ("pandas:_new_Index", "pandas:_new_DatetimeIndex", "pandas:_new_PeriodIndex"):
        entries = x.reader.pairs(call.args[1].index) if len(call.args) > 1 and isinstance(call.args[1], At) else {}
        start, stop, step = entries.get("start"), entries.get("stop"), entries.get("step")
        if isinstance(start, int) and isinstance(stop, int) and isinstance(step, int) and step:
            return max(0, -((start - stop) // step))
        return _length_of(x, entries.get("data"), nesting - 1)
    if name == "pyarrow:_restore_array":
        data = _arrow_data(call)
        return data[1] if len(data) > 1 and isinstance(data[1], int) else None
    if name == "pyarrow:chunked_array":
        chunks = x.reader.sequence(call.args[0].index, 32) if call.args and isinstance(call.args[0], At) else []
        lengths = [_length_of(x, chunk, nesting - 1) for chunk in chunks]
        return None if None in lengths or not lengths else sum(n for n in lengths if n is not None)
    entries = call.state_items()
    for key in ("_pa_array", "_ndarray", "_codes", "_data"):
        if key in entries:
            return _length_of(x, entries[key], nesting - 1)
    return None


def _labels_of(x: Explainer, value: Any, nesting: int = 4, limit: int = 6) -> list[str]:
    """The first few labels of an index of strings."""
    if not isinstance(value, At) or not nesting:
        return []
    index = x.reader.resolve(value.index)
    if x.reader.view(index).op not in CALLS:
        return []
    call = Call(x, index)
    name = canonical(call.name)
    if name == "numpy:_reconstruct":
        state = _array_state(call)
        values = x.reader.sequence(state[4].index, limit) if len(state) > 4 and isinstance(state[4], At) else []
        return [text for text in map(x.reader.string, values) if text is not None]
    if name == "pandas:_new_Index":
        entries = x.reader.pairs(call.args[1].index) if len(call.args) > 1 and isinstance(call.args[1], At) else {}
        return _labels_of(x, entries.get("data"), nesting - 1, limit)
    if name == "pyarrow:chunked_array":
        chunks = x.reader.sequence(call.args[0].index, 1) if call.args and isinstance(call.args[0], At) else []
        return _labels_of(x, chunks[0], nesting - 1, limit) if chunks else []
    if name == "pyarrow:_restore_array":
        return _arrow_strings(x, call, limit)
    return _labels_of(x, call.state_items().get("_pa_array"), nesting - 1, limit)


def _arrow_data(call: Call) -> list[Any]:
    """(type, length, nulls, offset, buffers, …): what `_restore_array` is given, as one tuple."""
    only = call.argument(0)
    return call.reader.sequence(only.index, 8) if len(call.args) == 1 and isinstance(only, At) else call.args


def _arrow_strings(x: Explainer, call: Call, limit: int) -> list[str]:
    """The first strings of an Arrow array: its buffers are validity, offsets and characters."""
    parts = _arrow_data(call)
    if len(parts) < 5 or not isinstance(parts[0], At) or not isinstance(parts[4], At) or not isinstance(parts[1], int):
        return []
    data = [_arrow_buffer(x, part) for part in x.reader.sequence(parts[4].index, 3)[1:]]
    made = x.reader.resolve(parts[0].index)
    kind = Call(x, made).text(0) if x.reader.view(made).op in CALLS else None
    width = {"string": 4, "large_string": 8}.get(kind or "")
    if len(data) != 2 or width is None:
        return []
    count = min(parts[1], limit, len(data[0]) // width - 1)
    ends = [int.from_bytes(data[0][k * width : (k + 1) * width], "little") for k in range(count + 1)]
    return [data[1][a:b].decode("utf-8", "replace") for a, b in itertools.pairwise(ends) if b <= len(data[1])]


def _arrow_buffer(x: Explainer, value: Any) -> bytes:
    """The bytes in ``py_buffer(bytearray(b"…"))``, or however deep they are wrapped."""
    for _ in range(4):
        if not isinstance(value, At):
            return b""
        text = x.reader.text(value.index)
        if text is not None:
            return text.value if isinstance(text.value, bytes) else b""
        index = x.reader.resolve(value.index)
        if x.reader.view(index).op not in CALLS:
            return b""
        value = Call(x, index).argument(0)
    return b""


def _frame_axes(call: Call) -> list[Any]:
    """The axes of a block manager, columns first for a DataFrame."""
    reader = call.reader
    manager = call.state_items().get("_mgr")
    if not isinstance(manager, At) or reader.view(reader.resolve(manager.index)).op not in CALLS:
        return []
    inner = Call(call.explainer, reader.resolve(manager.index))
    axes = inner.argument(1)
    if not isinstance(axes, At) and isinstance(inner.state, At):
        axes = next(iter(reader.sequence(inner.state.index, 1)), UNREAD)
    return reader.sequence(axes.index, 2) if isinstance(axes, At) else []


def _frame(call: Call) -> Subject:
    x = call.explainer

    def phrase() -> str:
        axes = _frame_axes(call)
        if len(axes) != 2:
            return "DataFrame"
        lengths = [_length_of(x, axis) for axis in reversed(axes)]
        shape = f" ({', '.join('?' if n is None else str(n) for n in lengths)})"
        labels = _labels_of(x, axes[0])
        more = ", …" if lengths[1] is None or len(labels) < lengths[1] else ""
        columns = ", ".join(_quote(label, 20) for label in labels)
        return f"DataFrame{shape}" + (f": {columns}{more}" if labels else "")

    return Subject("DataFrame", phrase, _frame_route(call), whole=True)


_COLUMNS: Final = 64  # columns of a DataFrame whose labels are looked at


def _frame_route(call: Call) -> Route:
    """Through a DataFrame: to its blocks, each of which holds the columns of one type, and to its index."""
    x = call.explainer
    labels = cache(lambda: _labels_of(x, next(iter(_frame_axes(call)), UNREAD), limit=_COLUMNS))

    def block(position: int, target: int) -> Shape:
        index = x.reader.resolve(target)
        if x.reader.view(index).op not in CALLS or canonical(Call(x, index).name) != "pandas:_unpickle_block":
            return HIDDEN
        columns = _columns_of(Call(x, index), labels())
        return Part(item(columns[0]) if len(columns) == 1 else word("block", position))

    def axis(position: int, _: int) -> Shape:
        return Part(attr("index")) if position == 1 else HIDDEN

    def manager(position: int, _: int) -> Shape:
        return Glue(_members(axis if position else block)) if position < 2 else HIDDEN

    def state(key: Any, step: Step, _: int) -> Shape:
        if key == "_mgr":
            return Glue(_call(args=manager))
        return Glue(_entries(x, lambda _, inner, __: Part(inner))) if key == "attrs" else HIDDEN

    return _call(state=lambda _: Glue(_entries(x, state)))


def _columns_of(call: Call, labels: list[str]) -> list[str]:
    """The labels of the columns in ``_unpickle_block(values, placement, ndim)``, as far as they are known."""
    placement = call.argument(1)
    index = call.reader.resolve(placement.index) if isinstance(placement, At) else -1
    if index < 0 or call.reader.view(index).op not in CALLS:
        return []
    made = Call(call.explainer, index)
    places: Sequence[int]
    if made.name == "builtins.slice" and all(type(each) is int for each in made.args[:3]) and len(made.args) == 3:
        start, stop, step = made.args
        places = range(start, stop, step) if step else ()
    else:
        size = _length_of(call.explainer, At(index)) or 0
        data = [made.argument(0)] if canonical(made.name) == "numpy:_frombuffer" else _array_state(made)[4:]
        text = call.reader.text(data[0].index) if data and isinstance(data[0], At) else None
        numbers = text.value if text is not None and isinstance(text.value, bytes) and text.size == 8 * size else b""
        places = [int.from_bytes(numbers[at : at + 8], "little") for at in range(0, len(numbers), 8)]
    if len(places) > _COLUMNS or not all(0 <= place < len(labels) for place in places):
        return []
    return [labels[place] for place in places]


def _block(call: Call) -> Subject:
    """A block of a DataFrame: which columns, and what their values are."""
    x = call.explainer

    def phrase() -> str:
        place = x.place(call.index)
        axes = _frame_axes(Call(x, place.above)) if place is not None and place.above is not None else []
        columns = _columns_of(call, _labels_of(x, axes[0], limit=_COLUMNS) if axes else [])
        shown = ", ".join(_quote(label, 20) for label in columns[:6]) + (", …" if len(columns) > 6 else "")
        values = call.argument(0)
        what = x.subject(x.reader.resolve(values.index)).what if isinstance(values, At) else ""
        noun = "column" if len(columns) == 1 else "columns"
        return ": ".join(filter(None, (f"{noun} {shown}" if shown else "block of a DataFrame", what)))

    return Subject("block", phrase)


def _backed(call: Call) -> Subject:
    """``__pyx_unpickle_NDArrayBacked(type, …)``: a Categorical, a DatetimeArray and the like."""
    kind = short_name(call.explainer.call_name(call.argument(0)))
    return Subject(kind, lambda: f"{kind} {_length(call)}".rstrip())


def _length(call: Call) -> str:
    length = _length_of(call.explainer, At(call.index))
    return "" if length is None else f"({length},)"


def _series(call: Call) -> Subject:
    def phrase() -> str:
        axes = _frame_axes(call)
        length = _length_of(call.explainer, axes[0]) if axes else None
        return "Series" if length is None else f"Series ({length},)"

    return Subject("Series", phrase)


def _index(call: Call) -> Subject:
    kind = short_name(call.explainer.call_name(call.argument(0)))

    def phrase() -> str:
        length = _length_of(call.explainer, At(call.index))
        return kind if length is None else f"{kind} ({length},)"

    return Subject(kind, phrase)


# torch

_STORAGE = re.compile(rb"(Double|Float|Half|BFloat16|Long|Int|Short|Char|Byte|Bool|ComplexDouble|ComplexFloat)Storage")
_STORAGE_TYPES: Final = {
    b"Double": "float64", b"Float": "float32", b"Half": "float16", b"BFloat16": "bfloat16", b"Long": "int64",
    b"Int": "int32", b"Short": "int16", b"Char": "int8", b"Byte": "uint8", b"Bool": "bool",
    b"ComplexDouble": "complex128", b"ComplexFloat": "complex64",
}  # fmt: skip


def _storage_type(x: Explainer, value: Any) -> str:
    """The element type of a tensor's storage: named in the bytes of a nested torch.save, or by a persistent id."""
    if not isinstance(value, At):
        return ""
    index = x.reader.resolve(value.index)
    view = x.reader.view(index)
    if view.op in PERSISTENT:
        match = _STORAGE.search(x.subject(index).what.encode())
    else:
        call = Call(x, index) if view.op in CALLS else None
        inner = call.argument(0) if call is not None else UNREAD
        text = x.reader.text(inner.index) if isinstance(inner, At) else None
        match = _STORAGE.search(text.value) if text is not None and isinstance(text.value, bytes) else None
    return _STORAGE_TYPES[match[1]] if match is not None else ""


def _tensor(call: Call) -> Subject:
    """``_rebuild_tensor_v2(storage, offset, size, stride, …)`` and its relatives."""
    x = call.explainer

    def phrase() -> str:
        dtype = _storage_type(x, call.argument(0))
        shape = call.reader.value(call.argument(2))
        return " ".join(filter(None, ("tensor", dtype, _shape(shape)))) + _rest_of_storage(call, dtype, shape)

    return Subject("tensor", phrase)


def _rest_of_storage(call: Call, dtype: str, shape: Any) -> str:
    """``, part of a storage of 16.0 MiB`` for a tensor that uses little of what is written with it."""
    storage = call.argument(0)
    if not isinstance(storage, At) or not isinstance(shape, tuple) or not all(type(n) is int for n in shape):
        return ""
    used = _TENSOR_WIDTHS.get(dtype, 8)
    for length in shape:
        used *= length
    stored = call.reader.view(call.reader.resolve(storage.index)).subtree_size
    return f", part of a storage of {format_size(stored)}" if stored > 2 * used + _STORAGE_OVERHEAD else ""


_STORAGE_OVERHEAD: Final = 4096  # bytes that torch.save may write around the elements of a storage
_TENSOR_WIDTHS: Final = {
    "complex128": 16, "complex64": 8, "float64": 8, "int64": 8, "float32": 4, "int32": 4, "float16": 2, "bfloat16": 2,
    "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
}  # fmt: skip


def _parameter(call: Call) -> Subject:
    x = call.explainer

    def phrase() -> str:
        data = call.argument(0)
        what = x.subject(x.reader.resolve(data.index)).what if isinstance(data, At) else ""
        return f"parameter {what.removeprefix('tensor ')}".strip()

    return Subject("parameter", phrase)


# pyarrow, scipy, Ray


def _arrow(kind: str) -> Maker:
    def phrase(call: Call) -> str:
        length = _length_of(call.explainer, At(call.index))
        return f"pyarrow {kind}" + ("" if length is None else f" ({length},)")

    return _leaf(kind, phrase)


def _sparse(call: Call) -> Subject:
    kind = short_name(call.name)
    return Subject(kind, lambda: f"{kind} {_shape(call.reader.value(call.state_items().get('_shape')))}".rstrip())


TABLE: Final[dict[str, Maker]] = {
    # cloudpickle, in each of its copies
    "cloudpickle:_make_function": _function,
    "cloudpickle:_make_skeleton_class": _class,
    "cloudpickle:_make_skeleton_enum": _enum_class,
    "cloudpickle:_make_cell": _plain_cell,
    "cloudpickle:_make_empty_cell": _plain_cell,
    "cloudpickle:_function_setstate": _glue("state setter"),
    "cloudpickle:_class_setstate": _glue("state setter"),
    "cloudpickle:_cell_set": _glue("state setter"),
    "cloudpickle:_builtin_type": _leaf("reference", lambda call: f"types.{call.text(0)} (by reference)"),
    "cloudpickle:subimport": _module,
    "cloudpickle:dynamic_subimport": _module,
    "cloudpickle:_make_typevar": _leaf("TypeVar", lambda call: f"TypeVar {call.text(0)}"),
    "cloudpickle:_make_dict_keys": _container("dict_keys", 0),
    "cloudpickle:_make_dict_values": _container("dict_values", 0),
    "cloudpickle:_make_dict_items": _container("dict_items", 0),
    "cloudpickle:_file_reconstructor": _leaf("text file", "text file, pickled by its content (loads as StringIO)"),
    "cloudpickle:_get_dataclass_field_type_sentinel": _leaf("dataclass field kind"),
    # functions and classes of the language
    "types.CodeType": _code,
    "types.MethodType": _method,
    "types.MappingProxyType": _container("mappingproxy", 0),
    "types.SimpleNamespace": lambda call: _instance(call, "types.SimpleNamespace", kind="SimpleNamespace"),
    "builtins.getattr": _getattr,
    "builtins.type": _leaf("reference", "a built-in type (by reference)"),
    "builtins.property": _made("property", "fget", "fset", "fdel", "__doc__"),
    "builtins.staticmethod": _made("staticmethod", "__func__"),
    "builtins.classmethod": _made("classmethod", "__func__"),
    "functools.partial": _partial,
    "functools.partialmethod": _partial,
    "types.GenericAlias": _leaf("type", "generic alias"),
    "_operator.getitem": _leaf("type", "generic alias"),
    "builtins.iter": _container("iterator", 0),
    "builtins.reversed": _container("iterator", 0),
    "builtins.enumerate": _made("iterator"),
    "builtins.zip": _made("iterator"),
    "builtins.map": _made("iterator", "func"),
    "builtins.filter": _made("iterator", "func"),
    "operator.methodcaller": _made("methodcaller"),
    "operator.attrgetter": _simple("attrgetter"),
    "operator.itemgetter": _simple("itemgetter"),
    # containers
    "builtins.list": _container("list", 0),
    "builtins.tuple": _container("tuple", 0),
    "builtins.dict": _container("dict", 0),
    "builtins.set": _container("set", 0),
    "builtins.frozenset": _container("frozenset", 0),
    "collections.OrderedDict": _container("OrderedDict", 0),
    "collections.Counter": _container("Counter", 0),
    "collections.deque": _container("deque", 0),
    "collections.defaultdict": _made("defaultdict", "default_factory"),
    "weakref.WeakSet": _container("WeakSet", 0),
    # plain values
    "_codecs.encode": _encoded,
    "builtins.bytes": _encoded,
    "builtins.bytearray": _leaf("bytearray", lambda call: _encoded(call).what.replace("bytes", "bytearray", 1)),
    "builtins.complex": _simple("complex"),
    "builtins.range": _simple("range"),
    "builtins.slice": _simple("slice"),
    "datetime.datetime": _leaf("datetime", _datetime_phrase),
    "datetime.date": _leaf("date", _datetime_phrase),
    "datetime.time": _leaf("time"),
    "datetime.timedelta": _simple("timedelta"),
    "datetime.timezone": _leaf("timezone"),
    "zoneinfo.ZoneInfo._unpickle": _simple("ZoneInfo"),
    "decimal.Decimal": _simple("Decimal"),
    "fractions.Fraction": _simple("Fraction"),
    "uuid.UUID": _leaf("UUID", _uuid),
    "re._compile": _leaf("pattern", lambda call: f"regular expression {_quote(call.text(0) or '')}"),
    "pathlib.PosixPath": _leaf("PosixPath", _path_phrase),
    "pathlib.WindowsPath": _leaf("WindowsPath", _path_phrase),
    "pathlib.PurePosixPath": _leaf("PurePosixPath", _path_phrase),
    "pathlib.PureWindowsPath": _leaf("PureWindowsPath", _path_phrase),
    "pathlib._local.PosixPath": _leaf("PosixPath", _path_phrase),
    "_io.StringIO": _string_io,
    "_io.BytesIO": _string_io,
    "io.StringIO": _string_io,
    "io.BytesIO": _string_io,
    "logging.getLogger": _leaf("logger", lambda call: f"logger {call.text(0) or 'root'}"),
    # numpy
    "numpy:_reconstruct": _array,
    "numpy:_frombuffer": _from_buffer,
    "numpy:scalar": _scalar,
    "numpy:dtype": _leaf("dtype", lambda call: f"dtype {_dtype_name(call.explainer, At(call.index))}"),
    "numpy:_mareconstruct": _masked_array,
    "numpy:__bit_generator_ctor": _leaf("BitGenerator", "numpy BitGenerator"),
    "numpy:__generator_ctor": _leaf("Generator", "numpy random Generator"),
    "numpy:__randomstate_ctor": _leaf("RandomState", "numpy RandomState"),
    # joblib
    "joblib:NumpyArrayWrapper": _wrapped_array,
    "joblib:NDArrayWrapper": _array_elsewhere,
    "joblib:ZNDArrayWrapper": _array_elsewhere,
    # pandas
    "pandas:DataFrame": _frame,
    "pandas:Series": _series,
    "pandas:_new_Index": _index,
    "pandas:_new_DatetimeIndex": _index,
    "pandas:_new_PeriodIndex": _index,
    "pandas:MultiIndex": _leaf("MultiIndex"),
    "pandas:_unpickle_block": _block,
    "pandas:BlockManager": _leaf("BlockManager"),
    "pandas:SingleBlockManager": _leaf("BlockManager"),
    "pandas:__pyx_unpickle_NDArrayBacked": _backed,
    "pandas:_unpickle_timestamp": _leaf("Timestamp"),
    "pandas:_timedelta_unpickle": _leaf("Timedelta"),
    # torch
    "torch:_rebuild_tensor": _tensor,
    "torch:_rebuild_tensor_v2": _tensor,
    "torch:_rebuild_tensor_v3": _tensor,
    "torch:_rebuild_parameter": _parameter,
    "torch:_rebuild_parameter_with_state": _parameter,
    "torch:_rebuild_sparse_tensor": _leaf("tensor", "sparse tensor"),
    "torch:_rebuild_qtensor": _leaf("tensor", "quantized tensor"),
    "torch:_rebuild_device_tensor_from_numpy": _leaf("tensor"),
    "torch:_rebuild_from_type_v2": _leaf("tensor", "tensor of a subclass"),
    "torch:_load_from_bytes": _leaf("tensor storage"),
    # pyarrow
    "pyarrow:_reconstruct_table": _arrow("Table"),
    "pyarrow:_reconstruct_record_batch": _arrow("RecordBatch"),
    "pyarrow:_restore_array": _arrow("Array"),
    "pyarrow:chunked_array": _arrow("ChunkedArray"),
    "pyarrow:schema": _leaf("Schema", "pyarrow Schema"),
    "pyarrow:py_buffer": _leaf("Buffer", "pyarrow Buffer"),
    # scipy
    **{f"scipy:{kind}_{end}": _sparse for kind in ("csr", "csc", "coo", "bsr", "dia") for end in ("matrix", "array")},
    # fastcap's own stand-in
    UNPICKLABLE: _unpicklable,
    # Ray
    "ray:_actor_handle_deserializer": _leaf("ActorHandle", "Ray actor handle"),
    "ray:_deserialization_helper": _leaf("ActorHandle", "Ray actor handle"),
    "ray:_object_ref_deserializer": _leaf("ObjectRef", "Ray object reference"),
    "ray:_rdt_ref_deserializer": _leaf("ObjectRef", "Ray object reference"),
    "ray:_gpu_object_ref_deserializer": _leaf("ObjectRef", "Ray object reference"),
    "ray:ObjectRef": _leaf("ObjectRef", "Ray object reference"),
}
"""Canonical name of a reconstructor or class -> what it makes."""

_INSTANCE_MAKERS: Final = frozenset({_frame, _series, _sparse, _string_io, _wrapped_array, _array_elsewhere})
"""Rows that describe an instance by its state alone: they hold for `copyreg._reconstructor` too."""
