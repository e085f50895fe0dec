"""Thresholds of a project: the table ``[tool.fastcap]`` of its pyproject.toml."""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from fastcap.comparison import Growth, parse_growth
from fastcap.errors import FastcapError
from fastcap.report import parse_size

_CODE = re.compile(r"FC\d{0,3}")


class ConfigError(FastcapError, ValueError):
    """A pyproject.toml that cannot be used; the message names the file and the key."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What ``[tool.fastcap]`` says; sizes are in bytes, None is what it does not say."""

    max_size: int | None = None
    min_size: int | None = None
    max_growth: Growth | None = None
    select: tuple[str, ...] = ()  # codes of findings or beginnings of codes; empty: all
    ignore: tuple[str, ...] = ()
    file: str | None = None  # the pyproject.toml they come from

    def wants(self, code: str) -> bool:
        """Whether findings of this code are asked for: the longest beginning decides, ``ignore`` if both have it."""
        selected = max((len(start) for start in self.select if code.startswith(start)), default=-1)
        ignored = max((len(start) for start in self.ignore if code.startswith(start)), default=-1)
        return ignored < selected if self.select else ignored < 0


def find_settings(folder: str | os.PathLike[str]) -> Settings:
    """The settings for ``folder``: of the closest pyproject.toml, there or above, that has a ``[tool.fastcap]``.

    Raises `ConfigError` for one that is damaged or says something else than `Settings` can hold.
    """
    start = Path(folder).absolute()
    for parent in (start, *start.parents):
        settings = _read_settings(parent / "pyproject.toml")
        if settings is not None:
            return settings
    return Settings()


def _read_settings(path: Path) -> Settings | None:
    """The settings in one file; None if there is no such file or it has no ``[tool.fastcap]``."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    if b"fastcap" not in data:
        return None
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        document = tomllib.loads(data.decode())
    except ValueError as error:
        raise ConfigError(f"{path} is not TOML: {error}") from error
    tool = document.get("tool")
    table = tool.get("fastcap") if isinstance(tool, dict) else None
    if table is None:
        return None
    if not isinstance(table, dict):
        raise ConfigError(f"{path}: tool.fastcap is no table")
    found: dict[str, Any] = {}
    for key, value in table.items():
        read = _READERS.get(key)
        if read is None:
            close = get_close_matches(key, _READERS, n=1)
            hint = f"did you mean {close[0]}?" if close else f"it may have {', '.join(_READERS)}"
            raise ConfigError(f"{path}: [tool.fastcap] has an unknown key {key!r}: {hint}")
        try:
            found[key.replace("-", "_")] = read(value)
        except ValueError as error:
            raise ConfigError(f"{path}: {key} of [tool.fastcap]: {error}") from error
    return Settings(**found, file=str(path))


def _text(value: object) -> str:
    if isinstance(value, str):
        return value
    if type(value) is int:
        return str(value)
    raise ValueError(f"{value!r} is neither a string nor a whole number")


def _codes(value: object) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise ValueError(f'{value!r} is no list of codes: write ["FC101", "FC2"]')
    for code in value:
        if not isinstance(code, str) or not _CODE.fullmatch(code):
            raise ValueError(f"{code!r} is neither a code, such as FC101, nor the beginning of one")
    return tuple(value)


_READERS = {
    "max-size": lambda value: parse_size(_text(value)),
    "min-size": lambda value: parse_size(_text(value)),
    "max-growth": lambda value: parse_growth(_text(value)),
    "select": _codes,
    "ignore": _codes,
}
"""Key of ``[tool.fastcap]`` -> what makes a field of `Settings` of its value; a ``ValueError`` says why it cannot."""
