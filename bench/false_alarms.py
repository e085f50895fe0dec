"""How often a finding of severity "error" is wrong: ``python bench/false_alarms.py [PACKAGE ...]``.

Classes and functions of installed packages are pickled by value, one after the other, as if they were a user's script,
and so are the closures among them and instances of scikit-learn's estimators. What fastcap says of each is
compared with what happens: cloudpickle dumps it or raises, and another process loads it or raises. An error about an
object that gets there is a false alarm; an object that does not get there, and of which no finding says so, is a miss.
Prints a line for each of either, and a table.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import pathlib
import pkgutil
import struct
import subprocess
import sys
import warnings
from collections.abc import Iterator
from types import FunctionType, ModuleType
from typing import Any

import cloudpickle

import fastcap

PACKAGES = ("rich", "sklearn", "ray.tune.examples")
MOST = 150  # objects of one package, spread over all that it has
LOADER = """
import pickle, struct, sys
answers = sys.stdout.buffer
sys.stdout = sys.stderr
while size := sys.stdin.buffer.read(8):
    stream = sys.stdin.buffer.read(struct.unpack("<Q", size)[0])
    try:
        pickle.loads(stream)
        answer = b""
    except BaseException as error:
        answer = f"{type(error).__name__}: {error}".encode()[:300]
    answers.write(struct.pack("<Q", len(answer)) + answer)
    answers.flush()
"""


class Loader:
    """Another process, which loads what it is given."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", LOADER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )

    def load(self, stream: bytes) -> str:
        """What loading raises; empty if it does not."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(struct.pack("<Q", len(stream)) + stream)
        self.process.stdin.flush()
        (size,) = struct.unpack("<Q", self.process.stdout.read(8))
        return self.process.stdout.read(size).decode()

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


def modules_of(package: str) -> Iterator[ModuleType]:
    """The modules of a package that can be imported; its tests are left out."""
    root = importlib.import_module(package)
    yield root
    for found in pkgutil.walk_packages(root.__path__, package + ".", onerror=lambda name: None):
        if any(part in ("tests", "conftest", "__main__") for part in found.name.split(".")):
            continue
        with contextlib.suppress(Exception, SystemExit):
            yield importlib.import_module(found.name)


def objects_of(module: ModuleType) -> Iterator[tuple[str, Any]]:
    """Classes and functions that a module defines, methods that are closures, instances of estimators."""
    for name, value in list(vars(module).items()):
        if getattr(value, "__module__", None) != module.__name__ or not isinstance(value, (type, FunctionType)):
            continue
        yield f"{module.__name__}.{name}", value
        for method, function in list(vars(value).items()) if isinstance(value, type) else ():
            if isinstance(function, FunctionType) and {*function.__code__.co_freevars} - {"__class__"}:
                yield f"{module.__name__}.{name}.{method}", function
        if isinstance(value, type) and hasattr(value, "fit") and module.__name__.startswith("sklearn."):
            with contextlib.suppress(Exception):
                yield f"{module.__name__}.{name}()", value()


def look_at(name: str, obj: Any, loader: Loader) -> tuple[list[str], str]:
    """The errors that fastcap reports, and what really goes wrong."""
    report = fastcap.analyze(obj)
    errors = [f"{row.code} {row.path}: {row.message}" for row in report.findings if row.severity == "error"]
    hints = [row.code for row in report.findings if row.code in ("FC203", "FC204", "FC205", "FC211", "FC212")]
    try:
        stream = cloudpickle.dumps(obj)
    except Exception as error:
        return errors, f"dump: {type(error).__name__}: {error}"
    raised = loader.load(stream)
    return errors, f"load: {raised} [{', '.join(dict.fromkeys(hints))}]" if raised else ""


def main(packages: list[str]) -> int:
    warnings.simplefilter("ignore")
    table = []
    with contextlib.redirect_stdout(io.StringIO()):  # what importing a module prints
        found = {package: list(modules_of(package)) for package in packages}
    for package, modules in found.items():
        everything = [pair for module in modules for pair in objects_of(module)]
        chosen = everything[:: max(1, len(everything) // MOST)]
        loader = Loader()
        root = sys.modules[package.partition(".")[0] if package != "ray.tune.examples" else package]
        by_value = modules if package == "ray.tune.examples" else [root]
        for module in by_value:
            cloudpickle.register_pickle_by_value(module)
        wrong = missed = with_errors = 0
        try:
            for name, obj in chosen:
                errors, truth = look_at(name, obj, loader)
                with_errors += bool(errors)
                if errors and not truth:
                    wrong += 1
                    print(f"FALSE  {name}: {errors[0]}")
                elif truth and not errors:
                    missed += 1
                    print(f"missed {name}: {truth[:200]}")
                elif errors and os.environ.get("VERBOSE"):
                    print(f"right  {name}: {errors[0][:150]} | {truth[:100]}")
        finally:
            for module in by_value:
                cloudpickle.unregister_pickle_by_value(module)
            loader.close()
        counts = f"{with_errors:5} with errors {wrong:5} wrong {missed:5} missed"
        table.append(f"{package:20} {len(chosen):5} objects {counts}")
    print("\n".join(table))
    return 0


if __name__ == "__main__":
    sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
    raise SystemExit(main(sys.argv[1:] or list(PACKAGES)))
