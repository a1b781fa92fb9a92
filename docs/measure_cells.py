"""Simulates the cells of docs/scale.md: cells of peers, their delegates as an upper swarm, and what that hands down.

python docs/measure_cells.py [CELLS [PEERS]]        # 100 100; prints the table

Each cell is an event simulation of its own. Its peers find their clusters by `dfca-auto`. Then its delegate, one peer,
stands for election in the upper swarm with the model of its own cluster. What is elected there it brings home: it alone
begins with it, as an entry that extends the lineage of its cell, and its neighbours take it by the protocol. Models of
different starts cannot be averaged; now all have the same start. So the second time the model of the cell takes the
place of local training in the upper swarm, which averages it. Devices are of two kinds, half of each in every cell; all
of a kind have the same task. A step takes 0.2 s, a message 20 ms.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

import dfca
from dfca import algorithms
from dfca.core.method import LocalOptions
from dfca.data.own import split_from
from dfca.peer.records.lineage import Entry, Lineage, digest_of
from dfca.peer.state import VERSION, Saved
from dfca.sim.events.simulation import EventSimulation
from dfca.sim.events.world import Compute, Link, World
from dfca.sim.setting import Setting

INPUTS, CLASSES, KINDS, HIDDEN, SAMPLES, TEST = 10, 4, 2, 16, 30, 40
DEGREE, ROUNDS, UPPER_ROUNDS, QUIET, MORE_ROUNDS = 6, 20, 16, 12, 6
WORLD = World(Compute(step_s=0.2, kind="lognormal", spread=0.3), Link(latency_s=0.02))


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(INPUTS, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, CLASSES))


def device(kind: int, number: int) -> tuple[Tensor, Tensor]:
    """Draw the samples of a device: its kind says by which rule they are labelled."""
    rule, random = torch.Generator().manual_seed(1000 + kind), torch.Generator().manual_seed(number)
    weights = torch.randn(INPUTS, CLASSES, generator=rule)
    x = torch.randn(SAMPLES + TEST, INPUTS, generator=random)
    return x, (x @ weights).argmax(dim=1)


Data = tuple[Tensor, Tensor]


@dataclass
class Swarm:
    """A simulated swarm: what came of it, and what it took."""

    simulation: EventSimulation
    accuracy: float
    virtual_s: float
    megabytes: float  # sent by one of its peers

    @classmethod
    def run(
        cls, data: Sequence[Data], seed: int, rounds: int, saves: Sequence[Saved] = (), bring: Sequence[Tensor] = ()
    ) -> Swarm:
        """Run a swarm on the samples of its peers, from what they have kept.

        bring: the models that peers send in place of training, until the last rounds, in which they only exchange.
        """
        train, test = ([(x[part], y[part]) for x, y in data] for part in (slice(SAMPLES), slice(SAMPLES, None)))
        setting = Setting(
            split=split_from((train, test)),
            graph=dfca.make_graph(
                dfca.TopologyOptions(name="regular", degree=min(DEGREE, len(data) - 1)), clients=len(data), seed=seed
            ),
            make_model=make_model,
            algorithm=algorithms.get("dfca-auto"),
            clusters=None,
            rounds=rounds,
            seed=seed,
            local=LocalOptions(steps=5, learning_rate=0.1),
            aggregation="sequential",
            evaluate_every=10**6,
            personal_steps=0,
            quiet_rounds=QUIET if bring else 0,
        )
        simulation = EventSimulation(setting, WORLD)
        for i, saved in enumerate(saves):
            simulation.host.saved[i] = saved
        if bring:
            replace_training(simulation, bring)
        row = simulation.run().metrics[-1]
        return cls(simulation, row.score, simulation.now, row.bytes_sent / 1e6 / len(data))

    @property
    def peers(self) -> list[Any]:
        """Its peers, as they are at the end."""
        return [peer for peer in self.simulation.host.peers if peer is not None]

    def model(self, i: int) -> Tensor:
        """Return the model of the cluster that a peer trained last."""
        peer = self.peers[i]
        model: Tensor = peer.bank[peer.assignment]
        return model.clone()


def replace_training(simulation: EventSimulation, models: Sequence[Tensor]) -> None:
    """Let each peer send a given model in place of training, until the rounds without training."""
    pool, train = simulation.pool, simulation.pool._train

    def given(orders: Sequence[Any], in_place: bool) -> list[Any]:
        trained = train(orders, False)
        pairs = zip(orders, trained, strict=True)
        return [t if pool.is_quiet(o.job.round) else t._replace(model=models[o.client].clone()) for o, t in pairs]

    pool._train = given  # type: ignore[method-assign]


def kept(seed: int, lineage: Lineage = (), bank: Tensor | None = None, own: Tensor | None = None) -> Saved:
    return Saved(VERSION, seed, 0, 0, lineage, bank, own=own)


def of_upper_swarm(models: Tensor, voters: int) -> Entry:
    """Make the entry by which the models of an upper swarm extend the lineage of a cell."""
    return Entry(voters, 0, 0, 0, digest_of(models), tuple(range(len(models))))


def simulate(cells: int, peers: int) -> list[tuple[str, list[Swarm]]]:
    """Run all cells; then, twice, their delegates, and all cells with what the delegates bring home."""
    devices = [[device(i % KINDS, c * peers + i) for i in range(peers)] for c in range(cells)]
    delegates = [c % KINDS for c in range(cells)]  # any peer of a cell may be the one
    own = [devices[c][i] for c, i in enumerate(delegates)]
    cell = [show(Swarm.run(devices[c], c, ROUNDS), f"cell {c}") for c in range(cells)]
    rows = [("cells alone", cell)]
    brought = [swarm.model(i) for swarm, i in zip(cell, delegates, strict=True)]
    upper = show(Swarm.run(own, cells, 1, [kept(cells, own=model) for model in brought]), "delegates elect")
    rows.append(("delegates elect", [upper]))
    cell = hand_down(devices, delegates, cell, upper)
    rows.append(("cells, after that", cell))
    brought = [swarm.model(i) for swarm, i in zip(cell, delegates, strict=True)]
    saves = [kept(cells, peer.lineage, peer.bank.clone()) for peer in upper.peers]
    upper = show(Swarm.run(own, cells, UPPER_ROUNDS, saves, brought), "delegates average")
    rows.append(("delegates average", [upper]))
    rows.append(("cells, after that", hand_down(devices, delegates, cell, upper)))
    rounds = ROUNDS + 2 * MORE_ROUNDS
    longer = [show(Swarm.run(devices[c], c, rounds), f"cell {c} alone") for c in range(0, cells, 10)]
    return [*rows, ("every tenth cell, as many rounds alone", longer)]


def hand_down(
    devices: Sequence[Sequence[Data]], delegates: Sequence[int], cells: Sequence[Swarm], upper: Swarm
) -> list[Swarm]:
    """Continue all cells, in which the delegate has the models of the upper swarm and the others have not."""
    again = []
    for c, (i, cell, delegate) in enumerate(zip(delegates, cells, upper.peers, strict=True)):
        saves = [kept(c, peer.lineage, peer.bank.clone()) for peer in cell.peers]
        models, mine = delegate.open_models, saves[i].bank
        assert mine is not None
        bank = torch.cat([models, mine[len(models) :]])
        saves[i] = replace(saves[i], bank=bank, lineage=(*saves[i].lineage, of_upper_swarm(models, len(cells))))
        again.append(show(Swarm.run(devices[c], c, MORE_ROUNDS, saves), f"cell {c} again"))
    return again


def show(swarm: Swarm, name: str) -> Swarm:
    held = {(len(peer.open_clusters), len(peer.lineage)) for peer in swarm.peers}
    print(f"{name}: {swarm.accuracy:.1%}, (clusters, lineage) {sorted(held)}", file=sys.stderr, flush=True)
    return swarm


def table(rows: list[tuple[str, list[Swarm]]]) -> str:
    lines = [
        "| | swarms | clusters | accuracy % | worst swarm % | MB sent per device | virtual s |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, swarms in rows:
        clusters = sorted({len(peer.open_clusters) for swarm in swarms for peer in swarm.peers})
        scores = [100 * swarm.accuracy for swarm in swarms]
        lines.append(
            f"| {name} | {len(swarms)} | {', '.join(map(str, clusters))} | {fmean(scores):.1f} | {min(scores):.1f} | "
            f"{fmean(swarm.megabytes for swarm in swarms):.2f} | {fmean(swarm.virtual_s for swarm in swarms):.0f} |"
        )
    return "\n".join(lines)


def main() -> None:
    cells, peers = (int(value) for value in (*sys.argv[1:], "100", "100")[:2])
    torch.set_num_threads(1)
    begin = time.process_time()
    print(table(simulate(cells, peers)))
    print(f"\n{time.process_time() - begin:.0f} s of one core", file=sys.stderr)


if __name__ == "__main__":
    main()
