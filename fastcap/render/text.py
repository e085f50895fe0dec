"""A report as text for terminals, files and logs: the verdict first, then what to look at, then everything else."""

from __future__ import annotations

import io
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from fastcap.render import clean
from fastcap.report import Capture, Finding, Limit, NodeRow, Report, format_size

_NARROW = 64  # below this many columns, rows are stacked instead of set in columns
_WIDE = 100  # from here on the tree has a column for the subtree size
_TYPE_ROWS = 12

_SEVERITY_STYLES = {"error": "bold red", "warning": "yellow", "note": "cyan"}
_HOW = {
    "closure": "captured as `{name}`",
    "global": "reached as global `{name}`",
    "default": "held as default of `{name}`",
    "self": "bound as `{name}`",
    "class attribute": "kept as class attribute `{name}`",
    "argument": "bound as argument `{name}`",
}

_Piece = tuple[str, str]  # text, style


@dataclass(frozen=True, slots=True)
class _Glyphs:
    ascii_only: bool
    ellipsis: str
    dash: str
    dot: str
    branch: str
    last: str
    line: str


_UNICODE = _Glyphs(False, "…", "—", "·", "├ ", "└ ", "│ ")
_ASCII = _Glyphs(True, "...", "-", "-", "|-", "`-", "| ")

GLYPHS = "…—·├└│"
"""What an output encoding must hold for ``render_text(unicode=True)``."""


def render_text(
    report: Report,
    *,
    width: int = 100,
    color: bool = False,
    unicode: bool = True,
    sort: str = "retained",
    base: str | None = None,
) -> str:
    """The report for people, at most ``width`` columns wide (and at least 40), ending in a line break.

    ``color`` adds ANSI styles. ``unicode=False`` keeps to ASCII. ``sort`` is the order the rows were asked for in: its
    column comes first. Files below the directory ``base`` are shown relative to it.
    """
    from rich.console import Console
    from rich.text import Text

    page = _Page(max(width, 40), _UNICODE if unicode else _ASCII, sort, base)
    file = io.StringIO()
    console = Console(
        file=file,
        width=page.width,
        force_terminal=color,
        color_system="standard" if color else None,
        no_color=not color,
        legacy_windows=False,
        _environ={},
    )
    for line in page.lines(report):
        text = Text.assemble(*line)
        text.rstrip()
        console.print(text, soft_wrap=True, markup=False, highlight=False, emoji=False)
    return file.getvalue()


class _Page:
    """Layout for one width. Every method yields lines; a line is a list of (text, style) pieces."""

    def __init__(self, width: int, glyphs: _Glyphs, sort: str, base: str | None) -> None:
        self.width = width
        self.glyphs = glyphs
        self.narrow = width < _NARROW
        kinds = ["retained", "subtree", "self"] if width >= _WIDE else ["retained", "self"]
        kinds = [sort, *(kind for kind in kinds if kind != sort)]
        self.tree_columns = kinds[:1] if self.narrow else kinds
        self.prefix = base + os.sep if base and not base.endswith(os.sep) else base

    def lines(self, report: Report) -> Iterator[list[_Piece]]:
        yield from self.verdict(report)
        for section in (
            self.captures(report),
            self.findings(report.findings),
            self.tree(report.nodes),
            self.types(report),
            self.notes(report.notes),
        ):
            for number, line in enumerate(section):
                if number == 0:
                    yield []
                yield line

    # ---- sections

    def verdict(self, report: Report) -> Iterator[list[_Piece]]:
        what = self.describe(report.type, report.what)
        target = self.fit(self.clean(report.target), max(self.width - cell_len(what) - 2, self.width // 2), middle=True)
        yield [(target, "bold"), ("  ", ""), (self.fit(what, self.width - cell_len(target) - 2), "")]
        sentence, style = _judge(report.limits)
        size = f"payload {format_size(report.payload_size, exact=True)}"
        yield from self.wrap(f"{size}: {self.clean(sentence)}" if sentence else size, style, indent=2)
        facts = [f"stream {format_size(report.stream_size)}"] if report.buffer_size else []
        if report.buffer_size:
            facts.append(f"out-of-band buffers {format_size(report.buffer_size)}")
        if report.pickle_count > 1:
            facts.append(f"{report.pickle_count:,} pickles one after the other")
        facts += [f"protocol {report.protocol}", _count(report.node_count, "node")]
        yield from self.wrap(f" {self.glyphs.dot} ".join(facts), "dim", indent=2)

    def captures(self, report: Report) -> Iterator[list[_Piece]]:
        rows = report.captures
        if not rows:
            return
        yield from self.title("Biggest captures", "what the payload loses if one goes")
        sizes = _align([format_size(row.retained_size) for row in rows], "retained")
        shares = _align([_share(row.retained_size, report.payload_size) for row in rows], "share")
        paths = [self.clean(row.path) for row in rows]
        whats = [self.describe(row.type, row.what) for row in rows]
        left = 2 + cell_len(sizes[0]) + 2 + cell_len(shares[0]) + 3
        room = self.width - left
        column = max(map(cell_len, ["path", *paths])) + 2
        beside = not self.narrow and column + max(map(cell_len, whats)) <= room  # path and what on one line
        if not self.narrow:
            head = f"  {sizes[0]}  {shares[0]}   path"
            yield [(head + " " * (column - 4) + "what" if beside else head, "dim")]
        for row, size, share, path, what in zip(rows, sizes[1:], shares[1:], paths, whats):
            line = [(f"  {size}", "bold"), (f"  {share}   ", "")]
            below = []
            if beside:
                yield [*line, (path, "cyan"), (" " * (column - cell_len(path)), ""), (what, "")]
            elif self.narrow:
                yield line
                below.append((self.fit(path, 3 * (self.width - 4), middle=True), "cyan"))
                below.append((what, ""))
            else:
                yield [*line, (self.fit(path, room, middle=True), "cyan")]
                below.append((what, ""))
            because = self.reason(row)
            if because:
                below.append((because, ""))
            if row.shared_by:
                below.append((f"also held by {self.holders(row.shared_by)}", "dim"))
            for text, style in below:
                yield from self.wrap(text, style, indent=4, hang=0)

    def reason(self, row: Capture) -> str:
        """How the capture came about, in words: ``Trainer captured as `self` at train.py:23``."""
        if row.how is None:
            return ""
        how = _HOW.get(row.how, f"{row.how} `{{name}}`") if row.name else f"by {row.how}"
        words = [self.clean(row.captured_type or row.type, 80), how.replace("{name}", self.clean(row.name or "", 80))]
        if row.by and not row.path.startswith(row.by):
            words.append(f"by {self.clean(row.by, 120)}")
        if row.file:
            words.append(f"at {self.place(row.file, row.line)}")
        return " ".join(words)

    def findings(self, rows: Sequence[Finding]) -> Iterator[list[_Piece]]:
        if not rows:
            return
        yield from self.title("Findings")
        for row in rows:
            style = _SEVERITY_STYLES.get(row.severity, "")
            head = f"  {self.fit(self.clean(row.severity), 8)} {self.fit(self.clean(row.code), 8)}  "
            size = f"  {format_size(row.size)}" if row.size else ""
            path = self.fit(self.clean(row.path), self.width - cell_len(head) - cell_len(size), middle=True)
            yield [(head, style), (path, "cyan"), (size, "")]
            yield from self.wrap(self.clean(row.message, 2000), "", indent=4, hang=0)
            if row.replacement:
                yield from self.wrap(f"instead: {self.clean(row.replacement, 2000)}", "green", indent=4, hang=2)

    def tree(self, rows: Sequence[NodeRow]) -> Iterator[list[_Piece]]:
        if not rows:
            return
        yield from self.title("Tree")
        columns = [_align([format_size(_size(row, kind)) for row in rows], kind) for kind in self.tree_columns]
        left = 2 + sum(cell_len(column[0]) + 2 for column in columns)
        yield [("  " + "".join(f"{column[0]}  " for column in columns) + ("" if self.narrow else "path"), "dim")]
        room = self.width - left
        for number, (row, guide) in enumerate(zip(rows, self.guides(rows, room // 2)), start=1):
            line = [("  ", "")]
            line += [(f"{column[number]}  ", "bold" if i == 0 else "dim") for i, column in enumerate(columns)]
            line.append((guide, "dim"))
            space = room - cell_len(guide)
            label = self.clean(row.label or row.path, 200)
            if row.type == "more":
                yield [*line, (self.fit(label, space), "dim")]
                continue
            what = self.describe(row.type, row.what)
            held = f"  (also {self.holders(row.shared_by)})" if row.shared_by else ""
            if held and cell_len(label) + 2 + cell_len(what) + cell_len(held) > space:
                held = "  (shared)"
            space -= cell_len(held)
            label = self.fit(label, max(space - cell_len(what) - 2, 2 * space // 3), middle=True)
            what = self.fit(what, space - cell_len(label) - 2)
            yield [*line, (label, "cyan"), ("  ", ""), (what, ""), (held, "dim")]

    def guides(self, rows: Sequence[NodeRow], room: int) -> Iterator[str]:
        """The lines that lead from each row to its parent, in at most ``room`` columns: deep levels lose their left."""
        last = _last_children(rows)
        levels: list[str] = []  # for each level above: the continuing line, or blanks below a last child
        kept = max((room - 2) // 2, 1)
        for number, row in enumerate(rows):
            del levels[max(row.depth - 1, 0) :]
            if row.depth == 0:
                yield ""
                continue
            shown = levels[-kept:] if len(levels) > kept else levels
            cut = f"{self.glyphs.ellipsis[:2]:2}" if len(shown) < len(levels) else ""
            yield cut + "".join(shown) + (self.glyphs.last if last[number] else self.glyphs.branch)
            levels.append("  " if last[number] else self.glyphs.line)

    def types(self, report: Report) -> Iterator[list[_Piece]]:
        if not report.types:
            return
        yield from self.title("By type")
        shown = report.types if len(report.types) <= _TYPE_ROWS else report.types[: _TYPE_ROWS - 1]
        rest = report.types[len(shown) :]
        rows = [(row.size, f"{row.count:,}", self.clean(row.type, 200)) for row in shown]
        if rest:
            count = f"{sum(row.count for row in rest):,}"
            rows.append((sum(row.size for row in rest), count, f"[{len(rest):,} more types]"))
        rows.append((report.overhead, "", "overhead (PROTO, FRAME, STOP)"))
        rows.append((report.payload_size, "", "payload"))
        sizes = _align([format_size(size) for size, _, _ in rows], "size")
        shares = _align([_share(size, report.payload_size) for size, _, _ in rows], "share")
        counts = _align([count for _, count, _ in rows], "count")
        left = 2 + sum(cell_len(column[0]) + 2 for column in (sizes, shares, counts))
        yield [(f"  {sizes[0]}  {shares[0]}  {counts[0]}  type", "dim")]
        for (_, _, name), size, share, count in zip(rows, sizes[1:], shares[1:], counts[1:]):
            yield [(f"  {size}", "bold"), (f"  {share}  {count}  ", ""), (self.fit(name, self.width - left), "")]

    def notes(self, rows: Iterable[str]) -> Iterator[list[_Piece]]:
        for row in rows:
            yield from self.wrap(f"note: {self.clean(self.relative(row), 2000)}", "dim", indent=0, hang=6)

    # ---- pieces

    def title(self, text: str, more: str = "") -> Iterator[list[_Piece]]:
        tail = f" {self.glyphs.dash} {more}" if more else ""
        yield [(text, "bold"), (tail if len(text) + len(tail) <= self.width else "", "")]

    def clean(self, text: str, limit: int = 400) -> str:
        return clean(text, limit, ascii_only=self.glyphs.ascii_only)

    def relative(self, text: str) -> str:
        return text.replace(self.prefix, "") if self.prefix else text

    def place(self, file: str, line: int | None) -> str:
        """``file:line``, relative to the base directory."""
        name = self.clean(self.relative(file), 200)
        return name if line is None else f"{name}:{line}"

    def describe(self, type_name: str, what: str) -> str:
        """One phrase from a type and its description, which mostly begins with the type's name."""
        word = re.split(r"[. ]", type_name)[-1]
        phrase = what if word in what and what else f"{type_name} {what}"
        return self.clean(self.relative(phrase.strip()), 200)

    def holders(self, paths: Sequence[str]) -> str:
        shown = ", ".join(self.clean(path, 60) for path in paths[:2])
        return shown if len(paths) <= 2 else f"{shown} and {len(paths) - 2} more"

    def fit(self, text: str, cells: int, *, middle: bool = False) -> str:
        """``text`` in at most ``cells`` columns, without its middle or its end."""
        if cell_len(text) <= cells:
            return text
        mark = self.glyphs.ellipsis
        if cells <= len(mark):
            return mark[: max(cells, 0)]
        room = cells - len(mark)
        if not middle:
            return _head(text, room) + mark
        head = _head(text, (room + 1) // 2)
        tail = _head(text[::-1], room - cell_len(head))[::-1]
        return head + mark + tail

    def wrap(self, text: str, style: str, *, indent: int, hang: int | None = None) -> Iterator[list[_Piece]]:
        """``text`` in lines of the page's width.

        Lines start at column ``indent``, all but the first at ``indent + hang``; without ``hang`` the first starts at
        column 0 and the others at ``indent``.
        """
        first, rest = (indent, indent + hang) if hang is not None else (0, indent)
        margin = first
        line = ""
        for word in text.split(" "):
            joined = f"{line} {word}" if line else word
            if cell_len(joined) <= self.width - margin:
                line = joined
                continue
            if line:
                yield [(" " * margin, ""), (line, style)]
                margin = rest
            line = word
            while cell_len(line) > self.width - margin:
                head = _head(line, self.width - margin)
                yield [(" " * margin, ""), (head, style)]
                line = line[len(head) :]
                margin = rest
        if line:
            yield [(" " * margin, ""), (line, style)]


def cell_len(text: str) -> int:
    """Columns that ``text`` takes on a terminal."""
    from rich.cells import cell_len as measure

    return len(text) if text.isascii() else measure(text)


def _head(text: str, cells: int) -> str:
    """The longest beginning of ``text`` that fits in ``cells`` columns."""
    if text.isascii():
        return text[: max(cells, 0)]
    used = 0
    for index, char in enumerate(text):
        used += cell_len(char)
        if used > cells:
            return text[:index]
    return text


def _judge(limits: Sequence[Limit]) -> tuple[str, str]:
    """What the limits say, and the style to say it in."""
    exceeded = [limit for limit in limits if limit.exceeded]
    errors = [limit for limit in exceeded if limit.effect == "error"]
    if exceeded:
        sentence = ", ".join(
            f"over {limit.name} ({format_size(limit.size)}) {_times(limit.ratio)}" for limit in errors or exceeded
        )
        return sentence, "bold red" if errors else "bold yellow"
    if limits:
        first = min(limits, key=lambda limit: limit.size)
        return f"below every known limit (the first: {first.name}, {format_size(first.size)})", "bold green"
    return "", "bold"


def _times(ratio: float) -> str:
    return f"{ratio:,.1f} times" if ratio >= 1.1 else f"by {100 * (ratio - 1):.1f} %"


def _share(size: int, whole: int) -> str:
    """A percentage that says 0 and 100 of nothing and of everything only."""
    if size in (0, whole):
        return "100.0 %" if size else "0.0 %"
    share = 100 * size / whole
    return "<0.1 %" if share < 0.05 else f"{min(share, 99.9):.1f} %"


def _size(row: NodeRow, kind: str) -> int:
    return {"retained": row.retained_size, "self": row.self_size, "subtree": row.subtree_size}[kind]


def _count(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def _align(cells: Sequence[str], title: str) -> list[str]:
    """Title and cells, flush right in one column."""
    width = max(map(len, [title, *cells]))
    return [cell.rjust(width) for cell in (title, *cells)]


def _last_children(rows: Sequence[NodeRow]) -> list[bool]:
    """For each row, whether it is the last one below its parent. Preorder: the next row at its depth or above tells."""
    last = [True] * len(rows)
    seen: list[bool] = []  # depth -> a sibling follows, looking from the end
    for number in range(len(rows) - 1, -1, -1):
        depth = rows[number].depth
        seen.extend([False] * (depth + 1 - len(seen)))
        last[number] = not seen[depth]
        seen[depth] = True
        del seen[depth + 1 :]
    return last
