"""What an analysis found, as plain data: no rendering, nothing native.

Every size is in bytes. A `Report` is what `fastcap.analyze` and `fastcap.scan` return; `Report.to_dict` is the JSON of
the command line and `Report.from_dict` reads it back.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from typing import IO, Any, Literal

FORMAT = 1
"""Version of the dictionary that `Report.to_dict` makes; `Report.from_dict` refuses others."""

_MAX_SAVED_SIZE = 256 * 1024**2  # bytes of JSON that are read back as a report

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")


def format_size(size: float, *, exact: bool = False) -> str:
    """``838860800`` as ``800.0 MiB``, with ``exact`` as ``800.0 MiB (838,860,800 B)``; binary units."""
    value, unit = float(size), 0
    while abs(value) >= 1023.95 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    whole = f"{size:,} B" if isinstance(size, int) else f"{size:,.0f} B"  # a float is exact up to 2**53 only
    text = whole if unit == 0 else f"{value:,.1f} {_UNITS[unit]}"
    return f"{text} ({whole})" if exact and unit else text


_SIZE = re.compile(
    r"(\d{1,3}(?:,\d{3})+|\d{1,30}|(?=\.\d))(?:\.(\d{0,30}))?(?:e\+?(\d{1,2}))?\s*([a-z]{0,5})", re.ASCII
)
_MULTIPLIERS = {"": 1, "b": 1, "byte": 1, "bytes": 1} | {
    letter + suffix: (1000 if suffix == "b" else 1024) ** power
    for power, letter in enumerate("kmgtpe", start=1)
    for suffix in ("", "i", "ib", "b")
    if letter + suffix != "e"  # `1e` is a number cut short
}
_MAX_SIZE = 2**63 - 1


def parse_size(text: str) -> int:
    """``10MiB``, ``10 MB``, ``512k``, ``1.5G`` or ``1e6`` as a number of bytes.

    ``MiB``, ``Mi`` and a bare ``M`` are binary (1024**2), ``MB`` is decimal (1000**2), as in GNU's tools; letter case
    does not matter. ``ValueError`` for anything else, for a negative size and for 2**63 bytes or more.
    """
    match = _SIZE.fullmatch(text.strip().lower())
    multiplier = _MULTIPLIERS.get(match[4]) if match else None
    if match is None or multiplier is None:
        shown = text if len(text) <= 40 else text[:39] + "…"
        raise ValueError(f"{shown!r} is not a size: write 10MiB, 10 MB, 512k, 1e6 or a number of bytes")
    fraction = match[2] or ""
    digits = int(f"0{match[1]}{fraction}".replace(",", ""))
    size: int = digits * 10 ** int(match[3] or 0) * multiplier // 10 ** len(fraction)
    if size > _MAX_SIZE:
        raise ValueError(f"{text!r} is more than any payload: write 10MiB, 10 MB, 512k, 1e6 or a number of bytes")
    return size


def as_size(size: int | str) -> int:
    """A size in bytes as it is, or ``"10 MiB"`` in bytes. ``TypeError`` or ``ValueError`` for what is no size."""
    if isinstance(size, str):
        return parse_size(size)
    if not isinstance(size, int) or isinstance(size, bool):
        raise TypeError(f"a size is a number of bytes or a text such as '10 MiB', not {type(size).__name__}")
    if size < 0:
        raise ValueError(f"a size cannot be negative: {size}")
    return size


@dataclass(frozen=True, slots=True)
class ViewOptions:
    """Which part of the graph a report shows. What is left out stays in the totals, in ``[N more]`` rows."""

    depth: int | None = None  # levels below the root; None: as analysis sees fit
    top: int | None = None  # rows per parent; None: as analysis sees fit
    sort: Literal["retained", "self", "subtree"] = "retained"  # order of the rows of one parent, biggest first
    min_size: int | None = None  # rows whose sort size is below this many bytes go into the "[N more]" row


@dataclass(frozen=True, slots=True)
class NodeRow:
    """One row of the tree, in preorder. A row whose ``type`` is ``"more"`` stands for ``count`` nodes not shown."""

    path: str
    label: str  # last step of the path; the root's whole path
    parent: int | None  # row number of the parent, None for the root
    depth: int
    type: str
    what: str
    self_size: int
    subtree_size: int
    retained_size: int
    shared_by: tuple[str, ...] = ()  # paths of further holders of a memo reference to this node (at most 10)
    count: int = 1  # pickle nodes behind this row


@dataclass(frozen=True, slots=True)
class Capture:
    """A heavy part of the payload, and the code that dragged it in. Sorted by ``retained_size``."""

    path: str
    type: str
    what: str
    self_size: int
    subtree_size: int
    retained_size: int
    shared_by: tuple[str, ...] = ()
    how: str | None = None  # closure, global, default, self, class attribute, argument; None: plain data
    name: str | None = None  # the captured variable: `self` in train_func<closure self>.data
    captured: str | None = None  # path of what the variable holds: train_func<closure self>
    captured_type: str | None = None  # its type: Trainer
    by: str | None = None  # path of the function or class that captures
    file: str | None = None
    line: int | None = None


@dataclass(frozen=True, slots=True)
class TypeRow:
    """Bytes by type; the ``size``s of all rows and the overhead add up to the payload."""

    type: str
    count: int
    size: int


@dataclass(frozen=True, slots=True)
class Limit:
    """A size at which something warns or fails, against the payload's size."""

    name: str
    size: int
    ratio: float  # payload size / limit
    exceeded: bool
    effect: str  # "warning" or "error"
    source: str  # where the number comes from


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that will fail or hurt, and what to write instead."""

    code: str
    severity: str  # "error", "warning" or "note"
    path: str
    size: int
    message: str
    replacement: str | None = None


@dataclass(frozen=True, slots=True)
class Details:
    """The parts of a report that take work to make."""

    nodes: tuple[NodeRow, ...]
    captures: tuple[Capture, ...]
    types: tuple[TypeRow, ...]
    limits: tuple[Limit, ...]
    findings: tuple[Finding, ...]


@dataclass(frozen=True)
class Report:
    """Sizes of one payload, and on demand what they consist of.

    ``overhead`` is the size of PROTO, FRAME and STOP opcodes; it and the ``self_size`` of all rows of ``nodes`` add up
    to ``payload_size``, which is ``stream_size`` plus ``buffer_size`` (out-of-band buffers, PEP 574).
    """

    target: str
    type: str
    what: str
    payload_size: int
    stream_size: int
    buffer_size: int
    overhead: int
    protocol: int
    node_count: int
    pickle_count: int = 1
    notes: tuple[str, ...] = ()  # facts about how the report was made, such as "imported script.py"
    make_details: Callable[[], Details] = field(repr=False, compare=False, kw_only=True)
    find_row: Callable[[str], NodeRow | None] | None = field(default=None, repr=False, compare=False, kw_only=True)

    @cached_property
    def details(self) -> Details:
        """Tree, captures, types, limits and findings; made at the first access."""
        return self.make_details()

    @property
    def nodes(self) -> tuple[NodeRow, ...]:
        """The tree in preorder; ``"more"`` rows carry what is not shown."""
        return self.details.nodes

    @property
    def captures(self) -> tuple[Capture, ...]:
        """The heaviest parts, biggest first."""
        return self.details.captures

    @property
    def types(self) -> tuple[TypeRow, ...]:
        """Bytes by type, biggest first."""
        return self.details.types

    @property
    def limits(self) -> tuple[Limit, ...]:
        """Known limits, exceeded or not."""
        return self.details.limits

    @property
    def findings(self) -> tuple[Finding, ...]:
        """What is wrong, worst first."""
        return self.details.findings

    @property
    def unpicklable(self) -> tuple[Finding, ...]:
        """The findings that say why the object cannot be pickled; the sizes are those without what they are about."""
        return tuple(row for row in self.findings if row.severity == "error" and row.code.startswith("FC1"))

    def find(self, path: str) -> NodeRow | None:
        """The node at a path as the report writes them (``train_func<closure self>.data``), shown in ``nodes`` or not.

        None if there is none; a report read back with `from_dict` knows only the rows it holds.
        """
        if self.find_row is not None:
            return self.find_row(path)
        return next((row for row in self.nodes if row.path == path), None)

    def changed(self, **changes: Any) -> Report:
        """A plain report of the same facts, but for the changes."""
        return Report(**{each.name: getattr(self, each.name) for each in fields(Report)} | changes)

    def with_budget(self, name: str, size: int, source: str) -> Report:
        """The report with a limit of the user's as the first of its limits, in the place of one of the same name."""
        details = self.details
        budget = Limit(name, size, self.payload_size / max(size, 1), self.payload_size > size, "error", source)
        limits = (budget, *(limit for limit in details.limits if limit.name != name))
        return self.changed(make_details=lambda: replace(details, limits=limits))

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; ``format`` is `FORMAT`."""
        return {
            "format": FORMAT,
            "target": self.target,
            "type": self.type,
            "what": self.what,
            "payload_size": self.payload_size,
            "stream_size": self.stream_size,
            "buffer_size": self.buffer_size,
            "overhead": self.overhead,
            "protocol": self.protocol,
            "node_count": self.node_count,
            "pickle_count": self.pickle_count,
            "notes": list(self.notes),
            "captures": [_plain(row) for row in self.captures],
            "nodes": [_plain(row) for row in self.nodes],
            "types": [_plain(row) for row in self.types],
            "limits": [_plain(row) for row in self.limits],
            "findings": [_plain(row) for row in self.findings],
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Report:
        """The report that ``to_dict`` described; ``ValueError`` says what is missing or of another format."""
        if not isinstance(data, dict):
            raise ValueError(f"not a fastcap report: it is a {type(data).__name__}, not a dict")
        if data.get("format") != FORMAT:
            raise ValueError(f"not a fastcap report of format {FORMAT}: its 'format' is {data.get('format')!r}")

        def rows(key: str, row: type[Any]) -> tuple[Any, ...]:
            if not isinstance(data[key], (list, tuple)):
                raise TypeError(f"{key} is no list")
            return tuple(row(**_checked(row, item, f"{key}[{number}]")) for number, item in enumerate(data[key]))

        try:
            details = Details(
                rows("nodes", NodeRow),
                rows("captures", Capture),
                rows("types", TypeRow),
                rows("limits", Limit),
                rows("findings", Finding),
            )
            for number, node in enumerate(details.nodes):
                _check_place(details.nodes, number, node)
            top = {name: value for name, value in data.items() if name != "format" and not hasattr(Details, name)}
            return cls(**_checked(cls, top, "the report"), make_details=lambda: details)
        except (KeyError, TypeError) as error:
            reason = f"{error} is missing" if isinstance(error, KeyError) else str(error)
            raise ValueError(f"a fastcap report of format {FORMAT} that is damaged: {reason}") from error


def read_report(file: IO[bytes]) -> Report:
    """The report that was saved as JSON in a file; ``ValueError`` says why it is none."""
    text = file.read(_MAX_SAVED_SIZE + 1)
    if len(text) > _MAX_SAVED_SIZE:
        raise ValueError(f"it has more than {format_size(_MAX_SAVED_SIZE)}")
    try:
        return Report.from_dict(json.loads(text))
    except RecursionError as error:
        raise ValueError(str(error)) from error


def _plain(row: Any) -> dict[str, Any]:
    """The fields of one row as JSON gives them back: lists for tuples."""
    return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(row).items()}


def _is_size(value: object) -> bool:
    return type(value) is int and 0 <= value <= _MAX_SIZE


def _are_texts(value: object) -> bool:
    return isinstance(value, (list, tuple)) and all(type(item) is str for item in value)


_CHECKS: dict[str, Callable[[Any], bool]] = {  # by the annotation of a field
    "str": lambda value: type(value) is str,
    "str | None": lambda value: value is None or type(value) is str,
    "int": _is_size,
    "int | None": lambda value: value is None or _is_size(value),
    "float": lambda value: type(value) in (int, float),
    "bool": lambda value: type(value) is bool,
    "tuple[str, ...]": _are_texts,
}


def _checked(row: type[Any], item: Any, place: str) -> dict[str, Any]:
    """The fields of one row, each of the type that ``row`` declares for it; ``TypeError`` if one is not."""
    if not isinstance(item, dict):
        raise TypeError(f"{place} is no dict")
    declared = {each.name: str(each.type) for each in fields(row)}
    checked = {}
    for name, value in item.items():
        if name not in declared or declared[name] not in _CHECKS:
            raise TypeError(f"{place} has an unknown field {name!r}")
        if not _CHECKS[declared[name]](value):
            raise TypeError(f"{place}: {name!r} is not of type {declared[name]}")
        checked[name] = tuple(value) if declared[name].startswith("tuple") else value
    return checked


def _check_place(nodes: tuple[NodeRow, ...], number: int, node: NodeRow) -> None:
    """Rows come in preorder: a parent stands before its children and one level higher."""
    if number == 0 or node.parent is None:
        right = number == 0 and node.parent is None and node.depth == 0
    else:
        right = node.parent < number and node.depth == nodes[node.parent].depth + 1
    if not right:
        raise TypeError(f"nodes[{number}] is not below its parent")
