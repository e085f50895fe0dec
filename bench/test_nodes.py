"""Time for one node, in payloads of few and of many.

Memory that is touched for the first time costs more than what is done with it, and a scan of few nodes gets by with
what the one before it has left, which one of many cannot. So like is compared with like: each figure is that of the
first scan in a process of its own, as the command line does it. What a second scan takes is told beside it.
"""

import pytest

from bench import targets
from bench.worker import Worker

ROUNDS = 5


@pytest.mark.parametrize("workload", targets.NODE_COUNTS)
def test_time_for_one_node(workload, ledger, request):
    rounds = request.config.getoption("--rounds") or ROUNDS
    for _ in range(rounds):
        worker = Worker(workload)
        try:
            for which in (targets.FIRST_SCAN, targets.SECOND_SCAN):
                answer = worker.ask("dominators", loops=1)
                if "seconds" not in answer:
                    pytest.fail(str(answer), pytrace=False)
                ledger.seconds.setdefault((workload, which), []).append(answer["seconds"])
        finally:
            worker.close()
