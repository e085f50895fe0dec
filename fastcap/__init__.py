"""What is in this pickle, why is it there, and how to get it out."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from fastcap.errors import FastcapError, PayloadError
from fastcap.pickling import (
    CloudPickler,
    NativeMixin,
    Pickler,
    dump,
    dumps,
    install,
    installed,
    load,
    loads,
    uninstall,
)

if TYPE_CHECKING:
    from fastcap.analysis import analyze, scan

__version__ = "0.1.0"
__all__ = [
    "CloudPickler",
    "FastcapError",
    "NativeMixin",
    "PayloadError",
    "Pickler",
    "__version__",
    "analyze",
    "dump",
    "dumps",
    "install",
    "installed",
    "load",
    "loads",
    "scan",
    "uninstall",
]

# Loaded at their first use: a process that only ships objects should not pay for reports.
_LAZY = {"analyze": "fastcap.analysis", "scan": "fastcap.analysis"}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_LAZY[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
