"""The metrics of a run as a table: one row per evaluated round."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import pandas as pd

_COLUMNS = ("cluster_accuracy", "live_clusters", "train_loss", "bytes_sent")


class Metrics(list[dict[str, Any]]):
    """One row per evaluated round.

    `metrics["accuracy"]` is a column, `print(metrics)` a table, `to_pandas` a DataFrame, `to_csv` a file.

    Example:
        >>> import dfca
        >>> metrics = dfca.Metrics([{"round": 1, "accuracy": 0.5}, {"round": 2, "accuracy": 0.75}])
        >>> metrics["accuracy"], list(metrics.to_pandas().columns)
        ([0.5, 0.75], ['round', 'accuracy'])
    """

    def __getitem__(self, key: Any) -> Any:
        return [row.get(key) for row in self] if isinstance(key, str) else super().__getitem__(key)

    def __str__(self) -> str:
        key = self.metric
        shown = [
            column
            for column in ("round", key, f"all_models_{key}", *_COLUMNS)
            if any(row.get(column) is not None for row in self)
        ]
        lines = [" ".join(f"{column:>19}" for column in shown)]
        for row in self:
            cells = (f"{row[c]:.4f}" if isinstance(row[c], float) else f"{row[c]:,}" for c in shown)
            lines.append(" ".join(f"{cell:>19}" for cell in cells))
        return "\n".join(lines)

    @property
    def metric(self) -> str:
        """The column with the score that the task is about: "accuracy", "rmse", ..."""
        names = (name for row in self[:1] for name in row if name.startswith("all_models_"))
        return next(names, "all_models_accuracy").removeprefix("all_models_")

    def to_pandas(self, by: Literal["round", "client"] = "round") -> pd.DataFrame:
        """Make a DataFrame.

        Args:
            by: "round": a row per evaluated round with all its numbers; those of inner tables as "seconds_train".
                "client": a row per round and client, with its cluster and what else is known by client.

        Returns:
            The DataFrame.

        Raises:
            ValueError: If `by` is neither.
        """
        return frame_of(self, by)

    def _repr_html_(self) -> str:
        html: str = self.to_pandas()._repr_html_()
        return html

    def to_csv(self, path: str | Path | None = None) -> str:
        """Write all numbers as CSV; lists are left out.

        Args:
            path: The file; None: none is written.

        Returns:
            The text.
        """
        names = [name for name, value in self[0].items() if not isinstance(value, list | dict)] if self else []
        text = io.StringIO()
        writer = csv.DictWriter(text, names, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(self)
        if path is not None:
            Path(path).write_text(text.getvalue())
        return text.getvalue()


def frame_of(rows: list[dict[str, Any]], by: Literal["round", "client"] = "round") -> pd.DataFrame:
    """Make a DataFrame of rows of metrics, as `Metrics.to_pandas` says.

    Raises ValueError for another `by`.
    """
    import pandas as pd  # late: it takes half a second, and nodes and commands do without

    if by == "round":
        return pd.DataFrame([_numbers(row) for row in rows])
    if by != "client":
        raise ValueError(f'by must be "round" or "client", got {by!r}')
    found: list[dict[str, Any]] = []
    for row in rows:
        clients = len(row["assignments"])
        head = {name: row[name] for name in HEAD if name in row}
        columns = {name: list(value) for name, value in row.items() if _is_by_client(name, value, clients)}
        found += [
            {**head, "client": i, **{name.removesuffix("_by_client"): each[i] for name, each in columns.items()}}
            for i in range(clients)
        ]
    return pd.DataFrame(found).rename(columns={"assignments": "cluster"})


def plain_scores(row: Mapping[str, Any], key: str) -> list[float]:
    """Return the scores of every client's model in the last row, without a personal last step; [] where not known."""
    return row.get(f"{key}_before_personal_by_client") or row.get(f"{key}_by_client") or []


HEAD = ("algorithm", "seed", "round", "time_s")


def _is_by_client(name: str, value: Any, clients: int) -> bool:
    named = name == "assignments" or name.endswith("_by_client")
    return named and isinstance(value, list) and len(value) == clients


def _numbers(row: Mapping[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in row.items():
        if isinstance(value, Mapping):
            flat |= {f"{name}_{inner}": each for inner, each in value.items() if not isinstance(each, list | dict)}
        elif not isinstance(value, list):
            flat[name] = value
    return flat
