from __future__ import annotations

import math

import networkx as nx
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from toy import make_toy_setting, make_toy_split

import dfca
from dfca.base.errors import ConfigError, DataError
from dfca.core.learning.local import LocalOptions
from dfca.core.rng import stream
from dfca.core.rules.election import (
    ElectionOptions,
    Verdict,
    Vote,
    add,
    bid,
    cast,
    count,
    decide,
    divide,
    follows,
    lot,
    verdict,
)
from dfca.peer.records.messages import Turn
from dfca.peer.waves.election import Standing, standing
from dfca.sim.rounds.simulation import Simulation
from dfca.sim.setting import Setting


def vote(centre: int, gain: float, d: list[float], left: float = 0.0) -> Vote:
    return Vote(centre, gain, left, len(d), (sum(d),), (sum(value * value for value in d),))


def test_parts_are_disjoint_and_whole() -> None:
    parts = divide(50, stream(0, "parts", 1))
    assert [len(part) for part in parts] == [25, 10, 15]
    assert sorted(torch.cat(list(parts)).tolist()) == list(range(50))
    assert [len(part) for part in divide(3, stream(0))] == [1, 1, 1]
    with pytest.raises(DataError, match="needs at least 3 samples per client, got 2; use dfca-gi or dfca-li"):
        divide(2, stream(0))


def test_a_bid_is_the_regret_minus_its_standard_error() -> None:
    centres = torch.tensor([[3.0, 5.0], [9.0, 9.0]])
    own = torch.tensor([1.0, 1.0])
    # Follows centre 0; regrets 2 and 4: mean 3, standard error sqrt(2) / sqrt(2) = 1.
    assert follows(centres) == 0
    assert bid(centres, own) == pytest.approx(2.0)
    assert bid(centres, torch.tensor([float("nan"), 1.0])) == -math.inf
    assert bid(centres[:, :1], own[:1]) == 2.0
    assert follows(torch.tensor([[float("nan")], [2.0]])) == 1


def test_a_vote_by_hand() -> None:
    centres = torch.tensor([[4.0, 4.0], [2.0, 2.0]])
    own, candidate = torch.tensor([1.0, 1.0]), torch.tensor([1.5, 1.5])
    cast_vote = cast(centres, own, candidate, torch.tensor([[5.0], [3.0]]), torch.tensor([1.0]))
    assert cast_vote == Vote(follows=1, gain=0.5, left=0.5, samples=1, totals=(4.0, 2.0), squares=(16.0, 4.0))


def test_a_new_distribution_is_accepted_and_an_odd_client_is_not() -> None:
    options = ElectionOptions()
    stay = [vote(0, -2.0, [-2.0, -1.0, -3.0]) for _ in range(3)]
    move = [vote(0, 2.0, [2.0, 1.0, 3.0]) for _ in range(3)]
    decision = verdict([*stay, *move], 3, options)
    assert decision.accepted
    assert decision.support == 3
    # z by hand: means 2 and -2; variance over 9 samples 6/8; z = 4 / sqrt(2 * 0.75 / 9).
    assert decision.z == pytest.approx(4 / math.sqrt(2 * 0.75 / 9))
    assert not verdict([*stay, move[0]], 3, options).accepted  # helps only itself
    assert verdict([*stay, move[0]], 3, ElectionOptions(support=1)).accepted
    assert not verdict([*stay, *move], 0, options).accepted  # a candidate that does not even help itself
    assert not verdict(move, 0, options).accepted  # a better model of the same kind: nobody stays behind


def test_clients_of_clusters_yet_to_be_found_are_not_asked() -> None:
    options = ElectionOptions()
    stay = [vote(0, -2.0, [-2.0, -1.0, -3.0]) for _ in range(3)]
    move = [vote(0, 2.0, [2.0, 1.0, 3.0]) for _ in range(2)]
    lost = [vote(0, 0.1, [-50.0, -60.0], left=5.0) for _ in range(4)]
    assert verdict([*stay, *move, *lost], 3, options) == verdict([*stay, *move], 3, options)


def test_the_error_rate_is_the_stated_one() -> None:
    """Candidates from a covered cluster: preferences are noise, d is independent of them."""
    generator = torch.Generator().manual_seed(0)
    options = ElectionOptions(level=0.05)
    accepted = 0
    for _ in range(1000):
        quality = float(torch.randn((), generator=generator))  # one model may be better than the other, for everybody
        votes = []
        for _client in range(12):
            d = quality + 2 * torch.randn(15, generator=generator)
            gain = float(torch.randn((), generator=generator))
            votes.append(vote(0, gain, d.tolist()))
        candidate = max(range(12), key=lambda i: votes[i].gain)
        accepted += verdict(votes, candidate, options).accepted
    assert 0.03 < accepted / 1000 < 0.07


def test_a_held_model_that_fits_nobody_is_compared_by_those_whom_nothing_fits() -> None:
    options = ElectionOptions()
    move = [vote(0, 2.0, [2.0, 1.0, 3.0]) for _ in range(3)]
    unfit = [vote(0, -2.0, [-2.0, -1.0, -3.0], left=9.0) for _ in range(3)]
    decision = verdict([*move, *unfit], 0, options, held=1)
    assert decision.accepted
    assert decision.z == pytest.approx(4 / math.sqrt(2 * 0.75 / 9))  # as if they stayed
    assert (
        verdict([*move, *(v._replace(gain=0.1) for v in unfit)], 0, options, held=1) == decision
    )  # it is the lesser evil
    assert not verdict([*move, *unfit], 0, options).accepted  # at a start there is a client that each centre fits
    assert not verdict([*move, unfit[0]], 0, options, held=1).accepted  # one that is odd says nothing
    assert not verdict([*move, *(v._replace(totals=(6.0,)) for v in unfit)], 0, options, held=1).accepted  # alike
    stay = vote(0, -2.0, [2.0, 1.0, 3.0])
    assert not verdict([*move, *unfit, stay], 0, options, held=1).accepted  # who stays counts, where somebody does


def test_a_better_model_of_the_same_kind_opens_nothing() -> None:
    def on_two(follows: int, gain: float, d: tuple[float, float], left: float = 0.0) -> Vote:
        return Vote(follows, gain, left, 2, (2 * d[0], 2 * d[1]), (2 * d[0] ** 2 + 0.1, 2 * d[1] ** 2 + 0.1))

    options = ElectionOptions()
    move = [on_two(1, 1.0, (5.0, 1.0)) for _ in range(3)]
    stay = [on_two(0, -5.0, (-5.0, -1.0)) for _ in range(3)]
    # All followers of centre 1 prefer the candidate: of their kind, whether centre 1 is new (held 1) or trained (2).
    assert not verdict([*move, *stay], 0, options, held=1).accepted
    assert not verdict([*move, *stay], 0, options, held=2).accepted
    lost = [v._replace(follows=0) for v in move]
    assert verdict([*lost, *stay], 0, options, held=2).accepted  # nobody follows centre 1


def test_the_error_rate_is_the_stated_one_where_no_model_fits() -> None:
    """One distribution, and a held model that is worse than all: who is fitted by the candidate is noise."""
    generator = torch.Generator().manual_seed(1)
    options = ElectionOptions(level=0.05)
    accepted = 0
    for _ in range(1000):
        votes = []
        for _client in range(12):
            d = 3 + 2 * torch.randn(15, generator=generator)
            noise = float(torch.randn((), generator=generator))
            votes.append(vote(0, 3.0 + noise, d.tolist(), left=1.5 + noise))
        assert any(vote.left > 1.5 for vote in votes)
        accepted += verdict(votes, min(range(12), key=lambda i: votes[i].left), options, held=1).accepted
    assert 0.03 < accepted / 1000 < 0.07


@given(st.data())
def test_any_tree_decides_as_the_closed_form(data: st.DataObject) -> None:
    numbers = st.floats(-1e3, 1e3) | st.sampled_from([math.nan, math.inf])
    centres = data.draw(st.integers(1, 3))
    sums = st.tuples(*[numbers] * centres)
    cast_votes = st.builds(Vote, st.integers(0, centres - 1), numbers, numbers, st.integers(1, 9), sums, sums)
    votes = data.draw(st.lists(cast_votes, min_size=1, max_size=8))
    gain = data.draw(st.floats(-1, 10))
    votes[0] = votes[0]._replace(gain=gain)
    subtrees = [count(vote, gain) for vote in votes]
    while len(subtrees) > 1:  # any two subtrees meet
        one, other = (subtrees.pop(data.draw(st.integers(0, len(subtrees) - 1))) for _ in range(2))
        subtrees.append(add(one, other))
    held, options = data.draw(st.integers(0, centres)), ElectionOptions()
    assert decide(subtrees[0], gain, options, held) == verdict(votes, 0, options, held)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"warmup_steps": 0}, "warmup_steps must be >= 1, got 0"),
        ({"warmup_momentum": 1.0}, "warmup_momentum must be in [0, 1), got 1.0"),
        ({"level": 0.7}, "level must be in (0, 0.5), got 0.7"),
        ({"support": 0}, "support must be >= 1, got 0"),
        ({"patience": 0}, "patience must be >= 1, got 0"),
        ({"most": 0}, "most must be >= 1, got 0"),
    ],
)
def test_bad_options_are_refused(options: dict, sentence: str) -> None:
    with pytest.raises(ConfigError) as error:
        ElectionOptions(**options)
    assert str(error.value) == sentence


def test_a_warm_up_with_momentum_begins_it_anew_as_often_as_training_does() -> None:
    local = LocalOptions(steps=5, learning_rate=0.2, batch_size=8, momentum=0.5)
    (plain,) = ElectionOptions(warmup_steps=12).warmup(local)
    assert (plain.steps, plain.momentum, plain.batch_size, plain.learning_rate) == (12, 0.0, None, 0.2)
    stages = ElectionOptions(warmup_steps=12, warmup_momentum=0.9).warmup(local)
    assert [(stage.steps, stage.momentum, stage.batch_size) for stage in stages] == [
        (5, 0.9, None),
        (5, 0.9, None),
        (2, 0.9, None),
    ]


def digits_setting(clients: int = 16, clusters: int | None = None, true: int = 4, seed: int = 0, **changes) -> Setting:
    split = dfca.make_split(dfca.DataOptions(samples_per_client=60), clients, true, seed)
    fields = {
        "split": split,
        "graph": nx.connected_watts_strogatz_graph(clients, 4, 0.3, seed=seed),
        "make_model": lambda: dfca.mlp((1, 8, 8), 10, 16),
        "algorithm": dfca.ALGORITHMS["dfca-fi"](),
        "clusters": clusters,
        "rounds": 3,
        "seed": seed,
        "local": LocalOptions(learning_rate=0.5),
        "evaluate_every": 3,
        "dtype": torch.float64,
    }
    return Setting(**{**fields, **changes})


@pytest.mark.parametrize("true", [1, 2, 4])
def test_the_clients_find_the_number_of_clusters(true: int) -> None:
    simulation = Simulation(digits_setting(true=true, dtype=torch.float32))
    assert simulation.models == true
    assert f"dfca-fi opened {true} cluster{'s' if true > 1 else ''}" in simulation.notes
    for _ in range(3):
        row = simulation.step()
    assert row["cluster_accuracy"] == 1.0


def test_patience_begins_anew_after_an_acceptance(monkeypatch: pytest.MonkeyPatch) -> None:
    """With patience 2, two refusals end an election only where they follow each other."""
    clients, script, calls = 8, [False, True, False, True, False, False], []

    def scripted(*_: object) -> Verdict:
        calls.append(script[len(calls)])
        return Verdict(calls[-1], 2, 9.0)

    algorithm = dfca.ALGORITHMS["dfca-fi"](warmup_steps=1, patience=2)
    setting = make_toy_setting(
        algorithm, clusters=None, split=make_toy_split(clients=clients), graph=nx.complete_graph(clients)
    )
    monkeypatch.setattr("dfca.sim.rounds.election.verdict", scripted)
    (result,) = Simulation(setting).elections
    assert [turn.accepted for turn in result.turns] == [True, *script]
    assert calls == script


def test_the_log_of_a_peer_counts_patience_alike() -> None:
    options = ElectionOptions(patience=2)

    def read(*accepted: bool, clusters: int | None = None) -> Standing:
        return standing([Turn(i, outcome) for i, outcome in enumerate(accepted)], clusters, None, options)

    assert read(True, False, True, False) == (frozenset(range(4)), 1, False, False)
    assert read(True, False, True, False, False).over
    assert read(True, False, False, clusters=3) == (frozenset({0}), 2, True, False)  # the refused may stand again
    assert read(True, False, False, True, clusters=3).forced  # and patience does not begin anew
    assert read(True, False, True, True, clusters=3).over


def test_a_number_that_is_asked_for_is_filled_by_bids_once_patience_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dfca.sim.rounds.election.verdict", lambda *_: Verdict(False, 1, 0.0))
    algorithm = dfca.ALGORITHMS["dfca-fi"](warmup_steps=1, patience=2)
    (result,) = Simulation(make_toy_setting(algorithm, clusters=3)).elections
    assert [turn.accepted for turn in result.turns] == [True, False, False, True, True]
    assert len(result.centres) == 3
    assert len({turn.candidate for turn in result.turns if turn.accepted}) == 3


def test_a_client_whose_warm_up_diverges_stands_with_the_common_start() -> None:
    setting = digits_setting()
    winner = Simulation(setting).elections[0].turns[0].candidate
    setting.split.train.of(winner)[0].mul_(1e30)
    simulation = Simulation(setting)
    assert simulation.elections[0].turns[0].candidate == winner
    assert torch.isfinite(simulation.banks).all()


def test_the_first_centre_is_drawn_by_lot() -> None:
    setting = digits_setting()
    winner = min(range(16), key=lambda client: lot(0, client))
    assert Simulation(setting).elections[0].turns[0].candidate == winner


def test_an_election_costs_less_than_five_rounds() -> None:
    simulation = Simulation(digits_setting())
    five_rounds = 5 * 2 * simulation.setting.graph.number_of_edges()
    assert 0 < simulation.traffic.start_messages < five_rounds
    turns = len(simulation.elections[0].turns)
    assert simulation.traffic.start_messages == turns * 15


def test_every_component_elects_its_own() -> None:
    graph = nx.disjoint_union(nx.complete_graph(8), nx.complete_graph(7))
    graph.add_node(15)
    simulation = Simulation(digits_setting(graph=graph))
    assert len(simulation.elections) == 3
    assert len(simulation.elections[2].centres) == 1
    lonely = simulation.bank(15)
    assert torch.equal(lonely[0], lonely[-1])
    assert not torch.equal(simulation.bank(0)[0], simulation.bank(8)[0])


def test_a_number_that_nobody_knows_must_be_given_to_those_that_cannot_find_it() -> None:
    split = make_toy_split()
    blind = type(split)(split.train, split.test, None, split.classes)
    with pytest.raises(ConfigError, match="dfca-gi cannot find the number of clusters, and the data does not say it"):
        make_toy_setting("dfca-gi", split=blind, clusters=None)
    asked = Simulation(make_toy_setting("dfca-gi", clusters=None))
    assert asked.models == 2
    assert "dfca-gi cannot find the number of clusters; it uses the true one: 2" in asked.notes
