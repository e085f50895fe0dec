"""Where `fastcap.ray` stands in for functions of Ray: the places, what they must look like, and the exchange.

A place is looked at in Ray's source files, which imports nothing: a change in any of them is noticed before anything is
exchanged, also in the parts of Ray that a program never loads. Those are exchanged when they are imported.
"""

from __future__ import annotations

import ast
import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Final

import ray

from fastcap.errors import UnknownRay
from fastcap.pickling import Patch


@dataclass(frozen=True, slots=True)
class Hook:
    """An attribute of a module or class of Ray, and what Ray 2.50 to 2.60 have there."""

    module: str
    name: str  # dotted, seen from the module
    parameters: tuple[str, ...] = ()  # what the parameters of the function begin with
    defined_in: str = ""  # module of the function, if `module` only imports it
    used_by: tuple[str, ...] = ()  # functions of `module` that look the name up; "a|b": one of them
    mentions: tuple[str, ...] = ()  # names and attributes in the function, or in those of `used_by` if it has no body

    @property
    def key(self) -> str:
        """``module:name``."""
        return f"{self.module}:{self.name}"


def _pickle_dumps(module: str, *used_by: str) -> Hook:
    return Hook(module, "pickle_dumps", ("obj", "error_msg"), "ray._common.serialization", used_by)


def _check_size(module: str, *used_by: str) -> Hook:
    parameters = ("pickled", "name", "obj_type", "worker")
    return Hook(module, "check_oversized_function", parameters, "ray._private.utils", used_by)


def _inspect(module: str, *used_by: str) -> Hook:
    parameters = ("base_obj", "name", "depth", "print_file")
    return Hook(module, "inspect_serializability", parameters, "ray.util.check_serialize", used_by)


_EXPORTS_HOOK = "build_setup_hook_export_entry|FunctionActorManager.export_setup_func"

HOOKS: Final = (
    # Remote functions, actor classes, the hook that new workers run.
    _pickle_dumps("ray.remote_function", "RemoteFunction._remote"),
    _pickle_dumps("ray._private.function_manager", "FunctionActorManager.export_actor_class", _EXPORTS_HOOK),
    Hook(
        "ray._private.function_manager", "FunctionActorManager.export", ("self", "remote_function"),
        mentions=("_pickled_function", "_function", "make_function_table_key", "internal_kv_exists"),
    ),
    Hook(
        "ray.actor", "ActorClass._remote", ("self", "args", "kwargs"),
        mentions=("__ray_metadata__", "last_export_cluster_and_job", "export_actor_class", "lifetime"),
    ),
    Hook("ray.remote_function", "RemoteFunction.__getstate__", ("self",)),
    # Tune, and Train v1 on top of it.
    Hook("ray.tune.registry", "pickle", used_by=("_Registry.register",), mentions=("dumps_debug",)),
    Hook(
        "ray.tune.registry", "_Registry.register", ("self", "category", "key", "value"),
        mentions=("_to_flush", "_internal_kv_initialized", "flush_values"),
    ),
    Hook(
        "ray.tune.impl.tuner_internal", "pickle", used_by=("TunerInternal._validate_trainable",),
        mentions=("dumps", "inspect_serializability"),
    ),
    Hook("ray.tune.impl.tuner_internal", "TunerInternal._validate_trainable", ("self", "trainable")),
    # Serve.
    _pickle_dumps("ray.serve._private.config", "ReplicaConfig.create"),
    # What Ray says about sizes, and about what it cannot pickle.
    _check_size(
        "ray._private.function_manager", "FunctionActorManager.export", "FunctionActorManager.export_actor_class"
    ),
    _check_size("ray.util.client.common", "ClientRemoteFunc._ensure_ref", "ClientActorClass._ensure_ref"),
    Hook(
        "ray._private.utils", "push_error_to_driver", ("worker", "error_type", "message", "job_id"),
        used_by=("check_oversized_function",),
    ),
    Hook(
        "ray.air.execution._internal.actor_manager", "RayActorManager.schedule_actor_task",
        ("self", "tracked_actor", "method_name"),
    ),
    _inspect("ray._common.serialization", "pickle_dumps"),
    _inspect("ray.util"),
    _inspect("ray.tune.impl.tuner_internal", "TunerInternal._validate_trainable"),
)  # fmt: skip


# ---- looking -----------------------------------------------------------------------------------------------------


def check_hooks(hooks: Sequence[Hook] = HOOKS) -> None:
    """Raise `fastcap.errors.UnknownRay` for the first place that is not what it was."""
    trees: dict[str, ast.Module] = {}

    def tree_of(module: str) -> ast.Module:
        if module not in trees:
            trees[module] = ast.parse(source_of(module))
        return trees[module]

    for hook in hooks:
        try:
            wrong = _difference(hook, tree_of)
        except (OSError, SyntaxError, ValueError) as error:
            wrong = f"its source cannot be read: {error}"
        if wrong:
            raise UnknownRay(
                f"Ray {ray.__version__} is built otherwise than fastcap.ray expects at {hook.key}: {wrong}. "
                "fastcap has changed nothing in Ray. It was written for Ray 2.50 to 2.60; "
                "fastcap.analyze and `fastcap analyze` work with any Ray"
            )


def source_of(module: str) -> bytes:
    """The source of a module of Ray, which is not imported for it."""
    base = os.path.join(os.path.dirname(os.path.abspath(ray.__file__)), *module.split(".")[1:])
    path = base + ".py" if os.path.isfile(base + ".py") else os.path.join(base, "__init__.py")
    with open(path, "rb") as file:
        return file.read()


def _difference(hook: Hook, tree_of: Callable[[str], ast.Module]) -> str:
    """What is different at a place, empty if nothing is."""
    tree = tree_of(hook.module)
    bodies: list[ast.AST] = []
    if hook.parameters:
        function = _find(tree_of(hook.defined_in or hook.module), hook.name)
        if function is None:
            return f"there is no function {hook.name} in {hook.defined_in or hook.module}"
        found = tuple(argument.arg for argument in (*function.args.posonlyargs, *function.args.args))
        if found[: len(hook.parameters)] != hook.parameters:
            return f"it takes ({', '.join(found)}) instead of ({', '.join(hook.parameters)}, ...)"
        bodies.append(function)
    if (hook.defined_in or not hook.parameters) and hook.name not in _imported_names(tree):
        return f"the module does not import {hook.name}"
    for choice in hook.used_by:
        users = [user for user in (_find(tree, name) for name in choice.split("|")) if user is not None]
        if not any(hook.name in _names(user) for user in users):
            return f"{choice.replace('|', ' or ')} does not use {hook.name}"
        if not hook.parameters:
            bodies.extend(users)
    for name in hook.mentions:
        if not any(name in _names(body) for body in bodies):
            return f"it does not use {name}"
    return ""


def _find(tree: ast.Module, name: str) -> ast.FunctionDef | None:
    """The function or method with a dotted name."""
    body: Sequence[ast.stmt] = tree.body
    *classes, last = name.split(".")
    for wanted in classes:
        body = next((part.body for part in body if isinstance(part, ast.ClassDef) and part.name == wanted), ())
    return next((part for part in body if isinstance(part, ast.FunctionDef) and part.name == last), None)


def _names(tree: ast.AST) -> set[str]:
    """The names and attributes in a function."""
    found = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    return found | {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}


def _imported_names(tree: ast.Module) -> set[str]:
    return {
        alias.asname or alias.name
        for statement in tree.body
        if isinstance(statement, (ast.Import, ast.ImportFrom))
        for alias in statement.names
    }


# ---- exchanging --------------------------------------------------------------------------------------------------


class Exchange:
    """Attributes of Ray that are exchanged until `undo`, those of modules that come later when they come."""

    def __init__(self, makers: Mapping[str, Callable[[Any], Any]]) -> None:
        """``makers`` has, by `Hook.key`, what makes the new attribute from the old one."""
        self.hooks = [hook for hook in HOOKS if hook.key in makers]
        self.makers = makers
        self.patches: list[Patch] = []
        self.waiter = _Waiter(self.apply)
        sys.meta_path.insert(0, self.waiter)
        for name in {hook.module for hook in self.hooks}:
            module = sys.modules.get(name)
            if isinstance(module, ModuleType):
                self.apply(module)
            else:
                self.waiter.names.add(name)

    def apply(self, module: ModuleType) -> None:
        """Exchange the attributes of a module."""
        for hook in self.hooks:
            if hook.module == module.__name__:
                owner: Any = module
                *outer, name = hook.name.split(".")
                for part in outer:
                    owner = getattr(owner, part)
                self.patches.append(Patch(owner, name, self.makers[hook.key](vars(owner)[name])))

    def undo(self) -> None:
        """Put the old attributes back, except where someone else has exchanged them in the meantime."""
        if self.waiter in sys.meta_path:
            sys.meta_path.remove(self.waiter)
        self.waiter.names.clear()
        for patch in reversed(self.patches):
            patch.undo()
        self.patches.clear()


class _Waiter(importlib.abc.MetaPathFinder):
    """Calls back when one of some modules has been imported."""

    def __init__(self, callback: Callable[[ModuleType], None]) -> None:
        self.callback = callback
        self.names: set[str] = set()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in self.names:
            return None
        for spec in self.specs(fullname, path, target):
            if spec is not None and spec.loader is not None:
                spec.loader = _Loader(spec.loader, self)
                return spec
        return None

    def specs(self, *arguments: Any) -> Iterator[importlib.machinery.ModuleSpec | None]:
        for finder in list(sys.meta_path):
            if finder is not self:
                yield finder.find_spec(*arguments)


class _Loader(importlib.abc.Loader):
    """The loader of a module that is waited for; it gives way to the module's own."""

    def __init__(self, own: Any, waiter: _Waiter) -> None:
        self.own = own
        self.waiter = waiter

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        found: ModuleType | None = self.own.create_module(spec)
        return found

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self.own
        if module.__spec__ is not None:
            module.__spec__.loader = self.own
        self.own.exec_module(module)
        if module.__name__ in self.waiter.names:
            self.waiter.names.discard(module.__name__)
            self.waiter.callback(module)
