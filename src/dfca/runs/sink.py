"""What happens in a run, as one stream of calls: `RunSink`, and its receivers.

    FolderSink   summary.json and topology.json of the run folder
    Bars         the terminal (`runs.progress`)
    PipeSink     from a worker process to its parent, which calls its own sinks (`deliver`)
    Tracker      TensorBoard, Weights & Biases, MLflow (`runs.trackers`)
    NullSink     no one; also the base of a sink that needs only some of the calls
    Broadcast    several of these

`run(experiment, out, sink)` takes a sink of your own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from dfca.base.memory import peak_bytes
from dfca.experiment.sweep import Trial, TrialGroup
from dfca.runs.store.folder import RunFolder
from dfca.runs.store.rows import GraphTable, TrialRow
from dfca.sim.metrics_table import EvaluationRow


class RunSink:
    """Receives what happens in a run. The calls, in their order:

        note                                 at any time, also before start_run
        start_run                            once
            start_group                      before the trials of a group
                prepare_trial                models are made, elections held
                start_trial                  may be missing before fail_trial
                    finish_round             for every round, or step of virtual time
                finish_trial | fail_trial    neither, where the run is stopped
        end_run                              once, also after an error or a signal

    Calls come one at a time and from one thread, but those of different trials may alternate: with several workers
    their trials run at the same time. What is passed is read only; numbers may be NaN. A sink that raises ends the run
    as an error does; what is stored is kept.
    """

    def start_run(self, trials: Sequence[Trial], finished: int) -> None:
        """Receive all trials of the experiment, and how many of them were finished before."""

    def note(self, text: str, group: TrialGroup | None = None) -> None:
        """Receive a sentence that the user should read once; `group` where it depends on the point and the seed."""

    def start_group(self, group: TrialGroup, graph: GraphTable) -> None:
        """Receive the graph of a point and seed: its `facts`, `edges` and the true `clusters` of the clients (or None).

        Called again where several groups have the same point and seed.
        """

    def prepare_trial(self, trial: Trial) -> None:
        """Receive that a trial is made ready: its models are made, its centres elected, its checkpoint read."""

    def start_trial(self, trial: Trial, round: int, time_s: float = 0.0) -> None:
        """Receive that a trial starts, after `round` rounds (and virtual seconds) that an earlier run did.

        What a sink knows of the trial beyond that is void: it is computed again, to the same numbers.
        """

    def finish_round(self, trial: Trial, round: int, metrics: EvaluationRow | None, time_s: float = 0.0) -> None:
        """Receive how many rounds are done (in virtual time: on average), and the metrics where it was evaluated."""

    def finish_trial(self, trial: Trial, row: TrialRow) -> None:
        """Receive the row of a finished trial, as the summary holds it."""

    def fail_trial(self, trial: Trial, error: str) -> None:
        """Receive in one sentence why a trial failed; the others continue."""

    def end_run(self) -> None:
        """Receive that nothing follows."""


class NullSink(RunSink):
    """Ignore everything."""


class FolderSink(NullSink):
    """Write the files that all trials of a run share: only the process that owns the folder has one.

    The files of one trial (metrics, checkpoints, models, traces) are written by the process that runs it.
    """

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder

    def start_group(self, group: TrialGroup, graph: GraphTable) -> None:
        self._folder.store_topology(group.point, group.seed, graph)

    def finish_trial(self, trial: Trial, row: TrialRow) -> None:
        self._folder.finish(trial, row.stored)

    def fail_trial(self, trial: Trial, error: str) -> None:
        self._folder.fail(trial, error)


def _to_all(name: str) -> Any:
    def call(self: Broadcast, *values: Any) -> None:
        for sink in self._sinks:
            getattr(sink, name)(*values)

    return call


class Broadcast(RunSink):
    """Pass every call on to several sinks, in their order.

    A note that was passed on before is dropped; one of a group is prefixed by its point, and by its seed where that is
    not the first one's.
    """

    def __init__(self, *sinks: RunSink) -> None:
        self._sinks = sinks
        self._noted: set[str] = set()
        self._first: TrialGroup | None = None

    start_run = _to_all("start_run")
    start_group = _to_all("start_group")
    prepare_trial = _to_all("prepare_trial")
    start_trial = _to_all("start_trial")
    finish_round = _to_all("finish_round")
    finish_trial = _to_all("finish_trial")
    fail_trial = _to_all("fail_trial")
    end_run = _to_all("end_run")

    def note(self, text: str, group: TrialGroup | None = None) -> None:
        self._first = self._first or group
        if text in self._noted:
            return
        self._noted.add(text)
        where = [group.point.label] if group is not None and group.point.label else []
        if group is not None and self._first is not None and group.seed != self._first.seed:
            where.append(f"seed {group.seed}")
        for sink in self._sinks:
            sink.note(f"{', '.join(where)}: {text}" if where else text)


class PipeSink(NullSink):
    """Send every call of a group through a pipe, as JSON values: trials by the name of their algorithm.

    Also sends ["memory", bytes] whenever the peak memory of this process has grown.
    """

    def __init__(self, send: Callable[..., None]) -> None:
        self._send = send
        self._peak = 0

    def note(self, text: str, group: TrialGroup | None = None) -> None:
        self._send("note", text, group is not None)

    def start_group(self, group: TrialGroup, graph: GraphTable) -> None:
        self._send("start_group", graph)

    def prepare_trial(self, trial: Trial) -> None:
        self._send("prepare_trial", trial.algorithm)

    def start_trial(self, trial: Trial, round: int, time_s: float = 0.0) -> None:
        self._send("start_trial", trial.algorithm, round, time_s)

    def finish_round(self, trial: Trial, round: int, metrics: EvaluationRow | None, time_s: float = 0.0) -> None:
        if (peak := peak_bytes()) > self._peak:
            self._peak = peak
            self._send("memory", peak)
        self._send("finish_round", trial.algorithm, round, None if metrics is None else metrics.stored, time_s)

    def finish_trial(self, trial: Trial, row: TrialRow) -> None:
        self._send("finish_trial", trial.algorithm, row.stored)

    def fail_trial(self, trial: Trial, error: str) -> None:
        self._send("fail_trial", trial.algorithm, error)


def deliver(message: Sequence[Any], group: TrialGroup, sink: RunSink) -> None:
    """Repeat on a sink the call that a `PipeSink` has sent while it ran a group."""
    kind, *content = message
    match kind:
        case "note":
            sink.note(content[0], group if content[1] else None)
        case "start_group":
            sink.start_group(group, content[0])
        case "prepare_trial":
            sink.prepare_trial(group.trial(content[0]))
        case "start_trial":
            sink.start_trial(group.trial(content[0]), *content[1:])
        case "finish_round":
            algorithm, done, line, time_s = content
            metrics = None if line is None else EvaluationRow.of(line)
            sink.finish_round(group.trial(algorithm), done, metrics, time_s)
        case "finish_trial":
            sink.finish_trial(group.trial(content[0]), TrialRow.of(content[1]))
        case "fail_trial":
            sink.fail_trial(group.trial(content[0]), content[1])
        case _:
            raise ValueError(f"{kind!r} is no call of a sink")
