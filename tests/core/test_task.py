"""What models learn: each task by closed forms, the same in every driver and engine, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import networkx as nx
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from toy import make_toy_setting, make_toy_split, quick

import dfca
from dfca.base.errors import ConfigError, DataError, ModelError
from dfca.core.learning.inputs import Inputs, outputs_of
from dfca.core.learning.local import LocalOptions, local_steps, sample_losses
from dfca.core.learning.params import FlatModel, initial
from dfca.core.learning.task import CLASSIFICATION, METRICS, TASKS
from dfca.data.clients import Split
from dfca.data.forecast import RADIUS, WINDOW, angle, innovation, make_forecast_split, vibrations
from dfca.data.options import DataOptions
from dfca.models import mlp, pretrained
from dfca.sim.events.simulation import EventSimulation
from dfca.sim.local.engine import make_engine
from dfca.sim.rounds.simulation import Simulation
from dfca.sim.setting import Setting
from dfca.tasks import choose_task, make_task
from dfca.testing import lockstep, stack

# --- closed forms


def test_squared_absolute_and_huber_loss_by_hand() -> None:
    z, y = torch.tensor([[1.0, 2.0], [0.0, 4.0]]), torch.tensor([[0.0, 0.0], [0.0, 1.0]])
    assert make_task(loss="mse").loss(z, y).tolist() == [2.5, 4.5]
    assert make_task(loss="mae").loss(z, y).tolist() == [1.5, 1.5]
    assert make_task(loss="huber").loss(z, y).tolist() == [1.0, 1.25]  # 1/2 d^2 within 1, |d| - 1/2 beyond


def test_one_number_per_sample_may_come_as_a_column() -> None:
    y = torch.tensor([1.0, 2.0, 3.0])
    assert TASKS["regression"].loss(torch.zeros(3, 1), y).tolist() == [1.0, 4.0, 9.0]  # no broadcast to (3, 3)


def test_label_loss_by_hand() -> None:
    z, y = torch.tensor([[0.0, 0.0], [2.0, -2.0]]), torch.tensor([[1.0, 0.0], [1.0, 1.0]])
    high, low = math.log(1 + math.exp(-2)), math.log(1 + math.exp(2))
    assert TASKS["multilabel"].loss(z, y).tolist() == pytest.approx([math.log(2), (high + low) / 2])


def test_token_loss_counts_the_tokens_that_there_are() -> None:
    z = torch.zeros(3, 3, 4)
    z[1, 0, 2] = 1.0
    y = torch.tensor([[0, 1, 2], [2, -100, -100], [-100, -100, -100]])
    first = -1 + math.log(math.e + 3)
    assert TASKS["tokens"].loss(z, y).tolist() == pytest.approx([math.log(4), first, 0.0])


def test_metrics_by_hand() -> None:
    z, y = torch.tensor([[[1.0], [3.0]], [[0.0], [0.0]]]), torch.tensor([[0.0, 1.0], [0.0, 0.0]])
    assert METRICS["rmse"][1].score(z, y).tolist() == pytest.approx([math.sqrt(2.5), 0.0])
    assert METRICS["mse"][1].score(z, y).tolist() == [2.5, 0.0]
    assert METRICS["mae"][1].score(z, y).tolist() == [1.5, 0.0]
    assert METRICS["r2"][1].score(z, y).tolist() == [1 - 5 / 0.5, 1.0]
    labels, said = torch.tensor([[[1.0, 0.0], [1.0, 1.0]]]), torch.tensor([[[1.0, -1.0], [1.0, -1.0]]])
    assert METRICS["f1"][1].score(said, labels).tolist() == [0.8]  # TP 2, FP 0, FN 1
    assert METRICS["f1"][1].score(-torch.ones(1, 2, 2), torch.zeros(1, 2, 2)).tolist() == [1.0]
    assert METRICS["exact-match"][1].score(said, labels).tolist() == [0.5]
    tokens = torch.tensor([[[0, 1], [1, -100]]])
    outputs = torch.zeros(1, 2, 2, 2)
    outputs[..., 0] = 1.0
    assert METRICS["token-accuracy"][1].score(outputs, tokens).tolist() == pytest.approx([1 / 3])
    losses = [math.log(1 + math.exp(-1)), math.log(1 + math.e), math.log(1 + math.e)]
    assert METRICS["perplexity"][1].score(outputs, tokens).tolist() == pytest.approx([math.exp(sum(losses) / 3)])


@pytest.mark.parametrize("name", ["regression", "multilabel", "classification"])
@pytest.mark.parametrize("outputs", [1, 3])
def test_written_out_gradients_are_those_of_the_loss(name: str, outputs: int) -> None:
    task = TASKS[name]
    z = torch.randn(6, outputs, dtype=torch.float64, requires_grad=True)
    y = {
        "regression": torch.randn(6, outputs, dtype=torch.float64),
        "multilabel": torch.randint(0, 2, (6, outputs)).double(),
        "classification": torch.randint(0, outputs, (6,)),
    }[name]
    (wanted,) = torch.autograd.grad(task.loss(z, y).sum(), z)
    assert task.residual is not None
    gradient = task.residual(z.detach().clone(), task.encode(y, 1, outputs, torch.float64))
    torch.testing.assert_close(gradient, wanted)


def test_one_step_of_a_regression_by_hand() -> None:
    flat = FlatModel(nn.Linear(1, 1), TASKS["regression"])
    x, y = torch.tensor([[1.0], [2.0]]), torch.tensor([1.0, 0.0])
    # w = b = 0: F = 1/2, dF/dw = mean(2 (0 - y) x) = -1, dF/db = -1
    assert sample_losses(flat, torch.zeros(1, 2), x, y).tolist() == [[1.0, 0.0]]
    assert local_steps(flat, torch.zeros(2), x, y, LocalOptions(1, 0.5)).tolist() == [0.5, 0.5]


def test_scores_of_guessing() -> None:
    assert TASKS["regression"].guess(torch.tensor([0.0, 2.0]), 1) == 1.0
    assert CLASSIFICATION.guess(torch.zeros(2), 10) == math.log(10)
    assert TASKS["multilabel"].guess(torch.zeros(2, 3), 3) == math.log(2)
    assert make_task(loss="mae").guess(torch.zeros(2), 1) is None


# --- all drivers and engines


def make_numbers_split(clients: int = 6, samples: int | list[int] = 12, outputs: int = 2) -> Split:
    """Make clients whose targets are one linear rule per cluster."""
    generator = torch.Generator().manual_seed(0)
    rules = torch.randn(2, 4, outputs, generator=generator)
    sizes = [samples] * clients if isinstance(samples, int) else samples

    def draw(n: int, client: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(n, 4, generator=generator)
        return x, (x @ rules[client % 2]).squeeze(1)

    train = [draw(n, i) for i, n in enumerate(sizes)]
    test = [draw(8, i) for i in range(clients)]
    return Split.of_clients(train, test, clusters=[i % 2 for i in range(clients)], task="regression")


def make_numbers_setting(algorithm: Any = "dfca-gi", outputs: int = 2, **changes: Any) -> Setting:
    split = changes.pop("split", None) or make_numbers_split(outputs=outputs)
    local = LocalOptions(steps=2, learning_rate=0.1)
    return make_toy_setting(
        algorithm, **{"split": split, "make_model": lambda: mlp((4,), outputs, 5), "local": local, **changes}
    )


def finished(setting: Setting) -> tuple[Simulation, dict[str, Any]]:
    simulation, last = Simulation(setting), {}
    while not simulation.done:
        last = simulation.step() or last
    return simulation, last


@pytest.mark.parametrize("algorithm", ["dfca-auto", "dfca-gi", "ifca", "fedspd", "dfedavgm", "oracle"])
@pytest.mark.parametrize("engine", ["loop", "stacked"])
def test_a_regression_is_the_same_in_rounds_lockstep_and_events(algorithm: str, engine: Any) -> None:
    setting = make_numbers_setting(quick(algorithm), engine=engine)
    simulation, row = finished(setting)
    states = lockstep(setting)
    assert simulation.assignments.tolist() == [state.assignment for state in states]
    rounds = simulation.banks.expand(-1, setting.clients, -1)
    torch.testing.assert_close(rounds, stack(states), rtol=1e-9, atol=1e-11)
    result = EventSimulation(setting).run()
    assert result.metrics[-1]["rmse"] == pytest.approx(row["rmse"], rel=1e-9)
    assert result.assignments.tolist() == simulation.assignments.tolist()


@pytest.mark.parametrize("local", [LocalOptions(3, 0.1), LocalOptions(3, 0.1, batch_size=5, momentum=0.5)])
@pytest.mark.parametrize("outputs", [1, 2])
@pytest.mark.parametrize("task", ["mse", "mae"])
def test_engines_agree_on_a_regression(local: LocalOptions, outputs: int, task: str) -> None:
    banks = {}
    for engine in ("loop", "stacked"):
        setting = make_numbers_setting(engine=engine, outputs=outputs, local=local, task=make_task(loss=task))
        banks[engine] = finished(setting)[0].banks
    torch.testing.assert_close(banks["loop"], banks["stacked"], rtol=1e-9, atol=1e-11)


def test_rmse_of_clients_is_that_of_their_deployed_models() -> None:
    setting = make_numbers_setting()
    simulation, row = finished(setting)
    errors = []
    for client in range(6):
        x, y = setting.split.test.to("cpu", torch.float64).of(client)
        module = simulation.model(client, row["assignments"][client])
        errors.append(float((module(x).detach() - y).square().mean().sqrt()))
    assert row["rmse"] == pytest.approx(sum(errors) / 6)
    assert "accuracy" not in row


def test_when_the_fast_paths_are_left() -> None:
    """MLPs keep their written-out gradients for classification, squared errors and labels; other losses are left to
    torch, stacked all the same; several inputs run one client after the other."""
    for task, dense in ((CLASSIFICATION, True), (TASKS["regression"], True), (TASKS["multilabel"], True),
                        (make_task(loss="mae"), False), (TASKS["tokens"], False)):  # fmt: skip
        flat = FlatModel(mlp((4,), 2, 5), task)
        assert ((flat.dense is not None), flat.known) == (dense, True), task.name
    data = make_numbers_split().train
    flat = FlatModel(mlp((4,), 2, 5), make_task(loss="mae"))
    assert make_engine("auto", flat, LocalOptions(), 0, data, "cpu").how == "stacked"
    own = make_task(loss=lambda z, y: torch.tensor([float(row.sum()) for row in (z - y).square()]))
    flat = FlatModel(mlp((4,), 2, 5), own)
    assert make_engine("auto", flat, LocalOptions(), 0, data, "cpu").how == "loop"  # it looks at its numbers


@pytest.mark.parametrize(("drift", "rounds"), [(14, 40), (8, 24)])
def test_a_drift_of_numbers_raises_the_alarm(drift: int, rounds: int) -> None:
    """Half of the clients change to a rule that no model fits: revival opens a cluster by the task's loss.

    The first survey is held after round 10: two rounds after a drift it leaves clusters alone that begin to differ.
    """
    options = DataOptions(name="forecast", samples_per_client=60, test_samples_per_client=20, drift_share=0.5)
    before = dfca.make_split(options, 8, 1, 0)
    after = dfca.make_split(options, 8, 1, 0, drifted=True)
    setting = make_toy_setting(
        "dfca-auto", split=before, drift=(drift, after), rounds=rounds, clusters=None, graph=nx.complete_graph(8),
        make_model=lambda: mlp((1, WINDOW), 1, 8), local=LocalOptions(5, 0.1), dtype=torch.float32,
        evaluate_every=rounds,
    )  # fmt: skip
    simulation, row = finished(setting)
    assert simulation.models == 2
    assert row["cluster_accuracy"] == 1.0


# --- models with other inputs and outputs


class Tagger(nn.Module):
    """Scores each token by itself and by the mean of those that the mask keeps; returns what `wrap` makes of it."""

    def __init__(self, wrap: Any = None) -> None:
        super().__init__()
        self.embed, self.head, self.wrap = nn.Embedding(7, 4), nn.Linear(8, 3), wrap

    def forward(self, ids: Tensor, mask: Tensor) -> Any:
        embedded = self.embed(ids)
        mean = (embedded * mask[..., None]).sum(dim=1) / mask.sum(dim=1, keepdim=True).clamp_min(1)
        logits = self.head(torch.cat([embedded, mean[:, None].expand_as(embedded)], dim=2))
        return self.wrap(logits) if self.wrap else logits


class Output:
    """What some libraries return."""

    def __init__(self, logits: Tensor) -> None:
        self.loss, self.logits = None, logits


def make_token_split(kind: str, clients: int = 4) -> Split:
    """Make clients that tag tokens by a rule of their cluster; the last tokens of a sample may be padding."""
    generator = torch.Generator().manual_seed(1)

    def draw(n: int, cluster: int) -> tuple[Any, Tensor]:
        ids = torch.randint(0, 7, (n, 5), generator=generator)
        mask = torch.arange(5)[None] < torch.randint(2, 6, (n, 1), generator=generator)
        y = torch.where(mask, (ids + cluster) % 3, -100)
        return ((ids, mask) if kind == "tuple" else {"mask": mask, "ids": ids}), y

    train, test = ([draw(n, i % 2) for i in range(clients)] for n in (30, 10))
    return Split.of_clients(train, test, clusters=[i % 2 for i in range(clients)], task="tokens", classes=3)


@pytest.mark.no_cover
@pytest.mark.parametrize("kind", ["tuple", "dict"])
def test_tokens_with_ids_and_a_mask(kind: str) -> None:
    split = make_token_split(kind)
    assert split.train.shape == (((5,), (5,)) if kind == "tuple" else {"mask": (5,), "ids": (5,)})
    result = dfca.simulate(
        Tagger, split, "dfca-auto", rounds=8, clusters=2, topology="complete",
        learning_rate=1.0, steps=10, evaluate_every=8,
    )  # fmt: skip
    assert result.simulation.engine.how == "loop"
    assert result.score > 0.95
    assert result.evaluations[-1]["cluster_accuracy"] == 1.0
    assert "token_accuracy" in str(result.evaluations)


def test_tokens_are_the_same_in_rounds_lockstep_and_events() -> None:
    split = make_token_split("tuple")
    for algorithm in ("dfca-auto", "fedspd"):
        local = LocalOptions(2, 0.5, batch_size=7)
        setting = make_toy_setting(quick(algorithm), split=split, make_model=Tagger, local=local)
        simulation, row = finished(setting)
        rounds = simulation.banks.expand(-1, setting.clients, -1)
        torch.testing.assert_close(rounds, stack(lockstep(setting)), rtol=1e-9, atol=1e-11)
        result = EventSimulation(setting).run()
        assert result.metrics[-1]["token_accuracy"] == pytest.approx(row["token_accuracy"])


@pytest.mark.parametrize(
    "wrap", [Output, lambda z: {"logits": z, "hidden": z}, lambda z: {"scores": z}, lambda z: (z, None)]
)
def test_what_models_return(wrap: Any) -> None:
    split = make_token_split("tuple")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        plain, wrapped = (FlatModel(make, TASKS["tokens"]) for make in (Tagger(), Tagger(wrap)))
    vector, (x, _) = torch.linspace(-1, 1, plain.size), split.train.of(0)
    assert torch.equal(*(flat.run(flat.pieces(vector), x, "score") for flat in (plain, wrapped)))


@pytest.mark.parametrize(
    ("returned", "text"),
    [
        ({"a": torch.ones(1), "b": torch.ones(1)}, "returns a dict with 'a', 'b'; name the outputs \"logits\""),
        ("text", "the model returns str; it must return a tensor"),
        ((), "the model returns tuple"),
    ],
)
def test_what_models_may_not_return(returned: Any, text: str) -> None:
    with pytest.raises(ModelError, match=text):
        outputs_of(returned)


def test_inputs_are_indexed_like_a_tensor() -> None:
    x = Inputs.of({"a": torch.arange(6), "b": torch.arange(12).view(6, 2)})
    some = x[torch.tensor([1, 3])]
    assert (len(x), len(some), some.names) == (6, 2, ("a", "b"))
    assert some.tensors[1].tolist() == [[2, 3], [6, 7]]


def test_data_sets_with_several_inputs() -> None:
    ids, mask, y = torch.zeros(4, 5).long(), torch.ones(4, 5).bool(), torch.zeros(4).long()
    of_tensors = torch.utils.data.TensorDataset(ids, mask, y)
    of_items = [((i, m), t) for i, m, t in zip(ids, mask, y, strict=True)]
    for samples in (of_tensors, of_items):
        split = Split.of_clients([samples], [samples])
        assert isinstance(split.train.x, Inputs)
        assert [tensor.dtype for tensor in split.train.x.tensors] == [torch.int64, torch.bool]


# --- own losses and metrics


def mean_quartic(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.reshape(targets.shape) - targets).pow(4).flatten(1).mean(dim=1)


def worst_error(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.reshape(targets.shape) - targets).abs().max()


worst_error.higher_is_better = False  # type: ignore[attr-defined]
worst_error.unit = "mm"  # type: ignore[attr-defined]


def test_own_loss_and_metric_by_path() -> None:
    result = dfca.simulate(
        lambda: mlp((4,), 2, 5), make_numbers_split(), "dfca-gi", rounds=2, learning_rate=0.01,
        loss="test_task:mean_quartic", metric="test_task:worst_error", topology="complete",
    )  # fmt: skip
    metric = result.simulation.setting.learns.metric
    assert (metric.name, metric.key, metric.higher_is_better, metric.unit) == (
        "worst error",
        "worst_error",
        False,
        "mm",
    )
    assert result.score == result.evaluations[-1]["worst_error"]
    with pytest.raises(AttributeError, match=r"result\.score is its worst_error"):
        _ = result.accuracy


def test_any_targets_with_a_custom_task() -> None:
    """Two parts of a target with a loss of their own: a class and a number."""

    def both(outputs: Tensor, y: Tensor) -> Tensor:
        return (
            nn.functional.cross_entropy(outputs[:, :2], y[:, 0].long(), reduction="none")
            + (outputs[:, 2] - y[:, 1]).square()
        )

    x = torch.randn(4, 20, 3, generator=torch.Generator().manual_seed(0))
    pairs = [(inputs, torch.stack([(inputs[:, 0] > 0).float(), inputs[:, 1]], dim=1)) for inputs in x]
    task = make_task("custom", both)
    split = Split.of_clients(pairs, pairs, task=task, clusters=[0] * 4)
    result = dfca.simulate(
        lambda: nn.Linear(3, 3), split, "dfca-gi", clusters=1, rounds=20, topology="ring", learning_rate=0.2
    )
    assert result.score < 0.4 < float(task.loss(torch.zeros(20, 3), pairs[0][1]).mean())


# --- starts from given weights


def test_start_from_is_bit_equal(tmp_path: Any) -> None:
    from safetensors.torch import save_file

    split, given = make_toy_split(), nn.Linear(4, 3)
    path = tmp_path / "start.safetensors"
    save_file(given.state_dict(), path)
    wanted = torch.cat([given.weight.detach().flatten(), given.bias.detach()])
    for source in (given, given.state_dict(), path, str(path)):
        result = dfca.simulate(given, split, "local", rounds=1, steps=0, topology="ring", start_from=source)
        assert all(torch.equal(result.bank(client)[0], wanted) for client in range(6))
    flat = FlatModel(given)  # before anything is mixed, which rounds
    alone, several = (pretrained(lambda: nn.Linear(4, 3), start) for start in (given, [given, nn.Linear(4, 3)]))
    first, second = (initial(flat, alone, 0, "init", j) for j in range(2))
    assert torch.equal(first, wanted)
    assert 0.01 < (second - wanted).std() / wanted.std() < 0.5  # apart, and not far
    assert torch.equal(initial(flat, several, 0, "init", 0), wanted)
    assert torch.equal(initial(flat, several, 0, "init", 1), flat.flatten_tensors(several.starts[1]))


def test_an_election_warms_up_from_given_weights() -> None:
    given = nn.Linear(4, 3)
    result = dfca.simulate(given, make_toy_split(), quick("dfca-auto"), rounds=1, topology="ring", start_from=given)
    begun = result.simulation.start.initial_model()
    assert torch.equal(begun, torch.cat([given.weight.detach().flatten(), given.bias.detach()]))


@pytest.mark.parametrize(
    ("start", "text"),
    [
        ({"weight": torch.zeros(3, 4)}, "start_from has no 'bias'"),
        ({"weight": torch.zeros(3, 5), "bias": torch.zeros(3)}, r"'weight' must have shape \(3, 4\), got \(3, 5\)"),
        ({"weight": torch.zeros(3, 4), "bias": torch.zeros(3), "x": torch.zeros(1)}, "'x', which the model does not"),
        ({"weight": torch.full((3, 4), math.nan), "bias": torch.zeros(3)}, "'weight' holds NaN or infinity"),
        ("nowhere.safetensors", "nowhere.safetensors cannot be read as safetensors: No such file"),
        (3, "start_from must be a module, a state_dict or the path"),
        ([], "start_from is an empty list"),
    ],
)
def test_starts_that_are_refused(start: Any, text: str) -> None:
    with pytest.raises(ModelError, match=text):
        dfca.simulate(nn.Linear(4, 3), make_toy_split(), "dfca-gi", clusters=2, rounds=1, start_from=start)


def test_several_starts_need_as_many_clusters() -> None:
    starts = [nn.Linear(4, 3) for _ in range(3)]
    for algorithm, text in (
        ("dfca-gi", r"one per cluster \(2\), got 3"),
        ("dfca-auto", "dfca-auto starts from one model, got"),
    ):
        with pytest.raises(ConfigError, match=text):
            dfca.simulate(starts[0], make_toy_split(), algorithm, clusters=2, rounds=1, start_from=starts)


def test_a_trained_module_that_is_started_afresh_is_remarked_on() -> None:
    split, module = make_toy_split(), nn.Linear(4, 3)
    dfca.simulate(module, split, "dfca-gi", clusters=2, rounds=1, topology="complete")  # fresh: no warning
    module(torch.ones(1, 4)).sum().backward()
    with pytest.warns(UserWarning, match="looks trained, and its weights are not used: .* pass start_from=module"):
        dfca.simulate(module, split, "dfca-gi", clusters=2, rounds=1, topology="complete")
    dfca.simulate(module, split, "dfca-gi", clusters=2, rounds=1, topology="complete", start_from=module)


# --- refusals


def test_targets_that_are_refused() -> None:
    x, y = np.zeros((3, 2), dtype=np.float32), np.array([0.5, 1.0, 2.0])
    for task, targets, text in (
        ("classification", y, 'labels of client 0 .* are torch.float64; .* or say what they are: task="regression"'),
        ("regression", np.array([0.0, np.inf, 1.0]), "client 0 has NaN or infinity in its training targets"),
        ("regression", y[:2], r"3 samples but targets of shape \(2,\)"),
        ("multilabel", y, r"3 samples but targets of shape \(3,\); give \(3, labels\)"),
        ("multilabel", np.array([[0, 1], [2, 0], [1, 1]]), r"training label 2; labels must be in \{0, 1\}"),
        ("tokens", np.array([[0, 1], [-5, 0], [1, 1]]), r"label -5; labels must be in 0..1, or -100"),
        ("regresion", y, 'unknown task "regresion"; did you mean "regression"'),
    ):
        with pytest.raises((DataError, ConfigError), match=text):
            Split.of_clients([(x, targets)], [(x, targets)], task=task)


def test_tasks_and_models_that_do_not_fit_the_data() -> None:
    numbers = make_numbers_split()
    with pytest.raises(ModelError, match=r"must give \(2, 2\) outputs for 2 values per sample, got \(2, 3\)"):
        dfca.simulate(lambda: nn.Linear(4, 3), numbers, "dfca-gi", rounds=1)
    with pytest.raises(ConfigError, match='the task is "classification", and the data is made for "regression"'):
        dfca.simulate(lambda: nn.Linear(4, 2), numbers, "dfca-gi", rounds=1, task="classification")
    with pytest.raises(ConfigError, match=r"one number per sample, \(2,\) for 2 samples, got \(\)"):
        dfca.simulate(lambda: nn.Linear(4, 2), numbers, "dfca-gi", rounds=1, loss=lambda z, y: (z - y).mean())
    with pytest.raises(ConfigError, match=r"metric .* failed with ZeroDivisionError"):
        dfca.simulate(lambda: nn.Linear(4, 2), numbers, "dfca-gi", rounds=1, metric=divide_by_zero)
    with pytest.raises(ConfigError, match="a Task has its loss and metric"):
        choose_task(CLASSIFICATION, CLASSIFICATION, loss="mse")


def divide_by_zero(outputs: Tensor, targets: Tensor) -> float:
    return 1 / 0


def test_targets_far_from_one_are_noted() -> None:
    x = torch.randn(10, 2)
    split = Split.of_clients([(x, 1e5 * x[:, 0])], [(x, 1e5 * x[:, 0])], task="regression")
    assert "scale them to about 1" in split.notes[0]


# --- forecasting


def test_vibrations_have_variance_one_and_the_innovation_that_was_computed() -> None:
    angles = torch.tensor([0.4, 1.5, 2.9], dtype=torch.float64)
    noise = torch.randn(3, 12_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    values = vibrations(noise, angles)[:, 500:]
    torch.testing.assert_close(values.var(dim=1), torch.ones(3, dtype=torch.float64), rtol=0.1, atol=0)
    a = 2 * RADIUS * angles.cos()[:, None]
    best = a * values[:, 1:-1] - RADIUS**2 * values[:, :-2]
    missed = (values[:, 2:] - best).std(dim=1)
    torch.testing.assert_close(missed, innovation(angles), rtol=0.02, atol=0)


def test_windows_to_forecast_from() -> None:
    options = DataOptions(name="forecast", samples_per_client=9, test_samples_per_client=5)
    split = dfca.make_split(options, clients=5, clusters=2, seed=3)
    assert split.task.name == "regression"
    assert split.train.x.shape == (45, 1, WINDOW)
    assert split.test.y.shape == (25,)
    again = make_forecast_split(options, split.clusters, 2, 3)
    assert torch.equal(again.train.x, split.train.x)
    assert not torch.isin(split.test.x, split.train.x).any()  # no value of the tests was trained on
    assert angle(0, 4) < angle(4, 4) < angle(1, 4)  # what a drift brings is new
    for change, text in (
        ({"partition": "dirichlet"}, 'partition = "dirichlet" does not fit forecast, .* no labels'),
        ({"transform": "rotation"}, 'transform "rotation" does not fit forecast'),
        ({"angles": (1.0, 2.0)}, "data.angles"),
    ):
        with pytest.raises(ConfigError, match=text):
            dfca.make_split(DataOptions(name="forecast", **change), 5, 2, 0)
    with pytest.raises(ConfigError, match='transform "dynamics" does not fit digits'):
        dfca.make_split(DataOptions(name="digits", transform="dynamics"), 5, 2, 0)
