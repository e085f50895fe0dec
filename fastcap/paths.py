r"""The grammar of paths: how a report names a part of a payload.

A path is a root name followed by steps. It reads like Python as far as Python has a notation for the step, and each
path can be parsed back (`parse` and `Path.__str__` are inverses)::

    path   = root { step }
    root   = name | "<lambda>"
    step   = "." name            attribute: instance state, slot, class attribute, function attribute
           | "[" value "]"       dict key, or position in a list, tuple or array of objects
           | "<" word [ " " ( name | value ) ] ">"
    name   = identifier | string
    value  = Python literal: None, True, False, int, float (also inf, nan), str, bytes, tuple of values; or shortened
    shortened = ( string | bytes ) "…" 8 hex digits

The words are::

    <closure x>     free variable of a function        <self>        object of a bound method
    <global x>      global name a function uses        <base 0>      base class of a class pickled by value
    <default x>     default of parameter x             <member 3>    member of a set, in stream order
    <arg 0>         argument of a partial or reducer   <key 3>       an object that serves as key of the 3rd pair
    <keyword x>     keyword argument                   <value 3>     value of the 3rd pair, if the key has no literal
    <state>         state that is not a dict           <pickle 2>    one of several pickles in a file
    <discarded 0>   what was written only to be thrown away, because the object contains itself
    <callable>      a reducer pickled by value         <raw 0>       bytes in a file that are no opcodes
    <block 0>       columns of one type of a DataFrame
    <more>          what a report leaves out

A name that is not an identifier is written as a Python string literal (``cfg.'learning rate'``); strings longer than
`LONG` characters keep their beginning and a digest of the whole, so that different names stay different.
"""

from __future__ import annotations

import ast
import hashlib
import re
from dataclasses import dataclass
from types import EllipsisType
from typing import Union

LONG = 60
"""Characters (or bytes) from which on a string in a path is shortened."""

_KEPT = 40
_MAX_NESTING = 8
_ROOTS = ("<lambda>",)


@dataclass(frozen=True, slots=True)
class Shortened:
    """The beginning of a long string and a digest of all of it."""

    start: str | bytes
    digest: str  # 8 hex digits


Value = Union[bool, int, float, str, bytes, Shortened, tuple["Value", ...], None]  # noqa: UP007 - it names itself


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a path: ``kind`` is ``attr``, ``item`` or a word, ``value`` ``...`` for a word that stands alone."""

    kind: str
    value: Value | EllipsisType = ...

    def __str__(self) -> str:
        if self.kind == "attr":
            return "." + _format_name(self.value)
        if self.kind == "item":
            return f"[{_format_value(self.value)}]"
        if self.value is ...:
            return f"<{self.kind}>"
        return f"<{self.kind} {_format_name(self.value)}>"


@dataclass(frozen=True, slots=True)
class Path:
    """A root name and the steps below it."""

    root: str | Shortened
    steps: tuple[Step, ...] = ()

    def __str__(self) -> str:
        return format_root(self.root) + "".join(map(str, self.steps))


def shorten(text: str | bytes, *, salt: bytes = b"", limit: int = LONG) -> str | bytes | Shortened:
    """``text`` itself, or for a long one its beginning and a digest; ``salt`` tells apart what ``text`` does not."""
    if len(text) <= limit and not salt:
        return text
    data = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    return Shortened(text[:_KEPT], hashlib.blake2b(data + salt, digest_size=4).hexdigest())


def attr(name: str | Shortened) -> Step:
    """The step ``.name``, shortened where it is long."""
    return Step("attr", _short_name(name))


def item(value: Value) -> Step:
    """The step ``[value]``."""
    return Step("item", value)


def word(kind: str, value: Value | EllipsisType = ...) -> Step:
    """The step ``<kind value>``."""
    return Step(kind, _short_name(value) if isinstance(value, str) else value)


def is_literal(value: object, nesting: int = 0) -> bool:
    """Whether ``value`` can stand in a path as it is."""
    if value is None or isinstance(value, (bool, float, str, bytes, Shortened)):
        return True
    if isinstance(value, int):
        return value.bit_length() <= 512
    if isinstance(value, tuple):
        return nesting < 3 and len(value) <= 8 and all(is_literal(part, nesting + 1) for part in value)
    return False


def format_root(root: str | Shortened) -> str:
    """The root name as it begins a path."""
    return root if isinstance(root, str) and root in _ROOTS else _format_name(root)


def _short_name(name: str | Shortened) -> str | Shortened:
    if isinstance(name, Shortened):
        return name
    short = shorten(name)
    assert not isinstance(short, bytes)
    return short


def _format_name(value: Value | EllipsisType) -> str:
    if isinstance(value, str) and value.isidentifier() and value not in _CONSTANTS and value not in _NUMBERS:
        return value
    return _format_value(value)


def _format_value(value: Value | EllipsisType) -> str:
    if isinstance(value, Shortened):
        return f"{value.start!r}…{value.digest}"
    if isinstance(value, tuple):
        parts = ", ".join(map(_format_value, value))
        return f"({parts},)" if len(value) == 1 else f"({parts})"
    return repr(value)


# --- parsing ---------------------------------------------------------------------------------------------------------

_CONSTANTS: dict[str, bool | None] = {"None": None, "True": True, "False": False}
_NUMBERS = {"inf": float("inf"), "nan": float("nan")}
_STRING = re.compile(r"""b?(?:'(?:[^'\\\n]|\\.)*'|"(?:[^"\\\n]|\\.)*")""")
_NUMBER = re.compile(r"-?(?:inf\b|nan\b|\d+(?:\.\d+)?(?:e[+-]?\d+)?)", re.ASCII)
_DIGEST = re.compile(r"…([0-9a-f]{8})")
_WORD = re.compile(r"[a-z]+")


def parse(text: str) -> Path:
    """The path that ``text`` writes; ``ValueError`` says where it is not one."""
    parser = _Parser(text)
    root = parser.root()
    steps = []
    while parser.at < len(text):
        steps.append(parser.step())
    return Path(root, tuple(steps))


class _Parser:
    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0

    def fail(self, expected: str) -> ValueError:
        return ValueError(f"not a path: expected {expected} at character {self.at} of {self.text[:200]!r}")

    def take(self, token: str, expected: str) -> None:
        if not self.text.startswith(token, self.at):
            raise self.fail(expected)
        self.at += len(token)

    def root(self) -> str | Shortened:
        for name in _ROOTS:
            if self.text.startswith(name):
                self.at = len(name)
                return name
        return self.name()

    def step(self) -> Step:
        if self.text.startswith(".", self.at):
            self.at += 1
            return Step("attr", self.name())
        if self.text.startswith("[", self.at):
            self.at += 1
            value = self.value()
            self.take("]", "']'")
            return Step("item", value)
        self.take("<", "'.', '[' or '<'")
        match = _WORD.match(self.text, self.at)
        if match is None or match[0] in ("attr", "item"):
            raise self.fail("a word such as 'closure'")
        self.at = match.end()
        inner: Value | EllipsisType = ...
        if self.text.startswith(" ", self.at):
            self.at += 1
            inner = self.identifier()
            if inner is None or inner in _CONSTANTS or inner in _NUMBERS or self.text[self.at : self.at + 1] in "'\"":
                self.at -= len(inner or "")
                inner = self.value()
        self.take(">", "'>'")
        return Step(match[0], inner)

    def identifier(self) -> str | None:
        end = self.at
        while end < len(self.text) and ("a" + self.text[end]).isidentifier():
            end += 1
        found = self.text[self.at : end]
        if not found.isidentifier():
            return None
        self.at = end
        return found

    def name(self) -> str | Shortened:
        start = self.at
        found = self.identifier()
        if found is not None and found not in _CONSTANTS and found not in _NUMBERS:
            return found
        self.at = start
        value = self.value()
        if isinstance(value, str) or (isinstance(value, Shortened) and isinstance(value.start, str)):
            return value
        self.at = start
        raise self.fail("a name")

    def value(self, nesting: int = 0) -> Value:
        if self.text.startswith("(", self.at):
            return self.tuple(nesting)
        if match := _STRING.match(self.text, self.at):
            try:
                literal: str | bytes = ast.literal_eval(match[0])
            except (ValueError, SyntaxError) as error:
                raise self.fail("a string literal") from error
            self.at = match.end()
            if digest := _DIGEST.match(self.text, self.at):
                self.at = digest.end()
                return Shortened(literal, digest[1])
            return literal
        if match := _NUMBER.match(self.text, self.at):
            self.at = match.end()
            number = match[0]
            return int(number) if number.lstrip("-").isdecimal() and len(number) < 400 else float(number)
        for constant, meaning in _CONSTANTS.items():
            if self.text.startswith(constant, self.at):
                self.at += len(constant)
                return meaning
        raise self.fail("a Python literal")

    def tuple(self, nesting: int) -> tuple[Value, ...]:
        if nesting > _MAX_NESTING:
            raise self.fail(f"at most {_MAX_NESTING} nested tuples")
        self.at += 1
        parts: list[Value] = []
        while not self.text.startswith(")", self.at):
            parts.append(self.value(nesting + 1))
            if self.text.startswith(",", self.at):
                self.at += 1
                while self.text.startswith(" ", self.at):
                    self.at += 1
            elif not self.text.startswith(")", self.at):
                raise self.fail("',' or ')'")
        self.at += 1
        return tuple(parts)
