"""What a script of a user of Ray does, in a process and cluster of its own: `test_ray_restore` runs it.

``make`` runs experiments that fail after two steps, ``own`` restores copies of them in another cluster as Ray does it,
``restore`` restores them with fastcap and lets them go on. The last line of the output is JSON.
"""

import json
import logging
import os
import resource
import shutil
import sys
import tempfile
import time
import traceback

os.environ["RAY_TRAIN_V2_ENABLED"] = "0"
os.environ["RAY_TRAIN_ENABLE_V2_MIGRATION_WARNINGS"] = "0"
os.environ["RAY_AIR_NEW_OUTPUT"] = "0"
os.environ["TUNE_DISABLE_AUTO_CALLBACK_LOGGERS"] = "0"

import numpy
import ray
from ray import train, tune
from ray.train import Checkpoint, RunConfig, ScalingConfig
from ray.train.data_parallel_trainer import DataParallelTrainer

STEPS = 4
OLD = [1, 2, 3]  # what is in the object store


@ray.remote(num_cpus=0)
class Tracker:
    def __init__(self):
        self.seen = []

    def add(self, what):
        self.seen.append(what)

    def get(self):
        return self.seen


def make_handle(kind):
    if kind == "actor":
        return Tracker.remote()
    # Ids of objects count from 1 in each cluster: this one shall not be that of an object of the next cluster.
    for _ in range(1000):
        ray.put(0)
    return ray.put(OLD)


def use(handle, what):
    """What the code of the experiment does with a handle."""
    if isinstance(handle, ray.ObjectRef):
        assert ray.get(handle) == OLD
    else:
        ray.get(handle.add.remote(what))


def run_steps(handles, config, report, checkpoint):
    start = 0
    if "marker" in config:
        return run_without_checkpoints(handles, config["marker"], report)
    if checkpoint is not None:
        with checkpoint.as_directory() as folder, open(os.path.join(folder, "step.json")) as file:
            start = json.load(file)["step"] + 1
    for step in range(start, STEPS):
        for handle in handles:
            use(handle, step)
        with tempfile.TemporaryDirectory() as folder:
            with open(os.path.join(folder, "step.json"), "w") as file:
                json.dump({"step": step}, file)
            report({"step": step, "started": start}, checkpoint=Checkpoint.from_directory(folder))
        if step == 1 and checkpoint is None and not os.path.exists(config.get("once", "")):
            if "once" in config:
                open(config["once"], "w").close()
            raise RuntimeError("the cluster goes down")


def run_without_checkpoints(handles, marker, report):
    for step in range(STEPS):
        for handle in handles:
            use(handle, step)
        report({"step": step, "started": 0})
        if step == 1 and not os.path.exists(marker):
            with open(marker, "w"):
                raise RuntimeError("the cluster goes down")


class Watch(tune.Callback):
    """A callback with a handle, which is in its state as well."""

    def __init__(self, handle):
        self.handle = handle

    def on_trial_result(self, iteration, trials, trial, result, **info):
        use(self.handle, f"callback {result['step']}")

    def get_state(self):
        return {"handle": self.handle}

    def set_state(self, state):
        self.handle = state["handle"]


class ClassWatch(tune.Callback):
    """A callback with a handle that belongs to its class."""

    handle = None

    def on_trial_result(self, iteration, trials, trial, result, **info):
        use(type(self).handle, f"class {result['step']}")


class MyTrainer(DataParallelTrainer):
    """A Trainer with an argument of its own, and a handle that belongs to its class."""

    handle = None

    def __init__(self, *args, note="", **kwargs):
        self.note = note
        super().__init__(*args, **kwargs)


def make_loop(handle):
    def loop(config):
        handles = [each for each in (handle, MyTrainer.handle, config.get("handle")) if each is not None]
        run_steps(handles, config, train.report, train.get_checkpoint())

    return loop


def make_trainable(handle):
    def trainable(config):
        handles = [each for each in (handle, config.get("handle")) if each is not None]
        run_steps(handles, config, tune.report, tune.get_checkpoint())

    return trainable


def make_stop(handle):
    def stop(trial_id, result):
        use(handle, f"stop {result['step']}")
        return False

    return stop


def arguments(case, handles):
    """The arguments of an experiment, with handles in some places."""
    which, places = case["which"], case["places"]
    at = {place: handles[place] if place in places else None for place in ("config", "closure", "callback", "class")}
    callbacks = [Watch(at["callback"])] if at["callback"] is not None else []
    if which == "trainer":
        MyTrainer.handle = at["class"]
        config = {"lr": 0.1} if at["config"] is None else {"handle": at["config"], "lr": 0.1}
        if "megabytes" in case:
            config["data"] = numpy.zeros(case["megabytes"] << 17)
            config["marker"] = case["marker"]
        return {
            "train_loop_per_worker": make_loop(at["closure"]), "train_loop_config": config,
            "scaling_config": ScalingConfig(num_workers=1), "run_config": RunConfig(callbacks=callbacks),
            "note": "mine",
        }  # fmt: skip
    ClassWatch.handle = at["class"]
    if at["class"] is not None:
        callbacks.append(ClassWatch())
    space = {"lr": tune.grid_search([0.1])}
    if "trials" in case:
        space = {"lr": tune.grid_search([0.1 * k for k in range(case["trials"])]), "once": case["once"]}
    if at["config"] is not None:
        space["handle"] = at["config"]
    stop = make_stop(at["closure"]) if at["closure"] is not None else None
    return {
        "trainable": make_trainable(None), "param_space": space,
        "run_config": tune.RunConfig(
            callbacks=callbacks, stop=stop, failure_config=tune.FailureConfig(fail_fast="trials" in case)
        ),
        "tune_config": tune.TuneConfig(max_concurrent_trials=1),
    }  # fmt: skip


def make(folder, case):
    which = case["which"]
    handles = {place: make_handle(kind) for place, kind in zip(case["places"], case["kinds"])}
    given = arguments(case, handles)
    given["run_config"].name, given["run_config"].storage_path = case["name"], folder
    experiment = MyTrainer(**given) if which == "trainer" else tune.Tuner(**given)
    return fit(experiment)


def fit(experiment):
    """What running an experiment ended in."""
    try:
        found = experiment.fit()
    except Exception as error:
        return {"error": "".join(traceback.format_exception(error))}
    results = [found] if hasattr(found, "metrics") else list(found)
    errors = [str(each.error) for each in results if each.error is not None]
    return {
        "error": "\n".join(errors),
        "metrics": [each.metrics for each in results],
        "paths": [r.path for r in results],
    }


class Messages(logging.Handler):
    """Keeps what Ray logs, with exceptions."""

    def __init__(self):
        super().__init__(logging.ERROR)
        self.texts = []

    def emit(self, record):
        self.texts.append(logging.Formatter().format(record))


def handle_in(experiment, which, place):
    """The handle in a place of an experiment that Ray has restored."""
    if which == "trainer":
        given = experiment._param_dict
        loop = given["train_loop_per_worker"]
        if place == "config":
            return given["train_loop_config"]["handle"]
        if place == "closure":
            return loop.__closure__[loop.__code__.co_freevars.index("handle")].cell_contents
        return given["run_config"].callbacks[0].handle if place == "callback" else loop.__globals__["MyTrainer"].handle
    if place == "config":
        return experiment.get_results()[0].config["handle"]
    run_config = experiment._local_tuner.get_run_config()
    if place == "closure":
        return run_config.stop.__closure__[0].cell_contents
    return run_config.callbacks[0].handle


def restore_as_ray_does(folder, case):
    """How Ray's own restore of a copy ends, and what was logged meanwhile.

    Where there are only references it loads; that the experiment does not end then is not waited for.
    """
    path = os.path.join(folder, f"{case['name']}-own")
    shutil.copytree(os.path.join(folder, case["name"]), path)
    messages = Messages()
    logging.getLogger("ray.tune").addHandler(messages)
    try:
        if case["which"] == "trainer":
            experiment = MyTrainer.restore(path)
        else:
            experiment = tune.Tuner.restore(path, make_trainable(None), resume_errored=True)
        if set(case["kinds"]) == {"ref"}:
            for place in case["places"]:
                ray.get(handle_in(experiment, case["which"], place), timeout=60)
        said = fit(experiment)
    except Exception as error:
        said = {"error": "".join(traceback.format_exception(error))}
    finally:
        logging.getLogger("ray.tune").removeHandler(messages)
    return {**said, "logged": "\n".join(messages.texts)}


def restore(folder, case):
    import fastcap
    import fastcap.ray

    which, places, kinds = case["which"], case["places"], case["kinds"]
    path = os.path.join(folder, case["name"])
    start = fastcap.ray.restore_trainer if which == "trainer" else fastcap.ray.restore_tuner
    handles = {place: make_handle(kind) for place, kind in zip(places, kinds)}
    began = time.perf_counter()
    said = {"dry": [[row.kind, row.argument, list(row.paths), row.required] for row in start(path, dry_run=True)]}
    said["dry_seconds"] = time.perf_counter() - began
    given = arguments(case, handles)
    options = {"resume_errored": True, "trainable": given["trainable"]} if which == "tuner" else {}
    try:
        start(path, **options)
    except fastcap.NotRestored as error:
        said["refused"] = str(error)
    if case.get("by") == "path":
        known = [row[2][0] for row in said["dry"]]
        options["replace"] = {
            next(path for path in known if path.endswith(case["ends"][place])): handle
            for place, handle in handles.items()
        }  # fmt: skip
    elif case.get("by") == "function":
        by_kind = {"ActorHandle": [], "ObjectRef": []}
        for handle in handles.values():
            by_kind["ObjectRef" if isinstance(handle, ray.ObjectRef) else "ActorHandle"].append(handle)
        options["handles"] = lambda dead: by_kind[dead.kind][0]
    else:
        owner = {"config": "train_loop_config", "closure": "train_loop_per_worker", "callback": "run_config"}
        if which == "tuner":
            owner = {"config": "param_space", "closure": "run_config", "callback": "run_config", "class": "run_config"}
        options.update({owner[place]: given[owner[place]] for place in places if place in owner})
        if which == "trainer" and "class" in places:
            options["trainer_cls"] = MyTrainer
    began = time.perf_counter()
    experiment = start(path, **options)
    said["restore_seconds"] = time.perf_counter() - began
    said["restore_peak"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    said.update(fit(experiment))
    said["note"] = getattr(experiment, "note", None)
    said["seen"] = {
        place: ray.get(handle.get.remote())
        for place, handle in handles.items()
        if not isinstance(handle, ray.ObjectRef)
    }
    return said


def main():
    action, folder, cases = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
    began = time.perf_counter()
    ray.init(
        "local",
        num_cpus=2,
        object_store_memory=200_000_000,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
    )
    said = {}
    for case in cases:
        if action == "make":
            said[case["name"]] = make(folder, case)
        elif action == "own":
            said[case["name"]] = restore_as_ray_does(folder, case)
        else:
            said[case["name"]] = restore(folder, case)
    ray.shutdown()
    said["seconds"] = time.perf_counter() - began
    print("\n" + json.dumps(said, default=str))


if __name__ == "__main__":
    main()
