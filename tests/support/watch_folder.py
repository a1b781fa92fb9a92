"""A run folder written by hand, line by line: what `dfca watch` follows in tests."""

from __future__ import annotations

import json
import os
import urllib.request
from pathlib import Path
from typing import Any

CONFIG = 'title = "Toy"\nclients = 4\nclusters = 2\nrounds = 20\nalgorithms = ["dfca-auto", "ifca"]\nseeds = [0]\n'
EDGES = [[0, 1], [1, 2], [2, 3], [0, 3]]


class Folder:
    """A folder of four clients in a ring with two true clusters."""

    def __init__(self, path: Path, config: str = CONFIG) -> None:
        self.path = path
        (path / "metrics").mkdir(parents=True)
        (path / "config.toml").write_text(config)
        (path / ".lock").write_text(f"process {os.getpid()}")
        self.write("summary.json", {"form": 2, "experiment": "toy", "clients": 4, "clusters": 2, "runs": []})
        graph = {"facts": {"nodes": 4, "edges": 4}, "edges": EDGES, "clusters": [0, 0, 1, 1]}
        self.write("topology.json", {"0": graph})

    def write(self, name: str, value: Any) -> None:
        """Replace a file, as a run does."""
        (self.path / f".{name}.tmp").write_text(json.dumps(value))
        os.replace(self.path / f".{name}.tmp", self.path / name)

    def append(self, round_: int, assignments: list[int], algorithm: str = "dfca-auto", **more: Any) -> None:
        """Append an evaluation."""
        line = {
            "algorithm": algorithm,
            "seed": 0,
            "round": round_,
            "accuracy": 0.9,
            "models": 2,
            "cluster_accuracy": 1.0,
        }
        line |= {"assignments": assignments, "live_clusters": len(set(assignments)), "bytes_sent": 1000 * round_}
        with (self.path / "metrics" / f"{algorithm}-0.jsonl").open("a") as file:
            file.write(json.dumps(line | more) + "\n")


def get(url: str, **headers: str) -> tuple[int, bytes, dict[str, str]]:
    """Ask for an address: status, content, headers."""
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers)) as answer:
            return answer.status, answer.read(), dict(answer.headers)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read(), dict(error.headers)
