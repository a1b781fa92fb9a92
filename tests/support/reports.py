"""Reports of hand-made summaries and of run folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dfca.report.results import run_of, stored_run
from dfca.report.rows import RunReport
from dfca.runs.store.reading import load_run


def report_of(source: dict[str, Any] | Path) -> RunReport:
    """Make the report of a summary, a run folder or a file of results."""
    if isinstance(source, dict):
        return RunReport.of(run_of(source))
    return RunReport.of(stored_run(source) if source.is_file() else load_run(source))
