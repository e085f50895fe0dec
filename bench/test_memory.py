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
        # A dump of the workload itself would leave memory behind that the second one then has for free.
        answer = worker.ask(contender, memory=True, warm_up=contender in ("cloudpickle", "exact"))
    finally:
        worker.close()
    if "peak" in answer:
        ledger.memory[workload, contender] = answer["peak"]
        return
    ledger.missing[workload, contender] = answer.get("unavailable") or answer["error"]
    (pytest.fail if "error" in answer else pytest.skip)(f"not available: {ledger.missing[workload, contender]}")
