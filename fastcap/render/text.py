"""A report as text for terminals, files and logs: the verdict first, then what to look at, then everything else."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from fastcap.render.layout import (
    GLYPHS,
    Page,
    Piece,
    align,
    cell_len,
    count_of,
    more_holders,
    percentage,
    print_lines,
)
from fastcap.report import Capture, Finding, Limit, NodeRow, Report, format_size

__all__ = ["GLYPHS", "render_text"]

_WIDE = 100  # from here on the tree has a column for the subtree size
_TYPE_ROWS = 12
_HOLDERS = 4

_SEVERITY_STYLES = {"error": "bold red", "warning": "yellow", "note": "cyan"}
_HOW = {
    "closure": "captured as `{name}`",
    "global": "reached as global `{name}`",
    "default": "held as default of `{name}`",
    "self": "bound as `{name}`",
    "class attribute": "kept as class attribute `{name}`",
    "argument": "bound as argument `{name}`",
}


def render_text(
    report: Report,
    *,
    width: int = 100,
    color: bool = False,
    unicode: bool = True,
    sort: str = "retained",
    base: str | None = None,
    brief: bool = False,
) -> str:
    """The report for people, at most ``width`` columns wide (and at least 40), ending in a line break.

    With ``brief`` it is the verdict, the captures and the findings only.

    ``color`` adds ANSI styles. ``unicode=False`` keeps to ASCII. ``sort`` is the order the rows were asked for in: its
    column comes first. Files below the directory ``base`` are shown relative to it.
    """
    page = _Page(width, unicode, sort, base)
    return print_lines(page.lines(report, brief), page.width, color=color)


class _Page(Page):
    """The sections of a report."""

    def __init__(self, width: int, unicode: bool, sort: str, base: str | None) -> None:
        super().__init__(width, unicode=unicode, base=base)
        kinds = ["retained", "subtree", "self"] if self.width >= _WIDE else ["retained", "self"]
        kinds = [sort, *(kind for kind in kinds if kind != sort)]
        self.tree_columns = kinds[:1] if self.narrow else kinds

    def lines(self, report: Report, brief: bool) -> Iterator[list[Piece]]:
        yield from self.verdict(report)
        sections = [self.captures(report), self.findings(report.findings)]
        if not brief:
            sections += [self.tree(report.nodes), self.types(report), self.notes(report.notes)]
        for section in sections:
            for number, line in enumerate(section):
                if number == 0:
                    yield []
                yield line

    # ---- sections

    def verdict(self, report: Report) -> Iterator[list[Piece]]:
        what = self.describe(report.type, report.what)
        target = self.fit(self.clean(report.target), max(self.width - cell_len(what) - 2, self.width // 2), middle=True)
        yield [(target, "bold"), ("  ", ""), (self.fit_place(what, self.width - cell_len(target) - 2), "")]
        broken = len(report.unpicklable)
        if broken:
            subject = "one part" if broken == 1 else f"{broken:,} parts"
            text = f"will not pickle, because of {subject}; the sizes are those without"
            yield from self.wrap(text, "bold red", indent=2)
        sentence, style = _judge(report.limits)
        size = f"payload {format_size(report.payload_size, exact=True)}"
        yield from self.wrap(f"{size}: {self.clean(sentence)}" if sentence else size, style, indent=2)
        facts = [f"stream {format_size(report.stream_size)}"] if report.buffer_size else []
        if report.buffer_size:
            facts.append(f"out-of-band buffers {format_size(report.buffer_size)}")
        if report.pickle_count > 1:
            facts.append(f"{report.pickle_count:,} pickles one after the other")
        facts += [f"protocol {report.protocol}", count_of(report.node_count, "node")]
        yield from self.wrap(f" {self.glyphs.dot} ".join(facts), "dim", indent=2)

    def captures(self, report: Report) -> Iterator[list[Piece]]:
        rows = report.captures
        if not rows:
            return
        yield from self.title("Biggest captures", "what the payload loses if one goes")
        sizes = align([format_size(row.retained_size) for row in rows], "retained")
        shares = align([percentage(row.retained_size, report.payload_size) for row in rows], "share")
        paths = [self.path(row.path) for row in rows]
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
            if beside:
                yield [*line, (path, "cyan"), (" " * (column - cell_len(path)), ""), (what, "")]
            else:
                if not self.narrow and cell_len(path) <= room:
                    yield [*line, (path, "cyan")]
                else:
                    yield line
                    yield from self.wrap_path(path, "cyan", indent=4)
                yield from self.wrap(what, "", indent=4, hang=0)
            because = self.reason(row)
            if because:
                yield from self.wrap(because, "", indent=4, hang=0)
            yield from self.held_by(row.shared_by)

    def held_by(self, paths: Sequence[str]) -> Iterator[list[Piece]]:
        """Who else holds a capture: whole paths, that can be looked up."""
        if not paths:
            return
        shown = [self.path(path) for path in paths[:_HOLDERS]]
        more = f" and {more_holders(paths, len(shown))}" if len(paths) > len(shown) else ""
        line = f"also held by {', '.join(shown)}{more}"
        if cell_len(line) <= self.width - 4:
            yield [("    ", ""), (line, "dim")]
            return
        yield [("    also held by", "dim")]
        for path in shown:
            yield from self.wrap_path(path, "dim", indent=6)
        if more:
            yield [(f"     {more}", "dim")]

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

    def findings(self, rows: Sequence[Finding]) -> Iterator[list[Piece]]:
        if not rows:
            return
        yield from self.title("Findings")
        for row in rows:
            style = _SEVERITY_STYLES.get(row.severity, "")
            head = f"  {self.fit(self.clean(row.severity), 8)} {self.fit(self.clean(row.code), 8)}  "
            size = f"  {format_size(row.size)}" if row.size else ""
            path = self.path(row.path)
            if cell_len(path) <= self.width - cell_len(head) - cell_len(size):
                yield [(head, style), (path, "cyan"), (size, "")]
            else:
                yield [(head.rstrip(), style), (size, "")]
                yield from self.wrap_path(path, "cyan", indent=4)
            yield from self.wrap(self.clean(row.message, 2000), "", indent=4, hang=0)
            if row.replacement:
                yield from self.wrap(f"instead: {self.clean(row.replacement, 2000)}", "green", indent=4, hang=2)

    def tree(self, rows: Sequence[NodeRow]) -> Iterator[list[Piece]]:
        if not rows:
            return
        yield from self.title("Tree")
        columns = [align([format_size(_size(row, kind)) for row in rows], kind) for kind in self.tree_columns]
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
                yield [*line, (self.fit(f"[{count_of(row.count, 'more node')}]", space), "dim")]
                continue
            what = self.describe(row.type, row.what)
            held = f"  (also {self.holders(row.shared_by)})" if row.shared_by else ""
            if held and cell_len(label) + 2 + cell_len(what) + cell_len(held) > space:
                held = "  (shared)"
            space -= cell_len(held)
            label = self.fit(label, max(space - cell_len(what) - 2, 2 * space // 3), middle=True)
            what = self.fit_place(what, space - cell_len(label) - 2)
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

    def types(self, report: Report) -> Iterator[list[Piece]]:
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
        sizes = align([format_size(size) for size, _, _ in rows], "size")
        shares = align([percentage(size, report.payload_size) for size, _, _ in rows], "share")
        counts = align([count for _, count, _ in rows], "count")
        left = 2 + sum(cell_len(column[0]) + 2 for column in (sizes, shares, counts))
        yield [(f"  {sizes[0]}  {shares[0]}  {counts[0]}  type", "dim")]
        for (_, _, name), size, share, count in zip(rows, sizes[1:], shares[1:], counts[1:]):
            yield [(f"  {size}", "bold"), (f"  {share}  {count}  ", ""), (self.fit(name, self.width - left), "")]

    def notes(self, rows: Iterable[str]) -> Iterator[list[Piece]]:
        for row in rows:
            yield from self.wrap(f"note: {self.clean(self.relative(row), 2000)}", "dim", indent=0, hang=6)


def _judge(limits: Sequence[Limit]) -> tuple[str, str]:
    """What the limits say, and the style to say it in."""
    limits = [limit for limit in limits if limit.effect != "note"]
    exceeded = [limit for limit in limits if limit.exceeded]
    errors = [limit for limit in exceeded if limit.effect == "error"]
    if exceeded:
        sentence = ", ".join(
            _over(limit.ratio).format(f"{limit.name} ({format_size(limit.size)})") for limit in errors or exceeded
        )
        return sentence, "bold red" if errors else "bold yellow"
    if limits:
        first = min(limits, key=lambda limit: limit.size)
        if first.ratio == 1:
            return f"exactly at {first.name} ({format_size(first.size)})", "bold yellow"
        return f"below every known limit (the first: {first.name}, {format_size(first.size)})", "bold green"
    return "", "bold"


def _over(ratio: float) -> str:
    """By how much a limit is exceeded, with ``{}`` for the limit."""
    if ratio >= 1.1:
        return f"over {{}} {ratio:,.1f} times"
    return f"over {{}} by {100 * (ratio - 1):.1f} %" if ratio >= 1.0005 else "just over {}"


def _size(row: NodeRow, kind: str) -> int:
    return {"retained": row.retained_size, "self": row.self_size, "subtree": row.subtree_size}[kind]


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
