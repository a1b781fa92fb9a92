"""`dfca repair`, `dfca export` and `dfca replay`: what else is done with a run folder."""

from pathlib import Path
from typing import Annotated, Any

import typer

from dfca.base.errors import ConfigError, RunError
from dfca.cli.arguments import Algorithms, Seeds, parse_names, parse_seeds
from dfca.cli.console import make_console
from dfca.report.wording import count

commands = typer.Typer()


@commands.command()
def repair(run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")]) -> None:
    """Move files of a run folder that cannot be read aside, so that the same dfca run command continues.

    Nothing is deleted: damaged files go to RUN/damaged. Trials whose metrics are not whole are computed again by the
    next [bold]dfca run[/bold], to the same numbers.

    [bold]Example[/bold]

      dfca repair runs/quickstart
    """
    from dfca.runs.store.repair import repair as repair_folder

    done = repair_folder(run)
    console = make_console()
    for sentence in done or [f"{run}: nothing to repair"]:
        console.print(sentence, highlight=False, markup=False, soft_wrap=True)


@commands.command()
def export(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="A run folder made with [cyan]dfca run --save-models[/cyan].")
    ],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where the files go.", show_default="RUN/export")] = Path(),
    format_: Annotated[str, typer.Option("--format", metavar="NAME", help="safetensors or onnx.")] = "safetensors",
    algorithm: Annotated[
        str | None, typer.Option(metavar="NAME", help="Whose models.", show_default="the first of the run")
    ] = None,
    seed: Annotated[int | None, typer.Option(metavar="N", help="Of which seed.", show_default="the first")] = None,
    cluster: Annotated[int | None, typer.Option(metavar="N", help="Only this cluster.", show_default="all")] = None,
    client: Annotated[
        int | None,
        typer.Option(metavar="N", help="This client's copy: of its own cluster, or of --cluster."),
    ] = None,
    at: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="Which point of a sweep; may be given several times."),
    ] = None,
) -> None:
    """Write models as safetensors, by the names of the module's state dict, or as ONNX; with metadata.

    By default one file for each cluster that somebody uses: the copy of the first client that uses it.

    [bold]Examples[/bold]

      dfca run quickstart --save-models

      dfca export runs/quickstart --algorithm dfca-auto

      dfca export runs/quickstart --algorithm dfca-auto --client 3 --format onnx --out models
    """
    from dfca.api.exporting import check_format
    from dfca.api.stored import load_run

    check_format(format_)
    place = out if out != Path() else run / "export"
    if out == Path() and place.is_symlink():
        raise RunError(f"{place} is a link, and dfca writes to no link; remove it, or name a folder with --out")
    written = load_run(run).export(
        place,
        format_,  # type: ignore[arg-type]
        client=client,
        cluster=cluster,
        algorithm=algorithm,
        seed=seed,
        point=_parse_point(at or ()),
    )
    for path in written:
        print(path)


def _parse_point(at: list[str] | tuple[str, ...]) -> dict[str, Any]:
    from dfca.experiment.load import parse_value

    point: dict[str, Any] = {}
    for pair in at:
        key, equals, text = pair.partition("=")
        if not equals or not key.strip():
            raise ConfigError(f'--at needs key=value, got "{pair}"; for example --at topology.p=0.1')
        point[key.strip()] = parse_value(text.strip())
    return point


@commands.command()
def replay(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder with traces.")],
    algorithms: Algorithms = None,
    seeds: Seeds = None,
) -> None:
    """Replay what a run in virtual time recorded (world.trace = true) and compare every number with the run's.

    Nothing is drawn and no clock runs: the records are carried out one by one.

    [bold]Example[/bold]

      dfca run stragglers --seeds 1 --set world.trace=true --out runs/traced

      dfca replay runs/traced
    """
    from dfca.base.renamed import refuse_earlier
    from dfca.runs.replay import replay_run

    names, numbers = parse_names(algorithms), parse_seeds(seeds)
    for name in names or ():
        refuse_earlier(name)
    numbers = list(range(numbers)) if isinstance(numbers, int) else numbers
    console = make_console()
    different, total = [], 0
    for result in replay_run(
        run, lambda trial: (not names or trial.algorithm in names) and (numbers is None or trial.seed in numbers)
    ):
        same = f"identical ({result.records:,} records, {count(result.rows, 'row')} of metrics)"
        console.print(f"{result.trial}: {result.difference or same}", highlight=False, markup=False, soft_wrap=True)
        different += [result] if result.difference else []
        total += 1
    if different:
        raise RunError(
            f"{len(different)} of {count(total, 'trial')} differ from their trace, first {different[0].trial}"
        )
    console.print(f"{count(total, 'replay')}, bit-identical to the run", highlight=False)
