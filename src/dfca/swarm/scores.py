"""What a swarm has learned so far: the saves of its nodes, scored like a simulation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from dfca.core.rules.merging import hide_closed
from dfca.node.disk.store import DiskStore
from dfca.peer.records.lineage import layout_of
from dfca.peer.state import Saved
from dfca.sim.evaluation import Evaluator
from dfca.sim.personal import LastSteps
from dfca.sim.shards import Alone
from dfca.sim.start import Start
from dfca.swarm.plan import SwarmPlan


@dataclass(frozen=True)
class Snapshot:
    """The saves of all nodes, by client; None for a node without one."""

    saves: list[Saved | None]

    @property
    def holding(self) -> list[int]:
        """The clients that hold models."""
        return [i for i, saved in enumerate(self.saves) if saved is not None and saved.bank is not None]

    @property
    def rounds(self) -> list[int]:
        return [0 if saved is None else saved.round for saved in self.saves]

    @property
    def lineages(self) -> int:
        """The number of lineages among the nodes that hold models."""
        return len({self.saves[i].lineage for i in self.holding})  # type: ignore[union-attr]


def take(plan: SwarmPlan) -> Snapshot:
    """Read the newest valid save of every node."""
    return Snapshot([DiskStore(plan.folder(i) / "state").load() for i in range(plan.setting.clients)])


class Scorer:
    """Scores snapshots as a simulation scores its banks."""

    def __init__(self, plan: SwarmPlan) -> None:
        self._plan = plan
        start = Start(plan.setting, Alone(plan.setting.clients))
        self._evaluator, self._last_step = Evaluator(start), LastSteps(start, plan.setting.rounds)

    def row(self, snapshot: Snapshot, time_s: float) -> dict[str, Any] | None:
        """Return the metrics of a snapshot, or None if no node holds models yet.

        A node that holds fewer models than others (during an election) is filled up with copies of its first model,
        which changes no choice.
        """
        holding = snapshot.holding
        if not holding:
            return None
        clients = len(snapshot.saves)
        most = max(len(snapshot.saves[i].bank) for i in holding)  # type: ignore[union-attr, arg-type]
        example = snapshot.saves[holding[0]].bank  # type: ignore[union-attr]
        assert example is not None
        banks = torch.zeros(most, clients, example.shape[1], dtype=example.dtype)
        assignments = torch.full((clients,), -1)
        for i in holding:
            saved = snapshot.saves[i]
            assert saved is not None
            assert saved.bank is not None
            banks[: len(saved.bank), i] = hide_closed(saved.bank, layout_of(saved.lineage).closed)
            banks[len(saved.bank) :, i] = saved.bank[0]
            assignments[i] = -1 if saved.assignment is None else saved.assignment
        done = min(snapshot.rounds) >= self._plan.setting.rounds
        if done and self._plan.setting.last_steps == "auto":
            self._last_step.steps = torch.tensor(
                [0 if saved is None else saved.curves.picked or 0 for saved in snapshot.saves]
            )
        scored = self._evaluator.score_holders(banks, assignments, holding, self._last_step, final=done)
        without = [i for i in range(clients) if i not in holding]
        return {"round": min(snapshot.rounds), "time_s": time_s, **scored, "without_models": without}
