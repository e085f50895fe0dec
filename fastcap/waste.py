"""FC3: what makes a payload bigger or slower than it need be."""

from __future__ import annotations

import dis
import sys
import zlib
from collections.abc import Iterator, Mapping
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any, Final

from fastcap.explain import Call, short_name
from fastcap.inert import CALLS, At
from fastcap.paths import attr
from fastcap.report import Capture, Finding, format_size
from fastcap.rules import WARNING
from fastcap.scene import (
    ARRAYS,
    NODES,
    SMALLEST_BUFFER,
    Scene,
    file_of,
    installed_folders,
    is_a,
    is_plain_tensor,
    last_name,
    names_of,
    namespace,
)

_SAMPLE = 4096  # elements or bytes that are looked at before all are
_COMPARED = 1 << 28  # bytes of buffers that are compared at most, in all
_LONG_LIST = 10_000  # elements from which on a list of floats is looked at
_BYTES_OPCODES: Final = b"B\x8e\x96C"  # BINBYTES, BINBYTES8, BYTEARRAY8, SHORT_BINBYTES
_LIST_OPCODES: Final = b"]l"  # EMPTY_LIST, LIST


def check_captured_self(scene: Scene) -> Iterator[Finding]:
    """FC302."""
    for index in scene.calls(lambda name: name == "cloudpickle:_make_function", scene.min_size):
        live = scene.object(index)
        code = live.__code__ if is_a(live, FunctionType) else None
        if code is not None and not any(map(_may_hold_attributes, live.__closure__ or ())):
            continue
        for part, target in scene.x.below(index):
            if part.how == "closure" and part.name is not None:
                path = scene.path(index) + str(part.step)
                yield from _captured_whole(scene, index, path, scene.x.reader.resolve(target), part.name, code)
    for index in scene.calls(_BINDS.__contains__, scene.min_size):
        live = scene.object(index)
        code = None
        if is_a(live, MethodType) and is_a(live.__func__, FunctionType):
            code = live.__func__.__code__
        bound = next((target for part, target in scene.x.below(index) if part.how == "self"), None)
        function = _function_of_method(scene, index)
        if bound is None or (code is None and function is None):
            continue
        variable = code.co_varnames[0] if code is not None and code.co_argcount else "self"
        path = f"{scene.path(index)}<self>"
        target = scene.x.reader.resolve(bound)
        yield from _captured_whole(scene, index if function is None else function, path, target, variable, code, True)


def _may_hold_attributes(cell: CellType) -> bool:
    """Whether a closure's cell holds an instance of a class that somebody wrote."""
    try:
        return names_of(type(cell.cell_contents))[0].partition(".")[0] not in ("builtins", "numpy")
    except ValueError:  # empty
        return False


_BINDS: Final = frozenset({"types.MethodType", "builtins.getattr"})


def _function_of_method(scene: Scene, index: int) -> int | None:
    """The function of a bound method, if that goes by value."""
    function = Call(scene.x, index).argument(0)
    if not isinstance(function, At) or not scene.x.is_by_value(function):
        return None
    found = scene.x.reader.resolve(function.index)
    return found if scene.x.subject(found).type == "function" else None


def _captured_whole(
    scene: Scene, function: int, path: str, target: int, variable: str, code: CodeType | None, bound: bool = False
) -> Iterator[Finding]:
    """A finding if a function reads only attributes of an instance that it holds, and they are a small part of it."""
    if scene.size(target) < scene.min_size or scene.x.subject(target).route is None:
        return
    state = dict(_attribute_nodes(scene, target))
    known = _attribute_names(scene, target, state)
    if code is None:
        used = _names_in_code(scene, Call(scene.x, function).argument(0), 4) & known
    else:
        used = set()
        if not _reads_attributes(code, variable, used):
            return
    if not used or not used <= known:
        return
    rest = scene.size(target)
    rest -= sum(scene.x.reader.view(state[each]).subtree_size for each in used if each in state)
    if rest < scene.min_size:
        return
    scene.taken.add(path)
    names = sorted(used)
    reads = " and ".join(f"{variable}.{each}" for each in names)
    subject = scene.x.subject(function)
    own = subject.name or (code.co_name if code is not None else "the method")
    file, line = subject.where() if subject.where is not None else (None, None)
    at = f" at {file}:{line}" if file and line is not None else ""
    kind = scene.x.subject(target).type
    holds = f"is bound to all of its object ({kind})" if bound else f"captures all of `{variable}` ({kind})"
    verb = "reads only" if code is not None else "names no attribute but"
    copies = "; ".join(f"{each} = {variable}.{each}" for each in names)
    if bound:
        instead = f"{copies}  # and a function in place of the method {own}, which uses {' and '.join(names)}"
    else:
        instead = f"{copies}  # before {own}, which then uses {' and '.join(names)}"
    yield Finding("FC302", WARNING, path, rest, f"{own}{at} {verb} {reads}, but {holds}", instead)


def _attribute_nodes(scene: Scene, index: int) -> Iterator[tuple[str, int]]:
    """The attributes of an instance."""
    if scene.x.subject(index).type in ("function", "class", "dict", "list", "tuple"):
        return
    for part, target in scene.x.below(index):
        name = part.step.value
        if isinstance(name, str) and str(part.step) == str(attr(name)):
            yield name, scene.x.reader.resolve(target)


def _attribute_names(scene: Scene, index: int, nodes: Mapping[str, int]) -> set[str]:
    """The names of an instance's attributes, with those whose values have no node, such as numbers."""
    if scene.x.reader.view(index).op not in CALLS:
        return set(nodes)
    return {*nodes, *Call(scene.x, index).state_items()}


_LOADS: Final = frozenset({"LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF", "LOAD_FAST"})
_PASSES: Final = frozenset({"COPY_FREE_VARS", "LOAD_CLOSURE", "MAKE_CELL", "CACHE", "EXTENDED_ARG"})
_SEES_LOCALS: Final = frozenset({"locals", "vars", "eval", "exec", "dir", "super"})


def _reads_attributes(code: CodeType, variable: str, used: set[str]) -> bool:
    """Collect the attributes that code reads of a variable; False if it does, or may do, anything else with it."""
    if not _SEES_LOCALS.isdisjoint(code.co_names):
        return False
    is_cell = variable in code.co_cellvars or variable in code.co_freevars
    instructions = [each for each in dis.get_instructions(code) if each.opname not in _PASSES]
    for each, following in zip(instructions, [*instructions[1:], None]):
        if "FAST" not in each.opname and "DEREF" not in each.opname:
            continue
        # 3.13 loads or stores two variables in one instruction, and a cell itself, for a nested function, as a variable
        variables = each.argval if isinstance(each.argval, tuple) else (each.argval,)
        if variable not in variables or (is_cell and "STORE" not in each.opname and "FAST" in each.opname):
            continue
        is_load = each.opname in _LOADS or (each.opname.endswith("_LOAD_FAST") and variable not in variables[:-1])
        if not is_load or following is None or following.opname not in ("LOAD_ATTR", "LOAD_METHOD"):
            return False
        used.add(str(following.argval))
    nested = [each for each in code.co_consts if isinstance(each, CodeType) and variable in each.co_freevars]
    return all(_reads_attributes(each, variable, used) for each in nested)


def _names_in_code(scene: Scene, code: Any, nesting: int) -> set[str]:
    """``co_names`` of a code object in the stream, and of those nested in it."""
    if not isinstance(code, At) or not nesting:
        return set()
    index = scene.x.reader.resolve(code.index)
    if scene.x.reader.view(index).op not in CALLS:
        return set()
    args = Call(scene.x, index).args
    position = {16: 8, 18: 8}.get(len(args))
    if position is None:
        return set()
    found: set[str] = set()
    names = args[position]
    if isinstance(names, At):
        found |= {each for each in map(scene.x.reader.string, scene.x.reader.sequence(names.index, 256)) if each}
    constants = args[position - 1]
    if isinstance(constants, At):
        for each in scene.x.reader.contents(constants.index, 64).values():
            found |= _names_in_code(scene, each, nesting - 1)
    return found


def check_duplicates(scene: Scene) -> Iterator[Finding]:
    """FC303."""
    if scene.live is None and scene.read is None:
        return
    by_size: dict[int, list[int]] = {}
    for index in scene.x.graph.select(_BYTES_OPCODES, SMALLEST_BUFFER, NODES):
        view = scene.x.reader.view(index)
        by_size.setdefault(view.end - view.start, []).append(index)
    budget = _COMPARED
    for size, nodes in sorted(by_size.items(), reverse=True):
        if size > budget or size * (len(nodes) - 1) < scene.min_size:
            continue
        groups: dict[int, list[tuple[int, memoryview]]] = {}
        for index in nodes:
            content = _content(scene, index)
            if content is not None:
                groups.setdefault(zlib.crc32(_sample(content)), []).append((index, content))
        for group in groups.values():
            first, content = group[0]
            for index, other in group[1:]:
                if scene.has_enough("FC303"):
                    return
                budget -= size
                if budget < 0 or not _same(content, other):
                    continue
                head, twin = scene.head(index), scene.head(first)
                if head is None or twin is None:
                    continue
                message = f"holds the same {format_size(len(content))} as {scene.path(twin)}"
                replacement = f"{scene.expression(head)} = {scene.expression(twin)}"
                yield scene.finding("FC303", head, message, replacement, size=size)


def _content(scene: Scene, index: int) -> memoryview | None:
    """The bytes of a buffer's node: of the object it was made from, or read again from where the stream came from."""
    if scene.live is not None:
        try:
            view = memoryview(scene.object(index))
            return view.cast("B") if view.contiguous and view.nbytes else None
        except (TypeError, ValueError):
            return None
    node = scene.x.reader.view(index)
    start = scene.x.graph.stream_offset(node.start)
    header = scene.x.graph.code(node.start, node.start + 9)
    width = 8 if header[:1] in (b"\x8e", b"\x96") else 4  # BINBYTES8, BYTEARRAY8; BINBYTES
    size = int.from_bytes(header[1 : 1 + width], "little")
    assert scene.read is not None
    data = scene.read(start, start + 1 + width + size)
    # What is read may be something else, of a compressed file for one.
    if data is None or len(data) != 1 + width + size or bytes(data[: 1 + width]) != header[: 1 + width]:
        return None
    return memoryview(data)[1 + width :]


def _sample(content: memoryview) -> bytes:
    """Some bytes of the beginning, the middle and the end: equal contents have equal samples."""
    size = len(content)
    return b"".join(bytes(content[at : at + 256]) for at in (0, size // 3, 2 * size // 3, max(0, size - 256)))


def _same(one: memoryview, other: memoryview) -> bool:
    block = 1 << 20
    return len(one) == len(other) and all(
        bytes(one[at : at + block]) == bytes(other[at : at + block]) for at in range(0, len(one), block)
    )


def _is_array(obj: Any) -> bool:
    return names_of(type(obj)) in (("numpy", "ndarray"), ("numpy", "memmap"))


def check_arrays(scene: Scene) -> Iterator[Finding]:
    """FC304, FC307, FC309: arrays that could be smaller."""
    for index in scene.calls(ARRAYS.__contains__, min(SMALLEST_BUFFER, scene.min_size)):
        obj = scene.object(index)
        if obj is None or not _is_array(obj) or obj.dtype.kind == "O":
            if scene.has_enough("FC307"):
                continue
            what = scene.x.subject(index).what
            if " object " in f"{what} " and scene.size(index) >= scene.min_size:
                own = scene.expression(index)
                message = f"{what}: its elements are pickled one by one"
                yield scene.finding("FC307", index, message, f"{own} = {own}.astype(float)  # or what the elements are")
            continue
        if obj.nbytes < scene.min_size:
            continue
        used = obj.dtype.itemsize
        for length, stride in zip(obj.shape, obj.strides):
            used *= length if stride else 1
        if used * 2 <= obj.nbytes:
            own, what = scene.expression(index), scene.x.subject(index).what
            message = f"{what} is broadcast from {format_size(used)}: every element is written"
            instead = f"{own} = np.broadcast_to({own}, {obj.shape})  # where it is used"
            yield scene.finding("FC304", index, message, instead)
        elif obj.dtype.str == _FLOAT64 and names_of(type(obj))[1] == "ndarray" and _fits_float32(obj):
            own, what = scene.expression(index), scene.x.subject(index).what
            message = f"{what}: the values that were looked at all fit float32"
            yield scene.finding("FC309", index, message, f"{own} = {own}.astype(np.float32)", size=obj.nbytes // 2)


_FLOAT64: Final = "<f8" if sys.byteorder == "little" else ">f8"


def _fits_float32(array: Any) -> bool:
    """Whether a few values are float32's, and no whole numbers, which say nothing."""
    numpy = sys.modules["numpy"]
    if not (array.flags.c_contiguous or array.flags.f_contiguous):
        return False
    flat = array.ravel("K")
    first = flat[:64]
    with numpy.errstate(all="ignore"):
        if (first.astype(numpy.float32).astype(numpy.float64) != first).any():
            return False
    step = max(1, flat.size // 16)
    sample = numpy.concatenate([flat[at : at + _SAMPLE // 16] for at in range(0, flat.size, step)])
    with numpy.errstate(all="ignore"):
        exact = sample.astype(numpy.float32).astype(numpy.float64) == sample
        fraction = sample != numpy.floor(sample)
    return bool(exact.all() and fraction.mean() > 0.25)


_TENSOR_WIDTHS: Final = {
    "complex128": 16, "complex64": 8, "float64": 8, "int64": 8, "float32": 4, "int32": 4, "float16": 2, "int16": 2,
    "int8": 1, "bool": 1,
}  # fmt: skip


def check_tensors(scene: Scene) -> Iterator[Finding]:
    """FC305."""
    for index in scene.calls(lambda name: name.startswith("torch:_rebuild_tensor"), scene.min_size):
        call = Call(scene.x, index)
        storage, shape = call.argument(0), scene.x.reader.value(call.argument(2))
        if not isinstance(storage, At) or not isinstance(shape, tuple):
            continue
        node = scene.x.reader.resolve(storage.index)
        stored = scene.x.reader.view(node).subtree_size
        what = scene.x.subject(index).what
        tensor = scene.object(index)
        dtype = str(tensor.dtype) if is_plain_tensor(tensor) else what
        # Unknown where the storage is bytes that the graph has not kept: then the widest of the usual ones.
        used = next((size for kind, size in _TENSOR_WIDTHS.items() if kind in dtype), 8)
        for length in shape:
            used *= length if isinstance(length, int) else 1
        if stored - used < scene.min_size or stored < 2 * used or scene.x.graph.referrer_count(node):
            continue
        own = scene.expression(index)
        message = f"{what} is {format_size(used)} of a storage of {format_size(stored)}, which is written whole"
        yield scene.finding("FC305", index, message, f"{own} = {own}.clone()", size=stored - used)


_ARROW_WIDTHS: Final = {
    "int8": 1, "uint8": 1, "int16": 2, "uint16": 2, "int32": 4, "uint32": 4, "int64": 8, "uint64": 8, "float": 4,
    "float32": 4, "double": 8, "float64": 8, "string": 4, "utf8": 4, "binary": 4, "large_string": 8, "large_binary": 8,
    "halffloat": 2,
}  # fmt: skip


def check_arrow(scene: Scene) -> Iterator[Finding]:
    """FC306."""
    lost: dict[int, int] = {}
    for index in scene.calls(lambda name: name == "pyarrow:_restore_array", SMALLEST_BUFFER):
        rest = _arrow_rest(scene, Call(scene.x, index))
        head = scene.head(index)
        if rest and head is not None:
            lost[head] = lost.get(head, 0) + rest
    for head, rest in lost.items():
        if rest < scene.min_size:
            continue
        own = scene.expression(head)
        what = scene.x.subject(head).what
        is_array = what.startswith("pyarrow Array")
        shorter = f"pa.concat_arrays([{own}])" if is_array else f"{own}.take(list(range(len({own}))))"
        message = f"{what} is a slice: {format_size(rest)} of what it was cut from go along"
        yield scene.finding("FC306", head, message, f"{own} = {shorter}", size=rest)


def _arrow_rest(scene: Scene, call: Call) -> int:
    """Bytes of an Arrow array's buffers beyond its own elements."""
    reader = scene.x.reader
    only = call.argument(0)
    parts = reader.sequence(only.index, 8) if len(call.args) == 1 and isinstance(only, At) else call.args
    if len(parts) < 5 or not isinstance(parts[0], At) or not isinstance(parts[1], int) or not isinstance(parts[4], At):
        return 0
    made = reader.resolve(parts[0].index)
    kind = Call(scene.x, made).text(0) if reader.view(made).op in CALLS else None
    width = _ARROW_WIDTHS.get(kind or "")
    nodes = [part.index for part in reader.sequence(parts[4].index, 3)[1:] if isinstance(part, At)]
    buffers = [reader.view(node).subtree_size for node in nodes]
    if width is None or not buffers or parts[1] < 0:
        return 0
    expected = width * (parts[1] + 1)
    if buffers[0] < 2 * expected + 4096:
        return 0
    share = 1 - expected / buffers[0]
    return buffers[0] - expected + int(share * sum(buffers[1:]))


def check_lists(scene: Scene) -> Iterator[Finding]:
    """FC308."""
    for index in scene.x.graph.select(_LIST_OPCODES, scene.min_size, NODES, _LONG_LIST):
        view = scene.x.reader.view(index)
        if scene.has_enough("FC308"):
            return
        if view.count == 1 and 8.5 <= (view.end - view.start) / view.arg <= 9.5 and scene.head(index) == index:
            own = scene.expression(index)
            if not isinstance(scene.x.reader.contents(index, 1).get(0), float):
                continue
            message = f"list of {view.arg:,} floats, each of which is pickled on its own"
            yield scene.finding("FC308", index, message, f"{own} = np.asarray({own})")


def check_code_by_value(scene: Scene) -> Iterator[Finding]:
    """FC310."""
    if scene.live is None:
        return
    seen: set[str] = set()
    classes = ((index, scene.object(index)) for index in scene.calls("cloudpickle:_make_skeleton_class".__eq__))
    objects: list[tuple[int, Any]] = [*scene.functions, *((index, obj) for index, obj in classes if is_a(obj, type))]
    for index, obj in objects:
        module, qualname = names_of(obj) if is_a(obj, type) else (obj.__module__, obj.__qualname__)
        if not isinstance(module, str) or module in seen or module == "__main__" or "<" in qualname:
            continue
        loaded = sys.modules.get(module)
        if namespace(loaded).get(qualname) is not obj or not file_of(module).startswith(installed_folders()):
            continue
        seen.add(module)
        message = f"{module}.{qualname} is pickled with its code, though {module} can be imported"
        yield scene.finding("FC310", index, message, f"cloudpickle.unregister_pickle_by_value({module})")


def check_captures(scene: Scene) -> Iterator[Finding]:
    """FC301, FC311: the big captures that nothing more telling has been said of."""
    for capture in scene.captures:
        if capture.how is None or capture.retained_size < scene.min_size:
            continue
        if any(capture.path.startswith(path) for path in scene.taken):
            continue
        file = f" at {capture.file}" + (f":{capture.line}" if capture.line is not None else "") if capture.file else ""
        name = capture.name or "it"
        by = capture.by or capture.path
        where = f"{capture.what}: captured as {capture.how} `{name}` by {by}{file}"
        size = capture.retained_size
        if capture.how == "global" and by.count("<global ") >= 1:
            helper = last_name(by)
            yield Finding(
                "FC311", WARNING, capture.path, size, f"{where}, which {_root_of(by)} calls",
                f"{helper}(…, {name}): give it `{name}` as an argument",
            )  # fmt: skip
        else:
            yield Finding("FC301", WARNING, capture.path, size, where, _instead_of_capture(capture, name))


def _root_of(path: str) -> str:
    return path.partition("<")[0] or path


def _instead_of_capture(capture: Capture, name: str) -> str:
    inside = short_name(last_name(capture.by)) if capture.by else "the function"
    if capture.how == "self":
        return f"a function instead of the method, with what it needs of {capture.captured_type} as arguments"
    if capture.how == "default":
        return f"def {inside}(…, {name}=None), and load `{name}` inside where it is None"
    if capture.how == "class attribute":
        return f"set {name} in __init__, or load it where it is used"
    return f"{name}_ref = ray.put({name}) outside, {name} = ray.get({name}_ref) inside {inside}"


def check_tune(scene: Scene) -> Iterator[Finding]:
    """FC312."""
    if scene.x.graph.payload_size < scene.min_size or scene.x.subject(0).type != "function":
        return
    live = scene.object(0)
    if is_a(live, FunctionType):
        first = live.__code__.co_varnames[0] if live.__code__.co_varnames else None
    else:
        code = Call(scene.x, 0).argument(0)
        args = Call(scene.x, scene.x.reader.resolve(code.index)).args if isinstance(code, At) else []
        names = args[9] if len(args) in (16, 18) else None
        values = scene.x.reader.sequence(names.index, 1) if isinstance(names, At) else []
        first = scene.x.reader.string(values[0]) if values else None
    if first == "config":
        size = format_size(scene.x.graph.payload_size)
        message = f"as a Tune trainable with num_samples >= 2 its {size} are exported twice"
        own = scene.x.subject(0).name or "train"
        yield scene.finding("FC312", 0, message, f"tune.with_parameters({own}, data=data)")


_CODE_SIZE = 1 << 14  # bytes of documentation and line tables from which on they are worth a word
_CODE_SHARE = 4  # and from which fraction of the payload on
_CODES = 32  # code objects, functions and classes that are looked at, if there are more


def check_documentation(scene: Scene) -> Iterator[Finding]:
    """FC313."""
    reader = scene.x.reader
    codes = scene.calls("types.CodeType".__eq__)
    total = scene.x.graph.payload_size
    if sum(reader.view(index).subtree_size for index in codes) < max(_CODE_SIZE, total // _CODE_SHARE):
        return
    every = max(1, len(codes) // _CODES)
    tables = every * sum(_table_size(scene, index) for index in codes[::every])
    documentation = 0
    for name in ("cloudpickle:_make_function", "cloudpickle:_make_skeleton_class"):
        calls = scene.calls(name.__eq__)
        every = max(1, len(calls) // _CODES)
        texts: set[int] = set()
        for index in calls[::every]:
            call = Call(scene.x, index)
            text = (call.setter_slots if name.endswith("function") else call.setter_attributes).get("__doc__")
            if isinstance(text, At):
                texts.add(reader.resolve(text.index))
        documentation += every * sum(reader.view(index).subtree_size for index in texts)
    if tables + documentation < max(_CODE_SIZE, total // _CODE_SHARE):
        return
    message = (
        f"about {format_size(documentation)} of docstrings and {format_size(tables)} of line tables go along with "
        f"{len(codes):,} functions"
    )
    instead = "python -OO -X no_debug_ranges, or install the code on the workers"
    yield scene.finding("FC313", 0, message, instead, size=tables + documentation)


def _table_size(scene: Scene, index: int) -> int:
    """Bytes of a code object's line table."""
    args = Call(scene.x, index).args
    table = args[{16: 13, 18: 14}[len(args)]] if len(args) in (16, 18) else None
    return scene.x.reader.view(table.index).subtree_size if isinstance(table, At) else 0
