"""Follow a run folder: read what changes, and say what of the page has to change with it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from dfca.base.errors import RunError
from dfca.base.renamed import current, renamed
from dfca.base.validation import parse_toml
from dfca.watch.node_source import NodeSource, lives
from dfca.watch.reading import JsonFile, LinesFile, UnreadableError, finite, read_file, text, whole_numbers
from dfca.watch.trials import TrialView, as_part, label, read_metric

MOST_TRIALS = 5000
MOST_PROBLEMS = 8
POINTS_PER_CURVE = 240
POINTS_PER_CURVE_IN_A_SWEEP = 60
KNOWN_FORM = 2


class Source(Protocol):
    """What is watched. `poll` reads and returns the parts of the page that have changed; `whole` returns all parts."""

    def poll(self) -> dict[str, Any]: ...
    def whole(self) -> dict[str, Any]: ...
    def frames(self, trial: str, after: int) -> dict[str, Any] | None: ...
    def graph(self, trial: str) -> dict[str, Any] | None: ...


class RunSource:
    """The folder of a run, a sweep or a swarm."""

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise RunError(f"{folder} is not a run folder: there is no such directory; give the folder of `dfca run`")
        if not any((folder / name).exists() for name in ("config.toml", "summary.json")):
            raise RunError(f"{folder} is not a run folder (it has no config.toml); `dfca run` makes one")
        self.folder = folder
        self._config = JsonFile(folder / "config.toml", parse_toml, 4 << 20)
        self._summary, self._topology = JsonFile(folder / "summary.json"), JsonFile(folder / "topology.json")
        self._files: dict[str, LinesFile] = {}
        self._in_file: dict[str, set[str]] = {}
        self._trials: dict[str, TrialView] = {}
        self._points: dict[str, dict[str, Any]] = {}
        self._changed_at: float | None = None
        self._shown: dict[str, Any] = {}
        self._sent: dict[str, tuple[int, str]] = {}
        self._problems: list[str] = []
        nodes = folder / "nodes"
        self._nodes = NodeSource(nodes.iterdir) if nodes.is_dir() and not nodes.is_symlink() else None
        self.more = False  # there was too much for one call

    # --- what a page asks for

    def poll(self) -> dict[str, Any]:
        """Read what has changed; return the parts of the page that have."""
        self._read()
        parts = self._parts()
        changed = {name: value for name, value in parts.items() if self._shown.get(name) != value}
        self._shown = parts
        trials = {}
        for key, trial in self._trials.items():
            if self._sent.get(key) != (trial.version, trial.state):
                self._sent[key] = (trial.version, trial.state)
                trials[key] = self._curve(trial)
        return changed | ({"trials": trials} if trials else {})

    def whole(self) -> dict[str, Any]:
        """Return everything, as it was read last."""
        return self._shown | {"trials": {key: self._curve(trial) for key, trial in self._trials.items()}}

    def frames(self, trial: str, after: int) -> dict[str, Any] | None:
        """Return the clusters of a trial's clients over time."""
        view = self._trials.get(trial)
        return None if view is None else view.frames(after)

    def graph(self, trial: str) -> dict[str, Any] | None:
        """Return the graph of a trial: its clients, edges, true clusters, and what its layout depends on."""
        view = self._trials.get(trial)
        if view is None:
            return None
        self._topology.poll()
        entry = next(self._graphs_of(view), None)
        if entry is None:
            return None
        facts = entry.get("facts")
        nodes = finite(facts.get("nodes")) if isinstance(facts, Mapping) else None
        edges = entry.get("edges")
        topology = self._config.value.get("topology")
        return {
            "nodes": int(nodes or 0),
            "edges": edges if isinstance(edges, list) else [],
            "clusters": whole_numbers(entry.get("clusters")),
            "seed": view.seed,
            "topology": text(topology.get("name")) if isinstance(topology, Mapping) else "",
        }

    # --- reading

    def _graphs_of(self, trial: TrialView) -> Iterator[dict[str, Any]]:
        for name, entry in self._topology.value.items():
            ours = not self._points or (isinstance(entry, dict) and str(entry.get("digest", ""))[:12] == trial.digest)
            if isinstance(entry, dict) and ours and name.rpartition("/")[2] == str(trial.seed):
                yield entry

    def _read(self) -> None:
        self.more = False
        # Rows come after lines: a trial whose row says that it is finished has all its lines.
        heads = [self._config.poll(), self._summary.poll()]
        if any(heads) or not self._trials:
            self._read_points()
            self._expect_trials()
        self._read_lines()
        self._read_rows()
        problems = [file.problem for file in (self._config, self._summary, self._topology) if file.problem]
        problems += [file.problem for file in self._files.values() if file.problem]
        form = self._summary.value.get("form", 1)
        if not isinstance(form, int) or form > KNOWN_FORM:
            problems.append("the folder was written by a newer version of dfca; some of it may be missing here")
        self._problems = problems

    def _read_points(self) -> None:
        points = self._summary.value.get("points")
        self._points = {}
        for point in points if isinstance(points, list) else ():
            if isinstance(point, dict) and isinstance(point.get("digest"), str):
                self._points[point["digest"][:12]] = renamed(point)

    def _expect_trials(self) -> None:
        """Add the trials that were asked for, in their order."""
        for digest, table in self._points.items() if self._points else (("", self._config.value),):
            names, seeds = table.get("algorithms"), table.get("seeds", 1)
            seeds = list(range(min(seeds, MOST_TRIALS))) if type(seeds) is int else whole_numbers(seeds) or []
            for seed in seeds:
                for name in names if isinstance(names, list) else ():
                    self._trial(name, seed, digest)

    def _trial(self, algorithm: Any, seed: Any, digest: Any) -> TrialView | None:
        if not isinstance(algorithm, str) or type(seed) is not int or abs(seed) > 1 << 63:
            return None
        point = digest[:12] if isinstance(digest, str) and self._points else ""
        if self._points and point not in self._points:
            return None  # of a point that is no longer asked for
        trial = TrialView(label(current(algorithm)), seed, point)
        if trial.key in self._trials:
            return self._trials[trial.key]
        if len(self._trials) >= MOST_TRIALS:
            return None
        trial.asked_clusters = self._asked_clusters(self._points.get(point))
        self._trials[trial.key] = trial
        return trial

    def _asked_clusters(self, point: Mapping[str, Any] | None) -> int | None:
        """Return the true number of clusters, or k where that is less."""
        changed = point.get("point") if point else None
        k = (changed if isinstance(changed, Mapping) else {}).get("clusters", self._config.value.get("clusters"))
        known = [_whole(number) for number in ((point or self._summary.value).get("clusters"), k)]
        return min((number for number in known if number is not None), default=None)

    def _read_lines(self) -> None:
        for path in self._metrics_files():
            try:
                status = os.stat(path, follow_symlinks=False)
            except OSError:
                continue
            file = self._files.setdefault(path.name, LinesFile(path))
            anew, lines = file.poll(status.st_size, status.st_ino)
            self.more = self.more or file.more
            keys = self._in_file.setdefault(path.name, set())
            for key in keys if anew else ():
                self._trials[key].begin_anew()
            for line in lines:
                trial = self._trial(line.get("algorithm"), line.get("seed"), line.get("digest"))
                if trial is not None:
                    keys.add(trial.key)
                    trial.add(line)
            if lines:
                self._changed_at = max(self._changed_at or 0.0, status.st_mtime)

    def _metrics_files(self) -> list[Path]:
        try:
            with os.scandir(self.folder / "metrics") as entries:
                names = sorted(entry.name for entry in entries if entry.name.endswith(".jsonl"))
        except OSError:
            names = []
        old = self.folder / "metrics.jsonl"
        return [*([old] if old.exists() else []), *(self.folder / "metrics" / name for name in names[:MOST_TRIALS])]

    def _read_rows(self) -> None:
        rows = self._summary.value.get("runs")
        done: dict[str, str] = {}
        for row in rows if isinstance(rows, list) else ():
            trial = (
                self._trial(row.get("algorithm"), row.get("seed"), row.get("digest")) if isinstance(row, dict) else None
            )
            if trial is not None:
                trial.error = text(row.get("error"), 400)
                done[trial.key] = "failed" if trial.error else "finished" if row.get("finished") else ""
        alive = self._is_written()
        for key, trial in self._trials.items():
            begun = "running" if alive else "stopped"
            trial.state = done.get(key) or (begun if trial.evaluations else "waiting")

    def _is_written(self) -> bool:
        """Return whether the process that locked the folder last still lives; the lock itself is not touched."""
        path = self.folder / ".lock"
        try:
            return lives(int(read_file(path, 200).decode(errors="replace").removeprefix("process ")), path)
        except (OSError, ValueError, UnreadableError):
            return False

    # --- the parts of the page

    def _curve(self, trial: TrialView) -> dict[str, Any]:
        return trial.curve(POINTS_PER_CURVE_IN_A_SWEEP if self._points else POINTS_PER_CURVE)

    def _parts(self) -> dict[str, Any]:
        summary, config = self._summary.value, self._config.value
        trials = self._trials.values()
        states = [trial.state for trial in trials]
        finished, failed = states.count("finished"), states.count("failed")
        alive = self._is_written()
        state = "finished" if finished and finished == len(states) else "running" if alive else "stopped"
        rounds, clock = finite(config.get("rounds")), config.get("clock")
        until = finite(clock.get("until_s")) if isinstance(clock, Mapping) else None
        run = {
            "title": text(config.get("title"), 120) or label(summary.get("experiment")) or text(self.folder.name),
            "experiment": label(summary.get("experiment")),
            "description": text(config.get("description"), 1000),
            "folder": text(str(self.folder)),
            "state": state,
            "finished": finished,
            "failed": failed,
            "asked": len(states),
            "rounds": None if rounds is None or until is not None else int(rounds),
            "until_s": until,
            "virtual": isinstance(config.get("world"), Mapping),
            "clients": _whole(summary.get("clients") or config.get("clients")),
            "clusters": _whole(summary.get("clusters")),
            "changed_at": self._changed_at,
            "metric": as_part(read_metric(summary, config, (trial.metric for trial in trials))),
        }
        points = [{"digest": digest, "label": text(point.get("label"), 160)} for digest, point in self._points.items()]
        parts = {
            "run": run,
            "points": points,
            "algorithms": list(dict.fromkeys(trial.algorithm for trial in trials)),
            "alarms": [{"trial": trial.key, "what": self._where(trial)} for trial in trials if trial.alarm()],
            "problems": _first(self._problems),
        }
        return parts | (self._nodes.poll() and self._nodes.whole() if self._nodes else {})

    def _where(self, trial: TrialView) -> str:
        point = self._points.get(trial.digest)
        return (f"{text(point.get('label'), 160)}: " if point else "") + trial.alarm()


def _whole(value: Any) -> int | None:
    number = finite(value)
    return None if number is None else int(number)


def _first(sentences: list[str]) -> list[str]:
    more = len(sentences) - MOST_PROBLEMS
    return sentences[:MOST_PROBLEMS] + ([f"and {more} more problems"] if more > 0 else [])
