"""The results of a run as tables of text for people, the same for every format.

Without a sweep: one row per algorithm. With one varying key: a table per measure, values down and algorithms across.
With several keys, or where that is too wide: one row per point and algorithm; and where that is too wide too, a table
per point.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from operator import attrgetter
from typing import NamedTuple

from dfca.experiment.variants import write
from dfca.report.findings import idle_keys
from dfca.report.paper import published
from dfca.report.rows import AlgorithmRow, Measure, RunReport, by_point, metric_of_rows
from dfca.report.statistics import DIVERGED, difference_title, statistics_notes, write_difference
from dfca.report.wording import duration, folded, megabytes, one_line, percent, span
from dfca.runs.store.metric import DASH
from dfca.runs.store.rows import TrialRow

DISPENSABLE = (
    *("talks to", "MB per client", "time per run", "runs", "difference"),
    *("all models", "k right", "all clusters found", "lost a cluster"),
)
FACTS_IN_WORDS = ("talks to",)  # columns of words that a reader can do without
Write = Callable[[AlgorithmRow], str]


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
    left_out: tuple[str, ...] = ()  # columns for which there was no room

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
        continues = [bool(texts) and not any(texts) for texts in keys]
        return list(zip(self.rows, partial, continues, strict=True))

    @property
    def bold(self) -> bool:
        return any(cell.bold for row in self.rows for cell in row)

    def without(self, column: str) -> TextTable:
        """Return the table without a column (its title may end in a sign), itself where it has no such column."""
        return self._of([i for i, title in enumerate(self.columns) if not names_column(column, title)])

    def only(self, names: Sequence[str]) -> TextTable:
        """Return the table with the columns of words and those of the names, in the order of the names."""
        words = enumerate(zip(self.columns, self.words, strict=True))
        names_row = [i for i, (title, is_words) in words if is_words and one_line(title) not in FACTS_IN_WORDS]
        asked = [i for name in names for i, title in enumerate(self.columns) if names_column(name, title)]
        return self._of(list(dict.fromkeys([*names_row, *asked])))

    def _of(self, kept: Sequence[int]) -> TextTable:
        return self._replace(
            columns=[self.columns[i] for i in kept],
            words=[self.words[i] for i in kept],
            rows=[[row[i] for i in kept] for row in self.rows],
        )

    def fitted(self, width: int | None, dispensable: Sequence[str]) -> TextTable:
        """Return the table no wider than `width` characters, as far as leaving out dispensable columns allows."""
        table, left_out = self, []
        for column in dispensable:
            if width is not None and table.width > width and len(table.without(column).columns) < len(table.columns):
                table = table.without(column)
                left_out.append(column)
        return table._replace(left_out=tuple(left_out))


def names_column(name: str, title: str) -> bool:
    """Return whether a name is that of a column, whose title may end in a sign.

    >>> names_column("all-models", "all models %"), names_column("al", "all models %")
    (True, False)
    """
    return f"{one_line(title)} ".lower().startswith(f"{name.strip().lower().replace('-', ' ').replace('_', ' ')} ") or (
        name.strip() == one_line(title)
    )


class Column(NamedTuple):
    """A column of the table with a row per algorithm; left out where it says nothing of any row."""

    title: str
    write: Write
    across: str = ""  # the title of a table of its own, algorithms across; none without
    measure: Measure | None = None  # the best of the decentralised is set in bold
    words: bool = False  # set to the left
    always: bool = False  # never left out


def result_tables(report: RunReport, width: int | None = None) -> list[TextTable]:
    """Make the tables of scores and costs, no wider than `width` characters as far as possible."""
    rows, keys, swept = report.rows, report.run.varying, report.run.swept
    if swept and len(keys) == 1 and len({row.algorithm for row in rows}) > 1:
        crossed = _crossed(rows, keys[0])
        if width is None or all(table.width <= width for table in crossed):
            return crossed
    whole = _listed(rows, keys, swept).fitted(width, DISPENSABLE)
    if not keys or width is None or whole.width <= width:
        return [whole]
    return [
        _listed(group, (), True).fitted(width, DISPENSABLE)._replace(title=group[0].label) for group in by_point(rows)
    ]


def empty_columns(report: RunReport) -> list[str]:
    """Name the columns that are left out because no row has a value for them."""
    rows = report.rows
    columns = _columns(rows, (), report.run.swept)
    return ["all clusters found", *(one_line(column.title) for column in columns if not _tells(column, rows))]


def notes(report: RunReport, tables: Sequence[TextTable] | None = None) -> list[str]:
    """Return what the reader of the tables must know, line by line; None: of all tables of results."""
    rows, run = report.rows, report.run
    tables = result_tables(report) if tables is None else tables
    first = []
    if any(row.runs > 1 for row in rows):
        runs = f" ({span([row.runs for row in rows if not row.partial])} runs)" if run.swept else ""
        first.append(f"mean ± standard deviation over seeds{runs}")
    if any(table.bold for table in tables):
        less = "" if report.metric.higher_is_better else f" (less {report.metric.name} is better)"
        first.append(f"bold: the best of those that talk to neighbours{less}")
    lines = ["; ".join(first)] if first else []
    if any(row.published is not None for row in rows):
        scale = "" if run.head.get("scale") == "paper" else "; this run is smaller, so look at the order"
        lines.append(f"published: {published.where(run.experiment)} of the paper, five seeds, its own size{scale}")
        lines += [f"a slip of the paper: {slip}" for slip in published.slips(run.experiment)]
    lines += statistics_notes(rows)
    for key in idle_keys(rows, run.varying):
        lines.append(f"{key} changes nothing: scores and traffic are the same at all its values")
    for name in dict.fromkeys(row.algorithm for row in rows if row.informed):
        lines.append(f"{name} knows the true clusters: the ceiling, not a method")
    if any(row.partial for row in rows):
        lines.append("* not finished: the numbers so far")
    if any(row.unfinished and not row.partial for row in rows):
        lines.append("runs: finished + unfinished; the unfinished ones are not in the means")
    finished, asked = run.trial_counts
    if run.swept and finished < asked:
        lines.append(f"{finished} of {asked} runs are finished")
    return lines + _failures(run.trials)


def _failures(trials: Sequence[TrialRow]) -> list[str]:
    failed = sorted((trial.error, trial.algorithm, trial.seed) for trial in trials if trial.error)
    lines = []
    for error, group in groupby(failed, key=lambda failure: failure[0]):  # the order of failures is up to the workers
        (_, name, seed), *others = group
        more = f"; and {len(others)} more" if others else ""
        lines.append(f"failed: {name}, seed {seed}: {error}{more}")
    return lines


def _crossed(rows: Sequence[AlgorithmRow], key: str) -> list[TextTable]:
    """Make a table per measure: values of the key down, algorithms across."""
    names = list(dict.fromkeys(row.algorithm for row in rows))
    at: dict[str, dict[str, AlgorithmRow]] = {}
    for row in rows:
        at.setdefault(write(row.point.get(key, DASH)), {})[row.algorithm] = row
    made = []
    for column in _columns(rows, (), True):
        write_cell = column.write
        shown = [n for n in names if any(write_cell(r[n]) not in (DASH, "0") for r in at.values() if n in r)]
        if not shown or not column.across:
            continue
        body = [
            [TableCell(value), *(_crossing(across.get(name), column) for name in shown)] for value, across in at.items()
        ]
        made.append(TextTable(column.across, [key, *shown], [True] + [False] * len(shown), body))
    return made


def _crossing(row: AlgorithmRow | None, column: Column) -> TableCell:
    if row is None:
        return TableCell(DASH)
    diverged = f" {DIVERGED}" if row.diverged_runs and column.measure == "score" else ""
    return TableCell(column.write(row) + ("*" if row.partial else "") + diverged, column.measure in row.best)


def _listed(rows: Sequence[AlgorithmRow], keys: Sequence[str], swept: bool) -> TextTable:
    """Make a table of one line per row; what a line shares with the one above is not repeated."""
    columns = [column for column in _columns(rows, keys, swept) if _tells(column, rows)]
    body: list[list[TableCell]] = []
    before = None
    for row in rows:
        line = [TableCell(column.write(row), column.measure in row.best) for column in columns]
        if keys and row.label == before:
            line[: len(keys)] = [TableCell("")] * len(keys)
        before = row.label
        body.append(line)
    partial = [row.partial for row in rows]
    return TextTable("", [column.title for column in columns], [column.words for column in columns], body, partial)


def _tells(column: Column, rows: Sequence[AlgorithmRow]) -> bool:
    return column.always or any(column.write(row) != DASH for row in rows)


def _columns(rows: Sequence[AlgorithmRow], keys: Sequence[str], swept: bool) -> list[Column]:
    def at(key: str) -> Write:
        return lambda row: write(row.point[key]) if key in row.point else ""

    metric, difference = metric_of_rows(rows), difference_title(rows)
    partners = [] if swept else [Column("talks to", attrgetter("via"), words=True)]
    found = Column("all clusters\nfound", attrgetter("found"), "all clusters found")
    # of a run whose true clusters are not known, at least which models ended without clients
    lost = Column("lost a\ncluster", attrgetter("lost"))
    sign, all_models = metric.sign, f"all models\n{metric.sign}".rstrip()
    return [
        *(Column(folded(key), at(key), words=True) for key in keys),
        Column("algorithm", _name, words=True),
        *partners,
        Column(f"{metric.name}\n{sign}".rstrip(), _score, metric.title, "score", always=True),
        Column(f"no last\nstep {sign}".rstrip(), lambda row: row.metric.write(*row.before_personal)),
        Column(difference, write_difference, f"{metric.title}: {one_line(difference)}"),
        Column("published\n%", _published, "accuracy %, published"),
        Column("differ-\nence", _difference, "difference in points"),
        Column(all_models, lambda row: row.metric.write(*row.all_models), one_line(all_models), "all_models"),
        Column("right\ncluster %", lambda row: percent(*row.cluster_accuracy), "right cluster %", "cluster_accuracy"),
        found if any(row.found_of is not None for row in rows) else lost,
        Column("k found", attrgetter("k"), "k found"),
        Column("k right", attrgetter("k_right"), "runs with the right k"),
        Column("runs", lambda row: f"{row.runs}" + (f" + {row.unfinished}" if row.unfinished else "")),
        Column("time\nper run", lambda row: duration(row.seconds), always=True),
        Column("MB per\nclient", lambda row: megabytes(row.megabytes_per_client), "MB per client"),
        Column("epsilon", _epsilon, "epsilon"),
    ]


def _name(row: AlgorithmRow) -> str:
    return row.algorithm + ("*" if row.partial else "") + (f" {DIVERGED}" if row.diverged_runs else "")


def _score(row: AlgorithmRow) -> str:
    return row.metric.write(*row.score)


def _published(row: AlgorithmRow) -> str:
    theirs = row.published
    return DASH if theirs is None else f"{100 * theirs.mean:.1f} ± {100 * theirs.std:.2f}"


def _difference(row: AlgorithmRow) -> str:
    return DASH if row.difference_points is None else f"{row.difference_points:+.1f}".replace("-", "−")


def _epsilon(row: AlgorithmRow) -> str:
    return DASH if row.epsilon is None else f"{row.epsilon:,.3g}" if row.epsilon < 1000 else f"{row.epsilon:,.0f}"
