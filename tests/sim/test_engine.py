"""Every way to execute local work computes what `learning.local` defines, on known and unknown layers alike."""

from __future__ import annotations

import threading
from contextlib import suppress

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from toy import pairwise

from dfca.base.device import one_thread
from dfca.base.errors import ConfigError
from dfca.core.algorithm import Choice
from dfca.core.learning import dense
from dfca.core.learning.local import LocalOptions, draw_batches, local_steps, losses, lowest, spans
from dfca.core.learning.params import FlatModel, initial
from dfca.core.rng import stream
from dfca.data import clients
from dfca.data.clients import ClientData
from dfca.models import cnn, cnn1d, mlp
from dfca.sim.local import engine as engines
from dfca.sim.local.engine import Engine, LocalTask, make_engine

CLIENTS, SAMPLES, MODELS = 5, 12, 3


class Residual(nn.Module):
    """Layers that stack, in an order of their own: no sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(6, 6), nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(x + torch.tanh(self.inner(x)))


class Normed(nn.Module):
    """Batch norm in a module that is no sequence: run by `functional_call`."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm, self.outer = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(x + self.norm(self.inner(x)))


KINDS = {
    "mlp": (lambda: mlp((6,), 4, 8), (6,)),
    "deep mlp": (lambda: nn.Sequential(*mlp((6,), 5, 8), nn.ReLU(), nn.Linear(5, 4)), (6,)),
    "linear": (lambda: nn.Linear(6, 4), (6,)),
    "tanh": (lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 4)), (6,)),
    "own forward": (Residual, (6,)),
    "own forward with norm": (Normed, (6,)),
    "cnn": (lambda: cnn((2, 10, 10), 4, 8, (3, 5)), (2, 10, 10)),
    "cnn1d": (lambda: cnn1d((2, 16), 4, 8, (3, 5)), (2, 16)),
}
OPTIONS = {
    "full batch": LocalOptions(steps=3, learning_rate=0.2),
    "momentum and decay": LocalOptions(steps=3, learning_rate=0.2, momentum=0.9, weight_decay=0.01),
    "mini-batches": LocalOptions(steps=3, learning_rate=0.2, batch_size=5),
    "no step": LocalOptions(steps=0),
}


def world(kind: str, samples: int = SAMPLES) -> tuple[FlatModel, torch.Tensor, ClientData]:
    """Make a model, banks (m, N, P) and samples, in double precision."""
    make, shape = KINDS[kind]
    flat = FlatModel(make().double())
    generator = stream(0, "samples", kind)
    x = torch.randn(CLIENTS * samples, *shape, generator=generator, dtype=torch.float64)
    y = torch.randint(0, 4, (CLIENTS * samples,), generator=generator)
    data = ClientData(x, y, tuple(range(0, CLIENTS * samples + 1, samples)))
    starts = [initial(flat, lambda: make().double(), 0, "start", kind, j) for j in range(MODELS * CLIENTS)]
    return flat, torch.stack(starts).view(MODELS, CLIENTS, -1), data


def by_torch(
    flat: FlatModel,
    vector: torch.Tensor,
    x: torch.Tensor,
    y: torch.Tensor,
    options: LocalOptions,
    batches: torch.Tensor | None,
) -> torch.Tensor:
    """Take the steps with the module itself and `torch.optim.SGD`."""
    module = flat.to_module(vector).train()
    rule = {"momentum": options.momentum, "weight_decay": options.weight_decay}
    sgd = torch.optim.SGD(module.parameters(), options.learning_rate, **rule)
    for step in range(options.steps):
        some = slice(None) if batches is None else batches[step]
        sgd.zero_grad()
        cross_entropy(module(x[some]), y[some]).backward()
        sgd.step()
    return flat.flatten(module)


@pytest.mark.parametrize(
    ("samples", "steps", "momentum"),
    [(4, 1, 0.0), (4, 2, 0.9), (4, 7, 0.0), (5, 1, 0.9), (5, 2, 0.0), (5, 7, 0.9), (12, 2, 0.9), (12, 7, 0.0)],
)
def test_mini_batches_in_the_span_are_the_same_steps(
    samples: int, steps: int, momentum: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dense, "WEIGHT_TRAFFIC", 10**6)  # it pays at any size
    flat, bank, data = world("deep mlp", samples)
    options = LocalOptions(steps, 0.2, batch_size=3, momentum=momentum)  # of 4 and 5 samples: they straddle two passes
    assert spans(flat, samples, options)
    for client in range(CLIENTS):
        batches = draw_batches(samples, options, stream(1, client))
        stepped = local_steps(flat, bank[0, client], *data.of(client), options, batches)
        expected = by_torch(flat, bank[0, client], *data.of(client), options, batches)
        torch.testing.assert_close(stepped, expected, rtol=1e-11, atol=1e-11)


def pick_lowest(position: int, means: torch.Tensor, samples: torch.Tensor | None) -> Choice:
    return Choice(lowest(means))


ENGINES = {
    "mlp": ("loop", "stacked", "threads"),
    "deep mlp": ("loop", "stacked", "threads"),
    "linear": ("loop", "stacked", "threads"),
    "tanh": ("loop", "stacked", "threads"),
    "own forward": ("loop", "stacked"),
    "own forward with norm": ("loop",),
    "cnn": ("loop", "threads"),
    "cnn1d": ("loop", "threads"),
}
HOWS = [(kind, how) for kind, hows in ENGINES.items() for how in hows]
# Every engine of every kind with momentum and decay; the other options once per kind, by its engines in turn.
CASES = [(kind, how, "momentum and decay") for kind, how in HOWS] + [
    (kind, hows[number % len(hows)], option)
    for kind, hows in ENGINES.items()
    for number, option in enumerate(option for option in OPTIONS if option != "momentum and decay")
]


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_runs_where_it_should(kind: str) -> None:
    flat, _, data = world(kind)
    possible = ["loop"]
    for how in ("stacked", "threads"):
        with suppress(ConfigError):
            make_engine(how, flat, LocalOptions(), 0, data, "cpu")
            possible.append(how)
    assert tuple(possible) == ENGINES[kind]


@pytest.mark.parametrize(("kind", "how", "option"), CASES)
def test_work_is_choosing_the_lowest_loss_and_training_it(kind: str, how: str, option: str) -> None:
    flat, bank, data = world(kind)
    options, before = OPTIONS[option], bank.clone()
    engine = Engine(flat, options, seed=7, how=how)
    places = [0, 1, 3]  # not all, not one after the other

    done = []
    for part in engine.work(LocalTask(bank, data, pick_lowest, 2), places):
        assert torch.equal(bank[:, 2], before[:, 2])
        done.append(part)
        for position, choice, vector in zip(part.positions, part.choices, part.vectors, strict=True):
            bank[choice.cluster, places[position]] = vector  # as the simulator does while others still train
    bank = before
    assert [position for part in done for position in part.positions] == [0, 1, 2]
    trained_here = torch.cat([part.vectors for part in done])
    means = torch.cat([part.losses for part in done])
    chosen = [choice.cluster for part in done for choice in part.choices]
    for position, place in enumerate(places):
        x, y = data.of(place)
        expected = losses(flat, bank[:, place], x, y)
        torch.testing.assert_close(means[position], expected, rtol=1e-12, atol=1e-12)
        assert chosen[position] == lowest(expected)
        batches = draw_batches(SAMPLES, options, stream(7, "batches", place, 2))
        start = bank[chosen[position], place]
        trained = by_torch(flat, start, x, y, options, batches)
        torch.testing.assert_close(trained_here[position], trained, rtol=1e-10, atol=1e-11)
        alone = local_steps(flat, start, x, y, options, batches)
        torch.testing.assert_close(alone, trained, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize(("kind", "how"), HOWS)
def test_losses_known_before_change_nothing(kind: str, how: str) -> None:
    flat, bank, data = world(kind)
    engine = Engine(flat, LocalOptions(steps=2), seed=7, how=how)
    known = engine.losses(bank, data)

    looked = torch.cat([part.vectors for part in engine.work(LocalTask(bank, data, pick_lowest, 0), range(CLIENTS))])
    given = torch.cat(
        [part.vectors for part in engine.work(LocalTask(bank, data, pick_lowest, 0, known=known), range(CLIENTS))]
    )
    torch.testing.assert_close(looked, given, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("kind", "how"), HOWS)
def test_a_choice_of_points_trains_on_them_alone(kind: str, how: str) -> None:
    flat, bank, data = world(kind)
    options = LocalOptions(steps=2, learning_rate=0.2)
    engine = Engine(flat, options, seed=7, how=how)

    def choose(position: int, means: torch.Tensor, samples: torch.Tensor | None) -> Choice:
        assert samples is not None
        return Choice(1, samples[1] <= samples[1].median())

    for part in engine.work(LocalTask(bank, data, choose, 0, "samples"), range(CLIENTS)):
        for position, choice, vector in zip(part.positions, part.choices, part.vectors, strict=True):
            x, y = data.of(position)
            expected = local_steps(flat, bank[1, position], x[choice.points], y[choice.points], options)
            torch.testing.assert_close(vector, expected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("how", ["loop", "stacked", "threads"])
def test_one_bank_of_a_server_serves_all_clients(how: str) -> None:
    flat, bank, data = world("mlp")
    engine = Engine(flat, LocalOptions(steps=2), seed=7, how=how)
    server = bank[:, :1]

    for part in engine.work(LocalTask(server, data, pick_lowest, 0), range(CLIENTS)):
        for position, choice, vector in zip(part.positions, part.choices, part.vectors, strict=True):
            expected = local_steps(flat, server[choice.cluster, 0], *data.of(position), LocalOptions(steps=2))
            torch.testing.assert_close(vector, expected, rtol=1e-11, atol=1e-11)


def test_a_job_that_fails_in_a_thread_fails_the_call() -> None:
    flat, bank, data = world("cnn")
    engine = Engine(flat, LocalOptions(), seed=7, how="threads")

    def choose(position: int, means: torch.Tensor, samples: torch.Tensor | None) -> Choice:
        raise ValueError(f"no choice for {position}")

    with pytest.raises(ValueError, match="no choice for 0"):
        list(engine.work(LocalTask(bank, data, choose, 0), range(CLIENTS)))


def test_the_number_of_threads_is_restored() -> None:
    before = torch.get_num_threads()
    with one_thread():
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == before


def test_threads_refuse_what_they_cannot_run() -> None:
    make = lambda: nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 4)).double()  # noqa: E731
    _, _, data = world("mlp")
    with pytest.raises(ConfigError, match='engine "threads" cannot run this: its training may draw random numbers'):
        make_engine("threads", FlatModel(make()), LocalOptions(), 0, data, "cpu")
    with pytest.raises(ConfigError, match='threads are for device "cpu", not "cuda"'):
        make_engine("threads", FlatModel(nn.Linear(6, 4).double()), LocalOptions(), 0, data, "cuda")


IN_BANK = {
    "batch_size": [None, 1, 2, 3],
    "kind": ["mlp", "deep mlp", "linear"],
    "momentum": [0.0, 0.9],
    "room": [0, 2**20],
    "models": [1, MODELS],
}


@pytest.mark.parametrize("row", pairwise(IN_BANK), ids=lambda row: "-".join(str(value) for value in row.values()))
def test_steps_in_the_bank_are_the_same_steps(row: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    batch_size, kind, momentum, room, models = row.values()
    monkeypatch.setattr(clients, "PRODUCTS_BYTES", room)
    flat, bank, data = world(kind, samples=3)
    bank = bank[:models].contiguous()
    options = LocalOptions(steps=4, learning_rate=0.2, momentum=momentum, batch_size=batch_size)
    engine, places = Engine(flat, options, seed=7, how="stacked"), [0, 1, 3]
    assert spans(flat, 3, options)
    assert (data.products is None) == (room == 0)
    expected = bank.clone()
    for place in places:
        x, y = data.of(place)
        chosen = lowest(losses(flat, bank[:, place], x, y))
        batches = draw_batches(3, options, stream(7, "batches", place, 0))
        expected[chosen, place] = by_torch(flat, bank[chosen, place], x, y, options, batches)
    needs = "nothing" if models == 1 else "losses"
    for part in engine.work(LocalTask(bank, data, pick_lowest, 0, needs, in_place=True), places):
        assert part.vectors is None
        assert all(part.fine)
    torch.testing.assert_close(bank, expected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("in_place", [False, True])
def test_small_calls_go_on_together_and_give_the_same(in_place: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    flat, bank, data = world("mlp", samples=3)
    options, models = LocalOptions(steps=3, learning_rate=0.2), []
    for workers in (1, 2):
        threads = set()

        def choose(position: int, means: torch.Tensor, samples: None, threads: set[int] = threads) -> Choice:
            threads.add(threading.get_ident())
            return pick_lowest(position, means, samples)

        monkeypatch.setattr(engines, "CHUNK_BYTES", 1)
        engine, mine = Engine(flat, options, seed=7, how="stacked"), bank.clone()
        engine.workers = workers
        done = list(engine.work(LocalTask(mine, data, choose, 0, in_place=in_place), range(CLIENTS)))
        assert (threading.get_ident() in threads) == (workers == 1)
        assert [position for part in done for position in part.positions] == list(range(CLIENTS))
        models.append(mine if in_place else torch.cat([part.vectors for part in done]))
    torch.testing.assert_close(models[1], models[0], rtol=1e-12, atol=1e-12)
    assert not in_place or not torch.equal(models[1], bank)


@pytest.mark.parametrize("huge", [float("nan"), float("inf"), 1e200])
def test_steps_in_the_bank_that_are_not_finite_change_nothing(huge: float) -> None:
    flat, bank, data = world("mlp", samples=3)
    data.x.view(CLIENTS, -1)[1] = huge
    before = bank.clone()
    engine = Engine(flat, LocalOptions(steps=3, learning_rate=0.2), seed=7, how="stacked")
    done = list(engine.work(LocalTask(bank, data, pick_lowest, 0, in_place=True), range(CLIENTS)))
    fine = [usable for part in done for usable in part.fine]
    assert not fine[1]
    assert torch.equal(bank[:, 1], before[:, 1])
    assert fine == [True, False, True, True, True]
    assert not torch.equal(bank, before)
    assert torch.isfinite(bank).all()


@pytest.mark.parametrize(("rate", "scale", "fine"), [(1e33, 1.0, True), (1e37, 1000.0, False)])
def test_steps_in_the_bank_that_are_long_are_judged_by_their_end(rate: float, scale: float, fine: bool) -> None:
    """The bound that spares looking at every weight does not decide: who overflows does, as in a loop."""
    flat, bank, data = world("mlp", samples=3)
    flat = FlatModel(mlp((6,), 4, 8))
    flat.pieces(bank)[0].mul_(1e-6)  # small activations: of all steps, those of the first layer are the longest
    data, models = ClientData(scale * data.x.float(), data.y, data.offsets), {}
    for how in ("loop", "stacked"):
        mine, engine = bank.float(), Engine(flat, LocalOptions(steps=1, learning_rate=rate), seed=7, how=how)
        for part in engine.work(LocalTask(mine, data, pick_lowest, 0, in_place=True), range(CLIENTS)):
            assert (part.vectors is None) == (how == "stacked")
            assert list(part.fine) == [fine] * len(part.fine)
            for position, choice, vector in zip(
                part.positions, part.choices, () if part.vectors is None else part.vectors, strict=False
            ):
                if fine:
                    mine[choice.cluster, position] = vector
        models[how] = mine
        assert torch.isfinite(mine).all()
        assert torch.equal(mine, bank.float()) != fine
    torch.testing.assert_close(models["loop"], models["stacked"], rtol=1e-4, atol=1e-6 * rate)
