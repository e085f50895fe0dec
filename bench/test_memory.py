"""Peak memory: each measurement in a process of its own."""

import pytest

from bench import targets
from bench.worker import Worker

PAIRS = list(dict.fromkeys((row.workload, contender) for row in targets.MEMORY
                           for contender in (row.rival, row.contender) if contender))


@pytest.mark.parametrize(("workload", "contender"), PAIRS, ids="-".join)
def test_memory(workload, contender, ledger):
    worker = Worker(workload)
    try:
        if contender in ("cloudpickle", "exact"):
            worker.ask(contender, loops=1)  # so that what is imported on the way doesn't count
        answer = worker.ask(contender, memory=True)
    finally:
        worker.close()
    if "peak" in answer:
        ledger.memory[workload, contender] = answer["peak"]
        return
    ledger.missing[workload, contender] = answer.get("unavailable") or answer["error"]
    (pytest.fail if "error" in answer else pytest.skip)(f"not available: {ledger.missing[workload, contender]}")
