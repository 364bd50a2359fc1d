"""The result of a command: figures for ``--json``, and parts for text and pages; or its failure and exit code."""

from __future__ import annotations

import contextlib
import functools
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from graphpass.errors import CommandError, GraphpassError
from graphpass.report.parts import Part

__all__ = ["CHECK_FAILED", "INVALID_INPUT", "OWN_FAILURE", "Result", "exit_codes", "users_code"]


@dataclass(frozen=True, slots=True)
class Result:
    """The result of one command.

    Attributes:
        command: ``explain``, ``doctor``, ``bench`` or ``plan``.
        subject: the model, file or machine that it is about.
        figures: the content of ``--json``: dicts, lists, strings, numbers, booleans and None.
        parts: the same for people, in reading order; empty tables are not drawn.
        failure: the check that failed, for exit code 1; None if none did.
    """

    command: str
    subject: str
    figures: Mapping[str, Any]
    parts: tuple[Part, ...]
    failure: str | None = None


CHECK_FAILED, INVALID_INPUT, OWN_FAILURE = 1, 2, 3
_LIBRARIES = ("site-packages", "dist-packages", str(Path(__file__).parents[1]), str(Path(traceback.__file__).parent))


def exit_codes(command: Callable[..., None]) -> Callable[..., None]:
    """A command that turns errors into a message on stderr and an exit code."""

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except GraphpassError as error:
            typer.echo(
                f"graphpass: {error.problem}\n  expected: {error.expected}\n  found: {error.found}\n"
                f"  remedy: {error.remedy}",
                err=True,
            )
            raise typer.Exit(INVALID_INPUT) from None
        except (typer.Exit, typer.Abort):
            raise
        except Exception as error:
            with tempfile.NamedTemporaryFile("w", prefix="graphpass-", suffix=".txt", delete=False) as file:
                traceback.print_exc(file=file)
            typer.echo(f"graphpass failed: {_summary(error)}; its traceback is in {file.name}", err=True)
            raise typer.Exit(OWN_FAILURE) from None

    return run


@contextlib.contextmanager
def users_code(what: str, *, expected: str, remedy: str) -> Iterator[None]:
    """Report an exception in code or a file of the user as a typed error that names the line.

    Args:
        what: the code that runs in the body, as ``factory models:build``.
        expected: what it should do.
        remedy: the change that the user should make.

    Raises:
        GraphpassError: the error of graphpass in the body, also if torch.compile raised it as another one's cause.
        CommandError: any other exception.
    """
    try:
        yield
    except GraphpassError:
        raise
    except (Exception, SystemExit) as error:
        own = getattr(error, "inner_exception", None)
        if isinstance(own, GraphpassError):
            raise own from error
        raise CommandError(f"{what} failed", expected=expected, found=_summary(error), remedy=remedy) from error


def _summary(error: BaseException) -> str:
    """Type, first sentence and place of an error."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    first = next((at for at, line in enumerate(lines) if not line.endswith(":")), len(lines) - 1)
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if not any(part in f.filename for part in _LIBRARIES) and not f.filename.startswith("<")]
    place = f" at {Path(own[-1].filename).name}:{own[-1].lineno}: `{own[-1].line}`" if own else ""
    return f"{type(error).__name__}" + (f": {' '.join(lines[: first + 1])}" if lines else "") + place
