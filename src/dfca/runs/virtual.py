"""A trial in virtual time: the event simulator with what a run folder needs of it.

It steps as the synchronous simulator does, streams its trace to the disk, notes when the target score is reached and
how soon a late joiner catches up, and gathers the timeline of the report.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean

from torch import Tensor

from dfca.base.errors import DfcaError, RunError
from dfca.base.files import Stream, atomic_write, explain_write_errors
from dfca.core.learning.params import FlatModel
from dfca.core.learning.task import ACCURACY, Metric
from dfca.experiment.sweep import Trial
from dfca.experiment.world import ClockConfig, TimelineConfig
from dfca.runs.store.folder import RunFolder
from dfca.runs.timeline import Timeline, choose_lanes, uplink_seconds, usual_span
from dfca.sim.events.books import Line
from dfca.sim.events.replay import to_line
from dfca.sim.events.simulation import EventSimulation
from dfca.sim.metrics_table import EvaluationRow, JsonObject
from dfca.sim.setting import Setting
from dfca.sim.shards import pieces

CAUGHT_UP = 0.95  # of the others' score


class StuckError(DfcaError):
    """No client of a trial can continue; the message says who waits for whom."""


def simulation_of(trial: Trial, setting: Setting, trace: bool, replay: list[Line] | None = None) -> EventSimulation:
    config = trial.point.config
    world, options = config.world, (config.clock or ClockConfig()).event_options(config.rounds)
    assert world is not None
    options = replace(options, trace=trace, replay=replay)
    return EventSimulation(setting, world.over(config.clients), options)


class VirtualTrial:
    """The event simulation of a trial, step by step; `state` and `restore` carry it over a restart, bit by bit."""

    STATE = 1  # the version of `state`

    def __init__(self, trial: Trial, setting: Setting, folder: RunFolder) -> None:
        config = trial.point.config
        assert config.world is not None
        self._world = config.world.over(config.clients)
        # The timeline is of the first seed: one picture per point and algorithm.
        drawn = trial.seed == config.seeds[0]
        self.simulation = simulation_of(trial, setting, trace=drawn or config.world.trace)
        self._milestones = Milestones(
            config.clock or ClockConfig(),
            {e.client: e.at_s for e in self._world.late_joiners},
            setting.learns.metric,
        )
        self._slowdowns = self._world.compute.slowdowns(trial.seed, config.clients)
        self._trace = TraceFile(trial.file(folder.path / "trace", ".jsonl")) if config.world.trace else None
        self._lanes_file = trial.file(folder.path / "timeline", ".json")
        self._timeline: Timeline | None = None
        if drawn:
            options = config.world.timeline or TimelineConfig()
            steps = setting.local.steps_of(sum(setting.split.train.sizes) // config.clients)
            span_s = usual_span(setting.algorithm, steps, self._world.compute.step_s)
            send_s = uplink_seconds(self._world, config.clients, self.simulation.model_bytes)
            lanes = choose_lanes(options, self._world, setting.graph, trial.seed)
            self._timeline = Timeline(options, lanes, span_s, send_s)

    @property
    def time_s(self) -> float:
        return self.simulation.now

    @property
    def flat(self) -> FlatModel:
        return self.simulation.pool.flat

    @property
    def place(self) -> str:
        return f"{self.time_s:g} virtual seconds (round {self.simulation.round})"

    def stream(self) -> Stream:
        """Return all models, (m, N, P)."""
        banks = self.simulation.banks
        return Stream(tuple(banks.shape), banks.dtype, pieces(banks))

    def step(self) -> EvaluationRow | None:
        """Advance to the next evaluation, and return its metrics, or by a round."""
        try:
            row = self.simulation.step()
        except RunError as error:  # for the runner those are of the disk, and end all trials
            raise StuckError(str(error)) from error
        records = self.simulation.take_trace()
        if self._timeline is not None and not self._timeline.over:
            self._timeline.add(records)
        if self._trace is not None:
            self._trace.append(records)
        elif self._timeline is None or self._timeline.over:
            self.simulation.end_trace()
        if row is not None:
            self._milestones.update(row)
        return row

    def state(self) -> tuple[dict[str, Tensor], JsonObject]:
        """Return everything that a checkpoint needs; the trace so far is on the disk."""
        tensors, facts = self.simulation.state()
        return tensors, {
            "simulation": facts,
            "watch": self._milestones.seen,
            "trace": self._trace.flush() if self._trace else 0,
            "timeline": self._timeline.state() if self._timeline else {},
        }

    def restore(self, tensors: Mapping[str, Tensor] | None, facts: JsonObject | None) -> None:
        assert tensors is not None
        assert facts is not None
        self.simulation.restore(tensors, facts["simulation"])
        self._milestones.seen = dict(facts.get("watch", {}))
        if self._trace is not None:
            self._trace.cut(facts.get("trace", 0))
        if self._timeline is not None:
            self._timeline.restore(facts.get("timeline", {}))

    def finish(self) -> JsonObject:
        """Write the trace and the timeline, and return what else the row of the finished trial has.

        time_s: virtual; time_to_target_s, bytes_to_target: None if never; idle_share: the mean over clients of the part
        of their time in which they did not train; compute_s: what all clients trained, in seconds; staleness: how many
        folds had which age; records: how many events of each kind.
        """
        if self._trace is not None:
            self._trace.close()
        if self._timeline is not None:
            joins = {joiner.client: joiner.at_s for joiner in self._world.late_joiners}
            atomic_write(self._lanes_file, json.dumps(self._timeline.table(self._slowdowns, joins)) + "\n")
        result = self.simulation.result()
        ages = result.staleness
        folds = sum(ages.values())
        return {
            "time_s": result.time_s,
            "client_rounds": {"min": min(result.rounds), "mean": fmean(result.rounds), "max": max(result.rounds)},
            **self._milestones.facts(),
            "idle_share": fmean(result.idle_shares),
            "idle_share_max": max(result.idle_shares),
            "compute_s": sum(result.compute_s),
            "staleness": {str(age): number for age, number in ages.items()},
            "staleness_mean": sum(a * n for a, n in ages.items()) / folds if folds else None,
            "records": result.records,
            "rejected": result.rejected,
        }


class Milestones:
    """When the target score was first reached, and late joiners were first near the others."""

    def __init__(self, clock: ClockConfig, joins: dict[int, float], metric: Metric = ACCURACY) -> None:
        self.target = clock.target if clock.target_accuracy is None else clock.target_accuracy
        self.joins, self.metric = joins, metric
        self.seen: dict[str, float | None] = {}

    def update(self, row: EvaluationRow) -> None:
        reached = self.target is not None and row.score is not None and self.metric.reached(row.score, self.target)
        if reached and "time_to_target_s" not in self.seen:
            sent = row["bytes_sent"] + (row.get("server_bytes_sent") or 0)
            self.seen |= {"time_to_target_s": row.time_s, "bytes_to_target": sent}
            self.seen |= {"compute_to_target_s": row["compute_s"]}
        for client, at_s in self.joins.items():
            others = [score for i, score in enumerate(row.scores) if i not in self.joins]
            goal = fmean(others) * CAUGHT_UP if self.metric.higher_is_better else fmean(others) / CAUGHT_UP
            joined_s = (row.time_s or 0.0) - at_s
            if joined_s > 0 and str(client) not in self.seen and self.metric.reached(row.scores[client], goal):
                self.seen[str(client)] = joined_s

    def facts(self) -> JsonObject:
        """Return what the row of the trial says of it; None: it never happened."""
        facts: JsonObject = {}
        if self.target is not None:
            names = ("time_to_target_s", "bytes_to_target", "compute_to_target_s")
            target = "target_accuracy" if self.metric == ACCURACY else "target"
            facts = {target: self.target, **{name: self.seen.get(name) for name in names}}
        if self.joins:
            facts["caught_up_s"] = {str(client): self.seen.get(str(client)) for client in self.joins}
        return facts


class TraceFile:
    """A trace on its way to the disk: `NAME.part` until it is whole, then `NAME`."""

    def __init__(self, path: Path) -> None:
        self._path, self._part = path, path.with_name(path.name + ".part")
        self._begun = False

    def append(self, records: Sequence[Line]) -> None:
        """Write records; the first replace what an earlier run has left."""
        with explain_write_errors(self._path):
            self._part.parent.mkdir(parents=True, exist_ok=True)
            with self._part.open("ab" if self._begun else "wb") as file:
                file.write("".join(map(to_line, records)).encode())
        self._begun = True

    def flush(self) -> int:
        """Put everything on the disk; return how many bytes there are."""
        if not self._begun:
            self.append(())
        with explain_write_errors(self._path), self._part.open("rb") as file:
            os.fsync(file.fileno())
            return os.fstat(file.fileno()).st_size

    def cut(self, size: int) -> None:
        """Cut the trace to a size, from which the run continues.

        Raises RunError if the trace is missing (the run began without one) or shorter (it was edited).
        """
        if not self._part.exists():
            raise RunError(
                f"{self._part.name} is not in {self._part.parent}, so its beginning is lost; use --set "
                "world.trace=false, or --no-resume"
            )
        there = self._part.stat().st_size
        if there < size:
            raise RunError(
                f"{self._part} has {there} bytes and its checkpoint counts {size}; restore the file or use --no-resume"
            )
        with explain_write_errors(self._path):
            os.truncate(self._part, size)
        self._begun = True

    def close(self) -> None:
        """Move the whole trace to its name."""
        self.flush()
        with explain_write_errors(self._path):
            os.replace(self._part, self._path)
