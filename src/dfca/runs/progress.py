"""Show a run on the terminal: bars where there is one, a line per finished trial where the output goes to a file."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text

from dfca.experiment.sweep import Trial, TrialGroup
from dfca.runs.sink import NullSink
from dfca.runs.store.metric import DASH, ShownMetric, metric_named
from dfca.runs.store.rows import TrialRow
from dfca.sim.metrics_table import EvaluationRow


class Bars(NullSink):
    """A sink with a bar for the whole run and one for each trial under way. Use it as a context manager."""

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
        self._all = self._progress.add_task("all trials", total=None, count="", detail="")
        self._tasks: dict[tuple[str, int, str], tuple[TaskID, float]] = {}
        self._trials = self._finished = 0

    def __enter__(self) -> Bars:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def note(self, text: str, group: TrialGroup | None = None) -> None:
        self._console.print(Text(f"· {text}", style="dim"), soft_wrap=not self._live)

    def start_run(self, trials: Sequence[Trial], finished: int) -> None:
        """Show the bar of the whole run, which counts rounds."""
        self._trials, self._finished = len(trials), finished
        if finished:
            self.note(f"{finished} of {len(trials)} trials are finished already")
        rounds = sum(trial.point.config.rounds for trial in trials)
        done = rounds * finished // max(1, len(trials))
        self._progress.update(self._all, total=rounds, completed=done, count=f"{finished}/{len(trials)} trials")

    def prepare_trial(self, trial: Trial) -> None:
        """Show that a trial is made ready, by a bar that says how long it takes."""
        task = self._progress.add_task(str(trial), total=None, count="start", detail="models, elections")
        self._tasks[trial.key] = (task, 0.0)

    def start_trial(self, trial: Trial, round: int, time_s: float = 0.0) -> None:
        if trial.key in self._tasks:
            self._progress.remove_task(self._tasks[trial.key][0])
        done, count = _place(trial, round, time_s)
        task = self._progress.add_task(str(trial), total=trial.point.config.rounds, count=count, detail="")
        self._progress.update(task, completed=done)
        self._tasks[trial.key] = (task, done)
        self._progress.advance(self._all, done)

    def finish_round(self, trial: Trial, round: int, metrics: EvaluationRow | None, time_s: float = 0.0) -> None:
        """Move both bars; show the score where it is known."""
        task, before = self._tasks[trial.key]
        done, count = _place(trial, round, time_s)
        self._tasks[trial.key] = (task, done)
        self._progress.update(task, completed=done, count=count)
        if metrics:
            self._progress.update(task, detail=_score(metric_named(metrics.metric), metrics.score))
        self._progress.advance(self._all, done - before)

    def finish_trial(self, trial: Trial, row: TrialRow) -> None:
        """Count the trial; without bars, print its result."""
        result = _score(row.metric, row.score)
        if row.cluster_accuracy is not None:
            result += f", cluster accuracy {row.cluster_accuracy:.3f}"
        self._end(trial, f"{result}, {row.seconds:.1f} s", self._live)

    def fail_trial(self, trial: Trial, error: str) -> None:
        self._end(trial, f"failed: {error}", False)

    def _end(self, trial: Trial, result: str, silent: bool) -> None:
        self._finished += 1
        self._progress.update(self._all, count=f"{self._finished}/{self._trials} trials")
        if trial.key in self._tasks:
            task, done = self._tasks.pop(trial.key)
            self._progress.remove_task(task)
            self._progress.advance(self._all, trial.point.config.rounds - done)
        if not silent:
            place = f"{self._finished}/{self._trials}"
            self._console.print(
                f"{place:>7}  {trial}: {result}", highlight=False, markup=False, soft_wrap=not self._live
            )


def _place(trial: Trial, round: int, time_s: float) -> tuple[float, str]:
    """Return how far a trial is, as a part of its rounds and in words; the nearer end counts."""
    config = trial.point.config
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


def _score(metric: ShownMetric, score: float | None) -> str:
    return f"{metric.name} {DASH if score is None else f'{score:.3f}'}"
