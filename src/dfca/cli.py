"""The command line. Heavy imports wait inside the commands: `dfca --help` loads neither torch nor numpy."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn

import typer
from rich.console import Console
from rich.markup import escape
from typer.core import TyperGroup

from dfca import __version__
from dfca.errors import ConfigError, DfcaError, RankLost, RunError, unknown

if TYPE_CHECKING:
    from rich.table import Table

    from dfca.runs.reading import Run

INTERRUPTED = 130
WIDTH_OF_FILES = 120


class Commands(TyperGroup):
    """The root command: one place that turns errors into one sentence and an exit status."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        # "run again with --debug": people add it at the end of the line.
        if "--debug" in args:
            args = ["--debug", *(arg for arg in args if arg != "--debug")]
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (KeyboardInterrupt, DfcaError, OSError) as error:
            if ctx.params.get("debug") or getattr(error, "errno", None) == errno.EPIPE:
                raise
            if _is_told_elsewhere(error):
                raise typer.Exit(getattr(error, "status", INTERRUPTED)) from None
            if isinstance(error, KeyboardInterrupt):
                _stop(str(error) or "interrupted; the same command continues", INTERRUPTED, "")
            _stop(_sentence(error), getattr(error, "status", 1))
        except Exception as error:
            # typer's own exceptions (exit, usage) are RuntimeErrors and carry an exit code.
            if ctx.params.get("debug") or hasattr(error, "exit_code"):
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
data_app = typer.Typer(no_args_is_help=True)


def main() -> None:
    """Run the command line."""
    app(prog_name="dfca")


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

    [bold]dfca run quickstart[/bold] compares every algorithm in a minute; [bold]dfca list[/bold] shows what there is.
    """


@app.command(name="run")
def run_command(
    experiment: Annotated[
        str, typer.Argument(metavar="EXPERIMENT", help="A preset ([bold]dfca list[/bold]) or the path of a TOML file.")
    ],
    scale: Annotated[
        str | None, typer.Option(metavar="NAME", help="The size, where the experiment has several: desk, paper.")
    ] = None,
    algorithms: Annotated[
        str | None, typer.Option(metavar="A,B", help="Only these, such as [cyan]dfca-gi,ifca[/cyan].")
    ] = None,
    seeds: Annotated[
        str | None, typer.Option(metavar="N", help="How many seeds ([cyan]5[/cyan]), or which ([cyan]3,4[/cyan]).")
    ] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change one key; may be given several times.")
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="The run folder.", show_default="runs/NAME")] = None,
    device: Annotated[
        str | None, typer.Option(metavar="NAME", help="cpu, cuda, mps, or auto for the best of them.")
    ] = None,
    threads: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="CPU threads to use.", show_default="all")
    ] = None,
    workers: Annotated[
        str,
        typer.Option(
            metavar="N|auto",
            help="Processes that run cells; auto: 1 without a sweep, else one per core if memory allows.",
        ),
    ] = "auto",
    resume: Annotated[
        bool, typer.Option("--resume/--no-resume", help="Continue what the folder has, or discard it.")
    ] = True,
    reuse: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="RUN", help="Take cells of the same config that this run folder has finished; repeatable."
        ),
    ] = None,
    save_models: Annotated[bool, typer.Option("--save-models", help="Keep the final models of every client.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print only the final table.")] = False,
) -> None:
    """Run an experiment: every algorithm with every seed, then a table and a report.

    Stop it at any moment, also by Ctrl-C or kill -9: the same command continues where it was, to the same numbers.

    [bold]Examples[/bold]

      dfca run quickstart

      dfca run quickstart --algorithms dfca-gi,ifca --seeds 5 --out runs/two

      dfca run mnist-small --set local.learning_rate=0.05 --out runs/slow

      dfca run my-experiment.toml --device auto
    """
    from dfca.experiment.load import load_experiment
    from dfca.runs.progress import Bars
    from dfca.runs.reading import load_run
    from dfca.runs.runner import run
    from dfca.sim.rounds.ranks import my_rank

    _use_threads(threads)
    # A config may name a model of the user's own, "my_module:make", in the folder where dfca is called.
    sys.path.insert(0, os.getcwd())
    names = None if algorithms is None else [name.strip() for name in algorithms.split(",") if name.strip()]
    chosen = load_experiment(experiment, scale, set_ or (), names, _parse_seeds(seeds), device)
    if out is None:
        out = Path("runs") / (chosen.name if chosen.scale in ("desk", "default") else f"{chosen.name}-{chosen.scale}")
    console = _console()
    options: dict[str, Any] = {"resume": resume, "save_models": save_models, "workers": _parse_workers(workers)}
    options["reuse"] = reuse or ()
    if my_rank():
        run(chosen, out, **options)
        return
    if quiet:
        summary = run(chosen, out, **options)
    else:
        console.print(_headline(chosen))
        with Bars(console) as bars:
            summary = run(chosen, out, bars, **options)
    stored = load_run(out)
    _show_run(console, stored, stored.summary)
    failed = [row for row in summary["runs"] if row.get("error")]
    if failed:
        first = failed[0]
        raise RunError(
            f"{len(failed)} of {_count_cells(chosen)} failed, first {first['algorithm']}, seed {first['seed']}: "
            f"{first['error']}; the same command tries them again"
        )


@app.command(name="list")
def list_command() -> None:
    """Show the presets, algorithms, data sets, models, topologies and worlds."""
    import inspect

    from dfca.algorithms import ALGORITHMS
    from dfca.data import catalogue
    from dfca.experiment.load import presets
    from dfca.experiment.world import worlds
    from dfca.models import MODELS
    from dfca.report.virtual_tables import world_in_words
    from dfca.topology import TOPOLOGIES

    console = _console()
    about = {name: (inspect.getdoc(make) or "").partition("\n")[0] for name, make in ALGORITHMS.items()}
    tables = {
        "Presets": presets(),
        "Algorithms": about,
        "Data sets": {
            entry.name: entry.description + ("" if entry.ready else " (not here yet)") for entry in catalogue()
        },
        "Models": MODELS,
        "Topologies": TOPOLOGIES,
        "Worlds": {name: world_in_words(facts) for name, facts in worlds().items()},
    }
    for title, lines in tables.items():
        console.print(_table(title, lines), "")
    console.print("[dim]dfca run PRESET runs one; dfca data list says where the data sets come from[/dim]")


@app.command()
def report(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN", help="Run folders, or files that [cyan]--save[/cyan] wrote.")
    ],
    format_: Annotated[
        str, typer.Option("--format", metavar="NAME", help="The tables as terminal, markdown, csv or latex.")
    ] = "terminal",
    save: Annotated[
        Path | None, typer.Option(metavar="FILE.json", help="Write the results into one small file to keep.")
    ] = None,
    together: Annotated[
        bool,
        typer.Option("--together", help="One table over the cells of all these folders; refused where configs differ."),
    ] = False,
    figures: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write the figures as PNG, SVG and PDF into this folder.")
    ] = None,
) -> None:
    """Print the tables of each run, beside the paper's numbers, and (re)write its report.html; also while it runs.

    [bold]Examples[/bold]

      dfca report runs/quickstart

      dfca report runs/quickstart --format latex > table.tex

      dfca report runs/quickstart --save results/quickstart.json

      dfca report runs/quickstart --figures figures
    """
    from dfca.report.formats import FORMATS
    from dfca.report.results import save_results, stored_run
    from dfca.runs.reading import load_run
    from dfca.runs.reuse import join

    if format_ not in ("terminal", *FORMATS):
        raise unknown("format", format_, ("terminal", *FORMATS))
    if save is not None and runs[0].is_file():
        raise ConfigError("--save takes a run folder, and this is a file of results already")
    if (save is not None or figures is not None) and len(runs) > 1 and not together:
        raise ConfigError("--save and --figures take one run; call it once for each, or --together for all")
    if together and any(path.is_file() for path in runs):
        raise ConfigError("--together takes run folders, not files of results")
    console = _console()
    joined = join([load_run(path) for path in runs]) if together else None
    for path in runs[:1] if together else runs:
        run = joined or (stored_run(path) if path.is_file() else load_run(path))
        if save is not None:
            save_results(run, save)
        if figures is not None:
            from dfca.report.paper.figures import save_figures

            written = save_figures(run, figures)
            print(f"{len(written)} files in {figures}", file=sys.stderr)
        if format_ != "terminal":
            print(FORMATS[format_](run.summary), end="" if together or path == runs[-1] else "\n")
            continue
        name = escape(str(run.summary.get("experiment", path.name)))
        console.print(f"[bold]{name}[/bold] [dim]{escape(' '.join(map(str, runs)) if together else str(path))}[/dim]")
        _show_run(console, None if path.is_file() or together else run, run.summary)


@app.command()
def bench(
    parts: Annotated[
        list[str] | None,
        typer.Argument(metavar="PART", help="floor, peers, scaling, ranks, or all (the default)."),
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
    threads: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="CPU threads to use.", show_default="all")
    ] = None,
    cache: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Where the peers are installed.", show_default="the user's cache folder"),
    ] = None,
) -> None:
    """Measure the speed side by side, as ratios: a table, a plot and a JSON file.

    [bold]floor[/bold]    a round against the same forward and backward passes in bare torch

    [bold]peers[/bold]    the same work in Flower, gossipy and fluke; pip installs each into an environment of its own

    [bold]scaling[/bold]  seconds and memory against N, k, P and degree, with fitted exponents

    [bold]ranks[/bold]    one process against two under torchrun

    Parts measured at different times meet in one folder. Ctrl-C keeps what is finished.

    [bold]Examples[/bold]

      dfca bench floor --quick

      dfca bench --out runs/bench

      dfca bench peers scaling --repeats 5
    """
    from dfca.bench.progress import Bars
    from dfca.bench.run import chosen_parts, make_plans, run
    from dfca.bench.tables import sheets, terminal

    _use_threads(threads)
    chosen = chosen_parts(parts or [])
    if cache is None:
        import pooch

        cache = Path(pooch.os_cache("dfca")) / "bench"
    console = _console()
    words = ["dfca bench", *chosen, *(["--quick"] if quick else []), *([f"--repeats {repeats}"] if repeats else [])]
    command = " ".join([*words, *([f"--threads {threads}"] if threads else [])])
    with Bars(console) as bars:
        content = run(make_plans(chosen, quick, repeats, cache), out, command, quick, bars)
    for name in chosen:
        for sheet in sheets(name, content["parts"][name]):
            console.print()
            console.print(terminal(sheet))
            for note in sheet.notes:
                console.print(note, style="dim", highlight=False, markup=False)
    console.print(f"\nwritten to {out}: bench.json, bench.md, plots", highlight=False, soft_wrap=True)


@app.command()
def replay(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder with traces.")],
    algorithms: Annotated[str | None, typer.Option(metavar="A,B", help="Only these.")] = None,
    seeds: Annotated[str | None, typer.Option(metavar="N", help="Only this many seeds, or these: 3,4.")] = None,
) -> None:
    """Replay what a run in virtual time recorded (world.trace = true) and compare every number with the run's.

    Nothing is drawn and no clock runs: the records are carried out one by one.

    [bold]Example[/bold]

      dfca run stragglers --seeds 1 --set world.trace=true --out runs/traced

      dfca replay runs/traced
    """
    from dfca.runs.replay import replay_run

    names = None if algorithms is None else {name.strip() for name in algorithms.split(",")}
    numbers = _parse_seeds(seeds)
    numbers = list(range(numbers)) if isinstance(numbers, int) else numbers
    console, differ, count = _console(), [], 0
    for verdict in replay_run(
        run, lambda cell: (not names or cell.algorithm in names) and (numbers is None or cell.seed in numbers)
    ):
        told = (
            verdict.difference or f"identical ({verdict.records:,} records, {_count(verdict.rows, 'row')} of metrics)"
        )
        console.print(f"{verdict.trial}: {told}", highlight=False, markup=False, soft_wrap=True)
        differ += [verdict] if verdict.difference else []
        count += 1
    if differ:
        raise RunError(f"{len(differ)} of {_count(count, 'cell')} differ from their trace, first {differ[0].trial}")
    console.print(f"{_count(count, 'replay')}, bit-identical to the run", highlight=False)


app.add_typer(data_app, name="data", help="Where each data set comes from, and putting it into the cache.")


@app.command()
def version() -> None:
    """Show the version."""
    print(__version__)


@data_app.command(name="list")
def data_list() -> None:
    """Show the data sets, where they come from, and whether the cache has them."""
    from dfca.data import catalogue

    lines = {}
    for entry in catalogue():
        here = (
            f"ready: {entry.path or 'inside scikit-learn'}"
            if entry.ready
            else f"not here: dfca data fetch {entry.name}"
        )
        about = f"{entry.description}\n{entry.classes} classes, samples (train / test): {entry.samples}"
        lines[entry.name] = f"{about}\nfrom {entry.source}, licence: {entry.licence}\n{here}"
    _console().print(_table("Data sets", lines))


@data_app.command(name="fetch")
def data_fetch(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A data set of [bold]dfca data list[/bold].")],
) -> None:
    """Download a data set from its official source, check it, and put it into the cache."""
    from dfca.data import fetch

    print(f"{name} is ready in {fetch(name)}")


@data_app.command(name="import")
def data_import(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="An official container or a .npz file.")],
    name: Annotated[str | None, typer.Option(help="The data set it is, where the file's name does not tell.")] = None,
) -> None:
    """Put a file that you have into the cache, for machines without internet.

    [bold]Example[/bold]

      dfca data import Downloads/cifar-10-python.tar.gz

      dfca data import backup.npz --name mnist
    """
    from dfca.data import import_file

    print(f"ready in {import_file(file, name)}")


def _show_run(console: Console, run: Run | None, summary: dict[str, Any]) -> None:
    from dfca.report.formats import all_notes, terminal_tables
    from dfca.report.page import write_report

    for table in terminal_tables(summary, width=console.width):
        console.print()
        console.print(table)
    console.print("\n".join(all_notes(summary)), style="dim", highlight=False, markup=False)
    if run is not None:
        console.print(f"\nreport: {write_report(run)}", highlight=False, soft_wrap=True)


def _headline(chosen: Any) -> str:
    config, points = chosen.config, chosen.points
    scale = "" if chosen.scale == "default" else f", {chosen.scale} scale"
    if chosen.sweep:
        counts = [_count(len(points), "point"), _count_cells(chosen)]
    else:
        groups = "k found by the clients" if config.clusters == "auto" else _count(config.clusters, "cluster")
        counts = [
            _count(len(config.algorithms), "algorithm") + " x " + _count(len(config.seeds), "seed"),
            _count(config.clients, "client"),
            groups,
            _count(config.rounds, "round"),
        ]
    title = f"[bold]{escape(config.title or chosen.name)}[/bold]"
    return f"{title}\n[dim]· {escape(chosen.name)}{scale}: {', '.join(counts)}, on {config.device}[/dim]"


def _count_cells(chosen: Any) -> str:
    return _count(sum(len(point.config.algorithms) * len(point.config.seeds) for point in chosen.points), "cell")


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _parse_seeds(text: str | None) -> int | list[int] | None:
    if text is None:
        return None
    try:
        numbers = [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise ConfigError(f'--seeds must be a number or a list such as 3,4, got "{text}"') from None
    return numbers if "," in text else numbers[0] if numbers else None


def _parse_workers(text: str) -> int | Literal["auto"]:
    if text == "auto":
        return "auto"
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f'--workers must be >= 1 or "auto", got "{text}"')
    return int(text)


def _use_threads(threads: int | None) -> None:
    import torch

    from dfca.sim.rounds.ranks import threads_of_rank

    threads = threads or threads_of_rank()
    if threads is not None:
        torch.set_num_threads(threads)


def _table(title: str, lines: dict[str, str]) -> Table:
    from rich.table import Table

    table = Table(
        title=title, title_justify="left", title_style="bold", box=None, show_header=False, padding=(0, 2, 0, 0)
    )
    table.add_column(style="cyan", no_wrap=True, min_width=16)
    table.add_column(overflow="fold")
    for name, about in lines.items():
        table.add_row(name, escape(about))
    return table


def _console() -> Console:
    console = Console()
    # A file has no width: leave room for the tables.
    return console if console.is_terminal or "COLUMNS" in os.environ else Console(width=WIDTH_OF_FILES)


def _is_told_elsewhere(error: BaseException) -> bool:
    """Tell whether the first of several ranks says it: an error that all of them meet, or that it hears of."""
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
