"""What changed between two reports, so that the changes add up to the difference of the payloads.

Both trees are walked down from the root together. Every byte of either payload is counted in exactly one place: with
an object that both have, with a part that only one of them has, in the ``[N more]`` row of a parent, or as overhead.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from fastcap.report import NodeRow, Report, parse_size

FORMAT = 1
"""Version of the dictionary that `Diff.to_dict` makes."""

_LEAST_MOVED = 1024  # bytes from which on a part that went and one that came are compared
_SEARCHED = 100_000  # nodes behind a "[N more]" row up to which it is searched for a part
_NAMED = 5  # parts that cannot be pickled that are named
_SAME_SIZE = 64  # bytes by which the memo references in a moved part may change its size

Kind = Literal["came", "went", "grew", "shrank", "moved"]


@dataclass(frozen=True, slots=True)
class Growth:
    """By how much a payload may grow: so many bytes, or so many percent of what it was."""

    text: str  # as the user wrote it
    size: int = 0
    percent: float | None = None

    def allows(self, old_size: int, new_size: int) -> bool:
        """Whether a payload of ``old_size`` bytes may have become one of ``new_size``."""
        limit = self.size if self.percent is None else old_size * self.percent / 100
        return new_size - old_size <= limit


def parse_growth(text: str) -> Growth:
    """``1MiB`` or ``10%``; ``ValueError`` for anything else."""
    shown = text.strip()
    if not shown.endswith("%"):
        return Growth(shown, size=parse_size(shown))
    if not re.fullmatch(r"\d{1,9}(\.\d{0,9})?\s*%", shown, re.ASCII):
        raise ValueError(f"{text!r} is no growth: write 10% or a size such as 1MiB")
    return Growth(shown, percent=float(shown[:-1]))


@dataclass(frozen=True, slots=True)
class Change:
    """A part whose size is another one now; sizes are in bytes, and 0 where the part is not.

    ``grew`` and ``shrank`` are about an object that both payloads have, and count what it holds itself: what is below
    it has changes of its own. ``came``, ``went`` and ``moved`` count everything below the part as well.
    """

    kind: Kind
    path: str  # where it is now; of a part that went, where it was
    type: str
    what: str
    old_size: int
    new_size: int
    delta: int  # new_size - old_size
    old_path: str | None = None  # where a part that moved was
    old_type: str | None = None  # of an object that is of another type or description now: those it had
    old_what: str | None = None


@dataclass(frozen=True, slots=True)
class TypeChange:
    """Bytes of one type in both payloads."""

    type: str
    old_count: int
    new_count: int
    old_size: int
    new_size: int
    delta: int


@dataclass(frozen=True)
class Diff:
    """What changed from one payload to another.

    The ``delta`` of all ``changes`` and ``overhead_delta`` add up to ``delta``, which is ``new_size - old_size``; so do
    those of all ``types`` and ``overhead_delta``. Both are sorted by the size of the delta, biggest first.
    """

    old_target: str
    new_target: str
    old_size: int
    new_size: int
    delta: int
    overhead_delta: int
    changes: tuple[Change, ...]
    types: tuple[TypeChange, ...]
    notes: tuple[str, ...] = field(default=())

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; ``format`` is `FORMAT`."""
        plain = {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}
        return {"format": FORMAT, **plain}


def compare(old: Report, new: Report) -> Diff:
    """What changed from ``old`` to ``new``; the names of their roots do not matter.

    A path that one report does not show is looked up in it. Where that is not possible, for a report that was read back
    from JSON and below an object with very many parts, a part that may be among those that the report sums up in an
    ``[N more]`` row is compared with that row. Raises ``ValueError`` for a report whose rows do not add up.
    """
    for report in (old, new):
        rest = report.payload_size - report.overhead
        if rest != sum(row.self_size for row in report.nodes) or rest != sum(row.size for row in report.types):
            raise ValueError(f"the rows of the report on {report.target} do not add up to its payload")
    old_root, new_root = _tree(old), _tree(new)
    walk = _Comparison()
    if old_root is not None and new_root is not None:
        walk.compare(old_root, new_root)
    else:
        walk.came += [new_root] if new_root else []
        walk.went += [old_root] if old_root else []
    changes = [*walk.changes, *_moves(walk.went, walk.came)]
    changes = [change for change in changes if change.delta or change.kind == "moved"]
    notes = [_incomplete(name, report) for name, report in (("OLD", old), ("NEW", new)) if report.unpicklable]
    notes += [
        f"{name} is a saved report: what it sums up in [N more] rows has no paths to compare"
        for name, report in (("OLD", old), ("NEW", new))
        if report.find_row is None and any(row.type == "more" for row in report.nodes)
    ]
    return Diff(
        old_target=old.target,
        new_target=new.target,
        old_size=old.payload_size,
        new_size=new.payload_size,
        delta=new.payload_size - old.payload_size,
        overhead_delta=new.overhead - old.overhead,
        changes=tuple(sorted(changes, key=lambda change: (-abs(change.delta), change.path))),
        types=tuple(_compare_types(old, new)),
        notes=tuple(notes),
    )


def _incomplete(name: str, report: Report) -> str:
    """What to know of a payload that cannot be made."""
    paths = [row.path for row in report.unpicklable]
    shown = ", ".join(paths[:_NAMED]) + (f" and {len(paths) - _NAMED:,} more" if len(paths) > _NAMED else "")
    parts = "one part" if len(paths) == 1 else f"{len(paths):,} parts"
    return f"{name} cannot be pickled, because of {parts}: {shown}; its sizes are those without"


# ---- trees


@dataclass(slots=True, eq=False)
class _Part:
    """An object of one report. ``size`` is what is counted under it: its own bytes, ``more``, and its ``parts``."""

    report: Report
    row: NodeRow
    size: int
    more: int = 0  # bytes of the "[N more]" row
    more_row: NodeRow | None = None
    parts: dict[tuple[str, int], _Part] = field(default_factory=dict)  # by label, and which one of that label
    can_look_up: bool = True  # whether the report can be asked for what is below, in reasonable time

    def look_up(self, other: _Part, of: _Part) -> _Part | None:
        """The part that corresponds to ``other``, a part of ``of``, among those that the report does not show."""
        if not self.can_look_up or not self.more or not other.row.path.startswith(of.row.path):
            return None
        row = self.report.find(self.row.path + other.row.path[len(of.row.path) :])
        if row is None or not 0 < row.subtree_size <= self.more:
            return None
        own_size = min(row.self_size, row.subtree_size)
        self.more -= row.subtree_size
        can_look_up = row.count <= _SEARCHED
        return _Part(self.report, row, row.subtree_size, row.subtree_size - own_size, can_look_up=can_look_up)

    def may_hide(self, part: _Part) -> bool:
        """Whether ``part`` of another report could be one of those that this one sums up in its "[N more]" row."""
        if self.can_look_up:
            return False
        # What is shown of an object is the biggest of its parts.
        smallest_shown = min((shown.size for shown in self.parts.values()), default=self.more)
        return part.size <= min(self.more, smallest_shown)


def _tree(report: Report) -> _Part | None:
    """The root of a report's rows; None if it has no rows."""
    parts: list[_Part] = []
    for row in report.nodes:
        part = _Part(report, row, row.self_size, can_look_up=report.find_row is not None)
        parts.append(part)
        if row.parent is None:
            continue
        above = parts[row.parent]
        if row.type == "more":
            above.more += row.self_size
            above.more_row = row
            continue
        number = 0
        while (row.label, number) in above.parts:
            number += 1
        above.parts[row.label, number] = part
    for part in parts:
        # A search for what is below starts at the root, and looks at all that is in its way.
        above_it = part if part.row.parent is None else parts[part.row.parent]
        few = part.more_row is None or part.more_row.count <= _SEARCHED
        part.can_look_up = above_it.can_look_up and few
    for part in reversed(parts):  # preorder: parts come before what they are part of
        if part.row.parent is not None:
            parts[part.row.parent].size += part.size
    return parts[0] if parts else None


class _Comparison:
    """Goes down two trees together and sorts what it meets into changes, and into what came and went."""

    def __init__(self) -> None:
        self.changes: list[Change] = []
        self.came: list[_Part] = []
        self.went: list[_Part] = []

    def compare(self, old_root: _Part, new_root: _Part) -> None:
        pending = [(old_root, new_root)]
        while pending:
            old, new = pending.pop()
            old_more, new_more = old.more, new.more
            pairs, went, came = _pair(old, new)
            # What was looked up is out of "more" now.
            old_size = old.size - old_more - sum(part.size for part in old.parts.values())
            new_size = new.size - new_more - sum(part.size for part in new.parts.values())
            self.add(new.row.path, old.row, new.row, old_size, new_size)
            went, hidden_size = _hidden(went, new)
            self.went += went
            old_more = old.more + hidden_size
            came, hidden_size = _hidden(came, old)
            self.came += came
            new_more = new.more + hidden_size
            self.add(f"{new.row.path}<more>", old.more_row, new.more_row, old_more, new_more)
            pending += reversed(pairs)

    def add(self, path: str, old: NodeRow | None, new: NodeRow | None, old_size: int, new_size: int) -> None:
        row = new or old
        type_name, what = (row.type, row.what) if row else ("more", "[more]")
        changed = old is not None and (old.type, old.what) != (type_name, what)
        self.changes.append(
            Change(
                kind="grew" if new_size > old_size else "shrank",
                path=path,
                type=type_name,
                what=what,
                old_size=old_size,
                new_size=new_size,
                delta=new_size - old_size,
                old_type=old.type if old and changed else None,
                old_what=old.what if old and changed else None,
            )
        )


def _pair(old: _Part, new: _Part) -> tuple[list[tuple[_Part, _Part]], list[_Part], list[_Part]]:
    """Parts that both objects have, those that only the old one has, and those that only the new one has."""
    pairs, went, came = [], [], []
    for key, part in new.parts.items():
        other = old.parts.get(key) or old.look_up(part, new)
        if other is None:
            came.append(part)
        else:
            pairs.append((other, part))
    for key, part in old.parts.items():
        if key in new.parts:
            continue
        other = new.look_up(part, old)
        if other is None:
            went.append(part)
        else:
            pairs.append((part, other))
    return pairs, went, came


def _hidden(parts: list[_Part], other: _Part) -> tuple[list[_Part], int]:
    """Parts that are not in ``other`` for certain, and the bytes of the rest, which its "[N more]" row may hold."""
    certain = [part for part in parts if not other.may_hide(part)]
    return certain, sum(part.size for part in parts) - sum(part.size for part in certain)


# ---- parts that moved


def _moves(went: list[_Part], came: list[_Part]) -> Iterator[Change]:
    """Changes for parts of only one payload: what has the same type, description and size in both has moved."""
    everything = list(_all_parts([*went, *came]))
    sizes = {id(part): part.size for part in everything}  # without what has moved
    above = {id(below): part for part in everything for below in part.parts.values()}
    candidates: dict[tuple[str, str], deque[_Part]] = {}
    for part in _by_size(went):
        candidates.setdefault((part.row.type, part.row.what), deque()).append(part)
    for part in _by_size(came):
        if sizes[id(part)] != part.size:
            continue
        waiting = candidates.get((part.row.type, part.row.what), deque())
        # Both come biggest first: what is too big for this part is too big for all that follow.
        while waiting and (sizes[id(waiting[0])] != waiting[0].size or waiting[0].size > part.size + _SAME_SIZE):
            waiting.popleft()
        if not waiting or waiting[0].size < part.size - _SAME_SIZE:
            continue
        old = waiting.popleft()
        yield Change(
            "moved", part.row.path, part.row.type, part.row.what, old.size, part.size, part.size - old.size,
            old_path=old.row.path,
        )  # fmt: skip
        for moved in (old, part):
            holder = above.get(id(moved))
            while holder is not None:
                sizes[id(holder)] -= moved.size
                holder = above.get(id(holder))
            sizes.update((id(below), 0) for below in _all_parts([moved]))
    for part in went:
        yield _one_sided("went", part, sizes[id(part)], 0)
    for part in came:
        yield _one_sided("came", part, 0, sizes[id(part)])


def _one_sided(kind: Kind, part: _Part, old_size: int, new_size: int) -> Change:
    return Change(kind, part.row.path, part.row.type, part.row.what, old_size, new_size, new_size - old_size)


def _all_parts(parts: Iterable[_Part]) -> Iterator[_Part]:
    pending = list(parts)
    while pending:
        part = pending.pop()
        yield part
        pending += part.parts.values()


def _by_size(parts: list[_Part]) -> list[_Part]:
    found = [part for part in _all_parts(parts) if part.size >= _LEAST_MOVED]
    return sorted(found, key=lambda part: -part.size)


# ---- types


def _compare_types(old: Report, new: Report) -> list[TypeChange]:
    counted: dict[str, list[int]] = {}
    for shift, report in enumerate((old, new)):
        for row in report.types:
            cells = counted.setdefault(row.type, [0, 0, 0, 0])
            cells[shift] += row.count
            cells[2 + shift] += row.size
    rows = [
        TypeChange(name, old_count, new_count, old_size, new_size, new_size - old_size)
        for name, (old_count, new_count, old_size, new_size) in counted.items()
        if (old_count, old_size) != (new_count, new_size)
    ]
    return sorted(rows, key=lambda row: (-abs(row.delta), row.type))
