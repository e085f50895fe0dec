"""A process in which one workload is measured."""

import contextlib
import json
import os
import pathlib
import subprocess
import sys
from typing import Any

from bench import workloads

ROOT = pathlib.Path(__file__).resolve().parent.parent


class Worker:
    """A process that has made one workload."""

    measured = 0.0  # seconds, all workers together

    def __init__(self, name: str) -> None:
        self.entry = workloads.WORKLOADS[name]
        environment = dict(os.environ, PYTHONPATH=os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
        self.process = subprocess.Popen(
            [sys.executable, str(pathlib.Path(workloads.__file__)), name], env=environment, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        self.state = self.receive()

    def receive(self) -> dict[str, Any]:
        assert self.process.stdout
        line = self.process.stdout.readline()
        if line:
            return json.loads(line)
        _, errors = self.process.communicate()
        return {"error": f"the process ended with status {self.process.returncode}: {errors[-500:]}"}

    def ask(self, contender: str, **options: Any) -> dict[str, Any]:
        if "unavailable" in self.state or "error" in self.state:
            return self.state
        assert self.process.stdin
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps({"contender": contender, **options}), file=self.process.stdin, flush=True)
        answer = self.receive()
        if "the process ended" in answer.get("error", ""):
            self.state = answer
        Worker.measured += answer.get("seconds", 0)
        return answer

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


def measured_time() -> float:
    """A clock that runs while a worker measures, and stands else: for pytest-benchmark, which runs here."""
    return Worker.measured
