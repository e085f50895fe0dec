"""Loading pickles whose parts cannot all come back: with other values in their place, or with placeholders.

A pickle outlives what it names. A handle of a Ray actor is dead outside of its cluster, and loading it raises; a class
may have been renamed, a module not be installed. `load` and `loads` take pickle's place where that is so: parts are
replaced by path, without a byte of what they held being executed; handles come back as `Unrestorable`, and what cannot
be imported as `Placeholder`.

Loading executes what the pickle says. None of this makes a stranger's file safe to load; `fastcap.scan` executes
nothing.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO

from fastcap.placeholders import Placeholder, Unrestorable, lenient_unpickler

__all__ = ["Placeholder", "Unrestorable", "load", "loads"]

Handles = Callable[[Unrestorable], Any]

_load, _loads = pickle.load, pickle.loads


def load(
    file: BinaryIO,
    *,
    replace: Mapping[str, Any] | None = None,
    handles: str | Handles | None = None,
    missing: str | None = None,
    **options: Any,
) -> Any:
    """The object in a pickle file, with values in the place of parts that cannot come back.

    ``replace`` maps paths, as `fastcap.scan` shows them, to values. What stood at a path is not executed, not even in
    part, and whatever else refers to the same object gets the value too; strings, bytes and names of classes and
    functions are replaced at the path alone. `fastcap.EditError` names a path that is not there, and those that are
    like it.

    ``handles`` is about Ray's actor handles and object references in the stream, dead or alive, with Ray installed or
    without, except those at or below a path of ``replace``: "placeholder" makes each an `Unrestorable`, "error" raises
    `NotRestored` with their paths before anything is executed, and a function is called with the `Unrestorable` of each
    and returns the value to have instead.

    ``missing="placeholder"`` makes what cannot be imported a `Placeholder` that keeps its arguments and state, and can
    be pickled again. Such a pickle is read by CPython's unpickler in Python, which takes tens of times longer.

    ``options`` are those of `pickle.load`, which this is if nothing else is given. With ``replace`` or ``handles`` the
    rest of the file is read into memory, and should be one pickle.

    Loading executes code that the file names: load only what you trust.
    """
    if replace is None and handles is None and missing is None:
        return _load(file, **options) if options else _load(file)
    if replace is None and handles is None:
        return _unpickler(file, missing, options).load()
    return loads(file.read(), replace=replace, handles=handles, missing=missing, **options)


def loads(
    data: Any,
    /,
    *,
    replace: Mapping[str, Any] | None = None,
    handles: str | Handles | None = None,
    missing: str | None = None,
    **options: Any,
) -> Any:
    """`load` from bytes."""
    if replace is None and handles is None and missing is None:
        return _loads(data, **options) if options else _loads(data)
    if replace is None and handles is None:
        return _unpickler(io.BytesIO(data), missing, options).load()
    # Loaded here, so that those who replace nothing need not wait for it.
    from fastcap.substitution import substitute

    stream, value_of = substitute(data, replace or {}, handles, options)
    return load_with_ids(stream, value_of, missing, **options)


def load_with_ids(file: BinaryIO, value_of: Callable[[Any], Any], missing: str | None = None, **options: Any) -> Any:
    """The object in a stream that has persistent ids in place of parts; ``value_of`` gives the value of each."""
    unpickler = _unpickler(file, missing, options)
    unpickler.value_of = value_of
    return unpickler.load()


class _Unpickler(pickle.Unpickler):
    """One that knows what persistent ids stand for."""

    value_of: Callable[[Any], Any]

    def persistent_load(self, pid: Any) -> Any:
        return self.value_of(pid)


def _unpickler(file: BinaryIO, missing: str | None, options: dict[str, Any]) -> Any:
    if missing not in (None, "placeholder"):
        raise ValueError(f"missing is None or 'placeholder', not {missing!r}")
    return (_Unpickler if missing is None else lenient_unpickler)(file, **options)
