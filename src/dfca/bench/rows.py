"""What a part of the bench yields: one row per comparison, and the sentence for what could not be measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from dfca.bench.timing import ratio


@dataclass(frozen=True)
class Row:
    """One comparison.

    values: per subject what each repeat measured, in `unit`; the repeats of all subjects were taken in turn.
    of, to: the subjects that are divided, repeat by repeat. most, least: what the ratio should be, where that was set
    beforehand. details: what else was found. skipped: why there are no values.
    """

    name: str
    about: str
    values: Mapping[str, Sequence[float]] = field(default_factory=dict)
    unit: Literal["s", "bytes"] = "s"
    of: str | None = None
    to: str | None = None
    most: float | None = None
    least: float | None = None
    details: Mapping[str, Any] = field(default_factory=dict)
    skipped: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Give the row as JSON holds it, with the ratio worked out."""
        row = asdict(self)
        row["ratio"] = None
        if self.of is not None and self.to is not None and self.skipped is None:
            found = ratio(self.values[self.of], self.values[self.to])
            row["ratio"] = found._asdict()
            row["met"] = met(found.median, self.most, self.least)
        return row


class Skip(Exception):
    """Something cannot be measured here; the message says why."""


def met(value: float, most: float | None, least: float | None) -> bool | None:
    """Tell whether a ratio is what it should be; None where nothing was set."""
    if most is None and least is None:
        return None
    return (most is None or value <= most) and (least is None or value >= least)
