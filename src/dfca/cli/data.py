"""`dfca data`: where each data set comes from, and putting it into the cache."""

from pathlib import Path
from typing import Annotated

import typer

from dfca.cli.console import make_console, names_table

commands = typer.Typer(
    name="data", help="Where each data set comes from, and putting it into the cache.", no_args_is_help=True
)


@commands.command(name="list")
def list_data_sets() -> None:
    """Show the data sets, where they come from, and whether the cache has them."""
    from dfca.data import catalogue

    descriptions = {}
    for entry in catalogue():
        if entry.ready:
            inside = "inside scikit-learn" if entry.name == "digits" else "made when it is needed"
            place = f"ready: {entry.path or inside}"
        else:
            place = f"not here: dfca data fetch {entry.name}"
        about = f"{entry.description}\n{_predicts(entry.name, entry.classes)}, samples (train / test): {entry.samples}"
        descriptions[entry.name] = f"{about}\nfrom {entry.source}, licence: {entry.licence}\n{place}"
    make_console().print(names_table("Data sets", descriptions))


def _predicts(name: str, classes: int) -> str:
    from dfca.data.registry import source_of

    return f"{classes} classes" if source_of(name).task == "classification" else "numbers to forecast"


@commands.command(name="fetch")
def fetch_data_set(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A data set of [bold]dfca data list[/bold].")],
) -> None:
    """Download a data set from its official source, check it, and put it into the cache."""
    from dfca.data import fetch

    print(f"{name} is ready in {fetch(name)}")


@commands.command(name="import")
def import_data_set(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="An official container or a .npz file.")],
    name: Annotated[
        str | None, typer.Option(help="Which data set it is, where the file's name does not say it.")
    ] = None,
) -> None:
    """Put a file that you have into the cache, for machines without internet.

    [bold]Example[/bold]

      dfca data import Downloads/cifar-10-python.tar.gz

      dfca data import backup.npz --name mnist
    """
    from dfca.data import import_file

    print(f"ready in {import_file(file, name)}")
