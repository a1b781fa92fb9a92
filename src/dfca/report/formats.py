"""The tables of a run in every format that people paste somewhere: terminal, Markdown, LaTeX, CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Sequence

from rich.table import Table
from rich.text import Text

from dfca.report.paper.connectivity import connectivity_tables
from dfca.report.paper.theory import theory_notes, theory_tables
from dfca.report.rows import RunReport
from dfca.report.tables import TextTable, notes, result_tables
from dfca.report.virtual.tables import virtual_tables
from dfca.report.wording import DASH, one_line


def all_tables(report: RunReport, width: int | None = None) -> list[TextTable]:
    """Make the tables of a run: results and what the graphs do to them; of a run that measures it, the theory."""
    run = report.run
    return theory_tables(run) or [
        *result_tables(report, width),
        *virtual_tables(run, width),
        *connectivity_tables(run),
    ]


def all_notes(report: RunReport) -> list[str]:
    """Return what the reader of these tables must know, line by line."""
    return theory_notes(report.run) or notes(report)


def terminal_tables(report: RunReport, width: int = 100) -> list[Table]:
    """Make the tables that end a run: percent with one decimal, the best of the decentralised in bold.

    On a narrow terminal the columns that matter least are left out, not cut.
    """
    made = []
    for source in all_tables(report, width):
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


def markdown(report: RunReport) -> str:
    """Write the tables in Markdown, with their notes below."""
    lines: list[str] = []
    for table in all_tables(report):
        lines += [f"**{table.title}**", ""] if table.title else []
        lines.append(_pipes([one_line(title) for title in table.columns]))
        lines.append(_pipes(["---" if words else "---:" for words in table.words]))
        lines += [_pipes([f"**{text}**" if bold else text for text, bold in row]) for row in table.rows]
        lines.append("")
    lines += [note.replace("*", r"\*") + "  " for note in all_notes(report)]
    return "\n".join(lines).rstrip() + "\n"


def latex(report: RunReport) -> str:
    """Write the tables in LaTeX, for \\usepackage{booktabs}, with their notes as comments."""
    lines: list[str] = []
    for table in all_tables(report):
        lines += [f"% {table.title}"] if table.title else []
        lines.append(rf"\begin{{tabular}}{{{''.join('l' if words else 'r' for words in table.words)}}}")
        lines += [r"\toprule", _ampersands([_tex(one_line(title)) for title in table.columns]), r"\midrule"]
        for row in table.rows:
            lines.append(_ampersands([rf"\textbf{{{_tex(text)}}}" if bold else _tex(text) for text, bold in row]))
        lines += [r"\bottomrule", r"\end{tabular}", ""]
    lines += [f"% {note}" for note in all_notes(report)]
    return "\n".join(lines).rstrip() + "\n"


def comma_separated(report: RunReport) -> str:
    """Write the numbers themselves, one line per algorithm, in a sweep per point and algorithm; empty: not known."""
    rows, keys = [row.stored() for row in report.rows], report.run.varying
    dropped = ("point", "informed", "partial", "found", "lost", "via")
    names = [name for name in rows[0] if name not in dropped] if rows else ["algorithm"]
    file = io.StringIO()
    table = csv.writer(file, lineterminator="\n")
    table.writerow([*keys, *names])
    for row in rows:
        values = [row["point"].get(key) for key in keys] + [row[name] for name in names]
        table.writerow(["" if value is None or value == DASH else value for value in values])
    return file.getvalue()


FORMATS: dict[str, Callable[[RunReport], str]] = {"markdown": markdown, "csv": comma_separated, "latex": latex}


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
