from collections.abc import Callable, Mapping
from typing import Any, Protocol, SupportsIndex

class _Writer(Protocol):
    def write(self, data: Any, /) -> object: ...

_Reducer = Callable[[Any], Any]

class PicklerMemoProxy:
    def clear(self) -> None: ...
    def copy(self) -> dict[int, tuple[int, Any]]: ...

class Pickler:
    """Drop-in for ``pickle.Pickler``: the same bytes, written by an encoder with its own work stack.

    ``file.write`` gets bytes objects, and memoryviews or bytearrays for payloads of 64 KiB and more, which are never
    copied. Hooks are those of ``pickle.Pickler`` of the running Python; ``_native_reduce`` is a callable
    ``f(pickler, obj)`` that is asked in the place of ``reducer_override``, but only for functions, classes and objects
    whose ``__class__`` is not their type's.

    ``compact`` leaves objects that nothing else can reach out of the memo and writes torch tensors as plain buffers:
    loading gives an equal graph with the same sharing. Nothing is written before the dump has succeeded, reducers may
    be called twice, and sharing is kept within one dump only.

    Raises what ``pickle.Pickler`` raises; from Python 3.11 on with a note that gives the path of the object that
    failed. RuntimeError where a dump is started on a pickler that is dumping.
    """

    bin: int
    fast: int
    dispatch_table: Mapping[type, _Reducer]
    @property
    def memo(self) -> PicklerMemoProxy: ...
    @memo.setter
    def memo(self, value: PicklerMemoProxy | dict[int, tuple[int, Any]]) -> None: ...
    _native_reduce: Callable[[Pickler, Any], Any] | None
    _on_unpicklable: Callable[[Any, Exception], int] | None
    _replacements: dict[int, tuple[Any, ...]] | None
    _recorded: dict[int, tuple[Any, tuple[Any, ...]]] | None
    def __init__(
        self,
        file: _Writer,
        protocol: SupportsIndex | None = None,
        fix_imports: bool = True,
        buffer_callback: Callable[[Any], Any] | None = None,
        *,
        compact: bool = False,
    ) -> None: ...
    def dump(self, obj: Any, /) -> None: ...
    def clear_memo(self) -> None: ...
    def persistent_id(self, obj: Any, /) -> Any: ...
    def _memo_objects(self) -> list[Any]: ...

def dumps(
    obj: Any,
    protocol: SupportsIndex | None = None,
    *,
    fix_imports: bool = True,
    buffer_callback: Callable[[Any], Any] | None = None,
    compact: bool = False,
    dispatch_table: Mapping[type, _Reducer] | None = None,
    native_reduce: Callable[[Pickler, Any], Any] | None = None,
) -> bytes:
    """The pickle of *obj* in a bytes object of just its size; *dispatch_table* and *native_reduce* as on a Pickler."""
