"""`dfca export`: write the models of a run as files for other programs."""

from pathlib import Path
from typing import Annotated, Any

import typer

from dfca.base.errors import ConfigError, RunError

commands = typer.Typer()


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
