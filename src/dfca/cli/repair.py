"""`dfca repair`: make a damaged run folder usable again."""

from pathlib import Path
from typing import Annotated

import typer

from dfca.cli.console import make_console

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
