"""The command line: targets, formats, output files, exit codes, terminals, and every kind of bad input."""

import json
import logging
import os
import pickle
import pty
import re
import signal
import stat
import subprocess
import sys
import textwrap
from pathlib import Path

import cloudpickle
import pytest

import fastcap
from fastcap._native.scanner import Scanner
from fastcap.cli import main
from fastcap.errors import PayloadError
from fastcap.report import Report
from fastcap.rules import RULES
from fastcap.targets import locate_error, parse_target

ROOT = Path(__file__).parent.parent
SAVED = Path(__file__).parent / "golden" / "oversized.json"
PAYLOAD = {"weights": bytes(50_000), "names": ["a", "b" * 100], "nested": {"x": {"y": [1, 2, 3]}, "z": "q" * 500}}

SCRIPT = """
import os
import sys
from dataclasses import dataclass
from functools import partial

BIG = bytes(100_000)


@dataclass
class Config:
    rate: float = 0.5

    def scaled(self):
        return self.rate * 2


class Trainer:
    def __init__(self):
        self.data = BIG

    def fit(self):
        return len(self.data)

    def make(self):
        def step(config: Config):
            return self.data, config
        return step

    @property
    def broken(self):
        raise RuntimeError("property failed")


class Stubborn:
    def __reduce__(self):
        raise ValueError("cannot be pickled\\nsecond line")


def train(config):
    return BIG, Config(config), Trainer, __name__


trainer = Trainer()
step = trainer.make()
job = partial(train, Config())
lambda_ = lambda: Config
stubborn = Stubborn()
lock = __import__("threading").Lock()
argv = sys.argv
print("printed while importing")

if __name__ == "__main__":
    made_by_main = 1
    import cloudpickle
    print(len(cloudpickle.dumps(globals()[sys.argv[1]])))
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "payload.pkl").write_bytes(pickle.dumps(PAYLOAD, protocol=5))
    (tmp_path / "saved.json").write_bytes(SAVED.read_bytes())
    return tmp_path


def run(capsys, *arguments):
    """Exit code, standard output and standard error of a command, run in this process."""
    code = main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    return code, out, err


def fails(capsys, *arguments):
    """The one line on standard error of a command that must fail with exit code 2."""
    code, out, err = run(capsys, *arguments)
    assert code == 2
    assert out == ""
    lines = [line for line in err.splitlines() if not line.startswith("fastcap: importing ") or " failed" in line]
    lines = [line for line in lines if line != "printed while importing"]
    assert len(lines) == 1, err
    assert lines[0].startswith("fastcap: ")
    assert lines[0].isprintable()
    return lines[0]


def command(*arguments):
    return [sys.executable, "-m", "fastcap", *map(str, arguments)]


def environment(**variables):
    """For a process that imports the fastcap under test, and looks for its terminal by itself."""
    own = ("COLUMNS", "NO_COLOR", "FORCE_COLOR", "TERM")
    path = os.pathsep.join([str(Path(fastcap.__file__).parent.parent), os.environ.get("PYTHONPATH", "")])
    return {**{key: value for key, value in os.environ.items() if key not in own}, "PYTHONPATH": path, **variables}


def spawn(*arguments, input=None, **variables):
    return subprocess.run(
        command(*arguments), input=input, capture_output=True, env=environment(**variables), timeout=60
    )


def on_terminal(arguments, columns=80, **variables):
    """What a command writes to a terminal that is both its standard output and its standard error."""
    import fcntl
    import struct
    import termios

    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    process = subprocess.Popen(
        arguments, stdin=follower, stdout=follower, stderr=follower, env=environment(**{"TERM": "xterm", **variables})
    )
    os.close(follower)
    chunks = []
    while True:
        try:
            chunk = os.read(leader, 65536)
        except OSError:  # Linux: the other side is closed
            break
        if not chunk:
            break
        chunks.append(chunk)
    os.close(leader)
    assert process.wait(60) == 0
    return b"".join(chunks).decode()


# ---- the group


def test_help_has_examples_and_exit_codes(capsys):
    code, out, err = run(capsys, "--help")
    assert code == 0
    assert not err
    assert "fastcap analyze trainer.pkl" in out
    assert "Exit codes: 0 fine, 1 over budget, 2 usage or input error" in out


def test_version(capsys):
    assert run(capsys, "--version") == (0, f"fastcap {fastcap.__version__}\n", "")


def test_no_command_shows_help(capsys):
    code, out, _ = run(capsys)
    assert code == 2
    assert "analyze" in out


def test_installed_command_and_module_agree():
    assert spawn("--version").stdout == f"fastcap {fastcap.__version__}\n".encode()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["anlyze"], "No such command"),
        (["analyze"], "Missing argument 'TARGET'"),
        (["analyze", "payload.pkl", "--dept", "3"], "--depth"),
        (["analyze", "payload.pkl", "--depth", "-1"], "--depth"),
        (["analyze", "payload.pkl", "--top", "0"], "--top"),
        (["analyze", "payload.pkl", "--format", "xml"], "'text', 'json', 'folded'"),
        (["analyze", "payload.pkl", "--sort", "size"], "'retained', 'self', 'subtree'"),
        (["analyze", "payload.pkl", "--max-size", "10 quux"], "'10 quux' is not a size: write 10MiB"),
        (["analyze", "payload.pkl", "--min-size", "-1"], "not a size"),
        (["analyze", "train.py:train", "--flavor", "dill"], "--flavor dill is none of cloudpickle, ray.cloudpickle"),
        (["analyze", "train.py:train", "--protocol", "6"], "--protocol"),
        (["analyze", "payload.pkl", "second.pkl"], "second.pkl"),
    ],
)
def test_usage_errors(folder, capsys, arguments, message):
    assert message in fails(capsys, *arguments)


# ---- targets


def test_pickle_file(folder, capsys):
    code, out, err = run(capsys, "analyze", "payload.pkl")
    assert (code, err) == (0, "")
    size = (folder / "payload.pkl").stat().st_size
    assert out.splitlines()[0].startswith("payload.pkl")
    assert f"({size:,} B)" in out.splitlines()[1]


@pytest.mark.parametrize("target", ["payload.pkl", "./payload.pkl"])
def test_json_of_a_file(folder, capsys, target):
    code, out, err = run(capsys, "analyze", target, "--format", "json")
    assert (code, err) == (0, "")
    data = json.loads(out)
    assert data["payload_size"] == (folder / "payload.pkl").stat().st_size
    assert sum(row["self_size"] for row in data["nodes"]) + data["overhead"] == data["payload_size"]
    assert data["captures"][0]["path"].endswith("['weights']")
    assert Report.from_dict(data).to_dict() == data


def test_standard_input(folder):
    result = spawn("analyze", "-", "-f", "json", input=(folder / "payload.pkl").read_bytes())
    assert (result.returncode, result.stderr) == (0, b"")
    assert json.loads(result.stdout)["payload_size"] == (folder / "payload.pkl").stat().st_size


def test_pipe_as_file(folder):
    """Process substitution, <(…), gives a path that can be opened once and not rewound."""
    line = f"{sys.executable} -m fastcap analyze <(cat payload.pkl) -f json"
    result = subprocess.run(["bash", "-c", line], capture_output=True, env=environment(), timeout=60)
    assert (result.returncode, result.stderr) == (0, b"")
    assert json.loads(result.stdout)["payload_size"] == (folder / "payload.pkl").stat().st_size


def test_script(folder, capsys):
    code, out, err = run(capsys, "analyze", "train.py:step")
    assert code == 0
    assert err.splitlines() == ["fastcap: importing train.py", "printed while importing"]
    assert out.startswith("step")
    assert "note: imported train.py as __main__" in " ".join(out.split())


@pytest.mark.parametrize("name", ["train", "Trainer", "Config", "step", "job", "lambda_", "trainer"])
def test_script_is_pickled_as_when_it_runs(folder, capsys, name):
    """Same size as `python train.py` finds, where everything that the script defines belongs to __main__."""
    result = subprocess.run(
        [sys.executable, "train.py", name], capture_output=True, check=True, env=environment(), timeout=60
    )
    code, out, _ = run(capsys, "analyze", f"train.py:{name}", "-f", "json")
    assert code == 0
    assert json.loads(out)["payload_size"] == int(result.stdout.split()[-1])


# Objects that pickle by a name they keep, by `__module__` or by what they wrap.
NAMED = """
import abc, collections, contextlib, dataclasses, enum, functools, logging, sys, typing
import cloudpickle
import numpy

@functools.lru_cache
def cached(x): return x

@functools.lru_cache(maxsize=None)
def calls_cached(x): return cached(x)

def uses_cached(x): return cached(x) + calls_cached(x)

@functools.singledispatch
def dispatch(x): return x

@dispatch.register
def _(x: int): return x + 1

def uses_dispatch(x): return dispatch(x)

def decorate(function):
    @functools.wraps(function)
    def wrapper(*args): return function(*args)
    wrapper.extra = cached
    return wrapper

@decorate
def wrapped(x): return x

vectorized = numpy.vectorize(wrapped)
part = functools.partial(cached, 1)
method = functools.partialmethod(cached, 1)

class Outer:
    class Inner:
        class Innermost:
            @functools.lru_cache
            def cached(self): return 1
        @staticmethod
        def static(): return 1
        @property
        def plain(self): return cached
    def __call__(self): return self.Inner

class Abstract(abc.ABC):
    @abc.abstractmethod
    def run(self): ...

class Color(enum.Enum):
    RED = 1

Pair = collections.namedtuple("Pair", "a b")
Typed = typing.NamedTuple("Typed", [("a", int)])
Made = dataclasses.make_dataclass("Made", ["a"])
Variable = typing.TypeVar("Variable")
New = typing.NewType("New", int)

@contextlib.contextmanager
def managed(): yield

@dataclasses.dataclass
class Holder:
    value: object = None

inner = Outer.Inner.Innermost()
holder = Holder(Holder([cached, vectorized, Pair(1, 2), Color.RED]))
logger = logging.getLogger(__name__)
logs = lambda: logger
names = [__name__, cached.__module__, Outer.Inner.__module__, sys.modules["__main__"].__name__]
main_module = sys.modules["__main__"]
in_function = lambda: __name__ == "__main__"
instance = Outer()
innermost = Outer.Inner.Innermost.cached

if __name__ == "__main__":
    import os
    for name in sys.argv[1:]:
        if os.fork():  # each name in a process of its own: pickling changes what is pickled next
            os.wait()
            continue
        try:
            print(len(cloudpickle.dumps(globals()[name])), flush=True)
        except Exception as error:
            print(f"{type(error).__name__}: {error}", flush=True)
        os._exit(0)
"""
NAMED_NAMES = re.findall(
    r"\w+",
    "cached calls_cached uses_cached dispatch uses_dispatch wrapped vectorized part Outer Abstract Color Pair Typed "
    "Made Variable New managed inner holder logger logs names main_module in_function instance innermost method",
)


def test_what_keeps_the_name_of_its_module(folder, capsys):
    """The sizes and findings are those of the running script, whatever keeps `__main__` as a name."""
    (folder / "named.py").write_text(NAMED)
    result = subprocess.run(
        [sys.executable, "named.py", *NAMED_NAMES], capture_output=True, check=True, env=environment(), timeout=60
    )
    lines = result.stdout.decode().splitlines()
    assert len(lines) == len(NAMED_NAMES)
    failing = [name for name, line in zip(NAMED_NAMES, lines) if not line.isdigit()]
    assert failing == ["dispatch", "uses_dispatch"]
    for name, expected in zip(NAMED_NAMES, lines):
        logging.Logger.manager.loggerDict.pop("__main__", None)  # a process of the command line analyzes one script
        code, out, _ = run(capsys, "analyze", f"named.py:{name}", "-f", "json")
        report = json.loads(out)
        failures = [row for row in report["findings"] if row["code"].startswith("FC1")]
        assert code == 0
        if expected.isdigit():
            assert (name, report["payload_size"], failures) == (name, int(expected), [])
        else:
            assert expected in " ".join(row["message"] for row in failures)


@pytest.mark.parametrize(
    "guard",
    [
        'if __name__ == "__main__":',
        'if "__main__" == __name__:',
        'if __name__ in ("__main__", "job"):',
        'if True and __name__ == "__main__":',
        'if not __name__ != "__main__":',
        'is_main = __name__ == "__main__"\nif is_main:',
        'match __name__:\n  case "__main__":',
        'class Namespace:\n if __name__ == "__main__":',
        'try:\n if __name__ == "__main__":',
    ],
)
def test_guarded_code_does_not_run(folder, capsys, guard):
    end = "\nfinally: pass" if guard.startswith("try") else ""
    (folder / "guarded.py").write_text(f"x = [__name__]\n{guard}\n    raise SystemExit('ran'){end}\n")
    code, out, err = run(capsys, "analyze", "guarded.py:x", "-f", "json")
    assert (code, err) == (0, "fastcap: importing guarded.py\n")
    assert json.loads(out)["payload_size"] == len(cloudpickle.dumps(["__main__"]))


def test_script_leaves_this_process_as_it_was(folder, capsys):
    before = sys.modules["__main__"], sys.path[:], sys.argv[:], sys.modules.get("__mp_main__")
    assert run(capsys, "analyze", "train.py:step")[0] == 0
    fails(capsys, "analyze", "train.py:nothing")
    assert (sys.modules["__main__"], sys.path, sys.argv, sys.modules.get("__mp_main__")) == before


def test_script_sees_its_own_arguments_only(folder, capsys):
    code, out, _ = run(capsys, "analyze", "train.py:argv", "-f", "json")
    assert code == 0
    assert json.loads(out)["payload_size"] == len(cloudpickle.dumps(["train.py"]))


def test_script_may_import_its_neighbours(folder, capsys, monkeypatch):
    (folder / "sub").mkdir()
    (folder / "sub" / "neighbour_of_job.py").write_text("def helper(): pass\n")
    (folder / "sub" / "job.py").write_text("from neighbour_of_job import helper\ndef job(): return helper()\n")
    assert run(capsys, "analyze", "sub/job.py:job")[0] == 0
    del sys.modules["neighbour_of_job"]


def test_dotted_name(folder, capsys):
    code, out, _ = run(capsys, "analyze", "train.py:trainer.fit", "-f", "json")
    assert code == 0
    data = json.loads(out)
    assert data["target"] == "trainer.fit"
    assert data["captures"][0]["retained_size"] >= 100_000


def test_module(folder, capsys):
    package = folder / "package_of_jobs"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "jobs.py").write_text("import sys\nTABLE = {'rows': bytes(5000), 'argv': sys.argv}\ndef main(): pass\n")
    code, out, err = run(capsys, "analyze", "package_of_jobs.jobs:TABLE", "-f", "json")
    assert (code, err) == (0, "fastcap: importing package_of_jobs.jobs\n")
    data = json.loads(out)
    assert data["notes"][-1] == "imported package_of_jobs.jobs"
    assert data["captures"][0]["path"] == "TABLE['rows']"
    code, out, _ = run(capsys, "analyze", "package_of_jobs.jobs:main", "-f", "json")
    assert json.loads(out)["payload_size"] < 100  # by reference
    for name in [name for name in sys.modules if name.startswith("package_of_jobs")]:
        del sys.modules[name]


def test_flavor_and_protocol_are_used(folder, capsys):
    for protocol in (2, 4, 5):
        _, out, _ = run(capsys, "analyze", "train.py:step", "--protocol", protocol, "-f", "json")
        assert json.loads(out)["protocol"] == protocol


def test_missing_flavor_is_told_before_anything_is_imported(folder, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyspark", None)
    code, out, err = run(capsys, "analyze", "train.py:step", "--flavor", "pyspark.cloudpickle")
    assert (code, out) == (2, "")
    assert re.fullmatch(r"fastcap: --flavor pyspark\.cloudpickle cannot be used here: .*\n", err)


def test_other_flavor(folder, capsys):
    pytest.importorskip("joblib.externals.cloudpickle", reason="there is no joblib, or one without cloudpickle")
    code, out, _ = run(capsys, "analyze", "train.py:step", "--flavor", "joblib.externals.cloudpickle")
    assert code == 0
    assert out.startswith("step")


def test_saved_report(folder, capsys):
    code, out, err = run(capsys, "analyze", "saved.json", "--format", "json")
    assert (code, err) == (0, "")
    assert json.loads(out) == json.loads(SAVED.read_text())
    code, out, _ = run(capsys, "analyze", "saved.json", "--max-size", "1MiB")
    assert code == 1
    assert "over --max-size (1.0 MiB) 800.0 times" in out.splitlines()[1]


def test_json_goes_in_as_it_came_out(folder, capsys):
    _, text, _ = run(capsys, "analyze", "payload.pkl")
    run(capsys, "analyze", "payload.pkl", "-f", "json", "-o", "again.json")
    assert run(capsys, "analyze", "again.json") == (0, text, "")


@pytest.mark.parametrize(
    ("text", "expected", "where", "name"),
    [
        ("-", "stdin", "-", ""),
        ("payload.pkl", "file", "payload.pkl", ""),
        ("train.py:a", "script", "train.py", "a"),
        ("train.py:a.b.c", "script", "train.py", "a.b.c"),
        ("./train.py:a", "script", "./train.py", "a"),
        ("pkg.mod:f", "module", "pkg.mod", "f"),
        ("odd:name.pkl", "file", "odd:name.pkl", ""),
        ("noext:f", "script", "noext", "f"),
        ("shebang:f", "script", "shebang", "f"),
        ("job.pyw:f", "script", "job.pyw", "f"),
    ],
)
def test_parse_target(folder, text, expected, where, name):
    (folder / "job.pyw").write_text("f = 1\n")
    (folder / "shebang").write_text("#!/usr/bin/env python3\nf = (\n")
    (folder / "odd:name.pkl").write_bytes(b"N.")
    (folder / "noext").write_text("f = 1\n")
    target = parse_target(text)
    assert (target.kind, target.where, target.name) == (expected, where, name)


# ---- bad input


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("missing.pkl", "no file missing.pkl: TARGET is a pickle file, -, package.module:name or script.py:name"),
        ("paylod.pkl", "no file paylod.pkl: did you mean payload.pkl?"),
        ("nowhere/x.pkl", "no file nowhere/x.pkl, and no directory nowhere"),
        (
            "checkpoints",
            f"checkpoints is a directory: name a file in it, such as {os.path.join('checkpoints', 'a.pkl')}",
        ),
        ("zero.bin", "zero.bin is empty"),
        ("train.py", "train.py is a Python script: name an object in it, train.py:NAME (it has BIG, Config, Trainer"),
        ("trian.py:train", "no file trian.py: did you mean train.py?"),
        ("train.py:", "after the colon goes a dotted name"),
        ("train.py:a b", "after the colon goes a dotted name"),
        ("train.py:make()", "after the colon goes a dotted name"),
        (":train", "after the colon goes a dotted name"),
        ("checkpoints:x", "checkpoints is a directory"),
        ("payload.pkl:x", "payload.pkl is no Python script, so it has no 'x': for a pickle, TARGET is payload.pkl "),
        ("array.npy:x.y", "array.npy is no Python script"),
        ("noext:x", "noext is no Python script"),
        ("/dev/null:x", "/dev/null is no Python script"),
        ("job.pyw", "job.pyw is a Python script: name an object in it"),
        ("train.py::", "fastcap: TARGET is 'train.py::': one colon goes before the name"),
        ("train.py::train", "one colon goes before the name, as in script.py:trainer.fit"),
        ("not-a-module:x", "'not-a-module' is no file and no module name"),
        ("no_such_module_at_all:x", "no module named 'no_such_module_at_all'"),
        ("train.pi:step", "'train' is not a package; did you mean the script train.py?"),
        ("json:dmps", "json has no 'dmps': did you mean dumps"),
        ("train.py:tran", "train.py has no 'tran': did you mean train"),
        ("train.py:trainer.fti", "train.py:trainer has no 'fti': did you mean fit?"),
        ("train.py:zzz", "train.py has no 'zzz': it has BIG, Config"),
        ("train.py:made_by_main", 'it is made under `if __name__ == "__main__":`, which does not run here'),
        (
            "train.py:trainer.broken",
            "reading broken of train.py:trainer failed: RuntimeError: property failed (train.py:",
        ),
        (
            "raises.py:x",
            "importing raises.py failed: ZeroDivisionError: division by zero (raises.py:3); --traceback shows",
        ),
        ("syntax.py:x", "importing syntax.py failed: SyntaxError: "),
        ("exits.py:x", "importing exits.py failed: it called sys.exit with 3 (exits.py:2)"),
        ("text.pkl", "text.pkl is not a pickle that can be read: "),
        ("array.npy", "it looks like a numpy .npy file"),
        ("other.json", "other.json is neither a pickle nor a saved report: not a fastcap report"),
        ("broken.json", "broken.json is neither a pickle nor a saved report: "),
        ("deep.json", "deep.json is neither a pickle nor a saved report: "),
    ],
)
def test_bad_targets(folder, capsys, target, message):
    (folder / "checkpoints").mkdir()
    (folder / "checkpoints" / "a.pkl").write_bytes(b"N.")
    (folder / "zero.bin").write_bytes(b"")
    (folder / "raises.py").write_text("def f():\n    import json\n    return 1 / 0\nf()\n")
    (folder / "syntax.py").write_text("x = 1\ndef f(:\n")
    (folder / "exits.py").write_text("import sys\nsys.exit(3)\n")
    (folder / "text.pkl").write_text("hello, this is no pickle\n")
    (folder / "array.npy").write_bytes(b"\x93NUMPY\x01\x00" + bytes(100))
    (folder / "noext").write_bytes(pickle.dumps(PAYLOAD))
    (folder / "job.pyw").write_text("f = 1\n")
    (folder / "other.json").write_text('{"a": 1}')
    (folder / "broken.json").write_text('{"format": 1,')
    (folder / "deep.json").write_text('{"a":' * 100_000)
    assert message in fails(capsys, "analyze", target)


@pytest.mark.parametrize("length", [1, 2, 11, 12, 100, 40_000])
def test_truncated_file(folder, capsys, length):
    whole = (folder / "payload.pkl").read_bytes()
    (folder / "cut.pkl").write_bytes(whole[:length])
    line = fails(capsys, "analyze", "cut.pkl")
    assert re.search(r"cut\.pkl is not a pickle that can be read: .*\(at byte [0-9,]+\)", line)


def test_not_a_pickle_says_at_which_byte(folder, capsys):
    (folder / "bad.pkl").write_bytes(b"\x80\x04]\xff.")
    assert "(at byte 3)" in fails(capsys, "analyze", "bad.pkl")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_no_permission(folder, capsys):
    (folder / "payload.pkl").chmod(0)
    assert fails(capsys, "analyze", "payload.pkl") == "fastcap: cannot read payload.pkl: Permission denied"


def test_no_permission_for_script_and_file(folder, capsys, monkeypatch):
    real = open

    def deny(path, *rest, **options):
        if os.path.basename(str(path)) in ("payload.pkl", "train.py"):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, *rest, **options)

    monkeypatch.setattr("builtins.open", deny)
    assert fails(capsys, "analyze", "payload.pkl") == "fastcap: cannot read payload.pkl: Permission denied"
    assert fails(capsys, "analyze", "train.py:train") == "fastcap: cannot read train.py: Permission denied"


def test_empty_standard_input():
    result = spawn("analyze", "-", input=b"")
    assert result.returncode == 2
    assert result.stderr == b"fastcap: standard input is empty: there is no pickle to analyze\n"


def test_standard_input_from_a_terminal():
    leader, follower = pty.openpty()
    result = subprocess.run(command("analyze", "-"), stdin=follower, capture_output=True, env=environment(), timeout=60)
    os.close(leader)
    os.close(follower)
    assert result.returncode == 2
    assert b"standard input is a terminal" in result.stderr


@pytest.mark.parametrize("option", [["--flavor", "cloudpickle"], ["--protocol", "4"]])
def test_options_for_objects_only(folder, capsys, option):
    assert f"{option[0]} is for objects" in fails(capsys, "analyze", "payload.pkl", *option)


@pytest.mark.parametrize("option", [["--depth", "1"], ["--top", "2"], ["--sort", "self"], ["--min-size", "1k"]])
def test_options_for_pickles_only(folder, capsys, option):
    assert f"{option[0]} needs the pickle" in fails(capsys, "analyze", "saved.json", *option)


def test_hostile_names_are_harmless_in_errors(folder, capsys):
    line = fails(capsys, "analyze", "a\x1b[31m\u202e\nb.pkl")
    assert "\\x1b[31m\\u202e\\nb.pkl" in line


def test_traceback_on_request(folder, capsys):
    Path("raises.py").write_text("x = 1 / 0")
    code, out, err = run(capsys, "analyze", "raises.py:x", "--traceback")
    assert (code, out) == (2, "")
    assert "Traceback" in err
    assert err.splitlines()[-1].startswith("fastcap: importing raises.py failed: ZeroDivisionError")
    assert "--traceback" not in err.splitlines()[-1]


def test_no_traceback_unless_requested(folder, capsys):
    Path("raises.py").write_text("x = 1 / 0")
    assert "Traceback" not in run(capsys, "analyze", "raises.py:x")[2]


# ---- findings


def test_what_cannot_be_pickled_is_reported(folder, capsys):
    code, out, _ = run(capsys, "analyze", "train.py:stubborn")
    assert code == 0
    assert out.splitlines()[1] == "will not pickle, because of one part; the sizes are those without"
    assert re.search(r"error +FC101 +stubborn$", out, re.MULTILINE)
    assert "Stubborn cannot be pickled (ValueError: cannot be pickled second line)" in out


def test_errors_are_not_located_in_the_native_code():
    with pytest.raises(PayloadError) as caught:
        Scanner().write(b"no pickle")
    assert re.search(r"\(.*test_cli\.py:\d+\)$", locate_error(caught.value))


def test_lock_behind_a_closure(folder, capsys):
    (folder / "locked.py").write_text(textwrap.dedent("""
        import threading
        class Holder:
            def __init__(self):
                self.lock = threading.Lock()
        def make():
            c = Holder()
            return lambda: c.lock
        f = make()
    """))
    code, out, err = run(capsys, "analyze", "locked.py:f")
    assert code == 0
    assert out.splitlines()[1].startswith("will not pickle")
    assert re.search(r"error +FC101 +\S+<closure c>\.lock$", out, re.MULTILINE)
    assert "TypeError: cannot pickle '_thread.lock' object" in " ".join(out.split())
    assert ".pyx" not in out + err


@pytest.mark.parametrize("form", ["text", "json"])
def test_no_budget_holds_what_cannot_be_pickled(folder, capsys, form):
    code, out, err = run(capsys, "analyze", "train.py:lock", "--max-size", "1GiB", "--format", form)
    assert code == 1
    assert "_thread.lock" in out
    assert ("no payload, whatever its size" in err) == (form == "json")


@pytest.mark.parametrize(
    ("options", "codes"),
    [
        ([], {"FC101"}),
        (["--select", "FC1"], {"FC101"}),
        (["--select", "fc101,FC3"], {"FC101"}),
        (["--select", "FC2"], set()),
        (["--ignore", "FC101"], set()),
        (["--ignore", "FC2", "--ignore", "FC1"], set()),
    ],
)
def test_findings_are_chosen_by_code(folder, capsys, options, codes):
    out = run(capsys, "analyze", "train.py:lock", "--format", "json", *options)[1]
    assert {row["code"] for row in json.loads(out)["findings"]} == codes


def test_codes_must_exist(folder, capsys):
    assert "no rule 'FC9'" in fails(capsys, "analyze", "train.py:lock", "--select", "FC9")
    assert "no rule 'FC999': did you mean FC" in fails(capsys, "rule", "FC999")


def test_rule_is_explained(capsys):
    code, out, err = run(capsys, "rule", "fc302")
    assert (code, err) == (0, "")
    assert out.startswith("FC302 self captured where an attribute is used (warning)")
    assert "Instead: x = self.x" in out
    listed = run(capsys, "rule")[1].splitlines()
    assert [line.split()[0] for line in listed] == list(RULES)


# ---- the view


def nodes(capsys, *options):
    code, out, _ = run(capsys, "analyze", "payload.pkl", "-f", "json", *options)
    assert code == 0
    data = json.loads(out)
    assert sum(row["self_size"] for row in data["nodes"]) + data["overhead"] == data["payload_size"]
    return data["nodes"]


def test_depth(folder, capsys):
    for depth in (0, 1, 2, 3):
        rows = nodes(capsys, "--min-size", 0, "--depth", depth)
        assert max(row["depth"] for row in rows if row["type"] != "more") == depth


def test_top(folder, capsys):
    rows = nodes(capsys, "--top", 1)
    shown = [row for row in rows if row["depth"] == 1 and row["type"] != "more"]
    assert [row["path"][-11:] for row in shown] == ["['weights']"]
    assert any(row["type"] == "more" and row["depth"] == 1 for row in rows)


def test_min_size(folder, capsys):
    rows = nodes(capsys, "--min-size", "1k")
    assert all(row["retained_size"] >= 1024 for row in rows if row["type"] != "more")


@pytest.mark.parametrize("sort", ["retained", "self", "subtree"])
def test_sort(folder, capsys, sort):
    rows = [row for row in nodes(capsys, "--sort", sort) if row["depth"] == 1 and row["type"] != "more"]
    assert rows == sorted(rows, key=lambda row: -row[f"{sort}_size"])


# ---- formats and output files


def test_folded(folder, capsys):
    code, out, _ = run(capsys, "analyze", "payload.pkl", "-f", "folded")
    assert code == 0
    lines = [re.fullmatch(r"\S.* (\d+)", line) for line in out.splitlines()]
    assert sum(int(line[1]) for line in lines) == (folder / "payload.pkl").stat().st_size


@pytest.mark.parametrize("form", ["text", "json", "folded"])
def test_output_file_is_what_standard_output_gets(folder, capsys, form):
    _, expected, _ = run(capsys, "analyze", "payload.pkl", "-f", form)
    assert run(capsys, "analyze", "payload.pkl", "-f", form, "-o", "out.txt") == (0, "", "")
    assert (folder / "out.txt").read_text() == expected
    assert run(capsys, "analyze", "payload.pkl", "-f", form, "-o", "-") == (0, expected, "")


def test_output_keeps_mode_and_follows_links(folder, capsys):
    (folder / "real.json").write_text("old")
    (folder / "real.json").chmod(0o640)
    (folder / "link.json").symlink_to("real.json")
    assert run(capsys, "analyze", "payload.pkl", "-f", "json", "-o", "link.json")[0] == 0
    assert (folder / "link.json").is_symlink()
    assert stat.S_IMODE((folder / "real.json").stat().st_mode) == 0o640
    assert json.loads((folder / "real.json").read_text())["format"] == 1


def test_new_output_file_obeys_umask(folder, capsys):
    before = os.umask(0o027)
    try:
        assert run(capsys, "analyze", "payload.pkl", "-o", "out.txt")[0] == 0
    finally:
        os.umask(before)
    assert stat.S_IMODE((folder / "out.txt").stat().st_mode) == 0o640


def test_output_to_a_device(folder, capsys):
    assert run(capsys, "analyze", "payload.pkl", "-o", "/dev/null") == (0, "", "")
    assert not stat.S_ISREG(os.stat("/dev/null").st_mode)
    assert "cannot write /dev/full: No space left on device" in fails(
        capsys, "analyze", "payload.pkl", "-o", "/dev/full"
    )


@pytest.mark.parametrize(
    "line",
    [
        "analyze payload.pkl -f folded -o /dev/stdout | cat",
        "analyze payload.pkl -f folded -o /dev/fd/3 3>&1 | cat",
        "analyze payload.pkl -f folded -o /proc/self/fd/1 | cat",
        "analyze payload.pkl -f folded -o /dev/stderr 2>&1 | cat",
        "analyze payload.pkl -f folded -o >(cat >out.txt; echo >done); cat done out.txt",
        "analyze payload.pkl -f folded -o fifo & cat fifo; wait",
        "analyze payload.pkl -f folded -o link | cat",
    ],
)
def test_output_to_what_is_open_already(folder, line):
    (folder / "link").symlink_to("/dev/stdout")
    os.mkfifo(folder / "fifo")
    os.mkfifo(folder / "done")
    result = subprocess.run(
        ["bash", "-c", f"'{sys.executable}' -m fastcap {line}"], capture_output=True, env=environment(), timeout=60
    )
    assert (result.returncode, result.stderr) == (0, b"")
    assert result.stdout.strip() == spawn("analyze", "payload.pkl", "-f", "folded").stdout.strip() != b""


def test_output_to_standard_output_is_appended_where_the_shell_appends(folder):
    (folder / "log").write_text("before\n")
    with open(folder / "log", "ab") as log:
        result = subprocess.run(
            command("analyze", "payload.pkl", "-f", "folded", "-o", "/dev/stdout"), stdout=log, env=environment(),
            timeout=60,
        )  # fmt: skip
    assert result.returncode == 0
    assert (folder / "log").read_bytes() == b"before\n" + spawn("analyze", "payload.pkl", "-f", "folded").stdout


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("analyze payload.pkl >&-", "standard output is closed: name a file with -o"),
        ("analyze payload.pkl -o - >&-", "standard output is closed: name a file with -o"),
        ("analyze train.py:train >&-", "standard output is closed: name a file with -o"),
        ("diff payload.pkl payload.pkl >&-", "standard output is closed: name a file with -o"),
        ("rule >&-", "standard output is closed: name a file with -o"),
        ("rule FC101 >&-", "standard output is closed: name a file with -o"),
        ("analyze - <&-", "standard input is closed: pipe a pickle into it, or name a file"),
        ("analyze payload.pkl -o /dev/fd/9 9>&-", "cannot write /dev/fd/9: Bad file descriptor"),
        ("analyze train.py:train -o /dev/fd/9 9</dev/null", "cannot write /dev/fd/9: it is open for reading only"),
    ],
)
def test_closed_standard_streams(folder, line, message):
    result = subprocess.run(
        ["bash", "-c", f"'{sys.executable}' -m fastcap {line}"], capture_output=True, env=environment(), timeout=60
    )
    assert (result.returncode, result.stdout, result.stderr.decode()) == (2, b"", f"fastcap: {message}\n")


def test_output_file_where_standard_output_is_closed(folder):
    line = f"'{sys.executable}' -m fastcap analyze payload.pkl -f json -o out.json >&- <&-"
    result = subprocess.run(["bash", "-c", line], capture_output=True, env=environment(), timeout=60)
    assert (result.returncode, result.stderr) == (0, b"")
    assert json.loads((folder / "out.json").read_text())["format"] == 1


@pytest.mark.parametrize(
    ("target", "output", "message"),
    [
        ("payload.pkl", "", "-o needs the name of a file"),
        ("train.py:step", "", "-o needs the name of a file"),
        ("payload.pkl", "sub", "-o sub is a directory: name a file in it"),
        ("payload.pkl", "no/where.txt", "there is no directory"),
        ("payload.pkl", "payload.pkl", "-o payload.pkl would overwrite TARGET"),
        ("train.py:step", "train.py", "-o train.py would overwrite TARGET"),
    ],
)
def test_output_refused_before_any_work(folder, capsys, monkeypatch, target, output, message):
    (folder / "sub").mkdir()
    monkeypatch.setattr("fastcap.cli._read_payload", None)
    monkeypatch.setattr("fastcap.cli._analyze_object", None)
    before = {path.name: path.stat().st_size for path in folder.iterdir()}
    assert message in fails(capsys, "analyze", target, "-o", output)
    assert {path.name: path.stat().st_size for path in folder.iterdir()} == before


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_no_partial_output(folder, capsys, monkeypatch, error):
    (folder / "out.txt").write_text("old")

    def refuse(*_):
        raise error

    monkeypatch.setattr("os.replace", refuse)
    code, _, err = run(capsys, "analyze", "payload.pkl", "-o", "out.txt")
    assert (code, err) == (
        (2, "fastcap: cannot write out.txt: No space left on device\n")
        if isinstance(error, OSError)
        else (130, "fastcap: interrupted\n")
    )
    assert (folder / "out.txt").read_text() == "old"
    assert sorted(path.name for path in folder.iterdir()) == ["out.txt", "payload.pkl", "saved.json", "train.py"]


# ---- budgets


def test_within_budget(folder, capsys):
    code, out, err = run(capsys, "analyze", "payload.pkl", "--max-size", "1MiB")
    assert (code, err) == (0, "")
    assert "below every known limit (the first: --max-size, 1.0 MiB)" in out


def test_exactly_the_budget(folder, capsys):
    size = (folder / "payload.pkl").stat().st_size
    assert run(capsys, "analyze", "payload.pkl", "--max-size", size)[0] == 0
    assert run(capsys, "analyze", "payload.pkl", "--max-size", size - 1)[0] == 1


def test_over_budget_still_reports(folder, capsys):
    code, out, err = run(capsys, "analyze", "payload.pkl", "--max-size", "10 kB")
    assert (code, err) == (1, "")
    assert "over --max-size (9.8 KiB) 5.1 times" in out.splitlines()[1]
    assert "['weights']" in out


@pytest.mark.parametrize("options", [["-f", "json"], ["-f", "folded"], ["-o", "out.txt"]])
def test_over_budget_is_said_where_the_report_does_not(folder, capsys, options):
    code, _, err = run(capsys, "analyze", "payload.pkl", "--max-size", "10KiB", *options)
    assert code == 1
    assert re.fullmatch(r"fastcap: payload [\d.]+ KiB is over --max-size 10\.0 KiB\n", err)


def test_json_has_the_budget_among_the_limits(folder, capsys):
    _, out, _ = run(capsys, "analyze", "payload.pkl", "--max-size", "0", "-f", "json")
    first = json.loads(out)["limits"][0]
    assert (first["name"], first["size"], first["exceeded"], first["effect"]) == ("--max-size", 0, True, "error")


# ---- terminals, pipes, signals


def test_plain_when_piped(folder):
    result = spawn("analyze", SAVED)
    assert b"\x1b" not in result.stdout
    assert max(map(len, result.stdout.decode().splitlines())) > 80


def test_color_on_a_terminal_of_its_width(folder):
    text = on_terminal(command("analyze", SAVED), columns=60)
    assert "\x1b[1;31m" in text
    assert all(len(line) <= 60 for line in re.sub(r"\x1b\[[0-9;]*m", "", text).split("\r\n"))


@pytest.mark.parametrize("variables", [{"NO_COLOR": "1"}, {"TERM": "dumb"}, {"NO_COLOR": "1", "FORCE_COLOR": "1"}])
def test_no_color(variables):
    assert "\x1b" not in on_terminal(command("analyze", SAVED), **variables)


@pytest.mark.parametrize(("value", "colored"), [("1", True), ("3", True), ("0", False), ("", False)])
def test_force_color(value, colored):
    assert (b"\x1b[" in spawn("analyze", SAVED, FORCE_COLOR=value).stdout) == colored


def test_columns_variable():
    lines = spawn("analyze", SAVED, COLUMNS="50").stdout.decode().splitlines()
    assert 40 < max(map(len, lines)) <= 50


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252"])
def test_encodings_without_boxes(encoding, tmp_path):
    saved = json.loads(SAVED.read_text())
    saved["target"] = "f\xe4n\u65e5\ud800"
    path = tmp_path / "saved.json"
    path.write_text(json.dumps(saved))
    result = spawn("analyze", path, PYTHONIOENCODING=encoding)
    assert (result.returncode, result.stderr) == (0, b"")
    assert result.stdout.isascii()
    assert b"f\\xe4n\\u65e5\\ud800" in result.stdout


def test_json_is_ascii_whatever_the_names(tmp_path):
    saved = json.loads(SAVED.read_text())
    saved["target"] = "\u65e5\ud800\x1b"
    path = tmp_path / "saved.json"
    path.write_text(json.dumps(saved))
    result = spawn("analyze", path, "-f", "json", PYTHONIOENCODING="ascii")
    assert result.stdout.isascii()
    assert json.loads(result.stdout) == saved


def test_closed_pipe_is_silent(tmp_path):
    saved = json.loads(SAVED.read_text())
    saved["findings"] *= 5000  # more than a pipe holds
    path = tmp_path / "saved.json"
    path.write_text(json.dumps(saved))
    process = subprocess.Popen(
        command("analyze", path), stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment()
    )
    process.stdout.read(10)
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait(60) == 0


def test_full_disk_on_standard_output():
    with open("/dev/full", "wb") as full:
        result = subprocess.run(
            command("analyze", SAVED), stdout=full, stderr=subprocess.PIPE, env=environment(), timeout=60
        )
    assert result.returncode == 2
    assert result.stderr == b"fastcap: cannot write the report to standard output: No space left on device\n"


def test_interrupt(tmp_path):
    script = tmp_path / "slow.py"
    script.write_text("import time\nprint('started', flush=True)\ntime.sleep(60)\nx = 1\n")
    process = subprocess.Popen(
        command("analyze", f"{script}:x"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment()
    )
    while b"started" not in process.stderr.readline():
        pass
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (130, b"", b"fastcap: interrupted\n")


def test_interrupt_while_starting(tmp_path):
    """Ctrl-C may come while the command line itself is being imported."""
    (tmp_path / "click.py").write_text("import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(60)\n")
    variables = environment()
    variables["PYTHONPATH"] = f"{tmp_path}{os.pathsep}{variables['PYTHONPATH']}"
    result = subprocess.run(command("--version"), capture_output=True, env=variables, timeout=60)
    assert (result.returncode, result.stdout, result.stderr) == (130, b"", b"fastcap: interrupted\n")


def test_installed_command_imports_nothing_before_it_can_be_interrupted():
    scripts = (ROOT / "pyproject.toml").read_text().partition("scripts]")[2]
    module, name = re.search(r'^fastcap = "(.+):(.+)"$', scripts, re.MULTILINE).groups()
    code = f"import sys, {module}; {module}.{name}; print([*{{'click', 'numpy', 'fastcap.cli'}} & {{*sys.modules}}])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, env=environment(), timeout=60)
    assert (result.stdout, result.stderr) == (b"[]\n", b"")


# Analyses a file whose scan reports progress twice, with the delay of the progress bar set to argv[2] seconds.
SLOW_SCAN = textwrap.dedent("""
    import sys, time
    import fastcap.analysis, fastcap.cli
    fastcap.cli._PROGRESS_DELAY = float(sys.argv[2])
    real = fastcap.analysis.scan
    def scan(source, *, progress=None, **options):
        if progress is not None:
            for done in (100, 500):
                time.sleep(0.05)
                progress(done, 1000)
        return real(source, **options)
    fastcap.analysis.scan = scan
    sys.exit(fastcap.cli.main(["analyze", sys.argv[1], "-f", "folded", *sys.argv[3:]]))
""")


@pytest.mark.parametrize(
    ("arguments", "shown"), [(["0.01"], True), (["1000"], False), (["0.01", "--no-progress"], False)]
)
def test_progress_bar(folder, arguments, shown):
    text = on_terminal([sys.executable, "-c", SLOW_SCAN, "payload.pkl", *arguments])
    assert ("━" in text) == shown


def test_no_progress_bar_without_a_terminal(folder):
    result = subprocess.run(
        [sys.executable, "-c", SLOW_SCAN, "payload.pkl", "0.01"], capture_output=True, env=environment(), timeout=60
    )
    assert (result.returncode, result.stderr) == (0, b"")


# ---- the example


def test_example_names_its_culprit(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("DATA_MIB", "8")
    code, out, _ = run(capsys, "analyze", "examples/oversized_tune.py:train_func", "-f", "json", "--max-size", "1MiB")
    assert code == 1
    data = json.loads(out)
    first = data["captures"][0]
    assert first["path"] == "train_func<closure self>.data"
    assert first["retained_size"] >= 8 * 2**20
    assert (first["how"], first["name"], first["captured_type"]) == ("closure", "self", "Trainer")
    assert first["file"].endswith("examples/oversized_tune.py")
    line = Path(ROOT, "examples/oversized_tune.py").read_text().splitlines()[first["line"] - 1]
    assert "def train_func" in line


def test_example_runs_without_ray(monkeypatch):
    monkeypatch.chdir(ROOT)
    result = subprocess.run(
        [sys.executable, "examples/oversized_tune.py"], capture_output=True, text=True, env=environment(), timeout=60
    )
    assert result.returncode == 0
    assert "fastcap analyze examples/oversized_tune.py:train_func" in result.stdout
    code = (
        "import runpy, sys; sys.modules['ray'] = None; sys.argv[1:] = ['--run']; "
        "runpy.run_path(%r, run_name='__main__')"
    )
    result = subprocess.run(
        [sys.executable, "-c", code % "examples/oversized_tune.py"], capture_output=True, text=True, env=environment()
    )
    assert result.returncode == 1
    assert result.stderr.strip() == "This part needs Ray: pip install 'ray[tune]'"
