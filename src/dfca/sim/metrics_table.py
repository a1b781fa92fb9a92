"""The metrics of a run as a table: one row per evaluated round."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

_COLUMNS = ("round", "accuracy", "all_models_accuracy", "cluster_accuracy", "live_clusters", "train_loss", "bytes_sent")


class Metrics(list[dict[str, Any]]):
    """One row per evaluated round. `metrics["accuracy"]` is a column, `print(metrics)` a table, `to_csv` a file."""

    def __getitem__(self, key: Any) -> Any:
        return [row.get(key) for row in self] if isinstance(key, str) else super().__getitem__(key)

    def __str__(self) -> str:
        shown = [column for column in _COLUMNS if any(row.get(column) is not None for row in self)]
        lines = [" ".join(f"{column:>19}" for column in shown)]
        for row in self:
            cells = (f"{row[c]:.4f}" if isinstance(row[c], float) else f"{row[c]:,}" for c in shown)
            lines.append(" ".join(f"{cell:>19}" for cell in cells))
        return "\n".join(lines)

    def to_csv(self, path: str | Path | None = None) -> str:
        """Write all numbers (lists left out) as CSV; returns the text."""
        names = [name for name, value in self[0].items() if not isinstance(value, list | dict)] if self else []
        text = io.StringIO()
        writer = csv.DictWriter(text, names, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(self)
        if path is not None:
            Path(path).write_text(text.getvalue())
        return text.getvalue()
