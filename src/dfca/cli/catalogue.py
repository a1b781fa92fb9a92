"""`dfca list` and `dfca version`: what there is."""

from __future__ import annotations

import typer

from dfca import __version__
from dfca.cli.console import make_console, names_table

commands = typer.Typer()


@commands.command(name="list")
def list_everything() -> None:
    """Show the presets, algorithms, data sets, models, topologies and worlds."""
    import inspect

    from dfca.algorithms import ALGORITHMS
    from dfca.data import catalogue
    from dfca.experiment.load import presets
    from dfca.experiment.world import worlds
    from dfca.models import MODELS
    from dfca.report.virtual_tables import world_in_words
    from dfca.topology import TOPOLOGIES

    tables = {
        "Presets": presets(),
        "Algorithms": {name: (inspect.getdoc(make) or "").partition("\n")[0] for name, make in ALGORITHMS.items()},
        "Data sets": {
            entry.name: entry.description + ("" if entry.ready else " (not here yet)") for entry in catalogue()
        },
        "Models": MODELS,
        "Topologies": TOPOLOGIES,
        "Worlds": {name: world_in_words(facts) for name, facts in worlds().items()},
    }
    console = make_console()
    for title, descriptions in tables.items():
        console.print(names_table(title, descriptions), "")
    console.print("[dim]dfca run PRESET runs one; dfca data list says where the data sets come from[/dim]")


@commands.command()
def version() -> None:
    """Show the version."""
    print(__version__)
