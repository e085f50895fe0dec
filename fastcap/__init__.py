"""What is in this pickle, why is it there, and how to get it out."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from fastcap.errors import (
    DamagedSave,
    EditError,
    FastcapError,
    NotPicklable,
    NotRestored,
    PayloadError,
    PayloadTooLarge,
    SaveError,
)

if TYPE_CHECKING:
    from fastcap.analysis import analyze, diff, scan
    from fastcap.checking import check
    from fastcap.editing import edit
    from fastcap.loading import Placeholder, Unrestorable, load, loads
    from fastcap.pickling import (
        CloudPickler,
        NativeMixin,
        Pickler,
        dump,
        dumps,
        install,
        installed,
        uninstall,
    )
    from fastcap.saving import restore, save

__version__ = "0.1.0"
__all__ = [
    "CloudPickler",
    "DamagedSave",
    "EditError",
    "FastcapError",
    "NativeMixin",
    "NotPicklable",
    "NotRestored",
    "PayloadError",
    "PayloadTooLarge",
    "Pickler",
    "Placeholder",
    "SaveError",
    "Unrestorable",
    "__version__",
    "analyze",
    "check",
    "diff",
    "dump",
    "dumps",
    "edit",
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
    "Placeholder": "loading",
    "Unrestorable": "loading",
    "analyze": "analysis",
    "check": "checking",
    "diff": "analysis",
    "edit": "editing",
    "load": "loading",
    "loads": "loading",
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
