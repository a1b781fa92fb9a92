"""The tables of a run in every format that people paste somewhere: terminal, Markdown, HTML, LaTeX, CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

from rich.table import Table
from rich.text import Text

from dfca.report.paper.connectivity import connectivity_sheets
from dfca.report.paper.theory import theory_notes, theory_sheets
from dfca.report.tables import DASH, Sheet, notes, one_line, sheets, summary_rows, varying


def all_sheets(summary: Mapping[str, Any], clients: int | None = None, width: int | None = None) -> list[Sheet]:
    """Make the tables of a run: results and what the graphs do to them; of a run that measures it, the theory."""
    return theory_sheets(summary) or [*sheets(summary, clients, width), *connectivity_sheets(summary)]


def all_notes(summary: Mapping[str, Any], clients: int | None = None) -> list[str]:
    """Say what the reader of these tables must know."""
    return theory_notes(summary) or notes(summary, clients)


def terminal_tables(summary: Mapping[str, Any], clients: int | None = None, width: int = 100) -> list[Table]:
    """Make the tables that end a run: percent with one decimal, the best of the decentralised in bold.

    On a narrow terminal the columns that matter least are left out, not cut.
    """
    made = []
    for sheet in all_sheets(summary, clients, width):
        table = Table(
            box=None,
            padding=(0, 1),
            header_style="dim",
            title=sheet.title or None,
            title_justify="left",
            title_style="bold",
            min_width=min(len(sheet.title) + 2, width),
        )
        for title, words in zip(sheet.columns, sheet.words, strict=True):
            table.add_column(title, justify="left" if words else "right", vertical="bottom", no_wrap=True)
        for row, faint in zip(sheet.rows, sheet.faint, strict=True):
            cells = [Text(entry.text, style="bold" if entry.bold else "") for entry in row]
            table.add_row(*cells, style="dim" if faint else "")
        made.append(table)
    return made


def markdown(summary: Mapping[str, Any], clients: int | None = None) -> str:
    """Write the tables in Markdown, with their notes below."""
    lines: list[str] = []
    for sheet in all_sheets(summary, clients):
        lines += [f"**{sheet.title}**", ""] if sheet.title else []
        lines.append(_pipes([one_line(title) for title in sheet.columns]))
        lines.append(_pipes(["---" if words else "---:" for words in sheet.words]))
        lines += [_pipes([f"**{text}**" if bold else text for text, bold in row]) for row in sheet.rows]
        lines.append("")
    lines += [note.replace("*", r"\*") + "  " for note in all_notes(summary, clients)]
    return "\n".join(lines).rstrip() + "\n"


def html(summary: Mapping[str, Any], clients: int | None = None) -> str:
    """Write the tables in HTML, without their notes."""
    parts = []
    swept = "points" in summary
    for sheet in all_sheets(summary, clients):
        sides = [' class="words"' if words else "" for words in sheet.words]
        head = "".join(f"<th{side}>{escape(title)}</th>" for title, side in zip(sheet.columns, sides, strict=True))
        body = []
        for row, faint in zip(sheet.rows, sheet.faint, strict=True):
            tds = "".join(
                f"<td{side}>{f'<b>{escape(text)}</b>' if bold else escape(text)}</td>"
                for (text, bold), side in zip(row, sides, strict=True)
            )
            keys = [text for (text, _), words in zip(row, sheet.words, strict=True) if words][:-1]
            kinds = ["partial"] * faint + ["more"] * (swept and bool(keys) and not any(keys))
            body.append(f'<tr class="{" ".join(kinds)}">{tds}</tr>' if kinds else f"<tr>{tds}</tr>")
        title = f"<h3>{escape(sheet.title)}</h3>" if sheet.title else ""
        kind = "results points" if swept else "results"
        table = f'<table class="{kind}"><thead><tr>{head}</tr></thead><tbody>{"".join(body)}</tbody></table>'
        parts.append(f'<div>{title}<div class="scroll">{table}</div></div>')
    return f'<div class="sheets">{"".join(parts)}</div>'


def latex(summary: Mapping[str, Any], clients: int | None = None) -> str:
    """Write the tables in LaTeX, for \\usepackage{booktabs}, with their notes as comments."""
    lines: list[str] = []
    for sheet in all_sheets(summary, clients):
        lines += [f"% {sheet.title}"] if sheet.title else []
        lines.append(rf"\begin{{tabular}}{{{''.join('l' if words else 'r' for words in sheet.words)}}}")
        lines += [r"\toprule", _ampersands([_tex(one_line(title)) for title in sheet.columns]), r"\midrule"]
        for row in sheet.rows:
            lines.append(_ampersands([rf"\textbf{{{_tex(text)}}}" if bold else _tex(text) for text, bold in row]))
        lines += [r"\bottomrule", r"\end{tabular}", ""]
    lines += [f"% {note}" for note in all_notes(summary, clients)]
    return "\n".join(lines).rstrip() + "\n"


def comma_separated(summary: Mapping[str, Any], clients: int | None = None) -> str:
    """Write the numbers themselves, one line per algorithm, in a sweep per point and algorithm; empty: not known."""
    rows, keys = summary_rows(summary, clients), varying(summary)
    dropped = ("point", "label", "best", "informed", "partial", "found", "lost", "via")
    names = [name for name in rows[0] if name not in dropped] if rows else ["algorithm"]
    file = io.StringIO()
    table = csv.writer(file, lineterminator="\n")
    table.writerow([*keys, *names])
    for row in rows:
        values = [row["point"].get(key) for key in keys] + [row[name] for name in names]
        table.writerow(["" if value is None or value == DASH else value for value in values])
    return file.getvalue()


FORMATS: dict[str, Callable[[Mapping[str, Any]], str]] = {"markdown": markdown, "csv": comma_separated, "latex": latex}


def _pipes(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _ampersands(cells: Sequence[str]) -> str:
    return " & ".join(cells) + r" \\"


def _tex(text: str) -> str:
    """Write a text for LaTeX.

    >>> _tex("93.7 ± 0.1"), _tex("accuracy %")
    ('93.7 $\\\\pm$ 0.1', 'accuracy \\\\%')
    """
    special = {"±": r"$\pm$", "−": "$-$", "λ": r"$\lambda$", "²": "$^2$", DASH: "--"}
    special |= {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\^{}"}
    special |= {each: "\\" + each for each in "&%$#_{}"}
    return "".join(special.get(letter, letter) for letter in text)
