"""A comparison as text: by how much the payload changed, then which parts did."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fastcap.comparison import Change, Diff, TypeChange
from fastcap.render.layout import Page, Piece, align, cell_len, print_lines
from fastcap.report import format_size

_CHANGES = 30  # rows unless asked for more
_TYPES = 12
_STYLES = {"came": "bold red", "grew": "red", "went": "bold green", "shrank": "green", "moved": "cyan"}


def render_diff(
    diff: Diff,
    *,
    width: int = 100,
    color: bool = False,
    unicode: bool = True,
    top: int | None = None,
    base: str | None = None,
) -> str:
    """The comparison for people, at most ``width`` columns wide (and at least 40), ending in a line break.

    ``top`` is the number of changes that get a row; the others are summed up. The rest is as for `render_text`.
    """
    page = _Page(width, unicode=unicode, base=base)
    return print_lines(page.lines(diff, _CHANGES if top is None else top), page.width, color=color)


def format_delta(delta: int) -> str:
    """``+800.0 MiB``, ``-12 B``, ``0 B``."""
    return f"{'+' if delta > 0 else '-' if delta else ''}{format_size(abs(delta))}"


def describe_growth(diff: Diff) -> str:
    """``grew by 1.2 MiB (12.0 %)``, ``shrank by …``, ``has the size it had``."""
    if not diff.delta:
        return "has the size it had"
    percent = f" ({100 * abs(diff.delta) / diff.old_size:,.1f} %)" if diff.old_size else ""
    return f"{'grew' if diff.delta > 0 else 'shrank'} by {format_size(abs(diff.delta))}{percent}"


class _Page(Page):
    """The sections of a comparison."""

    def lines(self, diff: Diff, top: int) -> Iterator[list[Piece]]:
        yield from self.verdict(diff)
        for section in (self.changes(diff, top), self.types(diff), self.notes(diff.notes)):
            for number, line in enumerate(section):
                if number == 0:
                    yield []
                yield line

    def verdict(self, diff: Diff) -> Iterator[list[Piece]]:
        arrow = self.glyphs.arrow
        old, new = self.clean(diff.old_target), self.clean(diff.new_target)
        targets = new if old == new else f"{old} {arrow} {new}"
        yield [(self.fit(targets, self.width, middle=True), "bold")]
        style = "bold red" if diff.delta > 0 else "bold green"
        sizes = f"{format_size(diff.old_size, exact=True)} {arrow} {format_size(diff.new_size, exact=True)}"
        yield from self.wrap(f"payload {describe_growth(diff)}: {sizes}", style, indent=2)

    def changes(self, diff: Diff, top: int) -> Iterator[list[Piece]]:
        yield from self.title("Changes", "they add up to the change of the payload")
        shown, rest = diff.changes[:top], diff.changes[top:]
        rows: list[tuple[str, str, str]] = [(format_delta(row.delta), row.kind, row.path) for row in shown]
        if rest:
            rows.append((format_delta(sum(row.delta for row in rest)), "", f"[{len(rest):,} more]"))
        rows.append((format_delta(diff.overhead_delta), "", "overhead (PROTO, FRAME, STOP)"))
        rows.append((format_delta(diff.delta), "", "payload"))
        deltas = align([delta for delta, _, _ in rows], "delta")
        kinds = [kind.ljust(6) for kind in ("", *(kind for _, kind, _ in rows))]
        yield [(f"  {deltas[0]}  {kinds[0]}  path", "dim")]
        for number, (_, kind, path) in enumerate(rows, start=1):
            head = f"  {deltas[number]}  {kinds[number]}  "
            name = self.fit(self.clean(path), self.width - cell_len(head), middle=True)
            line = [(f"  {deltas[number]}", "bold"), (f"  {kinds[number]}  ", _STYLES.get(kind, ""))]
            yield [*line, (name, "cyan" if kind else "")]
            if number <= len(shown):
                indent = 4 if self.narrow else cell_len(head)
                for text in self.describe_change(shown[number - 1]):
                    yield from self.wrap(text, "", indent=indent, hang=0)

    def describe_change(self, row: Change) -> Iterator[str]:
        arrow = self.glyphs.arrow
        what = self.describe(row.type, row.what)
        if row.old_type is not None and row.old_what is not None:
            what = f"{self.describe(row.old_type, row.old_what)} {arrow} {what}"
        if row.old_path is not None:
            yield f"{what}, was {self.clean(row.old_path)}"
        elif row.kind in ("grew", "shrank"):
            yield f"{what}, {format_size(row.old_size)} {arrow} {format_size(row.new_size)}"
        else:
            yield what

    def types(self, diff: Diff) -> Iterator[list[Piece]]:
        rows: Sequence[TypeChange] = diff.types
        if not rows:
            return
        yield from self.title("By type")
        shown = rows if len(rows) <= _TYPES else rows[: _TYPES - 1]
        rest = rows[len(shown) :]
        lines = [(row.delta, f"{row.old_count:,}", f"{row.new_count:,}", self.clean(row.type, 200)) for row in shown]
        if rest:
            old_count, new_count = sum(row.old_count for row in rest), sum(row.new_count for row in rest)
            name = f"[{len(rest):,} more types]"
            lines.append((sum(row.delta for row in rest), f"{old_count:,}", f"{new_count:,}", name))
        deltas = align([format_delta(delta) for delta, _, _, _ in lines], "delta")
        before = align([old for _, old, _, _ in lines], "before")
        after = align([new for _, _, new, _ in lines], "now")
        left = 2 + sum(cell_len(column[0]) + 2 for column in (deltas, before, after))
        yield [(f"  {deltas[0]}  {before[0]}  {after[0]}  type", "dim")]
        for line, delta, old, new in zip(lines, deltas[1:], before[1:], after[1:]):
            yield [(f"  {delta}", "bold"), (f"  {old}  {new}  ", ""), (self.fit(line[3], self.width - left), "")]

    def notes(self, rows: Sequence[str]) -> Iterator[list[Piece]]:
        for row in rows:
            yield from self.wrap(f"note: {self.clean(self.relative(row), 2000)}", "dim", indent=0, hang=6)
