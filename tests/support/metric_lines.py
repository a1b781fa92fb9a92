"""Write lines of metrics into a run folder."""

from __future__ import annotations

import shutil
from pathlib import Path


def put_metrics(folder: Path, text: str) -> None:
    """Write the metrics of all trials into one file."""
    path = folder / "metrics.jsonl"
    if not path.exists():
        shutil.rmtree(folder / "metrics")
        path = folder / "metrics" / "all.jsonl"
        path.parent.mkdir()
    path.write_text(text)
