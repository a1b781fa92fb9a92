"""`dfca run`: run an experiment."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from dfca.base.errors import RunError
from dfca.cli.arguments import Algorithms, Seeds, Threads, parse_names, parse_seeds, parse_workers, use_threads
from dfca.cli.console import make_console
from dfca.cli.report import print_run
from dfca.report.wording import count

if TYPE_CHECKING:
    from dfca.experiment.load import Experiment

commands = typer.Typer()


@commands.command()
def run(
    experiment: Annotated[
        str, typer.Argument(metavar="EXPERIMENT", help="A preset ([bold]dfca list[/bold]) or the path of a TOML file.")
    ],
    scale: Annotated[
        str | None, typer.Option(metavar="NAME", help="The size, where there are several: desk, hour, paper.")
    ] = None,
    recipe: Annotated[
        str | None, typer.Option(metavar="NAME", help="How to train, where there are several ways: authors, text.")
    ] = None,
    algorithms: Algorithms = None,
    extras: Annotated[
        bool,
        typer.Option("--extras", help="Also rows with what an algorithm has beyond the others: momentum, a last step."),
    ] = False,
    seeds: Seeds = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change one key; may be given several times.")
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="The run folder.", show_default="runs/NAME")] = None,
    device: Annotated[
        str | None, typer.Option(metavar="NAME", help="cpu, cuda, mps, or auto for the best of them.")
    ] = None,
    threads: Threads = None,
    workers: Annotated[
        str,
        typer.Option(
            metavar="N|auto",
            help="Processes that run trials; auto: 1 without a sweep, else one per core if memory allows.",
        ),
    ] = "auto",
    resume: Annotated[
        bool, typer.Option("--resume/--no-resume", help="Continue what the folder has, or discard it.")
    ] = True,
    reuse: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="RUN", help="Take trials of the same config that this run folder has finished; repeatable."
        ),
    ] = None,
    save_models: Annotated[
        bool, typer.Option("--save-models", help="Keep the final models of every client, for [bold]dfca export[/bold].")
    ] = False,
    log: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Also log to tensorboard, wandb, trackio or mlflow; repeatable."),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print only the final table.")] = False,
) -> None:
    """Run an experiment: every algorithm with every seed (each pair is a trial), then a table and a report.

    Stop it at any moment, also by Ctrl-C or kill -9: the same command continues where it was, to the same numbers.

    [bold]Examples[/bold]

      dfca run quickstart

      dfca run quickstart --algorithms dfca-gi,ifca --seeds 5 --out runs/two

      dfca run mnist-small --set local.learning_rate=0.05 --out runs/slow

      dfca run my-experiment.toml --algorithms my_module:mine,dfca-auto --log tensorboard
    """
    from dfca.base.memory import explain_oom, keep_freed_memory
    from dfca.experiment.load import load_experiment

    keep_freed_memory()
    names, numbers = parse_names(algorithms), parse_seeds(seeds)
    chosen = load_experiment(experiment, scale, set_ or (), names, numbers, device, recipe, extras)
    use_threads(threads)  # after the experiment is checked: it loads torch
    if out is None:
        size = None if chosen.scale in ("desk", "default") else chosen.scale
        out = Path("runs") / "-".join(part for part in (chosen.name, size, recipe) if part)
    options = {"resume": resume, "save_models": save_models, "workers": parse_workers(workers), "reuse": reuse or ()}
    with explain_oom():
        _run_and_print(chosen, out, options, quiet, log or ())


def _run_and_print(
    chosen: "Experiment", out: Path, options: dict[str, Any], quiet: bool, log: Sequence[str] = ()
) -> None:
    """Run an experiment, print its results on rank 0, and raise RunError where a trial failed."""
    from dfca.runs.progress import Bars
    from dfca.runs.runner import run
    from dfca.runs.sink import Broadcast
    from dfca.runs.store.reading import load_run
    from dfca.runs.trackers import make_tracker
    from dfca.sim.rounds.ranks import my_rank

    if my_rank():
        run(chosen, out, **options)
        return
    console = make_console()
    if quiet:
        report = partial(console.print, markup=False, highlight=False)
        trackers = [make_tracker(name, out, chosen.name, report) for name in dict.fromkeys(log)]
        summary = run(chosen, out, Broadcast(*trackers), **options)
    else:
        with Bars(console) as bars:
            trackers = [make_tracker(name, out, chosen.name, bars.note) for name in dict.fromkeys(log)]
            console.print(_headline(chosen))
            summary = run(chosen, out, Broadcast(bars, *trackers), **options)
    print_run(console, load_run(out))
    failed = [row for row in summary["runs"] if row.get("error")]
    if failed:
        first = failed[0]
        raise RunError(
            f"{len(failed)} of {count(_count_trials(chosen), 'trial')} failed, first {first['algorithm']}, "
            f"seed {first['seed']}: {first['error']}; the same command tries them again"
        )


def _headline(chosen: "Experiment") -> str:
    config = chosen.config
    scale = "" if chosen.scale == "default" else f", {chosen.scale} scale"
    if chosen.sweep:
        facts = [count(len(chosen.points), "point"), count(_count_trials(chosen), "trial")]
    else:
        facts = [
            count(len(config.algorithms), "algorithm") + " x " + count(len(config.seeds), "seed"),
            count(config.clients, "client"),
            "k found by the clients" if config.clusters == "auto" else count(config.clusters, "cluster"),
            count(config.rounds, "round"),
        ]
    title = f"[bold]{escape(config.title or chosen.name)}[/bold]"
    return f"{title}\n[dim]· {escape(chosen.name)}{scale}: {', '.join(facts)}, on {config.device}[/dim]"


def _count_trials(chosen: "Experiment") -> int:
    return sum(len(point.config.algorithms) * len(point.config.seeds) for point in chosen.points)
