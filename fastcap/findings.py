"""What will fail or hurt, and what to write instead: rules with stable codes.

`RULES` is the one table: docs/rules.md and ``fastcap rule CODE`` are made from it. A check is a generator of findings
for one code; `CHECKS` joins the two. Checks look at the graph, and where the payload was pickled just now also at the
live objects that its nodes were made from: only at their fields, never by calling their methods.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import sysconfig
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import PurePath
from types import CodeType, FunctionType, ModuleType
from typing import Any, Final

from fastcap.explain import (
    TABLE,
    UNPICKLABLE,
    Call,
    Explainer,
    Failure,
    Origin,
    canonical,
    short_name,
)
from fastcap.inert import CALLS, UNREAD, At
from fastcap.paths import attr
from fastcap.report import Capture, Finding, format_size

ERROR, WARNING, NOTE = "error", "warning", "note"
_ORDER: Final = {ERROR: 0, WARNING: 1, NOTE: 2}

MIN_SIZE = 1 << 20
"""Waste of less than this many bytes is not reported unless asked for."""

_PER_RULE = 50  # findings of one code at most
_NODES = 4000  # nodes that one check looks at
_SAMPLE = 4096  # elements or bytes that are looked at before all are
_COMPARED = 1 << 28  # bytes of buffers that are compared at most, in all
_SMALLEST_BUFFER = 1 << 16
_LONG_LIST = 10_000


@dataclass(frozen=True, slots=True)
class Rule:
    """A kind of finding. ``replacement`` is the template of the line to write instead, for the documentation."""

    code: str
    severity: str  # "error", "warning" or "note"; a finding may be milder or worse where the explanation says so
    title: str
    explanation: str
    replacement: str


RULES: Final[Mapping[str, Rule]] = {
    rule.code: rule
    for rule in (
        Rule(
            "FC101", ERROR, "object that cannot be pickled",
            "Pickling raises at this object: a lock, socket, file, generator, thread, connection, an object whose own "
            "__reduce__ or __getstate__ raises. The message has the exception. Where the object sits inside an "
            "instance of the standard library, such as the lock of a queue.Queue, that instance is named. "
            "All such objects are found in one pass: in the place of each the analysis writes a short stand-in, which "
            "is why the sizes of a report with this finding are those of a payload that cannot exist.",
            "create it where it is used, or leave it out of the state: "
            'def __getstate__(self): return {k: v for k, v in self.__dict__.items() if k != "lock"}',
        ),
        Rule(
            "FC102", ERROR, "pickling ended before its end",
            "The pickler could not go on, so that nothing is known of what would have come after: nesting without an "
            "end (an object whose reduce value contains a new object of the same kind, and so forth).",
            "give the class a __reduce__ whose parts get smaller",
        ),
        Rule(
            "FC201", WARNING, "Ray actor handle",
            "An actor handle is only good in the cluster in which the actor lives. In another cluster loading the "
            "pickle fails (Ray 2.60: AssertionError: Expected str or bytes, got <class 'NoneType'>). In a file this is "
            "an error: files outlive clusters. fastcap finds handles without asking Ray to serialize them, so their "
            "size is an estimate.",
            'pass a name and look the actor up where it is used: tracker = ray.get_actor("tracker")',
        ),
        Rule(
            "FC202", WARNING, "Ray object reference",
            "An object reference loads anywhere, and then ray.get on it raises OwnerDiedError or ObjectLostError, or "
            "waits: the process that owns the object is gone, or part of another cluster. In a file this is an error.",
            "pickle the value, ray.get(ref), or the path of a file that holds it",
        ),
        Rule(
            "FC203", WARNING, "name that is looked up in __main__",
            "The pickle says __main__.Name and holds no code. It loads only in a process whose main script defines "
            "that name; any other raises AttributeError: Can't get attribute 'Name' on <module '__main__'>.",
            "move the class or function to a module that is installed where the pickle is loaded, or pickle with "
            "cloudpickle, which sends it along",
        ),
        Rule(
            "FC204", WARNING, "name in a module that cannot be imported",
            "The pickle refers to a module by name that no import statement can find: it was made by a program, or is "
            "not installed here (when a file is scanned). Loading raises ModuleNotFoundError.",
            "cloudpickle.register_pickle_by_value(module)",
        ),
        Rule(
            "FC205", NOTE, "name in a local module",
            "The class or function goes by reference to a module that is neither in the standard library nor in "
            "site-packages. Where that file is not on the import path, loading raises ModuleNotFoundError. Fine if the "
            "job ships its working directory.",
            "cloudpickle.register_pickle_by_value(module), or install the module on the workers",
        ),
        Rule(
            "FC206", WARNING, "tensor on a GPU",
            "The tensor's bytes are copied from the device, and loading puts them on the device with the same number. "
            "Where there is none: RuntimeError: Attempting to deserialize object on a CUDA device.",
            "tensor.cpu()",
        ),
        Rule(
            "FC207", WARNING, "memory-mapped array",
            "What is on disk, and would be read page by page, is read and written out as a whole; it loads as an array "
            "in memory that no file stands behind.",
            "pickle the file's name, and open it where it is used: np.load(path, mmap_mode='r')",
        ),
        Rule(
            "FC208", WARNING, "open file that is pickled by its content",
            "cloudpickle reads the whole text file and sends its content; it loads as io.StringIO, not as a file.",
            "pickle the file's name, and open it where it is used",
        ),
        Rule(
            "FC209", NOTE, "absolute local path",
            "A path of this machine. On another one the file need not be there: FileNotFoundError when it is opened.",
            "a path on shared storage, or one relative to the job's working directory",
        ),
        Rule(
            "FC301", WARNING, "big capture",
            "Code drags this object along: it is pickled with the function or class, each time that is sent. How it "
            "got in (closure, global, default argument, self) is in the message.",
            "Ray: ref = ray.put(x) outside, x = ray.get(ref) inside; or load the data inside the function",
        ),
        Rule(
            "FC302", WARNING, "self captured where an attribute is used",
            "The function reads only some attributes of self, which are small, but captures all of it.",
            "x = self.x before the function, and x instead of self.x in it",
        ),
        Rule(
            "FC303", WARNING, "same bytes twice",
            "Two buffers of the payload hold the same bytes, but are different objects, so that pickle writes both.",
            "let both names refer to one object: b = a",
        ),
        Rule(
            "FC304", WARNING, "broadcast array",
            "The array is a view in which the same memory is seen many times (a stride of 0). Pickle writes every "
            "element.",
            "pickle the small array, and broadcast it where it is used: np.broadcast_to(x, shape)",
        ),
        Rule(
            "FC305", WARNING, "slice of a tensor that carries the whole storage",
            "A tensor is pickled with its whole storage, of which this one uses a small part.",
            "tensor.clone()",
        ),
        Rule(
            "FC306", WARNING, "slice of Arrow data that carries its parent",
            "A slice of an Arrow array or table is pickled with the buffers of what it was cut from.",
            "pa.concat_arrays([x]); for a table x.take(list(range(len(x))))",
        ),
        Rule(
            "FC307", NOTE, "array of objects",
            "The array has dtype object: its elements are pickled one by one, as Python objects.",
            "x.astype(float), or whatever type the elements have",
        ),
        Rule(
            "FC308", NOTE, "list of floats",
            "Each element is pickled on its own, and made as an object when it is loaded. An array takes fewer bytes "
            "and loads at once.",
            "np.asarray(x)",
        ),
        Rule(
            "FC309", NOTE, "float64 values that fit float32",
            "All values of the sample that was looked at are exactly representable in float32: half the bytes do.",
            "x.astype(np.float32)",
        ),
        Rule(
            "FC310", NOTE, "code of an importable module by value",
            "The class or function belongs to a module that can be imported, and yet its code is pickled: it is "
            "registered with cloudpickle.register_pickle_by_value. Workers that have it installed do not need that.",
            "cloudpickle.unregister_pickle_by_value(module)",
        ),
        Rule(
            "FC311", WARNING, "big global behind helpers",
            "A function drags in another one that it calls, and that one the data it uses. The function itself does "
            "not mention the data.",
            "give the helper the data as an argument, or load it inside the helper",
        ),
        Rule(
            "FC312", NOTE, "exported twice by Ray Tune",
            "Tune registers a trainable, and each trial exports it as an actor class again: with num_samples >= 2 "
            "everything that it captures goes to Ray's key-value store twice.",
            "tune.with_parameters(train, data=data): the data goes to the object store, once",
        ),
    )
}  # fmt: skip


# --- stand-ins -------------------------------------------------------------------------------------------------------


class Unpicklable:
    """Named in the stream of an analysis in the place of what cannot be pickled. It is never loaded."""


class Failures(list[Failure]):
    """What could not be pickled, by the number in its stand-in; `report` is the pickler's hook."""

    def report(self, obj: Any, error: Exception) -> int:
        """Take note of an object that raised, and give it a number."""
        kind = type(obj)
        module = kind.__module__ if isinstance(kind.__module__, str) else ""
        name = kind.__qualname__ if module in ("builtins", "__main__", "") else f"{module}.{kind.__qualname__}"
        self.append(Failure(name, _one_line(error)))
        return len(self) - 1


def _one_line(error: Exception) -> str:
    try:
        text = str(error)
    except Exception:  # an exception's own __str__
        text = ""
    text = " ".join(text.split())
    text = text if len(text) <= 300 else text[:299] + "…"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


_HANDLE_SIZE = 300  # bytes of a serialized actor handle with a few methods (Ray 2.60)


def handle_reducers() -> dict[type, Callable[[Any], Any]]:
    """Reducers for Ray's handles that Ray is not asked about: nothing is registered, pinned or counted.

    They name the functions that Ray's own reducers name, with arguments of about the same size. Empty where Ray is not
    loaded, for then there are no handles.
    """
    serialization = sys.modules.get("ray._private.serialization")
    actors, ids, client = (sys.modules.get(name) for name in ("ray.actor", "ray._raylet", "ray.util.client.common"))
    load_actor = getattr(serialization, "_actor_handle_deserializer", None)
    load_ref = getattr(serialization, "_object_ref_deserializer", None)
    found: dict[type, Callable[[Any], Any]] = {}
    for module, name in ((actors, "ActorHandle"), (client, "ClientActorHandle")):
        kind = getattr(module, name, None)
        if isinstance(kind, type) and load_actor is not None:
            found[kind] = lambda _: (load_actor, (bytes(_HANDLE_SIZE), False))
    for module, name in ((ids, "ObjectRef"), (client, "ClientObjectRef")):
        kind = getattr(module, name, None)
        if isinstance(kind, type) and load_ref is not None:
            found[kind] = lambda _: (load_ref, (bytes(28), "", bytes(74), bytes(36), None))
    return found


# --- what checks work with -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Live:
    """What the pickler of an analysis saw."""

    objects: Sequence[Any] = ()  # by memo index
    failures: Sequence[Failure] = ()
    broken: str | None = None  # why pickling ended before its end


@dataclass
class Scene:
    """All that checks look at."""

    x: Explainer
    live: Live | None  # None: a file
    captures: Sequence[Capture]
    read: Callable[[int, int], bytes | memoryview | None] | None = None  # stream bytes [start, end), where at hand
    min_size: int = MIN_SIZE  # waste of fewer bytes is not reported
    taken: set[str] = field(default_factory=set)  # paths that a more telling check has dealt with

    def path(self, index: int) -> str:
        """The path of the object that a node is or belongs to."""
        return self.x.path(index) or "(too deep for a path)"

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
            if step.kind in ("attr", "item"):
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
        for key, op, example in self.x.kinds[:_NODES]:
            name = canonical(Call(self.x, example).name) if op in CALLS else None
            if name:
                found[key] = name
        return found

    def calls(self, wanted: Callable[[str], bool], min_size: int = 0) -> list[int]:
        """The calls of what has a name that is wanted, of at least so many bytes."""
        keys = [key for key, name in self.callables.items() if wanted(name)]
        return self.x.graph.select_kinds(keys, min_size, _NODES) if keys else []

    @cached_property
    def globals(self) -> list[tuple[int, str]]:
        """(node, dotted name) of what is looked up by name."""
        found = []
        for index in self.x.graph.select(_GLOBAL_OPCODES, 0, _NODES):
            name = self.x.reader.global_name(index)
            if name is not None and name != UNPICKLABLE:
                found.append((index, name))
        return found


_GLOBAL_OPCODES: Final = b"c\x93"  # GLOBAL, STACK_GLOBAL
_BYTES_OPCODES: Final = b"B\x8e\x96C"  # BINBYTES, BINBYTES8, BYTEARRAY8, SHORT_BINBYTES
_LIST_OPCODES: Final = b"]l"  # EMPTY_LIST, LIST

Check = Callable[[Scene], Iterable[Finding]]


def find_all(scene: Scene) -> tuple[Finding, ...]:
    """The findings about one payload, worst first."""
    found: list[Finding] = []
    for check in dict.fromkeys(CHECKS.values()):
        by_code: dict[str, list[Finding]] = {}
        more: dict[str, int] = {}
        for finding in check(scene):
            kept = by_code.setdefault(finding.code, [])
            if len(kept) < _PER_RULE:
                kept.append(finding)
            else:
                more[finding.code] = more.get(finding.code, 0) + 1
        for code, count in more.items():
            last = by_code[code][-1]
            by_code[code][-1] = replace(last, message=f"{last.message} [{count:,} more {code}]")
        for kept in by_code.values():
            found.extend(kept)
    return tuple(sorted(found, key=lambda each: (_ORDER[each.severity], -each.size, each.code, each.path)))


# --- FC1: cannot be pickled ------------------------------------------------------------------------------------------


def _check_unpicklable(scene: Scene) -> Iterator[Finding]:
    if scene.live is None or not scene.live.failures:
        return
    culprits: dict[int, list[int]] = {}
    for index in scene.x.graph.select(b"c", 0, 2 * _NODES):
        if scene.x.reader.global_name(index) == UNPICKLABLE:
            stand_in = scene.x.reader.view(index).parent
            culprits.setdefault(_culprit(scene, stand_in), []).append(stand_in)
    for culprit, stand_ins in culprits.items():
        failure = _failure_at(scene, stand_ins[0])
        if failure is None:
            continue
        kind = failure.type
        text = f"{kind} cannot be pickled ({failure.error})"
        if "changed size during iteration" in failure.error:
            text = f"{kind} changes while it is pickled ({failure.error})"
        elif culprit != stand_ins[0]:
            kind = _class_name(scene, culprit) or scene.x.subject(culprit).type
            text = f"{kind} cannot be pickled: it holds {failure.type} ({failure.error})"
        origin = scene.x.origin(culprit)
        message = text + _captured(scene, culprit, origin)
        yield scene.finding("FC101", culprit, message, _instead_of_unpicklable(scene, culprit, origin, kind), size=0)


def _failure_at(scene: Scene, stand_in: int) -> Failure | None:
    number = Call(scene.x, stand_in).argument(0)
    failures = scene.live.failures if scene.live is not None else ()
    return failures[number] if isinstance(number, int) and 0 <= number < len(failures) else None


def _class_name(scene: Scene, index: int) -> str | None:
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


_THROUGH: Final = frozenset({"dict", "list", "tuple", "set", "frozenset", "deque", "OrderedDict", "defaultdict"})


def _culprit(scene: Scene, stand_in: int) -> int:
    """The topmost object of the standard library that a stand-in lies in, directly or through containers."""
    culprit = link = stand_in
    place = scene.x.place(stand_in)
    if place is not None and place.part is not None and place.part.step.kind in ("key", "member"):
        failure = _failure_at(scene, stand_in)
        if failure is not None and "changed size" in failure.error and place.above is not None:
            return place.above
    for _ in range(64):
        place = scene.x.place(link)
        if place is None or place.above is None:
            break
        link = place.above
        name = _class_name(scene, link)
        if name is not None and name.partition(".")[0] in sys.stdlib_module_names and canonical(name) not in TABLE:
            if not name.startswith(("__main__.", "builtins.")):
                culprit = link
        elif scene.x.subject(link).type not in _THROUGH:
            break
    return culprit


def _captured(scene: Scene, index: int, origin: Origin | None) -> str:
    """``; captured as global `lock` by train_func at train.py:12``."""
    if origin is None:
        return ""
    words = f"; captured as {origin.how} `{origin.name}`" if origin.name else f"; captured as {origin.how}"
    if origin.captured != index:
        words += f" ({scene.x.subject(origin.captured).type})"
    words += f" by {scene.path(origin.by)}"
    if origin.file:
        words += f" at {origin.file}" + (f":{origin.line}" if origin.line is not None else "")
    return words


_CONSTRUCTORS: Final = {
    "_thread.lock": "threading.Lock()", "_thread.RLock": "threading.RLock()", "_thread._local": "threading.local()",
    "queue.Queue": "queue.Queue()", "threading.Event": "threading.Event()",
    "threading.Condition": "threading.Condition()",
    "_queue.SimpleQueue": "queue.SimpleQueue()", "socket.socket": "socket.create_connection(address)",
    "sqlite3.Connection": "sqlite3.connect(path)", "_io.BufferedReader": 'open(path, "rb")',
    "_io.BufferedWriter": 'open(path, "wb")', "_io.TextIOWrapper": "open(path)", "_io.FileIO": 'open(path, "rb")',
    "threading.Thread": "threading.Thread(target=…)", "weakref.WeakValueDictionary": "weakref.WeakValueDictionary()",
}  # fmt: skip


def _instead_of_unpicklable(scene: Scene, index: int, origin: Origin | None, kind: str) -> str:
    """The line to write instead, by where the object hangs."""
    make = _CONSTRUCTORS.get(kind)
    place = scene.x.place(index)
    above = place.above if place is not None else None
    step = str(place.part.step) if place is not None and place.part is not None else ""
    own = scene.expression(index)
    if kind in ("dict", "set") and scene.x.subject(index).type == kind:
        return f"{own} = {own}.copy()"
    if kind == "generator":
        return f"{own} = list({own})"
    captured = origin is not None and origin.captured == index and origin.name
    if origin is not None and captured and origin.how in ("closure", "global", "default"):
        return f"inside {scene.name(origin.by)}: {origin.name} = {make or '…'}"
    if origin is not None and captured and origin.how == "class attribute":
        return f"make it in __init__, with a __getstate__ that leaves it out: self.{origin.name} = {make or '…'}"
    if step.startswith(".") and above is not None and scene.x.subject(above).type != "function":
        return (
            f"in {short_name(scene.x.subject(above).type)}: def __getstate__(self): "
            f'return {{k: v for k, v in self.__dict__.items() if k != "{step[1:]}"}}'
        )
    if step.startswith("[") and above is not None:
        kind_above = scene.x.subject(above).type
        return f"del {own}" if kind_above in ("dict", "list") else f"leave it out of {scene.expression(above)}"
    return f"make it where it is used: {make}" if make else "make it where it is used"


def _last(path: str) -> str:
    """What follows the last step's kind in a path: ``helper`` of ``fn<global helper>``."""
    return path.rpartition(" ")[2].rstrip(">") if path.endswith(">") else path


def _check_broken(scene: Scene) -> Iterator[Finding]:
    if scene.live is not None and scene.live.broken is not None:
        yield scene.finding("FC102", 0, scene.live.broken, None, size=0)


# --- FC2: does not load elsewhere ------------------------------------------------------------------------------------


def _check_handles(scene: Scene) -> Iterator[Finding]:
    severity = ERROR if scene.live is None else WARNING
    for index in scene.calls(lambda name: name.startswith("ray:")):
        kind = scene.x.subject(index).type
        if kind not in ("ActorHandle", "ObjectRef") or scene.head(index) != index:
            continue
        origin = scene.x.origin(index)
        where = _captured(scene, index, origin)
        own = _variable(scene, index)
        if kind == "ActorHandle":
            message = (
                f"Ray actor handle: loading it in another cluster fails (AssertionError: Expected str or bytes, got "
                f"<class 'NoneType'>){where}"
            )
            instead = f'{own} = ray.get_actor("{own}")  # by name, where it is used'
            yield scene.finding("FC201", index, message, instead, severity=severity)
        else:
            message = f"Ray object reference: it loads elsewhere, and ray.get on it raises OwnerDiedError{where}"
            own = scene.expression(index)
            instead = f"{own} = ray.get({own})  # the value instead of the reference"
            yield scene.finding("FC202", index, message, instead, severity=severity)


def _variable(scene: Scene, index: int) -> str:
    """A name for an object, from the last step that has one."""
    link: int | None = index
    while link is not None:
        place = scene.x.place(link)
        if place is None or place.part is None:
            break
        step = place.part.step
        if isinstance(step.value, str) and step.value.isidentifier():
            return step.value
        link = place.above
    return "x"


def _check_names(scene: Scene) -> Iterator[Finding]:
    """FC203, FC204, FC205: the first name of each module that may be missing elsewhere."""
    modules: dict[tuple[str, str], tuple[int, str]] = {}
    for index, name in scene.globals:
        module = _module_of(scene, index, name)
        code = _judge_module(module, scene.live is not None)
        if code is not None:
            modules.setdefault((code, name if code == "FC203" else module), (index, name))
    for (code, module), (index, name) in modules.items():
        if code == "FC203":
            message = f"{name} is looked up by name: elsewhere AttributeError: Can't get attribute {short_name(name)!r}"
            replacement = f"move {short_name(name)} to a module that workers have"
        elif code == "FC204":
            message = f"{name} is looked up by name, and {module} cannot be imported: ModuleNotFoundError on load"
            replacement = f"cloudpickle.register_pickle_by_value({module})" if scene.live else f"pip install {module}"
        else:
            message = f"{name} is looked up by name in {_file_of(module)}: ModuleNotFoundError where that is missing"
            replacement = f"cloudpickle.register_pickle_by_value({module})"
        yield scene.finding(code, index, message, replacement, size=0)


def _module_of(scene: Scene, index: int, name: str) -> str:
    parts = scene.x.reader.contents(index, 2)
    module = scene.x.reader.string(parts.get(0))
    if module is not None:
        return module
    module = name.rpartition(".")[0]  # GLOBAL: only a nested name has dots of its own
    while module.rpartition(".")[0] in sys.modules and module not in sys.modules:
        module = module.rpartition(".")[0]
    return module


def _judge_module(module: str, live: bool) -> str | None:
    top = module.partition(".")[0]
    if module == "__main__":
        return "FC203"
    if top in sys.stdlib_module_names or not module:
        return None
    if not live:
        return None if _is_findable(top) else "FC204"
    loaded = sys.modules.get(module)
    if loaded is None:
        return None
    file = _file_of(module)
    if not file:
        return "FC204" if getattr(loaded, "__spec__", None) is None and not _is_findable(top) else None
    return None if file.startswith(_installed_folders()) or f"{os.sep}site-packages{os.sep}" in file else "FC205"


@cache
def _is_findable(top: str) -> bool:
    """Whether a top-level module can be found; finding one imports nothing."""
    try:
        return importlib.util.find_spec(top) is not None
    except (ImportError, ValueError, AttributeError):
        return False


def _file_of(module: str) -> str:
    loaded = sys.modules.get(module)
    file = loaded.__dict__.get("__file__") if isinstance(loaded, ModuleType) else None
    return file if isinstance(file, str) else ""


@cache
def _installed_folders() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    return tuple({folder + os.sep for name in names for folder in (paths[name], os.path.realpath(paths[name]))})


def _check_gpu_tensors(scene: Scene) -> Iterator[Finding]:
    for index in scene.calls(lambda name: name.startswith("torch:_rebuild")):
        device = _device_of(scene, index)
        if device.startswith("cuda"):
            message = f"tensor on {device}: where there is no such device loading raises RuntimeError"
            yield scene.finding("FC206", index, message, f"{scene.expression(index)}.cpu()")


def _device_of(scene: Scene, index: int) -> str:
    obj = scene.object(index)
    if obj is not None and type(obj).__module__.partition(".")[0] == "torch":
        return str(getattr(obj, "device", ""))
    storage = Call(scene.x, index).argument(0)
    if not isinstance(storage, At):
        return ""
    key = scene.x.reader.contents(storage.index, 2).get(0, UNREAD)
    value = scene.x.reader.value(key)
    return str(value[3]) if isinstance(value, tuple) and len(value) > 3 and value[0] == "storage" else ""


def _check_memory_maps(scene: Scene) -> Iterator[Finding]:
    for index in scene.calls(_ARRAYS.__contains__, _SMALLEST_BUFFER):
        obj = scene.object(index)
        kind = scene.x.subject(index).type if obj is None else type(obj).__name__
        if kind != "memmap":
            continue
        file = getattr(obj, "filename", None)
        file = str(file) if isinstance(file, (str, PurePath)) else None
        where = f" of {file}" if file else ""
        message = f"memory-mapped array{where}: {format_size(scene.size(index))} of it are read and written out"
        shown = repr(file) if file else "path"
        instead = f'{scene.expression(index)} = np.load({shown}, mmap_mode="r")  # where it is used'
        yield scene.finding("FC207", index, message, instead)


def _check_text_files(scene: Scene) -> Iterator[Finding]:
    for index in scene.calls(lambda name: name == "cloudpickle:_file_reconstructor"):
        file = getattr(scene.object(index), "name", None)
        named = isinstance(file, str)
        message = f"the content of the open file{f' {file}' if named else ''} is pickled; it loads as io.StringIO"
        instead = f"{scene.expression(index)} = open({repr(file) if named else 'path'})  # where it is used"
        yield scene.finding("FC208", index, message, instead)


def _check_local_paths(scene: Scene) -> Iterator[Finding]:
    for index in scene.calls(("pathlib.PosixPath", "pathlib.WindowsPath", "pathlib._local.PosixPath").__contains__):
        first = Call(scene.x, index).text(0)
        if first is not None and (first.startswith("/") or first[1:3] in (":\\", ":/")) and scene.head(index) == index:
            yield scene.finding("FC209", index, f"{scene.x.subject(index).what} is a path of this machine", None)


# --- FC3: waste ------------------------------------------------------------------------------------------------------


def _check_captured_self(scene: Scene) -> Iterator[Finding]:
    for index in scene.calls(lambda name: name == "cloudpickle:_make_function", scene.min_size):
        for part, target in scene.x.below(index):
            if part.how != "closure" or part.name is None:
                continue
            target = scene.x.reader.resolve(target)
            used = _attributes_used(scene, index, part.name, target)
            if not used:
                continue
            state = dict(_attribute_nodes(scene, target))
            if not used <= _attribute_names(scene, target, state):
                continue
            rest = scene.size(target)
            rest -= sum(scene.x.reader.view(state[each]).subtree_size for each in used if each in state)
            if rest < scene.min_size:
                continue
            path = scene.path(index) + str(part.step)
            scene.taken.add(path)
            names = sorted(used)
            reads = " and ".join(f"{part.name}.{each}" for each in names)
            function = scene.x.subject(index)
            file, line = function.where() if function.where is not None else (None, None)
            at = f" at {file}:{line}" if file and line is not None else ""
            kind = scene.x.subject(target).type
            yield Finding(
                "FC302", WARNING, path, rest,
                f"{function.name}{at} reads only {reads}, but captures all of `{part.name}` ({kind})",
                "; ".join(f"{each} = {part.name}.{each}" for each in names)
                + f"  # before {function.name}, which then uses {' and '.join(names)}",
            )  # fmt: skip


def _attribute_nodes(scene: Scene, index: int) -> Iterator[tuple[str, int]]:
    """The attributes of an instance."""
    if scene.x.subject(index).type in ("function", "class", "dict", "list", "tuple"):
        return
    for part, target in scene.x.below(index):
        name = part.step.value
        if isinstance(name, str) and str(part.step) == str(attr(name)):
            yield name, scene.x.reader.resolve(target)


def _attribute_names(scene: Scene, index: int, nodes: Mapping[str, int]) -> set[str]:
    """The names of an instance's attributes, with those whose values have no node, such as numbers."""
    if scene.x.reader.view(index).op not in CALLS:
        return set(nodes)
    return {*nodes, *Call(scene.x, index).state_items()}


def _attributes_used(scene: Scene, function: int, variable: str, target: int) -> set[str]:
    """The attributes of a closure variable that a function reads; empty if it may do anything else with it."""
    live = scene.object(function)
    if isinstance(live, FunctionType):
        used: set[str] = set()
        return used if _reads_attributes(live.__code__, variable, used) else set()
    code = Call(scene.x, function).argument(0)
    names = _names_in_code(scene, code, 4)
    return names & _attribute_names(scene, target, dict(_attribute_nodes(scene, target)))


_LOADS: Final = frozenset({"LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF"})
_PASSES: Final = frozenset({"COPY_FREE_VARS", "LOAD_CLOSURE", "MAKE_CELL"})


def _reads_attributes(code: CodeType, variable: str, used: set[str]) -> bool:
    """Collect the attributes that code reads of a free variable; False if it does anything else with it."""
    import dis

    instructions = [each for each in dis.get_instructions(code) if each.opname not in ("CACHE", "EXTENDED_ARG")]
    for number, each in enumerate(instructions):
        if each.argval != variable or each.opname in _PASSES:
            continue
        if each.opname in ("LOAD_FAST", "STORE_DEREF", "DELETE_DEREF"):
            if each.opname != "LOAD_FAST":
                return False
            continue  # 3.13 loads the cell itself so, for a nested function
        if each.opname in _LOADS:
            following = instructions[number + 1] if number + 1 < len(instructions) else None
            if following is None or following.opname not in ("LOAD_ATTR", "LOAD_METHOD"):
                return False
            used.add(str(following.argval))
    nested = [each for each in code.co_consts if isinstance(each, CodeType) and variable in each.co_freevars]
    return all(_reads_attributes(each, variable, used) for each in nested)


def _names_in_code(scene: Scene, code: Any, nesting: int) -> set[str]:
    """``co_names`` of a code object in the stream, and of those nested in it."""
    if not isinstance(code, At) or not nesting:
        return set()
    index = scene.x.reader.resolve(code.index)
    if scene.x.reader.view(index).op not in CALLS:
        return set()
    args = Call(scene.x, index).args
    position = {16: 8, 18: 8}.get(len(args))
    if position is None:
        return set()
    found: set[str] = set()
    names = args[position]
    if isinstance(names, At):
        found |= {each for each in map(scene.x.reader.string, scene.x.reader.sequence(names.index, 256)) if each}
    constants = args[position - 1]
    if isinstance(constants, At):
        for each in scene.x.reader.contents(constants.index, 64).values():
            found |= _names_in_code(scene, each, nesting - 1)
    return found


def _check_duplicates(scene: Scene) -> Iterator[Finding]:
    if scene.live is None and scene.read is None:
        return
    by_size: dict[int, list[int]] = {}
    for index in scene.x.graph.select(_BYTES_OPCODES, _SMALLEST_BUFFER, _NODES):
        view = scene.x.reader.view(index)
        by_size.setdefault(view.end - view.start, []).append(index)
    budget = _COMPARED
    for size, nodes in sorted(by_size.items(), reverse=True):
        if len(nodes) < 2 or size > budget:
            continue
        groups: dict[int, list[tuple[int, memoryview]]] = {}
        for index in nodes:
            content = _content(scene, index)
            if content is not None:
                groups.setdefault(zlib.crc32(_sample(content)), []).append((index, content))
        for group in groups.values():
            first, content = group[0]
            for index, other in group[1:]:
                budget -= size
                if budget < 0 or not _same(content, other):
                    continue
                head, twin = scene.head(index), scene.head(first)
                if head is None or twin is None:
                    continue
                message = f"holds the same {format_size(len(content))} as {scene.path(twin)}"
                replacement = f"{scene.expression(head)} = {scene.expression(twin)}"
                yield scene.finding("FC303", head, message, replacement, size=size)


def _content(scene: Scene, index: int) -> memoryview | None:
    """The bytes of a buffer's node: of the object it was made from, or read again from where the stream came from."""
    if scene.live is not None:
        try:
            view = memoryview(scene.object(index))
            return view.cast("B") if view.contiguous and view.nbytes else None
        except (TypeError, ValueError):
            return None
    node = scene.x.reader.view(index)
    start = scene.x.graph.stream_offset(node.start)
    header = scene.x.graph.code(node.start, node.start + 9)
    width = 8 if header[:1] in (b"\x8e", b"\x96") else 4  # BINBYTES8, BYTEARRAY8; BINBYTES
    size = int.from_bytes(header[1 : 1 + width], "little")
    assert scene.read is not None
    data = scene.read(start, start + 1 + width + size)
    # What is read may be something else, of a compressed file for one.
    if data is None or len(data) != 1 + width + size or bytes(data[: 1 + width]) != header[: 1 + width]:
        return None
    return memoryview(data)[1 + width :]


def _sample(content: memoryview) -> bytes:
    """Some bytes of the beginning, the middle and the end: equal contents have equal samples."""
    size = len(content)
    return b"".join(bytes(content[at : at + 256]) for at in (0, size // 3, 2 * size // 3, max(0, size - 256)))


def _same(one: memoryview, other: memoryview) -> bool:
    block = 1 << 20
    return len(one) == len(other) and all(
        bytes(one[at : at + block]) == bytes(other[at : at + block]) for at in range(0, len(one), block)
    )


_ARRAYS: Final = frozenset({"numpy:_reconstruct", "numpy:_frombuffer"})


def _is_array(obj: Any) -> bool:
    kind = type(obj)
    return kind.__module__ == "numpy" and kind.__name__ in ("ndarray", "memmap")


def _check_arrays(scene: Scene) -> Iterator[Finding]:
    """FC304, FC307, FC309: arrays that could be smaller."""
    for index in scene.calls(_ARRAYS.__contains__, min(_SMALLEST_BUFFER, scene.min_size)):
        obj = scene.object(index)
        if obj is None or not _is_array(obj) or obj.dtype.kind == "O":
            what = scene.x.subject(index).what
            if " object " in f"{what} " and scene.size(index) >= scene.min_size:
                own = scene.expression(index)
                message = f"{what}: its elements are pickled one by one"
                yield scene.finding("FC307", index, message, f"{own} = {own}.astype(float)  # or what the elements are")
            continue
        if obj.nbytes < scene.min_size:
            continue
        used = obj.dtype.itemsize
        for length, stride in zip(obj.shape, obj.strides):
            used *= length if stride else 1
        if used * 2 <= obj.nbytes:
            own, what = scene.expression(index), scene.x.subject(index).what
            message = f"{what} is broadcast from {format_size(used)}: every element is written"
            instead = f"{own} = np.broadcast_to({own}, {obj.shape})  # where it is used"
            yield scene.finding("FC304", index, message, instead)
        elif obj.dtype.str == _FLOAT64 and type(obj).__name__ == "ndarray" and _fits_float32(obj):
            own, what = scene.expression(index), scene.x.subject(index).what
            message = f"{what}: the values that were looked at all fit float32"
            yield scene.finding("FC309", index, message, f"{own} = {own}.astype(np.float32)", size=obj.nbytes // 2)


_FLOAT64: Final = "<f8" if sys.byteorder == "little" else ">f8"


def _fits_float32(array: Any) -> bool:
    """Whether a few values are float32's, and no whole numbers, which say nothing."""
    numpy = sys.modules["numpy"]
    if not (array.flags.c_contiguous or array.flags.f_contiguous):
        return False
    flat = array.ravel("K")
    first = flat[:64]
    with numpy.errstate(all="ignore"):
        if (first.astype(numpy.float32).astype(numpy.float64) != first).any():
            return False
    step = max(1, flat.size // 16)
    sample = numpy.concatenate([flat[at : at + _SAMPLE // 16] for at in range(0, flat.size, step)])
    with numpy.errstate(all="ignore"):
        exact = sample.astype(numpy.float32).astype(numpy.float64) == sample
        fraction = sample != numpy.floor(sample)
    return bool(exact.all() and fraction.mean() > 0.25)


_TENSOR_WIDTHS: Final = {
    "complex128": 16, "complex64": 8, "float64": 8, "int64": 8, "float32": 4, "int32": 4, "float16": 2, "int16": 2,
    "int8": 1, "bool": 1,
}  # fmt: skip


def _check_tensors(scene: Scene) -> Iterator[Finding]:
    for index in scene.calls(lambda name: name.startswith("torch:_rebuild_tensor"), scene.min_size):
        call = Call(scene.x, index)
        storage, shape = call.argument(0), scene.x.reader.value(call.argument(2))
        if not isinstance(storage, At) or not isinstance(shape, tuple):
            continue
        node = scene.x.reader.resolve(storage.index)
        stored = scene.x.reader.view(node).subtree_size
        what = scene.x.subject(index).what
        dtype = str(getattr(scene.object(index), "dtype", what))
        # Unknown where the storage is bytes that the graph has not kept: then the widest of the usual ones.
        used = next((size for kind, size in _TENSOR_WIDTHS.items() if kind in dtype), 8)
        for length in shape:
            used *= length if isinstance(length, int) else 1
        if stored - used < scene.min_size or stored < 2 * used or scene.x.graph.referrer_count(node):
            continue
        own = scene.expression(index)
        message = f"{what} is {format_size(used)} of a storage of {format_size(stored)}, which is written whole"
        yield scene.finding("FC305", index, message, f"{own} = {own}.clone()", size=stored - used)


_ARROW_WIDTHS: Final = {
    "int8": 1, "uint8": 1, "int16": 2, "uint16": 2, "int32": 4, "uint32": 4, "int64": 8, "uint64": 8, "float": 4,
    "float32": 4, "double": 8, "float64": 8, "string": 4, "utf8": 4, "binary": 4, "large_string": 8, "large_binary": 8,
    "halffloat": 2,
}  # fmt: skip


def _check_arrow(scene: Scene) -> Iterator[Finding]:
    lost: dict[int, int] = {}
    for index in scene.calls(lambda name: name == "pyarrow:_restore_array", _SMALLEST_BUFFER):
        rest = _arrow_rest(scene, Call(scene.x, index))
        head = scene.head(index)
        if rest and head is not None:
            lost[head] = lost.get(head, 0) + rest
    for head, rest in lost.items():
        if rest < scene.min_size:
            continue
        own = scene.expression(head)
        what = scene.x.subject(head).what
        is_array = what.startswith("pyarrow Array")
        shorter = f"pa.concat_arrays([{own}])" if is_array else f"{own}.take(list(range(len({own}))))"
        message = f"{what} is a slice: {format_size(rest)} of what it was cut from go along"
        yield scene.finding("FC306", head, message, f"{own} = {shorter}", size=rest)


def _arrow_rest(scene: Scene, call: Call) -> int:
    """Bytes of an Arrow array's buffers beyond its own elements."""
    reader = scene.x.reader
    only = call.argument(0)
    parts = reader.sequence(only.index, 8) if len(call.args) == 1 and isinstance(only, At) else call.args
    if len(parts) < 5 or not isinstance(parts[0], At) or not isinstance(parts[1], int) or not isinstance(parts[4], At):
        return 0
    made = reader.resolve(parts[0].index)
    kind = Call(scene.x, made).text(0) if reader.view(made).op in CALLS else None
    width = _ARROW_WIDTHS.get(kind or "")
    nodes = [part.index for part in reader.sequence(parts[4].index, 3)[1:] if isinstance(part, At)]
    buffers = [reader.view(node).subtree_size for node in nodes]
    if width is None or not buffers or parts[1] < 0:
        return 0
    expected = width * (parts[1] + 1)
    if buffers[0] < 2 * expected + 4096:
        return 0
    share = 1 - expected / buffers[0]
    return buffers[0] - expected + int(share * sum(buffers[1:]))


def _check_lists(scene: Scene) -> Iterator[Finding]:
    for index in scene.x.graph.select(_LIST_OPCODES, scene.min_size, _NODES, _LONG_LIST):
        view = scene.x.reader.view(index)
        if view.count == 1 and 8.5 <= (view.end - view.start) / view.arg <= 9.5 and scene.head(index) == index:
            own = scene.expression(index)
            if not isinstance(scene.x.reader.contents(index, 1).get(0), float):
                continue
            message = f"list of {view.arg:,} floats, each of which is pickled on its own"
            yield scene.finding("FC308", index, message, f"{own} = np.asarray({own})")


def _check_code_by_value(scene: Scene) -> Iterator[Finding]:
    if scene.live is None:
        return
    seen: set[str] = set()
    for index in scene.calls(("cloudpickle:_make_function", "cloudpickle:_make_skeleton_class").__contains__):
        obj = scene.object(index)
        if not isinstance(obj, (FunctionType, type)):
            continue
        module, qualname = obj.__module__, obj.__qualname__
        if not isinstance(module, str) or module in seen or module == "__main__" or "<" in qualname:
            continue
        loaded = sys.modules.get(module)
        found: Any = loaded.__dict__ if isinstance(loaded, ModuleType) else {}
        if found.get(qualname) is not obj or not _file_of(module).startswith(_installed_folders()):
            continue
        seen.add(module)
        message = f"{module}.{qualname} is pickled with its code, though {module} can be imported"
        yield scene.finding("FC310", index, message, f"cloudpickle.unregister_pickle_by_value({module})")


def _check_captures(scene: Scene) -> Iterator[Finding]:
    """FC301, FC311: the big captures that nothing more telling has been said of."""
    for capture in scene.captures:
        if capture.how is None or capture.retained_size < scene.min_size:
            continue
        if any(capture.path.startswith(path) for path in scene.taken):
            continue
        file = f" at {capture.file}" + (f":{capture.line}" if capture.line is not None else "") if capture.file else ""
        name = capture.name or "it"
        by = capture.by or capture.path
        where = f"{capture.what}: captured as {capture.how} `{name}` by {by}{file}"
        size = capture.retained_size
        if capture.how == "global" and by.count("<global ") >= 1:
            helper = _last(by)
            yield Finding(
                "FC311", WARNING, capture.path, size, f"{where}, which {_root_of(by)} calls",
                f"{helper}(…, {name}): give it `{name}` as an argument",
            )  # fmt: skip
        else:
            yield Finding("FC301", WARNING, capture.path, size, where, _instead_of_capture(capture, name))


def _root_of(path: str) -> str:
    return path.partition("<")[0] or path


def _instead_of_capture(capture: Capture, name: str) -> str:
    inside = short_name(_last(capture.by)) if capture.by else "the function"
    if capture.how == "self":
        return f"a function instead of the method, with what it needs of {capture.captured_type} as arguments"
    if capture.how == "default":
        return f"def {inside}(…, {name}=None), and load `{name}` inside where it is None"
    if capture.how == "class attribute":
        return f"set {name} in __init__, or load it where it is used"
    return f"{name}_ref = ray.put({name}) outside, {name} = ray.get({name}_ref) inside {inside}"


def _check_tune(scene: Scene) -> Iterator[Finding]:
    if scene.x.graph.payload_size < scene.min_size or scene.x.subject(0).type != "function":
        return
    call = Call(scene.x, 0)
    code = call.argument(0)
    args = Call(scene.x, scene.x.reader.resolve(code.index)).args if isinstance(code, At) else []
    names = args[9] if len(args) in (16, 18) else None
    first = scene.x.reader.sequence(names.index, 1) if isinstance(names, At) else []
    if first and scene.x.reader.string(first[0]) == "config":
        size = format_size(scene.x.graph.payload_size)
        message = f"as a Tune trainable with num_samples >= 2 its {size} are exported twice"
        own = scene.x.subject(0).name or "train"
        yield scene.finding("FC312", 0, message, f"tune.with_parameters({own}, data=data)")


CHECKS: Final[Mapping[str, Check]] = {
    "FC101": _check_unpicklable,
    "FC102": _check_broken,
    "FC201": _check_handles,
    "FC202": _check_handles,
    "FC203": _check_names,
    "FC204": _check_names,
    "FC205": _check_names,
    "FC206": _check_gpu_tensors,
    "FC207": _check_memory_maps,
    "FC208": _check_text_files,
    "FC209": _check_local_paths,
    "FC302": _check_captured_self,
    "FC303": _check_duplicates,
    "FC304": _check_arrays,
    "FC305": _check_tensors,
    "FC306": _check_arrow,
    "FC307": _check_arrays,
    "FC308": _check_lists,
    "FC309": _check_arrays,
    "FC310": _check_code_by_value,
    "FC301": _check_captures,
    "FC311": _check_captures,
    "FC312": _check_tune,
}
"""Code -> its check, in the order in which they run. Some find several codes."""


def describe_rules() -> str:
    """The documentation of all rules, in Markdown."""
    lines = [
        "# Rules",
        "",
        "What `fastcap analyze` reports under *Findings*. `fastcap rule CODE` prints one of them; `--select` and",
        "`--ignore` take codes or the beginnings of codes. This page is made from the table in `fastcap/findings.py`.",
        "",
        "| code | severity | what |",
        "|---|---|---|",
        *(f"| [{rule.code}](#{rule.code.lower()}) | {rule.severity} | {rule.title} |" for rule in RULES.values()),
    ]
    for rule in RULES.values():
        lines += ["", f"## {rule.code}", "", describe_rule(rule.code)]
    return "\n".join(lines) + "\n"


def describe_rule(code: str) -> str:
    """One rule in a few sentences; ``KeyError`` if there is none with this code."""
    rule = RULES[code]
    return f"**{rule.title}** ({rule.severity})\n\n{rule.explanation}\n\nInstead: {rule.replacement}"
