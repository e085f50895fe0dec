"""Where fastcap.ray stands in for Ray's functions: the shapes it checks, and that all of it can be undone."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import fastcap
from fastcap.errors import UnknownRay

ray = pytest.importorskip("ray", reason="Ray is not installed")
pytest.importorskip("ray.tune", reason="Ray Tune is not installed")

import fastcap.ray  # noqa: E402
from fastcap.ray import hooks  # noqa: E402

HOOKS = {hook.key + (f" ({len(hook.used_by)})" if not hook.parameters else ""): hook for hook in hooks.HOOKS}


@pytest.fixture(autouse=True)
def nothing_stays():
    yield
    fastcap.ray.uninstall()


def attributes():
    """What is at each place whose module is loaded."""
    found = {}
    for hook in hooks.HOOKS:
        owner = sys.modules.get(hook.module)
        for name in hook.name.split(".")[:-1]:
            owner = owner and getattr(owner, name)
        if owner is not None:
            found[hook.key] = vars(owner)[hook.name.rpartition(".")[2]]
    return found


def test_the_installed_ray_is_known():
    hooks.check_hooks()


def changed(source, hook, change):
    """The source of a module of Ray after a change of what the hook looks at."""
    tree = ast.parse(source)
    change(tree, hook)
    return ast.unparse(tree).encode()


def rename_parameter(tree, hook):
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name == hook.name.rpartition(".")[2]:
            node.args.args[len(hook.parameters) - 1].arg += "_new"


def rename_function(tree, hook):
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name == hook.name.rpartition(".")[2]:
            node.name += "_new"


def stop_importing(tree, hook):
    tree.body = [
        node
        for node in tree.body
        if not (
            isinstance(node, (ast.Import, ast.ImportFrom))
            and hook.name in [alias.asname or alias.name for alias in node.names]
        )
    ]


def use_something_else(tree, hook):
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id == hook.name:
            node.id = "something_else"


def mention_something_else(tree, hook):
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id == hook.mentions[-1]:
            node.id = "something_else"
        if isinstance(node, ast.Attribute) and node.attr == hook.mentions[-1]:
            node.attr = "something_else"


CHANGES = [
    (key, change)
    for key, hook in HOOKS.items()
    for change, applies in [
        (rename_parameter, hook.parameters),
        (rename_function, hook.parameters),
        (stop_importing, hook.defined_in or not hook.parameters),
        (use_something_else, hook.used_by),
        (mention_something_else, hook.mentions),
    ]
    if applies
]


@pytest.mark.parametrize(("key", "change"), CHANGES, ids=lambda value: getattr(value, "__name__", value))
def test_another_shape_is_refused(key, change, monkeypatch):
    hook = HOOKS[key]
    where = hook.defined_in if change in (rename_parameter, rename_function) and hook.defined_in else hook.module
    own_source = hooks.source_of

    def source_of(module):
        source = own_source(module)
        return changed(source, hook, change) if module == where else source

    monkeypatch.setattr(hooks, "source_of", source_of)
    with pytest.raises(UnknownRay) as caught:
        hooks.check_hooks([hook])
    assert ray.__version__ in str(caught.value)
    assert hook.key in str(caught.value)


def test_a_module_that_is_gone_is_refused(monkeypatch):
    monkeypatch.setattr(hooks, "source_of", lambda module: Path("/nonexistent/ray.py").read_bytes())
    before = attributes()
    with pytest.raises(UnknownRay, match=f"Ray {ray.__version__} .* cannot be read"):
        fastcap.ray.install()
    assert attributes() == before
    assert fastcap.ray._current is None


def test_everything_is_put_back():
    import ray.air.execution._internal.actor_manager
    import ray.tune.impl.tuner_internal

    before, finders, waiting = attributes(), list(sys.meta_path), list(ray._private.worker._post_init_hooks)
    own_dumps = ray.cloudpickle.dumps
    fastcap.ray.install()
    changed = {key for key, value in attributes().items() if value is not before[key]}
    assert changed == set(before)
    assert ray.cloudpickle.dumps is not own_dumps
    fastcap.ray.install("2 MiB", native=False)  # other settings, the same places
    assert {key for key, value in attributes().items() if value is not before[key]} == set(before)
    assert ray.cloudpickle.dumps is own_dumps
    fastcap.ray.uninstall()
    assert attributes() == before
    assert sys.meta_path == finders
    assert ray._private.worker._post_init_hooks == waiting
    fastcap.ray.uninstall()  # once is enough


def test_settings_choose_what_is_exchanged():
    before = attributes()

    def exchanged():
        return {key for key, value in attributes().items() if value is not before[key]}

    fastcap.ray.install(slim=False)
    explaining = exchanged()
    fastcap.ray.install(explain=False)
    slimming = exchanged()
    both = {"ray.tune.registry:_Registry.register"}
    assert explaining & slimming == both
    assert explaining | slimming == set(before)
    fastcap.ray.install(slim=False, explain=False)
    assert exchanged() == set()


def test_installed_returns_to_what_was_before():
    with fastcap.ray.installed("4 MiB"):
        with fastcap.ray.installed(native=False):
            assert fastcap.ray._current.settings.native is False
        assert fastcap.ray._current.settings.min_size == 4 << 20
    assert fastcap.ray._current is None


@pytest.mark.parametrize("size", ["many", -1, None, 1.5])
def test_sizes_that_are_none(size):
    with pytest.raises((TypeError, ValueError)):
        fastcap.ray.install(size)
    assert fastcap.ray._current is None
    with pytest.raises((TypeError, ValueError)):
        fastcap.ray.worker_process_setup_hook(size)


def test_unknown_settings():
    with pytest.raises(TypeError):
        fastcap.ray.worker_process_setup_hook(minimal_size=3)


def test_modules_that_are_imported_later():
    """Installing imports neither Tune nor Serve, and exchanges what is in them when they come."""
    code = (
        "import sys, ray, fastcap.ray\n"
        "from fastcap.ray import hooks\n"
        "fastcap.ray.install()\n"
        "late = {hook.module for hook in hooks.HOOKS} - set(sys.modules)\n"
        "assert {'ray.tune.registry', 'ray.serve._private.config', 'ray.util.client.common'} <= late, late\n"
        "assert not any(name.startswith(('ray.tune', 'ray.serve', 'ray.data')) for name in sys.modules)\n"
        "import ray.tune.registry as registry, ray.tune.impl.tuner_internal as internal\n"
        "assert registry.pickle is not ray.cloudpickle and registry.pickle.loads is ray.cloudpickle.loads\n"
        "assert registry.__loader__ is registry.__spec__.loader\n"
        "assert type(registry.__loader__).__module__ != hooks.__name__\n"
        "fastcap.ray.uninstall()\n"
        "assert registry.pickle is ray.cloudpickle and internal.pickle is ray.cloudpickle\n"
        "try: import ray.util.client.common as client\n"
        "except ImportError: sys.exit()  # it needs more than Ray\n"
        "assert client.check_oversized_function is ray._private.utils.check_oversized_function\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_importing_starts_no_ray():
    code = "import fastcap.ray, ray; fastcap.ray.install(); assert not ray.is_initialized(); fastcap.ray.uninstall()"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_small_things_are_pickled_as_ever():
    own = ray.remote_function.pickle_dumps

    def small(x):
        return x + 1

    before = own(small, "")
    fastcap.ray.install()
    assert ray.remote_function.pickle_dumps is not own
    assert ray.remote_function.pickle_dumps(small, "") == before
