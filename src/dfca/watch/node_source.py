"""Follow nodes by what they say of themselves: their status, asked for on 127.0.0.1, or the last one that they left."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from dfca.base.errors import DfcaError
from dfca.node.operate import control, status
from dfca.runs.store.metric import ACCURACY, ShownMetric, metric_named
from dfca.watch.reading import UnreadableError, finite, parse, read_file, text
from dfca.watch.trials import TrialView, as_part, some

EVERY_S = 1.0
SHARE = 0.01  # of a core, at most, for asking nodes
LAZY_S = 10.0  # without a poll for this long, nodes are no longer asked
PATIENCE_S = 3.0
MOST_NODES = 500
MOST_STATUS = 4 << 20


class NodeSource:
    """Some nodes. `folders` lists their folders, again at every turn: a swarm begins with none."""

    def __init__(self, folders: Callable[[], Iterable[Path]]) -> None:
        self._folders = folders
        self._found: list[dict[str, Any]] = []
        self._neighbours: dict[str, list[str]] = {}
        self._turn = self._taken = 0
        self._looked = self._began = time.monotonic()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self.trial = TrialView("nodes", 0)
        self.more = False

    # --- asking

    def poll(self) -> dict[str, Any]:
        """Return the nodes if any has answered since the last call; a thread asks them."""
        self._looked = time.monotonic()
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._ask_on, daemon=True)
            self._thread.start()
        with self._lock:
            if self._turn == self._taken:
                return {}
            self._taken = self._turn
            self._enter()
            return self.whole()

    def whole(self) -> dict[str, Any]:
        """Return the nodes as they were last."""
        return {"nodes": self._found}

    def _ask_on(self) -> None:
        while time.monotonic() - self._looked < LAZY_S:
            began = time.process_time()
            self.ask()
            time.sleep(max(EVERY_S, (time.process_time() - began) / SHARE))

    def ask(self) -> None:
        try:
            folders = sorted(path for path in self._folders() if (path / "node.toml").exists())[:MOST_NODES]
        except OSError:
            folders = []
        answers = [ask(folder) for folder in folders]
        with self._lock:
            self._turn += 1
            self._found = [describe(folder, answer) for folder, answer in zip(folders, answers, strict=True)]
            self._neighbours = {
                shown["name"]: [text(peer.get("name")) for peer in _tables(answer.get("neighbours"))][:MOST_NODES]
                for shown, answer in zip(self._found, answers, strict=True)
            }

    # --- nodes without a run folder: they are the page

    def frames(self, trial: str, after: int) -> dict[str, Any] | None:
        """Return the clusters of the nodes since they are watched."""
        return self.trial.frames(after) if trial == self.trial.key else None

    def graph(self, trial: str) -> dict[str, Any] | None:
        """Return who is whose neighbour; nodes that are only known by name come last."""
        with self._lock:
            names = self.names()
            place = {name: i for i, name in enumerate(names)}
            edges = {
                tuple(sorted((place[a], place[b]))) for a, near in self._neighbours.items() for b in near if a != b
            }
        return {"nodes": len(names), "edges": sorted(map(list, edges)), "clusters": None, "seed": 0, "topology": "",
                "names": names}  # fmt: skip

    def names(self) -> list[str]:
        """Name the nodes, then the neighbours that are not asked."""
        asked = [node["name"] for node in self._found]
        return list(dict.fromkeys([*asked, *sorted({name for near in self._neighbours.values() for name in near})]))

    @property
    def metric(self) -> ShownMetric:
        """The metric that the nodes report: all members of a swarm have the same task."""
        return next((metric_named(node["metric"]) for node in self._found if node["metric"] != "accuracy"), ACCURACY)

    def _enter(self) -> None:
        """Turn the answers into one more evaluation."""
        nodes = self._found
        metric = self.metric
        scores = [node["score"] for node in nodes]
        known = [score for score in scores if score is not None]
        clusters = [-1 if node["cluster"] is None else node["cluster"] for node in nodes]
        ages = [node["staleness"] for node in nodes if node["staleness"] is not None]
        models = max((node["clusters"] for node in nodes), default=1)
        self.trial.names = self.names()
        extra = len(self.trial.names) - len(nodes)
        self.trial.complete = extra == 0 and len(nodes) >= models
        by_cluster = [
            [s for s, c in zip(scores, clusters, strict=True) if c == j and s is not None] for j in range(models)
        ]
        self.trial.state = "running" if any(node["running"] for node in nodes) else "stopped"
        self.trial.add(
            {
                "round": min((node["round"] for node in nodes), default=0),
                "time_s": round(time.monotonic() - self._began, 1),
                metric.key: sum(known) / len(known) if known else None,
                metric.all_models: None,  # which says what the score is called
                f"{metric.key}_by_cluster": [sum(own) / len(own) if own else None for own in by_cluster],
                f"{metric.key}_by_client": scores,
                "assignments": clusters + [-1] * extra,
                "models": models,
                "live_clusters": len({*clusters} - {-1}),
                "away": sum(not node["running"] for node in nodes),
                "away_clients": [i for i, node in enumerate(nodes) if not node["running"]],
                "bytes_sent": sum(node["bytes_out"] for node in nodes),
                "bytes_received": sum(node["bytes_in"] for node in nodes),
                "measured_clients": len(nodes),
                "staleness": sum(ages) / len(ages) if ages else None,
            }
        )


class NodesPage:
    """Nodes as a page of their own: a `Source`."""

    def __init__(self, folders: list[Path]) -> None:
        self._nodes = NodeSource(lambda: folders)
        self._title = folders[0].name if len(folders) == 1 else f"{len(folders)} nodes"
        self._folder = some([str(folder) for folder in folders[:3]], len(folders))
        self.more = False
        self.frames, self.graph = self._nodes.frames, self._nodes.graph

    def poll(self) -> dict[str, Any]:
        """Return the whole page if a node has answered since the last call."""
        return self.whole() if self._nodes.poll() else {}

    def whole(self) -> dict[str, Any]:
        trial, nodes = self._nodes.trial, self._nodes.whole()["nodes"]
        alarm = trial.alarm()
        run = {
            "title": self._title,
            "folder": self._folder,
            "state": trial.state,
            "kind": "nodes",
            "clients": len(self._nodes.names()),
            "running": sum(node["running"] for node in nodes),
            "asked": len(nodes),
            "changed_at": time.time(),
            "metric": as_part(self._nodes.metric),
        }
        return {
            "run": run,
            "points": [],
            "algorithms": [trial.algorithm],
            "alarms": [{"trial": trial.key, "what": alarm.removeprefix(f"{trial.name}: ")}] if alarm else [],
            "problems": [f"{node['name']}: {node['problem']}" for node in nodes if node["problem"]][:8],
            "nodes": nodes,
            "trials": {trial.key: trial.curve(240)},
        }


def ask(folder: Path) -> dict[str, Any]:
    """Return the status of a node: its answer, or the last one that it left; {} where there is none."""
    try:
        owner = parse(read_file(folder / control.FILE, 4096), control.FILE)
        if lives(owner.get("pid"), folder / control.FILE):
            answer = control.call(folder, "status", timeout_s=PATIENCE_S)
            return answer if isinstance(answer, dict) else {}
    except (FileNotFoundError, UnreadableError, DfcaError, AttributeError):
        pass
    try:
        return parse(read_file(folder / status.FILE, MOST_STATUS), status.FILE) | {"running": False}
    except (FileNotFoundError, UnreadableError):
        return {}


def lives(pid: Any, path: Path) -> bool:
    """Return whether the process that wrote a file is still there; False where that is not known."""
    import psutil

    try:  # a process that began after the file was written has only taken over the number
        return type(pid) is int and psutil.Process(pid).create_time() <= path.stat().st_mtime + 1
    except (psutil.Error, OSError, ValueError, OverflowError):
        return False


def describe(folder: Path, answer: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the page shows of a node's status; whatever has another form is left out."""

    def whole(key: str) -> int:
        return int(finite(answer.get(key)) or 0)

    neighbours = _tables(answer.get("neighbours"))
    problems, last = answer.get("problems"), answer.get("last_error")
    problem = text(problems[0], 300) if isinstance(problems, list) and problems else ""
    cluster, running = finite(answer.get("cluster")), answer.get("running", bool(answer)) is not False
    metric = next((key for key in status.SCORES if finite(answer.get(key)) is not None), "accuracy")
    return {
        "name": text(answer.get("name"), 60) or folder.name,
        "running": running,
        "state": text(answer.get("state"), 40) if running else _absence(answer),
        "waits": text(answer.get("waits"), 200) if running else "",
        "round": whole("round"),
        "cluster": None if cluster is None else int(cluster),
        "clusters": max(1, whole("clusters")),
        "metric": metric,
        "score": finite(answer.get(metric)),
        "staleness": finite(answer.get("staleness")),
        "bytes_out": whole("bytes_out"),
        "bytes_in": whole("bytes_in"),
        "links": sum(peer.get("state") in ("up", "connected") for peer in neighbours),
        "neighbours": len(neighbours),
        "problem": problem,
        "error": text(last.get("text"), 200) if isinstance(last, Mapping) else "",
    }


def _absence(answer: Mapping[str, Any]) -> str:
    """Say why a node does not answer, as far as its last status tells."""
    return "no status yet" if not answer else "done, ended" if answer.get("state") == "done" else "down"


def _tables(value: Any) -> list[dict[str, Any]]:
    return [table for table in value if isinstance(table, dict)] if isinstance(value, list) else []
