"""Show how far a bench is: a progress bar on a terminal, one line per finished row everywhere."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text


class PartProgress:
    """A progress bar for the part under way. Use it as a context manager."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("[dim]{task.fields[what]}"),
            console=console,
            transient=True,
            refresh_per_second=2,  # it shares the cores with what is measured
            disable=not console.is_terminal,
        )
        self._task: TaskID | None = None

    def __enter__(self) -> PartProgress:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def start(self, part: str, count: int) -> None:
        """Show the bar of a part."""
        if self._task is not None:
            self._progress.remove_task(self._task)
        self._task = self._progress.add_task(part, total=count, what="")

    def tick(self, what: str) -> None:
        """Show what is measured now."""
        assert self._task is not None
        self._progress.update(self._task, what=what)

    def finish_row(self, row: dict[str, Any]) -> None:
        """Move the bar and print the row in one line."""
        assert self._task is not None
        self._progress.advance(self._task)
        if row["skipped"] is not None:
            said = f"skipped, {row['skipped']}"
        elif row["ratio"] is not None:
            said = f"{row['of']} / {row['to']} = {row['ratio']['median']:.2f}"
        else:
            said = "measured"
        self._console.print(Text(f"· {row['name']}: {said}", style="dim"), soft_wrap=True)
