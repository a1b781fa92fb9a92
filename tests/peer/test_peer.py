"""One peer alone, driven by scripts of inputs, does what they say (peer_scripts/*.txt; format: peer_script.py)."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from peer_script import Script

from dfca.core.exchange import Rules
from dfca.core.method import Method
from dfca.core.rules.relay import Offer
from dfca.core.state import Message
from dfca.peer.joiner import Pursuit
from dfca.peer.peer import Peer
from dfca.peer.records.lineage import LONGEST, Entry, Lineage, extended
from dfca.peer.records.messages import BankCopy, BankRequest, Count, Hello, Key, Probe, Update
from dfca.peer.records.options import PeerOptions
from dfca.peer.records.work import Losses, Score, Train, Trained, Warm, WarmUp
from dfca.peer.state import VERSION, Saved

SCRIPTS = sorted((Path(__file__).parents[1] / "peer_scripts").glob("*.txt"))


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_a_peer_does_what_its_script_says(path: Path) -> None:
    text = path.read_text()
    done = "\n".join(Script().run(part).rstrip("\n") + "\n" for part in text.split("\n\n"))
    if "DFCA_REWRITE" in os.environ:
        path.write_text(done)
    assert done == text


@pytest.mark.parametrize("aggregation", ["batch", "sequential"])
def test_a_model_leaves_with_the_lineage_that_it_was_trained_in(aggregation: str) -> None:
    # While the peer trains cluster 0, its neighbour sends the cluster 0 that a by-election has opened anew.
    first, second = Entry(5, 0, 1, 0, 7, (0, 1)), Entry(4, 0, 1, 0, 8, (0,))
    options = PeerOptions(
        Rules(0, 1),
        (1,),
        2,
        "elected",
        9,
        0,
        None,
        torch.float64,
        Method(aggregation=aggregation, revives=True),  # type: ignore[arg-type]
    )
    memory = torch.zeros(4, 2, dtype=torch.float64)
    bank = torch.tensor([[1.0, 1.0], [2.0, 2.0]], dtype=torch.float64)
    stamps = (0, 0)
    saved = Saved(VERSION, 0, 0, 3, (first,), bank, 0, stamps, stamps, stamps, stamps)
    peer = Peer(options, lambda models: memory[:models], 1, saved)
    peer.begin(0.0)
    peer.connected(1, 0.0)
    peer.receive(1, Hello(0, 3, 2, (first,)), 0.0)
    peer.wake(0.0)
    job = peer.job
    assert isinstance(job, Train)
    peer.receive(1, Hello(0, 4, 2, (first, second)), 1.0)
    assert (1, BankRequest((0,))) in peer.ready().messages
    opened = torch.tensor([9.0, 9.0], dtype=torch.float64)
    peer.receive(1, BankCopy(Message(1, 0, 4, 1, opened, Offer(1, 3, 1)), 4, 2, (first, second)), 2.0)
    assert peer.lineage == (first,)  # the bank does not change while it trains
    peer.finished(job, Trained(0, True, torch.tensor([3.0, 3.0], dtype=torch.float64), 1.0), 3.0)
    (update,) = [message for _, message in peer.ready().messages if isinstance(message, Update)]
    assert update.lineage == (first,)
    assert peer.lineage == (first, second)
    assert memory[0].tolist() == [9.0, 9.0]
    for _ in range(4):
        peer.wake(3.0)
    assert isinstance(peer.job, Train) or aggregation == "batch"


def test_a_peer_never_goes_down_to_a_lower_lineage() -> None:
    # All models of a higher lineage are here, but its own has become higher before it took them.
    low, mine = (Entry(2, 0, 1, 0, 7, (0,)),), (Entry(3, 0, 1, 0, 8, (0,)),)
    options = PeerOptions(Rules(0, 1), (1,), 1, "elected", 9, 0, None, torch.float64)
    bank = torch.ones(1, 1, dtype=torch.float64)
    peer = Peer(
        options, lambda models: torch.zeros(models, 1, dtype=torch.float64), 1, Saved(VERSION, 0, 0, 3, mine, bank)
    )
    copy = BankCopy(Message(1, 0, 4, 1, 5 * bank[0], Offer(1, 3, 1)), 4, 1, low)
    peer.joiner.pursuit = Pursuit(1, low, 0.0, 9.0, taken={0: copy}, clusters=1, round=4)
    assert peer.joiner.pursuit.complete
    peer.carry_out(peer.joiner.adopt(peer))
    assert peer.joiner.pursuit is None
    assert peer.lineage == mine
    assert peer.bank is not None
    assert peer.bank.item() == 1.0


def test_what_a_neighbour_said_before_a_fold_is_compared_after_it() -> None:
    # Peer 1 said a lower history. Then peer 2 says a folded one: with all votes counted, that of peer 1 is the highest.
    start = Entry(9, 0, 7, 0, 1, (0,))

    def history(first: int, later: int, count: int) -> Lineage:
        lineage: Lineage = (start,)
        for number in range(count):
            lineage = extended(lineage, Entry(later if number else first, number, 7, 0, number, (0,)))
        return lineage

    mine, told, folded = history(3, 1, LONGEST - 2), history(2, 5, LONGEST - 2), history(1, 1, LONGEST - 1)
    options = PeerOptions(Rules(0, 2), (1, 2), 1, "elected", 9, 0, None, torch.float64)
    bank = torch.ones(1, 1, dtype=torch.float64)
    peer = Peer(options, lambda models: torch.zeros(models, 1), 1, Saved(VERSION, 0, 0, 3, mine, bank))
    peer.begin(0.0)
    for neighbour, lineage in ((1, told), (2, folded)):
        assert not [message for _, message in peer.ready().messages if isinstance(message, BankRequest)]
        peer.connected(neighbour, 0.0)
        peer.receive(neighbour, Hello(0, 9, 1, lineage), 0.0)
        peer.wake(0.0)
    assert (1, BankRequest()) in peer.ready().messages


def test_a_peer_returns_with_its_vote_and_need_not_warm_up_again() -> None:
    options = PeerOptions(Rules(0, 1), (1, 2), 2, "elected", 9, 0, 2, torch.float64, Method(revives=True))
    memory = torch.zeros(2, 2, dtype=torch.float64)
    losses = Losses(torch.ones(1, 2), torch.ones(1, 2))
    before = Peer(options, lambda models: memory[:models])
    before.begin(0.0)
    before.finished(before.job, Warm(torch.tensor([3.0, 4.0], dtype=torch.float64), losses), 1.0)  # type: ignore[arg-type]
    assert before.ready().save
    peer = Peer(options, lambda models: memory[:models], 1, before.save())
    peer.begin(2.0, late=False)
    peer.connected(1, 2.0)
    peer.receive(1, Hello(0, 0, 0), 2.0)
    assert not peer.ready().work  # another neighbour may come
    key = Key(7, 0, 0, 1, 0)
    peer.receive(1, Probe(key, ()), 3.0)
    (job,) = peer.ready().work
    assert isinstance(job, Score)
    assert job.models.tolist() == [[3.0, 4.0]]
    peer.finished(job, losses, 3.0)
    assert (1, Count(key, 1, 1)) in peer.ready().messages


@pytest.mark.parametrize("own", [[3.0], [3.0, float("nan")]])
def test_a_warmed_up_model_that_does_not_fit_is_refused(own: list[float]) -> None:
    options = PeerOptions(Rules(0, 0), (), 2, "elected", 9, 0, 2, torch.float64)
    saved = Saved(VERSION, 0, 0, 0, (), None, own=torch.tensor(own, dtype=torch.float64))
    peer = Peer(options, lambda models: torch.zeros(models, 2), 1, saved)
    peer.begin(0.0)
    assert peer.refused["a save of another model"] == 1
    assert isinstance(peer.job, WarmUp)
