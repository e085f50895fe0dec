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


def sizes():
    return {row.source.partition(",")[0]: row.size for row in limits_for(1)}


def test_numbers_are_read_from_the_source(fake_ray):
    assert sizes() == {
        "FUNCTION_SIZE_WARN_THRESHOLD": 10**6,
        "FUNCTION_SIZE_ERROR_THRESHOLD": 2 * 10**6,
        "GRPC_CPP_MAX_MESSAGE_SIZE": 3 << 20,
    }
    assert all(str(fake_ray) in row.source for row in limits_for(1))
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
    assert [row.size for row in limits_for(1)] == [known.size for known in KNOWN]


def test_loaded_module_wins(fake_ray, monkeypatch):
    module = types.ModuleType("ray._private.ray_constants")
    module.FUNCTION_SIZE_WARN_THRESHOLD = 77
    module.FUNCTION_SIZE_ERROR_THRESHOLD = "no number"
    monkeypatch.setitem(sys.modules, "ray._private.ray_constants", module)
    assert ray_constants() == {"FUNCTION_SIZE_WARN_THRESHOLD": (77, "Ray")}


def test_without_ray(monkeypatch):
    monkeypatch.setattr(limits, "_find_source", lambda: None)
    monkeypatch.delitem(sys.modules, "ray._private.ray_constants", raising=False)
    rows = limits_for(10**8 + 1)
    assert [row.size for row in rows] == [10**7, 10**8, 512 << 20]
    assert [row.exceeded for row in rows] == [True, True, False]
    assert [row.effect for row in rows] == ["warning", "error", "error"]
    assert rows[0].ratio == pytest.approx(10, rel=1e-6)
    assert all("not installed" in row.source for row in rows)


def test_a_payload_of_exactly_the_limit_passes(monkeypatch):
    monkeypatch.setattr(limits, "ray_constants", dict)
    assert not limits_for(10**8)[1].exceeded


def test_numbers_of_the_real_ray():
    pytest.importorskip("ray", reason="Ray is not installed")
    code = (
        "import sys; from fastcap.limits import ray_constants; read = ray_constants(); assert 'ray' not in sys.modules;"
        "import ray._private.ray_constants as real;"
        "assert {name: size for name, (size, _) in read.items()} == {name: getattr(real, name) for name in read}, read;"
        "assert len(read) == 3 == len(ray_constants()), read"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
