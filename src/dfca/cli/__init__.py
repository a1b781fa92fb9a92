"""The command line: one file per group of commands.

A file of this folder has a `typer.Typer` called `commands`; GROUPS lists the files. A Typer with a name is a group
(`dfca data list`), one without a name adds its commands to `dfca` itself. The modules import only typer and rich: what
a command needs is imported inside it, so that `dfca --help` loads neither torch nor numpy nor matplotlib. They have no
`from __future__ import annotations`: typer would evaluate every annotation again for every command, on every start.
"""

import errno
import os
import sys
from io import TextIOWrapper
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.markup import escape
from typer.core import TyperGroup

from dfca import __version__
from dfca.base.errors import DfcaError, RankLost
from dfca.cli import catalogue, data, faults, folder, keys, node, report, run, swarm, watch
from dfca.cli.usage import explain_usage

GROUPS = (run, watch, swarm, catalogue, report, folder, faults, data, node, keys)
INTERRUPTED = 130
TYPED = "dfca.typed"
"""Where a context keeps the words of the command line."""


class Commands(TyperGroup):
    """The root command. It turns every error into one sentence and an exit status."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        # "run again with --debug": people add it at the end of the line.
        if "--debug" in args:
            args = ["--debug", *(arg for arg in args if arg != "--debug")]
        ctx.meta[TYPED] = tuple(args)
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (KeyboardInterrupt, DfcaError, OSError) as error:
            if ctx.params.get("debug") or getattr(error, "errno", None) == errno.EPIPE:
                raise
            if _is_reported_by_rank_0(error):
                raise typer.Exit(getattr(error, "status", INTERRUPTED)) from None
            if isinstance(error, KeyboardInterrupt):
                _stop(str(error) or "interrupted; the same command continues", INTERRUPTED, "")
            _stop(_sentence(error), getattr(error, "status", 1))
        except Exception as error:
            # typer's own exceptions (exit, usage) are RuntimeErrors and carry an exit code.
            if ctx.params.get("debug"):
                raise
            if hasattr(error, "exit_code"):
                if sentence := explain_usage(error, ctx.meta[TYPED]):
                    _stop(sentence, error.exit_code)
                raise
            _stop(f"unexpected {type(error).__name__}: {error}; run again with --debug to see where", 1)


app = typer.Typer(
    cls=Commands,
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for group in GROUPS:
    app.add_typer(group.commands)


def main() -> None:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without UTF-8 shows "?"
    app(prog_name="dfca", obj=node.OWN_PROCESS)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(__version__)
        raise typer.Exit


@app.callback()
def root(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Clustered federated learning without a server: simulate hundreds of clients, compare algorithms.

    [bold]dfca run quickstart[/bold] compares a dozen methods in a minute; [bold]dfca list[/bold] shows what there is.
    """


def _is_reported_by_rank_0(error: BaseException) -> bool:
    """Return whether rank 0 prints this error: one that every rank raises, or that another rank has explained to it."""
    if int(os.environ.get("RANK", "0")) == 0 or int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return False
    return not isinstance(error, RankLost) or error.explained


def _sentence(error: BaseException) -> str:
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return (
            f"no space left on the disk ({error.filename or 'unknown file'}); free some and run the same command again"
        )
    return " ".join(str(error).split())


def _stop(text: str, status: int, prefix: str = "[bold red]error:[/bold red] ") -> NoReturn:
    # soft_wrap: one sentence stays one line, for people who search logs.
    Console(stderr=True).print(f"{prefix}{escape(text)}", highlight=False, soft_wrap=True)
    raise typer.Exit(status)
