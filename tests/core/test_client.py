"""One client: what it does in place is what it does to values."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from toy import make_toy_setting

from dfca import algorithms
from dfca.core.client import Client
from dfca.core.exchange import is_quiet, quiet_from
from dfca.core.rules.mixing import WeightRule, fold, fold_, fold_weighted_
from dfca.core.rules.relay import Offer
from dfca.core.state import ClientState, Message, usable
from dfca.testing import make_clients


def make_client(weights: WeightRule = "uniform") -> tuple[Client, ClientState]:
    client = make_clients(make_toy_setting(weights=weights))[0]
    return client, client.start()


@pytest.mark.parametrize("weight", [1.0, 0.3])
@pytest.mark.parametrize("rule", ["uniform", "metropolis"])
def test_receiving_in_place_is_receiving(rule: WeightRule, weight: float) -> None:
    client, state = make_client(rule)
    generator = torch.Generator().manual_seed(0)
    before = state.bank.clone()
    pure, own = state, replace(state, bank=state.bank.clone())
    bank = own.bank
    for t in range(4):
        model = torch.randn(43, dtype=torch.float64, generator=generator)
        offer = Offer(1, t, 5) if t == 3 else None
        message = Message(1, t % 2, t, 2, model, offer)
        pure, own = client.rules.receive(pure, message, weight), client.rules.receive_(own, message, weight)
        torch.testing.assert_close(own.bank, pure.bank, rtol=0, atol=0)
        rest = {"bank": torch.zeros(()), "own": {}}  # Python 3.13 compares a tensor with itself by ==
        assert replace(own, **rest) == replace(pure, **rest)
    assert own.bank is bank
    assert torch.equal(state.bank, before)


def test_folds_in_place_are_the_formulas() -> None:
    average, incoming, own = (torch.tensor(v, dtype=torch.float64) for v in ([2.0, 4.0], [6.0, 0.0], [1.0, 1.0]))
    for count in (-1, 0, 3):
        expected, r = fold(average, count, incoming)
        folded = average.clone()
        assert fold_(folded, count, incoming) == r
        torch.testing.assert_close(folded, expected)
    folded = average.clone()
    fold_(folded, 0, incoming, weight=0.25)
    assert folded.tolist() == [2 + 0.25 * (6 - 2) / 2, 4 + 0.25 * (0 - 4) / 2]
    folded = average.clone()
    fold_weighted_(folded, own, incoming, 0.2)
    torch.testing.assert_close(folded, average + 0.2 * (incoming - own))


def test_the_end_of_a_round_leaves_the_bank_to_its_driver() -> None:
    client, state = make_client()
    before, trained = state.bank.clone(), torch.ones(43, dtype=torch.float64)
    after, (message,) = client.rules.end_round(state, 1, trained)
    assert torch.equal(after.bank, before)
    assert message.model is trained
    assert (after.trained, after.updates, message.updates) == (1, (0, 1), 1)
    after, messages = client.rules.end_round(state, 1, None)
    assert (after.trained, after.updates, messages) == (None, (0, 0), [])


def test_what_is_usable() -> None:
    _, state = make_client()
    model = torch.ones(43, dtype=torch.float64)
    good = Message(1, 0, 0, 2, model)
    assert usable(good, state.bank)
    assert usable(replace(good, degree=0), state.bank)
    for change in (
        {"degree": -1},
        {"cluster": -1},
        {"cluster": 2},
        {"model": model[:-1]},
        {"model": model.float()},
        {"model": model * float("nan")},
    ):
        assert not usable(replace(good, **change), state.bank), change


def test_an_older_update_does_not_make_a_copy_older() -> None:
    client, state = make_client()
    model = torch.ones(43, dtype=torch.float64)
    state = client.rules.receive(state, Message(1, 0, 7, 2, model))
    state = client.rules.receive(state, Message(2, 0, 4, 2, model))
    assert (state.stamps[0], state.origins[0]) == (7, -2)


def test_a_cluster_that_is_left_out_when_clusters_are_numbered_anew_was_not_trained() -> None:
    state = replace(ClientState.of(torch.zeros(3, 2)), assignment=2, trained=1, closed=(1,))
    later = state.renumbered([0, 2, 1], 2)
    assert (later.assignment, later.trained, later.closed) == (1, None, ())
    assert later.renumbered([1, 0], 2).assignment == 0


def test_the_last_rounds_of_methods_that_gossip_may_be_quiet() -> None:
    gossip, alone = algorithms.get("dfca-gi"), algorithms.get("local")
    assert quiet_from(gossip, 10, 2) == 8
    assert [is_quiet(round, 8) for round in (7, 8, 9)] == [False, True, True]
    assert quiet_from(gossip, 10, 0) is None
    assert quiet_from(alone, 10, 2) is None
    assert not is_quiet(99, None)
