"""Limits come from the installed Ray, read without importing it."""

import subprocess
import sys
import types

import pytest

from fastcap import limits
from fastcap.limits import KNOWN, limits_for, ray_constants

SOURCE = """
from ray._common.utils import env_integer
KIB = 1024
FUNCTION_SIZE_WARN_THRESHOLD = 10**6
FUNCTION_SIZE_ERROR_THRESHOLD = env_integer("FUNCTION_SIZE_ERROR_THRESHOLD", (2 * 10**6))
GRPC_CPP_MAX_MESSAGE_SIZE = 3 * KIB * KIB
OTHER = compute(1)
raise SystemExit("this file must not be executed")
"""


@pytest.fixture
def fake_ray(tmp_path, monkeypatch):
    folder = tmp_path / "ray" / "_private"
    folder.mkdir(parents=True)
    (tmp_path / "ray" / "__init__.py").write_text("raise SystemExit('ray must not be imported')")
    (folder / "ray_constants.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [name for name in sys.modules if name == "ray" or name.startswith("ray.")]:
        monkeypatch.delitem(sys.modules, name)
    for known in KNOWN:
        monkeypatch.delenv(known.constant, raising=False)
    return folder / "ray_constants.py"


CONSTANTS = {"FUNCTION_SIZE_WARN_THRESHOLD", "FUNCTION_SIZE_ERROR_THRESHOLD", "GRPC_CPP_MAX_MESSAGE_SIZE"}


def rows_of_constants(payload_size=1):
    return [row for row in limits_for(payload_size) if row.source.partition(",")[0] in CONSTANTS]


def sizes():
    return {row.source.partition(",")[0]: row.size for row in rows_of_constants()}


def test_numbers_are_read_from_the_source(fake_ray):
    assert sizes() == {
        "FUNCTION_SIZE_WARN_THRESHOLD": 10**6,
        "FUNCTION_SIZE_ERROR_THRESHOLD": 2 * 10**6,
        "GRPC_CPP_MAX_MESSAGE_SIZE": 3 << 20,
    }
    assert all(str(fake_ray) in row.source for row in rows_of_constants())
    assert "ray" not in sys.modules


@pytest.mark.parametrize(("given", "size"), [("12345", 12345), ("many", 2 * 10**6), ("", 2 * 10**6)])
def test_environment_as_ray_reads_it(fake_ray, monkeypatch, given, size):
    monkeypatch.setenv("FUNCTION_SIZE_ERROR_THRESHOLD", given)
    monkeypatch.setenv("FUNCTION_SIZE_WARN_THRESHOLD", "1")  # Ray has no such variable
    assert sizes()["FUNCTION_SIZE_ERROR_THRESHOLD"] == size
    assert sizes()["FUNCTION_SIZE_WARN_THRESHOLD"] == 10**6


@pytest.mark.parametrize("text", ["", "def broken(", "FUNCTION_SIZE_WARN_THRESHOLD = 10 ** 10 ** 10", "\0"])
def test_a_source_that_says_nothing(fake_ray, text):
    fake_ray.write_text(text)
    assert [row.size for row in rows_of_constants()] == [known.size for known in KNOWN if known.constant in CONSTANTS]


def test_loaded_module_wins(fake_ray, monkeypatch):
    module = types.ModuleType("ray._private.ray_constants")
    module.FUNCTION_SIZE_WARN_THRESHOLD = 77
    module.FUNCTION_SIZE_ERROR_THRESHOLD = "no number"
    monkeypatch.setitem(sys.modules, "ray._private.ray_constants", module)
    assert ray_constants() == {"FUNCTION_SIZE_WARN_THRESHOLD": (77, "Ray")}


def test_without_ray(monkeypatch):
    monkeypatch.setattr(limits, "_find_source", lambda: None)
    monkeypatch.delitem(sys.modules, "ray._private.ray_constants", raising=False)
    rows = rows_of_constants(10**8 + 1)
    assert [row.size for row in rows] == [10**7, 10**8, 512 << 20]
    assert [row.exceeded for row in rows] == [True, True, False]
    assert [row.effect for row in rows] == ["warning", "error", "error"]
    assert rows[0].ratio == pytest.approx(10, rel=1e-6)
    assert all("not installed" in row.source for row in rows)


def test_a_payload_of_exactly_the_limit_passes(monkeypatch):
    monkeypatch.setattr(limits, "ray_constants", dict)
    assert not rows_of_constants(10**8)[1].exceeded


def test_numbers_of_the_real_ray():
    pytest.importorskip("ray", reason="Ray is not installed")
    code = (
        "import sys; from fastcap.limits import ray_constants; read = ray_constants(); assert 'ray' not in sys.modules;"
        "import ray._private.ray_constants as real;"
        "assert {name: size for name, (size, _) in read.items()} == {name: getattr(real, name) for name in read}, read;"
        "assert len(read) == 3 == len(ray_constants()), read"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@pytest.mark.parametrize("known", [known for known in KNOWN if known.package != "ray"], ids=lambda known: known.package)
def test_other_systems_count_where_they_are_loaded(known, monkeypatch):
    monkeypatch.delitem(sys.modules, known.package, raising=False)
    assert known.name not in {row.name for row in limits_for(1)}
    monkeypatch.setitem(sys.modules, known.package, types.ModuleType(known.package))
    row = {row.name: row for row in limits_for(known.size + 1)}[known.name]
    assert row.exceeded
    assert row.size == known.size
    assert known.constant in row.source


def test_a_way_around_is_no_verdict():
    """Arguments above Ray's limit for inlining go through the object store: nothing that a verdict should speak of."""
    notes = [known for known in KNOWN if known.effect == "note"]
    assert [known.size for known in notes] == [100 << 10]
    # without the limits of other libraries, which count where those are loaded
    verdict = _verdict([row for row in limits_for(1 << 20) if row.name.startswith("Ray")])
    assert notes[0].name not in verdict
    assert "Ray's export warning" in verdict


def _verdict(rows):
    from fastcap.render.text import _judge

    return _judge(rows)[0]
