"""Evaluated rounds as typed records, and as a table: one row per evaluated round."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

if TYPE_CHECKING:
    import pandas as pd

JsonObject = dict[str, Any]
"""An object of a JSON file, or a table of a TOML file, as it is on the disk."""
PointValues = Mapping[str, Any]
"""The keys that a sweep varies, with their values at one point."""
ALL_MODELS = "all_models_"  # stands before the key of the metric: the score of all models
HEAD = ("algorithm", "seed", "round", "time_s")
_COLUMNS = ("cluster_accuracy", "live_clusters", "train_loss", "bytes_sent")


def metric_key(names: Iterable[str]) -> str:
    """Return what a row of metrics calls the score, given its keys.

    >>> metric_key(["rmse", "all_models_rmse"]), metric_key([])
    ('rmse', 'accuracy')
    """
    return next((name.removeprefix(ALL_MODELS) for name in names if name.startswith(ALL_MODELS)), "accuracy")


@dataclass(frozen=True, eq=False)
class StoredRow(Mapping[str, Any]):
    """A record that remembers the JSON object of a run folder that it stands for.

    Code reads the typed attributes. As a mapping, a record has the keys of the file, which has no key `score`: the
    score of a classification is under "accuracy", that of a regression under "rmse".
    """

    stored: JsonObject  # as the file holds it
    algorithm: str
    seed: int
    digest: str  # of the complete config of its point, "" where the file does not say
    point: PointValues

    def key(self, swept: bool) -> tuple[str, int, str]:
        """Identify the trial in its run folder."""
        return self.algorithm, self.seed, self.digest if swept else ""

    def __getitem__(self, key: str) -> Any:
        return self.stored[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.stored)

    def __len__(self) -> int:
        return len(self.stored)


@dataclass(frozen=True, eq=False)
class EvaluationRow(StoredRow):
    """One evaluated round of a trial, or moment in virtual time."""

    round: int
    time_s: float | None  # virtual; None by rounds
    metric: str  # the key of the metric: "accuracy", "rmse", ...
    score: float | None  # the mean over clients of what they deploy, on test data like their own
    all_models_score: float | None  # of all models on every distribution
    cluster_accuracy: float | None
    bytes_sent: float | None
    assignments: list[int]  # (N,); empty where the file does not say

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Self:
        """Parse a line of metrics, or what a simulator has measured, which names no trial.

        Raises TypeError or ValueError if it is not a line of metrics.
        """
        key = metric_key(values)
        return cls(
            stored=dict(values),
            algorithm=str(values.get("algorithm", "")),
            seed=int(values.get("seed", 0)),
            digest=values.get("digest") or "",
            point=values.get("point") or {},
            round=values.get("round", 0),  # a dry run counts none
            time_s=values.get("time_s"),
            metric=key,
            score=values.get(key),
            all_models_score=values.get(ALL_MODELS + key),
            cluster_accuracy=values.get("cluster_accuracy"),
            bytes_sent=values.get("bytes_sent"),
            assignments=values.get("assignments") or [],
        )

    @property
    def traffic(self) -> float | None:
        """Bytes that clients have sent and received so far, the mean over clients."""
        total = traffic_bytes(self)
        return None if total is None or not self.assignments else total / len(self.assignments)

    @property
    def scores(self) -> list[float]:
        """The score of each client, (N,); empty where it is not known."""
        return self.get(f"{self.metric}_by_client") or []

    @property
    def plain_scores(self) -> list[float]:
        """The score of each client without a personal last step, (N,); empty where it is not known."""
        return self.get(f"{self.metric}_before_personal_by_client") or self.scores


def traffic_bytes(row: Mapping[str, Any]) -> float | None:
    """Return what all clients sent and received, of a line of metrics or the row of a trial.

    Clients receive what the server sent; without a server, what one client sends another receives.

    >>> traffic_bytes({"bytes_sent": 10, "server_bytes_sent": 40}), traffic_bytes({"bytes_sent": 10})
    (50.0, 20.0)
    """
    sent = row.get("bytes_sent")
    if sent is None:
        return None
    received = row.get("bytes_received")
    return float(sent) + float((row.get("server_bytes_sent") or sent) if received is None else received)


class Metrics(list[EvaluationRow]):
    """One row per evaluated round.

    `metrics["score"]` is a column, `print(metrics)` a table, `to_pandas` a DataFrame, `to_csv` a file. The score also
    has the name of its metric: `metrics["accuracy"]`.

    Example:
        >>> import dfca
        >>> metrics = dfca.Metrics([{"round": 1, "accuracy": 0.5}, {"round": 2, "accuracy": 0.75}])
        >>> metrics["score"], list(metrics.to_pandas().columns)
        ([0.5, 0.75], ['round', 'accuracy'])
    """

    def __init__(self, rows: Iterable[Mapping[str, Any]] = ()) -> None:
        super().__init__(row if isinstance(row, EvaluationRow) else EvaluationRow.of(row) for row in rows)

    def __getitem__(self, key: Any) -> Any:
        if key == "score":
            return [row.score for row in self]
        return [row.get(key) for row in self] if isinstance(key, str) else super().__getitem__(key)

    def __str__(self) -> str:
        shown = [
            column
            for column in ("round", self.metric, ALL_MODELS + self.metric, *_COLUMNS)
            if any(row.get(column) is not None for row in self)
        ]
        lines = [" ".join(f"{column:>19}" for column in shown)]
        for row in self:
            cells = (f"{row[c]:.4f}" if isinstance(row[c], float) else f"{row[c]:,}" for c in shown)
            lines.append(" ".join(f"{cell:>19}" for cell in cells))
        return "\n".join(lines)

    @property
    def metric(self) -> str:
        """The metric of the task: "accuracy", "rmse", ..."""
        return super().__getitem__(0).metric if self else "accuracy"

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
        first: Mapping[str, Any] = super().__getitem__(0) if self else {}
        names = [name for name, value in first.items() if not isinstance(value, list | dict)]
        text = io.StringIO()
        writer = csv.DictWriter(text, names, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(self)
        if path is not None:
            Path(path).write_text(text.getvalue())
        return text.getvalue()


def frame_of(rows: Iterable[EvaluationRow], by: Literal["round", "client"] = "round") -> pd.DataFrame:
    """Make a DataFrame of rows of metrics, as `Metrics.to_pandas` says."""
    import pandas as pd  # late: it takes half a second, and nodes and commands do without

    if by == "round":
        return pd.DataFrame([flat_numbers(row) for row in rows])
    if by != "client":
        raise ValueError(f'by must be "round" or "client", got {by!r}')
    lines = []
    for row in rows:
        clients = len(row.assignments)
        head = {name: row[name] for name in HEAD if name in row}
        columns = {name: value for name, value in row.items() if _is_by_client(name, value, clients)}
        for i in range(clients):
            own = {name.removesuffix("_by_client"): values[i] for name, values in columns.items()}
            lines.append({**head, "client": i, **own})
    return pd.DataFrame(lines).rename(columns={"assignments": "cluster"})


def flat_numbers(row: Mapping[str, Any]) -> JsonObject:
    """Return what is no list, inner tables as "table_name"."""
    flat: JsonObject = {}
    for name, value in row.items():
        if isinstance(value, Mapping):
            flat |= {f"{name}_{key}": inner for key, inner in value.items() if not isinstance(inner, list | dict)}
        elif not isinstance(value, list):
            flat[name] = value
    return flat


def without_nan(value: Any) -> Any:
    """Replace NaN and infinities, which JSON does not know, by null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: without_nan(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(inner) for inner in value]
    return value


def _is_by_client(name: str, value: object, clients: int) -> bool:
    named = name == "assignments" or name.endswith("_by_client")
    return named and isinstance(value, list) and len(value) == clients
