"""What the command line means by TARGET: a file, standard input, or an object that has to be imported first."""

from __future__ import annotations

import ast
import gc
import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from types import FunctionType, ModuleType
from typing import Any, Literal

from fastcap.errors import FastcapError

RUN_NAME = "__mp_main__"
"""``__name__`` of a script while it is imported; what multiprocessing calls a main module that it imports again."""


class TargetError(FastcapError):
    """TARGET cannot be used; the message says why and what to do, in one line."""


class UserCodeError(TargetError):
    """Code that belongs to TARGET raised; ``__cause__`` is what."""


@dataclass(frozen=True, slots=True)
class Target:
    """A TARGET taken apart, not opened yet."""

    kind: Literal["file", "stdin", "script", "module"]
    where: str  # path of the file or script, name of the module
    name: str = ""  # dotted name of the object in it

    def __str__(self) -> str:
        """As the user would write it."""
        return {"stdin": "standard input", "file": self.where}.get(self.kind, f"{self.where}:{self.name}")


def parse_target(text: str) -> Target:
    """Take TARGET apart; `TargetError` if it names nothing that exists.

    ``-`` is standard input. What exists as a file is a file. Everything else has a colon: ``script.py:name`` if what
    stands before it is a file (or looks like one), ``package.module:name`` if not.
    """
    if text == "-":
        return Target("stdin", "-")
    if os.path.isdir(text):
        raise TargetError(f"{text} is a directory: {_suggest_files(text)}")
    if os.path.exists(text):
        if text.endswith(".py"):
            raise TargetError(f"{text} is a Python script: name an object in it, {text}:NAME ({_suggest_names(text)})")
        return Target("file", text)
    where, colon, name = text.rpartition(":")
    if not colon:
        raise TargetError(_explain_missing(text))
    if not where or not all(part.isidentifier() for part in name.split(".")):
        raise TargetError(f"{text}: after the colon goes a dotted name, as in script.py:trainer.fit; {name!r} is none")
    if os.path.isfile(where):
        return Target("script", where, name)
    if os.path.isdir(where):
        raise TargetError(f"{where} is a directory: before the colon goes a script or a module, as in script.py:NAME")
    if where.endswith(".py") or os.sep in where:
        raise TargetError(_explain_missing(where))
    if not all(part.isidentifier() for part in where.split(".")):
        raise TargetError(
            f"{text}: before the colon goes a script or a module; {where!r} is no file and no module name"
        )
    return Target("module", where, name)


@contextmanager
def imported(target: Target) -> Iterator[Any]:
    """The object that a script or module target names; the modules that its pickling needs stay in place meanwhile.

    A script is run as ``python script.py`` would run it, with its directory first on ``sys.path``, except for the
    parts that ask for ``__name__ == "__main__"``. Afterwards it takes the place of ``__main__``: its functions and
    classes belong to ``__main__``, so that a pickler treats them as in a job that runs the script: by value. (What
    keeps ``__name__`` itself, such as a logger, keeps `RUN_NAME`.)
    Raises `TargetError` if the import fails or the name is missing.
    """
    kept = {name: sys.modules.get(name) for name in ("__main__", RUN_NAME)}
    kept_path, kept_argv = sys.path[:], sys.argv
    try:
        if target.kind == "script":
            module = _run_script(target.where)
        else:
            sys.path.insert(0, os.getcwd())
            sys.argv = [target.where]
            module = _import_module(target.where)
        yield _look_up(module, target)
    finally:
        sys.path[:], sys.argv = kept_path, kept_argv
        for name, previous in kept.items():
            if previous is None:
                sys.modules.pop(name, None)
            else:
                sys.modules[name] = previous


def _run_script(path: str) -> ModuleType:
    full_path = os.path.abspath(path)
    try:
        with open(full_path, "rb") as file:
            source = file.read()
    except OSError as error:
        raise TargetError(f"cannot read {path}: {error.strerror}") from error
    module = ModuleType(RUN_NAME)
    # As in the namespace of a real __main__: cloudpickle sends __file__, __name__ and __package__ with a function.
    module.__file__ = full_path
    module.__package__ = None
    sys.modules["__main__"] = sys.modules[RUN_NAME] = module
    sys.path.insert(0, os.path.dirname(full_path))
    sys.argv = [path]
    try:
        exec(compile(source, full_path, "exec", dont_inherit=True), module.__dict__)
    except (Exception, SystemExit) as error:
        raise UserCodeError(f"importing {path} failed: {locate_error(error, full_path)}") from error
    del sys.modules[RUN_NAME]
    module.__name__ = "__main__"
    _rename_module(RUN_NAME, "__main__")
    return module


def _rename_module(old: str, new: str) -> None:
    """Let functions and classes that were defined in module ``old`` say that they come from ``new``."""
    for thing in gc.get_objects():
        kind = type(thing)
        if kind is FunctionType:
            if _is(thing.__module__, old):
                thing.__module__ = new
        elif issubclass(kind, type):
            # Not by way of a metaclass, which may do anything.
            attributes = type.__getattribute__(thing, "__dict__")
            if _is(attributes.get("__module__"), old):
                line = attributes.get("__firstlineno__")
                type.__setattr__(thing, "__module__", new)
                if line is not None:  # CPython 3.13 drops it when __module__ is set (gh-118465)
                    type.__setattr__(thing, "__firstlineno__", line)


def _is(value: object, text: str) -> bool:
    return type(value) is str and value == text


def _import_module(name: str) -> ModuleType:
    top, dot, _ = name.partition(".")
    try:
        # Without this, a misspelt script.pi:name would run script.py before it fails.
        spec = importlib.util.find_spec(top) if dot else None
        if spec is not None and spec.submodule_search_locations is None:
            raise TargetError(f"no module named {name!r}: {top!r} is not a package{_suggest_script(name)}")
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{name}.".startswith(f"{error.name}."):
            raise TargetError(
                f"no module named {error.name!r} in the current directory or on sys.path: "
                "write package.module:name, or script.py:name for a file"
            ) from error
        raise UserCodeError(f"importing {name} failed: {locate_error(error)}") from error
    except TargetError:
        raise
    except (Exception, SystemExit) as error:
        raise UserCodeError(f"importing {name} failed: {locate_error(error)}") from error


def _look_up(module: ModuleType, target: Target) -> object:
    found: object = module
    said, joint = target.where, ":"
    for part in target.name.split("."):
        try:
            found = getattr(found, part)
        except AttributeError as error:
            names = sorted(set(dir(found)))
            if part in names:
                raise UserCodeError(f"reading {part} of {said} failed: {locate_error(error)}") from error
            raise TargetError(f"{said} has no {part!r}: {_suggest(part, names, target)}") from error
        except Exception as error:
            raise UserCodeError(f"reading {part} of {said} failed: {locate_error(error)}") from error
        said, joint = f"{said}{joint}{part}", "."
    return found


def locate_error(error: BaseException, file: str | None = None) -> str:
    """``ValueError: bad value (train.py:12)``: the exception in one line, and where it was raised.

    The place is the last one in ``file`` if the traceback has any, or else the last one outside of this package and
    the import machinery.
    """
    if isinstance(error, SystemExit):
        text = f"it called sys.exit with {error.code}"
    else:
        text = "".join(traceback.format_exception_only(type(error), error)[-1:])
    text, *more = text.strip().splitlines() or [""]
    if more:
        text += " …"
    if isinstance(error, SyntaxError) and error.filename:
        return f"{text} ({_relative(error.filename)}:{error.lineno})"
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith((_PACKAGE, "<frozen ")) and frame.filename != importlib.__file__
    ]
    inside = [frame for frame in frames if file is not None and frame.filename == file]
    place = (inside or frames)[-1:]
    return f"{text} ({_relative(place[0].filename)}:{place[0].lineno})" if place else text


_PACKAGE = os.path.dirname(os.path.abspath(__file__)) + os.sep


def _relative(path: str) -> str:
    prefix = os.getcwd() + os.sep
    return path[len(prefix) :] if path.startswith(prefix) else path


def _suggest(name: str, names: Sequence[str], target: Target) -> str:
    close = get_close_matches(name, names, n=3)
    if close:
        return f"did you mean {' or '.join(close)}?"
    if target.kind == "script" and name in _names(target.where, guarded=True):
        return (
            'it is made under `if __name__ == "__main__":`, which does not run here; '
            "make it at module level, or call fastcap.analyze(obj) there"
        )
    public = [each for each in names if not each.startswith("_")]
    return f"it has {', '.join(public[:8])}{', …' if len(public) > 8 else ''}" if public else "it has no public names"


def _suggest_names(path: str) -> str:
    names = _names(path, guarded=False)
    return f"it has {', '.join(names[:6])}{', …' if len(names) > 6 else ''}" if names else "it defines none"


def _names(path: str, *, guarded: bool) -> list[str]:
    """Names that a script binds at its top level, or else under ``if __name__ == …``; none if it cannot be read."""
    try:
        with open(path, "rb") as file:
            body = ast.parse(file.read()).body
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    names: dict[str, None] = {}
    for statement in body:
        if guarded:
            if not isinstance(statement, ast.If) or "__name__" not in ast.dump(statement.test):
                continue
            found = ast.walk(statement)
        else:
            found = iter([statement, *getattr(statement, "targets", []), getattr(statement, "target", statement)])
        for node in found:
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                names[node.name] = None
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names[node.id] = None
    return list(names)


def _suggest_files(folder: str) -> str:
    try:
        files = sorted(
            entry.name for entry in os.scandir(folder) if entry.name.endswith((".pkl", ".pickle", ".joblib"))
        )
    except OSError:
        files = []
    if not files:
        return "name a pickle file in it"
    return f"name a file in it, such as {os.path.join(folder, files[0])}"


def _suggest_script(name: str) -> str:
    close = get_close_matches(name, [entry for entry in os.listdir() if entry.endswith(".py")], n=1)
    return f"; did you mean the script {close[0]}?" if close else ""


def _explain_missing(path: str) -> str:
    folder, base = os.path.split(path)
    try:
        names = os.listdir(folder or ".")
    except OSError:
        return f"no file {path}, and no directory {folder}"
    close = [os.path.join(folder, name) for name in get_close_matches(base, names, n=3)]
    if close:
        return f"no file {path}: did you mean {' or '.join(close)}?"
    return f"no file {path}: TARGET is a pickle file, -, package.module:name or script.py:name"
