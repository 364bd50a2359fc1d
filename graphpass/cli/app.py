"""The commands, their arguments and their help."""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console

from graphpass import __version__
from graphpass.errors import CommandError, GraphpassError

if TYPE_CHECKING:
    from graphpass.cli.usermodel import Result

CHECK_FAILED, INVALID_INPUT, OWN_FAILURE = 1, 2, 3

_EXIT_CODES = """

Exit codes: 0 done; 1 a check failed: a small function cannot be compiled or replayed (doctor), or an output differs
from eager (bench); 2 invalid input or a model that cannot run, stderr has the remedy; 3 graphpass itself failed, stderr
names a file with the traceback.
"""
_WIDTH_OF_FILES = 140
_TARGET = "module:factory, file.py:factory, a config.json or its folder, or a model type of transformers"

app = typer.Typer(
    name="graphpass",
    help="CUDA graphs for PyTorch models: see how a model is cut, what a machine offers, what is gained." + _EXIT_CODES,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else on stdout.")]
HtmlFile = Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Write one self-contained page, too.")]
Target = Annotated[str, typer.Argument(metavar="TARGET", help=_TARGET)]
Inputs = Annotated[
    list[str] | None,
    typer.Option(
        "--input", metavar="[NAME=]SHAPE[:DTYPE][<BELOW]", help="A random input; repeat it for each argument."
    ),
]
Config = Annotated[
    list[str] | None,
    typer.Option("--config", metavar="NAME=VALUE", help="A setting of the Hugging Face configuration."),
]
Device = Annotated[str | None, typer.Option("--device", help="cpu, cuda or cuda:INDEX; by default the GPU if any.")]
Split = Annotated[
    list[str] | None, typer.Option("--split", metavar="OP", help="A splitting op; repeat it for several.")
]
Options = Annotated[
    list[str] | None,
    typer.Option("--option", metavar="NAME=JSON", help="An option of the backend, as dynamic_dims='{\"x\": 0}'."),
]


def _print_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"graphpass {__version__}")
        raise typer.Exit


@app.callback()
def _all_commands(
    *,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None: ...


def _command(run: Callable[..., Result]) -> Callable[..., None]:
    """Make ``run`` a command, with the options ``--json`` and ``--html``, that shows its result."""

    @functools.wraps(run)
    def command(*, as_json: bool, html: Path | None, **options: Any) -> None:
        # With --json, what the user's code prints goes to stderr.
        with _exit_codes():
            with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
                result = run(**options)
            _show(result, as_json, html)

    shown = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)
        for name, default, kind in (("as_json", False, AsJson), ("html", None, HtmlFile))
    ]
    del run.__annotations__["return"]  # its module imports torch, which the help does not need
    signature = inspect.signature(run, eval_str=True)
    command.__signature__ = signature.replace(parameters=[*signature.parameters.values(), *shown])  # type: ignore[attr-defined]
    command.__annotations__ = {**run.__annotations__, "as_json": AsJson, "html": HtmlFile}
    app.command()(command)
    return command


@contextlib.contextmanager
def _exit_codes() -> Iterator[None]:
    try:
        yield
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
        from graphpass.cli.usermodel import summary

        with tempfile.NamedTemporaryFile("w", prefix="graphpass-", suffix=".txt", delete=False) as file:
            traceback.print_exc(file=file)
        typer.echo(f"graphpass failed: {summary(error)}; its traceback is in {file.name}", err=True)
        raise typer.Exit(OWN_FAILURE) from None


@_command
def explain(
    target: Target,
    *,
    inputs: Inputs = None,
    config: Config = None,
    device: Device = None,
    split: Split = None,
    option: Options = None,
) -> Result:
    """Show how a model is cut into regions, why, at which lines, and where it can be padded.

    Runs the model once with its example inputs, without graphs and without a compiler. A factory takes no arguments and
    returns a model, or (model, inputs): a tensor, a tuple of arguments, or a dict of keyword arguments.

    \b
    Examples:
      graphpass explain models:build
      graphpass explain models.py:MyEncoder --input 6x128
      graphpass explain bert --config num_hidden_layers=2
      graphpass explain path/to/config.json --split aten::scaled_dot_product_attention
      graphpass explain models:build --option 'padding={"attention_mask": 0}' --html explain.html
    """  # noqa: D301
    from graphpass.cli.explain import explain as explained
    from graphpass.cli.usermodel import device_named, load

    program = load(target, shapes=inputs or (), config=config or (), device=device_named(device))
    return explained(program, _options(split, option))


@_command
def doctor(
    device: Device = None,
    tries: Annotated[bool, typer.Option("--try/--no-try", help="Compile and replay a small function.")] = True,
) -> Result:
    """Show device, driver, compilers and attention kernels of this machine, and what will be slow on it.

    Fails if a small function cannot be compiled, captured or replayed.

    \b
    Examples:
      graphpass doctor
      graphpass doctor --no-try --json
    """  # noqa: D301
    from graphpass.cli.doctor import doctor as examined
    from graphpass.cli.usermodel import device_named

    return examined(device_named(device), tries=tries)


@_command
def bench(
    target: Target,
    *,
    inputs: Inputs = None,
    config: Config = None,
    device: Device = None,
    split: Split = None,
    option: Options = None,
    compiler: Annotated[str, typer.Option(help="inductor, aot_eager or eager.")] = "inductor",
    rounds: Annotated[int, typer.Option(min=1, help="Values behind each median.")] = 15,
    calls: Annotated[int, typer.Option(min=1, help="Calls in each round.")] = 10,
) -> Result:
    """Time a model eagerly, compiled, with reduce-overhead, with graphpass, and as one graph replayed by hand.

    All variants run in one process in turn; the figures are medians. The host time is the time that a call takes on an
    idle device until it returns; the device time is what the device then needs. Fails if the output of a variant
    differs from the eager one by more than the tolerance of its dtype, a share of the largest magnitude: 1e-4 in
    float32, 1e-2 in float16, 5e-2 in bfloat16. All calls have the sizes of the example, so nothing is padded.

    \b
    Examples:
      graphpass bench models:build
      graphpass bench models:build --rounds 50 --html bench.html
      graphpass bench vit --config num_hidden_layers=4 --compiler aot_eager
    """  # noqa: D301
    from graphpass.cli.benchmark import bench as measured
    from graphpass.cli.usermodel import device_named, load

    program = load(target, shapes=inputs or (), config=config or (), device=device_named(device))
    return measured(program, _options(split, option), compiler, rounds=rounds, calls=calls)


@_command
def plan(
    traffic: Annotated[Path, typer.Argument(metavar="TRAFFIC", help="A JSON or CSV file of sizes and their counts.")],
    max_graphs: Annotated[int, typer.Option(min=1, help="The most sizes to capture.")] = 16,
    stride: Annotated[list[int] | None, typer.Option(help="A fixed stride to compare with; repeatable.")] = None,
    bytes_file: Annotated[
        Path | None, typer.Option("--bytes", metavar="FILE", help="Bytes of a graph by size, JSON or CSV.")
    ] = None,
) -> Result:
    """Choose capture sizes for the traffic that was seen, beside doubling and fixed strides.

    TRAFFIC is JSON: {"size": count}, a list of sizes, or an object whose field "histogram" is one of these; or CSV:
    size,count or one size a line. The planned sizes are optimal: no other sizes of that number pad less.
    Bytes of sizes that the file does not list are interpolated.

    \b
    Examples:
      python -c "import json; json.dump(graphpass.runtime_of(fast).stats().histograms['x[0]'], open('sizes.json', 'w'))"
      graphpass plan sizes.json
      graphpass plan sizes.csv --max-graphs 32 --stride 8 --html plan.html
      graphpass plan sizes.json --bytes bytes.json --json
    """  # noqa: D301
    from graphpass.cli.plan import plan as planned

    return planned(traffic, max_graphs, tuple(stride or ()), bytes_file)


@_command
def cache(
    action: Annotated[
        Literal["list", "verify", "prune"], typer.Argument(metavar="ACTION", help="list, verify or prune.")
    ],
    directory: Annotated[Path, typer.Argument(metavar="DIRECTORY", help="A directory that warm_start has named.")],
    days: Annotated[float | None, typer.Option(min=0, help="With prune: remove what is older, too.")] = None,
) -> Result:
    """Look after a directory of saved artifacts (warm_start): ACTION is list, verify or prune.

    Verify reads each file, and exits with 1 if one is damaged, is not yours alone, or was saved by another version or
    on another machine. Prune removes such files. No file's contents are run.

    \b
    Examples:
      graphpass cache list artifacts
      graphpass cache verify artifacts --json
      graphpass cache prune artifacts --days 30
    """  # noqa: D301
    from graphpass.cli.cache import cache as looked_after

    return looked_after(action, directory, days)


def _options(split: list[str] | None, texts: list[str] | None) -> dict[str, Any]:
    from graphpass.cli.usermodel import named_values

    example = "write --option mode=FULL or --option 'padding={\"attention_mask\": 0}'"
    options = named_values(texts or (), "an option", example=example)
    return {**({"splitting_ops": list(split)} if split else {}), **options}


def _show(result: Result, as_json: bool, html: Path | None) -> None:
    if html is not None:
        from graphpass.report.drawing import html_page

        page = html_page(f"graphpass {result.command}: {result.subject}", result.parts, failure=result.failure)
        try:
            html.write_text(page, encoding="utf-8")
        except OSError as error:
            raise CommandError(
                "the page cannot be written",
                expected="a file in a folder that exists",
                found=str(error),
                remedy="pass such a file as --html",
            ) from error
    if as_json:
        typer.echo(json.dumps({"command": result.command, **result.figures, "failure": result.failure}, indent=1))
    else:
        from graphpass.report.drawing import print_parts

        width = None if sys.stdout.isatty() else _WIDTH_OF_FILES
        print_parts(result.parts, Console(highlight=False, width=width), failure=result.failure)
    if result.failure is not None:
        raise typer.Exit(CHECK_FAILED)
