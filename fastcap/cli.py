"""The command ``fastcap``: reading targets, writing reports, exit codes. What it prints is made in `fastcap.render`."""

from __future__ import annotations

import fcntl
import importlib
import json
import os
import re
import shutil
import stat
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout
from dataclasses import replace
from difflib import get_close_matches
from typing import IO, TYPE_CHECKING, Any

import click

import fastcap
from fastcap.comparison import Growth, parse_growth
from fastcap.config import Settings, find_settings
from fastcap.errors import FastcapError, PayloadError
from fastcap.paths import parse as parse_path
from fastcap.render import clean
from fastcap.report import Report, ViewOptions, format_size, parse_size, read_report
from fastcap.targets import Target, TargetError, UserCodeError, imported, locate_error, parse_target
from fastcap.writing import write_all, written_beside

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from fastcap.editing import Editor
    from fastcap.editing import Summary as EditSummary

FINE, OVER_BUDGET, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130

_PIPE_WIDTH = 100  # columns where there is no terminal to ask
_PROGRESS_DELAY = 1.0  # seconds
_BUDGET = "--max-size"


def _size(text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise click.BadParameter(str(error)) from error  # click would not show the message of a ValueError


def _growth(text: str) -> Growth:
    try:
        return parse_growth(text)
    except ValueError as error:
        raise click.BadParameter(str(error)) from error


def _replacement(text: str) -> tuple[str, Any]:
    from fastcap.editing import parse_replacement

    try:
        return parse_replacement(text)
    except ValueError as error:
        raise click.BadParameter(str(error)) from error


@click.group(
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Exit codes: 0 fine, 1 over budget, 2 usage or input error, 130 interrupted.",
)
@click.version_option(fastcap.__version__, message="%(prog)s %(version)s")
@click.pass_context
def cli(ctx: click.Context) -> None:
    """What is in this pickle, why is it there, and how to get it out.

    \b
    Examples:
      fastcap analyze trainer.pkl
      fastcap analyze train.py:train_func --flavor ray.cloudpickle
      fastcap analyze mypackage.jobs:main --max-size 10MiB
      fastcap diff old.pkl new.pkl
      fastcap edit trainer.pkl -o small.pkl --drop "obj.data"
    """
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())
        ctx.exit(BAD_INPUT)


def _codes(text: str) -> tuple[str, ...]:
    from fastcap.rules import RULES

    codes = tuple(code.strip().upper() for code in text.split(",") if code.strip())
    for code in codes:
        if not any(known.startswith(code) for known in RULES):
            raise click.BadParameter(f"no rule {code!r}: the rules are {', '.join(RULES)}")
    return codes


@cli.command()
@click.argument("target_text", metavar="TARGET")
@click.option(
    "--format", "-f", "form", type=click.Choice(["text", "json", "folded"]), default="text", show_default=True
)
@click.option("--output", "-o", metavar="FILE", help="Write the report there instead of to standard output.")
@click.option("--depth", type=click.IntRange(min=0), metavar="N", help="Levels of the tree below the root.")
@click.option("--top", type=click.IntRange(min=1), metavar="N", help="Rows below each parent.")
@click.option("--sort", type=click.Choice(["retained", "self", "subtree"]), help="Order of rows.  [default: retained]")
@click.option("--min-size", type=_size, metavar="SIZE", help="Sum up rows smaller than this.")
@click.option("--max-size", type=_size, metavar="SIZE", help="Exit with 1 if the payload is bigger, or cannot be made.")
@click.option("--select", multiple=True, type=_codes, metavar="CODES", help="Report these findings only: FC2,FC301.")
@click.option("--ignore", multiple=True, type=_codes, metavar="CODES", help="Leave these findings out.")
@click.option(
    "--flavor",
    metavar="NAME",
    help="Whose pickler, for objects: cloudpickle, ray.cloudpickle, joblib.externals.cloudpickle, "
    "pyspark.cloudpickle.  [default: cloudpickle]",
)
@click.option("--protocol", type=click.IntRange(0, 5), metavar="N", help="Pickle protocol, for objects.")
@click.option("--no-progress", is_flag=True, help="No progress bar on standard error.")
@click.option("--traceback", "show_traceback", is_flag=True, help="If TARGET raises, show where.")
@click.pass_context
def analyze(
    ctx: click.Context,
    target_text: str,
    form: str,
    output: str | None,
    depth: int | None,
    top: int | None,
    sort: str | None,
    min_size: int | None,
    max_size: int | None,
    select: tuple[tuple[str, ...], ...],
    ignore: tuple[tuple[str, ...], ...],
    flavor: str | None,
    protocol: int | None,
    no_progress: bool,
    show_traceback: bool,
) -> int:
    """Name the objects that hold a payload's bytes, and how they got in.

    TARGET is a pickle file, - for standard input, or an object: script.py:name or package.module:name, where name may
    have dots. Files are never executed. An object's module is imported, that is, run; of a script, everything but
    `if __name__ == "__main__":`. A report saved with --format json is shown again.

    Sizes: 10MiB, 10 MB, 512k, 1e6.

    \b
    Examples:
      fastcap analyze trainer.pkl --depth 3
      fastcap analyze train.py:trainer.fit --max-size 10MiB
      fastcap analyze payload.pkl --format folded -o payload.folded
      ssh host cat trainer.pkl | fastcap analyze - --format json
    """
    with _one_line_errors(show_traceback):
        target = parse_target(target_text)
        _check_output(output, target)
        settings = find_settings(os.getcwd())
        if select:
            settings = replace(settings, select=sum(select, ()))
        if ignore:
            settings = replace(settings, ignore=sum(ignore, ()))
        options = ViewOptions(
            depth=depth,
            top=top,
            sort=sort or "retained",  # type: ignore[arg-type]
            min_size=settings.min_size if min_size is None else min_size,
        )
        if target.kind in ("script", "module"):
            report = _analyze_object(target, options, flavor or "cloudpickle", protocol)
        else:
            given = {name for name, value in ctx.params.items() if value is not None}
            for name in ("flavor", "protocol"):
                if name in given:
                    raise TargetError(f"--{name} is for objects that are pickled now: {target} is a pickle already")
            view = [f"--{name.replace('_', '-')}" for name in ("depth", "top", "sort", "min_size") if name in given]
            report = _read_payload(target, options, view, progress=not no_progress)
        broken = report.unpicklable
        report = _select_findings(report, settings)
        budget, limit, source = _BUDGET, max_size, "the command line"
        if limit is None and settings.max_size is not None:
            budget, limit, source = "max-size", settings.max_size, settings.file or ""
        if limit is not None:
            report = report.with_budget(budget, limit, source)
        _write(_render(report, form, output, sort or "retained"), output)
        if limit is None:
            return FINE
        if broken:
            if form != "text" or output is not None:
                _say(f"{target} cannot be pickled: no payload, whatever its size may be")
            return OVER_BUDGET
        if report.payload_size <= limit:
            return FINE
        if form != "text" or output is not None:
            said = budget if max_size is not None else f"max-size of {source}:"
            _say(f"payload {format_size(report.payload_size)} is over {said} {format_size(limit)}")
        return OVER_BUDGET


@cli.command()
@click.argument("old_text", metavar="OLD")
@click.argument("new_text", metavar="NEW")
@click.option("--format", "-f", "form", type=click.Choice(["text", "json"]), default="text", show_default=True)
@click.option("--output", "-o", metavar="FILE", help="Write the comparison there instead of to standard output.")
@click.option("--top", type=click.IntRange(min=1), metavar="N", help="Changes shown.  [default: 30; JSON has all]")
@click.option("--max-growth", type=_growth, metavar="SIZE|N%", help="Exit with 1 if the payload grew by more.")
@click.option("--flavor", metavar="NAME", help="Whose pickler, for objects, as for analyze.")
@click.option("--protocol", type=click.IntRange(0, 5), metavar="N", help="Pickle protocol, for objects.")
@click.option("--no-progress", is_flag=True, help="No progress bar on standard error.")
@click.option("--traceback", "show_traceback", is_flag=True, help="If OLD or NEW raises, show where.")
def diff(
    old_text: str,
    new_text: str,
    form: str,
    output: str | None,
    top: int | None,
    max_growth: Growth | None,
    flavor: str | None,
    protocol: int | None,
    no_progress: bool,
    show_traceback: bool,
) -> int:
    """Show what grew, shrank, came and went from one payload to another, by path and by type.

    OLD and NEW are what analyze takes: pickle files, saved reports, - for standard input, or objects such as
    script.py:name. The changes add up to the difference of the payloads, exactly.

    
    Examples:
      fastcap diff old.pkl new.pkl
      fastcap diff report.json train.py:train_func --max-growth 10%
    """
    with _one_line_errors(show_traceback):
        settings = find_settings(os.getcwd())
        targets = [parse_target(text) for text in (old_text, new_text)]
        _check_output(output, *targets)
        if all(target.kind == "stdin" for target in targets):
            raise TargetError("OLD and NEW cannot both be standard input")
        objects = [target for target in targets if target.kind in ("script", "module")]
        for name, value in (("flavor", flavor), ("protocol", protocol)):
            if value is not None and not objects:
                raise TargetError(f"--{name} is for objects that are pickled now: OLD and NEW are pickles already")
        reports = [
            _analyze_object(target, ViewOptions(), flavor or "cloudpickle", protocol)
            if target in objects
            else _read_payload(target, ViewOptions(), (), progress=not no_progress)
            for target in targets
        ]
        from fastcap.comparison import compare
        from fastcap.render.diff import describe_growth, render_diff

        try:
            found = compare(*reports)
        except ValueError as error:
            raise TargetError(str(error)) from error
        if form == "json":
            _write(json.dumps(found.to_dict(), indent=2) + "\n", output)
        else:
            _write(render_diff(found, top=top, **_page_options(output)), output)
        limit = max_growth or settings.max_growth
        if limit is not None and reports[1].unpicklable:
            _say(f"{new_text} cannot be pickled: no payload, whatever its size may be")
            return OVER_BUDGET
        if limit is None or limit.allows(found.old_size, found.new_size):
            return FINE
        said = "--max-growth" if max_growth else f"max-growth of {settings.file}:"
        _say(f"payload {describe_growth(found)}, more than {said} {limit.text}")
        return OVER_BUDGET


@cli.command()
@click.argument("url", metavar="FOLDER")
@click.option("--drop", multiple=True, metavar="NAME", help="Remove this save first. May be given several times.")
@click.option("--dry-run", is_flag=True, help="Only say what would be removed.")
@click.option(
    "--wait", type=click.FloatRange(min=0), default=0.0, metavar="SECONDS",
    help="How long to wait for saves that are being written.",
)
def gc(url: str, drop: tuple[str, ...], dry_run: bool, wait: float) -> int:
    """Remove the parts in a FOLDER of fastcap.save that no save needs.

    FOLDER is a path, or a URL that fsspec knows. Nothing is removed while somebody saves there.
    """
    from fastcap.saving import gc as remove_parts

    with _one_line_errors(False):
        _check_output(None)
        try:
            report = remove_parts(url, drop=drop, dry_run=dry_run, wait=wait)
        except (FastcapError, ValueError, OSError) as error:
            raise _Failure(str(error)) from error
        done = "would remove" if dry_run else "removed"
        _write_stdout(
            f"{done} {_files(report.removed_count, report.removed_size)}, "
            f"kept {_files(report.kept_count, report.kept_size)}\n"
        )
    return FINE


def _files(count: int, size: int) -> str:
    return f"{count:,} file{'' if count == 1 else 's'} ({format_size(size)})"


@cli.command()
@click.argument("file_text", metavar="FILE")
@click.option("--output", "-o", metavar="OUT", help="Write the edited pickle there; - for standard output.")
@click.option("--in-place", is_flag=True, help="Put the edited pickle in the place of FILE.")
@click.option("--backup", is_flag=True, help="With --in-place: keep what was there as FILE.bak.")
@click.option("--dry-run", is_flag=True, help="Write nothing, only say what would be done.")
@click.option("--drop", "drops", multiple=True, metavar="PATH", help="Leave this part out.")
@click.option(
    "--replace", "replacements", multiple=True, type=_replacement, metavar="PATH=VALUE",
    help="Put something else in its place: JSON, or @FILE for the pickle in that file.",
)
@click.option("--drop-handles", is_flag=True, help="Put None in place of Ray's actor handles and object references.")
@click.option(
    "--keep-handles-as-placeholders", "placeholders", is_flag=True,
    help="Put fastcap.Unrestorable objects in their place.",
)
@click.option("--no-progress", is_flag=True, help="No progress bar on standard error.")
def edit(
    file_text: str,
    output: str | None,
    in_place: bool,
    backup: bool,
    dry_run: bool,
    drops: tuple[str, ...],
    replacements: tuple[tuple[str, Any], ...],
    drop_handles: bool,
    placeholders: bool,
    no_progress: bool,
) -> int:
    """Drop or replace parts of a pickle without loading it.

    FILE is a pickle, or - for standard input; nothing in it is executed. PATH is what analyze shows. What else refers
    to a part that is dropped keeps it. Closure variables, globals, defaults and arguments become None, everything else
    is gone. A compressed file is compressed again.

    \b
    Examples:
      fastcap edit trainer.pkl -o small.pkl --drop "obj.config['dataset']"
      fastcap edit trainer.pkl --in-place --backup --drop-handles
      fastcap edit model.pkl -o new.pkl --replace "obj['lr']=0.01" --replace "obj['scaler']=@scaler.pkl"
    """
    with _one_line_errors(False):
        target = parse_target(file_text)
        if target.kind not in ("file", "stdin"):
            raise TargetError(f"{target} is an object: edit takes the file of a pickle")
        if sum((output is not None, in_place, dry_run)) != 1:
            raise TargetError("say where the edited pickle goes: -o OUT, -o - or --in-place; or --dry-run")
        if backup and not in_place:
            raise TargetError("--backup is for --in-place: FILE itself stays as it is")
        if in_place and (target.kind != "file" or not os.path.isfile(target.where)):
            raise TargetError(f"--in-place is for files: {target} is none")
        if drop_handles and placeholders:
            raise TargetError("--drop-handles and --keep-handles-as-placeholders exclude each other")
        if not (drops or replacements or drop_handles or placeholders):
            raise TargetError("nothing to do: say what with --drop, --replace or --drop-handles")
        if output is not None:
            if target.kind == "file" and os.path.exists(output) and os.path.samefile(output, target.where):
                raise TargetError(f"-o {output} would overwrite FILE: --in-place does that")
            _check_output(output)
            if output == "-" and sys.stdout.isatty():
                raise TargetError("standard output is a terminal: name a file with -o")
        with _open(target) as file, _editor(target, file, progress=not no_progress) as editor:
            for path in drops:
                editor.drop(_path(path))
            for path, value in replacements:
                with _reading_piece(value):
                    editor.replace(path, value)
            if (drop_handles or placeholders) and not editor.drop_handles(placeholders=placeholders):
                _say(f"there are no handles of Ray in {target}")
            if dry_run:
                summary = editor.measure()
            else:
                with _progress_bar(str(target), wanted=not no_progress) as advance:
                    where = (target.where if in_place else output) or "-"
                    summary = _write_pickle(editor, where, backup=backup, progress=advance)
        _say_changes(summary, dry_run=dry_run)
        return FINE


@cli.command()
@click.argument("code", metavar="[CODE]", required=False)
def rule(code: str | None) -> int:
    """Explain a finding by its code, or list all of them."""
    from fastcap.rules import RULES, describe_rule

    if code is None:
        text = "\n".join(f"{each.code}  {each.severity:8} {each.title}" for each in RULES.values())
    elif code.upper() in RULES:
        text = f"{code.upper()} {describe_rule(code.upper()).replace('**', '')}"
    else:
        close = get_close_matches(code.upper(), RULES, n=3)
        raise click.BadParameter(
            f"no rule {code!r}" + (f": did you mean {' or '.join(close)}?" if close else ": fastcap rule lists them"),
            param_hint="CODE",
        )
    with _one_line_errors(False):
        _check_output(None)
        _write_stdout(f"{text}\n")
    return FINE


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line (``sys.argv`` by default) and return its exit code."""
    try:
        code = cli.main(arguments, prog_name="fastcap", standalone_mode=False)
        return code if isinstance(code, int) else FINE
    except click.UsageError as error:
        command = error.ctx.command_path if error.ctx else "fastcap"
        _say(f"{' '.join(error.format_message().split())} (see {command} --help)")
        return BAD_INPUT
    except _Failure as failure:
        _say(str(failure))
        return BAD_INPUT
    except (KeyboardInterrupt, click.Abort, _Interrupted):
        _say("interrupted")
        return INTERRUPTED


# ---- input


def _analyze_object(target: Target, options: ViewOptions, flavor: str, protocol: int | None) -> Report:
    from fastcap.analysis import analyze
    from fastcap.pickling import FLAVORS

    if flavor not in FLAVORS:
        raise TargetError(f"--flavor {flavor} is none of {', '.join(FLAVORS)}")
    try:
        importlib.import_module(flavor)
    except ImportError as error:
        raise TargetError(f"--flavor {flavor} cannot be used here: {error}") from error
    _say(f"importing {target.where}")
    # What the module prints is not part of the report.
    with redirect_stdout(sys.stderr), imported(target) as thing:
        try:
            root = target.name.rpartition(".")[2]
            report = analyze(thing, name=root, protocol=protocol, flavor=flavor, options=options)
            details = report.details  # while the objects and their modules are in place
        except FastcapError:
            raise
        except Exception as error:
            raise UserCodeError(f"cannot pickle {target}: {locate_error(error)}") from error
    note = f"imported {target.where}"
    if target.kind == "script":
        note += ' as __main__, without what is under `if __name__ == "__main__":`'
    return report.changed(target=target.name, notes=(*report.notes, note), make_details=lambda: details)


def _read_payload(target: Target, options: ViewOptions, view_options: Sequence[str], *, progress: bool) -> Report:
    """The report on a file or standard input, whether that is a pickle or a report saved as JSON."""
    with _open(target) as file:
        start = file.peek(1)[:1]  # type: ignore[attr-defined]
        if not start:
            raise TargetError(f"{target} is empty: there is no pickle to analyze")
        if start == b"{":  # no pickle begins with it: it is no opcode
            if view_options:
                raise TargetError(
                    f"{target} is a saved report: {view_options[0]} needs the pickle that it was made from"
                )
            try:
                return read_report(file)
            except ValueError as error:
                raise TargetError(f"{target} is neither a pickle nor a saved report: {error}") from error
        from fastcap.analysis import scan

        regular = stat.S_ISREG(os.fstat(file.fileno()).st_mode)
        with _progress_bar(str(target), wanted=progress) as advance:
            try:
                report = scan(target.where if regular else file, options=options, progress=advance)
                return report.changed(target=str(target))
            except PayloadError as error:
                raise TargetError(f"{target} is not a pickle that can be read: {error}{_guess_kind(file)}") from error


@contextmanager
def _open(target: Target) -> Iterator[IO[bytes]]:
    if target.kind == "stdin":
        if sys.stdin is None:
            raise TargetError("standard input is closed: pipe a pickle into it, or name a file")
        if sys.stdin.isatty():
            raise TargetError("standard input is a terminal: pipe a pickle into it, or name a file")
        yield sys.stdin.buffer
    else:
        with open(target.where, "rb") as file:
            yield file


@contextmanager
def _editor(target: Target, file: IO[bytes], *, progress: bool) -> Iterator[Editor]:
    """The editor of a pickle that has been opened."""
    from fastcap.editing import Editor

    if not file.peek(1):  # type: ignore[attr-defined]
        raise TargetError(f"{target} is empty: there is no pickle to edit")
    regular = stat.S_ISREG(os.fstat(file.fileno()).st_mode)
    with ExitStack() as stack:
        with _progress_bar(str(target), wanted=progress) as advance:
            try:
                opened = Editor(target.where if regular and target.kind == "file" else file, progress=advance)
                editor = stack.enter_context(opened)
            except PayloadError as error:
                raise TargetError(f"{target} is not a pickle that can be read: {error}{_guess_kind(file)}") from error
        yield editor


def _path(text: str) -> str:
    """A path as it is given on the command line."""
    try:
        return str(parse_path(text.strip()))
    except ValueError as error:
        raise TargetError(str(error)) from error


@contextmanager
def _reading_piece(value: Any) -> Iterator[None]:
    """Errors in a pickle that replaces something name its file."""
    try:
        yield
    except PayloadError as error:
        raise TargetError(f"{value.source} is not a pickle that can be read: {error}") from error


def _select_findings(report: Report, settings: Settings) -> Report:
    if not (settings.select or settings.ignore):
        return report
    details = report.details
    wanted = tuple(row for row in details.findings if settings.wants(row.code))
    return report.changed(make_details=lambda: replace(details, findings=wanted))


_KINDS = (
    (b"\x93NUMPY", "a numpy .npy file"),
    (b"PAR1", "a Parquet file"),
    (b"\x89HDF", "an HDF5 file"),
    (b"SQLite", "an SQLite database"),
)


def _guess_kind(file: IO[bytes]) -> str:
    if not file.seekable():
        return ""
    file.seek(0)
    start = file.read(16)
    return next((f"; it looks like {kind}" for magic, kind in _KINDS if start.startswith(magic)), "")


# ---- output


def _render(report: Report, form: str, output: str | None, sort: str) -> str:
    if form == "json":
        return json.dumps(report.to_dict(), indent=2) + "\n"
    if form == "folded":
        from fastcap.render.folded import render_folded

        return render_folded(report)
    from fastcap.render.text import render_text

    return render_text(report, sort=sort, **_page_options(output))


def _page_options(output: str | None) -> dict[str, Any]:
    """How text is laid out for a file, or for what standard output is."""
    from fastcap.render.layout import GLYPHS

    return {
        "width": shutil.get_terminal_size((_PIPE_WIDTH, 24)).columns if output is None else _PIPE_WIDTH,
        "color": output is None and _wants_color(sys.stdout),
        "unicode": output is not None or _can_encode(sys.stdout, GLYPHS),
        "base": os.getcwd(),
    }


def _wants_color(stream: IO[str] | None) -> bool:
    """By https://no-color.org and https://force-color.org; otherwise for terminals that are not dumb."""
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR"):
        return os.environ["FORCE_COLOR"] != "0"
    return stream is not None and stream.isatty() and os.environ.get("TERM") != "dumb"


def _can_encode(stream: IO[str] | None, text: str) -> bool:
    try:
        text.encode(getattr(stream, "encoding", None) or "utf-8")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def _check_output(output: str | None, *targets: Target) -> None:
    """Refuse what cannot be written before any work is done."""
    if output is None or output == "-":
        if sys.stdout is None:
            raise TargetError("standard output is closed: name a file with -o")
        return
    if not output:
        raise TargetError("-o needs the name of a file, or - for standard output")
    if os.path.isdir(output):
        raise TargetError(f"-o {output} is a directory: name a file in it")
    number = _descriptor(output)
    if number is not None:
        try:
            writable = fcntl.fcntl(number, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDONLY
        except OSError as error:
            raise TargetError(f"cannot write {output}: {error.strerror}") from error
        if not writable:
            raise TargetError(f"cannot write {output}: it is open for reading only")
    elif not os.path.exists(output) and not os.path.isdir(folder := os.path.dirname(os.path.realpath(output))):
        raise TargetError(f"-o {output}: there is no directory {folder}")
    for target in targets:
        if target.kind in ("file", "script") and os.path.exists(output) and os.path.samefile(output, target.where):
            raise TargetError(f"-o {output} would overwrite TARGET")


def _descriptor(path: str) -> int | None:
    """The open file that a path such as ``/dev/stdout`` or ``/dev/fd/63``, as shells give for ``>(…)``, stands for."""
    match = re.fullmatch(r"/dev/(?:fd/(\d{1,9})|stdout|stderr)|/proc/self/fd/(\d{1,9})", path)
    if match is None:
        return None
    return int(match[1] or match[2] or (1 if path == "/dev/stdout" else 2))


def _write(text: str, output: str | None) -> None:
    if output is None or output == "-":
        _write_stdout(text)
        return
    data = text.encode("utf-8", "backslashreplace")
    try:
        number = _descriptor(output)
        if number is not None:
            # Not opened anew: that would empty a file to which the shell appends, and fail for a socket.
            _write_whole(os.dup(number), data)
        elif os.path.exists(output) and not os.path.isfile(output):
            _write_whole(os.open(output, os.O_WRONLY), data)
        else:
            with written_beside(output) as file:
                write_all(file, data)
    except BrokenPipeError:
        pass  # as for standard output
    except OSError as error:
        raise TargetError(f"cannot write {output}: {error.strerror}") from error


def _write_whole(descriptor: int, data: bytes) -> None:
    with open(descriptor, "wb") as file:
        file.write(data)


class _Output:
    """A file whose errors are told from those of reading."""

    def __init__(self, file: Any, name: str) -> None:
        self._file, self._name = file, name

    def write(self, data: bytes | memoryview) -> int:
        try:
            return self._file.write(data)  # type: ignore[no-any-return]
        except BrokenPipeError:
            raise
        except OSError as error:
            raise TargetError(f"cannot write {self._name}: {error.strerror}") from error


def _write_pickle(editor: Editor, where: str, *, backup: bool, progress: Any) -> EditSummary:
    """All of the edited pickle or, where that can be, nothing."""

    if where == "-":
        try:
            sys.stdout.flush()
            summary = editor.write(_Output(sys.stdout.buffer, "standard output"), progress)
            sys.stdout.buffer.flush()
        except BrokenPipeError:
            _abandon_stdout()
            return editor.measure()
        except TargetError:
            _abandon_stdout()
            raise
        return summary
    try:
        number = _descriptor(where)
        if number is not None or (os.path.exists(where) and not os.path.isfile(where)):
            descriptor = os.dup(number) if number is not None else os.open(where, os.O_WRONLY)
            with open(descriptor, "wb", buffering=0) as file:
                return editor.write(_Output(file, where), progress)
        with written_beside(where, backup=backup) as file:
            return editor.write(_Output(file, where), progress)
    except BrokenPipeError:
        return editor.measure()
    except FileExistsError as error:
        rather = ", or leave out --backup" if str(error.filename).endswith(".bak") else ""
        raise TargetError(f"{error.filename} exists already: move it away{rather}") from error
    except OSError as error:
        raise TargetError(f"cannot write {where}: {error.strerror}") from error


_SHOWN_CHANGES = 20


def _say_changes(summary: EditSummary, *, dry_run: bool) -> None:
    for change in summary.changes[:_SHOWN_CHANGES]:
        would = "would be " if dry_run else ""
        kept = f"still at {change.kept_at}" if change.kept_at else format_size(change.size)
        _say(f"{change.path} {would}{change.action}: {change.what}, {kept}")
    if len(summary.changes) > _SHOWN_CHANGES:
        _say(f"… and {len(summary.changes) - _SHOWN_CHANGES:,} more")
    if summary.unused_buffers:
        numbers = ", ".join(map(str, summary.unused_buffers[:10])) + ("…" if len(summary.unused_buffers) > 10 else "")
        _say(f"out-of-band buffers that are no longer used: {numbers}")
    said = "would be" if dry_run else "is now"
    packed = f", before it is compressed with {summary.compression}" if summary.compression else ""
    _say(
        f"the pickle {said} {format_size(summary.new_size, exact=True)} instead of "
        f"{format_size(summary.old_size, exact=True)}{packed}"
    )


def _write_stdout(text: str) -> None:
    """Nothing is said if the reader has gone away, as ``head`` does."""
    stream = sys.stdout
    try:
        stream.flush()
        stream.buffer.write(text.encode(stream.encoding or "utf-8", "backslashreplace"))
        stream.buffer.flush()
    except BrokenPipeError:
        _abandon_stdout()
    except OSError as error:
        _abandon_stdout()
        raise TargetError(f"cannot write the report to standard output: {error.strerror}") from error


def _abandon_stdout() -> None:
    """Keep the interpreter from flushing to a broken standard output once more when it exits."""
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, sys.stdout.fileno())
    os.close(devnull)


def _say(message: str) -> None:
    """One line on standard error."""
    if sys.stderr is not None:
        line = f"fastcap: {clean(message, 1000)}\n"
        encoding = getattr(sys.stderr, "encoding", None) or "utf-8"
        sys.stderr.write(line.encode(encoding, "backslashreplace").decode(encoding))
        sys.stderr.flush()


# ---- progress


@contextmanager
def _progress_bar(name: str, *, wanted: bool) -> Iterator[Any]:
    """A callback ``(done_bytes, total_bytes)`` that shows a bar on a terminal, once a second has gone by."""
    if not wanted or sys.stderr is None or not sys.stderr.isatty():
        yield None
        return
    started = time.monotonic()
    bar: Progress | None = None
    task: TaskID | None = None

    def advance(done: int, total: int | None) -> None:
        nonlocal bar, task
        if bar is None:
            if time.monotonic() - started < _PROGRESS_DELAY:
                return
            from rich.console import Console
            from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

            columns = TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(binary_units=True)
            bar = Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True)
            bar.start()
            task = bar.add_task(clean(name, 30), total=total)
        if task is not None:
            bar.update(task, completed=done, total=total)

    try:
        yield advance
    finally:
        if bar is not None:
            bar.stop()


# ---- errors


class _Failure(Exception):
    """Ends the command with a line on standard error and exit code 2."""


class _Interrupted(Exception):
    """Ends the command as Ctrl-C does; click would print an empty line for a KeyboardInterrupt."""


@contextmanager
def _one_line_errors(show_traceback: bool) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt as error:
        raise _Interrupted from error
    except OSError as error:
        where = f"cannot read {error.filename}: " if error.filename else ""
        raise _Failure(f"{where}{error.strerror or error}") from error
    except MemoryError as error:
        raise _Failure("out of memory") from error
    except FastcapError as error:
        if show_traceback:
            traceback.print_exception(error.__cause__ or error)
        hint = "; --traceback shows where" if isinstance(error, UserCodeError) and not show_traceback else ""
        raise _Failure(f"{error}{hint}") from error
