"""One trainable whose captures travel through the object store, without installing anything."""

from __future__ import annotations

import functools
import inspect
import pickle
import sys
import types
from collections.abc import Callable
from typing import Any

import fastcap
from fastcap.ray.parts import FLAVOR, SHELF, ExportStore


def with_captures(trainable: Any, *, min_size: int | str = "1 MiB", writable: bool = False) -> Any:
    """``Tuner(fastcap.ray.with_captures(train_func))``: the trainable, with what it captures in the object store.

    What a function, a callable or a class captures, is pure data and takes at least ``min_size``, is put once, now; the
    returned function or class gets it where it runs. Neither Ray nor the workers need to know of fastcap. The data is
    held as long as what is returned lives. Works for trainables of Tune, training functions of Train, and whatever else
    is a function or class that another process calls.

    Raises TypeError for what is neither callable nor a class, and FastcapError if Ray is not initialised, or a client.
    """
    if not callable(trainable):
        raise TypeError(f"with_captures takes a function or a class, not {type(trainable).__name__!r} object")
    name = getattr(trainable, "__qualname__", None) or type(trainable).__qualname__
    store = ExportStore(writable=writable, name=name)
    payload = fastcap.dumps(trainable, flavor=FLAVOR, store=store, min_size=min_size)
    if not store.parts:
        return trainable
    made = _class_of(trainable, payload) if inspect.isclass(trainable) else _function_of(trainable, payload)
    SHELF.hold(id(made), made, name, store.parts)
    return made


def _function_of(trainable: Callable[..., Any], payload: bytes) -> Callable[..., Any]:
    def call_now(*args: Any, **kwargs: Any) -> Any:
        return pickle.loads(payload)(*args, **kwargs)

    def call_bit_by_bit(*args: Any, **kwargs: Any) -> Any:
        yield from pickle.loads(payload)(*args, **kwargs)

    # Tune looks at what it is given.
    call: Any = call_bit_by_bit if inspect.isgeneratorfunction(trainable) else call_now
    for attribute in ("__name__", "__qualname__", "__doc__"):
        if isinstance(getattr(trainable, attribute, None), str):
            setattr(call, attribute, getattr(trainable, attribute))
    if isinstance(trainable, types.FunctionType):
        call.__dict__.update(trainable.__dict__)  # resources, mixins
    call.__signature__ = inspect.signature(trainable)
    call.__module__ = "__main__"  # by value
    made: Callable[..., Any] = call
    return made


def _class_of(trainable: type, payload: bytes) -> type:
    """A class by which Ray and Tune know the other one; its instances become instances of that."""
    bases = _importable_bases(trainable)
    inherited = type("Bases", bases, {})
    if trainable.__new__ is not inherited.__new__ or "__slots__" in vars(trainable):
        name = trainable.__qualname__
        raise TypeError(f"with_captures cannot stand in for {name}, which has its own __new__ or __slots__")
    body: dict[str, Any] = {"__module__": "__main__"}
    body |= {"__doc__": trainable.__doc__, "__qualname__": trainable.__qualname__}

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        self.__class__ = pickle.loads(payload)
        self.__init__(*args, **kwargs)

    __init__.__signature__ = inspect.signature(trainable.__init__)  # type: ignore[attr-defined,misc]
    for name in dir(trainable):
        value = inspect.getattr_static(trainable, name)
        if name == "__init__" or value is inspect.getattr_static(inherited, name, None):
            continue
        if isinstance(value, (staticmethod, classmethod)):
            body[name] = staticmethod(_forward_to_class(name, payload))
        elif isinstance(value, types.FunctionType):
            body[name] = _forward(name, value)
        elif isinstance(value, (str, int, float, bool, type(None))) and not name.startswith("__"):
            body[name] = value
    return type(trainable)(trainable.__name__, bases, {**body, "__init__": __init__})


def _importable_bases(cls: type) -> tuple[type, ...]:
    """The closest classes above one that pickle by reference."""
    found: list[type] = []
    for base in cls.__mro__[1:]:
        module: Any = sys.modules.get(base.__module__)
        by_name = functools.reduce(lambda part, name: getattr(part, name, None), base.__qualname__.split("."), module)
        if by_name is base and base.__module__ != "__main__" and not any(issubclass(known, base) for known in found):
            found.append(base)
    return tuple(found)


def _forward(name: str, method: Any) -> Any:
    """A method that is called on an instance of the real class, and looked at on this one."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(self, name)(*args, **kwargs)

    async def forward_later(self: Any, *args: Any, **kwargs: Any) -> Any:
        return await getattr(self, name)(*args, **kwargs)

    return _looking_like(forward_later if inspect.iscoroutinefunction(method) else forward, method)


def _forward_to_class(name: str, payload: bytes) -> Any:
    def forward(*args: Any, **kwargs: Any) -> Any:
        return getattr(pickle.loads(payload), name)(*args, **kwargs)

    forward.__name__, forward.__module__ = name, "__main__"
    return forward


def _looking_like(forward: Any, method: Any) -> Any:
    forward.__dict__.update(getattr(method, "__dict__", {}))  # ray.method has its options there
    forward.__name__, forward.__qualname__, forward.__doc__ = method.__name__, method.__qualname__, method.__doc__
    forward.__signature__, forward.__module__ = inspect.signature(method), "__main__"
    return forward
