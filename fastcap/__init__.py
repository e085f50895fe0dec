"""What is in this pickle, why is it there, and how to get it out."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from fastcap.errors import DamagedSave, FastcapError, NotPicklable, PayloadError, PayloadTooLarge, SaveError

if TYPE_CHECKING:
    from fastcap.analysis import analyze, diff, scan
    from fastcap.checking import check
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
    from fastcap.saving import restore, save

__version__ = "0.1.0"
__all__ = [
    "CloudPickler",
    "DamagedSave",
    "FastcapError",
    "NativeMixin",
    "NotPicklable",
    "PayloadError",
    "PayloadTooLarge",
    "Pickler",
    "SaveError",
    "__version__",
    "analyze",
    "check",
    "diff",
    "dump",
    "dumps",
    "install",
    "installed",
    "load",
    "loads",
    "restore",
    "save",
    "scan",
    "uninstall",
]

# Loaded at their first use: a process that only ships objects should not pay for reports, and a test run that only has
# the pytest plugin installed should pay for nothing.
_LAZY = {
    "analyze": "analysis",
    "check": "checking",
    "diff": "analysis",
    "restore": "saving",
    "save": "saving",
    "scan": "analysis",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f"{__name__}.{_LAZY.get(name, 'pickling')}")
    value = globals()[name] = getattr(module, name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
