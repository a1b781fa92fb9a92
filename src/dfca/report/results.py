"""Results as one small file: what a table needs, without the run folder, to be kept with a paper or a repository.

It has the form of summary.json, so every table can be made from it, and beside that the config, the machine and the
means over seeds.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomli_w

from dfca import __version__
from dfca.base.errors import RunError
from dfca.base.files import atomic_write
from dfca.base.renamed import renamed
from dfca.report.rows import named, summary_rows
from dfca.report.virtual.summary import VirtualResults, is_virtual
from dfca.runs.store.reading import Run

FORM = 1
WHAT_TO_GIVE = "give a run folder or a file that `dfca report RUN --save FILE` wrote"


def save_results(run: Run, path: Path) -> None:
    """Write the results of a run, finished or not.

    Raises:
        RunError: if the file cannot be written.
    """
    later = ("runs", "histories", "graphs")
    head = {key: value for key, value in run.summary.items() if key not in later}
    hidden = ("best", "label")
    content = {
        "dfca_results": FORM,
        "dfca": __version__,
        "title": run.config.get("title", ""),
        **head,
        "config": run.config,
        "environment": {key: value for key, value in run.environment.items() if key != "earlier"},
        "means": [
            {key: value for key, value in named(row).items() if key not in hidden} for row in summary_rows(run.summary)
        ],
        "runs": [
            {key: value for key, value in row.items() if not isinstance(value, list)} for row in run.summary["runs"]
        ],
        "graphs": run.summary["graphs"],
        "histories": run.summary["histories"],
    }
    if is_virtual(run.summary):
        content |= VirtualResults.of_run(run).kept()
    atomic_write(path, _lines(content))


def load_results(path: Path) -> dict[str, Any]:
    """Read a file of results; it can be used wherever a summary can.

    Raises:
        RunError: if it is no such file.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "not JSON"
        raise RunError(f"{path} cannot be read: {reason}; {WHAT_TO_GIVE}") from error
    if not isinstance(content, dict) or content.get("dfca_results") != FORM or "runs" not in content:
        raise RunError(f"{path} holds no results of this version of dfca; {WHAT_TO_GIVE}")
    shown: dict[str, Any] = renamed(content)
    return shown


def stored_run(path: Path) -> Run:
    """Read a file of results as a run: what it holds of curves by round and facts of graphs, without the graphs.

    Raises:
        RunError: if it is no such file.
    """
    content = load_results(path)
    metrics = []
    for record in content.get("histories", ()):
        head = {key: record[key] for key in ("algorithm", "seed", "digest") if key in record}
        measures = [key for key in record if key not in (*head, "round")]
        metrics += [
            head | {"round": round} | {key: record[key][i] for key in measures}
            for i, round in enumerate(record["round"])
        ]
    return Run(
        folder=path.parent,
        config=content.get("config", {}),
        config_text=tomli_w.dumps(content.get("config", {})),
        environment=content.get("environment", {}),
        summary=content,
        metrics=metrics,
        topology={},
    )


def _lines(content: Mapping[str, Any]) -> str:
    """Write JSON with one line per run and per mean: small, and readable as a difference between versions."""
    parts = []
    for key, value in content.items():
        if isinstance(value, list) and value:
            inner = ",\n  ".join(json.dumps(each) for each in value)
            parts.append(f" {json.dumps(key)}: [\n  {inner}\n ]")
        else:
            parts.append(f" {json.dumps(key)}: {json.dumps(value)}")
    return "{\n" + ",\n".join(parts) + "\n}\n"
