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
    from dfca.data.registry import catalogue

    descriptions = {}
    for name, source, path, ready in catalogue():
        place = f"not here: dfca data fetch {name}"
        if ready:
            place = f"ready: {path or ('made when it is needed' if source.generated else 'inside scikit-learn')}"
        predicts = f"{source.classes} classes" if source.task == "classification" else "numbers to forecast"
        about = f"{source.description}\n{predicts}, samples (train / test): {source.samples}"
        descriptions[name] = f"{about}\nfrom {source.homepage}, licence: {source.licence}\n{place}"
    make_console().print(names_table("Data sets", descriptions))


@commands.command(name="fetch")
def fetch_data_set(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A data set of [bold]dfca data list[/bold].")],
) -> None:
    """Download a data set from its official source, check it, and put it into the cache."""
    from dfca.data.sources import fetch

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
    from dfca.data.sources import import_file

    print(f"ready in {import_file(file, name)}")
