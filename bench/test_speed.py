"""Time: one benchmark group for each workload, the rivals first and last."""

import pytest

from bench import targets
from bench.worker import measured_time

GROUPS: dict[str, list[str]] = {}
for row in [*targets.PICKLER, *targets.ANALYSIS, *targets.SCANNER]:
    rivals = GROUPS.setdefault(row.workload, [])
    rivals += [name for name in (row.rival, row.contender) if name not in rivals]
for workload in targets.PICKLER_WORKLOADS:
    GROUPS[workload] += [name for name in ("exact", "compact", "asizeof") if name not in GROUPS[workload]]
DUMPS = ["cloudpickle", "pickle", "exact", "compact"]
RIVALS = ["cloudpickle", "pickle", "genops", "loads", "skip through", "read through"]  # measured first and last
ONCE = ["asizeof", "genops"]  # take seconds, and tell by an order of magnitude
ANALYSIS_LOOPS = 100  # at most, for what takes a millisecond where a dump takes some microseconds

TURNS = [
    pytest.param(workload, contender, id=f"{workload}-{contender}-{turn}")
    for workload, contenders in GROUPS.items()
    for turn, contender in [
        *(("first", name) for name in RIVALS if name in contenders),
        *(("only", name) for name in contenders if name not in RIVALS),
        *(("last", name) for name in RIVALS if name in contenders and name not in ONCE),
    ]
]


# pytest-benchmark measures in this process what the worker says that it took, without the way there and back.
@pytest.mark.benchmark(timer=measured_time)
@pytest.mark.parametrize(("worker", "contender"), TURNS, indirect=["worker"], scope="module")
def test_speed(worker, contender, benchmark, ledger, request):
    entry = worker.entry
    benchmark.group = entry.name
    loops = entry.loops if contender in DUMPS else 1 if contender in ONCE else min(entry.loops, ANALYSIS_LOOPS)
    first = worker.ask(contender, loops=1)  # also warms up
    key = (entry.name, contender)
    if "seconds" not in first:
        ledger.missing[key] = first.get("unavailable") or first["error"]
        reason = f"not available: {ledger.missing[key]}"
        if "error" in first:
            pytest.fail(reason, pytrace=False)
        pytest.skip(reason)
    if contender == "asizeof":
        ledger.sized[entry.name] = first["result"]
    if contender == "cloudpickle" and entry.name not in ledger.payloads:
        ledger.payloads[entry.name] = worker.ask(contender, memory=True)["result"]
    rounds = request.config.getoption("--rounds") or (1 if contender in ONCE else entry.rounds)
    taken: list[float] = []

    def measure():
        answer = worker.ask(contender, loops=loops)
        taken.append(answer["seconds"])

    benchmark.pedantic(measure, rounds=rounds, iterations=1)
    ledger.seconds.setdefault(key, []).extend(taken)
    benchmark.extra_info.update(workload=entry.name, contender=contender, modules=worker.state["modules"])
