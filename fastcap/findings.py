"""What will fail or hurt, and what to write instead: all findings about one payload.

`CHECKS` joins the codes of `fastcap.rules` with what finds them. A check is a generator of findings for one code or a
few related ones; those for FC1 are here, with the stand-ins that an analysis writes for what cannot be pickled.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

from fastcap import fidelity, portability, waste
from fastcap.explain import TABLE, UNPICKLABLE, Call, Failure, Origin, canonical, short_name
from fastcap.inert import DICTS, LISTS, SETS
from fastcap.report import Finding
from fastcap.rules import ERROR, NOTE, RULES, WARNING
from fastcap.scene import MIN_SIZE, NODES, Check, Live, Scene, captured_by, class_name

__all__ = ["CHECKS", "MIN_SIZE", "RULES", "Failures", "Live", "Scene", "Unpicklable", "find_all", "handle_reducers"]

_ORDER: Final = {ERROR: 0, WARNING: 1, NOTE: 2}


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


def find_all(scene: Scene) -> tuple[Finding, ...]:
    """The findings about one payload, worst first."""
    found: dict[str, list[Finding]] = {}
    for check in dict.fromkeys(CHECKS.values()):
        for finding in check(scene):
            if not scene.is_one_more(finding.code):
                scene.found[finding.code] = scene.found.get(finding.code, 0) + 1
                found.setdefault(finding.code, []).append(finding)
    for code, count in scene.more.items():
        last = found[code][-1]
        rest = f"{count:,} more {code}" if count else f"more {code} are not looked for"
        found[code][-1] = replace(last, message=f"{last.message} [{rest}]")
    everything = itertools.chain.from_iterable(found.values())
    return tuple(sorted(everything, key=lambda each: (_ORDER[each.severity], -each.size, each.code, each.path)))


# --- FC1: cannot be pickled ------------------------------------------------------------------------------------------


def _check_unpicklable(scene: Scene) -> Iterator[Finding]:
    if scene.live is None or not scene.live.failures:
        return
    culprits: dict[int, list[int]] = {}
    for index in scene.x.graph.select(b"c", 0, 2 * NODES):
        if scene.x.reader.global_name(index) == UNPICKLABLE:
            stand_in = scene.x.reader.view(index).parent
            culprits.setdefault(_culprit(scene, stand_in), []).append(stand_in)
    for culprit, stand_ins in culprits.items():
        if scene.is_one_more("FC101"):
            continue
        failure = _failure_at(scene, stand_ins[0])
        if failure is None:
            continue
        kind = failure.type
        text = f"{kind} cannot be pickled ({failure.error})"
        if "changed size during iteration" in failure.error:
            text = f"{kind} changes while it is pickled ({failure.error})"
        elif culprit != stand_ins[0]:
            kind = class_name(scene, culprit) or scene.x.subject(culprit).type
            text = f"{kind} cannot be pickled: it holds {failure.type} ({failure.error})"
        origin = scene.x.origin(culprit)
        message = text + captured_by(scene, culprit, origin)
        yield scene.finding("FC101", culprit, message, _instead_of_unpicklable(scene, culprit, origin, kind), size=0)


def _failure_at(scene: Scene, stand_in: int) -> Failure | None:
    number = Call(scene.x, stand_in).argument(0)
    failures = scene.live.failures if scene.live is not None else ()
    return failures[number] if isinstance(number, int) and 0 <= number < len(failures) else None


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
        name = class_name(scene, link)
        if name is not None and name.partition(".")[0] in sys.stdlib_module_names and canonical(name) not in TABLE:
            if not name.startswith(("__main__.", "builtins.")):
                culprit = link
        elif scene.x.subject(link).type not in _THROUGH:
            break
    return culprit


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


def _check_broken(scene: Scene) -> Iterator[Finding]:
    if scene.live is not None and scene.live.broken is not None:
        instead = f"in the class of {scene.live.broken_at or scene.path(0)}: a __reduce__ whose parts get smaller"
        yield scene.finding("FC102", 0, scene.live.broken, instead, size=0)


# CPython's C pickler, and so cloudpickle's, recurses: once for each object, once more for the entries of a list, dict
# or set. It raises at the recursion limit, from 3.12 on at one for C code that is fixed when CPython is built
# (Py_C_RECURSION_LIMIT, in 3.12 at least 1500; nobody can ask for it).
_DEEPEST: Final = 10_000 if sys.version_info >= (3, 13) else 1500 if sys.version_info >= (3, 12) else None
_TWO_LEVELS: Final = DICTS | LISTS | SETS
_VISITED: Final = 20_000  # nodes at most in the search for a deep one


def _check_nesting(scene: Scene) -> Iterator[Finding]:
    if scene.live is None or len(scene.x.graph) < 300:
        return
    chain = _deep_chain(scene, _DEEPEST or sys.getrecursionlimit())
    if not chain:
        return
    heads = list(dict.fromkeys(head for head in map(scene.head, chain[:64]) if head is not None))
    labels = [scene.x.label(head) for head in heads]
    repeated = set(labels[len(labels) // 2 :])
    first = next((head for head, label in zip(heads, labels) if label in repeated), chain[0])
    flavor = scene.live.flavor
    message = (
        f"nested {len(chain):,} nodes deep or more below this: {flavor}.dumps raises PicklingError (Could not pickle "
        f"object as excessively deep recursion required), fastcap.dumps does not"
    )
    yield scene.finding("FC103", first, message, f'fastcap.install("{flavor}")  # or fastcap.dumps', size=0)


def _deep_chain(scene: Scene, limit: int) -> list[int]:
    """Nodes from the root to one that lies deeper than a pickler that recurses can go; empty if there is none.

    Depth first, into children with so many nodes that one of them can be deep enough.
    """
    reader = scene.x.reader
    chain: list[int] = []
    weights: list[int] = []
    ways = [iter((0,))]
    weight = visited = 0
    while ways and visited < _VISITED:
        index = next(ways[-1], None)
        if index is None:
            ways.pop()
            if chain:
                chain.pop()
                weight -= weights.pop()
            continue
        visited += 1
        view = reader.view(index)
        cost = 2 if view.op in _TWO_LEVELS else 1
        if weight + cost > limit:
            return [*chain, index]
        needed = (limit - weight - cost) // 2
        if view.count <= needed:
            continue
        chain.append(index)
        weights.append(cost)
        weight += cost
        edges = scene.x.graph.edges(index, needed, _WIDE, False)
        ways.append(iter([edge.target for edge in edges]))
    return []


_WIDE: Final = 1000  # children of a node that are looked at


CHECKS: Final[Mapping[str, Check]] = {
    "FC101": _check_unpicklable,
    "FC102": _check_broken,
    "FC103": _check_nesting,
    "FC201": portability.check_handles,
    "FC202": portability.check_handles,
    "FC203": portability.check_names,
    "FC204": portability.check_names,
    "FC205": portability.check_names,
    "FC206": portability.check_gpu,
    "FC207": portability.check_memory_maps,
    "FC208": portability.check_text_files,
    "FC209": portability.check_local_paths,
    "FC210": fidelity.check_classes,
    "FC211": fidelity.check_left_out,
    "FC212": fidelity.check_submodules,
    "FC213": fidelity.check_variables,
    "FC214": portability.check_process_bound,
    "FC215": portability.check_python_version,
    "FC302": waste.check_captured_self,
    "FC303": waste.check_duplicates,
    "FC304": waste.check_arrays,
    "FC305": waste.check_tensors,
    "FC306": waste.check_arrow,
    "FC307": waste.check_arrays,
    "FC308": waste.check_lists,
    "FC309": waste.check_arrays,
    "FC310": waste.check_code_by_value,
    "FC301": waste.check_captures,
    "FC311": waste.check_captures,
    "FC312": waste.check_tune,
    "FC313": waste.check_documentation,
}
"""Code -> its check, in the order in which they run. Some find several codes."""
