"""The kinds of findings: stable codes, how bad they are, what they mean and what to write instead.

`RULES` is the one table: docs/rules.md and ``fastcap rule CODE`` are made from it. What finds them is in
`fastcap.findings`, `fastcap.portability` and `fastcap.waste`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

ERROR, WARNING, NOTE = "error", "warning", "note"


@dataclass(frozen=True, slots=True)
class Rule:
    """A kind of finding. ``replacement`` is the template of the line to write instead, for the documentation."""

    code: str
    severity: str  # "error", "warning" or "note"; a finding may be milder or worse where the explanation says so
    title: str
    explanation: str
    replacement: str


RULES: Final[Mapping[str, Rule]] = {
    rule.code: rule
    for rule in (
        Rule(
            "FC101", ERROR, "object that cannot be pickled",
            "Pickling raises at this object: a lock, socket, file, generator, thread, connection, an object whose own "
            "__reduce__ or __getstate__ raises. The message has the exception. Where the object sits inside an "
            "instance of the standard library, such as the lock of a queue.Queue, that instance is named. "
            "All such objects are found in one pass: in the place of each the analysis writes a short stand-in, which "
            "is why the sizes of a report with this finding are those of a payload that cannot exist.",
            "create it where it is used, or leave it out of the state: "
            'def __getstate__(self): return {k: v for k, v in self.__dict__.items() if k != "lock"}',
        ),
        Rule(
            "FC102", ERROR, "pickling ended before its end",
            "The pickler could not go on, so that nothing is known of what would have come after: nesting without an "
            "end (an object whose reduce value contains a new object of the same kind, and so forth).",
            "give the class a __reduce__ whose parts get smaller",
        ),
        Rule(
            "FC201", WARNING, "Ray actor handle",
            "An actor handle is only good in the cluster in which the actor lives. In another cluster loading the "
            "pickle fails (Ray 2.60: AssertionError: Expected str or bytes, got <class 'NoneType'>). In a file this is "
            "an error: files outlive clusters. fastcap finds handles without asking Ray to serialize them, so their "
            "size is an estimate.",
            'pass a name and look the actor up where it is used: tracker = ray.get_actor("tracker")',
        ),
        Rule(
            "FC202", WARNING, "Ray object reference",
            "An object reference loads anywhere, and then ray.get on it raises OwnerDiedError or ObjectLostError, or "
            "waits: the process that owns the object is gone, or part of another cluster. In a file this is an error.",
            "pickle the value, ray.get(ref), or the path of a file that holds it",
        ),
        Rule(
            "FC203", WARNING, "name that is looked up in __main__",
            "The pickle says __main__.Name and holds no code. It loads only in a process whose main script defines "
            "that name; any other raises AttributeError: Can't get attribute 'Name' on <module '__main__'>.",
            "move the class or function to a module that is installed where the pickle is loaded, or pickle with "
            "cloudpickle, which sends it along",
        ),
        Rule(
            "FC204", WARNING, "name in a module that cannot be imported",
            "The pickle refers to a module by name that no import statement can find: it was made by a program, or is "
            "not installed here (when a file is scanned). Loading raises ModuleNotFoundError.",
            "cloudpickle.register_pickle_by_value(module)",
        ),
        Rule(
            "FC205", NOTE, "name in a local module",
            "The class or function goes by reference to a module that is neither in the standard library nor in "
            "site-packages. Where that file is not on the import path, loading raises ModuleNotFoundError. Fine if the "
            "job ships its working directory.",
            "cloudpickle.register_pickle_by_value(module), or install the module on the workers",
        ),
        Rule(
            "FC206", WARNING, "tensor on a GPU",
            "The tensor's bytes are copied from the device, and loading puts them on the device with the same number. "
            "Where there is none: RuntimeError: Attempting to deserialize object on a CUDA device.",
            "tensor.cpu()",
        ),
        Rule(
            "FC207", WARNING, "memory-mapped array",
            "What is on disk, and would be read page by page, is read and written out as a whole; it loads as an array "
            "in memory that no file stands behind.",
            "pickle the file's name, and open it where it is used: np.load(path, mmap_mode='r')",
        ),
        Rule(
            "FC208", WARNING, "open file that is pickled by its content",
            "cloudpickle reads the whole text file and sends its content; it loads as io.StringIO, not as a file.",
            "pickle the file's name, and open it where it is used",
        ),
        Rule(
            "FC209", NOTE, "absolute local path",
            "A path of this machine. On another one the file need not be there: FileNotFoundError when it is opened.",
            "a path on shared storage, or one relative to the job's working directory",
        ),
        Rule(
            "FC301", WARNING, "big capture",
            "Code drags this object along: it is pickled with the function or class, each time that is sent. How it "
            "got in (closure, global, default argument, self) is in the message.",
            "Ray: ref = ray.put(x) outside, x = ray.get(ref) inside; or load the data inside the function",
        ),
        Rule(
            "FC302", WARNING, "self captured where an attribute is used",
            "The function reads only some attributes of self, which are small, but captures all of it.",
            "x = self.x before the function, and x instead of self.x in it",
        ),
        Rule(
            "FC303", WARNING, "same bytes twice",
            "Two buffers of the payload hold the same bytes, but are different objects, so that pickle writes both.",
            "let both names refer to one object: b = a",
        ),
        Rule(
            "FC304", WARNING, "broadcast array",
            "The array is a view in which the same memory is seen many times (a stride of 0). Pickle writes every "
            "element.",
            "pickle the small array, and broadcast it where it is used: np.broadcast_to(x, shape)",
        ),
        Rule(
            "FC305", WARNING, "slice of a tensor that carries the whole storage",
            "A tensor is pickled with its whole storage, of which this one uses a small part.",
            "tensor.clone()",
        ),
        Rule(
            "FC306", WARNING, "slice of Arrow data that carries its parent",
            "A slice of an Arrow array or table is pickled with the buffers of what it was cut from.",
            "pa.concat_arrays([x]); for a table x.take(list(range(len(x))))",
        ),
        Rule(
            "FC307", NOTE, "array of objects",
            "The array has dtype object: its elements are pickled one by one, as Python objects.",
            "x.astype(float), or whatever type the elements have",
        ),
        Rule(
            "FC308", NOTE, "list of floats",
            "Each element is pickled on its own, and made as an object when it is loaded. An array takes fewer bytes "
            "and loads at once.",
            "np.asarray(x)",
        ),
        Rule(
            "FC309", NOTE, "float64 values that fit float32",
            "All values of the sample that was looked at are exactly representable in float32: half the bytes do.",
            "x.astype(np.float32)",
        ),
        Rule(
            "FC310", NOTE, "code of an importable module by value",
            "The class or function belongs to a module that can be imported, and yet its code is pickled: it is "
            "registered with cloudpickle.register_pickle_by_value. Workers that have it installed do not need that.",
            "cloudpickle.unregister_pickle_by_value(module)",
        ),
        Rule(
            "FC311", WARNING, "big global behind helpers",
            "A function drags in another one that it calls, and that one the data it uses. The function itself does "
            "not mention the data.",
            "give the helper the data as an argument, or load it inside the helper",
        ),
        Rule(
            "FC312", NOTE, "exported twice by Ray Tune",
            "Tune registers a trainable, and each trial exports it as an actor class again: with num_samples >= 2 "
            "everything that it captures goes to Ray's key-value store twice.",
            "tune.with_parameters(train, data=data): the data goes to the object store, once",
        ),
    )
}  # fmt: skip


def describe_rules() -> str:
    """The documentation of all rules, in Markdown."""
    lines = [
        "# Rules",
        "",
        "What `fastcap analyze` reports under *Findings*. `fastcap rule CODE` prints one of them; `--select` and",
        "`--ignore` take codes or the beginnings of codes. This page is made from the table in `fastcap/rules.py`.",
        "",
        "| code | severity | what |",
        "|---|---|---|",
        *(f"| [{rule.code}](#{rule.code.lower()}) | {rule.severity} | {rule.title} |" for rule in RULES.values()),
    ]
    for rule in RULES.values():
        lines += ["", f"## {rule.code}", "", describe_rule(rule.code)]
    return "\n".join(lines) + "\n"


def describe_rule(code: str) -> str:
    """One rule in a few sentences; ``KeyError`` if there is none with this code."""
    rule = RULES[code]
    return f"**{rule.title}** ({rule.severity})\n\n{rule.explanation}\n\nInstead: {rule.replacement}"
