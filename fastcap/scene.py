"""What checks for findings work with: the graph in words, and where the payload was pickled just now its live objects.

Checks look at live objects only at their fields, never by calling their methods.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from types import FunctionType, ModuleType
from typing import Any, Final

from fastcap.explain import UNPICKLABLE, Call, Explainer, Failure, Origin, canonical
from fastcap.inert import CALLS
from fastcap.report import Capture, Finding
from fastcap.rules import RULES

MIN_SIZE = 1 << 20
"""Waste of less than this many bytes is not reported unless asked for."""

PER_RULE = 50
"""Findings of one code that are reported; there are as many as a reader can bear."""

NODES = 4000
"""Nodes that one check looks at."""

SMALLEST_BUFFER = 1 << 16
"""Bytes from which on an array or buffer is looked at, whatever the smallest waste that is reported."""

ARRAYS: Final = frozenset({"numpy:_reconstruct", "numpy:_frombuffer"})


@dataclass(frozen=True, slots=True)
class Live:
    """What the pickler of an analysis saw."""

    objects: Sequence[Any] = ()  # by memo index
    failures: Sequence[Failure] = ()
    broken: str | None = None  # why pickling ended before its end
    broken_at: str | None = None  # the path of the object that did it, if that is known
    flavor: str = "cloudpickle"  # the copy of cloudpickle that it was pickled as


@dataclass
class Scene:
    """All that checks look at."""

    x: Explainer
    live: Live | None  # None: a file
    captures: Sequence[Capture]
    read: Callable[[int, int], bytes | memoryview | None] | None = None  # stream bytes [start, end), where at hand
    min_size: int = MIN_SIZE  # waste of fewer bytes is not reported
    taken: set[str] = field(default_factory=set)  # paths that a more telling check has dealt with
    found: dict[str, int] = field(default_factory=dict)  # code -> findings that have been made
    more: dict[str, int] = field(default_factory=dict)  # code -> findings that would have been made beyond; 0: unknown

    def path(self, index: int) -> str:
        """The path of the object that a node is or belongs to.

        What contains itself is built within what is written only to be thrown away; its path is that of who fetches it.
        """
        path = self.x.path(index)
        head = self.head(index)
        if path is not None and head is not None and "<discarded " in path:
            holders = [*self.x.holders(head, inherited=True), *self._fetched(index, head)]
            path = min((held for held in holders if "<discarded " not in held), key=len, default=path)
        return path or "(too deep for a path)"

    def _fetched(self, index: int, head: int) -> Iterator[str]:
        """The paths of those above a node that stand for it or for the object it belongs to."""
        link: int | None = head
        while link is not None:
            place = self.x.place(link)
            link = None if place is None else place.above
            path = self.x.path(link) if link is not None and self.x.reader.resolve(link) in (index, head) else None
            if path is not None:
                yield path

    def has_enough(self, code: str) -> bool:
        """Whether there are as many findings of one code as are reported: what looks for them may as well stop."""
        if self.found.get(code, 0) < PER_RULE:
            return False
        self.more.setdefault(code, 0)
        return True

    def is_one_more(self, code: str) -> bool:
        """The same, where a further finding is certain: then it is counted, and need not be made."""
        if not self.has_enough(code):
            return False
        self.more[code] = self.more.get(code, 0) + 1
        return True

    def head(self, index: int) -> int | None:
        """The object that a node is or belongs to."""
        place = self.x.place(index)
        return None if place is None else place.head

    def object(self, index: int) -> Any:
        """The live object that a node was made from, None where there is none."""
        memo = self.x.reader.view(index).memo
        if self.live is None or not 0 <= memo < len(self.live.objects):
            return None
        return self.live.objects[memo]

    def expression(self, index: int) -> str:
        """An object as the code that captured it writes it: ``self.data``, ``cfg['opt']``; ``x`` if that is unclear."""
        steps: list[str] = []
        link: int | None = index
        while link is not None:
            place = self.x.place(link)
            if place is None:
                return "x"
            if place.part is None:
                root = self.path(link)
                return root + "".join(reversed(steps))
            step = place.part.step
            if step.kind == "block":
                pass  # a DataFrame's: what is to be done, is done to the frame
            elif step.kind in ("attr", "item"):
                steps.append(str(step))
            elif step.kind == "self" or (isinstance(step.value, str) and step.value.isidentifier()):
                return (step.value if isinstance(step.value, str) else "self") + "".join(reversed(steps))
            else:
                return "x"
            link = place.above
        return "x"

    def name(self, index: int) -> str:
        """The name of a function or class, else its expression."""
        return self.x.subject(index).name or self.expression(index)

    def size(self, index: int) -> int:
        """What leaves the payload with a node."""
        return self.x.reader.view(index).retained_size

    def finding(
        self, code: str, index: int, message: str, replacement: str | None, *, severity: str | None = None,
        size: int | None = None,
    ) -> Finding:  # fmt: skip
        """A finding about the object at a node."""
        size = self.size(index) if size is None else size
        return Finding(code, severity or RULES[code].severity, self.path(index), size, message, replacement)

    @cached_property
    def callables(self) -> dict[int, str]:
        """Kind of call (see `Graph.type_keys`) -> canonical name of what is called."""
        found = {}
        for key, op, example in self.x.kinds[:NODES]:
            name = canonical(self._called(Call(self.x, example))) if op in CALLS else None
            if name:
                found[key] = name
        return found

    def _called(self, call: Call) -> str | None:
        """The name of what is called, also if it is a partial of it that is."""
        if call.name is not None or call.callable < 0 or self.x.reader.view(call.callable).op != "REDUCE":
            return call.name
        made = Call(self.x, call.callable)
        return self.x.call_name(made.argument(0)) if made.name == "functools.partial" else None

    def calls(self, wanted: Callable[[str], bool], min_size: int = 0) -> list[int]:
        """The calls of what has a name that is wanted, of at least so many bytes."""
        keys = [key for key, name in self.callables.items() if wanted(name)]
        return self.x.graph.select_kinds(keys, min_size, NODES) if keys else []

    @cached_property
    def functions(self) -> list[tuple[int, FunctionType]]:
        """(node, function) of the live functions that go by value."""
        found = ((index, self.object(index)) for index in self.calls("cloudpickle:_make_function".__eq__))
        return [(index, function) for index, function in found if type(function) is FunctionType]

    @cached_property
    def globals(self) -> list[tuple[int, str]]:
        """(node, dotted name) of what is looked up by name."""
        found = []
        for index in self.x.graph.select(_GLOBAL_OPCODES, 0, NODES):
            name = self.x.reader.global_name(index)
            if name is not None and name != UNPICKLABLE:
                found.append((index, name))
        return found


_GLOBAL_OPCODES: Final = b"c\x93"  # GLOBAL, STACK_GLOBAL

Check = Callable[[Scene], Iterable[Finding]]


def class_name(scene: Scene, index: int) -> str | None:
    """The dotted name of an instance's class, or of the module a function by value comes from and its name."""
    index = scene.x.reader.resolve(index)
    if scene.x.reader.view(index).op not in CALLS:
        return None
    call = Call(scene.x, index)
    if canonical(call.name) == "cloudpickle:_make_function":
        module = call.setter_state.get("__module__")
        return f"{module}.{scene.x.subject(index).name}" if module else None
    if call.name in ("copyreg._reconstructor", "copyreg.__newobj__", "copyreg.__newobj_ex__"):
        return scene.x.call_name(call.argument(0))
    return call.name


def captured_by(scene: Scene, index: int, origin: Origin | None) -> str:
    """``; captured as global `lock` by train_func at train.py:12``."""
    if origin is None:
        return ""
    how = "bound as" if origin.how == "self" else f"captured as {origin.how}"
    words = f"; {how} `{origin.name}`" if origin.name else f"; {how}"
    if origin.captured != index:
        words += f" ({scene.x.subject(origin.captured).type})"
    words += f" by {scene.path(origin.by)}"
    if origin.file:
        words += f" at {origin.file}" + (f":{origin.line}" if origin.line is not None else "")
    return words


def last_name(path: str) -> str:
    """What follows the last step's kind in a path: ``helper`` of ``fn<global helper>``."""
    return path.rpartition(" ")[2].rstrip(">") if path.endswith(">") else path


# What can be asked of a live object without running code of its class or metaclass: `isinstance` looks for `__class__`,
# an attribute of a class is looked up by its metaclass, and one of a lazy module imports it.


def is_a(obj: object, *kinds: type) -> bool:
    """Whether the type of an object is one of these or inherits from one."""
    return issubclass(type(obj), kinds)


def namespace(obj: object) -> Mapping[str, Any]:
    """The ``__dict__`` of a class or module, as it is."""
    if is_a(obj, type):
        found: Mapping[str, Any] = _CLASS_NAMESPACE(obj)
        return found
    return _MODULE_NAMESPACE(obj) if is_a(obj, ModuleType) else {}


def ancestors(cls: type) -> tuple[type, ...]:
    """The method resolution order of a class."""
    found: tuple[type, ...] = _CLASS_ORDER(cls)
    return found


def names_of(cls: type) -> tuple[str, str]:
    """Module and name of a class."""
    module, name = _CLASS_MODULE(cls), _CLASS_NAME(cls)
    return module if type(module) is str else "", name


def is_plain_tensor(obj: object) -> bool:
    """Whether an object is a tensor whose attributes are torch's own, not those of a subclass that may do anything."""
    return names_of(type(obj)) in (("torch", "Tensor"), ("torch.nn.parameter", "Parameter"))


_CLASS_NAMESPACE: Final = type.__dict__["__dict__"].__get__
_CLASS_ORDER: Final = type.__dict__["__mro__"].__get__
_CLASS_MODULE: Final = type.__dict__["__module__"].__get__
_CLASS_NAME: Final = type.__dict__["__name__"].__get__
_MODULE_NAMESPACE: Final = vars(ModuleType)["__dict__"].__get__


def file_of(module: str) -> str:
    """The file of a loaded module; empty if it has none."""
    file = namespace(sys.modules.get(module)).get("__file__")
    return file if type(file) is str else ""


@cache
def installed_folders() -> tuple[str, ...]:
    """Where the standard library and installed packages are, each with a separator at its end."""
    paths = sysconfig.get_paths()
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    return tuple({folder + os.sep for name in names for folder in (paths[name], os.path.realpath(paths[name]))})
