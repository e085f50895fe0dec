"""What the figures are held to, and how a table, a file and a chart are made of them."""

import dataclasses
import html
import json
import math
import pathlib
import platform
import statistics
import sys
from typing import Any

RESULTS = pathlib.Path(__file__).parent / "results"


@dataclasses.dataclass(frozen=True)
class Target:
    """One row: ``contender`` is ``must`` times as fast as ``rival`` on ``workload``, or better ``target`` times."""

    workload: str
    contender: str
    rival: str
    must: float
    target: float | None = None


def pickler_rows(workload: str, exact: Any = None, exact_pickle: Any = None, compact: Any = None,
                 compact_pickle: Any = None) -> list[Target]:
    """Rows for the two modes of the pickler against cloudpickle and C pickle; each a must or (must, target)."""
    given = [("exact", "cloudpickle", exact), ("exact", "pickle", exact_pickle),
             ("compact", "cloudpickle", compact), ("compact", "pickle", compact_pickle)]
    return [Target(workload, contender, rival, *(limit if isinstance(limit, tuple) else (limit,)))
            for contender, rival, limit in given if limit is not None]


PICKLER = [
    *pickler_rows("100k dataclass instances", exact=(5, 6), exact_pickle=2.3, compact=12, compact_pickle=5),
    *pickler_rows("100k JSON-like dicts", exact=1.25, exact_pickle=1.25, compact=3.5, compact_pickle=3.5),
    *pickler_rows("1M distinct str", exact=1.4, exact_pickle=1.4, compact=12, compact_pickle=12),
    *pickler_rows("dict of 1M ints", exact=(0.95, 1.2), exact_pickle=(0.95, 1.2)),
    *pickler_rows("100k datetime", exact=2.5, exact_pickle=0.9),
    *pickler_rows("100k Decimal", exact=2.5, exact_pickle=0.9),
    *pickler_rows("100k np.float64", exact=1.6, exact_pickle=0.9),
    *pickler_rows("100k pairs of enum members", exact=1.2, exact_pickle=1.1),
    *pickler_rows("500 closures, few modules", exact=8),
    *pickler_rows("500 closures, thousands of modules", exact=50),
    *pickler_rows("300 different functions", exact=3),
    *pickler_rows("200 dynamic classes", exact=3),
    *pickler_rows("10k dumps of one small closure", exact=(2.5, 4)),
    *pickler_rows("closure over a 100 MiB ndarray", exact=0.97),
    *pickler_rows("50 MB torch tensor", compact=6),
]
PICKLER_WORKLOADS = list(dict.fromkeys(row.workload for row in PICKLER))
PICKLER_MEAN = Target("geometric mean", "exact", "cloudpickle", 3, 5)

# analyze(obj) takes at most half the time of cloudpickle.dumps(obj) on geometric mean, and never more than 1.6 times.
ANALYSIS = [Target(workload, "analyze", "cloudpickle", 1 / 1.6) for workload in PICKLER_WORKLOADS]
ANALYSIS_MEANS = [Target("geometric mean", "analyze", "cloudpickle", 2),
                  Target("geometric mean", "analyze", "asizeof", 30)]

SCANNER = [
    Target("100k JSON-like dicts", "scan", "genops", 40, 80),
    Target("100k JSON-like dicts", "scan and graph", "genops", 40, 80),
    Target("100k JSON-like dicts", "scan and report", "genops", 15),
    Target("100k JSON-like dicts", "scan and report", "loads", 2.5),
    Target("4 GiB file of mostly buffers", "scan file", "skip through", 0.5),
    Target("4 GiB file of mostly buffers", "scan file", "read through", 20),
]
SAVE_WORKLOAD, RESTORE_WORKLOAD = "save of 1 GiB of arrays", "restore of 2 GiB of arrays"
SAVING = [
    Target(SAVE_WORKLOAD, "save", "cp", 0.8),
    Target(SAVE_WORKLOAD, "save and sync", "copy and sync", 0.8),
    Target(SAVE_WORKLOAD, "save of the same", "cp", 1),
    Target(RESTORE_WORKLOAD, "restore, mapped", "pickle.load", 10),
    Target(RESTORE_WORKLOAD, "restore", "pickle.load", 0.5),
]
# Time for one node at 1e5 nodes over that at 1e7: at least 1 / 1.5.
NODE_COUNTS = {"1e5 nodes": 100_000, "1e7 nodes": 10_000_000}
FIRST_SCAN, SECOND_SCAN = "first scan of a process", "second"
RAY_LARGE = "Ray: first call of a function that captures 800 MB"
RAY_SMALL = "Ray: pickling of a small function for export"
RAY_PUT = "Ray: put of 20k datetimes"
RAY_INSTANCES = "Ray: put of 20k instances"
RAY = [
    Target(RAY_LARGE, "slim", "put and small", 1 / 1.15),
    Target(RAY_SMALL, "installed, not native", "Ray", 1 / 1.02),
    Target(RAY_SMALL, "installed", "Ray", 1),
    Target(RAY_PUT, "installed", "Ray", 1),
    Target(RAY_INSTANCES, "installed", "Ray", 1),
]

NODE_TIME = Target("1e7 nodes", "dominators", "1e5 nodes, for one node", 1 / 1.5)


@dataclasses.dataclass(frozen=True)
class MemoryTarget:
    """``contender`` takes at most ``limit`` bytes at its peak, or at most what ``rival`` takes."""

    workload: str
    contender: str
    rival: str | None = None
    limit: int | None = None


MEMORY = [
    *(MemoryTarget(workload, "exact", rival="cloudpickle") for workload in PICKLER_WORKLOADS),
    MemoryTarget("1e7 nodes", "dominators", limit=100 * NODE_COUNTS["1e7 nodes"]),
    MemoryTarget("4 GiB file of mostly buffers", "scan file", limit=50_000_000),
    MemoryTarget("closure over 8 GiB of np.zeros", "analyze", limit=50_000_000),
]


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the table. ``ratio`` is None where something was not available; ``note`` says what."""

    workload: str
    contender: str
    rival: str
    ratio: float | None
    must: float
    target: float | None = None
    note: str = ""

    @property
    def verdict(self) -> str:
        if self.ratio is None:
            return "not available"
        if self.ratio < self.must:
            return "SHORT"
        return "pass" if self.target is None or self.ratio >= self.target else "pass, below target"


class Ledger:
    """All measurements of a run."""

    def __init__(self) -> None:
        self.seconds: dict[tuple[str, str], list[float]] = {}  # (workload, contender) -> seconds a call, by round
        self.memory: dict[tuple[str, str], int] = {}  # (workload, contender) -> bytes at the peak
        self.missing: dict[tuple[str, str], str] = {}  # (workload, contender) -> why there is no figure
        self.payloads: dict[str, int] = {}  # workload -> bytes that cloudpickle writes
        self.sized: dict[str, int] = {}  # workload -> bytes that asizeof sees

    def median(self, workload: str, contender: str) -> float | None:
        found = self.seconds.get((workload, contender))
        return statistics.median(found) if found else None

    def ratio(self, target: Target) -> float | None:
        ours, theirs = self.median(target.workload, target.contender), self.median(target.workload, target.rival)
        return theirs / ours if ours and theirs else None

    def row(self, target: Target) -> Row:
        pairs = [(target.workload, target.contender), (target.workload, target.rival)]
        note = "; ".join(f"{pair[1]}: {self.missing[pair]}" for pair in pairs if pair in self.missing)
        ratio = self.ratio(target)
        return Row(target.workload, target.contender, target.rival, ratio, target.must, target.target, note)

    def mean_row(self, mean: Target, targets: list[Target]) -> Row:
        """The geometric mean of the ratios there are."""
        ratios = [ratio for ratio in map(self.ratio, targets) if ratio]
        note = f"over {len(ratios)} of {len(targets)} rows"
        mean_ratio = math.exp(statistics.fmean(map(math.log, ratios))) if ratios else None
        return Row(mean.workload, mean.contender, mean.rival, mean_ratio, mean.must, mean.target, note)

    def node_times(self, which: str) -> tuple[float, float] | None:
        """Seconds for one node of few and of many."""
        few, many = (self.median(name, which) for name in NODE_COUNTS)
        small, large = NODE_COUNTS.values()
        return (few / small, many / large) if few and many else None

    def node_time_row(self) -> Row:
        first, second = self.node_times(FIRST_SCAN), self.node_times(SECOND_SCAN)
        note = ""
        if first and second:
            note = "ns a node: " + ", ".join(
                f"{few * 1e9:.0f} and {many * 1e9:.0f} in the {which}"
                for which, (few, many) in ((FIRST_SCAN, first), (SECOND_SCAN, second)))
        ratio = first[0] / first[1] if first else None
        return Row(NODE_TIME.workload, NODE_TIME.contender, NODE_TIME.rival, ratio, NODE_TIME.must, note=note)

    def memory_row(self, target: MemoryTarget) -> Row:
        ours = self.memory.get((target.workload, target.contender))
        bound = target.limit if target.rival is None else self.memory.get((target.workload, target.rival))
        rival = target.rival or f"a limit of {target.limit:,} B"
        note = self.missing.get((target.workload, target.contender), "") if ours is None else f"peak {ours:,} B"
        # Two runs of one thing differ by some pages: a quarter of a MiB, or 2 %, is no difference.
        slack = 0 if bound is None or target.rival is None else max(1 << 18, bound // 50)
        ratio = None if ours is None or bound is None else (bound + slack) / max(ours, 1)
        return Row(target.workload, f"{target.contender}, memory", rival, ratio, 1, note=note)

    def rows(self) -> list[Row]:
        """Every row whose contender or rival was looked at in this run."""
        exact = [row for row in PICKLER if row.contender == "exact" and row.rival == "cloudpickle"]
        against_asizeof = [Target(row.workload, "analyze", "asizeof", 30) for row in ANALYSIS
                           if self.sized.get(row.workload, 0) >= self.payloads.get(row.workload, 0) / 2]
        rows = [self.row(target) for target in PICKLER]
        rows += [self.mean_row(PICKLER_MEAN, exact)]
        rows += [self.row(target) for target in ANALYSIS]
        rows += [self.mean_row(ANALYSIS_MEANS[0], ANALYSIS), self.mean_row(ANALYSIS_MEANS[1], against_asizeof)]
        rows += [self.row(target) for target in [*SCANNER, *SAVING, *RAY]]
        rows += [self.node_time_row(), *map(self.memory_row, MEMORY)]
        return [row for row in rows if row.ratio is not None or (row.note and not row.note.startswith("over 0"))]


def figure(ratio: float | None) -> str:
    return "–" if ratio is None else f"{ratio:.1f}×" if ratio >= 10 else f"{ratio:.2f}×"


def table(rows: list[Row]) -> str:
    """The rows as text, with a line that counts the verdicts."""
    lines = [("workload", "contender", "against", "ratio", "must", "target", "verdict", "")]
    lines += [(row.workload, row.contender, row.rival, figure(row.ratio), figure(row.must), figure(row.target),
               row.verdict, row.note) for row in rows]
    widths = [max(len(line[column]) for line in lines) for column in range(7)]
    text = ["  ".join([line[column].rjust(widths[column]) if 3 <= column <= 5 else line[column].ljust(widths[column])
                       for column in range(7)] + [line[7]]).rstrip() for line in lines]
    verdicts = [row.verdict for row in rows]
    short = verdicts.count("SHORT")
    missing = verdicts.count("not available")
    below = verdicts.count("pass, below target")
    text.append(f"{len(rows) - short - missing} of {len(rows)} rows pass ({below} of them below target), "
                f"{short} short, {missing} not available")
    return "\n".join(text)


def chart(rows: list[Row]) -> str:
    """The ratios as an SVG: one bar a row on a logarithmic scale, with marks for must and target."""
    shown = [row for row in rows if row.ratio is not None]
    limits = [value for row in shown for value in (row.ratio, row.must, row.target) if value]
    low, high = math.log(min([*limits, 0.5])), math.log(max([*limits, 2]))
    left, width, height = 440, 560, 18

    def x(value: float) -> float:
        return left + width * (math.log(max(value, 1e-6)) - low) / (high - low)

    colors = {"SHORT": "#c0392b", "pass": "#2e7d32", "pass, below target": "#b8860b"}
    parts = [f'<line x1="{x(1):.1f}" x2="{x(1):.1f}" y1="24" y2="{34 + height * len(shown)}" stroke="#888"/>',
             f'<text x="{x(1):.1f}" y="16" text-anchor="middle">1×</text>']
    for index, row in enumerate(shown):
        y = 30 + index * height
        start, end = sorted([x(1), x(row.ratio or 1)])
        label = html.escape(f"{row.workload}: {row.contender} against {row.rival}")
        parts.append(f'<text x="{left - 8}" y="{y + 12}" text-anchor="end">{label}</text>')
        parts.append(f'<rect x="{start:.1f}" y="{y + 2}" width="{max(end - start, 1):.1f}" height="{height - 5}" '
                     f'fill="{colors[row.verdict]}"><title>{label}: {figure(row.ratio)}, must {figure(row.must)}'
                     f'</title></rect>')
        for value, dash in ((row.must, ""), (row.target, ' stroke-dasharray="2"')):
            if value:
                parts.append(f'<line x1="{x(value):.1f}" x2="{x(value):.1f}" y1="{y}" y2="{y + height - 1}" '
                             f'stroke="#000" stroke-width="2"{dash}/>')
        parts.append(f'<text x="{max(x(row.ratio or 1), x(1)) + 6:.1f}" y="{y + 12}">{figure(row.ratio)}</text>')
    total = 40 + height * len(shown)
    return (f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + width + 90}" height="{total}" '
            f'font-family="sans-serif" font-size="11">\n<title>Ratios; line: must, dashes: target</title>\n'
            f'<rect width="100%" height="100%" fill="#fff"/>\n' + "\n".join(parts) + "\n</svg>\n")


def write_results(ledger: Ledger, folder: pathlib.Path = RESULTS) -> list[pathlib.Path]:
    """Write everything measured as JSON and the rows as a chart."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = ledger.rows()
    document = {
        "python": sys.version, "machine": platform.platform(),
        "rows": [dataclasses.asdict(row) | {"verdict": row.verdict} for row in rows],
        "seconds": [{"workload": workload, "contender": contender, "rounds": seconds}
                    for (workload, contender), seconds in ledger.seconds.items()],
        "memory": [{"workload": workload, "contender": contender, "peak": peak}
                   for (workload, contender), peak in ledger.memory.items()],
        "missing": [{"workload": workload, "contender": contender, "reason": reason}
                    for (workload, contender), reason in ledger.missing.items()],
    }
    results, drawing = folder / "results.json", folder / "results.svg"
    results.write_text(json.dumps(document, indent=1), encoding="utf-8")
    drawing.write_text(chart(rows), encoding="utf-8")
    return [results, drawing]
