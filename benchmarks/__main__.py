"""`python -m benchmarks`: measure the speed."""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from dfca.base.errors import DfcaError
from dfca.cli import INTERRUPTED
from dfca.cli.arguments import Threads, use_threads
from dfca.cli.console import make_console

commands = typer.Typer(add_completion=False, rich_markup_mode="rich")


@commands.command()
def bench(
    parts: Annotated[
        list[str] | None,
        typer.Argument(metavar="PART", help="floor, peers, scaling, record, ranks, events, or all of them; or rogue."),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Small sizes for a first look, about a minute a part.")
    ] = False,
    repeats: Annotated[
        int | None, typer.Option(metavar="R", min=1, help="How often everything is measured.", show_default="3 to 5")
    ] = None,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where bench.json, the tables and the plots go.")] = Path(
        "runs/bench"
    ),
    threads: Threads = None,
    only: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Of rogue: this attack; of peers: this work, such as CNN; repeatable.",
            show_default="all",
        ),
    ] = None,
    cpu: Annotated[
        bool, typer.Option("--cpu", help="Of peers: processor time, for a busy machine; with --threads 1.")
    ] = False,
    rogues: Annotated[int, typer.Option(metavar="R", min=1, help="Of rogue: how many beside 8 honest nodes.")] = 1,
    seconds: Annotated[float, typer.Option(metavar="S", min=1, help="Of rogue: before, half during, after.")] = 20.0,
    robust: Annotated[str, typer.Option(metavar="RULE", help="Of rogue: the swarm's guard.")] = "clip",
    cache: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Where the other libraries are installed.", show_default="the user's cache folder"
        ),
    ] = None,
) -> None:
    """Measure the speed side by side, as ratios: a table, a plot and a JSON file.

    [bold]floor[/bold]    a round against the same forward and backward passes in bare torch

    [bold]peers[/bold]    the same work in other libraries, each in an environment that pip makes; in the code of
    DFCA's authors too, where DFCA_AUTHORS names a clone of it

    [bold]scaling[/bold]  seconds and memory against N, k, P and degree, with fitted exponents

    [bold]record[/bold]   up to 100,000 clients that keep two small models each: seconds and memory of a round

    [bold]ranks[/bold]    one process against two under torchrun

    [bold]events[/bold]   the event simulator without training and with it, and elections in virtual time

    [bold]rogue[/bold]    a hostile member against eight honest nodes: rounds and accuracy before, during and after

    Parts measured at different times are collected in one folder. Ctrl-C keeps what is finished.

    [bold]Examples[/bold]

      python -m benchmarks floor --quick

      python -m benchmarks --out runs/bench

      python -m benchmarks peers scaling --repeats 5

      python -m benchmarks rogue --only alarms --only large-models
    """
    try:
        if parts == ["rogue"]:
            from benchmarks.rogue import print_table

            print_table(only or [], seconds, rogues, robust, lambda line: print(line, flush=True))
            return
        _measure(parts or [], quick, repeats, out, threads, cache, only or [], cpu)
    except (DfcaError, KeyboardInterrupt) as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(getattr(error, "status", INTERRUPTED)) from None


def _measure(
    parts: list[str],
    quick: bool,
    repeats: int | None,
    out: Path,
    threads: int | None,
    cache: Path | None,
    only: list[str],
    cpu: bool,
) -> None:
    from benchmarks.baselines.work import CPU
    from benchmarks.progress import PartProgress
    from benchmarks.run import choose_parts, make_plans, run
    from benchmarks.tables import tables_of, to_terminal

    use_threads(threads)
    if cpu:
        os.environ[CPU] = "1"  # read by the processes that measure
    chosen = choose_parts(parts)
    words = [
        "python -m benchmarks",
        *chosen,
        *(["--quick"] if quick else []),
        *([f"--repeats {repeats}"] if repeats else []),
        *(f'--only "{name}"' for name in only),
        *(["--cpu"] if cpu else []),
    ]
    command = " ".join([*words, *([f"--threads {threads}"] if threads else [])])
    console = make_console()
    with PartProgress(console) as progress:
        content = run(make_plans(chosen, quick, repeats, cache, only), out, command, quick, progress)
    for name in chosen:
        for table in tables_of(name, content["parts"][name]):
            console.print()
            console.print(to_terminal(table))
            for note in table.notes:
                console.print(note, style="dim", highlight=False, markup=False)
    console.print(f"\nwritten to {out}: bench.json, bench.md, plots", highlight=False, soft_wrap=True)


if __name__ == "__main__":
    commands(prog_name="python -m benchmarks")
