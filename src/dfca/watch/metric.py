"""Which score a page is about: its name, unit and direction, from files that anybody may have written."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from dfca.runs.store.metric import ShownMetric, metric_named
from dfca.watch.reading import text

MOST_LETTERS = 40


def read_metric(summary: Mapping[str, Any], config: Mapping[str, Any], keys: Iterable[str]) -> ShownMetric:
    """Return the metric of a run: as its first row that says one describes it, else by the keys of its lines.

    The unit is in the rows of finished trials, and before in the config.
    """
    rows = summary.get("runs")
    for row in rows if isinstance(rows, list) else ():
        facts = row.get("metric") if isinstance(row, Mapping) else None
        if isinstance(facts, Mapping) and text(facts.get("key")):
            return ShownMetric(
                text(facts.get("name"), MOST_LETTERS) or text(facts["key"], MOST_LETTERS),
                text(facts["key"], MOST_LETTERS),
                facts.get("higher_is_better") is not False,
                facts.get("percent") is True,
                text(facts.get("unit"), MOST_LETTERS),
            )
    key = next((key for key in keys if key != "accuracy"), "accuracy")
    metric, task = metric_named(key), config.get("task")
    unit = text(task.get("unit"), MOST_LETTERS) if isinstance(task, Mapping) else ""
    return metric._replace(name=text(metric.name, MOST_LETTERS), unit="" if metric.percent else unit)


def as_part(metric: ShownMetric) -> dict[str, Any]:
    """Return a metric as the page takes it."""
    return metric._asdict() | {"capitalised": metric.capitalised, "label": metric.label}
