"""Jobs say which samples they are for: the pool of the event simulator and the worker of a node compute the same."""

from __future__ import annotations

import pytest
import torch
from toy import make_toy_setting, make_toy_split

from dfca.core.learning.local import losses
from dfca.node.work.worker import Worker
from dfca.peer.records.work import Job, Losses, Score, Train, Trained, Warm, WarmUp
from dfca.sim.events.pool import ClientPool, Order
from dfca.testing import make_clients

SETTING = make_toy_setting("dfca-auto", split=make_toy_split(4, samples=[30, 4, 21, 30]), rounds=3)
MODELS = 3


def both(job: Job, client: int) -> tuple[object, object]:
    """Do a job of a client in both drivers, on the same models."""
    pool, worker = ClientPool(SETTING, dry=False), Worker(make_clients(SETTING)[client])
    bank = pool.allocate(client, MODELS)
    bank.copy_(torch.randn(bank.shape, dtype=bank.dtype, generator=torch.Generator().manual_seed(5)))
    mine = worker.run(job, bank.clone())
    (theirs,) = pool.execute([Order(client, job, bank)])
    if isinstance(theirs, Trained) and theirs.model is None:
        theirs = theirs._replace(model=bank[theirs.cluster])
    return mine, theirs


@pytest.mark.parametrize("client", [0, 1], ids=["holds some out", "too few samples"])
@pytest.mark.parametrize(
    "job",
    [
        Train(1),
        Train(1, held_out=True),
        Train(1, held_out=True, unseen=True),
        Train(1, held_out=True, unseen=True, closed=(0, 2)),
        WarmUp(None, held_out=True),
        WarmUp(2),
    ],
    ids=str,
)
def test_pool_and_worker_agree(job: Job, client: int) -> None:
    mine, theirs = both(job, client)
    if isinstance(mine, Trained):
        assert isinstance(theirs, Trained)
        assert (mine.cluster, mine.fine, mine.loss) == (theirs.cluster, theirs.fine, pytest.approx(theirs.loss))
        torch.testing.assert_close(mine.model, theirs.model)
    else:
        assert isinstance(mine, Warm)
        assert isinstance(theirs, Warm)
        torch.testing.assert_close(mine.model, theirs.model)
        torch.testing.assert_close(tuple(mine.losses), tuple(theirs.losses))
        assert sum(map(len, (mine.losses.bid[0], mine.losses.vote[0]))) <= 15


def test_a_score_leaves_out_what_is_held_out() -> None:
    models = torch.zeros(2, 43, dtype=torch.float64)
    sizes = {}
    for held_out in (False, True):
        mine, theirs = both(Score(models, None, held_out), 0)
        assert isinstance(mine, Losses)
        torch.testing.assert_close(tuple(mine), tuple(theirs))  # type: ignore[arg-type]
        sizes[held_out] = mine.bid.shape[1] + mine.vote.shape[1]
    assert sizes[True] < sizes[False]


def test_a_model_is_chosen_by_what_training_has_not_seen() -> None:
    client = make_clients(SETTING)[0]
    seen, unseen = client.divided()
    banks = (
        torch.randn(MODELS, 43, dtype=torch.float64, generator=torch.Generator().manual_seed(s)) for s in range(99)
    )
    best = lambda bank, pair: int(losses(client.model, bank, *pair).argmin())  # noqa: E731
    bank = next(bank for bank in banks if best(bank, seen) != best(bank, unseen))
    worker = Worker(client)
    assert worker.run(Train(0, held_out=True), bank).cluster == best(bank, seen)
    assert worker.run(Train(0, held_out=True, unseen=True), bank).cluster == best(bank, unseen)
    shut = (best(bank, unseen),)
    assert worker.run(Train(0, held_out=True, unseen=True, closed=shut), bank).cluster not in shut
