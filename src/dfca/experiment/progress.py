"""Show a run on the terminal: bars where there is one, a line per finished cell where the output goes to a file."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeElapsedColumn
from rich.text import Text


class Bars:
    """A listener with two bars: the whole run, and the rounds of the present cell. Use it as a context manager."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = console.is_terminal
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=30),
            TextColumn("{task.fields[count]}", justify="right"),
            TimeElapsedColumn(),
            _Remaining(),
            TextColumn("[dim]{task.fields[detail]}"),
            console=console,
            transient=True,
            disable=not self._live,
        )
        self._all = self._progress.add_task("all cells", total=None, count="", detail="")
        self._cell = self._progress.add_task("", visible=False, count="", detail="")
        self._cells = self._finished = self._rounds = 0

    def __enter__(self) -> Bars:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def note(self, text: str) -> None:
        """Print a note above the bars."""
        self._console.print(Text(f"· {text}", style="dim"), soft_wrap=not self._live)

    def start(self, cells: int, finished: int, rounds: int) -> None:
        """Show the bar of the whole run."""
        self._cells, self._finished, self._rounds = cells, finished, rounds
        if finished:
            self.note(f"{finished} of {cells} cells are finished already")
        self._progress.update(self._all, total=cells * rounds, completed=finished * rounds)
        self._progress.update(self._all, count=f"{finished}/{cells} cells")

    def start_cell(self, algorithm: str, seed: int, round: int) -> None:
        """Show the bar of a cell."""
        # `reset` forgets the fields that it is not given.
        self._progress.reset(self._cell, total=self._rounds, completed=round, visible=True, count="", detail="")
        self._progress.update(self._cell, description=f"{algorithm}, seed {seed}")
        self._show(round)

    def finish_round(self, round: int, metrics: dict[str, Any] | None) -> None:
        """Move both bars; say the accuracy where it is known."""
        if metrics:
            self._progress.update(self._cell, detail=f"accuracy {metrics['accuracy']:.3f}")
        self._show(round)

    def finish_cell(self, row: dict[str, Any]) -> None:
        """Count the cell; without bars, print its result."""
        self._finished += 1
        self._progress.update(self._all, count=f"{self._finished}/{self._cells} cells")
        if not self._live:
            found = f"accuracy {row['accuracy']:.3f}"
            if row.get("cluster_accuracy") is not None:
                found += f", cluster accuracy {row['cluster_accuracy']:.3f}"
            place = f"{self._finished}/{self._cells}"
            self._console.print(
                f"{place:>7}  {row['algorithm']}, seed {row['seed']}: {found}, {row['seconds']:.1f} s", highlight=False
            )

    def _show(self, round: int) -> None:
        self._progress.update(self._cell, completed=round, count=f"round {round}/{self._rounds}")
        self._progress.update(self._all, completed=self._finished * self._rounds + round)


class _Remaining(ProgressColumn):
    """How long a task will still take, in words a person reads at a glance."""

    max_refresh = 0.5

    def render(self, task: Task) -> Text:
        left = task.time_remaining
        if left is None or task.finished:
            return Text("")
        minutes, seconds = divmod(int(left), 60)
        hours, minutes = divmod(minutes, 60)
        clock = f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
        return Text(f"{clock} left", style="cyan")
