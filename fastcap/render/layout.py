"""What the text renderers share: a page of some width, and lines that are lists of (text, style) pieces."""

from __future__ import annotations

import io
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from fastcap.render import clean

NARROW = 64
"""Below this many columns, rows are stacked instead of set in columns."""

_PATH_LIMIT = 1000  # characters
_MOST_HOLDERS = 10  # see `fastcap.report.Capture.shared_by`
_PLACE = re.compile(r"[^/\\ ]+(?: [^/\\ ]+)*:\d+$")

Piece = tuple[str, str]
"""Text and its style, in rich's words."""


@dataclass(frozen=True, slots=True)
class Glyphs:
    """Characters beyond letters, and whether only ASCII may be used."""

    ascii_only: bool
    ellipsis: str
    dash: str
    dot: str
    branch: str
    last: str
    line: str
    arrow: str


UNICODE = Glyphs(False, "…", "—", "·", "├ ", "└ ", "│ ", "→")
ASCII = Glyphs(True, "...", "-", "-", "|-", "`-", "| ", "->")

GLYPHS = "…—·├└│→"
"""What an output encoding must hold for ``render_text(unicode=True)``."""


def print_lines(lines: Iterable[Sequence[Piece]], width: int, *, color: bool) -> str:
    """The lines as one string; ``color`` adds ANSI styles."""
    from rich.console import Console
    from rich.text import Text

    file = io.StringIO()
    console = Console(
        file=file,
        width=width,
        force_terminal=color,
        color_system="standard" if color else None,
        no_color=not color,
        legacy_windows=False,
        _environ={},
    )
    for line in lines:
        text = Text.assemble(*line)
        text.rstrip()
        console.print(text, soft_wrap=True, markup=False, highlight=False, emoji=False)
    return file.getvalue()


class Page:
    """Layout for one width. Methods that make lines yield them.

    ``base`` is a directory below which files are shown relative to it.
    """

    def __init__(self, width: int, *, unicode: bool, base: str | None) -> None:
        self.width = max(width, 40)
        self.glyphs = UNICODE if unicode else ASCII
        self.narrow = self.width < NARROW
        self.prefix = base + os.sep if base and not base.endswith(os.sep) else base

    def title(self, text: str, more: str = "") -> Iterator[list[Piece]]:
        """A heading, and what it means where there is room."""
        tail = f" {self.glyphs.dash} {more}" if more else ""
        yield [(text, "bold"), (tail if len(text) + len(tail) <= self.width else "", "")]

    def clean(self, text: str, limit: int = 400) -> str:
        """``text`` made harmless: see `fastcap.render.clean`."""
        return clean(text, limit, ascii_only=self.glyphs.ascii_only)

    def relative(self, text: str) -> str:
        """``text`` without the base directory."""
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
        """The first of some paths, and how many more there are."""
        shown = ", ".join(self.clean(path, 60) for path in paths[:2])
        return shown if len(paths) <= 2 else f"{shown} and {more_holders(paths, 2)}"

    def path(self, text: str) -> str:
        """A path, whole unless it is longer than anybody pastes."""
        return self.clean(text, _PATH_LIMIT)

    def fit_place(self, text: str, cells: int) -> str:
        """``function /long/path/x.py:12`` in at most ``cells`` columns: what is left out is of the directories.

        Other phrases lose their end.
        """
        match = _PLACE.search(text)
        if cell_len(text) <= cells or match is None:
            return self.fit(text, cells)
        mark, tail = self.glyphs.ellipsis, match[0]
        room = cells - cell_len(mark) - cell_len(tail)
        if room < 0:
            return (mark + head_of(tail[::-1], cells - len(mark))[::-1]) if cells > len(mark) else self.fit(text, cells)
        # As many of the last directories as there is room for, after the first word if that goes in, too.
        word, space, _ = text[: match.start()].partition(" ")
        start = word + space if space and cell_len(word + space) <= room else ""
        directories = text[len(start) : match.start()][::-1]
        return start + mark + head_of(directories, room - cell_len(start))[::-1] + tail

    def fit(self, text: str, cells: int, *, middle: bool = False) -> str:
        """``text`` in at most ``cells`` columns, without its middle or its end."""
        if cell_len(text) <= cells:
            return text
        mark = self.glyphs.ellipsis
        if cells <= len(mark):
            return mark[: max(cells, 0)]
        room = cells - len(mark)
        if not middle:
            return head_of(text, room) + mark
        head = head_of(text, (room + 1) // 2)
        tail = head_of(text[::-1], room - cell_len(head))[::-1]
        return head + mark + tail

    def wrap_path(self, text: str, style: str, *, indent: int) -> Iterator[list[Piece]]:
        """``text`` on lines of its own, broken anywhere but at a space, so that joining the lines gives it back."""
        while text:
            head = head_of(text, self.width - indent)
            end = len(head)
            while end and " " in text[end - 1 : end + 1]:
                end -= 1
            head = head[:end] or head
            yield [(" " * indent, ""), (head, style)]
            text = text[len(head) :]

    def wrap(self, text: str, style: str, *, indent: int, hang: int | None = None) -> Iterator[list[Piece]]:
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
                head = head_of(line, self.width - margin)
                yield [(" " * margin, ""), (head, style)]
                line = line[len(head) :]
                margin = rest
        if line:
            yield [(" " * margin, ""), (line, style)]


def more_holders(paths: Sequence[str], shown: int) -> str:
    """``3 more``; a report names so many holders at most, so that there may be others."""
    count = f"{len(paths) - shown} more"
    return count if len(paths) < _MOST_HOLDERS else f"at least {count}"


def cell_len(text: str) -> int:
    """Columns that ``text`` takes on a terminal."""
    from rich.cells import cell_len as measure

    return len(text) if text.isascii() else measure(text)


def head_of(text: str, cells: int) -> str:
    """The longest beginning of ``text`` that fits in ``cells`` columns."""
    if text.isascii():
        return text[: max(cells, 0)]
    used = 0
    for index, char in enumerate(text):
        used += cell_len(char)
        if used > cells:
            return text[:index]
    return text


def percentage(size: int, whole: int) -> str:
    """A percentage that says 0 and 100 of nothing and of everything only."""
    if size in (0, whole):
        return "100.0 %" if size else "0.0 %"
    percent = 100 * size / whole
    return "<0.1 %" if percent < 0.05 else f"{min(percent, 99.9):.1f} %"


def count_of(count: int, noun: str) -> str:
    """``1 node``, ``2 nodes``."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def align(cells: Sequence[str], title: str) -> list[str]:
    """Title and cells, flush right in one column."""
    width = max(map(len, [title, *cells]))
    return [cell.rjust(width) for cell in (title, *cells)]
