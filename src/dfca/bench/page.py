"""The measured blocks of docs/benchmarks.md, from a bench.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dfca.bench.record import PARTS
from dfca.bench.tables import markdown

UNKNOWN = "Not measured yet."


def blocks(content: Mapping[str, Any]) -> dict[str, str]:
    """Write one block per part: its tables, with where and how it was measured."""
    return {name: markdown(content, [name]).rstrip() if name in content["parts"] else UNKNOWN for name in PARTS}
