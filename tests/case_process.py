"""The process in which one case of ../shared/cases is looked at: ``python tests/case_process.py TASK CASE [MODULE]``.

The case's file runs as ``__main__``, so that what it defines is pickled by value. Prints one JSON object. ``bytes``:
whether MODULE dumps the same bytes as cloudpickle, or raises alike. ``culprit``: the path and retained size of the
biggest capture that ``fastcap.analyze`` finds, and all other paths. ``findings``: what is wrong with the object, and
with the file that its pickle makes. ``blockers``: whether fastcap and Ray's ``inspect_serializability`` name what stops
it from being pickled, and in how many milliseconds of this process.
"""

import hashlib
import importlib
import json
import os
import sys
import types
from collections.abc import Callable
from typing import Any


def load_case(path: str) -> types.ModuleType:
    case = types.ModuleType("__main__")
    case.__file__ = path
    sys.modules["__main__"] = case
    with open(path, encoding="utf-8") as file:
        exec(compile(file.read(), path, "exec"), case.__dict__)
    return case


def outcome(dumps: Callable[[Any], bytes], obj: Any) -> dict[str, Any]:
    """What a dump leads to, in a form that can be compared."""
    try:
        stream = dumps(obj)
    except Exception as error:
        return {"error": type(error).__name__, "message": str(error)[:300]}
    return {"size": len(stream), "hash": hashlib.sha256(stream).hexdigest()}


def compare_bytes(obj: Any, module: str) -> dict[str, Any]:
    """The module's dump between those of cloudpickle: the first one may leave traces on classes."""
    import cloudpickle

    dumps = importlib.import_module(module).dumps
    first = outcome(cloudpickle.dumps, obj)
    ours = outcome(dumps, obj)
    return {"cloudpickle": [first, outcome(cloudpickle.dumps, obj), outcome(cloudpickle.dumps, obj)], "ours": ours}


def find_culprit(obj: Any) -> dict[str, Any]:
    import fastcap

    report = fastcap.analyze(obj)
    captures = [{"path": capture.path, "retained_size": capture.retained_size} for capture in report.captures[:10]]
    return {"captures": captures, "payload_size": report.payload_size}


def list_findings(obj: Any) -> dict[str, Any]:
    """The findings about the live object, and about the file that the pickle makes of it, if it makes one."""
    import fastcap

    def rows(report: Any) -> list[dict[str, Any]]:
        return [{"code": each.code, "severity": each.severity, "path": each.path, "message": each.message,
                 "replacement": each.replacement} for each in report.findings]

    answer: dict[str, Any] = {"live": rows(fastcap.analyze(obj))}
    flavor = "ray.cloudpickle" if "ray" in sys.modules else "cloudpickle"
    try:
        answer["file"] = rows(fastcap.scan(fastcap.dumps(obj, flavor=flavor)))
    except Exception as error:
        answer["dump_error"] = repr(error)
    return answer


def compare_blockers(obj: Any) -> dict[str, Any]:
    """Who names the culprit: in the path of a finding, or of a failure of Ray's (at its depth of 3, which is usual)."""
    import contextlib
    import io
    import re
    import time

    from ray.util import inspect_serializability

    import fastcap

    def by_fastcap() -> list[str]:
        return [row.path for row in fastcap.analyze(obj).findings if row.code.startswith("FC1")]

    def by_ray() -> list[str]:
        with contextlib.redirect_stdout(io.StringIO()):
            _, failures = inspect_serializability(obj)
        return [" -> ".join(map(str, failure.path)) for failure in failures]

    culprit = re.escape(sys.modules["__main__"].CULPRIT_NAME)
    answer: dict[str, Any] = {}
    for name, find in (("fastcap", by_fastcap), ("ray", by_ray)) * 3:
        start = time.process_time()
        try:
            named = find()
        except (Exception, RecursionError) as error:
            named = [f"raises {type(error).__name__}"]
        taken = 1000 * (time.process_time() - start)
        right = any(re.search(rf"(?<![^\W_]){culprit}(?![^\W_])", path) for path in named)
        best = min(taken, answer.get(name, {}).get("milliseconds", taken))
        answer[name] = {"right": right, "milliseconds": round(best, 2), "named": [each[:100] for each in named[:3]]}
    return answer


TASKS = {"blockers": compare_blockers, "bytes": compare_bytes, "culprit": find_culprit, "findings": list_findings}


def main() -> None:
    task, path, *rest = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a case prints must not get into the answer
    try:
        try:
            case = load_case(path)
        except AttributeError as error:
            if sys.version_info >= (3, 11):
                raise
            raise ImportError(f"written for Python 3.11: {error}") from error
        made = case.make()
    except ImportError as error:
        answer = {"skip": str(error)}
    else:
        answer = TASKS[task](made, *rest)
    print(json.dumps(answer), file=answers, flush=True)
    os._exit(0)  # what a case started, threads and servers, does not keep the process


if __name__ == "__main__":
    main()
