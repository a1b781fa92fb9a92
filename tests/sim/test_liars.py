"""Liars in a world, elections that bound what they say, and the scores of the honest."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any, get_args

import networkx as nx
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from toy import make_toy_setting, quick

import dfca
from dfca.base.errors import ConfigError
from dfca.core.method import ElectionOptions
from dfca.core.rules.election import MOST_SAMPLES, SCALE, Vote, add, cast, count, decide, is_sayable, no_votes
from dfca.experiment.config import Config
from dfca.experiment.load import load_experiment
from dfca.node.task.facts import Facts
from dfca.sim.events.options import EventOptions
from dfca.sim.events.simulation import EventSimulation
from dfca.sim.events.world import Compute, Link, World
from dfca.sim.liars import CLAIMED_LOSS, Liars
from dfca.sim.local.choices import LiarKind, LiarOptions
from dfca.sim.rounds.simulation import Simulation

TIMED = World(Compute(1.0, "lognormal"), Link(latency_s=0.3, spread=0.8))


def finish(setting: Any) -> tuple[Simulation, dict[str, Any]]:
    simulation, row = Simulation(setting), {}
    while not simulation.done:
        row = simulation.step() or row
    return simulation, row


def test_who_lies_follows_the_seed_and_somebody_is_honest() -> None:
    options = LiarOptions(0.2, "noise")
    one, again, other = (Liars(options, 30, seed) for seed in (0, 0, 1))
    assert len(one.ids) == 6
    assert one.ids == again.ids != other.ids
    assert sorted(one.ids + one.honest) == list(range(30))
    assert Liars(LiarOptions(0.99, "noise"), 3, 0).honest


def test_what_they_send_by_hand() -> None:
    model = torch.arange(6.0)

    def told(kind: Any, now: int = 0, **options: Any) -> torch.Tensor:
        liars = Liars(LiarOptions(0.5, kind, **options), 2, 0)
        (client,) = liars.ids
        liars.note_first(client, torch.ones(6))
        assert torch.equal(liars.tell(liars.honest[0], 0, now, model), model)
        whole, parts = liars.tell(client, 0, now, model), model[None].clone()
        for columns in (slice(0, 4), slice(4, 6)):
            liars.tell_(parts[:, columns], [client], 0, now, (columns, 6))
        assert torch.equal(parts[0], whole)  # in blocks, as the simulator of rounds sends
        return whole

    assert told("flip-signs").tolist() == (-model).tolist()
    assert told("stale").tolist() == [1.0] * 6
    assert told("self-vote").tolist() == told("swap-labels").tolist() == model.tolist()
    noise, later = told("noise") - model, told("noise", now=1) - model
    assert not torch.equal(noise, later)
    torch.testing.assert_close(told("noise", scale=10.0) - model, 10 * noise)
    assert torch.equal(model, torch.arange(6.0))


def test_swapped_labels_are_those_of_the_liars() -> None:
    setting = make_toy_setting("dfca-gi", liars=LiarOptions(0.3, "swap-labels"))
    simulation, true = Simulation(setting), setting.split.train
    liars = simulation.start.liars
    for client in range(setting.clients):
        held = simulation.train.of(client)[1]
        expected = true.of(client)[1]
        assert torch.equal(held, setting.split.classes - 1 - expected if client in liars else expected)
    assert torch.equal(simulation.test.y, setting.split.test.y)


def test_scores_are_those_of_the_honest() -> None:
    setting = make_toy_setting("dfca-gi", liars=LiarOptions(0.3, "flip-signs"), rounds=2)
    simulation, row = finish(setting)
    honest = simulation.start.liars.honest
    mine = torch.tensor(row["accuracy_by_client"])[honest]
    assert row["accuracy"] == pytest.approx(float(mine.mean()))
    picks, truth = torch.tensor(row["assignments"])[honest], setting.split.clusters[honest]
    assert row["cluster_accuracy"] == pytest.approx(dfca.metrics.cluster_accuracy(picks, truth))
    result = EventSimulation(setting).run()
    assert result.metrics[-1]["accuracy"] == pytest.approx(row["accuracy"])
    assert result.metrics[-1]["clients"] == len(honest)


KEPT = ("noise", "stale", "self-vote")


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind in KEPT else pytest.mark.slow) for kind in get_args(LiarKind)]
)
def test_a_trace_replays_and_a_checkpoint_goes_on(kind: Any) -> None:
    changes = {"aggregation": "sequential", "robust": "clip", "rounds": 4, "evaluate_every": 1}
    setting = make_toy_setting(quick("dfca-auto"), liars=LiarOptions(0.3, kind), **changes)
    whole = EventSimulation(setting, TIMED, EventOptions(trace=True))
    for _ in range(3):
        whole.step()
    tensors, facts = whole.state()
    stored = {name: tensor.clone() for name, tensor in tensors.items()}, json.loads(json.dumps(facts))
    result = whole.run()
    second = EventSimulation(setting, TIMED, EventOptions(trace=True))
    second.restore(*stored)
    assert torch.equal(second.run().banks, result.banks)
    again = EventSimulation(setting, TIMED, EventOptions(trace=True, replay=result.trace)).run()
    assert torch.equal(again.banks, result.banks)


# Elections.


def losses(*values: float) -> torch.Tensor:
    return torch.tensor([values], dtype=torch.float64)


def test_a_bounded_vote_by_hand() -> None:
    # losses 4 and 2 of the centre, 1 and 1 of the candidate: units of (3 + 1) / 2, so 1.5 is clipped to 1
    vote = cast(losses(4.0), losses(0.0)[0], losses(1.0)[0], losses(4.0, 2.0), losses(1.0, 1.0)[0], bounded=True)
    assert vote.samples == 2
    assert vote.totals == pytest.approx((1.0 + 0.5,))
    assert vote.squares == pytest.approx((1.0 + 0.25,))
    same = cast(losses(8.0), losses(0.0)[0], losses(2.0)[0], losses(8.0, 4.0), losses(2.0, 2.0)[0], bounded=True)
    assert same.totals == pytest.approx(vote.totals)  # whatever the unit of the loss is
    many = torch.rand(2, 3 * MOST_SAMPLES, dtype=torch.float64)
    vote = cast(many, many[0], many[1], many, many[1] / 2, bounded=True)
    assert vote.samples == MOST_SAMPLES
    assert all(abs(total) <= MOST_SAMPLES for total in vote.totals)


values = st.lists(st.floats(0, 1e6), min_size=4, max_size=4)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(values, values, values), min_size=1, max_size=6), st.floats(-1, 10))
def test_what_honest_clients_say_is_sayable_and_a_million_samples_are_not(clients: list[Any], gain: float) -> None:
    total = no_votes(2)
    for first, second, own in clients:
        centres = torch.tensor([first, second], dtype=torch.float64)
        vote = cast(centres, torch.tensor(own), torch.tensor(own) / 2, centres, torch.tensor(own) / 3, bounded=True)
        total = add(total, count(vote, gain))
    assert is_sayable(total, len(clients))
    assert is_sayable(total, 10 * len(clients))
    assert not is_sayable(total, len(clients) - 1)
    huge = total._replace(movers=total.voters, samples=10**6, totals=(10**6 * SCALE,) * 2)
    assert not is_sayable(huge, len(clients))
    certain = total._replace(samples=4, movers=1, totals=(2 * SCALE, 0), squares=(0, 0))  # no spread, and a mean
    assert not is_sayable(certain, len(clients))


def test_a_veto_of_one_counts_as_one_vote() -> None:
    def tally(bounded: bool) -> Any:
        total = no_votes(1)
        spread = torch.tensor([0.8, 1.0, 1.2, 1.0], dtype=torch.float64)
        for client in range(12):  # 6 that the candidate helps, 5 that stay, and a liar
            before, after = (4 * spread, spread) if client < 6 else (spread, 4 * spread)
            if client == 11:  # it prefers the candidate, it says, and is far worse off with it
                before, after = torch.zeros(4).double(), torch.full((4,), 1e4).double()
            low = torch.tensor([0.1], dtype=torch.float64)
            bid = (5.0, 0.1) if client < 6 or client == 11 else (0.1, 5.0)
            vote = cast(low[None] * bid[0], low, low * bid[1], before[None], after, bounded)
            total = add(total, count(vote, 1.0))
        return total

    for bounded in (False, True):
        decision = decide(tally(bounded), 1.0, ElectionOptions(bounded=bounded))
        assert decision.support == 7
        assert decision.accepted is bounded


def test_members_that_claim_many_samples_have_no_veto() -> None:
    """10 clients want the candidate, 14 do not, and 6 liars stay and say that it is far better for them."""
    generator = torch.Generator().manual_seed(0)
    total, samples = no_votes(1), 18
    for client in range(24):
        d = (0.4 * torch.randn(samples, generator=generator) + (0.5 if client < 10 else -0.5)).clamp(-1, 1).double()
        gain = 1.0 if client < 10 else -1.0
        total = add(total, count(Vote(0, gain, 0.0, samples, (float(d.sum()),), (float(d.square().sum()),)), 1.0))
    for claimed, sayable in ((MOST_SAMPLES, True), (1000, False)):
        lie = count(Vote(0, -1.0, 0.0, claimed, (float(claimed),), (float(claimed),)), 1.0)
        assert is_sayable(lie, 1) is sayable
        sums = total
        for _ in range(6):
            sums = add(sums, lie)
        assert decide(sums, 1.0, ElectionOptions(bounded=True)).accepted is sayable


def test_a_first_centre_that_fits_nobody_stops_no_guarded_election() -> None:
    total = no_votes(1)
    for client in range(10):  # all but one prefer the candidate
        worse = client == 9
        vote = cast(
            losses(9.0, 9.0),
            losses(1.0, 1.0)[0],
            losses(20.0 if worse else 1.0, 1.0)[0],
            losses(9.0, 9.0),
            losses(1.0, 1.1)[0],
            True,
        )
        total = add(total, count(vote, 8.0))
    options = ElectionOptions(bounded=True)
    assert decide(total, 8.0, options).accepted
    assert not decide(total, 8.0, replace(options, bounded=False)).accepted


def test_liars_may_stand_in_vain() -> None:
    options = ElectionOptions(patience=5)
    assert options.among(30).patience == 5
    assert replace(options, bounded=True).among(30).patience == 11


@pytest.mark.parametrize("robust", ["none", "clip"])
def test_self_voters_in_messages_and_in_closed_form(robust: Any) -> None:
    setting = make_toy_setting(
        quick("dfca-auto"), graph=nx.complete_graph(6), liars=LiarOptions(0.3, "self-vote"), robust=robust
    )
    simulation = Simulation(setting)
    turns = simulation.elections[0].turns
    liars = simulation.start.liars
    first = turns[1 : 1 + len({*liars.ids} - {turns[0].candidate})]
    assert first
    assert all(turn.candidate in liars for turn in first)  # they bid highest
    assert all(turn.bid == pytest.approx(CLAIMED_LOSS) for turn in first)
    events = EventSimulation(setting)
    events.step()
    assert len(events.banks) >= 1
    peer = events.host.peers[liars.honest[0]]
    assert len(peer.bank) == len(simulation.banks)


# Settings.


def test_configs_without_a_guard_are_what_they_were() -> None:
    config = load_experiment("quickstart").config
    assert config.mixing.robust == "none"
    stored = config.values()
    del stored["mixing"]["robust"]  # as older versions wrote it
    assert Config.of(stored).digest() == config.digest()
    guarded = Config.of(stored | {"mixing": {"robust": "clip"}})
    assert guarded.digest() != config.digest()
    assert "robust" in guarded.to_toml()


@pytest.mark.parametrize(
    ("table", "problem"),
    [
        ({"share": 1.0, "kind": "noise"}, "liars.share must be >= 0 and < 1, got 1.0"),
        ({"share": 0.2, "kind": "steal"}, "liars.kind"),
        ({"share": 0.2, "kind": "noise", "scale": 0.0}, "liars.scale must be > 0, got 0.0"),
        ({"share": 0.2}, "liars.kind"),
    ],
)
def test_wrong_liars_are_named(table: dict[str, Any], problem: str) -> None:
    values = load_experiment("quickstart").config.values()
    with pytest.raises(ConfigError, match=problem):
        Config.of(values | {"liars": table})


def test_swapped_labels_need_classes() -> None:
    samples = [(torch.rand(4, 3), torch.rand(4))] * 3
    split = dfca.Split.of_clients(samples, samples, task="regression")
    with pytest.raises(ConfigError, match='"swap-labels" need classes, and the task is "regression"'):
        dfca.simulate(
            torch.nn.Linear(3, 1),
            split,
            "dfedavgm",
            rounds=1,
            topology="ring",
            liars={"share": 0.4, "kind": "swap-labels"},
        )


def test_a_swarm_agrees_on_its_guard() -> None:
    plain = {
        "name": "home",
        "founder": "a" * 52,
        "nonce": "0" * 32,
        "inputs": {"features": ["a"]},
        "classes": ["x", "y"],
    }
    facts = Facts.checked({**plain, "model": {"size": 7}})
    guarded = Facts.checked({**plain, "model": {"size": 7}, "robust": "clip"})
    assert b"robust" not in facts.to_bytes()  # the name of a swarm without one is what it was
    assert Facts.from_bytes(guarded.to_bytes()) == guarded
    assert facts.swarm_id != guarded.swarm_id
    options = guarded.peer_options(0, (1, 2))
    assert options.rules.robust == "clip"
    assert options.method.election.bounded
    assert not facts.peer_options(0, (1, 2)).method.election.bounded


@pytest.mark.parametrize(("algorithm", "key"), [("facade", "mixing.robust"), ("dac", "liars")])
def test_what_does_not_average_whole_models_refuses_a_guard_and_lies(algorithm: str, key: str) -> None:
    given = {"robust": "clip"} if key == "mixing.robust" else {"liars": LiarOptions(0.3, "noise")}
    with pytest.raises(ConfigError, match=f"{key} is for algorithms that average whole models with all neighbours"):
        make_toy_setting(algorithm, **given)
