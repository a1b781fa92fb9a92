"""Which score a run is about: what its rows and lines call it, and how people read it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from dfca.core.learning.task import METRICS
from dfca.sim.metrics_table import ALL_MODELS, metric_key

DASH = "–"


class ShownMetric(NamedTuple):
    """The metric of a run, as `learning.task.Metric.facts` wrote it."""

    name: str = "accuracy"
    key: str = "accuracy"
    higher_is_better: bool = True
    percent: bool = True
    unit: str = ""

    @property
    def all_models(self) -> str:
        """The key of the score of all models on every distribution."""
        return ALL_MODELS + self.key

    @property
    def sign(self) -> str:
        """What stands behind a number: "%", a unit or nothing."""
        return "%" if self.percent else self.unit

    @property
    def title(self) -> str:
        """The name with its sign, for a table: "accuracy %", "RMSE °C"."""
        return f"{self.name} {self.sign}".rstrip()

    @property
    def capitalised(self) -> str:
        """The name as the first word of a sentence."""
        return f"{self.name[:1].upper()}{self.name[1:]}"

    @property
    def label(self) -> str:
        """The name with its sign, for an axis: "accuracy (%)", "RMSE (°C)"."""
        return f"{self.name} ({self.sign})" if self.sign else self.name

    def write(self, mean: float | None, std: float | None = None) -> str:
        """Write a score: percent with one decimal, else three digits that matter.

        >>> ShownMetric().write(0.9371, 0.0012), ShownMetric("RMSE", "rmse", False, False).write(0.31234, 0.0101)
        ('93.7 ± 0.1', '0.312 ± 0.010')
        """
        if mean is None or not math.isfinite(mean):
            return DASH
        if self.percent:
            return f"{100 * mean:.1f}" + (f" ± {100 * std:.1f}" if std is not None else "")
        digits = max(0, min(6, 2 - math.floor(math.log10(abs(mean))))) if mean else 3
        return f"{mean:.{digits}f}" + (f" ± {std:.{digits}f}" if std is not None else "")

    def signed(self, difference: float, half: float | None, near: float | None) -> str:
        """Write a difference of scores, ± half of its interval, with the digits that `write` shows of a score near it.

        >>> ShownMetric().signed(-0.0612, 0.011, 0.8), ShownMetric("RMSE", "rmse", False, False).signed(0.02, None, 0.3)
        ('−6.1 ± 1.1', '+0.020')
        >>> ShownMetric().signed(-0.0612, 16.8, 0.8)  # few seeds, many comparisons
        '−6.1 ± >100'
        """
        factor = 100 if self.percent else 1
        digits = len(self.write(abs(near) if near else 1.0).partition(".")[2])
        text = f"{factor * difference:+.{digits}f}"
        text = text if float(text) else text[1:]  # neither +0.0 nor -0.0
        text = text.replace("-", "−")
        if half is None:
            return text
        return f"{text} ± >100" if self.percent and half > 1 else f"{text} ± {factor * half:.{digits}f}"

    def best(self, scores: Iterable[float]) -> float:
        return max(scores) if self.higher_is_better else min(scores)

    def beats(self, score: float, other: float) -> bool:
        return score > other if self.higher_is_better else score < other

    def shown(self, score: float) -> float:
        """Round a score to the digits that `write` shows, so that what looks equal is equal."""
        text = self.write(score)
        return math.nan if text == DASH else float(text)


ACCURACY = ShownMetric()
KNOWN = {one.key: ShownMetric(one.name, one.key, one.higher_is_better, one.percent) for _, one in METRICS.values()}
KNOWN["loss"] = ShownMetric("loss", "loss", higher_is_better=False, percent=False)


def metric_of(record: Mapping[str, Any]) -> ShownMetric:
    """Return the metric of a row, or of a line of metrics, which knows no more than its key."""
    facts = record.get("metric")
    if isinstance(facts, Mapping):
        known = {name: facts[name] for name in ShownMetric._fields if name in facts}
        return ShownMetric(**{"percent": False, **known})
    return metric_named(metric_key(record))


def metric_named(key: str) -> ShownMetric:
    """Return what is known of a metric by its key alone.

    >>> metric_named("accuracy") == ACCURACY, metric_named("rmse")
    (True, ShownMetric(name='RMSE', key='rmse', higher_is_better=False, percent=False, unit=''))
    """
    return KNOWN.get(key) or ShownMetric(key, key, percent=False)
