"""Results in memory as figures and tables: those that a run folder has."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from dfca.base.errors import unknown
from dfca.base.notebook import table, text_table
from dfca.report.formats import TableOptions, latex
from dfca.report.rows import RunReport
from dfca.report.tables import TableCell, TextTable, result_tables
from dfca.report.wording import one_line
from dfca.runs.store.metric import ACCURACY, metric_named
from dfca.runs.store.reading import Run
from dfca.runs.store.rows import TrialRow
from dfca.sim.metrics_table import EvaluationRow
from dfca.sim.notes import diverged_clients

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from dfca.api.result import Result


WIDTH = 110  # characters of a printed table, as far as leaving out columns allows


def run_of(results: Sequence[Result]) -> Run:
    """Make of results what reading a run folder makes of it."""
    names = list(dict.fromkeys(result.algorithm for result in results))
    seeds = list(dict.fromkeys(result.seed for result in results))
    lines = [
        EvaluationRow.of({"algorithm": result.algorithm, "seed": result.seed, **row})
        for result in results
        for row in result.evaluations
    ]
    clients = len(results[0].evaluations[-1].assignments)
    config = {"algorithms": names, "seeds": seeds, "clients": clients}
    return Run(Path(), config, "", {}, {"clients": clients}, list(map(_trial, results)), lines, {}, [], [])


class Shown:
    """What a `Result` and a `Comparison` show alike: figures, and tables of LaTeX."""

    @property
    def _results(self) -> Sequence[Result]:
        raise NotImplementedError

    def plot(
        self,
        measure: str | None = None,
        against: Literal["round", "traffic", "time"] = "round",
        width: float = 6.4,
        font_size: float = 11,
    ) -> Figure:
        """Draw how a measure develops, a line per algorithm with a band of one standard deviation over seeds.

        Args:
            measure: A column of `metrics`; None: the score.
            against: "round", "traffic" (megabytes that a client has sent and received), or virtual "time".
            width: Of the figure in inches, in print.
            font_size: Of its labels in points, in print.

        Returns:
            A figure of matplotlib, which a notebook shows; `figure.savefig("curves.pdf")` writes it.

        Raises:
            ConfigError: If the measure or the axis is unknown, or the letters have no room.
        """
        from dfca.report.drawing.curves import AXES, curves_of
        from dfca.report.drawing.plots import styles
        from dfca.report.drawing.svg import FigureSize, for_paper_, sized
        from dfca.report.virtual.plots import draw_courses

        if against not in AXES:
            raise unknown("value of against", against, AXES)
        run, size = run_of(self._results), FigureSize(width, font_size)
        name = measure or run.metric.key
        numbers = {key for row in run.metrics for key, value in row.items() if isinstance(value, int | float)}
        if name not in numbers:
            raise unknown("measure", name, numbers - {"seed"})
        series = curves_of(run, name, against)
        series = {label: curve for label, curve in series.items() if against == "round" or any(curve.x)}
        metric = run.metric if name == run.metric.key else metric_named(name)
        if name in (f"all_models_{run.metric.key}", "cluster_accuracy"):
            shares = ACCURACY if name == "cluster_accuracy" else run.metric
            metric = shares._replace(name=name.replace("_", " "), key=name)
        with sized(size):
            figure = draw_courses(series, styles(run.algorithms), AXES[against], metric=metric)
        for_paper_(figure, size)
        return figure

    def to_latex(self, columns: Sequence[str] = (), caption: str = "", names: Literal["own", "paper"] = "own") -> str:
        """Write the last scores as a LaTeX table, as `dfca report --format latex` does of a run folder.

        Args:
            columns: Of the table, such as ["accuracy", "right cluster"]; none: all.
            caption: Makes the table a float of one column or, where it is too wide, of two.
            names: "paper": algorithms are named as papers name them.

        Returns:
            The text, for \\usepackage{booktabs}.

        Raises:
            ConfigError: If there is no such column, or no such names.
        """
        if names not in ("own", "paper"):
            raise unknown("value of names", names, ("own", "paper"))
        report = RunReport.of(run_of(self._results))
        return latex(report.with_paper_names() if names == "paper" else report, TableOptions(columns, caption))


def printed(report: RunReport) -> list[TextTable]:
    """Make the tables of a report as plain text, without the columns that matter least where they are wide."""
    tables = result_tables(report, WIDTH)
    return [table._replace(rows=[[TableCell(text) for text, _ in row] for row in table.rows]) for table in tables]


def as_text(made: TextTable) -> str:
    """Align a table for a terminal."""
    head = f"{made.title}\n" if made.title else ""
    return head + text_table(list(map(one_line, made.columns)), [[cell.text for cell in row] for row in made.rows])


def as_html(title: str, tables: Sequence[TextTable], notes: Sequence[str]) -> str:
    """Make tables for a notebook, the notes below the last one."""
    last = len(tables) - 1
    return "".join(
        table(
            "\n".join(filter(None, (title if number == 0 else "", made.title))),
            list(map(one_line, made.columns)),
            [[cell.text for cell in row] for row in made.rows],
            notes if number == last else (),
        )
        for number, made in enumerate(tables)
    )


def _trial(result: Result) -> TrialRow:
    last = result.evaluations[-1]
    facts: dict[str, Any] = {"momentum": result.momentum, "diverged_clients": diverged_clients(result.notes)}
    facts["metric"] = metric_named(last.metric)._asdict()
    if result.simulation is not None:
        setting = result.simulation.setting
        facts["clusters"] = setting.true_clusters if setting.split.clusters is not None else setting.clusters
        facts["metric"] = setting.learns.metric.facts()
    numbers = {key: value for key, value in last.items() if isinstance(value, int | float)}
    seconds = {"seconds": sum((last.get("seconds") or {}).values()) or None}
    head = {"algorithm": result.algorithm, "seed": result.seed, "rounds": last.round, "finished": True}
    return TrialRow.of(numbers | seconds | facts | head)
