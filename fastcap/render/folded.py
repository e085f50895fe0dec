"""Collapsed stacks, one ``root;child;grandchild bytes`` a line: the input of speedscope and flamegraph.pl."""

from __future__ import annotations

from fastcap.render import clean
from fastcap.report import NodeRow, Report

_MAX_FRAMES = 256  # a line repeats all its ancestors: without a bound, deep payloads cost the square of their depth


def render_folded(report: Report) -> str:
    """The self sizes of all rows of ``report``, in bytes.

    They and the ``[overhead]`` line add up to the payload. Rows deeper than 256 levels are credited to a ``[deeper]``
    frame. Semicolons and line breaks inside a frame are written as escapes (``\\x3b``, ``\\n``), so that a line always
    splits where a level ends.
    """
    sizes: dict[str, int] = {}
    stack: list[str] = []
    for row in report.nodes:
        del stack[min(row.depth, _MAX_FRAMES) :]
        stack.append(_frame(row) if row.depth < _MAX_FRAMES else "[deeper]")
        if row.self_size:
            key = ";".join(stack)
            sizes[key] = sizes.get(key, 0) + row.self_size
    if report.overhead:
        sizes["[overhead]"] = report.overhead
    return "".join(f"{key} {size}\n" for key, size in sizes.items())


def _frame(row: NodeRow) -> str:
    text = row.label if row.type == "more" else f"{row.label} {row.type}"
    return clean(text.strip() or "?", 120).replace(";", "\\x3b")
