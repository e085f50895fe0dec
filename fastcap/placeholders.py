"""What stands for parts of a pickle that do not come back: dead handles, and what cannot be imported."""

from __future__ import annotations

import _compat_pickle
import copyreg
import functools
import pickle
import pkgutil
from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any, BinaryIO, Final

from fastcap.errors import NotRestored

# --- Ray's handles ---------------------------------------------------------------------------------------------------


class Unrestorable:
    """Stands for a handle or object reference of Ray that is dead where the pickle is loaded.

    ``path`` is where it was, ``kind`` "ActorHandle" or "ObjectRef", ``id`` the id of the actor or object in hex, empty
    if the stream does not tell; ``reason`` says why it does not come back and ``remedy`` what to do. It can be pickled,
    copied and compared; all other use raises `NotRestored`.
    """

    __slots__ = ("id", "kind", "path", "reason", "remedy")

    def __init__(self, path: str, kind: str, id: str, reason: str, remedy: str = "") -> None:
        self.path = path
        self.kind = kind
        self.id = id
        self.reason = reason
        self.remedy = remedy or f"load it with replace={{{path!r}: ...}}"

    def _fields(self) -> tuple[str, str, str, str, str]:
        return self.path, self.kind, self.id, self.reason, self.remedy

    def _fail(self, use: str) -> NotRestored:
        return NotRestored(f"cannot {use} the {self.kind} of {self.path}: {self.reason}; {self.remedy}")

    def __reduce__(self) -> tuple[Any, ...]:
        return Unrestorable, self._fields()

    def __eq__(self, other: object) -> bool:
        return self._fields() == other._fields() if isinstance(other, Unrestorable) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._fields())

    def __repr__(self) -> str:
        return f"<Unrestorable {self.kind} {self.id or 'of unknown id'} at {self.path}: {self.reason}>"

    def __getattr__(self, name: str) -> Any:
        if name[:2] == name[-2:] == "__":  # what copy, pickle and others ask every object
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        raise self._fail(f"use .{name} of")

    def __call__(self, *args: object, **kwargs: object) -> Any:
        """Raises `NotRestored`."""
        raise self._fail("call")

    def __await__(self) -> Iterator[Any]:
        raise self._fail("await")


# --- what cannot be imported -----------------------------------------------------------------------------------------


class Placeholder:
    """Stands for a class, function or module that cannot be imported, or for an object made by one.

    For a global, ``name`` is ``module:name``. For an object, ``made_by`` is what was to make it, called with ``args``
    and ``kwargs``; ``state``, ``items`` and ``pairs`` are what the pickle gave it afterwards. A placeholder can be
    pickled by any pickler: where the import works, the pickle loads to the original, and fastcap is not needed there.
    All other use raises `NotRestored`.
    """

    __slots__ = ("_how", "_setter", "args", "items", "kwargs", "made_by", "name", "pairs", "state")

    name: str
    made_by: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    state: Any
    items: list[Any]
    pairs: list[tuple[Any, Any]]
    _how: str  # "global", "call", "newobj" or "newobj_ex"
    _setter: Any  # function that sets the state, None for BUILD

    def __init__(self) -> None:
        raise TypeError("placeholders are made by fastcap.load")

    def __setattr__(self, name: str, value: object) -> None:
        raise self._fail(f"set .{name} of")

    def _fail(self, use: str) -> NotRestored:
        return NotRestored(f"cannot {use} {self!r}: {_origin_of(self)} cannot be imported here")

    def __reduce_ex__(self, protocol: object) -> tuple[Any, ...]:
        if self._how == "global":
            return pkgutil.resolve_name, (self.name,)
        if self._how == "call":
            made, args = self.made_by, self.args
        elif self._how == "newobj":
            made, args = _NEWOBJ, (self.made_by, *self.args)
        else:
            made, args = _NEWOBJ_EX, (self.made_by, self.args, self.kwargs)
        items = iter(self.items) if self.items else None
        pairs = iter(self.pairs) if self.pairs else None
        return made, args, self.state, items, pairs, self._setter

    def __deepcopy__(self, memo: dict[int, Any]) -> Placeholder:
        copied = object.__new__(Placeholder)
        memo[id(self)] = copied
        for field in Placeholder.__slots__:
            _set(copied, field, deepcopy(getattr(self, field), memo))
        return copied

    def __copy__(self) -> Placeholder:
        copied = object.__new__(Placeholder)
        for field in Placeholder.__slots__:
            value = getattr(self, field)
            _set(copied, field, value.copy() if field in ("items", "pairs") else value)
        return copied

    def __repr__(self) -> str:
        return f"<Placeholder {self.name if self._how == 'global' else f'made by {_name_of(self.made_by)}'}>"

    def __getattr__(self, name: str) -> Any:
        if name[:2] == name[-2:] == "__":
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        raise self._fail(f"use .{name} of")

    def __call__(self, *args: object, **kwargs: object) -> Any:
        """Raises `NotRestored`."""
        raise self._fail("call")


_set: Final = object.__setattr__  # a placeholder lets nobody else: reducers that cannot know it would write into it


def _name_of(made_by: Any) -> str:
    if isinstance(made_by, Placeholder):
        return made_by.name if made_by._how == "global" else f"({_name_of(made_by.made_by)})"
    return getattr(made_by, "__qualname__", None) or type(made_by).__name__


def _origin_of(value: Placeholder) -> str:
    """The name that cannot be imported, because of which there is a placeholder."""
    for _ in range(100):
        if value._how == "global":
            return value.name.replace(":", ".")
        inner = next((each for each in (value.made_by, *value.args) if isinstance(each, Placeholder)), None)
        if inner is None:
            break
        value = inner
    return f"what {_name_of(value.made_by)}{value.args!r:.80} asks for"


def _placeholder(how: str, name: str, made_by: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Placeholder:
    made = object.__new__(Placeholder)
    fields = {"_how": how, "name": name, "made_by": made_by, "args": args, "kwargs": kwargs}
    for field, value in {**fields, "state": None, "items": [], "pairs": [], "_setter": None}.items():
        _set(made, field, value)
    return made


def _of_global(name: str) -> Placeholder:
    return _placeholder("global", name, None, (), {})


def _of_call(made_by: Any, args: tuple[Any, ...]) -> Placeholder:
    if isinstance(made_by, functools.partial) and not made_by.args:  # a placeholder that was pickled again
        if made_by.func is copyreg.__newobj__:  # type: ignore[attr-defined]
            return _placeholder("newobj", "", args[0], args[1:], {})
        if made_by.func is copyreg.__newobj_ex__ and len(args) == 3:  # type: ignore[attr-defined]
            return _placeholder("newobj_ex", "", *args)
    if made_by is pkgutil.resolve_name and len(args) == 1 and isinstance(args[0], str):
        return _of_global(args[0])
    return _placeholder("call", "", made_by, args, {})


# Picklers check that what goes through `copyreg.__newobj__` is of the class that it names, and placeholders are not.
_NEWOBJ: Final = functools.partial(copyreg.__newobj__)  # type: ignore[attr-defined]
_NEWOBJ_EX: Final = functools.partial(copyreg.__newobj_ex__)  # type: ignore[attr-defined]


def _holds_placeholder(value: Any, nesting: int = 2) -> bool:
    if isinstance(value, Placeholder):
        return True
    if not nesting or not isinstance(value, (tuple, list, dict)):
        return False
    return any(_holds_placeholder(each, nesting - 1) for each in (value.values() if isinstance(value, dict) else value))


def lenient_unpickler(file: BinaryIO, **options: Any) -> Any:
    """An unpickler that makes a `Placeholder` of what cannot be imported; options are those of `pickle.Unpickler`."""
    return _Lenient(file, **options)


_PythonUnpickler: Any = pickle._Unpickler
"""CPython's unpickler in Python: that in C gives a subclass no say in a call or a state."""


class _Lenient(_PythonUnpickler):  # type: ignore[misc]
    """Makes placeholders of what cannot be imported, and of all that depends on it.

    A call is put off, that is, becomes a placeholder, if what is called is one; if an argument is one, or it uses one,
    and the call raises; and if the call itself is an import that fails.
    """

    dispatch: Final = dict(_PythonUnpickler.dispatch)
    value_of: Callable[[Any], Any] | None = None  # gives what a persistent id stands for

    def persistent_load(self, pid: Any) -> Any:
        return super().persistent_load(pid) if self.value_of is None else self.value_of(pid)

    def find_class(self, module: str, name: str) -> Any:
        try:
            return super().find_class(module, name)
        except (ImportError, AttributeError):
            if self.proto < 3 and self.fix_imports:
                module, name = _compat_pickle.NAME_MAPPING.get((module, name), (module, name))
                module = _compat_pickle.IMPORT_MAPPING.get(module, module)
            return _of_global(f"{module}:{name}")

    def load_reduce(self) -> None:
        stack = self.stack
        args = stack.pop()
        made_by = stack[-1]
        # What `getattr` would find on a placeholder is an attribute of the placeholder.
        put_off = isinstance(made_by, Placeholder) or (made_by is getattr and isinstance(args[0], Placeholder))
        if not put_off:
            try:
                stack[-1] = made_by(*args)
                return
            except Exception as error:
                imports = isinstance(error, ImportError) or made_by is pkgutil.resolve_name
                if not imports and not isinstance(error, NotRestored) and not _holds_placeholder(args):
                    raise
        stack[-1] = _of_call(made_by, tuple(args))

    dispatch[pickle.REDUCE[0]] = load_reduce

    def _new(self, cls: Any, args: tuple[Any, ...], kwargs: dict[str, Any], how: str) -> None:
        made: Any
        if isinstance(cls, Placeholder):
            made = _placeholder(how, "", cls, args, kwargs)
        else:
            try:
                made = cls.__new__(cls, *args, **kwargs)
            except Exception:
                if not _holds_placeholder((args, kwargs), 3):
                    raise
                made = _placeholder(how, "", cls, args, kwargs)
        self.append(made)

    def load_newobj(self) -> None:
        args = self.stack.pop()
        self._new(self.stack.pop(), args, {}, "newobj")

    dispatch[pickle.NEWOBJ[0]] = load_newobj

    def load_newobj_ex(self) -> None:
        kwargs = self.stack.pop()
        args = self.stack.pop()
        self._new(self.stack.pop(), args, kwargs, "newobj_ex")

    dispatch[pickle.NEWOBJ_EX[0]] = load_newobj_ex

    def _instantiate(self, cls: Any, args: list[Any]) -> None:
        if not isinstance(cls, Placeholder):
            try:
                super()._instantiate(cls, args)
                return
            except Exception:
                if not _holds_placeholder(args):
                    raise
        self.append(_of_call(cls, tuple(args)))

    def load_pop(self) -> None:
        """POP, which also ends a state that a function sets: ``setter(obj, state)`` is written behind the object."""
        stack = self.stack
        if len(stack) > 1 and isinstance(stack[-1], Placeholder) and isinstance(stack[-2], Placeholder):
            setting, target = stack[-1], stack[-2]
            if setting._how == "call" and len(setting.args) == 2 and setting.args[0] is target:
                _set(target, "state", setting.args[1])
                _set(target, "_setter", setting.made_by)
        super().load_pop()

    dispatch[pickle.POP[0]] = load_pop

    def load_build(self) -> None:
        target = self.stack[-2]
        if isinstance(target, Placeholder):
            _set(target, "state", self.stack.pop())
        else:
            super().load_build()

    dispatch[pickle.BUILD[0]] = load_build

    def load_append(self) -> None:
        target = self.stack[-2]
        if isinstance(target, Placeholder):
            target.items.append(self.stack.pop())
        else:
            super().load_append()

    dispatch[pickle.APPEND[0]] = load_append

    def load_appends(self) -> None:
        target = self.metastack[-1][-1]
        if isinstance(target, Placeholder):
            target.items.extend(self.pop_mark())
        else:
            super().load_appends()

    dispatch[pickle.APPENDS[0]] = load_appends

    def load_setitem(self) -> None:
        target = self.stack[-3]
        if isinstance(target, Placeholder):
            value = self.stack.pop()
            target.pairs.append((self.stack.pop(), value))
        else:
            super().load_setitem()

    dispatch[pickle.SETITEM[0]] = load_setitem

    def load_setitems(self) -> None:
        target = self.metastack[-1][-1]
        if isinstance(target, Placeholder):
            items = self.pop_mark()
            target.pairs.extend(zip(items[::2], items[1::2]))
        else:
            super().load_setitems()

    dispatch[pickle.SETITEMS[0]] = load_setitems
