"""`dfca list`, `dfca show`, `dfca options` and `dfca version`: what there is."""

from typing import Annotated

import typer

from dfca import __version__
from dfca.cli.console import make_console, names_table

commands = typer.Typer()


@commands.command(name="list")
def list_everything() -> None:
    """Show the presets, algorithms, data sets, models, topologies and worlds."""
    from dfca.algorithms import ALGORITHMS, about, installed
    from dfca.data.registry import catalogue
    from dfca.experiment.load import presets
    from dfca.experiment.world import worlds
    from dfca.models import MODELS
    from dfca.report.wording import world_in_words
    from dfca.topology_options import TOPOLOGIES

    tables = {
        "Presets": presets(),
        "Algorithms": {name: about(make) for name, make in ALGORITHMS.items()}
        | {name: f"of the installed {plugin.value}" for name, plugin in installed().items()},
        "Data sets": {
            entry.name: entry.source.description + ("" if entry.ready else " (not here yet)") for entry in catalogue()
        },
        "Models": MODELS,
        "Topologies": TOPOLOGIES,
        "Worlds": {name: world_in_words(facts) for name, facts in worlds().items()},
    }
    console = make_console()
    console.print("dfca-gi, dfca-li: the paper's DFCA; dfca-auto: ours, recommended\n", highlight=False)
    for title, descriptions in tables.items():
        console.print(names_table(title, descriptions), "")
    console.print(
        "[dim]dfca run PRESET runs one, dfca show PRESET prints it as a file to start from; dfca options explains "
        "every key; dfca data list says where the data sets come from[/dim]"
    )


@commands.command()
def show(
    preset: Annotated[str, typer.Argument(help="A preset, or the path of an experiment file.")],
    scale: Annotated[str | None, typer.Option(help="The scale to lay over it: desk, hour, paper.")] = None,
    recipe: Annotated[str | None, typer.Option(help="How to train, where there are several ways.")] = None,
    complete: Annotated[bool, typer.Option("--complete", help="Every key, with its default.")] = False,
) -> None:
    """Print a preset as TOML: a file to start from.

    [bold]dfca show quickstart > mine.toml[/bold], change it, then [bold]dfca run mine.toml[/bold].
    """
    from dfca.experiment.load import load_experiment, preset_text

    if scale is None and recipe is None and not complete:
        print(preset_text(preset), end="")
    else:
        print(load_experiment(preset, scale, recipe=recipe).to_toml(), end="")


@commands.command()
def options(
    prefix: Annotated[str, typer.Argument(help="Only these: local, world.link, data.name, ...")] = "",
) -> None:
    """Explain every key of an experiment file: type, default, meaning."""
    from rich.markup import escape
    from rich.table import Table

    from dfca.experiment.reference import reference

    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("key", style="cyan", no_wrap=True)
    for column in ("type", "default", "meaning"):
        table.add_column(column, overflow="fold")
    for key in reference(prefix):
        default = "[bold]must be given[/bold]" if not key.default else escape(key.default)
        table.add_row(escape(key.name), escape(key.kind), default, escape(key.meaning))
    make_console().print(table)


@commands.command()
def version() -> None:
    """Show the version."""
    print(__version__)
