"""What the commands share: options, errors, exit codes, tables, progress. Only the command line prints."""

from __future__ import annotations

import contextlib
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import click

if TYPE_CHECKING:
    from everstep.errors import EverstepError

DONE = 0
FAILED = 1
USAGE = 2

Command = TypeVar("Command", bound=Callable[..., Any])

json_option: Callable[[Command], Command] = click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON object on standard output."
)


def command(
    name: str, *, epilog: str, cls: type[click.Command] = click.Command
) -> Callable[..., click.Command]:
    """A command whose help ends with ``epilog``: its exit codes and an example, lines kept as they are."""
    return click.command(
        name,
        cls=cls,
        epilog="\b\n" + epilog.replace("\n\n", "\n\n\b\n"),
        context_settings={"help_option_names": ["-h", "--help"]},
    )


class Answer:
    """What a command has to say, once: as JSON or for people."""

    def __init__(self, as_json: bool) -> None:
        self.as_json = as_json

    def give(self, value: dict[str, Any], text: Callable[[], str]) -> None:
        """Print ``value`` as JSON, or ``text()``."""
        if self.as_json:
            click.echo(json.dumps(strict_json(value), indent=2, ensure_ascii=True))
        else:
            click.echo(text())


@contextlib.contextmanager
def answering(
    as_json: bool, *, exit_code: Callable[[EverstepError], int] = lambda error: FAILED
) -> Iterator[Answer]:
    """Turn errors of everstep and of its backends into one message on standard error and an exit code.

    With ``--json`` the error stands on standard output, too, as ``{"error": {...}}``.
    """
    from everstep.backends.errors import BackendError
    from everstep.errors import BadOption, EverstepError

    try:
        yield Answer(as_json)
    except EverstepError as error:
        _fail(error, as_json, exit_code(error))
    except BackendError as error:
        _fail(BadOption(str(error)), as_json, exit_code(BadOption(str(error))))
    except ModuleNotFoundError as error:
        missing = EverstepError(
            f"this command needs {error.name}, which is not installed", hint="pip install it."
        )
        _fail(missing, as_json, exit_code(missing))


def _fail(error: EverstepError, as_json: bool, code: int) -> None:
    if as_json:
        click.echo(json.dumps(strict_json({"error": error.to_wire()}), indent=2))
    click.echo(f"error: {error}", err=True)
    sys.exit(code)


def strict_json(value: Any) -> Any:
    """``value`` as what strict JSON readers accept: NaN and infinities become texts, keys texts."""
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)
    if isinstance(value, dict):
        return {str(key): strict_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [strict_json(item) for item in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return str(value)


def table(headers: Sequence[str], rows: Sequence[Sequence[object]], *, right: Sequence[int] = ()) -> str:
    """Columns as wide as their widest cell; those in ``right`` are set flush right."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(len(line[i]) for line in [list(headers), *cells]) for i in range(len(headers))]

    def line(row: Sequence[str]) -> str:
        parts = [
            x.rjust(w) if i in right else x.ljust(w) for i, (x, w) in enumerate(zip(row, widths, strict=True))
        ]
        return "  ".join(parts).rstrip()

    return "\n".join(line(row) for row in [list(headers), *cells])


def human_bytes(nbytes: int) -> str:
    """``nbytes`` for people: 1536 is "1.5 KiB"."""
    if nbytes < 1024:
        return f"{nbytes} B"
    value = float(nbytes)
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        value /= 1024
        if value < 1024 or unit == "TiB":
            break
    return f"{value:.1f} {unit}"


class Progress(Protocol):
    """A progress bar, or nothing."""

    total: float | None

    def update(self, n: float | None = 1) -> Any: ...
    def set_description_str(self, desc: str | None = None, refresh: bool | None = True) -> Any: ...


@contextlib.contextmanager
def progress(what: str, *, unit: str, total: float | None = None, scale: bool = False) -> Iterator[Progress]:
    """A bar on standard error, where that is a terminal."""
    from tqdm import tqdm

    with tqdm(
        desc=what,
        total=total,
        unit=unit,
        unit_scale=scale,
        unit_divisor=1024,
        file=sys.stderr,
        disable=not sys.stderr.isatty(),
        leave=False,
        dynamic_ncols=True,
    ) as bar:
        yield bar
