"""Restoring experiments of Ray as far as no cluster is needed: what is found in files, refused, copied."""

import functools
import json
import os
import pickle
from pathlib import Path

import pytest

import fastcap
from fastcap.errors import EditError, FastcapError, NotRestored, UnknownRay

ray = pytest.importorskip("ray", reason="Ray is not installed")
pytest.importorskip("ray.tune", reason="Ray Tune is not installed")
pyarrow_fs = pytest.importorskip("pyarrow.fs", reason="pyarrow is not installed")

from ray._private.serialization import _actor_handle_deserializer, _object_ref_deserializer  # noqa: E402
from ray.air.config import RunConfig  # noqa: E402
from ray.train.data_parallel_trainer import DataParallelTrainer  # noqa: E402

import fastcap.ray as fastcap_ray  # noqa: E402
from fastcap.ray import restoring  # noqa: E402


@pytest.fixture(autouse=True)
def train_v1(monkeypatch):
    monkeypatch.setenv("RAY_TRAIN_V2_ENABLED", "0")
    monkeypatch.setenv("RAY_TRAIN_ENABLE_V2_MIGRATION_WARNINGS", "0")


class Dead:
    """Pickled as Ray pickles a handle of an actor (of class ``cls``), or a reference (``cls`` is None)."""

    def __init__(self, number, cls="Tracker"):
        self.number, self.cls = number, cls

    def __reduce__(self):
        identity = bytes([self.number]) * 16
        if self.cls is None:
            return _object_ref_deserializer, (identity + bytes(12), "", b"owner", b"", None)
        name = b"\x12" + bytes([len(self.cls)]) + self.cls.encode()
        function = b"\x12" + bytes([len(name)]) + name
        message = b"\x0a\x10" + identity + b"\x1a\x05owner\x32" + bytes([len(function)]) + function
        return _actor_handle_deserializer, (message, False)


class Watch:
    def __init__(self, handle):
        self.handle = handle


def loop(config):
    return config


class Mine(DataParallelTrainer):
    def __init__(self, *args, note="", **kwargs):
        super().__init__(*args, **kwargs)
        self.note = note


class Picky(DataParallelTrainer):
    def __init__(self, limit, train_loop_config=None):
        if limit > 5:
            raise ValueError("limit is over 5")
        super().__init__(loop, train_loop_config=train_loop_config)


def hexed(obj):
    return {"_type": "CLOUDPICKLE_FALLBACK", "value": ray.cloudpickle.dumps(obj).hex()}


def write_experiment(folder, cls=Mine, arguments=None, config=None, status="ERROR", runner=None, before=()):
    """The files of an experiment, as Ray 2.60 writes them: one trial, and those that came before."""
    folder.mkdir()
    callbacks = [Watch(Dead(2))]
    if arguments is not None:
        (folder / "trainer.pkl").write_bytes(ray.cloudpickle.dumps((cls, arguments)))
    state = {"_run_config": RunConfig(name=folder.name, callbacks=callbacks), "_tune_config": [], "_tuner_kwargs": {}}
    (folder / "tuner.pkl").write_bytes(ray.cloudpickle.dumps(state))
    own = {
        "trial_id": "80051_0",
        "status": status,
        "relative_logdir": "trial_0",
        "config": config or {},
        "results": "80054e2e",
    }
    past = {"last_result": {"checkpoint_dir_name": "checkpoint_000001", "config": config or {}}}
    trials = [*before, [json.dumps(own, indent=2), json.dumps(past)]]
    document = {"trial_data": trials, "runner_data": runner or {}, "stats": {}}
    (folder / "experiment_state-2026-01-01_00-00-00.json").write_text(json.dumps({"older": 1}))
    (folder / "experiment_state-2026-01-02_00-00-00.json").write_text(json.dumps(document))
    for number in range(3):
        checkpoint = folder / "trial_0" / f"checkpoint_00000{number}"
        checkpoint.mkdir(parents=True)
        (checkpoint / "weights.bin").write_bytes(b"weights" * 100)
    (folder / "trial_0" / "params.pkl").write_bytes(ray.cloudpickle.dumps({"h": Dead(1)}))
    (folder / "trial_0" / "result.json").write_text('{"step": 1}\n')
    (folder / "callback-states-2026-01-02_00-00-00.pkl").write_bytes(ray.cloudpickle.dumps({0: {"handle": Dead(2)}}))
    return folder


def trainer_experiment(tmp_path, **more):
    arguments = {
        "train_loop_per_worker": loop, "train_loop_config": {"h": Dead(1), "lr": 0.1}, "note": "mine",
        "run_config": RunConfig(callbacks=[Watch(Dead(2))]), **more,
    }  # fmt: skip
    config = {"train_loop_config": {"h": hexed(Dead(1)), "lr": 0.1}}
    return write_experiment(tmp_path / "exp", arguments=arguments, config=config)


def contents(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}


NEW = {"train_loop_config['h']": "new one", "run_config.callbacks[0].handle": "new two"}


# --- what has to be re-specified --------------------------------------------------------------------------------------


def test_dry_run_of_a_trainer(tmp_path):
    path = trainer_experiment(tmp_path, datasets={"train": loop, "valid": loop})
    before = contents(tmp_path)
    rows = {row.argument: row for row in fastcap_ray.restore_trainer(path, dry_run=True)}
    assert set(rows) == {"train_loop_config", "run_config", "datasets"}
    row = rows["train_loop_config"]
    assert (row.kind, row.id, row.what, row.required) == ("ActorHandle", "01" * 16, "actor of class Tracker", True)
    assert row.paths == (
        "train_loop_config['h']",
        "trials['80051_0'].config['train_loop_config']['h']",
        "trials['80051_0'].last_result['config']['train_loop_config']['h']",
        "'trial_0/params.pkl'['h']",
    )
    assert rows["run_config"].paths[0] == "run_config.callbacks[0].handle"
    assert "'callback-states-2026-01-02_00-00-00.pkl'[0]['handle']" in rows["run_config"].paths
    assert rows["datasets"].paths == ("datasets['valid']",)
    assert "argument train_loop_config" in str(row)
    given = fastcap_ray.restore_trainer(path, dry_run=True, train_loop_config={}, datasets={})
    assert [(row.argument, row.required) for row in given if row.required] == [("run_config", True)]
    assert contents(tmp_path) == before


def test_dry_run_of_a_tuner(tmp_path):
    config = {"h": hexed(Dead(1)), "ref": hexed(Dead(3, None))}
    path = write_experiment(tmp_path / "exp", config=config, runner={"_stopper": hexed([Dead(4)])})
    rows = {row.id[:2]: row for row in fastcap_ray.restore_tuner(path, dry_run=True)}
    assert {number: (row.kind, row.argument, row.required) for number, row in rows.items()} == {
        "01": ("ActorHandle", "param_space", True), "02": ("ActorHandle", "run_config", True),
        "03": ("ObjectRef", "param_space", True), "04": ("ActorHandle", None, True),
    }  # fmt: skip
    assert rows["04"].paths == ("runner_data._stopper[0]",)
    rows = fastcap_ray.restore_tuner(path, dry_run=True, param_space={})
    assert {row.id[:2] for row in rows if row.required} == {"02", "04"}


def test_trials_that_have_ended_need_nothing(tmp_path):
    path = write_experiment(tmp_path / "exp", config={"h": hexed(Dead(1))}, status="TERMINATED")
    rows = {row.id[:2]: row.required for row in fastcap_ray.restore_tuner(path, dry_run=True)}
    assert rows == {"01": False, "02": True}


def test_a_handle_of_trials_that_have_ended_and_have_not(tmp_path):
    handle = hexed(Dead(1))
    ended = {"trial_id": "a", "status": "TERMINATED", "relative_logdir": None, "config": {"h": handle}}
    before = [[json.dumps(ended), json.dumps({"last_result": None})]]
    path = write_experiment(tmp_path / "exp", config={"h": handle}, before=before)
    with pytest.raises(NotRestored) as caught:
        fastcap_ray.restore_tuner(path, trainable=loop, replace={"run_config.callbacks[0].handle": 2})
    assert caught.value.paths == ("trials['80051_0'].config['h']",)


# --- what is refused --------------------------------------------------------------------------------------------------


def test_what_is_missing_is_listed(tmp_path):
    path = trainer_experiment(tmp_path)
    before = contents(tmp_path)
    with pytest.raises(NotRestored) as caught:
        fastcap_ray.restore_trainer(path)
    assert set(caught.value.paths) == {"train_loop_config['h']", "run_config.callbacks[0].handle"}
    assert "re-specify train_loop_config, or replace it" in str(caught.value)
    with pytest.raises(NotRestored, match=r"given, but not in the file: train_loop_confg"):
        fastcap_ray.restore_trainer(path, train_loop_confg={})
    assert contents(tmp_path) == before


def test_unknown_arguments(tmp_path):
    path = trainer_experiment(tmp_path)
    with pytest.raises(TypeError, match=r"nott \(did you mean note\?\), but Mine has only these arguments: .*metadata"):
        fastcap_ray.restore_trainer(path, Mine, nott=1)
    with pytest.raises(TypeError, match="Mine has only these arguments"):  # the class comes from the file
        fastcap_ray.restore_trainer(path, nott=1, replace=NEW)
    with pytest.raises(TypeError, match="did you mean limit"):
        fastcap_ray.restore_trainer(path, Picky, limitt=1)
    with pytest.raises(TypeError, match="Tuner has only these arguments"):
        fastcap_ray.restore_tuner(path, trainabel=1)
    with pytest.raises(TypeError, match="needs trainable"):
        fastcap_ray.restore_tuner(path, replace=NEW)
    assert os.listdir(tmp_path) == ["exp"]


def test_wrong_paths(tmp_path):
    path = trainer_experiment(tmp_path)
    wrong = {
        "train_loop_config['hh']": r"has no \['hh'\]", "trials['80051_0'].config['x']": "no such path",
        "[": "not a path", "nothing": "nothing", "run_config.callbacks[7]": r"has no \[7\]",
    }  # fmt: skip
    for name, message in wrong.items():
        with pytest.raises(EditError, match=message):
            fastcap_ray.restore_trainer(path, replace={name: 1})
    with pytest.raises(ValueError, match="handles is 'error', 'placeholder' or a function"):
        fastcap_ray.restore_trainer(path, handles="drop")


def test_what_is_no_experiment(tmp_path):
    for start in (fastcap_ray.restore_trainer, fastcap_ray.restore_tuner):
        for path in (tmp_path, tmp_path / "nothing"):
            with pytest.raises(FastcapError, match="is no experiment"):
                start(path)
    path = trainer_experiment(tmp_path)
    (tmp_path / "exp-restored").mkdir()
    with pytest.raises(FastcapError, match="exp-restored exists"):
        fastcap_ray.restore_trainer(path, replace=NEW)
    with pytest.raises(FastcapError, match="is inside of"):
        fastcap_ray.restore_trainer(path, replace=NEW, into=path / "new")
    state = path / "experiment_state-2026-01-02_00-00-00.json"
    for text in ("{", "[]", '{"trial_data": [["{}", "{}"]], "runner_data": {}}'):
        state.write_text(text)
        with pytest.raises(UnknownRay, match=f"not written as Ray .* does it .* installed Ray is {ray.__version__}"):
            fastcap_ray.restore_trainer(path, dry_run=True)
    for state in path.glob("experiment_state*"):
        state.unlink()
    (path / "trainer.pkl").write_bytes(pickle.dumps({"cls": 1}))
    with pytest.raises(UnknownRay, match=f"Ray {ray.__version__} is not as fastcap.ray knows it: trainer.pkl"):
        fastcap_ray.restore_trainer(path, replace={"run_config.callbacks[0].handle": 1}, into=tmp_path / "new")
    (path / "tuner.pkl").write_bytes(pickle.dumps({"run_config": [1]}))
    with pytest.raises(UnknownRay, match=r"knows it: tuner.pkl has no \['_run_config'\]"):
        fastcap_ray.restore_tuner(path, dry_run=True)


def test_train_v2_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_TRAIN_V2_ENABLED", "1")
    path = trainer_experiment(tmp_path)
    assert fastcap_ray.restore_trainer(path, dry_run=True)
    with pytest.raises(FastcapError, match="RAY_TRAIN_V2_ENABLED=0"):
        fastcap_ray.restore_trainer(path, replace=NEW)


def test_datasets_have_to_be_given(tmp_path):
    path = trainer_experiment(tmp_path, datasets={"train": loop, "valid": loop})
    with pytest.raises(NotRestored, match=r"re-specify datasets=\{\.\.\.\} with 'train', 'valid'"):
        fastcap_ray.restore_trainer(path, replace=NEW)
    with pytest.raises(NotRestored, match="with 'valid'"):
        fastcap_ray.restore_trainer(path, replace=NEW, datasets={"train": loop})
    trainer = fastcap_ray.restore_trainer(path, replace=NEW, datasets={"train": loop, "valid": loop})
    assert set(trainer.datasets) == {"train", "valid"}


def test_nothing_is_left_behind(tmp_path, monkeypatch):
    path = write_experiment(tmp_path / "exp", cls=Picky, arguments={"limit": 3, "train_loop_config": {"h": Dead(1)}})
    before = contents(tmp_path)
    replace = {"train_loop_config['h']": 1, "run_config.callbacks[0].handle": 2}
    with pytest.raises(ValueError, match="limit is over 5"):
        fastcap_ray.restore_trainer(path, replace=replace, limit=6)

    def fail(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(restoring.shutil, "copy2", fail)
    with pytest.raises(OSError, match="No space left"):
        fastcap_ray.restore_trainer(path, replace=replace)
    assert contents(tmp_path) == before
    assert os.listdir(tmp_path) == ["exp"]


# --- what is restored -------------------------------------------------------------------------------------------------


def loads(path):
    return pickle.loads(path.read_bytes())


def check_copy(old, new):
    """All files are there, without a dead handle; those that held none are the same."""
    state = "experiment_state-2026-01-02_00-00-00.json"
    assert contents(old).keys() == contents(new).keys()
    document = json.loads((new / state).read_text())
    own, past = map(json.loads, document["trial_data"][0])
    for config in (own["config"], past["last_result"]["config"]):
        assert pickle.loads(bytes.fromhex(config["train_loop_config"]["h"]["value"])) == "new one"
        assert config["train_loop_config"]["lr"] == 0.1
    assert own["results"] == "80054e2e"
    assert loads(new / "trial_0" / "params.pkl") == {"h": "new one"}
    assert loads(new / "callback-states-2026-01-02_00-00-00.pkl") == {0: {"handle": "new two"}}
    assert loads(new / "tuner.pkl")["_run_config"].callbacks[0].handle == "new two"
    for name in ("trial_0/result.json", "experiment_state-2026-01-01_00-00-00.json"):
        assert (new / name).read_bytes() == (old / name).read_bytes()


def test_a_handle_is_replaced_in_all_files(tmp_path):
    path = trainer_experiment(tmp_path)
    before = contents(path)
    trainer = fastcap_ray.restore_trainer(str(path) + "/", replace=NEW)
    assert isinstance(trainer, Mine)
    assert trainer.note == "mine"
    assert trainer._param_dict["train_loop_config"] == {"h": "new one", "lr": 0.1}
    new = tmp_path / "exp-restored"
    run_config = trainer._param_dict["run_config"]
    assert (run_config.name, run_config.storage_path) == ("exp-restored", str(tmp_path))
    assert run_config.callbacks[0].handle == "new two"
    assert trainer._restore_path == str(new)
    check_copy(path, new)
    assert loads(new / "trainer.pkl")[1]["train_loop_config"] == {"h": "new one", "lr": 0.1}
    assert contents(path) == before
    assert sorted(os.listdir(tmp_path)) == ["exp", "exp-restored"]
    # Checkpoints that are finished share their bytes; one that the next run may write again does not.
    links = [os.stat(new / "trial_0" / f"checkpoint_00000{number}" / "weights.bin").st_nlink for number in range(3)]
    assert links == [2, 2, 1]
    # And once more, in the next cluster.
    rows = fastcap_ray.restore_trainer(new, dry_run=True)
    assert rows == ()
    assert fastcap_ray.restore_trainer(new, into=tmp_path / "third").note == "mine"


def test_arguments_and_parts_of_them(tmp_path):
    path = trainer_experiment(tmp_path)
    callbacks = [Watch("mine")]
    replace = {"train_loop_config['lr']": 0.5, "train_loop_config['h']": 1, "run_config.callbacks[0].handle": 2}
    trainer = fastcap_ray.restore_trainer(path, replace=replace, note="given", metadata={"a": 1})
    assert trainer._param_dict["train_loop_config"] == {"h": 1, "lr": 0.5}
    assert (trainer.note, trainer.metadata) == ("given", {"a": 1})
    trainer = fastcap_ray.restore_trainer(
        path, Mine, train_loop_config={"x": 1}, run_config=RunConfig(callbacks=callbacks), into=tmp_path / "second",
        handles="placeholder",
    )  # fmt: skip
    assert trainer._param_dict["train_loop_config"] == {"x": 1}
    assert trainer._param_dict["run_config"].callbacks[0] is callbacks[0]
    assert loads(tmp_path / "second" / "tuner.pkl")["_run_config"].callbacks[0].handle == "mine"
    (state,) = loads(tmp_path / "second" / "callback-states-2026-01-02_00-00-00.pkl").values()
    assert isinstance(state["handle"], fastcap.Unrestorable)
    with pytest.raises(NotRestored, match=r"restore with replace=\{\"'callback-states"):
        state["handle"].ping.remote()


def test_an_argument_that_holds_no_handle_any_more(tmp_path):
    path = trainer_experiment(tmp_path)
    replace = {"run_config.callbacks[0].handle": 2}
    trainer = fastcap_ray.restore_trainer(path, train_loop_config={"lr": 0.2}, replace=replace)
    assert trainer._param_dict["train_loop_config"] == {"lr": 0.2}
    past = json.loads((tmp_path / "exp-restored" / "experiment_state-2026-01-02_00-00-00.json").read_text())
    config = json.loads(past["trial_data"][0][0])["config"]["train_loop_config"]
    assert isinstance(pickle.loads(bytes.fromhex(config["h"]["value"])), fastcap.Unrestorable)


def test_handles_from_a_function(tmp_path):
    asked = []

    def new(dead):
        asked.append(dead)
        return f"new {dead.id[:2]}"

    trainer = fastcap_ray.restore_trainer(trainer_experiment(tmp_path), handles=new)
    assert trainer._param_dict["train_loop_config"]["h"] == "new 01"
    assert sorted(dead.path for dead in asked) == ["run_config.callbacks[0].handle", "train_loop_config['h']"]
    assert loads(tmp_path / "exp-restored" / "trial_0" / "params.pkl") == {"h": "new 01"}


def test_placeholders_name_the_argument(tmp_path):
    trainer = fastcap_ray.restore_trainer(trainer_experiment(tmp_path), handles="placeholder")
    dead = trainer._param_dict["train_loop_config"]["h"]
    with pytest.raises(NotRestored, match=r"restore with train_loop_config=\.\.\. or replace=\{"):
        dead.add.remote(1)


def test_a_class_by_value_with_a_handle(tmp_path):
    def make_class(handle):
        class Local(DataParallelTrainer):
            tracker = handle

        return Local

    path = write_experiment(
        tmp_path / "exp", cls=make_class(Dead(5)), arguments={"train_loop_per_worker": loop, "train_loop_config": {}}
    )
    rows = {row.id[:2]: row for row in fastcap_ray.restore_trainer(path, dry_run=True)}
    assert rows["05"].paths == ("trainer_cls.tracker",)
    assert rows["05"].argument == "trainer_cls"
    rest = {"run_config.callbacks[0].handle": 2}
    trainer = fastcap_ray.restore_trainer(path, replace={"trainer_cls.tracker": "new", **rest})
    assert type(trainer).tracker == "new"
    mine = make_class("live")
    trainer = fastcap_ray.restore_trainer(path, mine, replace=rest, into=tmp_path / "second")
    assert type(trainer) is mine


def test_paths_as_people_write_them(tmp_path, monkeypatch):
    trainer_experiment(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path / "exp")
    for path in ("~/exp", ".", tmp_path / "exp", "../exp/"):
        assert len(fastcap_ray.restore_trainer(path, dry_run=True)) == 2
    assert fastcap_ray.restore_trainer("../exp", replace=NEW, into="~/new")._restore_path == str(tmp_path / "new")


def test_another_file_system(tmp_path):
    trainer_experiment(tmp_path)
    there = pyarrow_fs.SubTreeFileSystem(str(tmp_path), pyarrow_fs.LocalFileSystem())
    rows = fastcap_ray.restore_trainer("exp", dry_run=True, storage_filesystem=there)
    assert [row.argument for row in rows] == ["train_loop_config", "run_config"]
    trainer = fastcap_ray.restore_trainer("exp", replace=NEW, storage_filesystem=there)
    assert trainer._restore_storage_filesystem is there
    check_copy(tmp_path / "exp", tmp_path / "exp-restored")
    trainer = fastcap_ray.restore_trainer(f"file://{tmp_path}/exp", replace=NEW, into=f"file://{tmp_path}/third")
    assert trainer._param_dict["run_config"].storage_path == f"file://{tmp_path}"
    check_copy(tmp_path / "exp", tmp_path / "third")


# --- parts ------------------------------------------------------------------------------------------------------------


def test_arguments_of_classes():
    assert restoring._arguments_of(Picky) == {"limit", "train_loop_config"}
    assert {"note", "train_loop_per_worker", "scaling_config", "metadata"} <= restoring._arguments_of(Mine)

    class Any:
        def __init__(self, x, **kwargs):
            pass

    class Free(Any):
        def __init__(self, y, **kwargs):
            pass

    assert restoring._arguments_of(Free) is None or restoring._arguments_of(Free) == {"x", "y"}


def test_following_paths_in_live_objects():
    from fastcap.paths import parse

    captured = {"k": [1, 2]}

    def function(x, y=5):
        return captured, loop

    part = functools.partial(function, 1, y=2)
    watch = Watch(function)
    cases = {
        "o[0]": (["a"], "a"), "o['x']": ({}, None), "o.handle": (watch, function), "o.none": (watch, None),
        "o.handle<closure captured>['k'][1]": (watch, 2), "o<default y>": (function, 5),
        "o<global loop>": (function, loop), "o<keyword y>": (part, 2), "o<arg 0>": (part, 1),
        "o<self>": (watch.__repr__, watch), "o<member 0>": ({1}, None),
        "o.number": (Dead, None), "o<closure nothing>": (function, None), "o[3]": ([], None),
    }  # fmt: skip
    for path, (value, expected) in cases.items():
        assert restoring._follow(value, parse(path).steps) == expected, path


def test_pickles_in_json():
    data = pickle.dumps([1]).hex().encode()
    text = b'{"a": "%b", "b": "{\\"c\\": \\"%b\\"}", "d": "800", "e": "8005zz", "f": "80051", "g": "8005' % (data, data)
    found = [text[start:end] for start, end in restoring._find_blobs(text)]
    assert found == [data, data]
