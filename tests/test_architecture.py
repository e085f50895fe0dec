"""Which module may import which: the layout of the package, kept by reading its imports."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import fastcap

PACKAGE = Path(fastcap.__file__).parent

# Every module stands on a floor and imports only from floors below. Modules of one floor do not know each other.
FLOORS = [
    {"errors"},
    {"_native", "report", "paths", "placeholders", "rules", "writing"},
    {"render", "comparison", "pickling", "stores", "inert", "limits", "folders"},
    {"explain", "config", "external", "render.layout"},
    {"scene", "opening", "handles", "render.text", "render.diff", "render.folded", "render.html"},
    {"portability", "fidelity", "waste"},
    {"findings"},
    {"slimming"},
    {"analysis"},
    {"checking", "editing"},
    {"targets", "record", "substitution"},
    {"loading"},
    {"saving"},
    {"ray"},
    {"cli", "pytest_plugin"},
    {"__main__"},
]
FLOOR = {name: number for number, names in enumerate(FLOORS) for name in names}

# What only some modules may import, because it is slow to load, optional, or no business of the others.
RESERVED = {
    "ray": {"ray"},
    "click": {"cli"},
    "rich": {"cli", "render.layout"},
    "pytest": {"pytest_plugin"},
    "fsspec": {"folders"},
    "pickle": {"pickling", "editing", "analysis", "slimming", "loading", "placeholders", "ray"},
}

# Who may use the native core; what only shows reports must work without it.
NATIVE_USERS = {
    "pickling", "analysis", "explain", "inert", "external", "opening", "editing", "record", "saving", "slimming",
    "substitution", "ray.parts",
}


def module_name(path):
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


def floor_name(module):
    """The name in FLOORS that covers a module: its own, or that of the closest package above it."""
    while module and module not in FLOOR:
        module = module.rpartition(".")[0]
    return module


def imports(path):
    """Dotted names that a file imports, anywhere in it, except under `if TYPE_CHECKING`."""
    tree = ast.parse(path.read_text())
    skipped = {
        id(node)
        for branch in ast.walk(tree)
        if isinstance(branch, ast.If) and "TYPE_CHECKING" in ast.dump(branch.test)
        for node in ast.walk(branch)
    }
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


SOURCES = sorted(path for path in PACKAGE.rglob("*.py"))
IDS = [module_name(path) or "__init__" for path in SOURCES]


@pytest.mark.parametrize("path", SOURCES, ids=IDS)
def test_imports_point_down(path):
    module = module_name(path)
    if not module:
        return  # the package itself: see test_public_package_imports_little
    own = floor_name(module)
    assert own, f"fastcap.{module} has no place in FLOORS"
    for name in imports(path):
        if not name.startswith("fastcap."):
            continue
        other = floor_name(name.removeprefix("fastcap."))
        if name == "fastcap.__version__" or other == own in ("_native", "ray"):
            continue
        assert other, f"fastcap.{module} imports {name}, which has no place in FLOORS"
        assert FLOOR[other] < FLOOR[own], f"fastcap.{module} imports {name}, which does not stand below it"


@pytest.mark.parametrize("path", SOURCES, ids=IDS)
def test_reserved_imports(path):
    module = module_name(path)
    for name in imports(path):
        users = RESERVED.get(name.partition(".")[0])
        assert users is None or floor_name(module) in users, f"fastcap.{module} imports {name}, which is for {users}"


@pytest.mark.parametrize("path", SOURCES, ids=IDS)
def test_few_touch_the_native_core(path):
    module = module_name(path)
    native = [name for name in imports(path) if name.startswith("fastcap._native")]
    assert not native or module in NATIVE_USERS or floor_name(module) == "_native"


def test_stubs_and_modules_belong_together():
    stubs = {path.stem for path in (PACKAGE / "_native").glob("*.pyi")}
    built = {path.name.partition(".")[0] for path in (PACKAGE / "_native").glob("*.so")}
    assert stubs == built


def loaded_by(statement):
    """Modules that a statement loads in a fresh interpreter beyond what cloudpickle and numpy have loaded already."""
    code = (
        "import sys, cloudpickle, numpy; before = set(sys.modules)\n"
        f"{statement}\nprint(*sorted(set(sys.modules) - before), sep='\\n')"
    )
    run = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    return set(run.stdout.split())


def test_import_loads_no_library():
    """`import fastcap` costs its own modules and a few light ones of the standard library."""
    loaded = loaded_by("import fastcap")
    assert "fastcap" in loaded
    others = {name.partition(".")[0] for name in loaded if "cython_" not in name} - {"fastcap"}
    assert others <= set(sys.stdlib_module_names), others - set(sys.stdlib_module_names)
    slow = {
        "asyncio",
        "decimal",
        "email",
        "hashlib",
        "http",
        "multiprocessing",
        "pickletools",
        "ssl",
        "urllib",
        "zipfile",
    }
    assert not others & slow
    own = {floor_name(name.removeprefix("fastcap.")) for name in loaded if name.startswith("fastcap.")}
    assert own <= {"errors", "_native", "pickling"}  # reports, which take longest to load, come at their first use


def test_lazy_names_are_there():
    assert set(fastcap.__all__) <= set(dir(fastcap))
    for name in fastcap.__all__:
        assert getattr(fastcap, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'analyse'"):
        fastcap.analyse  # noqa: B018


def test_command_line_loads_rich_only_when_it_draws():
    assert not any(name.partition(".")[0] in ("rich", "ray") for name in loaded_by("import fastcap.cli"))
