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
            "in the class: a __reduce__ whose parts get smaller",
        ),
        Rule(
            "FC103", WARNING, "nesting too deep for cloudpickle",
            "cloudpickle's pickler calls itself for each level, and raises at the recursion limit (in Python 3.12 and "
            "later at a fixed one for C code): PicklingError: Could not pickle object as excessively deep recursion "
            "required. fastcap's does not: fastcap.dumps and an installed fastcap write such an object, and anything "
            "loads it. The path is where the nesting begins. Depths near the limit are not reported: how near depends "
            "on the depth of the call that pickles.",
            'fastcap.install("cloudpickle"), or a flat structure: a list of nodes and the numbers of their neighbours',
        ),
        Rule(
            "FC201", WARNING, "Ray actor handle",
            "An actor handle is only good in the cluster in which the actor lives. In another cluster loading the "
            "pickle fails (Ray 2.60: AssertionError: Expected str or bytes, got <class 'NoneType'>), and so it does "
            "where Ray is not started (RaySystemError). In a file this is an error: files outlive clusters. fastcap "
            "finds handles without asking Ray to serialize them, so their size is an estimate.",
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
            "Where there is none: RuntimeError: Attempting to deserialize object on a CUDA device. A torch.device is a "
            "note: it loads, and fails where it is used.",
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
            "FC210", ERROR, "class that cannot be rebuilt",
            "The class goes by value: cloudpickle makes an empty class of its name, bases and metaclass, and sets its "
            "attributes. That raises on load where the class statement gives an argument (class A(Base, key=1)) that "
            "__init_subclass__ or the metaclass cannot do without, where a slot is private (__slots__ = ('__x',)), "
            "where the class is one of C that its module does not have under its name, and where from Python 3.11 on a "
            "Flag has members, but none that is a single bit.",
            "a default for the argument, or move the class to a module that workers have: it goes by name then",
        ),
        Rule(
            "FC211", WARNING, "state that pickling leaves out",
            "The object loads without a part of it: aliases of an enum that goes by value (from Python 3.11 on also "
            "members of a Flag that are no single bit), attributes of an instance of a subclass of numpy.ndarray, the "
            ".grad of a torch tensor (a note, for that is often meant).",
            "move the enum to a module that workers have; give the array's class a __reduce__ and __setstate__",
        ),
        Rule(
            "FC212", WARNING, "submodule that loading does not import",
            "A function by value uses package.submodule, and the package goes by its name. cloudpickle has the "
            "submodule imported on load only if the function itself mentions it, not if a function nested in it does, "
            "or getattr(package, name) (a note). Not reported where the package's own __init__.py imports it.",
            "import package.submodule inside the function",
        ),
        Rule(
            "FC213", WARNING, "variable that is no longer shared",
            "Two functions share a nonlocal variable, or a module that goes by value and its functions share a global, "
            "and one of them writes it. After loading each has its own, and does not see what the other writes.",
            "keep the value in an object that both hold: state = {'total': 0}",
        ),
        Rule(
            "FC214", WARNING, "object of this process or machine",
            "What is pickled is a name or number that means something only here: shared memory, a proxy of a "
            "multiprocessing.Manager, a pipe's file descriptor, what multiprocessing's own pickler writes for tensors "
            "and descriptors, a TemporaryDirectory; or os.environ with all its values. In a file this is an error, for "
            "files outlive processes. What is a plain value cannot be told from any other: process ids, thread ids, "
            "numbers of file descriptors, id(x), ports and host names as int or str are not reported. Most other "
            "objects of a process cannot be pickled at all: see FC101.",
            "the value instead of the handle: bytes(memory.buf), proxy._getvalue()",
        ),
        Rule(
            "FC215", WARNING, "code of another Python",
            "A file with functions by value that another Python version made, whose code objects have other fields: "
            "loading raises TypeError: code() argument 13 must be str, not int. Bytecode differs between all minor "
            "versions; 3.11 and later cannot be told apart here, and running code of one in another crashes.",
            "load it with the Python that made it, or pickle it again",
        ),
        Rule(
            "FC301", WARNING, "big capture",
            "Code drags this object along: it is pickled with the function or class, each time that is sent. How it "
            "got in (closure, global, default argument, self) is in the message.",
            "Ray: ref = ray.put(x) outside, x = ray.get(ref) inside; or load the data inside the function",
        ),
        Rule(
            "FC302", WARNING, "self captured where an attribute is used",
            "The function reads only some attributes of self, which are small, but captures all of it; or a method is "
            "captured, which brings its object along. In a live object this is read off the bytecode: nothing but "
            "those attributes is read, no method is called, self is not passed on. In a file only names are known, so "
            "that self may be passed on nonetheless.",
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
        Rule(
            "FC313", NOTE, "docstrings and line tables",
            "A good part of the payload is documentation and tables for tracebacks of the functions and classes that "
            "go by value: at least a quarter, and 16 KiB or more.",
            "install the code on the workers; or pickle under python -OO (no docstrings; no assert statements either) "
            "and -X no_debug_ranges (shorter tables, from Python 3.11 on)",
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
