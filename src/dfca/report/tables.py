"""The results of a run as tables of text for people, the same for every format.

Without a sweep: one row per algorithm. With one varying key: a table per measure, values down and algorithms across.
With several keys, or where that is too wide: one row per point and algorithm; and where that is too wide too, a table
per point.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any, NamedTuple

from dfca.experiment.sweep import write
from dfca.report.paper import published
from dfca.report.rows import summary_rows, varying
from dfca.report.statistics import DIVERGED, difference_title, statistics_notes, write_difference
from dfca.report.wording import DASH, duration, folded, megabytes, one_line, percent, span
from dfca.runs.store.metric import ShownMetric
from dfca.runs.store.reading import count_trials

DISPENSABLE = (
    *("talks to", "MB per client", "time per run", "runs", "difference"),
    *("all models", "k right", "all clusters found", "lost a cluster"),
)
Row = Mapping[str, Any]


class TableCell(NamedTuple):
    """One text of a table."""

    text: str
    bold: bool = False


class TextTable(NamedTuple):
    """A table of texts. Titles of columns may have two lines."""

    title: str
    columns: list[str]
    words: list[bool]  # which columns are words, set to the left
    rows: list[list[TableCell]]
    partial: Sequence[bool] = ()  # which rows have no finished run; none by default

    @property
    def width(self) -> int:
        """Count the characters of a line, a blank on both sides of each column."""
        texts = ([*title.split("\n"), *(row[i].text for row in self.rows)] for i, title in enumerate(self.columns))
        return sum(2 + max(map(len, column)) for column in texts)

    @property
    def lines(self) -> list[tuple[list[TableCell], bool, bool]]:
        """Return each row with two facts: whether it is partial, and whether it continues the point above it."""
        partial = self.partial or [False] * len(self.rows)
        last = sum(self.words) - 1  # the last column of words names what is compared, those before it the point
        keys = [[cell.text for cell, words in zip(row, self.words, strict=True) if words][:last] for row in self.rows]
        continues = [bool(each) and not any(each) for each in keys]
        return list(zip(self.rows, partial, continues, strict=True))

    def without(self, column: str) -> TextTable:
        """Return the table without a column (its title may end in a sign), itself where it has no such column."""
        kept = [i for i, title in enumerate(self.columns) if not f"{one_line(title)} ".startswith(f"{column} ")]
        return self._replace(
            columns=[self.columns[i] for i in kept],
            words=[self.words[i] for i in kept],
            rows=[[row[i] for i in kept] for row in self.rows],
        )

    def fitted(self, width: int | None, dispensable: Sequence[str]) -> TextTable:
        """Return the table no wider than `width` characters, as far as leaving out dispensable columns allows."""
        table = self
        for column in dispensable:
            if width is not None and table.width > width:
                table = table.without(column)
        return table


class Column(NamedTuple):
    """A column of the table with a row per algorithm."""

    title: str
    write: Callable[[Row], str]
    measure: str = ""  # the best of the decentralised is set in bold
    words: bool = False  # set to the left
    shown: Callable[[Row], bool] | None = None  # the column is left out where this holds for no row


def result_tables(summary: Row, width: int | None = None) -> list[TextTable]:
    """Make the tables of accuracies and costs, no wider than `width` characters as far as possible."""
    rows, keys, swept = summary_rows(summary), varying(summary), "points" in summary
    if swept and len(keys) == 1 and len({row["algorithm"] for row in rows}) > 1:
        crossed = _crossed(rows, keys[0])
        if width is None or all(table.width <= width for table in crossed):
            return crossed
    whole = _listed(rows, keys, swept).fitted(width, DISPENSABLE)
    if not keys or width is None or whole.width <= width:
        return [whole]
    labels = dict.fromkeys(row["label"] for row in rows)
    groups = {label: [row for row in rows if row["label"] == label] for label in labels}
    return [
        _listed(group, (), True).fitted(width, DISPENSABLE)._replace(title=label) for label, group in groups.items()
    ]


def notes(summary: Row) -> list[str]:
    """Return what the reader of the tables must know, line by line."""
    rows = summary_rows(summary)
    first = []
    if any(row["runs"] > 1 for row in rows):
        first.append("mean ± standard deviation over seeds")
        if "points" in summary:
            first[0] += f" ({span([row['runs'] for row in rows if not row['partial']])} runs)"
    if any(row["best"] for row in rows):
        less = "" if metric_of_rows(rows).higher_is_better else f" (less {metric_of_rows(rows).name} is better)"
        first.append(f"bold: the best of those that talk to neighbours{less}")
    lines = ["; ".join(first)] if first else []
    if any(row["published_mean"] is not None for row in rows):
        experiment = str(summary.get("experiment", ""))
        scale = "" if summary.get("scale") == "paper" else "; this run is smaller, so look at the order"
        lines.append(f"published: {published.where(experiment)} of the paper, five seeds, its own size{scale}")
        lines += [f"a slip of the paper: {slip}" for slip in published.slips(experiment)]
    lines += statistics_notes(rows)
    for name in dict.fromkeys(row["algorithm"] for row in rows if row["informed"]):
        lines.append(f"{name} knows the true clusters: the ceiling, not a method")
    if any(row["partial"] for row in rows):
        lines.append("* not finished: the numbers so far")
    if any(row["unfinished"] and not row["partial"] for row in rows):
        lines.append("runs: finished + unfinished; the unfinished ones are not in the means")
    if "points" in summary:
        finished, asked = count_trials(summary)
        if finished < asked:
            lines.append(f"{finished} of {asked} runs are finished")
    return lines + _failures(summary)


def _failures(summary: Row) -> list[str]:
    failed = sorted((run["error"], run["algorithm"], run["seed"]) for run in summary["runs"] if run.get("error"))
    lines = []
    for error, group in groupby(failed, key=itemgetter(0)):  # in which order they failed is up to the workers
        (_, name, seed), *others = group
        more = f"; and {len(others)} more" if others else ""
        lines.append(f"failed: {name}, seed {seed}: {error}{more}")
    return lines


def _crossed(rows: Sequence[Row], key: str) -> list[TextTable]:
    """Make a table per measure: values of the key down, algorithms across."""
    names = list(dict.fromkeys(row["algorithm"] for row in rows))
    at: dict[str, dict[str, Row]] = {}
    for row in rows:
        at.setdefault(write(row["point"].get(key, DASH)), {})[row["algorithm"]] = row
    made = []
    metric = metric_of_rows(rows)
    for title, text_of, measure in _crossed_columns(metric, one_line(difference_title(rows))):
        shown = [name for name in names if any(text_of(r[name]) not in (DASH, "0") for r in at.values() if name in r)]
        if not shown:
            continue
        body = [
            [TableCell(value), *(_crossing(across.get(name), text_of, measure) for name in shown)]
            for value, across in at.items()
        ]
        made.append(TextTable(title, [key, *shown], [True] + [False] * len(shown), body))
    return made


def _crossing(row: Row | None, text_of: Callable[[Row], str], measure: str) -> TableCell:
    if row is None:
        return TableCell(DASH)
    diverged = f" {DIVERGED}" if row["diverged_runs"] and measure == "accuracy" else ""
    return TableCell(text_of(row) + ("*" if row["partial"] else "") + diverged, measure in row["best"])


def _listed(rows: Sequence[Row], keys: Sequence[str], swept: bool) -> TextTable:
    """Make a table of one line per row; what a line shares with the one above is not repeated."""
    columns = [
        each
        for each in _columns(keys, swept, metric_of_rows(rows), difference_title(rows))
        if each.shown is None or any(map(each.shown, rows))
    ]
    body: list[list[TableCell]] = []
    before = None
    for row in rows:
        line = [TableCell(column.write(row), column.measure in row["best"]) for column in columns]
        if keys and row["label"] == before:
            line[: len(keys)] = [TableCell("")] * len(keys)
        before = row["label"]
        body.append(line)
    partial = [bool(row["partial"]) for row in rows]
    return TextTable("", [column.title for column in columns], [column.words for column in columns], body, partial)


def metric_of_rows(rows: Sequence[Row]) -> ShownMetric:
    """Return the metric that rows show."""
    return rows[0]["metric"] if rows else ShownMetric()


def _columns(keys: Sequence[str], swept: bool, metric: ShownMetric, difference: str) -> list[Column]:
    def at(key: str) -> Callable[[Row], str]:
        return lambda row: write(row["point"][key]) if key in row["point"] else ""

    def known(key: str) -> Callable[[Row], bool]:
        return lambda row: row[key] is not None

    partners = [] if swept else [Column("talks to", itemgetter("via"), words=True)]
    found = Column("all clusters\nfound", itemgetter("found"), shown=known("found_of"))
    lost = Column("lost a\ncluster", itemgetter("lost"))
    return [
        *(Column(folded(key), at(key), words=True) for key in keys),
        Column("algorithm", _name, words=True),
        *partners,
        Column(f"{metric.name}\n{metric.sign}".rstrip(), _measure("accuracy"), "accuracy"),
        Column(
            f"no last\nstep {metric.sign}".rstrip(), _measure("before_personal"), shown=known("before_personal_mean")
        ),
        Column(difference, write_difference, shown=known("compared")),
        Column("published\n%", _published, shown=known("published_mean")),
        Column("differ-\nence", _difference, shown=known("published_mean")),
        Column(
            f"all models\n{metric.sign}".rstrip(),
            _measure("all_models_accuracy"),
            "all_models_accuracy",
            shown=known("all_models_accuracy_mean"),
        ),
        Column("right\ncluster %", _right_cluster, "cluster_accuracy", shown=known("cluster_accuracy_mean")),
        found if swept else lost,
        Column("k found", itemgetter("k"), shown=lambda row: row["k"] != DASH),
        Column("k right", itemgetter("k_right"), shown=lambda row: row["k_right"] != DASH),
        Column("runs", _runs),
        Column("time\nper run", lambda row: duration(row["seconds"])),
        Column("MB per\nclient", _megabytes, shown=known("megabytes_per_client")),
    ]


def _name(row: Row) -> str:
    return str(row["algorithm"]) + ("*" if row["partial"] else "") + (f" {DIVERGED}" if row["diverged_runs"] else "")


def _measure(name: str) -> Callable[[Row], str]:
    return lambda row: row["metric"].write(row[f"{name}_mean"], row[f"{name}_std"])


def _right_cluster(row: Row) -> str:
    return percent(row["cluster_accuracy_mean"], row["cluster_accuracy_std"])


def _published(row: Row) -> str:
    if row["published_mean"] is None:
        return DASH
    return f"{100 * row['published_mean']:.1f} ± {100 * row['published_std']:.2f}"


def _difference(row: Row) -> str:
    return DASH if row["difference_points"] is None else f"{row['difference_points']:+.1f}".replace("-", "−")


def _runs(row: Row) -> str:
    if row["partial"]:
        return f"0 + {row['unfinished']}"
    return f"{row['runs']}" + (f" + {row['unfinished']}" if row["unfinished"] else "")


def _megabytes(row: Row) -> str:
    return megabytes(row["megabytes_per_client"])


def _crossed_columns(metric: ShownMetric, difference: str) -> tuple[tuple[str, Callable[[Row], str], str], ...]:
    return (
        (metric.title, _measure("accuracy"), "accuracy"),
        (f"{metric.title}: {difference}", write_difference, ""),
        ("accuracy %, published", _published, ""),
        ("difference in points", _difference, ""),
        (f"all models {metric.sign}".rstrip(), _measure("all_models_accuracy"), "all_models_accuracy"),
        ("right cluster %", _right_cluster, "cluster_accuracy"),
        ("all clusters found", itemgetter("found"), ""),
        ("k found", itemgetter("k"), ""),
        ("runs with the right k", itemgetter("k_right"), ""),
        ("MB per client", _megabytes, ""),
    )
