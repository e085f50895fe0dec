"""``[tool.fastcap]``: where it is looked for, what it may say, and what the command line makes of it."""

import json
import pickle
import subprocess
import sys
from dataclasses import replace

import pytest

import fastcap
from fastcap import analysis
from fastcap.cli import main
from fastcap.comparison import Growth
from fastcap.config import ConfigError, Settings, find_settings
from fastcap.report import Finding

FULL = """
[project]
name = "mine"

[tool.fastcap]
max-size = "10 MiB"
min-size = 512
max-growth = "5%"
select = ["FC1", "FC203"]
ignore = ["FC101"]
"""


def write(folder, text, name="pyproject.toml"):
    (folder / name).write_text(text)


def test_everything(tmp_path):
    write(tmp_path, FULL)
    assert find_settings(tmp_path) == Settings(
        max_size=10 << 20,
        min_size=512,
        max_growth=Growth("5%", percent=5.0),
        select=("FC1", "FC203"),
        ignore=("FC101",),
        file=str(tmp_path / "pyproject.toml"),
    )


def test_closest_file_with_the_table_counts(tmp_path):
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    write(tmp_path, FULL)
    write(tmp_path / "a", "[tool.fastcap]\nmax-size = 5\n")
    write(inner, '[project]\nname = "fastcap-user"\n')
    assert find_settings(inner).max_size == 5
    assert find_settings(tmp_path / "a").min_size is None  # tables are not merged
    assert find_settings(tmp_path).max_size == 10 << 20


def test_no_file(tmp_path):
    assert find_settings(tmp_path) == Settings()
    (tmp_path / "pyproject.toml").mkdir()
    assert find_settings(tmp_path) == Settings()


def test_file_that_is_not_about_fastcap_may_be_anything(tmp_path):
    write(tmp_path, "this = is = no TOML")
    assert find_settings(tmp_path) == Settings()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[tool.fastcap]\nmax-size = ", "pyproject.toml is not TOML"),
        ("[tool.fastcap]\nmaxsize = 1", "unknown key 'maxsize': did you mean max-size?"),
        ("[tool.fastcap]\nx = 1", "unknown key 'x': it may have max-size, min-size, max-growth, select, ignore"),
        ("[tool.fastcap]\nmax-size = 1.5", "max-size of [tool.fastcap]: 1.5 is neither a string nor"),
        ("[tool.fastcap]\nmax-size = true", "max-size of [tool.fastcap]: True is neither"),
        ("[tool.fastcap]\nmax-size = 'much'", "'much' is not a size"),
        ("[tool.fastcap]\nmax-size = -5", "'-5' is not a size"),
        ("[tool.fastcap]\nmax-growth = 'x%'", "'x%' is no growth"),
        ("[tool.fastcap]\nselect = 'FC101'", "'FC101' is no list of codes"),
        ("[tool.fastcap]\nselect = ['FC1', 'E501']", "'E501' is neither a code"),
        ("[tool.fastcap]\nignore = [101]", "101 is neither a code"),
        ("[tool]\nfastcap = 5", "tool.fastcap is no table"),
    ],
)
def test_mistakes_are_named(tmp_path, text, message):
    write(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        find_settings(tmp_path)
    assert message in str(caught.value)
    assert str(tmp_path / "pyproject.toml") in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_not_utf8(tmp_path):
    (tmp_path / "pyproject.toml").write_bytes(b"[tool.fastcap]\nmax-size = '\xff'\n")
    with pytest.raises(ConfigError, match="is not TOML"):
        find_settings(tmp_path)


@pytest.mark.parametrize(
    ("select", "ignore", "wanted", "unwanted"),
    [
        ((), (), "FC101 FC202", ""),
        (("FC1",), (), "FC101", "FC202"),
        ((), ("FC1",), "FC202", "FC101"),
        (("FC1",), ("FC101",), "FC102", "FC101 FC202"),
        (("FC", "FC101"), ("FC1",), "FC101 FC202", "FC102"),
        (("FC101",), ("FC101",), "", "FC101 FC102"),
    ],
)
def test_codes(select, ignore, wanted, unwanted):
    settings = Settings(select=select, ignore=ignore)
    assert all(settings.wants(code) for code in wanted.split())
    assert not any(settings.wants(code) for code in unwanted.split())


# ---- the command line


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "payload.pkl").write_bytes(pickle.dumps({"a": b"x" * 5000, "b": b"y" * 900}))
    return tmp_path


def test_max_size(folder, capsys):
    write(folder, "[tool.fastcap]\nmax-size = '1 KiB'\n")
    assert main(["analyze", "payload.pkl"]) == 1
    assert "over max-size (1.0 KiB)" in capsys.readouterr().out
    assert main(["analyze", "payload.pkl", "--format", "json"]) == 1
    out, err = capsys.readouterr()
    limit = json.loads(out)["limits"][0]
    assert (limit["name"], limit["size"], limit["source"]) == ("max-size", 1024, str(folder / "pyproject.toml"))
    assert f"is over max-size of {folder / 'pyproject.toml'}: 1.0 KiB" in err
    assert main(["analyze", "payload.pkl", "--max-size", "1MiB"]) == 0  # the command line wins


def test_min_size(folder, capsys):
    write(folder, "[tool.fastcap]\nmin-size = 2000\n")

    def paths(*options):
        assert main(["analyze", "payload.pkl", "--format", "json", *options]) == 0
        return [row["path"] for row in json.loads(capsys.readouterr().out)["nodes"]]

    assert "obj['b']" not in paths()
    assert "obj['b']" in paths("--min-size", "1")
    assert main(["analyze", "payload.pkl", "--format", "json", "-o", "saved.json"]) == 0
    assert main(["analyze", "saved.json"]) == 0  # says nothing about reports that are made already


def test_findings_are_selected(folder, capsys, monkeypatch):
    rows = tuple(Finding(code, "note", "obj", 1, "message") for code in ("FC101", "FC102", "FC201"))
    original = analysis._details
    monkeypatch.setattr(analysis, "_details", lambda *args: replace(original(*args), findings=rows))
    write(folder, "[tool.fastcap]\nselect = ['FC1']\nignore = ['FC102']\n")
    assert main(["analyze", "payload.pkl", "--format", "json"]) == 0
    assert [row["code"] for row in json.loads(capsys.readouterr().out)["findings"]] == ["FC101"]


def test_mistakes_end_the_command(folder, capsys):
    write(folder, "[tool.fastcap]\nmax = 1\n")
    for arguments in (["analyze", "payload.pkl"], ["diff", "payload.pkl", "payload.pkl"]):
        assert main(arguments) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert "unknown key 'max'" in err


def test_python_calls_do_not_depend_on_the_folder(folder):
    write(folder, "[tool.fastcap]\nmax-size = 1\n")
    fastcap.check([1])


def test_toml_is_read_only_if_there_is_something_to_read(tmp_path):
    write(tmp_path, "[project]\nname = 'x'\n")
    code = f"import sys; from fastcap.config import *; find_settings({str(tmp_path)!r}); print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "fastcap.config" in run.stdout
    assert not {"tomllib", "tomli"} & set(run.stdout.split())
