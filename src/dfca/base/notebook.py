"""HTML for notebooks: small tables that take the colours of the page, so that they read in light and dark themes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

_LINE = "1px solid color-mix(in srgb, currentColor 25%, transparent)"
_CELL = f"padding:2px 12px 2px 0;border-bottom:{_LINE};background:none;color:inherit"


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]], notes: Sequence[str] = ()) -> str:
    """Make a table with a title above and notes below; everything is escaped."""
    head = "".join(f'<th style="{_CELL};text-align:{_side(i)}">{escape(name)}</th>' for i, name in enumerate(columns))
    body = "".join(
        "<tr style='background:none'>"
        + "".join(f'<td style="{_CELL};text-align:{_side(i)}">{escape(str(cell))}</td>' for i, cell in enumerate(row))
        + "</tr>"
        for row in rows
    )
    below = "".join(f'<div style="opacity:.7">{escape(note)}</div>' for note in notes)
    header = f"<thead><tr style='background:none'>{head}</tr></thead>" if columns else ""
    return (
        f'<div style="color:inherit;overflow-x:auto"><div><b>{escape(title)}</b></div>'
        f'<table style="border-collapse:collapse;margin:4px 0;color:inherit">{header}<tbody>{body}</tbody></table>'
        f"{below}</div>"
    )


def text_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Align the same table for a terminal: the first column to the left, numbers to the right."""
    lines = [list(columns), *map(list, rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    return "\n".join(
        "  ".join(
            cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    )


def number(value: Any) -> str:
    """Write a number for people: three digits behind the point, thousands with commas, a dash for nothing.

    >>> number(0.95312), number(12345), number(None)
    ('0.953', '12,345', '–')
    """
    if value is None or value != value:
        return "–"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def _side(column: int) -> str:
    return "right" if column else "left"
