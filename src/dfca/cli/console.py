"""What commands print with: the console, and tables of names."""

import os
from collections.abc import Mapping

from rich.console import Console
from rich.markup import escape
from rich.table import Table

WIDTH_OF_FILES = 120


def make_console() -> Console:
    console = Console()
    # A file has no width: leave room for the tables.
    return console if console.is_terminal or "COLUMNS" in os.environ else Console(width=WIDTH_OF_FILES)


def names_table(title: str, descriptions: Mapping[str, str]) -> Table:
    """Make a table of names and what they are."""
    table = Table(
        title=title, title_justify="left", title_style="bold", box=None, show_header=False, padding=(0, 2, 0, 0)
    )
    table.add_column(style="cyan", no_wrap=True, min_width=16)
    table.add_column(overflow="fold")
    for name, description in descriptions.items():
        table.add_row(name, escape(description))
    return table
