"""The table of the benchmarks reports losses as plainly as wins."""

import json
import xml.etree.ElementTree

import pytest

from bench import targets, workloads
from bench.targets import Ledger, MemoryTarget, Row, Target


def ledger_with(**seconds):
    ledger = Ledger()
    for contender, taken in seconds.items():
        ledger.seconds["100k Decimal", contender] = taken
    return ledger


@pytest.mark.parametrize(
    ("ratio", "verdict"),
    [(None, "not available"), (0.5, "SHORT"), (4.99, "SHORT"), (5.0, "pass, below target"),
     (5.99, "pass, below target"), (6.0, "pass"), (100.0, "pass")],
)
def test_verdict(ratio, verdict):
    assert Row("w", "exact", "cloudpickle", ratio, must=5, target=6).verdict == verdict


def test_verdict_without_a_target():
    assert Row("w", "exact", "cloudpickle", 5.0, must=5).verdict == "pass"


def test_ratio_is_of_medians_over_all_rounds():
    """Rounds of the rival from before and after count alike, and one slow round doesn't."""
    ledger = ledger_with(cloudpickle=[3.0, 3.0, 90.0, 3.0, 3.0], exact=[1.0, 1.0, 50.0])
    row = ledger.row(Target("100k Decimal", "exact", "cloudpickle", 2.5))
    assert row.ratio == 3
    assert row.verdict == "pass"


def test_missing_contender_is_not_available():
    ledger = ledger_with(cloudpickle=[1.0])
    ledger.missing["100k Decimal", "exact"] = "no such thing"
    row = ledger.row(Target("100k Decimal", "exact", "cloudpickle", 2.5))
    assert (row.verdict, row.note) == ("not available", "exact: no such thing")
    assert "no such thing" in targets.table(ledger.rows())


def test_geometric_mean():
    ledger = Ledger()
    for workload, ratio in (("100k Decimal", 2.0), ("100k datetime", 8.0)):
        ledger.seconds[workload, "cloudpickle"], ledger.seconds[workload, "exact"] = [ratio], [1.0]
    row = ledger.mean_row(targets.PICKLER_MEAN, targets.PICKLER)
    assert row.ratio == pytest.approx(4)
    assert row.verdict == "pass, below target"


@pytest.mark.parametrize(("ours", "verdict"), [(900_000, "pass"), (1_200_000, "pass"), (1_300_000, "SHORT")])
def test_memory_has_a_little_slack(ours, verdict):
    ledger = Ledger()
    ledger.memory["100k Decimal", "cloudpickle"], ledger.memory["100k Decimal", "exact"] = 1_000_000, ours
    assert ledger.memory_row(MemoryTarget("100k Decimal", "exact", rival="cloudpickle")).verdict == verdict


def test_memory_limit_has_none():
    ledger = Ledger()
    ledger.memory["w", "scan file"] = 1001
    assert ledger.memory_row(MemoryTarget("w", "scan file", limit=1000)).verdict == "SHORT"


def test_node_time():
    ledger = Ledger()
    ledger.seconds["1e5 nodes", targets.FIRST_SCAN], ledger.seconds["1e7 nodes", targets.FIRST_SCAN] = [0.001], [0.2]
    assert ledger.node_time_row().ratio == pytest.approx(0.5)
    assert ledger.node_time_row().verdict == "SHORT"


def test_results_are_written(tmp_path):
    ledger = ledger_with(cloudpickle=[3.0], exact=[2.0], pickle=[9.0])
    results, drawing = targets.write_results(ledger, tmp_path)
    rows = json.loads(results.read_text(encoding="utf-8"))["rows"]
    assert [(row["rival"], row["ratio"], row["verdict"]) for row in rows if row["workload"] == "100k Decimal"] == [
        ("cloudpickle", 1.5, "SHORT"), ("pickle", 4.5, "pass")]
    drawn = xml.etree.ElementTree.parse(drawing).getroot()
    assert len([part for part in drawn.iter() if part.tag.endswith("rect")]) == 1 + len(rows)


def test_every_target_has_a_workload_and_a_contender():
    for row in [*targets.PICKLER, *targets.ANALYSIS, *targets.SCANNER]:
        assert row.workload in workloads.WORKLOADS
        assert {row.contender, row.rival} <= set(workloads.CONTENDERS)
    for row in targets.MEMORY:
        assert row.workload in workloads.WORKLOADS


def test_sparse_file_is_a_pickle_of_its_chunks(tmp_path, monkeypatch):
    monkeypatch.setattr(workloads, "CHUNK_SIZE", 1000)
    monkeypatch.setattr(workloads, "CHUNK_COUNT", 5)
    path = tmp_path / "sparse.pkl"
    workloads.write_sparse_file(str(path))
    import pickle

    assert pickle.loads(path.read_bytes()) == [bytes(1000)] * 5
    assert workloads.skip_through(str(path)) == 5000
    assert workloads.read_through(str(path)) == path.stat().st_size
