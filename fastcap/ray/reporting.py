"""What this process has in Ray's object store on behalf of definitions."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from fastcap.ray.parts import SHELF, Part
from fastcap.report import format_size


@dataclass(frozen=True, slots=True)
class Entry:
    """One put. ``size`` is in bytes."""

    name: str  # of the definition that it was first exported with
    path: str  # of the object in that definition
    type: str
    what: str
    size: int
    where: str  # on which node it was put, and which process owns it
    ref: str  # the object reference, in hexadecimal
    export_count: int  # how often it was met in something that was exported


@dataclass(frozen=True, slots=True)
class RayReport:
    """All puts that are held, biggest first."""

    entries: tuple[Entry, ...]

    @property
    def size(self) -> int:
        """Bytes in all."""
        return sum(entry.size for entry in self.entries)

    def to_dict(self) -> dict[str, Any]:
        """``{"size": bytes, "entries": [{"name": ..., "path": ..., "size": ..., "where": ..., ...}]}``."""
        return {"size": self.size, "entries": [asdict(entry) for entry in self.entries]}

    def __str__(self) -> str:
        if not self.entries:
            return "fastcap has put nothing into Ray's object store"
        count = f"{len(self.entries)} object{'s' if len(self.entries) > 1 else ''}"
        lines = [f"fastcap has put {count} of {format_size(self.size)} into Ray's object store"]
        for entry in self.entries:
            lines.append(f"  {format_size(entry.size):>10}  {entry.path}  {entry.what}")
            lines.append(f"{'':14}exported {entry.export_count}x with {entry.name}; in {entry.where}")
        return "\n".join(lines)


def report() -> RayReport:
    """What was slimmed and is held by this process in the cluster that it is connected to."""
    found = [_entry(part) for part in SHELF.parts()]
    return RayReport(tuple(sorted(found, key=lambda entry: (-entry.size, entry.path))))


def _entry(part: Part) -> Entry:
    info = part.info
    return Entry(
        part.name, info.path, info.type, info.what, info.size, part.where, part.reference.hex(), part.exports
    )
