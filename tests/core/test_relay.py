from __future__ import annotations

import networkx as nx
import pytest
import torch
from driver_checks import assert_same
from toy import make_toy_setting, make_toy_split, pairwise, quick

from dfca import algorithms
from dfca.core.algorithm import Algorithm
from dfca.core.exchange import Rules
from dfca.core.rules.relay import ENOUGH, MANY, MAX_AGE, NEVER, Offer, choose_offer, lot
from dfca.core.state import ClientState, Message
from dfca.sim.rounds.simulation import Simulation


def test_a_listener_takes_the_freshest_copy_that_is_fresher_than_its_own() -> None:
    offers = [Offer(4, 7, MANY), Offer(2, 9, 5), Offer(1, 9, MANY), Offer(3, 8, MANY)]
    assert choose_offer(offers, client=0, now=20, newest=7, trains=False) == offers[2]
    assert choose_offer(offers, client=0, now=20, newest=9, trains=False) is None
    assert choose_offer([], client=0, now=20, newest=NEVER, trains=False) is None


def test_a_trainer_takes_neither_old_copies_nor_its_own_echo() -> None:
    echo, old, good = Offer(1, 9, 0), Offer(2, 9 - MAX_AGE, MANY), Offer(3, 8, 5)
    assert choose_offer([echo, old, good], client=0, now=10, newest=NEVER, trains=True) == good
    assert choose_offer([echo, old], client=0, now=10, newest=NEVER, trains=True) is None
    assert choose_offer([good], client=0, now=10, newest=8, trains=True) is None


def test_of_equally_fresh_copies_a_trainer_beside_others_takes_another_every_round() -> None:
    by_round = [[Offer(sender, now - 1, MANY) for sender in range(8)] for now in range(1, 65)]
    taken = [choose_offer(offers, 8, now, now - 2, True, beside=2) for now, offers in enumerate(by_round, 1)]
    senders = [offer.sender for offer in taken if offer is not None]
    assert len(senders) == 64
    assert set(senders) == set(range(8))
    assert max(senders.count(sender) for sender in range(8)) <= 24


def test_lots_are_a_permutation_and_the_same_for_numbers_and_tensors() -> None:
    senders = torch.arange(5000)
    for now in (0, 1, 17, 100_000):
        lots = lot(now, senders)
        assert lots.unique().numel() == len(senders)
        assert lots.tolist() == [lot(now, sender) for sender in range(len(senders))]
        assert 0 <= int(lots.min()) <= int(lots.max()) < 2**32


def test_a_trainer_looks_for_copies_until_enough_neighbours_train_its_cluster() -> None:
    state, _ = Rules(1, 9).end_round(ClientState.of(torch.zeros(2, 1)), 0, torch.zeros(1))

    def most_beside(rules: Rules, cluster: int, settled: bool = True) -> int:
        return sum(rules.looks_for_copies(state, cluster, beside, settled) for beside in range(9))

    assert most_beside(Rules(1, 9), cluster=0) == ENOUGH
    assert most_beside(Rules(1, 9), cluster=1) == 1
    assert most_beside(Rules(1, 9), cluster=0, settled=False) == 1  # while surveys go on
    assert most_beside(Rules(1, 9, robust="clip"), cluster=0) == 1  # of a copy nobody knows who has made it


GRAPHS = {"path": nx.path_graph(9), "star": nx.star_graph(8), "ring": nx.cycle_graph(9)}
AXES = {
    "algorithm": ["dfca-gi", "dfca-li", "fedspd", "dfca-auto"],
    "share": ["relay", "trained", "all"],
    "graph": list(GRAPHS),
}


@pytest.mark.no_cover
@pytest.mark.parametrize("row", pairwise(AXES), ids=lambda row: "-".join(row.values()))
def test_rounds_equal_lockstep_whatever_is_shared(row: dict[str, str]) -> None:
    changes = {"split": make_toy_split(clients=9, clusters=3, samples=10), "clusters": 3, "rounds": 7}
    algorithm, graph = quick(row["algorithm"]), GRAPHS[row["graph"]]
    assert_same(make_toy_setting(algorithm, graph=graph, share=row["share"], **changes))


def test_relays_under_partial_participation_and_metropolis_weights() -> None:
    split = make_toy_split(clients=9, clusters=3, samples=10)
    changes = {"split": split, "graph": nx.path_graph(9), "clusters": 3, "share": "relay", "rounds": 8}
    assert_same(make_toy_setting("dfca-li", participation=0.7, **changes))
    assert_same(make_toy_setting("dfca-li", weights="metropolis", **changes))
    assert_same(make_toy_setting("dfca-li", aggregation="sequential", **changes))


def informed_gossip() -> Algorithm:
    """DFCA-LI whose clients know their true cluster: assignments do not depend on what is shared."""
    choose = algorithms.get("oracle").choose
    return Algorithm("informed", start="own", exchange="gossip", choose=choose, needs="nothing", informed=True)


def run_oracle_gossip(share: str) -> Simulation:
    """Clusters 0 1 1 1 1 0 on a path, assignments given: cluster 0's trainers are cut off from each other."""
    split = make_toy_split(clients=6, clusters=2)
    given = type(split)(split.train, split.test, torch.tensor([0, 1, 1, 1, 1, 0]), split.classes)
    simulation = Simulation(
        make_toy_setting(
            informed_gossip(), split=given, graph=nx.path_graph(6), share=share, rounds=10, evaluate_every=10
        )
    )
    for _ in range(10):
        simulation.step()
    return simulation


def test_a_model_passes_through_clients_that_do_not_train_it() -> None:
    plain, relay = run_oracle_gossip("trained"), run_oracle_gossip("relay")
    start = Simulation(plain.setting)
    # Clients 2 and 3 have no neighbour in cluster 0: without relay their copy of model 0 is the one they drew.
    assert torch.equal(plain.bank(2)[0], start.bank(2)[0])
    assert not torch.equal(relay.bank(2)[0], start.bank(2)[0])
    assert relay.exchange.stamps[0].min() > NEVER
    # The two ends of cluster 0 reach each other only by relay.
    assert relay.banks[0].var(dim=0).sum() < 0.95 * plain.banks[0].var(dim=0).sum()
    assert relay.traffic.messages_by_client.sum() > plain.traffic.messages_by_client.sum()
    assert relay.traffic.scalars > plain.traffic.scalars == 0


def test_relay_changes_nothing_where_everybody_has_enough_trainers_beside_it() -> None:
    changes = {"split": make_toy_split(clients=10), "graph": nx.complete_graph(10), "clusters": 2}
    banks = []
    for share in ("trained", "relay"):
        simulation = Simulation(make_toy_setting(informed_gossip(), share=share, **changes))
        for _ in range(4):
            simulation.step()
        banks.append(simulation.banks)
    assert torch.equal(banks[0], banks[1])


def test_trainers_with_few_others_beside_them_agree_sooner_by_relay() -> None:
    """Four of each cluster on a sparse ring lattice: two trainers beside each, the third one two steps away."""
    clients = 16
    split = make_toy_split(clients=clients, clusters=2)
    given = type(split)(split.train, split.test, torch.tensor([0, 0, 1, 1] * (clients // 4)), split.classes)
    graph, spread, sent = nx.circulant_graph(clients, [1, 2]), [], []
    for share in ("trained", "relay"):
        changes = {"split": given, "graph": graph, "clusters": 2, "share": share, "rounds": 6}
        simulation = Simulation(make_toy_setting(informed_gossip(), **changes))
        for _ in range(6):
            simulation.step()
        trainers = [i for i in range(clients) if given.clusters[i] == 0]
        spread.append(float(simulation.banks[0, trainers].var(dim=0).sum()))
        sent.append(int(simulation.traffic.messages_by_client.sum()))
    assert spread[1] < 0.8 * spread[0]
    assert sent[0] < sent[1] <= sent[0] + 6 * clients  # at most one copy more per client and round


@pytest.mark.parametrize("weights", ["uniform", "metropolis"])
def test_a_relayed_copy_weighs_as_much_as_a_neighbour_of_its_degree(weights: str) -> None:
    """Client 1 trains with one trainer beside it and one listener, whose copy it folds as a third model."""
    rules = Rules(id=1, degree=2, weights=weights, share="relay")
    state = ClientState.of(torch.zeros(2, 1, dtype=torch.float64))
    state, _ = rules.end_round(state, 0, torch.zeros(1, dtype=torch.float64))
    assert rules.looks_for_copies(state, 0, beside=1)
    one, six = (torch.full((1,), value, dtype=torch.float64) for value in (1.0, 6.0))
    state = rules.receive_(state, Message(0, 0, 0, 2, one))
    state = rules.receive_(state, Message(2, 0, 0, 2, six, Offer(2, 0, MANY)))
    torch.testing.assert_close(state.bank[0], torch.full((1,), 7 / 3, dtype=torch.float64))
    assert state.folded[0] == 0


def test_beside_a_trainer_the_freshest_copy_is_asked_for_and_of_equals_a_lot_decides() -> None:
    assert [lot(now, sender) for now, sender in ((0, 0), (1, 0), (0, 1))] == [
        number * 2654435761 % 2**32 for number in (1, 3, 2)
    ]
    old, new, other = Offer(3, 5, MANY), Offer(4, 7, MANY), Offer(5, 7, MANY)
    assert choose_offer([old, new], 1, 8, 0, trains=True, beside=1) == new
    for now in range(8, 11):
        chosen = choose_offer([new, other], 1, now, 0, trains=True, beside=1)
        assert chosen == max(new, other, key=lambda offer: lot(now, offer.sender))


def test_dfca_auto_notes_that_it_ignores_another_way_of_sharing() -> None:
    told = 'dfca-auto has its own rule for sharing, "relay"; mixing.share does not change it'
    for share in ("all", "relay", "trained"):
        assert (told in Simulation(make_toy_setting(quick("dfca-auto"), share=share)).notes) == (share == "all")
    assert told not in Simulation(make_toy_setting("dfca-gi", share="all")).notes


def test_a_poisoned_copy_is_not_relayed() -> None:
    split = make_toy_split(clients=6, clusters=2)
    split.train.of(0)[0].mul_(1e200)
    simulation = Simulation(
        make_toy_setting("dfca-li", split=split, graph=nx.path_graph(6), share="relay", rounds=12, evaluate_every=12)
    )
    for _ in range(12):
        simulation.step()
    assert all(torch.isfinite(simulation.bank(i)).all() for i in range(1, 6))
