"""What the command line means by TARGET: a file, standard input, or an object that has to be imported first."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import os
import re
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from types import ModuleType
from typing import Any, Literal

from fastcap.errors import FastcapError

GUARD_NAME = "__mp_main__"
"""What the top level of a script finds when it asks whether it is the main program.

It is what multiprocessing calls a main module that it imports again.
"""


_SUFFIXES = (".py", ".pyw")


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
        if text.endswith(_SUFFIXES):
            raise TargetError(f"{text} is a Python script: name an object in it, {text}:NAME ({_suggest_names(text)})")
        return Target("file", text)
    where, colon, name = text.rpartition(":")
    if not colon:
        raise TargetError(_explain_missing(text))
    if where.endswith(":"):
        raise TargetError(f"TARGET is {text!r}: one colon goes before the name, as in script.py:trainer.fit")
    if not where or not all(part.isidentifier() for part in name.split(".")):
        raise TargetError(
            f"TARGET is {text!r}: after the colon goes a dotted name, as in script.py:trainer.fit; {name!r} is none"
        )
    if os.path.isfile(where) and _is_script(where):
        return Target("script", where, name)
    if os.path.exists(where) and not os.path.isdir(where):
        raise TargetError(f"{where} is no Python script, so it has no {name!r}: for a pickle, TARGET is {where} alone")
    if os.path.isdir(where):
        raise TargetError(f"{where} is a directory: before the colon goes a script or a module, as in script.py:NAME")
    if where.endswith(_SUFFIXES) or os.sep in where:
        raise TargetError(_explain_missing(where))
    if not all(part.isidentifier() for part in where.split(".")):
        raise TargetError(
            f"TARGET is {text!r}: before the colon goes a script or a module; {where!r} is no file and no module name"
        )
    return Target("module", where, name)


def _is_script(path: str) -> bool:
    """By its suffix; what has none is a script if it is Python."""
    if os.path.splitext(path)[1]:
        return path.endswith(_SUFFIXES)
    try:
        with open(path, "rb") as file:
            start = file.read(4096)
            if b"\0" in start:
                return False
            if re.match(rb"#!.*python", start):
                return True
            ast.parse(start + file.read())
    except OSError as error:
        raise TargetError(f"cannot read {path}: {error.strerror}") from error
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True


@contextmanager
def imported(target: Target) -> Iterator[Any]:
    """The object that a script or module target names; the modules that its pickling needs stay in place meanwhile.

    A script is run as ``python script.py`` would run it, under the name ``__main__`` and in its place, with its
    directory first on ``sys.path``: what it defines is pickled as in a job that runs the script. Only where its top
    level compares ``__name__``, it is told `GUARD_NAME`.
    Raises `TargetError` if the import fails or the name is missing.
    """
    kept_main = sys.modules["__main__"]
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
        sys.modules["__main__"] = kept_main


def _run_script(path: str) -> ModuleType:
    full_path = os.path.abspath(path)
    try:
        with open(full_path, "rb") as file:
            source = file.read()
    except OSError as error:
        raise TargetError(f"cannot read {path}: {error.strerror}") from error
    # Before 3.13 the interpreter makes a string of its own, and what is equal to it in the script counts once more.
    module = ModuleType("__main__" if sys.version_info >= (3, 13) else "".join(("__main", "__")))
    # As in the namespace of a real __main__: cloudpickle sends __file__, __name__ and __package__ with a function.
    module.__file__ = full_path
    module.__package__ = None
    sys.modules["__main__"] = module
    sys.path.insert(0, os.path.dirname(full_path))
    sys.argv = [path]
    try:
        tree = _NameGuards().visit(ast.parse(source, full_path))
        exec(compile(tree, full_path, "exec", dont_inherit=True), module.__dict__)
    except (Exception, SystemExit) as error:
        raise UserCodeError(f"importing {path} failed: {locate_error(error, full_path)}") from error
    return module


class _NameGuards(ast.NodeTransformer):
    """Puts `GUARD_NAME` in the place of ``__name__`` where the top level of a script compares it.

    Functions stay as they are: their code may be pickled.
    """

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        return node

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> ast.AST:
        return node

    def visit_Lambda(self, node: ast.Lambda) -> ast.AST:
        return node

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        node.left, *node.comparators = map(_guarded, (node.left, *node.comparators))
        return self.generic_visit(node)

    def visit_Match(self, node: ast.Match) -> ast.AST:
        node.subject = _guarded(node.subject)
        return self.generic_visit(node)


def _guarded(node: ast.expr) -> ast.expr:
    if isinstance(node, ast.Name) and node.id == "__name__":
        return ast.copy_location(ast.Constant(GUARD_NAME), node)
    return node


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
        if not frame.filename.startswith((_PACKAGE, "src_cython/", "<frozen ")) and frame.filename != importlib.__file__
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
