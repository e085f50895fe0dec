"""Everything that the README shows is run here, and must give what the README says."""

import ast
import dataclasses
import doctest
import importlib.metadata
import inspect
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import fastcap
from fastcap import config, explain, paths, pytest_plugin, report
from fastcap.cli import analyze, diff, edit

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
FENCE = re.compile(r"(?:<!-- begins the output of: (.+?) -->\n)?```(\w*)\n(.*?)```", re.DOTALL)
PLUGIN_INSTALLED = any(
    entry.value == "fastcap.pytest_plugin" for entry in importlib.metadata.entry_points(group="pytest11")
)
BLOCKS = [match.groups() for match in FENCE.finditer(README)]


@pytest.fixture
def shell(tmp_path):
    """Runs a command line in a copy of the examples, with `fastcap` the one under test."""
    program = tmp_path / "bin" / "fastcap"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m fastcap "$@"\n')
    program.chmod(0o755)
    (program.parent / "pytest").write_text(
        f'#!/bin/sh\nexec "{sys.executable}" -m pytest {"" if PLUGIN_INSTALLED else "-p fastcap.pytest_plugin"} "$@"\n'
    )
    (program.parent / "pytest").chmod(0o755)
    (program.parent / "python").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    (program.parent / "python").chmod(0o755)
    shutil.copytree(ROOT / "examples", tmp_path / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    package = str(Path(fastcap.__file__).parent.parent)
    environment = {key: value for key, value in os.environ.items() if key not in ("COLUMNS", "FORCE_COLOR", "DATA_MIB")}
    environment["PATH"] = os.pathsep.join([str(program.parent), os.environ["PATH"]])
    environment["PYTHONPATH"] = os.pathsep.join([package, os.environ.get("PYTHONPATH", "")])

    def run(commands):
        result = subprocess.run(
            ["bash", "-c", commands], cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        return result.stdout.decode()

    return run


def without_small_numbers(text):
    """Byte and node counts depend on the version of Python and on where the script lies; sizes in MiB do not."""
    text = re.sub(r"\d[\d,]*(?= B\b| nodes?\b| more\b)", "#", text)
    text = re.sub(r"\d+\.\d(?= %)", "#", text)  # of sizes that differ by Python version
    text = re.sub(r"(?<= function )\d+$", "#", text, flags=re.MULTILINE)  # folded stacks
    return [" ".join(line.split()) for line in text.splitlines()]


@pytest.mark.parametrize(
    ("command", "shown"), [(command, text) for command, _, text in BLOCKS if command], ids=lambda value: value[:20]
)
def test_picture(shell, command, shown):
    printed = without_small_numbers(shell(f"{command} 2>/dev/null"))
    expected = without_small_numbers(shown)
    assert printed[: len(expected)] == expected
    assert len(expected) > 8


@pytest.mark.parametrize("block", [text for _, language, text in BLOCKS if language == "console"])
def test_console(shell, block):
    commands, expected = [], []
    for line in block.splitlines():
        if line.startswith("$ "):
            commands.append(line[2:])
            expected.append("")
        else:
            expected[-1] += line + "\n"
    mark = "---- next command ----"
    script = "".join(f"{command}\n{{ code=$?; echo '{mark}'; (exit $code); }}\n" for command in commands)
    printed = shell(script).split(f"{mark}\n")[:-1]
    assert len(printed) == len(commands) >= 2
    for command, found, text in zip(commands, printed, expected):
        assert without_small_numbers(found) == without_small_numbers(text), command


def test_python(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = "\n".join(text for _, language, text in BLOCKS if language == "python")
    assert text.count(">>> ") >= 10
    result = doctest.testfile(str(ROOT / "README.md"), module_relative=False)  # as `python -m doctest README.md` does
    assert result.attempted == len(doctest.DocTestParser().get_examples(text))
    assert result.failed == 0


def test_settings(tmp_path):
    (toml,) = (text for _, language, text in BLOCKS if language == "toml")
    (tmp_path / "pyproject.toml").write_text(toml)
    settings = config.find_settings(tmp_path)
    assert all(getattr(settings, field.name) for field in dataclasses.fields(settings))


def test_no_block_is_left_out():
    assert {language for command, language, _ in BLOCKS if not command} == {"sh", "console", "python", "toml"}
    makefile = (ROOT / "Makefile").read_text()
    shell_blocks = [text for _, language, text in BLOCKS if language == "sh"]
    targets = re.findall(r"^make (\w+)", "".join(shell_blocks), re.MULTILINE)
    assert targets == ["demo", "test"]
    assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in targets)


def table(heading):
    """First cells of the table whose header row begins with ``heading``."""
    lines = README[README.index(f"| {heading} |") :].split("\n\n")[0].splitlines()[2:]
    return [re.split(r"(?<!\\)\|", line)[1].replace("\\|", "|").strip() for line in lines]


def test_every_option_is_listed():
    listed = set(re.findall(r"--[\w-]+|(?<=`)-\w", " ".join(table("option"))))
    options = {name for option in analyze.params for name in option.opts if option.param_type_name == "option"}
    assert listed <= options
    for option in analyze.params:
        assert option.param_type_name == "argument" or listed & set(option.opts), option.name


@pytest.mark.parametrize("command", [diff, edit], ids=lambda command: command.name)
def test_every_option_of_other_commands_is_listed(command):
    listed = set(re.findall(r"--[\w-]+|(?<=`)-\w", " ".join(table(f"option of `{command.name}`"))))
    options = [option for option in command.params if option.param_type_name == "option"]
    assert listed <= {name for option in options for name in option.opts}
    assert all(listed & set(option.opts) for option in options)


def test_every_argument_of_load_is_listed():
    listed = {cell.strip("`").partition("=")[0] for cell in table("argument of `load`")}
    parameters = inspect.signature(fastcap.load).parameters.values()
    assert listed == {parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY}


def test_plugin_is_listed():
    methods = {name for name in vars(pytest_plugin.Payload) if name.startswith("assert_")}
    assert set(re.findall(r"payload\.(\w+)", " ".join(table("fixture `payload`")))) == methods
    ini = {value for name, value in vars(pytest_plugin).items() if name.startswith("_INI_")}
    assert set(re.findall(r"`(\w+)`", " ".join(table("ini option of pytest")))) == ini


def test_every_field_is_listed():
    listed = set(re.findall(r"`(\w+)`", " ".join(table("field"))))
    assert listed == set(report.Report.from_dict(empty_report()).to_dict())
    body = README[README.index("| field |") : README.index("## Paths")]
    for row in (report.Capture, report.NodeRow, report.TypeRow, report.Limit, report.Finding):
        for name in row.__dataclass_fields__:
            assert f"`{name}`" in body, f"{row.__name__}.{name}"


def empty_report():
    numbers = ("payload_size", "stream_size", "buffer_size", "overhead", "protocol", "node_count", "pickle_count")
    lists = ("captures", "nodes", "types", "limits", "findings", "notes")
    texts = dict.fromkeys(("target", "type", "what"), "")
    return {"format": 1, **texts, **dict.fromkeys(numbers, 0), **{name: [] for name in lists}}


def test_every_step_of_the_table_is_a_path():
    steps = [step for cell in table("step") for step in re.findall(r"`(.+?)`", cell)]
    assert len(steps) >= 12
    for step in steps:
        assert str(paths.parse(f"root{step}")) == f"root{step}"


def test_step_words_are_those_of_the_labels():
    """Every word that a path may have is in the table, and no other."""
    listed = {word for cell in table("step") for word in re.findall(r"`<(\w+)", cell)}
    # `word` makes the step; these two hand their first argument on to it
    makers, found = {"word", "named", "captured"}, set()
    for node in ast.walk(ast.parse(Path(explain.__file__).read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in makers:
            kinds = [each for each in outcomes(node.args[0]) if not (isinstance(each, ast.Name) and each.id == "kind")]
            assert all(isinstance(each, ast.Constant) for each in kinds), ast.unparse(node)
            found |= {each.value for each in kinds}
    assert len(found) > 15
    assert listed == found | {"more"}


def outcomes(node):
    """What an expression may give, without the conditions in it."""
    return [*outcomes(node.body), *outcomes(node.orelse)] if isinstance(node, ast.IfExp) else [node]
