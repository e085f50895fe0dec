"""Restores experiments of Ray Tune and Ray Train (v1) whose files hold actor handles and references of a cluster that
is gone.

Ray pickles what an experiment was made of into several files, and loads them when it restores and when it goes on:
``trainer.pkl`` (class and arguments of a Trainer), ``tuner.pkl`` (configurations of a Tuner), the newest
``experiment_state-*.json`` (trials, with pickles in hex for what JSON cannot hold), states of callbacks and search
algorithms. A handle in any of them makes Ray's restore fail, or go on with a reference that is dead.

Here the experiment is copied to a new directory, and what is dead is replaced in the copy's files without loading them;
then Ray restores the copy. The same handle is usually in several files: it is known by its id, and a value given for
one of its places is put into all of them. Facts about Ray are those of Ray 2.60; where another one differs,
`fastcap.errors.UnknownRay` says so.
"""

from __future__ import annotations

import binascii
import copy
import inspect
import io
import json
import mmap
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Final

import ray

from fastcap.editing import Editor
from fastcap.errors import EditError, FastcapError, NotRestored, PayloadError, UnknownRay
from fastcap.explain import TABLE
from fastcap.handles import Handle, find_handles, is_below
from fastcap.loading import load_with_ids
from fastcap.paths import Path, Step, attr, item, parse, word
from fastcap.pickling import dumps
from fastcap.placeholders import Unrestorable
from fastcap.substitution import id_opcodes, replace_path

Handles = Callable[[Unrestorable], Any]

_TRAINER: Final = "trainer.pkl"
_TUNER: Final = "tuner.pkl"
_STATE: Final = re.compile(r"experiment_state-.*\.json")
_CHECKPOINT: Final = re.compile(r"checkpoint_(\d+)")
_PICKLE: Final = re.compile(rb"\x80[\x02-\x05]")
_INFORMATION: Final = ("params.pkl", "error.pkl")  # written by Ray for people, or for those who ask for an error
_HANDLE_NAMES: Final = tuple(name.partition(":")[2].encode() for name in TABLE if name.startswith("ray:"))
_CONFIGS: Final[dict[tuple[Step, ...], str]] = {
    (item("_run_config"),): "run_config",
    (item("_tune_config"),): "tune_config",
}
"""What tuner.pkl holds of a Tuner's arguments."""

_STAND_IN: Final = b"fastcap pickle "
_BLOCK: Final = 1 << 24  # bytes copied at a time
_LISTED: Final = 20


@dataclass(frozen=True, slots=True)
class DeadPart:
    """Something in an experiment that does not come back in another cluster.

    ``kind`` is "ActorHandle", "ObjectRef" or "Dataset", ``id`` Ray's id in hex. ``argument`` is the argument to
    re-specify, None if no argument holds it; ``paths`` are all its places, each of which ``replace`` takes.
    ``required`` tells whether Ray needs it to go on: what only tells of the past does not have to be replaced.
    """

    kind: str
    id: str
    what: str
    argument: str | None
    paths: tuple[str, ...]
    required: bool

    def __str__(self) -> str:
        where = f"argument {self.argument}" if self.argument is not None else "no argument"
        need = "" if self.required else " (need not be replaced)"
        return f"{self.kind} {self.id} ({self.what}), {where}: {', '.join(self.paths)}{need}"


def restore_trainer(
    path: str | os.PathLike[str],
    trainer_cls: Any = None,
    *,
    replace: Mapping[str, Any] | None = None,
    handles: str | Handles = "error",
    into: str | os.PathLike[str] | None = None,
    dry_run: bool = False,
    storage_filesystem: Any = None,
    **re_specified: Any,
) -> Any:
    """A Trainer (Ray Train v1) of an experiment whose files hold dead handles; its ``fit`` goes on where it ended.

    ``re_specified`` are arguments of the Trainer's constructor; TypeError lists those that it has if another one is
    given. All other arguments, and the class if ``trainer_cls`` is None, come from the file. Datasets have to be
    re-specified, as in Ray. What stood at a re-specified argument is not executed.

    ``replace`` maps paths, as a dry run lists them, to values. A handle that is in several places is replaced in all of
    them, also where it was re-specified as a part of an argument. ``handles`` says what becomes of those that are left:
    "error" raises `NotRestored` with their places, "placeholder" makes each a `fastcap.Unrestorable`, and a function is
    called with that and returns the value to have instead.

    The experiment goes on in a copy of its directory, ``into`` (default: its name and ``-restored``), which must not
    exist yet; ``path`` stays as it is. Finished checkpoints become hard links where the file system has them. With
    ``dry_run`` nothing is executed or written: a tuple of `DeadPart` says what has to be re-specified.

    Ray must be connected to the new cluster, except for a dry run. Raises FastcapError for what is no such experiment,
    `fastcap.errors.UnknownRay` where Ray differs. Restoring executes code that the files name: restore only what you
    trust.
    """
    experiment = _Experiment(path, storage_filesystem, _TRAINER)
    if trainer_cls is not None:
        _check_names("restore_trainer", re_specified, _arguments_of(trainer_cls), trainer_cls.__name__)
    given = dict(re_specified) if trainer_cls is None else {"trainer_cls": trainer_cls, **re_specified}
    if dry_run:
        return experiment.dead_parts(given)
    _check_train_v1()
    target = experiment.target(into)
    values = _Values(experiment, given, replace or {}, handles)
    cls, params = _load_trainer(experiment, values)
    _check_names("restore_trainer", re_specified, _arguments_of(cls), cls.__name__)
    params.update(re_specified)
    left_out = sorted(set(experiment.datasets()) - set(params.get("datasets") or {}))
    if left_out or (experiment.datasets() and "datasets" not in re_specified):
        names = ", ".join(map(repr, left_out or experiment.datasets()))
        raise NotRestored(f"datasets are never in the file: re-specify datasets={{...}} with {names}")
    trainer = cls(**params)
    for name in ("_restore_path", "_restore_storage_filesystem", "_save", "_param_dict", "run_config"):
        _require(hasattr(trainer, name), f"{cls.__name__}.{name}")
    trainer.run_config = _moved(trainer.run_config, target, storage_filesystem)
    if "run_config" in trainer._param_dict:
        trainer._param_dict["run_config"] = trainer.run_config
    with experiment.copied(target, values, leave_out=(_TRAINER,)) as folder:
        trainer._save(experiment.fs, folder)
    trainer._restore_path = target.path
    trainer._restore_storage_filesystem = storage_filesystem
    return trainer


def restore_tuner(
    path: str | os.PathLike[str],
    *,
    replace: Mapping[str, Any] | None = None,
    handles: str | Handles = "error",
    into: str | os.PathLike[str] | None = None,
    dry_run: bool = False,
    storage_filesystem: Any = None,
    **re_specified: Any,
) -> Any:
    """A Tuner of an experiment whose files hold dead handles; its ``fit`` goes on where it ended.

    ``re_specified`` are arguments of ``Tuner`` and of ``Tuner.restore``. ``trainable`` is needed always, for Ray does
    not write it to a file; a ``param_space`` with other objects in it must have the keys of the original one. All
    other arguments are those of `restore_trainer`, and the same holds for them.
    """
    from ray.tune import Tuner

    experiment = _Experiment(path, storage_filesystem, _TUNER)
    own = _public(inspect.signature(Tuner.__init__).parameters) - {"self"}
    options = _public(inspect.signature(Tuner.restore).parameters) - {"path", "storage_filesystem"}
    _require({"trainable", "param_space", "run_config", "tune_config"} <= own, "the arguments of Tuner")
    _require({"trainable", "param_space"} <= options, "the arguments of Tuner.restore")
    _check_names("restore_tuner", re_specified, own | options, "Tuner")
    if dry_run:
        return experiment.dead_parts(re_specified)
    if re_specified.get("trainable") is None:
        raise TypeError("restore_tuner() needs trainable=...: Ray does not write it to a file")
    target = experiment.target(into)
    values = _Values(experiment, re_specified, replace or {}, handles)
    with experiment.copied(target, values):
        pass
    try:
        tuner = Tuner.restore(
            path=target.path,
            storage_filesystem=storage_filesystem,
            **{name: value for name, value in re_specified.items() if name in options},
        )
    except BaseException:
        experiment.remove(target)
        raise
    # Ray has loaded copies; the objects that were given are what the caller looks at afterwards.
    internal = getattr(tuner, "_local_tuner", None)
    if internal is not None:
        _require(hasattr(internal, "_run_config") and hasattr(internal, "_tune_config"), "TunerInternal._run_config")
        if "run_config" in re_specified:
            internal._run_config = _moved(re_specified["run_config"], target, storage_filesystem)
        if "tune_config" in re_specified:
            internal._tune_config = re_specified["tune_config"]
    return tuner


# --- what the installed Ray is like ----------------------------------------------------------------------------------


def _require(condition: bool, what: str) -> None:
    if not condition:
        raise UnknownRay(f"Ray {ray.__version__} is not as fastcap.ray knows it: {what}")


def _check_train_v1() -> None:
    try:
        from ray.train.v2._internal.constants import is_v2_enabled
    except ImportError:  # before there was a v2
        return
    if is_v2_enabled():
        raise FastcapError(
            "Ray Train v2 is enabled, and only Trainers of v1 write what can be restored: set RAY_TRAIN_V2_ENABLED=0 "
            "in the environment before Ray is imported"
        )


def _public(names: Iterable[str]) -> set[str]:
    return {name for name in names if not name.startswith("_")}


def _arguments_of(cls: Any) -> set[str] | None:
    """The arguments that a class can be made with: those of its constructor, and as long as that takes ``**kwargs``,
    those of the next class's. None if the last one takes any.
    """
    names: set[str] = set()
    for each in cls.__mro__:
        if "__init__" not in vars(each):
            continue
        if each is object:
            return names
        parameters = list(inspect.signature(each.__init__).parameters.values())[1:]
        kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        names.update(parameter.name for parameter in parameters if parameter.kind in kinds)
        if all(parameter.kind is not inspect.Parameter.VAR_KEYWORD for parameter in parameters):
            return names
    return None


def _check_names(function: str, given: Iterable[str], known: set[str] | None, owner: str) -> None:
    unknown = [name for name in given if known is not None and name not in known]
    if unknown and known is not None:
        like = get_close_matches(unknown[0], sorted(known), n=1)
        hint = f" (did you mean {like[0]}?)" if like else ""
        raise TypeError(
            f"{function}() got {', '.join(unknown)}{hint}, but {owner} has only these arguments: "
            f"{', '.join(sorted(known))}"
        )


# --- where experiments are -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Target:
    """A directory for a copy."""

    path: str  # as Ray's functions take it
    fs_path: str  # seen from the file system
    name: str
    parent: str


def _moved(run_config: Any, target: _Target, storage_filesystem: Any) -> Any:
    """A copy of a run configuration that writes to another directory."""
    moved = copy.copy(run_config)
    for name in ("name", "storage_path", "storage_filesystem"):
        _require(hasattr(moved, name), f"{type(moved).__name__}.{name}")
    moved.name, moved.storage_path, moved.storage_filesystem = target.name, target.parent, storage_filesystem
    return moved


@dataclass(frozen=True, slots=True)
class _Found:
    """A handle in a file of an experiment."""

    file: str
    blob: int  # which pickle of the file; -1 if it is one
    handle: Handle
    labels: tuple[str, ...]  # its paths, as `replace` takes them
    required: bool


@dataclass(frozen=True, slots=True)
class _Trial:
    """What the state of an experiment says about a trial."""

    folder: str
    last_checkpoint: int  # its number; -1 if there is none


class _Experiment:
    """The directory of an experiment, of which ``main`` is the file that names what it was made of."""

    def __init__(self, path: str | os.PathLike[str], storage_filesystem: Any, main: str) -> None:
        import pyarrow.fs

        try:
            from ray.train._internal.storage import get_fs_and_path
        except ImportError as error:
            raise UnknownRay(f"Ray {ray.__version__} is not as fastcap.ray knows it: {error}") from error
        self.path = os.fspath(path)
        self.is_uri = "://" in self.path
        if not self.is_uri and storage_filesystem is None:
            self.path = os.path.abspath(os.path.expanduser(self.path))
        self.path = self.path.rstrip("/")
        self.fs, self.fs_path = get_fs_and_path(self.path, storage_filesystem)
        self.fs_path = self.fs_path.rstrip("/")
        self.is_local = isinstance(self.fs, pyarrow.fs.LocalFileSystem)
        self.main = main
        selector = pyarrow.fs.FileSelector(self.fs_path, allow_not_found=True, recursive=True)
        infos = self.fs.get_file_info(selector)
        start = len(self.fs_path) + 1
        self.files = sorted(info.path[start:] for info in infos if info.type == pyarrow.fs.FileType.File)
        if main not in self.files:
            kind = "a Trainer" if main == _TRAINER else "a Tuner"
            raise FastcapError(f"{self.path} is no experiment of {kind}: it has no {main}")
        states = [name for name in self.files if _STATE.fullmatch(name)]
        self.state = max(states) if states else None  # that is the one which Ray takes
        self.trials: list[_Trial] = []
        self._datasets: list[str] | None = None
        self._found: list[_Found] | None = None

    def source(self, name: str) -> str | bytes:
        """A file, as `fastcap.editing.Editor` takes it."""
        if self.is_local:
            return f"{self.fs_path}/{name}"
        with self.fs.open_input_stream(f"{self.fs_path}/{name}") as file:
            return file.readall()  # type: ignore[no-any-return]

    def _begins_like_a_pickle(self, name: str) -> bool:
        with self.fs.open_input_stream(f"{self.fs_path}/{name}") as file:
            return _PICKLE.match(file.read(2)) is not None

    # --- handles -----------------------------------------------------------------------------------------------------

    def found(self) -> list[_Found]:
        """The handles in all files that Ray or a trial may load."""
        if self._found is None:
            first = [name for name in (self.main, _TUNER) if name in self.files]
            found: list[_Found] = []
            for name in dict.fromkeys(first):
                found.extend(self._in_pickle(name))
            if self.state is not None:
                found.extend(self._in_state(self.state))
            for name in self.files:
                if name in first or name == self.state or not name.endswith((".pkl", ".json")):
                    continue
                if self._begins_like_a_pickle(name):
                    try:
                        found.extend(self._in_pickle(name))
                    except (PayloadError, EditError):  # no pickle, or of a format of its own
                        continue
            self._found = found
        return self._found

    def _in_pickle(self, name: str) -> Iterator[_Found]:
        with Editor(self.source(name)) as editor:
            for steps in _CONFIGS if name == _TUNER else ():
                _require(editor.explainer.find(steps) is not None, f"{name} has no {steps[0]}")
            for handle in find_handles(editor.explainer):
                paths = (handle.path, *editor.explainer.holders(handle.node, limit=1000, inherited=True))
                labels = tuple(dict.fromkeys(self._label(name, path) for path in paths))
                parts = name.split("/")
                required = parts[-1] not in _INFORMATION and not any(map(_CHECKPOINT.fullmatch, parts))
                yield _Found(name, -1, handle, labels, required)

    def _label(self, name: str, path: str) -> str:
        """The path of something in a file, as `replace` takes it."""
        steps = _steps_of(path)
        if name == _TRAINER and steps[:1] == (item(0),):
            return str(Path("trainer_cls", steps[1:]))
        if name == _TRAINER and steps[:1] == (item(1),) and len(steps) > 1 and isinstance(steps[1].value, str):
            return str(Path(steps[1].value, steps[2:]))
        if name == _TUNER and steps[:1] in _CONFIGS:
            return str(Path(_CONFIGS[steps[:1]], steps[1:]))
        return str(Path(name, steps))

    def _in_state(self, name: str) -> Iterator[_Found]:
        with self._mapped(name) as text:
            blobs = list(_find_blobs(text))
            document = _State(name, text, blobs)
            self.trials = document.trials
            for number, (start, end) in enumerate(blobs):
                data = binascii.unhexlify(text[start:end])
                if not _may_hold_handles(data):
                    continue
                label, required = document.places.get(number, (Path(name), True))
                with Editor(data) as editor:
                    for handle in find_handles(editor.explainer):
                        full = str(Path(label.root, (*label.steps, *_steps_of(handle.path))))
                        yield _Found(name, number, handle, (full,), required)

    @contextmanager
    def _mapped(self, name: str) -> Iterator[Any]:
        """The bytes of a file: mapped, where that is possible."""
        source = self.source(name)
        if isinstance(source, bytes):
            yield source
            return
        with open(source, "rb") as file:
            if not os.fstat(file.fileno()).st_size:
                yield b""
                return
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
                yield mapped

    # --- what has to be re-specified ---------------------------------------------------------------------------------

    def _names_at(self, *steps: Step) -> list[str]:
        """The keys of a dict in trainer.pkl."""
        if self.main != _TRAINER:
            return []
        with Editor(self.source(_TRAINER)) as editor:
            explainer = editor.explainer
            node = explainer.find(steps)
            parts = () if node is None else explainer.below(explainer.reader.resolve(node))
            return [str(part.step.value) for part, _ in parts]

    def argument_names(self) -> list[str]:
        """The arguments of a Trainer that its file has."""
        return self._names_at(item(1))

    def datasets(self) -> list[str]:
        """Names of the datasets of a Trainer, which its file never holds."""
        if self._datasets is None:
            self._datasets = self._names_at(item(1), item("datasets"))
        return self._datasets

    def argument(self, label: str) -> str | None:
        """The argument that holds what is at a label."""
        return self.place(label)[0]

    def place(self, label: str) -> tuple[str | None, tuple[Step, ...]]:
        """The argument that holds what is at a label, and the steps that lead there from it.

        A trial's configuration is made from that of the experiment: Ray makes it anew where that is given again.
        """
        parsed = parse(label)
        root, steps = parsed.root, parsed.steps
        in_trial = root == "trials" and steps[1:2] == (attr("config"),)
        if self.main == _TUNER:
            if in_trial:
                return "param_space", steps[2:]
            return (str(root), steps) if root in _CONFIGS.values() else (None, ())
        if in_trial and len(steps) > 2:
            return str(steps[2].value), steps[3:]
        return (None, ()) if root in ("trials", "runner_data", "tune_config", *self.files) else (str(root), steps)

    def is_required(self, found: _Found, given: Mapping[str, Any]) -> bool:
        """Whether Ray needs what a handle stands for, if these arguments are given."""
        return found.required and any(self.argument(label) not in given for label in found.labels)

    def dead_parts(self, given: Mapping[str, Any]) -> tuple[DeadPart, ...]:
        """What has to be re-specified, apart from what is given."""
        groups: dict[tuple[str, str, bytes], list[_Found]] = {}
        for each in self.found():
            groups.setdefault(each.handle.identity, []).append(each)
        rows = []
        for members in groups.values():
            labels = tuple(dict.fromkeys(label for each in members for label in each.labels))
            needed = [each for each in members if self.is_required(each, given)]
            arguments = [self.argument(label) for each in needed or members for label in each.labels]
            argument = next((name for name in arguments if name is not None and name not in given), None)
            handle = members[0].handle
            rows.append(DeadPart(handle.kind, handle.id, handle.what, argument, labels, bool(needed)))
        for name in self.datasets():
            label = str(Path("datasets", (item(name),)))
            rows.append(DeadPart("Dataset", "", "dataset", "datasets", (label,), "datasets" not in given))
        return tuple(sorted(rows, key=lambda row: not row.required))

    # --- the copy ----------------------------------------------------------------------------------------------------

    def target(self, into: str | os.PathLike[str] | None) -> _Target:
        """Where the copy goes; FastcapError if there is something."""
        import pyarrow.fs

        path = f"{self.path}-restored" if into is None else os.fspath(into).rstrip("/")
        fs_path = f"{self.fs_path}-restored"
        if into is not None:
            if self.is_uri:
                other, fs_path = pyarrow.fs.FileSystem.from_uri(path)
                if not other.equals(self.fs):
                    raise FastcapError(f"{path} is not where {self.path} is: copy the experiment first")
            elif self.is_local:
                path = fs_path = os.path.abspath(os.path.expanduser(path))
            else:
                fs_path = path
        if fs_path.startswith(f"{self.fs_path}/"):
            raise FastcapError(f"{path} is inside of {self.path}, which stays as it is: give a directory beside it")
        if self.fs.get_file_info(fs_path).type != pyarrow.fs.FileType.NotFound:
            raise FastcapError(
                f"{path} exists: if it is this experiment, restored before, restore it from there; else give another "
                "directory with into="
            )
        parent, _, name = path.rpartition("/")
        return _Target(path, fs_path, name, parent)

    @contextmanager
    def copied(self, target: _Target, values: _Values, leave_out: Sequence[str] = ()) -> Iterator[str]:
        """Copies the experiment with values in place of its dead handles.

        What the caller writes into the directory that it gets is part of the copy. It appears whole or not at all,
        as far as the file system can do that.
        """
        folder = f"{target.fs_path}.partial-{os.getpid()}" if self.is_local else target.fs_path
        self.fs.create_dir(folder, recursive=True)
        try:
            edited: dict[str, list[_Found]] = {name: [] for name in values.edited_files()}
            for each in self.found():
                edited.setdefault(each.file, []).append(each)
            for name in self.files:
                if name in leave_out:
                    continue
                if "/" in name:
                    self.fs.create_dir(f"{folder}/{name.rpartition('/')[0]}", recursive=True)
                if name not in edited:
                    self._copy(name, folder)
                    continue
                with self.fs.open_output_stream(f"{folder}/{name}") as file:
                    if name == self.state:
                        self._write_state(name, edited[name], values, file)
                    else:
                        _rewrite(self.source(name), values, file, values.replacements_in(name))
            yield folder
            if self.is_local:
                os.rename(folder, target.fs_path)
        except BaseException:
            self.fs.delete_dir(folder)
            raise

    def remove(self, target: _Target) -> None:
        """Remove a copy."""
        self.fs.delete_dir(target.fs_path)

    def _copy(self, name: str, folder: str) -> None:
        if not self.is_local:
            self.fs.copy_file(f"{self.fs_path}/{name}", f"{folder}/{name}")
            return
        source, target = f"{self.fs_path}/{name}", f"{folder}/{name}"
        if self._is_finished(name):
            try:
                os.link(source, target)
            except OSError:  # another device, or a file system without links
                pass
            else:
                return
        shutil.copy2(source, target)

    def _is_finished(self, name: str) -> bool:
        """Whether a file belongs to a checkpoint that nobody will write again."""
        for trial in self.trials:
            if name.startswith(f"{trial.folder}/"):
                match = _CHECKPOINT.match(name, len(trial.folder) + 1)
                return match is not None and int(match[1]) <= trial.last_checkpoint
        return False

    def _write_state(self, name: str, found: list[_Found], values: _Values, file: Any) -> None:
        numbers = {each.blob for each in found}
        with self._mapped(name) as text:
            done = 0
            for number, (start, end) in enumerate(_find_blobs(text)):
                if number not in numbers:
                    continue
                _copy_bytes(text, done, start, file)
                changed = io.BytesIO()
                _rewrite(binascii.unhexlify(text[start:end]), values, changed, ())
                file.write(binascii.hexlify(changed.getvalue()))
                done = end
            _copy_bytes(text, done, len(text), file)


def _dumps(value: Any) -> bytes:
    return dumps(value, flavor="ray.cloudpickle")


def _steps_of(path: str) -> tuple[Step, ...]:
    try:
        return parse(path).steps
    except ValueError:  # what is nested too deep has no path
        return (word("more"),)


def _copy_bytes(source: Any, start: int, end: int, file: Any) -> None:
    for at in range(start, end, _BLOCK):
        file.write(source[at : min(at + _BLOCK, end)])


def _rewrite(source: str | bytes, values: _Values, file: Any, replacements: Iterable[tuple[str, Any]]) -> None:
    """Write a pickle with values in place of the handles in it, and of what is at some paths."""
    with Editor(source) as editor:
        replaced = {replace_path(editor, path, _dumps(value)) for path, value in replacements}
        for handle in find_handles(editor.explainer):
            if handle.node not in replaced:
                editor.replace_node(handle.node, values.pickled(handle))
        editor.write(file)


# --- experiment_state-*.json -----------------------------------------------------------------------------------------


def _find_blobs(text: Any) -> Iterator[tuple[int, int]]:
    """Where the hex digits of pickles stand in a JSON document, in strings of it and in strings of those."""
    at = 0
    while (at := text.find(b'"800', at)) >= 0:
        start = at + 1
        end = text.find(b'"', start)
        if end < 0:
            return
        at = end
        last = end
        while text[last - 1 : last] == b"\\":
            last -= 1
        if (last - start) % 2 == 0 and last - start >= 6 and text[start + 3 : start + 4] in b"2345":
            try:
                binascii.unhexlify(text[start:last])
            except binascii.Error:
                continue
            yield start, last


def _may_hold_handles(data: bytes) -> bool:
    return any(name in data for name in _HANDLE_NAMES)


class _State:
    """The structure of an experiment's state, with a stand-in for each pickle in it.

    ``places`` says for each pickle which path leads there, and whether Ray needs it to go on.
    """

    def __init__(self, name: str, text: Any, blobs: Sequence[tuple[int, int]]) -> None:
        self.places: dict[int, tuple[Path, bool]] = {}
        self.trials: list[_Trial] = []
        pieces, done = [], 0
        for number, (start, end) in enumerate(blobs):
            pieces += [text[done:start], b"%b%d" % (_STAND_IN, number)]
            done = end
        pieces.append(text[done:])
        try:
            state = json.loads(b"".join(pieces))
            for own, past in state["trial_data"]:
                self._read_trial(json.loads(own), json.loads(past))
            self._walk(Path("runner_data"), state["runner_data"], True)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UnknownRay(
                f"{name} is not written as Ray 2.60 does it ({type(error).__name__}: {error}); the installed Ray "
                f"is {ray.__version__}"
            ) from error

    def _read_trial(self, own: dict[str, Any], past: dict[str, Any]) -> None:
        root = Path("trials", (item(own["trial_id"]),))
        ended = own["status"] == "TERMINATED"
        self._walk(root, own, not ended)
        self._walk(root, past, False)
        match = _CHECKPOINT.fullmatch(str((past.get("last_result") or {}).get("checkpoint_dir_name")))
        self.trials.append(_Trial(own["relative_logdir"] or "", int(match[1]) if match is not None else -1))

    def _walk(self, path: Path, value: Any, required: bool) -> None:
        open_values: list[tuple[Path, Any]] = [(path, value)]
        while open_values:
            path, value = open_values.pop()
            if isinstance(value, str) and value.startswith(_STAND_IN.decode()):
                self.places[int(value[len(_STAND_IN) :])] = (path, required)
            elif isinstance(value, dict) and value.get("_type") == "CLOUDPICKLE_FALLBACK":
                open_values.append((path, value["value"]))
            elif isinstance(value, dict):
                top = path.root == "runner_data" if not path.steps else len(path.steps) == 1 and path.root == "trials"
                make: Callable[[Any], Step] = attr if top else item
                open_values += [(Path(path.root, (*path.steps, make(key))), each) for key, each in value.items()]
            elif isinstance(value, list):
                open_values += [(Path(path.root, (*path.steps, item(k))), each) for k, each in enumerate(value)]


# --- values ----------------------------------------------------------------------------------------------------------


class _Values:
    """What comes in place of dead handles and of re-specified arguments.

    Raises `NotRestored` if something that is needed has no value.
    """

    def __init__(
        self, experiment: _Experiment, given: Mapping[str, Any], by_path: Mapping[str, Any], handles: str | Handles
    ) -> None:
        if handles not in ("error", "placeholder") and not callable(handles):
            raise ValueError(f"handles is 'error', 'placeholder' or a function, not {handles!r}")
        self.experiment = experiment
        self.given = given
        self._values: dict[tuple[str, str, bytes], Any] = {}
        self._pickled: dict[tuple[str, str, bytes], bytes] = {}
        self._parts: dict[str, Any] = {}  # path below an argument -> value
        for path, value in by_path.items():
            self._take(path, value)
        for found in experiment.found():
            self._take_from_arguments(found)
        missing: list[_Found] = []
        for found in experiment.found():
            if found.handle.identity in self._values:
                continue
            same = [each for each in experiment.found() if each.handle.identity == found.handle.identity]
            needed = [each for each in same if experiment.is_required(each, given) and not self._is_replaced(each)]
            placeholder = self._placeholder((needed or same)[0])
            self._values[found.handle.identity] = handles(placeholder) if callable(handles) else placeholder
            if handles == "error" and needed:
                missing.append(needed[0])
        if missing:
            self._refuse(missing)

    def _take(self, path: str, value: Any) -> None:
        try:
            label = str(parse(path))
        except ValueError as error:
            raise EditError(str(error), (path,)) from None
        hits = [found for found in self.experiment.found() if label in found.labels]
        for found in hits:
            self._values[found.handle.identity] = value
        if hits:
            return
        name, below = self._file_of(label)
        if name is None:
            known = [known for found in self.experiment.found() for known in found.labels]
            like = get_close_matches(label, known, n=3)
            hint = f"did you mean {' or '.join(like)}?" if like else "a dry run lists those that have to be replaced"
            raise EditError(f"{path}: there is no such path in this experiment; {hint}", (path,))
        with Editor(self.experiment.source(name)) as editor:
            replace_path(editor, below, b"N")  # raises if there is nothing
        self._parts[label] = value

    def _file_of(self, label: str) -> tuple[str | None, str]:
        """The file that holds a part of an argument, and its path there."""
        parsed = parse(label)
        if self.experiment.main == _TRAINER and parsed.root not in ("trials", "runner_data", *self.experiment.files):
            if parsed.root == "trainer_cls":
                return _TRAINER, str(Path("obj", (item(0), *parsed.steps)))
            return _TRAINER, str(Path("obj", (item(1), item(parsed.root), *parsed.steps)))
        if parsed.root in _CONFIGS.values():
            return _TUNER, str(Path("obj", (item(f"_{parsed.root}"), *parsed.steps)))
        return None, ""

    def _take_from_arguments(self, found: _Found) -> None:
        """A handle that was a part of an argument: what is in its place in the argument as it is given now."""
        for label in found.labels:
            argument, steps = self.experiment.place(label)
            if argument is None or argument not in self.given or found.handle.identity in self._values:
                continue
            value = _follow(self.given[argument], steps)
            if type(value).__name__ == found.handle.kind and type(value).__module__.partition(".")[0] == "ray":
                self._values[found.handle.identity] = value

    def _is_replaced(self, found: _Found) -> bool:
        return all(any(is_below(label, path) for path in self._parts) for label in found.labels)

    def _placeholder(self, found: _Found) -> Unrestorable:
        label, argument = found.labels[0], self.experiment.argument(found.labels[0])
        options = [f"{argument}=..."] if argument is not None else []
        remedy = f"restore with {' or '.join([*options, f'replace={{{label!r}: ...}}'])}"
        made = found.handle.placeholder()
        return Unrestorable(label, made.kind, made.id, made.reason, remedy)

    def _refuse(self, missing: list[_Found]) -> None:
        lines = []
        for found in missing[:_LISTED]:
            argument = self.experiment.argument(found.labels[0])
            how = f"  re-specify {argument}, or replace" if argument is not None else "  replace"
            lines.append(f"\n  {found.labels[0]}  {found.handle.kind} {found.handle.id} ({found.handle.what}){how} it")
        more = f"\n  [{len(missing) - _LISTED:,} more]" if len(missing) > _LISTED else ""
        strange = sorted(set(self.given) - {"trainer_cls", *self.experiment.argument_names()})
        if strange and self.experiment.main == _TRAINER:
            more += f"\n(given, but not in the file: {', '.join(strange)})"
        raise NotRestored(
            f"{self.experiment.path} holds handles of a cluster that is gone, and nothing was given instead:"
            f"{''.join(lines)}{more}",
            tuple(found.labels[0] for found in missing),
        )

    def of(self, handle: Handle) -> Any:
        """The value in place of a handle."""
        return self._values[handle.identity]

    def pickled(self, handle: Handle) -> bytes:
        """The pickle of that value."""
        known = self._pickled.get(handle.identity)
        if known is None:
            known = self._pickled[handle.identity] = _dumps(self.of(handle))
        return known

    def replacements_in(self, name: str) -> list[tuple[str, Any]]:
        """Paths in a file whose content is replaced, and the values: re-specified arguments, and parts of others."""
        found: list[tuple[str, Any]] = []
        if name == _TRAINER:
            found = [self._argument_at(argument, value) for argument, value in self.given.items()]
        elif name == _TUNER:
            names = [argument for argument in _CONFIGS.values() if argument in self.given]
            found = [(f"obj['_{argument}']", self.given[argument]) for argument in names]
        for label, value in self._parts.items():
            file, path = self._file_of(label)
            if file == name:
                found.append((path, value))
        return found

    def _argument_at(self, argument: str, value: Any) -> tuple[str, Any]:
        return self._file_of(str(Path(argument)))[1], value

    def edited_files(self) -> list[str]:
        """Files that change, whether they hold handles or not."""
        return [name for name in (_TRAINER, _TUNER) if name in self.experiment.files and self.replacements_in(name)]


def _follow(value: Any, steps: Sequence[Step]) -> Any:
    """What a path leads to in a live object; None if it leads nowhere."""
    for step in steps:
        name: Any = step.value
        try:
            if step.kind == "item":
                value = value[name]
            elif step.kind == "attr":
                value = inspect.getattr_static(value, name) if isinstance(value, type) else vars(value)[name]
            elif step.kind == "closure":
                value = value.__closure__[value.__code__.co_freevars.index(name)].cell_contents
            elif step.kind == "global":
                value = value.__globals__[name]
            elif step.kind == "default":
                value = inspect.signature(value).parameters[name].default
            elif step.kind == "self":
                value = value.__self__
            elif step.kind == "keyword":
                value = value.keywords[name]
            elif step.kind == "arg":
                value = value.args[name]
            else:
                return None
        except (LookupError, AttributeError, TypeError, ValueError):
            return None
    return value


def _load_trainer(experiment: _Experiment, values: _Values) -> tuple[Any, dict[str, Any]]:
    """Class and arguments of a Trainer, with the values that are given."""
    kept: list[Any] = []

    def opcodes(value: Any) -> bytes:
        kept.append(value)
        return id_opcodes(len(kept) - 1)

    stream = io.BytesIO()
    with Editor(experiment.source(_TRAINER)) as editor:
        root = editor.graph.node(0)
        arguments = editor.explainer.find((item(1),))
        _require(root.op == "TUPLE2" and arguments is not None, f"{_TRAINER} is not (class, arguments)")
        replaced = set()
        for path, value in values.replacements_in(_TRAINER):
            try:
                replaced.add(replace_path(editor, path, opcodes(value)))
            except EditError:
                if len(parse(path).steps) > 2:  # else it is an argument that was not given before
                    raise
        for handle in find_handles(editor.explainer):
            if handle.node not in replaced:
                editor.replace_node(handle.node, opcodes(values.of(handle)))
        editor.write(stream)
    stream.seek(0)
    cls, arguments_given = load_with_ids(stream, kept.__getitem__)
    return cls, arguments_given
