"""From a live object or a pickle to a `Report`: which parts are shown, which of them matter.

`analyze` and `scan` only measure; tree, captures and types are made when somebody looks at them.
"""

from __future__ import annotations

import heapq
import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fastcap._native.graph import Graph
from fastcap._native.scanner import Scanner, Tables
from fastcap.comparison import Diff, compare
from fastcap.explain import Explainer, Failure, Place
from fastcap.findings import Failures, find_all, handle_reducers
from fastcap.limits import limits_for
from fastcap.opening import Source, scan_source
from fastcap.paths import parse
from fastcap.pickling import DumpBroken, trace
from fastcap.report import Capture, Details, NodeRow, Report, TypeRow, ViewOptions, read_report
from fastcap.scene import MIN_SIZE, Live, Scene

MAX_ROWS = 400
"""Rows of the tree at most, ``[N more]`` rows not counted."""

_TOP = 20  # rows per parent unless asked for more
_DEPTH = 24  # levels unless asked for more
_SHARE = 1000  # rows of less than this fraction of the payload are not shown unless asked for
_CHILDREN = 64  # children of a node up to which all of them are looked at
_MANY_CHILDREN = 1024  # children that are looked at, at most, if they are big enough (or more are asked for)
_NONE = 1 << 62  # as a smallest size: no children
_FEW = 10  # so many parts may explain an object; more of them are nobody's fault but the object's
_EXPLAINED = 0.8  # of what an object retains, for its parts to be named in its place
_CAPTURES = 50
_LONG_CHAIN = 64  # objects that hold little but the next one: nested deeper than this, the first of them is named
_MACHINERY = ".__dataclass_fields__["  # what a path shows only if the object has no other: nobody wrote it
_TYPES = 2000  # distinct kinds of node that get a name


def analyze(
    obj: object,
    *,
    name: str | None = None,
    protocol: int | None = None,
    flavor: str = "cloudpickle",
    options: ViewOptions = ViewOptions(),  # noqa: B008 - frozen
) -> Report:
    """What pickling an object with cloudpickle would write, without keeping the bytes.

    ``name`` is the root of all paths (default: the ``__name__`` of a function or class, else ``obj``); ``flavor`` is
    the copy of cloudpickle to pickle with, one of `fastcap.pickling.FLAVORS`.

    What cannot be pickled does not raise, as it does in `fastcap.dumps`: each such object is a finding of severity
    "error" (FC101), and the sizes are those of a payload with short stand-ins. Ray's handles are recognised without
    being serialized by Ray. Until its details are looked at, a report keeps the objects alive that were pickled.
    Raises ValueError or ImportError for a flavor or protocol that is not there, MemoryError.
    """
    scanner = Scanner()
    failures = Failures()
    try:
        objects = trace(
            obj, scanner, protocol, flavor=flavor, on_unpicklable=failures.report, reducers=handle_reducers()
        )
        live = Live(objects, failures, flavor=flavor)
    except DumpBroken as broken:
        error = broken.__cause__
        scanner = Scanner()
        failures = Failures()
        number = failures.report(obj, error if isinstance(error, Exception) else broken)
        notes = " ".join(map(str, getattr(error, "__notes__", ())))
        place = re.search(r"while pickling (\S+?)<args>", notes)
        scanner.write(b"\x80\x04cfastcap.findings\nUnpicklable\nJ%b\x85R." % number.to_bytes(4, "little"))
        reason = f"pickling ended: {failures[number].error} {notes[:200]}".strip()
        where = place[1] if place is not None else None
        if where is not None and name is not None and where.startswith("obj"):
            where = name + where.removeprefix("obj")
        live = Live((), (), reason, where)
    return _report(Graph(scanner.finish()), name, options, live=live, failures=failures)


def scan(
    source: Source,
    *,
    name: str | None = None,
    buffers: Iterable[Any] | None = None,
    options: ViewOptions = ViewOptions(),  # noqa: B008 - frozen
    progress: Callable[[int, int | None], None] | None = None,
) -> Report:
    """What a pickle consists of; nothing in it is executed or imported.

    ``source`` is a path, a bytes-like object or a binary file object, plain or compressed (gzip, bz2, xz, lz4, zstd),
    or a file of ``joblib.dump`` or ``torch.save``. ``buffers`` are its out-of-band buffers (PEP 574) or their sizes in
    bytes. ``progress`` is called with (bytes done, bytes in all or None). Raises `fastcap.PayloadError` for what is no
    pickle.
    """
    tables, notes = scan_source(source, buffers=buffers, progress=progress)
    graph = Graph(tables)
    if graph.tail:
        notes = (*notes, f"bytes after the last pickle are no pickle: {graph.tail}")
    return _report(graph, name, options, notes, read=_reader_of(source))


def _reader_of(source: Source) -> Callable[[int, int], bytes | memoryview | None] | None:
    """How to read bytes of the stream again; of a compressed file what comes is not the stream, which callers check."""
    if isinstance(source, (bytes, bytearray, memoryview)):
        data = memoryview(source).cast("B")
        return lambda start, end: data[start:end]
    if not isinstance(source, (str, os.PathLike)):
        return None
    path = os.path.abspath(source)

    def read(start: int, end: int) -> bytes | None:
        try:
            with open(path, "rb") as file:
                file.seek(start)
                return file.read(end - start)
        except OSError:
            return None

    return read


def diff(old: Report | Source, new: Report | Source) -> Diff:
    """What changed from one payload to another, by path and by type.

    Each is a report, what `scan` takes, or the path of a report that was saved as JSON; for a live object give
    ``fastcap.analyze(obj)``. Raises `fastcap.PayloadError` for what is no pickle, ``ValueError`` for a damaged report.
    """
    return compare(_as_report(old), _as_report(new))


def _as_report(source: Report | Source) -> Report:
    if isinstance(source, Report):
        return source
    if not isinstance(source, (str, os.PathLike)):
        return scan(source)
    with open(source, "rb") as file:
        if file.peek(1)[:1] != b"{":  # no pickle begins with it: it is no opcode
            return scan(file).changed(target=os.fspath(source))
        try:
            return read_report(file)
        except ValueError as error:
            raise ValueError(f"{os.fspath(source)} is neither a pickle nor a saved report: {error}") from error


def report_on(tables: Tables) -> Report:
    """The report on what a scanner has read."""
    return _report(Graph(tables), None, ViewOptions())


def _report(
    graph: Graph,
    name: str | None,
    options: ViewOptions,
    notes: tuple[str, ...] = (),
    *,
    live: Live | None = None,
    failures: Sequence[Failure] = (),
    read: Callable[[int, int], bytes | memoryview | None] | None = None,
) -> Report:
    explainer = Explainer(graph, name, failures)

    def find(path: str) -> NodeRow | None:
        parsed = parse(path)
        if parsed.root != explainer.root_name:
            return None
        index = explainer.find(parsed.steps)
        if index is None:
            return None
        place = explainer.place(index)
        row = _row(explainer, index, None, len(parsed.steps))
        if place is not None and place.head == index:
            return row
        # written first somewhere inside another object, where it has no path of its own
        return replace(row, path=str(parsed), label=str(parsed.steps[-1]))

    kept = [live]  # let go of when the findings are made
    return _MeasuredReport(
        explainer,
        payload_size=graph.payload_size,
        stream_size=graph.stream_size,
        buffer_size=graph.buffer_size,
        overhead=graph.overhead,
        protocol=graph.protocol,
        node_count=len(graph),
        pickle_count=graph.pickle_count,
        notes=notes,
        make_details=lambda: _details(explainer, options, kept, read),
        find_row=find,
    )


class _MeasuredReport(Report):
    """A report that puts its root into words when they are asked for: sizes alone cost little more than pickling."""

    def __init__(self, explainer: Explainer, **facts: Any) -> None:
        for name, value in {"explainer": explainer, "pickle_count": 1, "notes": (), **facts}.items():
            object.__setattr__(self, name, value)

    def __getattr__(self, name: str) -> Any:
        if name not in ("target", "type", "what"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        explainer: Explainer = self.__dict__["explainer"]
        subject = explainer.subject(0)
        for known, value in (("target", explainer.path(0)), ("type", subject.type), ("what", subject.what)):
            object.__setattr__(self, known, value)
        return self.__dict__[name]


def _details(
    explainer: Explainer,
    options: ViewOptions,
    kept: list[Live | None],
    read: Callable[[int, int], bytes | memoryview | None] | None,
) -> Details:
    captures = tuple(find_captures(explainer))
    min_size = MIN_SIZE if options.min_size is None else max(options.min_size, 1)
    findings = find_all(Scene(explainer, kept[0], captures, read, min_size))
    kept[0] = None
    return Details(
        nodes=tuple(_Tree(explainer, options).rows()),
        captures=captures,
        types=tuple(count_types(explainer)),
        limits=limits_for(explainer.graph.payload_size),
        findings=findings,
    )


# --- the tree --------------------------------------------------------------------------------------------------------


def _row(explainer: Explainer, head: int, parent: int | None, depth: int, own_size: int | None = None) -> NodeRow:
    view = explainer.reader.view(head)
    subject = explainer.subject(head)
    if own_size is None:
        parts = explainer.parts(head, min_size=_NONE, limit=_CHILDREN)
        own_size = min(parts.own_size, view.retained_size)
    return NodeRow(
        path=explainer.path(head) or "",
        label=explainer.label(head),
        parent=parent,
        depth=depth,
        type=subject.type,
        what=subject.what,
        self_size=own_size,
        subtree_size=view.subtree_size,
        retained_size=view.retained_size,
        shared_by=explainer.holders(head),
        count=view.count,
    )


@dataclass(slots=True)
class _Shown:
    """An object that gets a row."""

    head: int
    depth: int
    own_size: int = 0
    own_count: int = 0
    lent: int = 0  # bytes of its own that leave the payload only with others, too: they go to the parent's "more" row
    below: list[_Shown] = field(default_factory=list)


class _Tree:
    """The rows of a report: the biggest objects first, until there are enough of them."""

    def __init__(self, explainer: Explainer, options: ViewOptions) -> None:
        self.explainer = explainer
        self.sort = options.sort
        self.depth = _DEPTH if options.depth is None else options.depth
        self.top = _TOP if options.top is None else options.top
        total = explainer.graph.payload_size
        self.min_size = max(1, total // _SHARE) if options.min_size is None else options.min_size
        limited = options.top is None and options.min_size is None
        self.max_rows = MAX_ROWS if limited else 100 * MAX_ROWS

    def rows(self) -> list[NodeRow]:
        root = _Shown(0, 0)
        self._choose(root)
        rows: list[NodeRow] = []
        open_rows: list[tuple[_Shown, int | None]] = [(root, None)]
        pending_more: dict[int, NodeRow] = {}
        while open_rows:
            shown, parent = open_rows.pop()
            if shown.head in pending_more:
                rows.append(pending_more.pop(shown.head))
                continue
            number = len(rows)
            row, more = self._make(shown, parent, number)
            rows.append(row)
            if more is not None:
                # A marker on the stack: the row comes when all rows below this object are written.
                marker = -1 - number
                pending_more[marker] = more
                open_rows.append((_Shown(marker, 0), number))
            shown.below.sort(key=self._sort_key)
            open_rows.extend((below, number) for below in reversed(shown.below))
        return rows

    def _choose(self, root: _Shown) -> None:
        """Look into the biggest objects first, so that a limit on rows cuts off the small ones."""
        explainer = self.explainer
        queue: list[tuple[int, int, _Shown]] = [(0, 0, root)]
        chosen: list[_Shown] = []
        count = 1
        while queue:
            _, _, shown = heapq.heappop(queue)
            view = explainer.reader.view(shown.head)
            most = max(_MANY_CHILDREN, self.top)
            parts = explainer.parts(shown.head, min_size=self.min_size, limit=_CHILDREN, most=most)
            shown.own_size = min(parts.own_size, view.retained_size)
            shown.lent = parts.own_size - shown.own_size
            shown.own_count = parts.own_count
            chosen.append(shown)
            if shown.depth >= self.depth:
                continue
            # By subtree size: what retains much may lie below what, for sharing, retains little.
            heads = [head for head in parts.heads if explainer.reader.view(head).subtree_size >= self.min_size]
            heads.sort(key=lambda head: (-self._size(head), -explainer.reader.view(head).subtree_size, head))
            for head in heads[: min(self.top, max(0, self.max_rows - count))]:
                below = _Shown(head, shown.depth + 1)
                shown.below.append(below)
                count += 1
                heapq.heappush(queue, (-explainer.reader.view(head).subtree_size, head, below))
        for shown in reversed(chosen):
            shown.below = [below for below in shown.below if below.below or -self._sort_key(below)[0] >= self.min_size]

    def _size(self, head: int) -> int:
        view = self.explainer.reader.view(head)
        return view.retained_size if self.sort == "retained" else view.subtree_size

    def _sort_key(self, shown: _Shown) -> tuple[int, int]:
        return (-shown.own_size if self.sort == "self" else -self._size(shown.head), shown.head)

    def _make(self, shown: _Shown, parent: int | None, number: int) -> tuple[NodeRow, NodeRow | None]:
        """The row of an object, and the row of what it does not show."""
        views = [self.explainer.reader.view(below.head) for below in shown.below]
        row = _row(self.explainer, shown.head, parent, shown.depth, shown.own_size)
        rest = row.subtree_size - row.self_size - shown.lent - sum(view.subtree_size for view in views)
        rest += sum(below.lent for below in shown.below)
        if rest == 0:
            return row, None
        count = max(1, row.count - shown.own_count - sum(view.count for view in views))
        label = f"[{count:,} more]"
        more = NodeRow(
            path=f"{row.path}<more>", label=label, parent=number, depth=shown.depth + 1, type="more", what=label,
            self_size=rest, subtree_size=rest, retained_size=rest, count=count,
        )  # fmt: skip
        return row, more


# --- captures --------------------------------------------------------------------------------------------------------


def find_captures(explainer: Explainer) -> list[Capture]:
    """The parts that make a payload big, biggest first.

    Down the dominator tree from the root: an object is named if its weight is its own or is spread over many parts; if
    a few of its parts make up most of it, they are looked at in its place.
    """
    total = explainer.graph.payload_size
    least = max(1, total // 100)
    found: set[int] = set()
    open_heads = [0]
    while open_heads and len(found) < _CAPTURES:
        head = _follow(explainer, open_heads.pop())
        parts = _few_parts(explainer, head)
        if parts:
            open_heads.extend(part for part in parts if explainer.reader.view(part).retained_size >= least)
        else:
            found.add(head)
    ordered = sorted(found, key=lambda head: (-explainer.reader.view(head).retained_size, head))
    return [_capture(explainer, head) for head in ordered]


def _follow(explainer: Explainer, head: int) -> int:
    """Down a chain of objects that hold little but the next one, to the first that does not."""
    chain = [head]
    while True:
        parts = _few_parts(explainer, chain[-1])
        if len(parts) != 1:
            return chain[-1]
        chain.append(parts[0])
        if len(chain) > _LONG_CHAIN:
            break
    # A linked list or the like: no link is to blame, but what leads to the first of them.
    repeated = {explainer.label(link) for link in chain[-_LONG_CHAIN // 2 :]}
    first = len(chain) - 1
    while first > 0 and explainer.label(chain[first]) in repeated:
        first -= 1
    return _End(chain[first])


class _End(int):
    """A head that is not looked into further."""


def _few_parts(explainer: Explainer, head: int) -> list[int]:
    """The parts that make up most of what an object retains, if they are few; else nothing."""
    if isinstance(head, _End):
        return []
    place = explainer.place(head)
    if place is None or place.route is None or explainer.subject(head).whole:
        return []
    retained = explainer.reader.view(head).retained_size
    parts = _dominated_objects(explainer, head, max(1, retained // 200))
    parts.sort(key=lambda part: (-explainer.reader.view(part).retained_size, part))
    explained = 0
    for count, part in enumerate(parts[:_FEW], start=1):
        explained += explainer.reader.view(part).retained_size
        if explained >= _EXPLAINED * retained:
            # Those that come after are named too where they are of the same order.
            smallest = retained // 20
            return [p for k, p in enumerate(parts) if k < count or explainer.reader.view(p).retained_size >= smallest]
    return []


def _dominated_objects(explainer: Explainer, head: int, least: int) -> list[int]:
    """The objects that an object dominates immediately, glue aside, with at least so many bytes retained."""
    found: list[int] = []
    open_nodes = [head]
    for _ in range(256):
        if not open_nodes:
            break
        for index in _dominated(explainer, open_nodes.pop(), least):
            place: Place | None = explainer.place(index)
            if place is None:
                continue
            if place.head == index:
                found.append(index)
            elif place.route is not None:
                open_nodes.append(index)
    return found


def _dominated(explainer: Explainer, index: int, least: int) -> list[int]:
    """`Graph.dominated`, which looks at the whole subtree, for the usual case that the children are all of them."""
    view = explainer.reader.view(index)
    rest = view.retained_size - view.self_size
    found = []
    for edge in explainer.graph.edges(index, least, _CHILDREN, False):
        child = explainer.reader.view(edge.target)
        if child.dominator == index:
            rest -= child.retained_size
            if child.retained_size >= least:
                found.append(child)
    if rest >= least:
        return explainer.graph.dominated(index, least, _CHILDREN)
    return [child.index for child in sorted(found, key=lambda child: (-child.retained_size, child.index))]


def _capture(explainer: Explainer, head: int) -> Capture:
    view = explainer.reader.view(head)
    subject = explainer.subject(head)
    path = explainer.path(head) or ""
    holders = explainer.holders(head, inherited=True)
    better = min((held for held in holders if _MACHINERY not in held), key=len, default=None)
    how = name = captured = captured_type = by = file = line = None
    if _MACHINERY in path and better is not None:
        holders = (*(held for held in holders if held != better), path)
        path = better
        origin = explainer.origin_at(parse(path).steps)
    else:
        origin = explainer.origin(head)
    if origin is not None:
        how, name, file, line = origin.how, origin.name, origin.file, origin.line
        parsed = parse(path)
        depth = len(parsed.steps) - origin.depth
        captured, by = (str(replace(parsed, steps=parsed.steps[:end])) for end in (depth, depth - 1))
        captured_type = explainer.subject(origin.captured).type
    return Capture(
        path=path, type=subject.type, what=subject.what,
        self_size=min(explainer.parts(head, min_size=_NONE, limit=_CHILDREN).own_size, view.retained_size),
        subtree_size=view.subtree_size, retained_size=view.retained_size, shared_by=holders,
        how=how, name=name, captured=captured, captured_type=captured_type, by=by, file=file, line=line,
    )  # fmt: skip


# --- types -----------------------------------------------------------------------------------------------------------


def count_types(explainer: Explainer) -> list[TypeRow]:
    """Bytes by type, biggest first; with the overhead they add up to the payload."""
    meanings: dict[int, int] = {}
    names: dict[int, str] = {}
    for number, (key, _, example) in enumerate(explainer.kinds):
        if number >= _TYPES:
            break
        subject = explainer.subject(example)
        names[key] = subject.type
        meanings[key] = 2 if subject.glue else 1 if subject.route is None else 0
    counts: dict[str, int] = {}
    sizes: dict[str, int] = {}
    totals = [(names.get(key, "other"), *total) for key, total in explainer.graph.type_totals(meanings).items()]
    if explainer.reader.view(0).op == "FILE":  # of one kind with the bytes in it that belong to no pickle
        own_size = explainer.reader.view(0).self_size
        number = next(k for k, (name, _, _) in enumerate(totals) if name == names[explainer.kinds[0][0]])
        _, count, size = totals[number]
        totals[number] = ("raw bytes", count - 1, size - own_size)
        totals.append(("file", 1, own_size))
    for name, count, size in totals:
        if count or size:
            counts[name] = counts.get(name, 0) + count
            sizes[name] = sizes.get(name, 0) + size
    rows = [TypeRow(name, counts[name], size) for name, size in sizes.items()]
    return sorted(rows, key=lambda row: (-row.size, row.type))
