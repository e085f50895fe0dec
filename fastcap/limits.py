"""Sizes at which something warns or fails, and where each number comes from.

Ray's numbers are read from the installed Ray, without importing it: from the module if it is loaded already, else by
reading its source. Ray takes some of them from environment variables; so does this module, in the same way.
"""

from __future__ import annotations

import ast
import importlib.util
import operator
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

from fastcap.report import Limit

_RAY_CONSTANTS = "ray._private.ray_constants"


@dataclass(frozen=True, slots=True)
class KnownLimit:
    """A limit before it meets a payload. ``size``, in bytes, holds unless the installed library says otherwise."""

    name: str
    size: int
    effect: str  # "note" (handled another way above it), "warning" or "error"
    constant: str  # its name in `source`
    source: str  # the library and version, and for others than Ray's constants the file
    package: str = "ray"  # of the system; Ray's limits are always told, others where it is loaded


KNOWN: Final = (
    KnownLimit(
        "Ray's limit for arguments sent with a task", 100 << 10, "note", "max_direct_call_object_size",
        "Ray 2.60, src/ray/common/ray_config_def.h: bigger ones go through the object store",
    ),
    KnownLimit("Ray's export warning", 10**7, "warning", "FUNCTION_SIZE_WARN_THRESHOLD", "Ray 2.60"),
    KnownLimit("Ray's export limit", 10**8, "error", "FUNCTION_SIZE_ERROR_THRESHOLD", "Ray 2.60"),
    KnownLimit("Ray's gRPC message limit", 512 << 20, "error", "GRPC_CPP_MAX_MESSAGE_SIZE", "Ray 2.60"),
    KnownLimit(
        "Ray Client's message limit", (2 << 30) - 1, "error", "GRPC_MAX_MESSAGE_SIZE",
        "Ray 2.60, ray/util/client/common.py",
    ),
    KnownLimit(
        "Dask's large-graph warning", 10**7, "warning", "distributed.admin.large-graph-warning-threshold",
        "distributed/distributed.yaml", "distributed",
    ),
    KnownLimit(
        "Spark's task size warning", 1000 << 10, "warning", "TaskSetManager.TASK_SIZE_TO_WARN_KIB",
        "Spark, scheduler/TaskSetManager.scala, and DAGScheduler.scala for the binary of a task", "pyspark",
    ),
    KnownLimit(
        "Modal's limit for serialized functions", 16 << 20, "error", "function_serialized",
        "modal/_functions.py", "modal",
    ),
)  # fmt: skip
"""The table of limits. To add one is to add a row; those of Ray's ray_constants.py are read from the installed Ray."""

_RAY_CONSTANT_NAMES: Final = (
    "FUNCTION_SIZE_WARN_THRESHOLD",
    "FUNCTION_SIZE_ERROR_THRESHOLD",
    "GRPC_CPP_MAX_MESSAGE_SIZE",
)


def limits_for(payload_size: int) -> tuple[Limit, ...]:
    """Each limit that holds here against the size of a payload, smallest first."""
    found = ray_constants()
    rows = []
    for known in KNOWN:
        if known.package != "ray" and known.package not in sys.modules:
            continue
        source = known.source
        if known.constant in _RAY_CONSTANT_NAMES:
            source += " (not installed here)"
        size, source = found.get(known.constant, (known.size, source))
        rows.append(
            Limit(known.name, size, payload_size / size if size else float("inf"), payload_size > size, known.effect,
                  f"{known.constant}, {source}")
        )  # fmt: skip
    return tuple(sorted(rows, key=lambda row: row.size))


def ray_constants() -> dict[str, tuple[int, str]]:
    """name -> (bytes, source) for the limits that the installed Ray defines; empty if there is no Ray."""
    module = sys.modules.get(_RAY_CONSTANTS)
    if module is not None:
        version = getattr(sys.modules.get("ray"), "__version__", "")
        loaded = {name: getattr(module, name, None) for name in _RAY_CONSTANT_NAMES}
        return {
            name: (value, f"Ray {version}".strip())
            for name, value in loaded.items()
            if isinstance(value, int) and value > 0
        }
    path = _find_source()
    if path is None:
        return {}
    overridden = {name: os.environ[name] for name in _RAY_CONSTANT_NAMES if name in os.environ}
    values = _read_source(path, tuple(sorted(overridden.items())))
    return {name: (value, f"{path}" + (" and the environment" if name in overridden else "")) for name, value in values}


def _find_source() -> str | None:
    """The file with Ray's constants. Finding the top-level package imports nothing."""
    try:
        spec = importlib.util.find_spec("ray")
    except (ImportError, ValueError):
        return None
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        path = os.path.join(folder, "_private", "ray_constants.py")
        if os.path.isfile(path):
            return path
    return None


@lru_cache(maxsize=8)
def _read_source(path: str, environment: tuple[tuple[str, str], ...]) -> tuple[tuple[str, int], ...]:
    """The wanted constants, evaluated from the assignments in a source file; ``environment`` only tells calls apart."""
    try:
        with open(path, "rb") as file:
            tree = ast.parse(file.read())
    except (OSError, SyntaxError, ValueError):
        return ()
    known: dict[str, int] = {}
    for statement in tree.body:
        if not isinstance(statement, ast.Assign) or len(statement.targets) != 1:
            continue
        target = statement.targets[0]
        if isinstance(target, ast.Name):
            value = _evaluate(statement.value, known)
            if value is not None:
                known[target.id] = value
    return tuple((name, known[name]) for name in _RAY_CONSTANT_NAMES if known.get(name, 0) > 0)


_OPERATORS: Final[dict[type[ast.operator], Callable[[Any, Any], Any]]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.LShift: operator.lshift,
    ast.Pow: operator.pow,
}


def _evaluate(node: ast.expr, known: dict[str, int]) -> int | None:
    """An int from literals, arithmetic, names assigned before, and Ray's ``env_integer(variable, default)``."""
    if isinstance(node, ast.Constant):
        return node.value if type(node.value) is int else None
    if isinstance(node, ast.Name):
        return known.get(node.id)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        left, right = _evaluate(node.left, known), _evaluate(node.right, known)
        if left is None or right is None or (isinstance(node.op, (ast.Pow, ast.LShift)) and not 0 <= right <= 64):
            return None
        try:
            return int(_OPERATORS[type(node.op)](left, right))
        except ArithmeticError:
            return None
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "env_integer":
        if len(node.args) != 2 or not isinstance(node.args[0], ast.Constant):
            return None
        given = os.environ.get(str(node.args[0].value))
        try:
            return int(given) if given is not None else _evaluate(node.args[1], known)
        except ValueError:  # as in Ray's env_integer
            return _evaluate(node.args[1], known)
    return None
