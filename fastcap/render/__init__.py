"""Functions from a `fastcap.report.Report` to a string: they neither print nor compute sizes.

Names, keys and phrases of a report come from a payload that nobody has vouched for. `clean` is the one place that makes
them harmless: every renderer sends each of them through it.
"""

from __future__ import annotations

from unicodedata import combining

CLEAN_LIMIT = 400
"""Characters that `clean` keeps of one string."""

_MARKS_IN_A_ROW = 2  # more combining marks than this on one character are not writing but decoration


def clean(text: str, limit: int = CLEAN_LIMIT, *, ascii_only: bool = False) -> str:
    r"""``text`` as one printable line of at most ``limit`` characters.

    Whatever does not print as itself becomes a backslash escape: control characters (terminal escapes, newlines),
    bidirectional overrides and other invisible format characters, odd spaces, lone surrogates, unassigned characters,
    piles of combining marks; with ``ascii_only`` everything beyond ASCII. A long text loses its middle, so that the
    work does not depend on its length: what it is and what it ends with tell more.
    """
    mark = "..." if ascii_only else "…"
    text = _without_middle(text, limit, mark)
    if text.isascii() and text.isprintable():
        return text
    parts = []
    marks = 0
    for char in text:
        marks = marks + 1 if combining(char) else 0
        harmless = char.isprintable() and marks <= _MARKS_IN_A_ROW and (not ascii_only or char.isascii())
        parts.append(char if harmless else char.encode("unicode_escape").decode("ascii"))
    return _without_middle("".join(parts), limit, mark)  # escapes are longer than what they stand for


def _without_middle(text: str, limit: int, mark: str) -> str:
    if len(text) <= limit:
        return text
    head = limit * 2 // 3
    return f"{text[:head]}{mark}{text[len(text) - (limit - head - len(mark)) :]}"
