"""Results as one small file: what a table needs, without the run folder, to be kept with a paper or a repository.

It has the form of summary.json, so every table can be made from it, and beside that the config, the machine and the
means over seeds.
"""

from __future__ import annotations

import json
from pathlib import Path

import tomli_w

from dfca import __version__
from dfca.base.errors import RunError
from dfca.base.files import MOST_TEXT_BYTES, atomic_write, read_small
from dfca.base.renamed import renamed
from dfca.report.rows import RunReport
from dfca.report.virtual.summary import VirtualResults, is_virtual
from dfca.runs.store.reading import Run, understood
from dfca.runs.store.rows import GraphFacts, History, TrialRow
from dfca.sim.metrics_table import JsonObject

FORM = 1
WHAT_TO_GIVE = "give a run folder or a file that `dfca report RUN --save FILE` wrote"


def save_results(report: RunReport, path: Path) -> None:
    """Write the results of a run, finished or not. Raises RunError if the file cannot be written."""
    run = report.run
    content = {
        "dfca_results": FORM,
        "dfca": __version__,
        "title": run.config.get("title", ""),
        **run.head,
        "config": run.config,
        "environment": {key: value for key, value in run.environment.items() if key != "earlier"},
        "means": [row.stored() for row in report.rows],
        "runs": [{key: value for key, value in trial.items() if not isinstance(value, list)} for trial in run.trials],
        "graphs": [graph.stored() for graph in run.graphs],
        "histories": [history.stored() for history in run.histories],
    }
    if is_virtual(run):
        content |= VirtualResults.of(run).kept()
    atomic_write(path, _lines(content))


def load_results(path: Path) -> JsonObject:
    """Read a file of results. Raises RunError if it is no such file."""
    try:
        content = json.loads(read_small(path, MOST_TEXT_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or "not JSON"
        raise RunError(f"{path} cannot be read: {reason}; {WHAT_TO_GIVE}") from error
    if not isinstance(content, dict) or content.get("dfca_results") != FORM or "runs" not in content:
        raise RunError(f"{path} holds no results of this version of dfca; {WHAT_TO_GIVE}")
    current: JsonObject = renamed(content)
    return current


def stored_run(path: Path) -> Run:
    """Read a file of results as a run: with curves by round and facts of graphs, without the graphs.

    Raises RunError if it is no such file.
    """
    content = load_results(path)
    with understood(path):
        return run_of(content, path.parent)


def run_of(content: JsonObject, folder: Path = Path()) -> Run:
    """Parse the content of a file of results, or of summary.json."""
    config = content.get("config", {})
    curves = list(map(History.of, content.get("histories", ())))
    return Run(
        folder=folder,
        config=config,
        config_text=tomli_w.dumps(config),
        environment=content.get("environment", {}),
        head={key: value for key, value in content.items() if key not in ("runs", "histories", "graphs")},
        trials=list(map(TrialRow.of, content["runs"])),
        metrics=[row for history in curves for row in history.evaluations()],
        topology={},
        histories=curves,
        graphs=list(map(GraphFacts.of, content.get("graphs", ()))),
    )


def _lines(content: JsonObject) -> str:
    """Write JSON with one line per run and per mean: small, and readable as a difference between versions."""
    parts = []
    for key, value in content.items():
        if isinstance(value, list) and value:
            inner = ",\n  ".join(map(json.dumps, value))
            parts.append(f" {json.dumps(key)}: [\n  {inner}\n ]")
        else:
            parts.append(f" {json.dumps(key)}: {json.dumps(value)}")
    return "{\n" + ",\n".join(parts) + "\n}\n"
