"""Numbers as people read them: percent, durations, megabytes, counts; a world in words."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from dfca.algorithms import base_of
from dfca.runs.store.metric import ACCURACY, DASH
from dfca.sim.metrics_table import JsonObject

percent = ACCURACY.write
PAPER_NAMES = {
    "dfca-gi": "DFCA-GI",
    "dfca-li": "DFCA-LI",
    "dfca-fi": "DFCA-FI",
    "dfca-auto": "DFCA-auto",
    "ifca": "IFCA",
    "fedavg": "FedAvg",
    "dfedavgm": "DFedAvgM",
    "fedspd": "FedSPD",
    "facade": "Facade",
    "fedem": "D-FedEM",
    "deprl": "DePRL",
    "pens": "PENS",
    "dac": "DAC",
    "local": "Local",
    "oracle": "Oracle",
}
"""How papers write the names of algorithms; one that is not here keeps its own."""


def paper_name(label: str) -> str:
    """Write the name of an algorithm, which may have options behind it, as papers do.

    >>> paper_name("dfca-gi"), paper_name("fedavg, momentum 0.9"), paper_name("my.module:mine")
    ('DFCA-GI', 'FedAvg, momentum 0.9', 'my.module:mine')
    """
    name = base_of(label)
    return PAPER_NAMES.get(name, name) + label[len(name) :]


def duration(seconds: float | None) -> str:
    """Write a duration with the two digits that matter.

    >>> duration(0.42), duration(61.2), duration(4000), duration(None)
    ('0.4 s', '61 s', '67 min', '–')
    """
    if seconds is None:
        return DASH
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def megabytes(value: float | None) -> str:
    """Write megabytes with three digits that matter.

    >>> megabytes(0.0123), megabytes(3.21), megabytes(1234.5), megabytes(0)
    ('0.012', '3.2', '1,234', '0')
    """
    if value is None:
        return DASH
    if value == 0:
        return "0"
    return f"{value:.2g}" if value < 1 else f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def amount(value: float) -> str:
    """Write seconds or megabytes with the digits that matter.

    >>> amount(1234.5), amount(12.34), amount(1.234)
    ('1,234', '12.3', '1.2')
    """
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else megabytes(value)


def count(number: Any, noun: str) -> str:
    """Write a number of things.

    >>> count(1, "client"), count(1200, "client"), count("auto", "cluster")
    ('1 client', '1,200 clients', 'auto clusters')
    """
    return f"{number:,} {noun}{'' if number == 1 else 's'}" if isinstance(number, int) else f"{number} {noun}s"


def span(values: Sequence[Any], digits: str = "") -> str:
    """Write the lowest and the highest of some values, once if they are equal.

    >>> span([3, 5, 4]), span([0.25, 0.25], ".3f")
    ('3–5', '0.250')
    """
    low, high = f"{min(values):{digits}}", f"{max(values):{digits}}"
    return low if low == high else f"{low}–{high}"


def slug(text: str) -> str:
    """Write a text as part of a file's name.

    >>> slug("data.skew=consistent, data.alpha=0.7")
    'data.skew-consistent-data.alpha-0.7'
    """
    return re.sub(r"[^A-Za-z0-9.]+", "-", text).strip("-.").lower()


def one_line(title: str) -> str:
    """Write the title of a column, which may have several lines, in one.

    >>> one_line("differ-\\nence"), one_line("world.\\nslowdown"), one_line("all models\\n%")
    ('difference', 'world.slowdown', 'all models %')
    """
    return " ".join(title.replace("-\n", "").split()).replace(". ", ".")


def folded(key: str) -> str:
    """Write a dotted key as the title of a column, over several lines if it is long."""
    return key.replace(".", ".\n") if len(key) > 12 else key


def world_in_words(world: JsonObject) -> str:
    """Describe a world in a few words, from its facts (`WorldConfig.facts`)."""
    compute, link, faults, churn = (world[key] for key in ("compute", "link", "faults", "churn"))
    parts = [f"{compute['step_s']:g} s per local step ({compute['kind']})"]
    parts += [
        f"{100 * device['share']:g} % of the clients {device['slowdown']:g} times slower"
        for device in compute["devices"]
        if device["slowdown"] != 1
    ]
    parts.append(f"latency {link['latency_s']:g} s" if link["latency_s"] else "no latency")
    if link["bandwidth_bytes_s"] is not None:
        parts.append(f"{link['bandwidth_bytes_s'] / 1e6:g} MB/s up")
    parts += [f"{100 * faults[kind]:g} % {kind}" for kind in ("loss", "duplication", "corruption") if faults[kind]]
    if churn["leaves_per_s"]:
        away = churn["leaves_per_s"] * churn["away_s"]
        empty = "" if churn["keeps"] else ", back without models"
        parts.append(f"{100 * away / (1 + away):.0f} % away ({churn['away_s']:g} s at a time{empty})")
    for partition in world["partitions"]:
        end = "the end" if partition["end_s"] is None else f"{partition['end_s']:g} s"
        parts.append(f"apart from {partition['begin_s']:g} s to {end}")
    if world["late_joiners"]:
        number = len(world["late_joiners"])
        parts.append(f"{number} late joiner{'s' if number > 1 else ''}")
    if "absences_sha256" in world:
        parts.append("availability from a file")
    return ", ".join(parts)
