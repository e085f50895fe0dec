"""Pickling like cloudpickle, natively: ``dump(s)``, ``Pickler``, and installing them into a copy of cloudpickle.

A *flavor* is a copy of cloudpickle: the package itself, or the one that Ray, joblib or PySpark carry. The bytes of a
flavor are read by that flavor, and by nothing else that is not in the standard library; fastcap is not needed to read
them. Reducers that are registered with the flavor's ``CloudPickler.dispatch`` count here as well.
"""

from __future__ import annotations

import _pickle
import contextlib
import functools
import importlib
import io
import pickle
import sys
import threading
import weakref
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol

from fastcap._native import pickler as _native
from fastcap._native.reducers import Flavor, Reducer
from fastcap.errors import FastcapError

if TYPE_CHECKING:
    from fastcap.stores import Store

__all__ = [
    "FLAVORS",
    "CloudPickler",
    "NativeMixin",
    "Pickler",
    "dump",
    "dumps",
    "install",
    "installed",
    "load",
    "loads",
    "uninstall",
    "watch_dumps",
]

#: The copies of cloudpickle that fastcap knows, by the name of their package.
FLAVORS = ("cloudpickle", "ray.cloudpickle", "joblib.externals.cloudpickle", "pyspark.cloudpickle")

BufferCallback = Callable[[pickle.PickleBuffer], Any]

load = pickle.load
loads = pickle.loads


class Writable(Protocol):
    """What a pickle can be written to."""

    def write(self, data: bytes, /) -> Any: ...


_flavors: dict[str, Flavor] = {}


def _flavor(name: str) -> Flavor:
    """The flavor called `name`; imports its package at the first use.

    Raises ValueError if there is no such flavor, ImportError if its package is not there or too old.
    """
    found = _flavors.get(name)
    if found is not None:
        return found
    if name not in FLAVORS:
        raise ValueError(f"unknown flavor {name!r}: expected one of {', '.join(map(repr, FLAVORS))}")
    try:
        module = importlib.import_module(f"{name}.cloudpickle")
    except ImportError as error:
        raise ImportError(f"flavor {name!r} is not available: {error}", name=f"{name}.cloudpickle") from error
    try:
        flavor = Flavor(module, module.Pickler)
    except (AttributeError, KeyError) as error:
        raise ImportError(
            f"flavor {name!r} is not supported: {module.__file__} lacks {error}; cloudpickle 3.0 or newer is needed",
            name=f"{name}.cloudpickle",
        ) from error
    for method in ("_function_reduce", "_dynamic_function_reduce", "_function_getnewargs"):
        flavor.add_stand_in(method, CloudPickler.__dict__[method])
    flavor.add_stand_in("reducer_override", CloudPickler.__dict__["reducer_override"])
    flavor.add_stand_in("reducer_override", NativeMixin.__dict__["reducer_override"])
    return _flavors.setdefault(name, flavor)


def _too_deep(error: RecursionError) -> pickle.PicklingError:
    """What cloudpickle makes of a RecursionError; here it can only come out of a reducer."""
    wrapped = pickle.PicklingError("Could not pickle object as excessively deep recursion required.")
    wrapped.__cause__ = error
    return wrapped


# ---- watching --------------------------------------------------------------------------------------------------------


class Watch(Protocol):
    """What is told about one dump; see `watch_dumps`."""

    def write(self, data: Any, /) -> Any:
        """Gets what the file of the dump gets."""

    def add_buffer(self, size: int, /) -> None:
        """A buffer of so many bytes stays out of band."""

    def finish(self) -> None:
        """The dump is complete. Not called for one that failed."""


WatchFactory = Callable[[Any, str, bool, Any], "Watch | None"]
_watchers: list[WatchFactory] = []


@contextlib.contextmanager
def watch_dumps(start: WatchFactory) -> Iterator[None]:
    """Meanwhile ``start(obj, flavor, has_buffer_callback, file)`` is called before each dump that fastcap does.

    It returns the `Watch` of that dump, or None, and runs in the thread of the dump, of which there may be several. To
    see what a copy of cloudpickle dumps, `install` it; picklers that have dumped before are not watched.
    """
    _watchers.append(start)
    try:
        yield
    finally:
        _watchers.remove(start)


class _Tee:
    """The file and the buffer callback of a pickler whose dumps are watched."""

    __slots__ = ("buffer_callback", "file", "flavor", "own_callback", "watches")

    def __init__(self, flavor: Flavor, file: Any, buffer_callback: BufferCallback | None) -> None:
        self.flavor = flavor.module.__name__.removesuffix(".cloudpickle")
        self.file = file
        self.own_callback = buffer_callback
        self.buffer_callback = self.pass_buffer if buffer_callback is not None else None
        self.watches: list[Watch] = []

    def write(self, data: Any) -> Any:
        result = self.file.write(data)
        for watch in self.watches:
            watch.write(data)
        return result

    def pass_buffer(self, buffer: pickle.PickleBuffer) -> Any:
        assert self.own_callback is not None
        in_band = self.own_callback(buffer)
        if not in_band:
            with memoryview(buffer) as view:
                for watch in self.watches:
                    watch.add_buffer(view.nbytes)
        return in_band

    @contextlib.contextmanager
    def watching(self, obj: Any) -> Iterator[None]:
        started = [start(obj, self.flavor, self.own_callback is not None, self.file) for start in list(_watchers)]
        self.watches = [watch for watch in started if watch is not None]
        try:
            yield
            for watch in self.watches:
                watch.finish()
        finally:
            self.watches = []


# ---- functions -------------------------------------------------------------------------------------------------------


def dumps(
    obj: Any,
    protocol: int | None = None,
    buffer_callback: BufferCallback | None = None,
    *,
    compact: bool = False,
    flavor: str = "cloudpickle",
    store: Store | None = None,
    min_size: int | str | None = None,
) -> bytes:
    """Pickle `obj` and return the bytes that ``flavor.dumps(obj, protocol, buffer_callback)`` would return.

    With ``compact=True`` they load to an equal object with the same sharing, but are fewer. ``protocol`` is the
    flavor's default, the highest one, unless it is given. Raises what the flavor raises: most often TypeError or
    pickle.PicklingError; ValueError for a `flavor` that is not in `FLAVORS`, ImportError for one that is not installed.

    With a ``store``, a part of the payload that takes at least ``min_size`` (bytes, or such as ``"1 MiB"``, which is
    the default) and is nothing but data goes there, and the bytes say how to get it back: see `fastcap.slimming`.
    What is smaller than that as a whole is pickled as without a store.
    """
    if store is not None or min_size is not None:
        data: bytes = _slimming(store).slim_dumps(obj, store, min_size, protocol, buffer_callback, compact, flavor)
        return data
    return _dumps(_flavors.get(flavor) or _flavor(flavor), obj, protocol, buffer_callback, compact)


def dump(
    obj: Any,
    file: Writable,
    protocol: int | None = None,
    buffer_callback: BufferCallback | None = None,
    *,
    compact: bool = False,
    flavor: str = "cloudpickle",
    store: Store | None = None,
    min_size: int | str | None = None,
) -> None:
    """Pickle `obj` into `file`, whose ``write`` gets bytes or memoryviews. See `dumps`."""
    if store is not None or min_size is not None:
        _slimming(store).slim_dump(obj, file, store, min_size, protocol, buffer_callback, compact, flavor)
        return
    _dump(_flavors.get(flavor) or _flavor(flavor), obj, file, protocol, buffer_callback, compact)


def _slimming(store: Store | None) -> Any:
    if store is None:
        raise TypeError("min_size is the smallest part that goes to a store, but there is no store")
    # It stands on this module; loaded by name, because only dumps into a store need it and what it brings along.
    return sys.modules.get("fastcap.slimming") or importlib.import_module("fastcap.slimming")


def _dumps(
    flavor: Flavor, obj: Any, protocol: int | None, buffer_callback: BufferCallback | None, compact: bool
) -> bytes:
    hooks = flavor.hooks()
    if hooks is None or _watchers:
        with io.BytesIO() as file:
            _dump(flavor, obj, file, protocol, buffer_callback, compact)
            return file.getvalue()
    try:
        return _native.dumps(
            obj,
            flavor.module.DEFAULT_PROTOCOL if protocol is None else protocol,
            buffer_callback=buffer_callback,
            compact=compact,
            dispatch_table=hooks[0],
            native_reduce=hooks[1],
        )
    except RecursionError as error:
        raise _too_deep(error) from error


def _dump(
    flavor: Flavor,
    obj: Any,
    file: Writable,
    protocol: int | None,
    buffer_callback: BufferCallback | None,
    compact: bool,
    setup: Setup | None = None,
) -> None:
    if _watchers and not isinstance(file, _Tee):
        tee = _Tee(flavor, file, buffer_callback)
        with tee.watching(obj):
            _dump(flavor, obj, tee, protocol, tee.buffer_callback, compact, setup)
        return
    hooks = flavor.hooks()
    if hooks is None:
        _dump_with_class(flavor, obj, file, protocol, buffer_callback, compact, setup)
        return
    if protocol is None:
        protocol = flavor.module.DEFAULT_PROTOCOL
    pickler = _native.Pickler(file, protocol, True, buffer_callback, compact=compact)
    pickler.dispatch_table, pickler._native_reduce = hooks
    if setup is not None:
        setup(pickler)
    try:
        pickler.dump(obj)
    except RecursionError as error:
        raise _too_deep(error) from error


Setup = Callable[[_native.Pickler], None]
"""Gets the encoder of a dump before it begins."""


def dump_prepared(
    obj: Any,
    file: Writable,
    protocol: int | None = None,
    buffer_callback: BufferCallback | None = None,
    *,
    compact: bool = False,
    flavor: str = "cloudpickle",
    setup: Setup,
    watched: bool,
) -> None:
    """`dump` whose encoder is set up by the caller; unless it is ``watched``, nothing is told of it (`watch_dumps`)."""
    own = _flavor(flavor)
    if not watched:
        file = _Tee(own, file, None)
        if buffer_callback is not None:
            raise TypeError("a dump that is not watched has no buffer_callback")
    _dump(own, obj, file, protocol, buffer_callback, compact, setup)


def write_dumped(obj: Any, file: Writable, data: bytes, *, flavor: str = "cloudpickle") -> None:
    """Write what an unwatched dump of `obj` has made; `watch_dumps` sees it as the dump."""
    if not _watchers:
        file.write(data)
        return
    tee = _Tee(_flavor(flavor), file, None)
    with tee.watching(obj):
        tee.write(data)


def trace(
    obj: Any,
    file: Writable,
    protocol: int | None = None,
    *,
    flavor: str = "cloudpickle",
    on_unpicklable: Callable[[Any, Exception], int],
    reducers: Mapping[type, Callable[[Any], Any]],
) -> list[Any]:
    """Dump for analysis, and return the memoized objects in the order of their memo indices.

    Each object that fails is given to ``on_unpicklable``, whose answer is written in its place; what ends the dump
    nonetheless is the cause of a `DumpBroken`. ``reducers`` go before those of the flavor.
    """
    own = _flavor(flavor)
    hooks = own.hooks()
    if protocol is None:
        protocol = own.module.DEFAULT_PROTOCOL
    dump: Callable[[], None]
    encoder: _native.Pickler
    if hooks is None:
        pickler = own.module.Pickler(file, protocol=protocol)
        route = _Route(own, file, pickler.proto, None)
        encoder = route.open()
        with contextlib.suppress(AttributeError):
            pickler.dispatch_table = ChainMap({**reducers}, _C_DISPATCH_TABLE.__get__(pickler))
        dump = functools.partial(_routed_dump, pickler, route, obj)
    else:
        encoder = _native.Pickler(file, protocol)
        encoder.dispatch_table, encoder._native_reduce = hooks
        if reducers:
            maps = getattr(encoder.dispatch_table, "maps", [encoder.dispatch_table])
            encoder.dispatch_table = ChainMap({**reducers}, *maps)
        dump = functools.partial(encoder.dump, obj)
    encoder._on_unpicklable = on_unpicklable
    try:
        dump()
    except (MemoryError, FastcapError):
        raise
    except Exception as error:
        raise DumpBroken from error
    finally:
        encoder._on_unpicklable = None
    return encoder._memo_objects()


class DumpBroken(FastcapError):
    """A `trace` could not go on; ``__cause__`` is what the pickler raised."""


def _dump_with_class(
    flavor: Flavor,
    obj: Any,
    file: Writable,
    protocol: int | None,
    buffer_callback: BufferCallback | None,
    compact: bool,
    setup: Setup | None = None,
) -> None:
    """Dump through an instance of the flavor's Pickler, for when other code has patched or replaced that class."""
    pickler = flavor.module.Pickler(file, protocol=protocol, buffer_callback=buffer_callback)
    if compact or setup is not None:
        route = _Route(flavor, file, pickler.proto, buffer_callback, compact=compact)
        if setup is not None:
            setup(route.open())
        _routed_dump(pickler, route, obj)
    else:
        pickler.dump(obj)


# ---- a pickler class -------------------------------------------------------------------------------------------------


class CloudPickler(_native.Pickler):
    """``cloudpickle.CloudPickler`` with a native encoder and native reducers: the same bytes, methods and attributes.

    Subclasses override ``persistent_id``, ``reducer_override``, ``dispatch_table`` and the reducers of functions as
    they do in cloudpickle. ``compact`` and ``flavor`` are as for `dumps`. The class attributes ``dispatch`` and
    ``dispatch_table`` are those of ``cloudpickle.CloudPickler``, the very objects; a pickler of another flavor uses
    that flavor's, unless a subclass has a ``dispatch_table`` of its own.
    """

    dispatch_table: Any
    dispatch: Any
    _tee: _Tee | None = None

    def __init__(
        self,
        file: Writable,
        protocol: int | None = None,
        buffer_callback: BufferCallback | None = None,
        *,
        compact: bool = False,
        flavor: str = "cloudpickle",
    ) -> None:
        own = _flavor(flavor)
        if protocol is None:
            protocol = own.module.DEFAULT_PROTOCOL
        if _watchers:
            self._tee = _Tee(own, file, buffer_callback)
            file, buffer_callback = self._tee, self._tee.buffer_callback
        super().__init__(file, protocol, True, buffer_callback, compact=compact)
        table = self.dispatch_table
        if table is CloudPickler.dispatch_table:
            table = own.pickler_class.dispatch_table
        _NATIVE_DISPATCH_TABLE.__set__(self, own.with_stand_ins(table))
        self.globals_ref: dict[int, dict[str, Any]] = {}
        self.proto = int(protocol)
        self._reducer = Reducer(own, type(self))
        _NATIVE_REDUCE.__set__(self, self._reducer.reduce)

    def dump(self, obj: Any, /) -> None:
        """Write the pickle of `obj`. What was dumped before is referred to, until `clear_memo`."""
        try:
            if _watchers and self._tee is not None:
                with self._tee.watching(obj):
                    super().dump(obj)
            else:
                super().dump(obj)
        except RecursionError as error:
            raise _too_deep(error) from error

    def reducer_override(self, obj: Any) -> Any:
        """The reduce value of a function or class that goes by value; NotImplemented for everything else."""
        return self._reducer.reduce(self, obj)

    def _native_reduce(self, obj: Any) -> Any:  # type: ignore[override]  # a method is f(pickler, obj) as well
        # The encoder takes this, and in __init__ the faster bound method, for what reducer_override above does: it
        # then asks for functions and classes only, unless a subclass has a reducer_override of its own.
        return self._reducer.reduce(self, obj)

    def _function_reduce(self, obj: Any) -> Any:
        return self._reducer.flavor.own_methods["_function_reduce"](self, obj)

    def _dynamic_function_reduce(self, func: Any) -> Any:
        return self._reducer.flavor.own_methods["_dynamic_function_reduce"](self, func)

    def _function_getnewargs(self, func: Any) -> Any:
        return self._reducer.flavor.own_methods["_function_getnewargs"](self, func)


Pickler = CloudPickler

# The encoder's own attributes, which class attributes of CloudPickler and its subclasses hide.
_NATIVE_DISPATCH_TABLE: Any = _native.Pickler.__dict__["dispatch_table"]
_NATIVE_REDUCE: Any = _native.Pickler.__dict__["_native_reduce"]


# ---- routing cloudpickle's own picklers ------------------------------------------------------------------------------
# cloudpickle's class stays what it is, a subclass of the C pickler, and so do its subclasses, their instances and every
# isinstance: only `__init__` and `dump` are exchanged. The C pickler under a routed pickler is initialised as ever, and
# is the place where its hooks are read from; a native encoder does the work.

_C_DISPATCH_TABLE: Any = _pickle.Pickler.__dict__["dispatch_table"]
_C_MEMO: Any = _pickle.Pickler.__dict__["memo"]
_C_PERSISTENT_ID: Any = _pickle.Pickler.__dict__["persistent_id"]


class _Encoder(_native.Pickler):
    """The native encoder of a routed pickler; its hooks are set for each dump."""

    reducer_override: Any


class _Route:
    """What fastcap adds to one of cloudpickle's picklers."""

    __slots__ = ("arguments", "compact", "encoder", "flavor", "tee")

    def __init__(
        self, flavor: Flavor, file: Any, protocol: int, buffer_callback: BufferCallback | None, compact: bool = False
    ) -> None:
        self.flavor = flavor
        self.arguments = (file, protocol, True, buffer_callback)
        self.compact = compact
        self.encoder: _Encoder | None = None
        self.tee: _Tee | None = None

    def open(self) -> _Encoder:
        if self.encoder is None:
            file, protocol, fix_imports, buffer_callback = self.arguments
            if _watchers and not isinstance(file, _Tee):
                self.tee = _Tee(self.flavor, file, buffer_callback)
                file, buffer_callback = self.tee, self.tee.buffer_callback
            self.encoder = _Encoder(file, protocol, fix_imports, buffer_callback, compact=self.compact)
        return self.encoder


_ROUTE = "_fastcap_route"


def _route_of(pickler: Any) -> _Route | None:
    route: _Route | None = pickler.__dict__.get(_ROUTE)
    return route


def _persistent_id_of(pickler: Any) -> Any:
    """The hook that the C pickler under `pickler` would call, or None."""
    if sys.version_info < (3, 13):
        # Looked up by the C pickler's __init__ and kept there; unset by default.
        try:
            return _C_PERSISTENT_ID.__get__(pickler)
        except AttributeError:
            return None
    # Looked up at each dump; a method that returns None by default.
    if type(pickler).persistent_id is _C_PERSISTENT_ID and "persistent_id" not in pickler.__dict__:
        return None
    return pickler.persistent_id


def _routed_dump(pickler: Any, route: _Route, obj: Any) -> None:
    flavor = route.flavor
    encoder: Any = route.open()
    encoder.fast = pickler.fast
    try:
        table = _C_DISPATCH_TABLE.__get__(pickler)
    except AttributeError:
        pass
    else:
        encoder.dispatch_table = flavor.with_stand_ins(table)
    persistent_id = _persistent_id_of(pickler)
    if persistent_id is not None:
        encoder.persistent_id = persistent_id
    cls = type(pickler)
    if flavor.keeps_override(cls) and "reducer_override" not in pickler.__dict__:
        encoder._native_reduce = Reducer(flavor, cls, pickler).reduce
    else:
        encoder.reducer_override = pickler.reducer_override
    try:
        if _watchers and route.tee is not None:
            with route.tee.watching(obj):
                encoder.dump(obj)
        else:
            encoder.dump(obj)
    except RecursionError as error:
        raise _too_deep(error) from error
    finally:
        # These refer back to the pickler, which owns the encoder.
        encoder._native_reduce = None
        encoder.__dict__.clear()
        if persistent_id is not None:
            encoder.persistent_id = _no_persistent_id


def _no_persistent_id(obj: Any) -> None:
    """Stands for an unset hook between dumps."""


def _get_memo(pickler: Any) -> Any:
    """The memo, as ``pickle.Pickler.memo``."""
    route = _route_of(pickler)
    return _C_MEMO.__get__(pickler) if route is None else route.open().memo


def _set_memo(pickler: Any, memo: Any) -> None:
    route = _route_of(pickler)
    if route is None:
        _C_MEMO.__set__(pickler, memo)
    else:
        route.open().memo = memo if isinstance(memo, dict) else memo.copy()


def _clear_memo(pickler: Any) -> None:
    """Forget what was dumped, as ``pickle.Pickler.clear_memo``."""
    _pickle.Pickler.clear_memo(pickler)
    route = _route_of(pickler)
    if route is not None and route.encoder is not None:
        route.encoder.clear_memo()


def _flavor_of_class(cls: type) -> Flavor:
    for name in FLAVORS:
        if f"{name}.cloudpickle" not in sys.modules:
            continue  # nothing can have inherited from it
        try:
            flavor = _flavor(name)
        except ImportError:
            continue  # too old
        if issubclass(cls, flavor.pickler_class):
            return flavor
    raise TypeError(f"{cls.__qualname__} must also inherit from the CloudPickler of a flavor: {', '.join(FLAVORS)}")


class NativeMixin:
    """Makes a subclass of some flavor's CloudPickler native: ``class Mine(NativeMixin, cloudpickle.CloudPickler)``.

    The class keeps its place in the family (``isinstance(x, pickle.Pickler)`` included) and everything it overrides;
    only the work below ``dump`` is done natively. Put the mixin directly before CloudPickler.
    """

    def __init__(self, file: Any, protocol: int | None = None, buffer_callback: BufferCallback | None = None) -> None:
        flavor = _flavor_of_class(type(self))
        if protocol is None:
            protocol = flavor.module.DEFAULT_PROTOCOL
        super().__init__(file, protocol, buffer_callback)  # type: ignore[call-arg]
        self.__dict__[_ROUTE] = _Route(flavor, file, protocol, buffer_callback)

    def dump(self, obj: Any, /) -> None:
        """Write the pickle of `obj`."""
        route = _route_of(self)
        if route is None:
            super().dump(obj)  # type: ignore[misc]
        else:
            _routed_dump(self, route, obj)

    def reducer_override(self, obj: Any) -> Any:
        """The reduce value of a function or class that goes by value; NotImplemented for everything else."""
        return Reducer(_flavor_of_class(type(self)), type(self)).reduce(self, obj)

    memo = property(_get_memo, _set_memo)
    clear_memo = _clear_memo


# ---- installing ------------------------------------------------------------------------------------------------------


class Patch:
    """One attribute that `install` has set: where it was, and what was there."""

    __slots__ = ("name", "original", "owner", "value")

    def __init__(self, owner: Any, name: str, value: Any) -> None:
        self.owner = owner
        self.name = name
        self.value = value
        self.original = vars(owner).get(name, _ABSENT)
        setattr(owner, name, value)

    def undo(self) -> None:
        # Whatever someone else has put there in the meantime is not ours to take away.
        if vars(self.owner).get(self.name, _ABSENT) is not self.value:
            return
        if self.original is _ABSENT:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, self.original)


_ABSENT = object()


class _Installation:
    """A flavor whose ``dump``, ``dumps`` and ``Pickler`` are native; undone when its count is down to zero."""

    def __init__(self, name: str, flavor: Flavor) -> None:
        self.flavor = flavor
        self.count = 0
        self.patches: list[Patch] = []
        # Picklers with a native encoder: when they go back to the C pickler, it has to know what they have dumped.
        self.picklers: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        module, cls = flavor.module, flavor.pickler_class
        own_functions = {attribute: getattr(module, attribute) for attribute in ("dump", "dumps")}
        functions = self.functions(own_functions)
        methods = self.methods(vars(cls)["__init__"], vars(cls)["dump"])
        for attribute, function in methods.items():
            if attribute in flavor.own_methods:
                flavor.add_stand_in(attribute, function)
            self.patches.append(Patch(cls, attribute, function))
        for attribute, own in own_functions.items():
            for owner in self.modules(name):
                for alias, value in list(vars(owner).items()):
                    if value is own:
                        self.patches.append(Patch(owner, alias, functions[attribute]))

    def undo(self) -> None:
        for patch in reversed(self.patches):
            patch.undo()
        for reference in self.picklers.valuerefs():  # a snapshot: other threads may be adding to them
            pickler = reference()
            route = None if pickler is None else pickler.__dict__.pop(_ROUTE, None)
            if route is not None and route.encoder is not None:
                _C_MEMO.__set__(pickler, route.encoder.memo.copy())

    @staticmethod
    def modules(name: str) -> list[Any]:
        """The modules of the package, in which its functions may have been imported under their names."""
        return [
            module
            for key, module in list(sys.modules.items())
            if isinstance(key, str) and (key == name or key.startswith(name + ".")) and isinstance(module, ModuleType)
        ]

    def functions(self, own: dict[str, Callable[..., Any]]) -> dict[str, Callable[..., Any]]:
        flavor = self.flavor

        @functools.wraps(own["dump"])
        def dump(
            obj: Any, file: Any, protocol: int | None = None, buffer_callback: BufferCallback | None = None
        ) -> None:
            _dump(flavor, obj, file, protocol, buffer_callback, False)

        @functools.wraps(own["dumps"])
        def dumps(obj: Any, protocol: int | None = None, buffer_callback: BufferCallback | None = None) -> bytes:
            return _dumps(flavor, obj, protocol, buffer_callback, False)

        return {"dump": dump, "dumps": dumps}

    def methods(self, own_init: Callable[..., None], own_dump: Callable[..., None]) -> dict[str, Any]:
        flavor, picklers = self.flavor, self.picklers

        @functools.wraps(own_init)
        def __init__(
            self: Any, file: Any, protocol: int | None = None, buffer_callback: BufferCallback | None = None
        ) -> None:
            if protocol is None:
                protocol = flavor.module.DEFAULT_PROTOCOL
            own_init(self, file, protocol, buffer_callback)
            self.__dict__[_ROUTE] = _Route(flavor, file, protocol, buffer_callback)

        @functools.wraps(own_dump)
        def dump(self: Any, obj: Any) -> None:
            route = _route_of(self)
            if route is None:  # made before fastcap was installed: the C pickler may have a memo already
                own_dump(self, obj)
                return
            if route.encoder is None:
                picklers[id(self)] = self
            _routed_dump(self, route, obj)

        def reducer_override(self: Any, obj: Any) -> Any:
            return Reducer(flavor, type(self)).reduce(self, obj)

        functools.update_wrapper(reducer_override, flavor.own_methods["reducer_override"])
        return {
            "__init__": __init__,
            "dump": dump,
            "reducer_override": reducer_override,
            "memo": property(_get_memo, _set_memo),
            "clear_memo": _clear_memo,
        }


_installations: dict[str, _Installation] = {}
_install_lock = threading.RLock()


def _names(flavors: tuple[str, ...]) -> list[str]:
    if not flavors:
        raise TypeError(f"name at least one flavor: {', '.join(map(repr, FLAVORS))} or 'all'")
    names: list[str] = []
    for flavor in flavors:
        if flavor == "all":
            # Importing Ray or PySpark only to patch it would be a strange thing to do.
            names.extend(name for name in FLAVORS if name in sys.modules and name not in names)
        elif flavor not in names:
            names.append(flavor)
    return names


def install(*flavors: str) -> list[str]:
    """Make copies of cloudpickle native: ``install("ray.cloudpickle")``. Returns the names of the flavors.

    Their ``dump``, ``dumps``, ``Pickler`` and ``CloudPickler`` write the same bytes as before, in less time. Subclasses
    and registered reducers are kept, and the classes stay the same objects; code that has imported ``dumps`` by name
    gains less than code that says ``cloudpickle.dumps``. ``"all"`` stands for every flavor that has been imported.

    Can be called from any thread, and nested: as many `uninstall` calls restore the flavor. Raises ValueError for an
    unknown flavor and ImportError for one that is not there; nothing has been installed then.
    """
    with _install_lock:
        found = [(name, _flavor(name)) for name in _names(flavors)]
        for name, flavor in found:
            installation = _installations.get(name)
            if installation is None:
                installation = _installations[name] = _Installation(name, flavor)
            installation.count += 1
        return [name for name, _ in found]


def uninstall(*flavors: str) -> None:
    """Undo one `install` of each of the flavors; those that are not installed are left alone.

    ``"all"`` stands for every flavor that has been imported. After the last `uninstall` the flavor is as it was, except
    for what other code has set in the meantime.
    """
    with _install_lock:
        for name in _names(flavors):
            if name not in FLAVORS:
                _flavor(name)
            installation = _installations.get(name)
            if installation is None:
                continue
            installation.count -= 1
            if installation.count == 0:
                del _installations[name]
                installation.undo()


@contextlib.contextmanager
def installed(*flavors: str) -> Iterator[None]:
    """``with installed("cloudpickle"): ...`` -- `install` on entry, `uninstall` of the same flavors on exit."""
    names = install(*flavors)
    try:
        yield
    finally:
        if names:
            uninstall(*names)


_default = _flavor("cloudpickle")
CloudPickler.dispatch_table = _default.pickler_class.dispatch_table
CloudPickler.dispatch = CloudPickler.dispatch_table
