"""The tables of a run in every format that people paste somewhere: terminal, Markdown, LaTeX, CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Sequence
from typing import NamedTuple

from rich.table import Table
from rich.text import Text

from dfca.base.errors import ConfigError, unknown
from dfca.report.paper.connectivity import connectivity_tables
from dfca.report.paper.theory import theory_notes, theory_tables
from dfca.report.rows import RunReport
from dfca.report.tables import DISPENSABLE, TextTable, empty_columns, names_column, notes, result_tables
from dfca.report.virtual.tables import virtual_tables
from dfca.report.wording import one_line, slug
from dfca.runs.store.metric import DASH

COLUMN_POINTS, PAGE_POINTS = 229.0, 469.0  # of LaTeX's article in two columns; IEEE's are 252 and 516 wide
CHARACTER_POINTS = 4.7  # of a letter of 8 points, bold ones and signs among them


class TableOptions(NamedTuple):
    """What tables show."""

    columns: Sequence[str] = ()  # none: all
    caption: str = ""  # of a LaTeX table; without one it is a bare tabular


PLAIN = TableOptions()


def all_tables(report: RunReport, width: int | None = None, options: TableOptions = PLAIN) -> list[TextTable]:
    """Make the tables of a run: results and what the graphs do to them; of a run that measures it, the theory.

    Raises ConfigError if no table has a column that was asked for.
    """
    run = report.run
    width = None if options.columns else width
    tables = theory_tables(run) or [
        *result_tables(report, width),
        *virtual_tables(run, width),
        *connectivity_tables(run),
    ]
    return _chosen(tables, options.columns, empty_columns(report)) if options.columns else tables


def _chosen(tables: Sequence[TextTable], names: Sequence[str], empty: Sequence[str]) -> list[TextTable]:
    """Keep the columns of these names and, where a table has a measure as its title, the tables of these names."""
    made = []
    for table in tables:
        by_title = any(names_column(name, table.title) and (":" in name or ":" not in table.title) for name in names)
        chosen = table if by_title else table.only(names)
        if by_title or len(chosen.columns) > sum(chosen.words):
            made.append(chosen)
    shown = [title for table in made for title in (*table.columns, table.title)]
    for name in names:
        if not any(names_column(name, title) for title in shown):
            if any(names_column(name, title) for title in empty):
                raise ConfigError(f'no row has a value for the column "{name}"; those of clusters need the true ones')
            known = {one_line(title) for table in tables for title in table.columns} | {t.title for t in tables}
            raise unknown("column", name, sorted(known - {""}))
    return made


def all_notes(report: RunReport, tables: Sequence[TextTable] | None = None) -> list[str]:
    """Return what the reader of these tables must know, line by line."""
    return theory_notes(report.run) or notes(report, tables)


def narrow_note(tables: Sequence[TextTable]) -> str:
    """Say which columns a terminal has no room for; an empty text where all are shown."""
    hidden = list(dict.fromkeys(column for table in tables for column in table.left_out))
    if not hidden:
        return ""
    return f"no room for: {', '.join(hidden)}; a wider terminal, report.html and --format markdown show them"


def terminal_tables(tables: Sequence[TextTable], width: int = 100) -> list[Table]:
    """Make the tables that end a run: percent with one decimal, the best of the decentralised in bold."""
    made = []
    for source in tables:
        table = Table(
            box=None,
            padding=(0, 1),
            header_style="dim",
            title=source.title or None,
            title_justify="left",
            title_style="bold",
            min_width=min(len(source.title) + 2, width),
        )
        for title, words in zip(source.columns, source.words, strict=True):
            table.add_column(title, justify="left" if words else "right", vertical="bottom", no_wrap=True)
        for row, partial, _ in source.lines:
            cells = [Text(cell.text, style="bold" if cell.bold else "") for cell in row]
            table.add_row(*cells, style="dim" if partial else "")
        made.append(table)
    return made


def markdown(report: RunReport, options: TableOptions = PLAIN) -> str:
    lines: list[str] = []
    tables = all_tables(report, None, options)
    for table in tables:
        lines += [f"**{table.title}**", ""] if table.title else []
        lines.append(_pipes([one_line(title) for title in table.columns]))
        lines.append(_pipes(["---" if words else "---:" for words in table.words]))
        lines += [_pipes([f"**{text}**" if bold else text for text, bold in row]) for row in table.rows]
        lines.append("")
    lines += [note.replace("*", r"\*") + "  " for note in all_notes(report, tables)]
    return "\n".join(lines).rstrip() + "\n"


def latex(report: RunReport, options: TableOptions = PLAIN) -> str:
    """Write the tables in LaTeX, for \\usepackage{booktabs}, with their notes as comments.

    With a caption each is a float that fits into one column of a page of two, or else across both.
    """
    lines: list[str] = []
    tables = all_tables(report, None, options)
    for number, table in enumerate(tables):
        lines += [f"% {table.title}"] if table.title else []
        if not options.caption:
            lines += [*_tabular(table, [_tex(one_line(title)) for title in table.columns]), ""]
            continue
        place = f"{slug(report.run.experiment or 'results')}{f'-{number + 1}' if number else ''}"
        lines += [*_float(table, options, place), ""]
    lines += [f"% {note}" for note in all_notes(report, tables)]
    return "\n".join(lines).rstrip() + "\n"


def _tabular(table: TextTable, titles: Sequence[str]) -> list[str]:
    lines = [rf"\begin{{tabular}}{{{''.join('l' if words else 'r' for words in table.words)}}}"]
    lines += [r"\toprule", _ampersands(titles), r"\midrule"]
    for row in table.rows:
        lines.append(_ampersands([rf"\textbf{{{_tex(text)}}}" if bold else _tex(text) for text, bold in row]))
    return [*lines, r"\bottomrule", r"\end{tabular}"]


def _float(table: TextTable, options: TableOptions, place: str) -> list[str]:
    """Write a table with a caption, in small letters; titles of columns may have several lines."""
    fitting = table if options.columns else table.fitted(_fitting_characters(table), DISPENSABLE)
    width = _points(fitting)
    star = "*" if width > COLUMN_POINTS else ""
    lines = [f"% no room for: {', '.join(fitting.left_out)}; --columns chooses"] if fitting.left_out else []
    if width > PAGE_POINTS:
        lines.append("% wider than a page: choose fewer --columns")
    title = f": {table.title}" if table.title else ""
    lines += [rf"\begin{{table{star}}}[t]", r"\centering", r"\footnotesize", r"\setlength{\tabcolsep}{3pt}"]
    lines += [rf"\caption{{{_tex(options.caption + title)}}}", rf"\label{{tab:{place}}}"]
    titles = [
        _stacked([_tex(line) for line in heading.split("\n")], words)
        for heading, words in zip(fitting.columns, fitting.words, strict=True)
    ]
    return [*lines, *_tabular(fitting, titles), rf"\end{{table{star}}}"]


def _stacked(lines: Sequence[str], words: bool) -> str:
    return lines[0] if len(lines) == 1 else rf"\shortstack[{'l' if words else 'r'}]{{" + r" \\ ".join(lines) + "}"


def _points(table: TextTable) -> float:
    """Estimate how wide a table is in \\footnotesize with 3pt on both sides of a column."""
    return (table.width - 2 * len(table.columns)) * CHARACTER_POINTS + 6 * len(table.columns)


def _fitting_characters(table: TextTable) -> int:
    """Return the width in characters, two of them beside each column, that fits across a page."""
    return int((PAGE_POINTS - 6 * len(table.columns)) / CHARACTER_POINTS) + 2 * len(table.columns)


def comma_separated(report: RunReport, options: TableOptions = PLAIN) -> str:
    """Write the numbers themselves, one line per algorithm, in a sweep per point and algorithm; empty: not known.

    Raises ConfigError if there is no column that was asked for.
    """
    rows, keys = [row.stored() for row in report.rows], report.run.varying
    dropped = ("point", "informed", "partial", "found", "lost", "via")
    names = [name for name in rows[0] if name not in dropped] if rows else ["algorithm"]
    for name in options.columns:
        if name not in names:
            raise unknown("column", name, names)
    names = list(dict.fromkeys(["algorithm", *options.columns])) if options.columns else names
    file = io.StringIO()
    table = csv.writer(file, lineterminator="\n")
    table.writerow([*keys, *names])
    for row in rows:
        values = [row["point"].get(key) for key in keys] + [row[name] for name in names]
        table.writerow(["" if value is None or value == DASH else value for value in values])
    return file.getvalue()


FORMATS: dict[str, Callable[[RunReport, TableOptions], str]] = {
    "markdown": markdown,
    "csv": comma_separated,
    "latex": latex,
}


def _pipes(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _ampersands(cells: Sequence[str]) -> str:
    return " & ".join(cells) + r" \\"


def _tex(text: str) -> str:
    """Write a text for LaTeX.

    >>> _tex("93.7 ± 0.1"), _tex("accuracy %")
    ('93.7 $\\\\pm$ 0.1', 'accuracy \\\\%')
    """
    special = {
        "†": r"$^\dagger$",
        "‡": r"$^\ddagger$",
        "±": r"$\pm$",
        "−": "$-$",
        "λ": r"$\lambda$",
        "²": "$^2$",
        DASH: "--",
    }
    special |= {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\^{}"}
    special |= {letter: "\\" + letter for letter in "&%$#_{}"}
    return "".join(special.get(letter, letter) for letter in text)
