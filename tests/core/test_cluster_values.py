"""What becomes of values per cluster: by hand, and for one client and for all of them alike."""

from __future__ import annotations

from random import Random

import networkx as nx
import pytest
import torch
from toy import make_toy_setting, make_toy_split

from dfca.core.rules.clusters import COPIES, NEWEST, merge_values_
from dfca.core.rules.merging import Merge, Plan, order_of
from dfca.core.rules.relay import MANY, NEVER
from dfca.core.state import ClientState
from dfca.sim.rounds.exchange import Exchange
from dfca.sim.shards import Alone

SHARED = ("stamps", "origins", "folded")
"""What both remember; only clients count their own updates."""


def test_the_newest_round_is_kept_where_two_clusters_become_one() -> None:
    values, plan = [3, 5, 7, 1], Plan((Merge(0, 1, 0.5, 0.1),), (3,))
    merge_values_(values, plan, NEWEST)
    assert values == [5, NEVER, 7, NEVER]
    updates = [3, 5, 7, 1]
    merge_values_(updates, plan, COPIES["updates"])
    assert updates == [8, 0, 7, 0]
    rows = torch.tensor([[3, 9], [5, 2], [7, 7], [1, 1]])
    merge_values_(rows, plan, NEWEST)
    assert rows.tolist() == [[5, 9], [NEVER, NEVER], [7, 7], [NEVER, NEVER]]


@pytest.mark.parametrize("seed", range(5))
def test_clusters_change_alike_for_one_client_and_for_all(seed: int) -> None:
    random, clients = Random(seed), 3
    setting = make_toy_setting(split=make_toy_split(clients), graph=nx.path_graph(clients))
    exchange, states = Exchange(setting, 4, Alone(clients)), []
    for client in range(clients):
        known = {name: tuple(random.randrange(9) for _ in range(4)) for name in (*SHARED, "updates")}
        own = {j: torch.zeros(2) for j in range(4)}
        recent = {j: (float(j), 1.0) for j in range(4)}
        states.append(ClientState(torch.zeros(4, 2), (0,) * 4, own, client, client, distances=recent, **known))
        for name in SHARED:
            getattr(exchange, name)[:, client] = torch.tensor(known[name])
        exchange.distances[:, client, 0] = torch.arange(4.0)

    def assert_alike() -> None:
        for client, state in enumerate(states):
            for name in SHARED:
                assert getattr(exchange, name)[:, client].tolist() == list(getattr(state, name))
            assert {j for j, row in enumerate(exchange.distances[:, client]) if not row.isnan().all()} == set(
                state.distances
            )
            assert set(state.own) == set(state.distances)

    some, plan = [0, 2], Plan((Merge(0, 1, 0.5, 0.1),), (3,))
    states = [state.merged(plan) if client in some else state for client, state in enumerate(states)]
    exchange.merge_(plan, some)
    assert_alike()
    assert [state.assignment for state in states] == [0, 1, 2]
    orders = [order_of(4, state.closed) for state in states]
    states = [state.renumbered(order, 4) for state, order in zip(states, orders, strict=True)]
    exchange.renumber_([([client], order) for client, order in enumerate(orders)], 4)
    assert_alike()
    assert [state.assignment for state in states] == [0, 1, 1]
    assert [state.closed for state in states] == [(2, 3), (), (2, 3)]
    for slot in (2, 4):
        states = [state.with_model(slot, torch.zeros(5, 2)) for state in states]
        exchange.open_cluster_(slot)
        assert_alike()
    assert {state.origins[4] for state in states} == {MANY}
