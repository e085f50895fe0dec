"""FC210 to FC213: what pickles, and loads as something else than it was, or not at all for how classes are rebuilt.

cloudpickle makes a class that goes by value in two steps: an empty class of the same name, bases and metaclass, then
its attributes. What a class statement says beyond that is lost. All of this holds for cloudpickle 3.0 to 3.1.
"""

from __future__ import annotations

import abc
import ast
import dis
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from types import (
    CellType,
    CodeType,
    FunctionType,
    GetSetDescriptorType,
    MemberDescriptorType,
    MethodDescriptorType,
    WrapperDescriptorType,
)
from typing import Any, Final

from fastcap.explain import Call, short_name
from fastcap.inert import CALLS, At
from fastcap.report import Finding
from fastcap.rules import NOTE
from fastcap.scene import Scene, ancestors, is_a, is_plain_tensor, names_of, namespace


def check_classes(scene: Scene) -> Iterator[Finding]:
    """FC210: classes that cannot be built again."""
    for index in scene.calls(("cloudpickle:_make_skeleton_class", "cloudpickle:_make_skeleton_enum").__contains__):
        if scene.has_enough("FC210"):
            return
        obj = scene.object(index)
        reason = _of_class(obj) if is_a(obj, type) else _of_class_in_stream(scene, index)
        if reason is not None:
            why, instead = reason
            name = scene.x.subject(index).name or "the class"
            message = f"class {name} goes by value and cannot be built again: {why}"
            yield scene.finding("FC210", index, message, instead.replace("{}", name), size=0)


_IN_MODULE: Final = "move {} to a module that workers have: it goes by name then"


def _of_class(cls: type) -> tuple[str, str] | None:
    """Why loading a live class raises, and what to write instead."""
    meta: type = type(cls)
    for name, given in (("__prepare__", 3), ("__new__", 4), ("__init__", 4)):
        missing = _required(_found(ancestors(meta), name), given)
        if missing:
            return _keyword_reason(f"{names_of(meta)[1]}.{name}", missing)
    if _found(ancestors(meta), "__new__") in _PASS_ON:  # another one may give the hook something of its own
        hook = _found(ancestors(cls)[1:], "__init_subclass__")
        missing = _required(hook, 1)
        if missing:
            owner = next(base for base in ancestors(cls)[1:] if "__init_subclass__" in namespace(base))
            return _keyword_reason(f"{names_of(owner)[1]}.__init_subclass__", missing)
    own = namespace(cls)
    slots = own.get("__slots__", ())
    private = next((each for each in _strings(slots) if _is_private(each)), None)
    if private is not None:
        return _slot_reason(names_of(cls)[1], private)
    native = next(_native_attributes(cls), None)
    if native is not None:
        return (
            f"its attribute {native} is not Python's, and an empty class lacks it "
            f"(AttributeError: type object {names_of(cls)[1]!r} has no attribute {native!r})",
            "give {} a name under which its module has it, or make it where it is used",
        )
    names, members = own.get("_member_names_"), own.get("_member_map_")
    if type(names) is list and type(members) is dict and members and not names:
        return _FLAG_REASON
    return None


def _native_attributes(cls: type) -> Iterator[str]:
    """Attributes of a class that go as ``getattr(cls, name)``: those of a type in C, and slots that nobody lists."""
    own = namespace(cls)
    slots = {"__dict__", "__weakref__", *_strings(own.get("__slots__", ()))}
    for name, value in own.items():
        if type(value) not in _DESCRIPTORS or value.__objclass__ is not cls or type(name) is not str:
            continue  # those of another class are found there: append = list.append
        if name not in slots and not any(name in namespace(base) for base in ancestors(cls)[1:]):
            yield name


_DESCRIPTORS: Final = frozenset(
    {MemberDescriptorType, GetSetDescriptorType, MethodDescriptorType, WrapperDescriptorType}
)
_PASS_ON: Final = (type.__new__, abc.ABCMeta.__new__)

_FLAG_REASON: Final = (
    "none of its members is a single bit, and those that are not are left out "
    "(TypeError: the flag has no members, from Python 3.11 on)",
    "give {} a member for each bit: A = 1, B = 2",
)


def _keyword_reason(function: str, missing: str) -> tuple[str, str]:
    return (
        f"{function} needs `{missing}`, which only the class statement gives "
        f"(TypeError: missing 1 required argument: '{missing}')",
        f"a default for `{missing}` in {function}, such as {missing}=None, or move {{}} to a module that workers have",
    )


def _slot_reason(name: str, slot: str) -> tuple[str, str]:
    mangled = f"_{name.lstrip('_')}{slot}"
    return (
        f"its slot {slot} is known as {mangled} (AttributeError: type object {name!r} has no attribute {mangled!r})",
        f"in {{}}: a slot with one underscore, {slot[1:]}",
    )


def _found(bases: Iterable[type], name: str) -> Any:
    """What a class's namespace or those of its bases hold under a name; nothing is called or bound."""
    for base in bases:
        found = namespace(base).get(name)
        if found is not None:
            return found.__func__ if type(found) in (classmethod, staticmethod) else found
    return None


def _required(function: Any, given: int) -> str | None:
    """The first parameter of a Python function that must be given beyond so many by position."""
    if not is_a(function, FunctionType):
        return None
    code = function.__code__
    return _first_required(
        code.co_argcount, code.co_kwonlyargcount, code.co_varnames, given, len(function.__defaults__ or ()),
        set(function.__kwdefaults__ or ()),
    )  # fmt: skip


def _first_required(
    arguments: int, keywords: int, names: tuple[Any, ...], given: int, defaults: int, keyword_defaults: set[str]
) -> str | None:
    if given < arguments - defaults:
        wanted = names[given : given + 1]
    else:
        keyword_names = names[arguments : arguments + keywords]
        wanted = tuple(name for name in keyword_names if name not in keyword_defaults)
    return str(wanted[0]) if wanted and isinstance(wanted[0], str) else None


def _strings(value: Any) -> tuple[str, ...]:
    if type(value) is str:
        return (value,)
    return tuple(each for each in value if type(each) is str) if type(value) in (tuple, list, dict) else ()


def _is_private(name: str) -> bool:
    """Whether a name in a class is mangled."""
    return name.startswith("__") and not name.endswith("__")


def _of_class_in_stream(scene: Scene, index: int) -> tuple[str, str] | None:
    """The same of a class in a file, as far as the stream says it."""
    call = Call(scene.x, index)
    reader = scene.x.reader
    name = scene.x.subject(index).name or ""
    if len(call.args) == 7:  # an enum: bases, name, qualname, members, …
        members = call.argument(3)
        empty = isinstance(members, At) and reader.view(reader.resolve(members.index)).arg == 0
        called = scene.x.call_name(At(index))
        return _FLAG_REASON if empty and called in scene.callables.values() else None
    slots = call.setter_attributes.get("__slots__")
    shown = reader.value(slots) if slots is not None else ()
    private = next((each for each in _strings(shown) if _is_private(each)), None)
    if private is not None:
        return _slot_reason(name, private)
    if scene.x.call_name(call.argument(0)) != "builtins.type":
        return None
    bases = call.argument(2)
    for base in reader.sequence(bases.index, 8) if isinstance(bases, At) else ():
        if not scene.x.is_by_value(base):
            return None  # it may have a hook of its own, which nobody can see from here
        made = Call(scene.x, reader.resolve(base.index))
        hook = made.setter_attributes.get("__init_subclass__")
        if hook is None:
            continue
        missing = _required_in_stream(scene, hook)
        return _keyword_reason(f"{scene.x.subject(made.index).name}.__init_subclass__", missing) if missing else None
    return None


def _required_in_stream(scene: Scene, hook: Any) -> str | None:
    """The first parameter beyond the class that a class method in the stream needs."""
    reader = scene.x.reader
    for _ in range(2):  # builtins.classmethod(_make_function(code, …))
        if not isinstance(hook, At) or reader.view(reader.resolve(hook.index)).op not in CALLS:
            return None
        function = Call(scene.x, reader.resolve(hook.index))
        hook = function.argument(0)
        if function.name == "builtins.classmethod":
            continue
        code = Call(scene.x, reader.resolve(hook.index)).args if isinstance(hook, At) else []
        if len(code) not in (16, 18) or not isinstance(code[0], int) or not isinstance(code[2], int):
            return None
        names = reader.value(code[9])
        slots = function.setter_slots
        defaults, keyword_defaults = slots.get("__defaults__"), slots.get("__kwdefaults__")
        count = max(reader.view(reader.resolve(defaults.index)).arg, 0) if isinstance(defaults, At) else 0
        given = set(reader.pairs(keyword_defaults.index)) if isinstance(keyword_defaults, At) else set()
        return _first_required(code[0], code[2], names, 1, count, given) if isinstance(names, tuple) else None
    return None


# --- what is left out ------------------------------------------------------------------------------------------------


def check_left_out(scene: Scene) -> Iterator[Finding]:
    """FC211: state that pickling leaves out."""
    if scene.live is None:
        return
    for index in scene.calls(lambda name: name == "cloudpickle:_make_skeleton_enum"):
        cls = scene.object(index)
        found = namespace(cls)
        names, members = found.get("_member_names_"), found.get("_member_map_")
        if type(names) is list and type(members) is dict and names:
            lost = [name for name in members if type(name) is str and name not in names]
            if lost:
                shown = ", ".join(lost[:4]) + (", …" if len(lost) > 4 else "")
                message = f"enum {names_of(cls)[1]} goes by value, and loads without its names {shown}"
                yield scene.finding("FC211", index, message, _IN_MODULE.replace("{}", names_of(cls)[1]), size=0)
    for index in scene.calls(lambda name: name.startswith("torch:_rebuild")):
        tensor = scene.object(index)
        if is_plain_tensor(tensor) and tensor.is_leaf and tensor.grad is not None:
            own = scene.expression(index)
            instead = f"grad = {own}.grad beside it, and {own}.grad = grad where it is used"
            message = f"{scene.x.subject(index).what} loads without its .grad"
            yield scene.finding("FC211", index, message, instead, severity=NOTE, size=0)
    for index in scene.calls(lambda name: name == "numpy:_reconstruct"):
        array = scene.object(index)
        lost = _attributes_of_array(array)
        if lost:
            kind = names_of(type(array))[1]
            shown = ", ".join(f".{name}" for name in lost[:4]) + (", …" if len(lost) > 4 else "")
            instead = f"in {kind}: __reduce__ and __setstate__ that carry {lost[0]}"
            message = f"{kind} loads without what its {shown} holds: numpy pickles the items of an array only"
            yield scene.finding("FC211", index, message, instead, size=0)


def _attributes_of_array(obj: Any) -> list[str]:
    """Attributes of an instance of a subclass of ndarray that does not pickle them itself."""
    if names_of(type(obj))[0].partition(".")[0] == "numpy":
        return []  # a memmap has its file and mode there: see FC207
    for base in ancestors(type(obj)):
        if names_of(base) == ("numpy", "ndarray"):
            try:
                state = object.__getattribute__(obj, "__dict__")
            except AttributeError:
                return []
            return [name for name, value in state.items() if isinstance(name, str) and value is not None]
        if not namespace(base).keys().isdisjoint(("__reduce__", "__reduce_ex__", "__getstate__")):
            return []
    return []


# --- submodules ------------------------------------------------------------------------------------------------------


def check_submodules(scene: Scene) -> Iterator[Finding]:
    """FC212: submodules that cloudpickle does not see, because a nested function or `getattr` reads them."""
    if scene.live is None:
        return
    seen: set[str] = set()
    known_codes: set[int] = set()
    submodules = cache(_submodules)
    for index, function in scene.functions:
        code = function.__code__
        if id(code) in known_codes:
            continue
        known_codes.add(id(code))
        nested = _names_of_nested(code) - set(code.co_names)
        if not nested and "getattr" not in code.co_names:
            continue
        for name, package in _packages(function):
            computed = "getattr" in code.co_names and _is_read_by_getattr(code, name)
            known = submodules(package)
            missing = [each for each in known if computed or each in nested]
            missing = [each for each in missing if not _comes_along(package, each)]
            full = sorted(f"{package}.{each}" for each in missing)
            if not full or set(full) <= seen:
                continue
            seen.update(full)
            shown = " or ".join(full[:3])
            how = f"by a name that is computed: {shown}" if computed else f"in a nested function: {full[0]}"
            message = (
                f"{function.__name__} reads a submodule of {package} {how} may not be imported on load "
                f"(AttributeError: module {package!r} has no attribute {short_name(full[0])!r})"
            )
            severity = NOTE if computed else None
            instead = f"inside {function.__name__}: import {full[0]}"
            yield scene.finding("FC212", index, message, instead, severity=severity, size=0)


def _names_of_nested(code: CodeType, nesting: int = 8) -> set[str]:
    """Names that functions within a function use."""
    found: set[str] = set()
    for each in code.co_consts:
        if isinstance(each, CodeType) and nesting:
            found |= {*each.co_names, *_names_of_nested(each, nesting - 1)}
    return found


def _packages(function: FunctionType) -> Iterator[tuple[str, str]]:
    """(variable, package) of the packages that a function knows, as globals or in its closure."""
    code = function.__code__
    for name in sorted({*code.co_names, *_names_of_nested(code)}):
        found = function.__globals__.get(name)
        if "__path__" in namespace(found):
            yield name, _name_of_module(found)
    for name, cell in zip(code.co_freevars, function.__closure__ or ()):
        found = _content(cell)
        if "__path__" in namespace(found):
            yield name, _name_of_module(found)


def _name_of_module(module: object) -> str:
    return str(namespace(module).get("__name__"))


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # empty
        return None


def _submodules(package: str) -> list[str]:
    """The direct submodules of a package that are imported here."""
    prefix = package + "."
    rests = [name[len(prefix) :] for name in list(sys.modules) if name.startswith(prefix)]
    return [rest for rest in rests if "." not in rest]


def _is_read_by_getattr(code: CodeType, variable: str) -> bool:
    """Whether code says ``getattr(variable, name)`` with a name that is no constant."""
    instructions = [each for each in dis.get_instructions(code) if each.opname not in ("CACHE", "EXTENDED_ARG")]
    for one, two, three in zip(instructions, instructions[1:], instructions[2:]):
        if one.argval == "getattr" and two.argval == variable and three.opname != "LOAD_CONST":
            return True
    return False


@cache
def _comes_along(package: str, submodule: str) -> bool:
    """Whether importing a package imports or provides a submodule, as far as the package's own source shows."""
    loaded = namespace(sys.modules.get(package))
    full = f"{package}.{submodule}"
    if not loaded or "__getattr__" in loaded or full in _WITH_CLOUDPICKLE:
        return True
    file = loaded.get("__file__")
    if not isinstance(file, str) or not file.endswith(".py"):
        return True
    try:
        with open(file, "rb") as source:
            tree = ast.parse(source.read(1 << 20))
    except (OSError, SyntaxError, ValueError, RecursionError):
        return True
    return any(submodule in _bound(node) for node in ast.walk(tree))


_WITH_CLOUDPICKLE: Final = frozenset({"collections.abc", "importlib.machinery"})
"""Submodules that cloudpickle imports, and so each process that loads a function by value (Python 3.10 to 3.13)."""


def _bound(node: ast.AST) -> set[str]:
    """The names that an import statement in a package's own file binds or goes through, or an assignment binds."""
    if isinstance(node, ast.Import):
        return {part for alias in node.names for part in alias.name.split(".")}
    if isinstance(node, ast.ImportFrom):
        return {*(node.module or "").split("."), *(alias.name for alias in node.names)}
    if isinstance(node, ast.Assign):
        return {target.id for target in node.targets if isinstance(target, ast.Name)}
    return set()


# --- variables -------------------------------------------------------------------------------------------------------


def check_variables(scene: Scene) -> Iterator[Finding]:
    """FC213: variables that functions share, and that each has for itself after loading."""
    if scene.live is None:
        return
    cells: dict[int, list[tuple[int, FunctionType, str]]] = {}
    for index, function in scene.functions:
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
            if name != "__class__":
                cells.setdefault(id(cell), []).append((index, function, name))
    for sharing in cells.values():
        if len(sharing) < 2:
            continue
        codes = {id(each[1].__code__): each for each in sharing}  # closures of one function have one code
        writer = next((each for each in codes.values() if _writes(each[1].__code__, each[2])), None)
        if writer is None:
            continue
        index, function, name = writer
        reader = next(each[1] for each in sharing if each[1] is not function)
        message = (
            f"{function.__name__} writes `{name}`, which it shares with {reader.__name__}: after loading each of them "
            "has its own"
        )
        instead = f"keep {name} in an object that both hold: {name} = [{name}], and {name}[0] in both"
        yield scene.finding("FC213", index, message, instead, size=0)
    yield from _split_modules(scene)


def _split_modules(scene: Scene) -> Iterator[Finding]:
    """Modules by value, with functions that write their globals."""
    for index in scene.calls(lambda name: name == "cloudpickle:dynamic_subimport"):
        module = scene.object(index)
        space = namespace(module)
        for name, function in list(space.items()):
            if not is_a(function, FunctionType) or function.__globals__ is not space:
                continue
            if _STORE_GLOBAL not in function.__code__.co_code[::2]:
                continue
            written = next(
                (each.argval for each in dis.get_instructions(function.__code__) if each.opcode == _STORE_GLOBAL), None
            )
            if written is not None:
                message = (
                    f"{name} writes the global `{written}` of module {_name_of_module(module)}, which goes by value: "
                    "after loading, the module and its functions each have their own"
                )
                instead = f"keep {written} in an object: {written} = [{written}], and {written}[0] in {name}"
                yield scene.finding("FC213", index, message, instead, size=0)
                break


def _writes(code: CodeType, variable: str) -> bool:
    # Opcodes have every other byte. Most code does not write any free variable, and dis takes its time.
    if _STORES.isdisjoint(code.co_code[::2]):
        return False
    return any(each.argval == variable and each.opcode in _STORES for each in dis.get_instructions(code))


_STORE_GLOBAL: Final = dis.opmap["STORE_GLOBAL"]
_STORES: Final = frozenset({dis.opmap["STORE_DEREF"], dis.opmap["DELETE_DEREF"]})
