"""Show a run on the terminal: bars where there is one, a line per finished cell where the output goes to a file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text

from dfca.experiment.sweep import Cell


class Bars:
    """A listener with a bar for the whole run and one for each cell under way. Use it as a context manager."""

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
        self._tasks: dict[tuple[str, int, str], tuple[TaskID, float]] = {}
        self._cells = self._finished = 0

    def __enter__(self) -> Bars:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def note(self, text: str) -> None:
        """Print a note above the bars."""
        self._console.print(Text(f"· {text}", style="dim"), soft_wrap=not self._live)

    def start(self, cells: Sequence[Cell], finished: int) -> None:
        """Show the bar of the whole run, which counts rounds."""
        self._cells, self._finished = len(cells), finished
        if finished:
            self.note(f"{finished} of {len(cells)} cells are finished already")
        rounds = sum(cell.point.config.rounds for cell in cells)
        done = rounds * finished // max(1, len(cells))
        self._progress.update(self._all, total=rounds, completed=done, count=f"{finished}/{len(cells)} cells")

    def start_cell(self, cell: Cell, round: int, time_s: float = 0.0) -> None:
        """Show the bar of a cell."""
        done, count = _place(cell, round, time_s)
        task = self._progress.add_task(str(cell), total=cell.point.config.rounds, count=count, detail="")
        self._progress.update(task, completed=done)
        self._tasks[cell.key] = (task, done)
        self._progress.advance(self._all, done)

    def finish_round(self, cell: Cell, round: int, metrics: dict[str, Any] | None, time_s: float = 0.0) -> None:
        """Move both bars; say the accuracy where it is known."""
        task, before = self._tasks[cell.key]
        done, count = _place(cell, round, time_s)
        self._tasks[cell.key] = (task, done)
        self._progress.update(task, completed=done, count=count)
        if metrics:
            self._progress.update(task, detail=f"accuracy {metrics['accuracy']:.3f}")
        self._progress.advance(self._all, done - before)

    def finish_cell(self, cell: Cell, row: dict[str, Any]) -> None:
        """Count the cell; without bars, print its result."""
        found = f"accuracy {row['accuracy']:.3f}"
        if row.get("cluster_accuracy") is not None:
            found += f", cluster accuracy {row['cluster_accuracy']:.3f}"
        self._end(cell, f"{found}, {row['seconds']:.1f} s", self._live)

    def fail_cell(self, cell: Cell, sentence: str) -> None:
        """Count the cell and print why it failed."""
        self._end(cell, f"failed: {sentence}", False)

    def _end(self, cell: Cell, said: str, silent: bool) -> None:
        self._finished += 1
        self._progress.update(self._all, count=f"{self._finished}/{self._cells} cells")
        if cell.key in self._tasks:
            task, done = self._tasks.pop(cell.key)
            self._progress.remove_task(task)
            self._progress.advance(self._all, cell.point.config.rounds - done)
        if not silent:
            place = f"{self._finished}/{self._cells}"
            self._console.print(f"{place:>7}  {cell}: {said}", highlight=False, markup=False, soft_wrap=not self._live)


def _place(cell: Cell, round: int, time_s: float) -> tuple[float, str]:
    """Tell how far a cell is, as a part of its rounds and in words; the nearer end counts."""
    config = cell.point.config
    until_s = config.clock.until_s if config.clock else None
    if until_s is not None:
        return max(config.rounds * min(1.0, time_s / until_s), round), f"{time_s:,.0f}/{until_s:,.0f} virtual s"
    clock = f", {time_s:,.0f} virtual s" if config.world else ""
    return min(round, config.rounds), f"round {round}/{config.rounds}{clock}"


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
