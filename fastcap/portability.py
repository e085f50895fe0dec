"""FC2: what pickles, but does not load or work in another process, on another machine, in another cluster."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path, PurePath
from typing import Final

from fastcap.explain import Call, short_name
from fastcap.inert import UNREAD, At
from fastcap.report import Finding, format_size
from fastcap.rules import ERROR, NOTE, WARNING
from fastcap.scene import (
    ARRAYS,
    SMALLEST_BUFFER,
    Scene,
    captured_by,
    file_of,
    installed_folders,
    is_plain_tensor,
    names_of,
    namespace,
)


def check_handles(scene: Scene) -> Iterator[Finding]:
    """FC201, FC202."""
    severity = ERROR if scene.live is None else WARNING
    for index in scene.calls(lambda name: name.startswith("ray:")):
        kind = scene.x.subject(index).type
        if kind not in ("ActorHandle", "ObjectRef") or scene.head(index) != index:
            continue
        if scene.is_one_more("FC201" if kind == "ActorHandle" else "FC202"):
            continue
        origin = scene.x.origin(index)
        where = captured_by(scene, index, origin)
        own = _variable(scene, index)
        if kind == "ActorHandle":
            message = (
                f"Ray actor handle: loading it in another cluster fails (AssertionError: Expected str or bytes, got "
                f"<class 'NoneType'>){where}"
            )
            instead = f'{own} = ray.get_actor("{own}")  # by name, where it is used'
            yield scene.finding("FC201", index, message, instead, severity=severity)
        else:
            message = f"Ray object reference: it loads elsewhere, and ray.get on it raises OwnerDiedError{where}"
            own = scene.expression(index)
            instead = f"{own} = ray.get({own})  # the value instead of the reference"
            yield scene.finding("FC202", index, message, instead, severity=severity)


def _variable(scene: Scene, index: int) -> str:
    """A name for an object, from the last step that has one."""
    link: int | None = index
    while link is not None:
        place = scene.x.place(link)
        if place is None or place.part is None:
            break
        step = place.part.step
        if isinstance(step.value, str) and step.value.isidentifier():
            return step.value
        link = place.above
    return "x"


def check_names(scene: Scene) -> Iterator[Finding]:
    """FC203, FC204, FC205: the first name of each module that may be missing elsewhere."""
    modules: dict[tuple[str, str], tuple[int, str]] = {}
    for index, name in scene.globals:
        module = _module_of(scene, index, name)
        code = _judge_module(module, scene.live is not None)
        if code is not None:
            modules.setdefault((code, name if code == "FC203" else module), (index, name))
    for (code, module), (index, name) in modules.items():
        if code == "FC203":
            message = f"{name} is looked up by name: elsewhere AttributeError: Can't get attribute {short_name(name)!r}"
            replacement = f"move {short_name(name)} to a module that workers have"
        elif code == "FC204":
            message = f"{name} is looked up by name, and {module} cannot be imported: ModuleNotFoundError on load"
            replacement = f"cloudpickle.register_pickle_by_value({module})" if scene.live else f"pip install {module}"
        else:
            message = f"{name} is looked up by name in {file_of(module)}: ModuleNotFoundError where that is missing"
            replacement = f"cloudpickle.register_pickle_by_value({module})"
        yield scene.finding(code, index, message, replacement, size=0)


def _module_of(scene: Scene, index: int, name: str) -> str:
    parts = scene.x.reader.contents(index, 2)
    module = scene.x.reader.string(parts.get(0))
    if module is not None:
        return module
    module = name.rpartition(".")[0]  # GLOBAL: only a nested name has dots of its own
    while module.rpartition(".")[0] in sys.modules and module not in sys.modules:
        module = module.rpartition(".")[0]
    return module


def _judge_module(module: str, live: bool) -> str | None:
    top = module.partition(".")[0]
    if module == "__main__":
        return "FC203"
    if top in sys.stdlib_module_names or not module:
        return None
    if not live:
        return None if _is_findable(top) else "FC204"
    loaded = sys.modules.get(module)
    if loaded is None:
        return None
    file = file_of(module)
    if not file:
        return "FC204" if namespace(loaded).get("__spec__") is None and not _is_findable(top) else None
    return None if file.startswith(installed_folders()) or f"{os.sep}site-packages{os.sep}" in file else "FC205"


@cache
def _is_findable(top: str) -> bool:
    """Whether a top-level module can be found; finding one imports nothing."""
    try:
        return importlib.util.find_spec(top) is not None
    except (ImportError, ValueError, AttributeError):
        return False


def check_gpu(scene: Scene) -> Iterator[Finding]:
    """FC206."""
    yield from _devices(scene)
    for index in scene.calls(lambda name: name.startswith("torch:_rebuild")):
        device = _device_of(scene, index)
        if device.startswith("cuda"):
            message = f"tensor on {device}: where there is no such device loading raises RuntimeError"
            yield scene.finding("FC206", index, message, f"{scene.expression(index)}.cpu()")


_LOCATION: Final = re.compile(rb"X[\x06-\x09]\x00\x00\x00((?:cuda):\d+)")
"""The device of a storage in a file of torch.save: a string of its persistent id (BINUNICODE with its length)."""


def _device_of(scene: Scene, index: int) -> str:
    obj = scene.object(index)
    if is_plain_tensor(obj):
        return str(obj.device)
    storage = Call(scene.x, index).argument(0)
    if not isinstance(storage, At):
        return ""
    made = scene.x.reader.resolve(storage.index)
    if scene.x.reader.view(made).op == "REDUCE":  # _load_from_bytes(b"…"): a nested file of torch.save
        inner = Call(scene.x, made).argument(0)
        text = scene.x.reader.text(inner.index) if isinstance(inner, At) else None
        match = _LOCATION.search(text.value) if text is not None and isinstance(text.value, bytes) else None
        return match[1].decode() if match is not None else ""
    key = scene.x.reader.contents(storage.index, 2).get(0, UNREAD)
    value = scene.x.reader.value(key)
    return str(value[3]) if isinstance(value, tuple) and len(value) > 3 and value[0] == "storage" else ""


_DEVICES: Final = frozenset({"cuda", "xpu", "hpu", "mtia"})


def _devices(scene: Scene) -> Iterator[Finding]:
    """Handles of devices."""
    for index in scene.calls(lambda name: name == "torch:device"):
        call = Call(scene.x, index)
        kind, number = call.text(0), call.argument(1)
        if kind is not None and kind.partition(":")[0] in _DEVICES and scene.head(index) == index:
            shown = f"{kind}:{number}" if isinstance(number, int) else kind
            own = scene.expression(index)
            message = f"torch.device {shown}: it loads anywhere, and using it where there is none raises RuntimeError"
            instead = f'{own} = torch.device("{kind}" if torch.cuda.is_available() else "cpu")  # where it is used'
            yield scene.finding("FC206", index, message, instead, severity=NOTE)


def check_memory_maps(scene: Scene) -> Iterator[Finding]:
    """FC207."""
    for index in scene.calls(ARRAYS.__contains__, SMALLEST_BUFFER):
        obj = scene.object(index)
        if obj is None:
            is_map = scene.x.subject(index).type == "memmap"
        else:
            is_map = names_of(type(obj)) == ("numpy", "memmap")
        if not is_map:
            continue
        file = getattr(obj, "filename", None)
        file = str(file) if isinstance(file, (str, PurePath)) else None
        where = f" of {file}" if file else ""
        message = f"memory-mapped array{where}: {format_size(scene.size(index))} of it are read and written out"
        shown = repr(file) if file else "path"
        instead = f'{scene.expression(index)} = np.load({shown}, mmap_mode="r")  # where it is used'
        yield scene.finding("FC207", index, message, instead)


def check_text_files(scene: Scene) -> Iterator[Finding]:
    """FC208."""
    for index in scene.calls(lambda name: name == "cloudpickle:_file_reconstructor"):
        file = getattr(scene.object(index), "name", None)
        named = isinstance(file, str)
        message = f"the content of the open file{f' {file}' if named else ''} is pickled; it loads as io.StringIO"
        instead = f"{scene.expression(index)} = open({repr(file) if named else 'path'})  # where it is used"
        yield scene.finding("FC208", index, message, instead)


def check_local_paths(scene: Scene) -> Iterator[Finding]:
    """FC209."""
    for index in scene.calls(("pathlib.PosixPath", "pathlib.WindowsPath", "pathlib._local.PosixPath").__contains__):
        first = Call(scene.x, index).text(0)
        if first is not None and (first.startswith("/") or first[1:3] in (":\\", ":/")) and scene.head(index) == index:
            if scene.has_enough("FC209"):
                return
            own, path = scene.expression(index), _relative(Call(scene.x, index), first)
            instead = f"{own} = pathlib.Path({path!r})  # relative to the job's working directory"
            yield scene.finding("FC209", index, f"{scene.x.subject(index).what} is a path of this machine", instead)


def _relative(call: Call, first: str) -> str:
    """A path below the working directory relative to it; of another one the last part."""
    path = PurePath(first, *(part for part in map(call.reader.string, call.args[1:]) if part is not None))
    try:
        return str(path.relative_to(Path.cwd()))
    except (ValueError, OSError):
        return path.name or "."


# --- this process, this machine, this Python -------------------------------------------------------------------------

_PROCESS_BOUND: Final = {
    "multiprocessing.shared_memory.SharedMemory": (
        "shared memory goes by its name: on another machine, or when it is unlinked, loading raises FileNotFoundError",
        "{} = bytes({}.buf)",
    ),
    "multiprocessing.shared_memory.ShareableList": (
        "shared memory goes by its name: on another machine, or when it is unlinked, loading raises FileNotFoundError",
        "{} = list({})",
    ),
    "multiprocessing.managers.RebuildProxy": (
        "proxy of a multiprocessing.Manager: it goes by the address of the manager's process, and where that does not "
        "run, loading raises FileNotFoundError or AuthenticationError",
        "{} = {}._getvalue()  # a copy of what the manager holds",
    ),
    "multiprocessing.connection.Connection": (
        "end of a pipe, by the number of its file descriptor: in another process that is another file, or none "
        "(OSError: Bad file descriptor), and the loaded object closes it when it goes",
        "give it to multiprocessing.Process as an argument, which passes the descriptor on",
    ),
    "multiprocessing.connection.rebuild_connection": (
        "end of a pipe whose file descriptor the process that pickled it hands out once",
        "give it to multiprocessing.Process as an argument",
    ),
    "torch:rebuild_storage_fd": (
        "tensor in shared memory, pickled by multiprocessing: its file descriptor is handed out once, on this machine",
        "pickle it with cloudpickle or torch.save, not with multiprocessing's pickler",
    ),
    "torch:rebuild_storage_filename": (
        "tensor in shared memory, pickled by multiprocessing: it goes by a name of this machine",
        "pickle it with cloudpickle or torch.save, not with multiprocessing's pickler",
    ),
    "torch:rebuild_cuda_tensor": (
        "tensor of a GPU, pickled by multiprocessing: its handle is good while the process that owns it runs",
        "{} = {}.cpu()",
    ),
    "tempfile.TemporaryDirectory": (
        "temporary directory: it goes by its name, and is deleted when this process lets go of it",
        "pickle what is in it, or a path on shared storage",
    ),
    "os._Environ": (
        "os.environ: all environment variables of this process go along, passwords and keys included, and stay as they "
        "are here",
        'what is needed of it: value = os.environ["NAME"]',
    ),
    # last, for it is part of some of those above
    "multiprocessing.resource_sharer.DupFd": (
        "file descriptor that the process that pickled it hands out once: later, or elsewhere, FileNotFoundError",
        "pickle it with cloudpickle, not with multiprocessing's pickler",
    ),
}
"""Canonical name of what is called on loading -> what it is, and what to write instead."""


def check_process_bound(scene: Scene) -> Iterator[Finding]:
    """FC214."""
    found: list[str] = []
    for name, (what, instead) in _PROCESS_BOUND.items():
        severity = ERROR if scene.live is None and name != "os._Environ" else WARNING
        for index in scene.calls(name.__eq__):
            path = scene.path(index)
            if any(path.startswith(known) for known in found):
                continue
            found.append(path)
            if scene.is_one_more("FC214"):
                continue
            message = what + captured_by(scene, index, scene.x.origin(index))
            replacement = instead.replace("{}", scene.expression(index))
            yield scene.finding("FC214", index, message, replacement, severity=severity)


def check_python_version(scene: Scene) -> Iterator[Finding]:
    """FC215: code objects with as many fields as those of this Python do not have."""
    if scene.live is not None:
        return
    for index in scene.calls("types.CodeType".__eq__):
        count = len(Call(scene.x, index).args)
        written = _CODE_FIELDS.get(count)
        if written is None or count == _OWN_CODE_FIELDS:
            continue
        place = scene.x.place(index)
        function = place.above if place is not None and place.above is not None else index
        message = (
            f"its code was made by Python {written}, and this is {sys.version_info[0]}.{sys.version_info[1]}, which "
            f"cannot load it (TypeError: code() argument 13 …)"
        )
        instead = f"load it with Python {written}, or pickle it again with the Python that loads it"
        yield scene.finding("FC215", function, message, instead, size=0)
        return


_CODE_FIELDS: Final = {15: "3.7", 16: "3.8 to 3.10", 18: "3.11 or later"}
_OWN_CODE_FIELDS: Final = 18 if sys.version_info >= (3, 11) else 16
