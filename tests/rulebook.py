"""What the tests of rules share: findings by path, scripts that run as ``__main__``, and another process that loads."""

import os
import pickle
import subprocess
import sys
import types

import fastcap
from fastcap import analyze, scan


def found(report, code):
    """path -> the line to write instead, for the findings of one code."""
    return {row.path: row.replacement for row in report.findings if row.code == code}


def both(obj, code):
    """The same findings about the live object and the file that its pickle makes."""
    live, file = found(analyze(obj), code), found(scan(fastcap.dumps(obj)), code)
    assert list(live) == list(file)
    return live


def script(source, **names):
    """What a script defines, as it would be in ``__main__``."""
    module = types.ModuleType("__main__")
    module.__dict__.update(names)
    exec(source, module.__dict__)
    return module


def load_elsewhere(stream, probe="None", *, path=None, cwd=None):
    """What ``probe``, an expression about ``loaded``, is worth in another process that loads the stream.

    An exception that loading or the expression raises comes back as its type and text.
    """
    code = (
        "import pickle, sys\n"
        "stream = sys.stdin.buffer.read()\n"
        "try:\n"
        "    loaded = pickle.loads(stream)\n"
        f"    answer = {probe}\n"
        "except Exception as error:\n"
        "    answer = f'{type(error).__name__}: {error}'\n"
        "sys.stdout.buffer.write(pickle.dumps(answer))\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(path or "")}
    run = subprocess.run(
        [sys.executable, "-c", code], input=stream, env=environment, cwd=cwd, stdout=subprocess.PIPE, timeout=120,
        check=True,
    )  # fmt: skip
    return pickle.loads(run.stdout)
