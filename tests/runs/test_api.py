"""The Python API: arguments as strict as the command line's, comparisons, virtual time, warnings, pickles, export."""

from __future__ import annotations

import dataclasses
import json
import pickle
import warnings
from pathlib import Path
from typing import Any

import networkx as nx
import numpy as np
import pytest
import torch
import tqdm.auto
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from toy import make_toy_model, make_toy_split

import dfca
from dfca.api.exporting import holders
from dfca.base.errors import ConfigError, DfcaError, ModelError
from dfca.contracts import ContractError, check_algorithm
from dfca.core.algorithm import Algorithm, Choice
from dfca.sim.events.world import World

QUICK: dict[str, Any] = {"rounds": 2, "clusters": 2, "topology": "ring", "evaluate_every": 1, "steps": 1}


def quick(algorithm: Any = "dfca-gi", **changes: Any) -> Any:
    return dfca.simulate(make_toy_model, make_toy_split(), algorithm, **QUICK | changes)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"rounds": 2.5}, "rounds must be an integer, got 2.5"),
        ({"rounds": True}, "rounds must be an integer, got true"),
        ({"rounds": 0}, "rounds must be >= 1, got 0"),
        ({"seed": 1.5}, "seed must be an integer, got 1.5"),
        ({"seed": -1}, "seed must be >= 0, got -1"),
        ({"seed": [0, 0]}, "seed must not repeat a value, got 0 2 times"),
        ({"seed": []}, "seed is an empty list; give at least 1"),
        ({"algorithm": ["ifca", "ifca"]}, "algorithm must not repeat a value, got 'ifca' 2 times"),
        ({"algorithm": 3}, 'algorithm must be a name such as "ifca", an Algorithm, or a list of these, got 3'),
        ({"algorithm": lambda: 3}, "algorithm is a function that must return an Algorithm, got int"),
        ({"learning_rate": float("inf")}, "learning_rate must be a finite number, got Infinity"),
        ({"learning_rate": "0.1"}, 'learning_rate must be a number, got "0.1"'),
        ({"batch_size": "half"}, 'batch_size must be "full" or an integer, got "half"'),
        ({"batch_size": 0}, "batch_size must be"),
        ({"clusters": 2.0}, 'clusters must be "auto" or an integer, got 2.0'),
        ({"clusters": 7}, "clusters must be in 1..6 (the number of clients), got 7"),
        ({"participation": 1.5}, "participation must be > 0 and <= 1, got 1.5"),
        ({"rounds": 0, "steps": -1}, "2 problems: (1) rounds must be >= 1, got 0; (2) steps must be >= 0, got -1"),
        ({"device": "gpu"}, 'device must be "cpu", "cuda", "cuda:N", "mps" or "auto", got "gpu"'),
        ({"topology": nx.path_graph(["a", "b"])}, "as integers, got the node 'a'"),
        ({"topology": 3}, 'topology must be a name such as "ring"'),
        ({"topology": lambda clients, seed: 1 / 0}, "topology is a function that failed with ZeroDivisionError"),
        ({"topology": lambda clients, seed: 3}, "topology is a function that must return a networkx graph, got int"),
        ({"world": "wify"}, 'unknown world "wify"; did you mean "wifi"?'),
        ({"world": {"link": {"latency": 1}}}, 'world: unknown key in [link] "latency"; did you mean "latency_s"?'),
        ({"world": 3}, 'world must be a name such as "wifi"'),
        ({"clock": {"until_s": 1}}, "clock needs a world"),
        ({"world": "ideal", "clock": {"until": 1}}, 'clock: unknown key "until"; did you mean "until_s"?'),
        ({"callbck": print}, 'unknown option of simulate "callbck"; did you mean "callback"'),
        ({"algorithms": ["ifca"]}, 'unknown option of simulate "algorithms"; did you mean "algorithm"'),
        ({"callback": 3}, "callback must be a function of a record, got 3"),
    ],
)
def test_wrong_arguments_are_one_sentence(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as error:
        quick(**changes)
    assert sentence in str(error.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
def test_a_device_that_is_not_here() -> None:
    with pytest.raises(ConfigError, match=r'device "cuda" is not on this machine .* use device="auto"'):
        quick(device="cuda")


def test_a_model_that_is_none() -> None:
    with pytest.raises(ModelError, match=r"model must be a torch\.nn\.Module or a function that builds one, got int"):
        dfca.simulate(3, make_toy_split(), rounds=1)  # type: ignore[arg-type]


def test_a_function_that_fails_to_build_the_model() -> None:
    with pytest.raises(ModelError, match=r"the model's function Linear fails with TypeError: .* without arguments"):
        dfca.simulate(torch.nn.Linear, make_toy_split(), rounds=1)
    with pytest.raises(ModelError, match=r"the model's function <lambda> returns nothing; it must return a torch"):
        dfca.simulate(lambda: None, make_toy_split(), rounds=1)  # type: ignore[arg-type, return-value]


def test_a_client_that_is_none() -> None:
    result = quick(rounds=1)
    for wrong in (6, -1, "a", 1.0):
        with pytest.raises(ConfigError, match=rf"^client must be in 0\.\.5, got {wrong!r}$"):
            result.bank(wrong)  # type: ignore[arg-type]
    assert torch.equal(result.bank(torch.tensor(2)), result.bank(2))  # type: ignore[arg-type]


def test_numbers_of_numpy_and_full_batches_are_taken() -> None:
    result = quick(rounds=np.int64(2), learning_rate=np.float32(0.1), seed=torch.tensor(0), batch_size="full")
    same = quick(rounds=2, learning_rate=float(np.float32(0.1)), seed=0)
    assert torch.equal(result.banks, same.banks)


def test_dfca_is_the_default() -> None:
    result = dfca.simulate(make_toy_model, make_toy_split(), rounds=1, topology="complete", steps=1)
    assert result.algorithm == "dfca-auto"
    assert any(note.startswith("dfca-auto opened") for note in result.notes)


def test_a_comparison_has_differences_paired_by_seed() -> None:
    slow = {"name": "dfedavgm", "momentum": 0.0, "label": "dfedavgm, no momentum"}
    comparison = quick(["dfca-auto", "dfedavgm", slow], seed=[3, 4, 5])
    assert (comparison.algorithms, comparison.reference) == (
        ["dfca-auto", "dfedavgm", "dfedavgm, no momentum"],
        "dfca-auto",
    )
    by_hand = [comparison["dfedavgm", seed].accuracy - comparison["dfca-auto", seed].accuracy for seed in (3, 4, 5)]
    table = comparison.to_pandas()
    row = table.loc["dfedavgm", "difference"]
    assert row["mean"] == pytest.approx(np.mean(by_hand))
    assert row["high"] - row["mean"] == pytest.approx(6.2053 * np.std(by_hand, ddof=1) / np.sqrt(3), rel=1e-4)
    assert (row["to"], row["seeds"]) == ("dfca-auto", 3)
    text, html = repr(comparison), comparison._repr_html_()
    for table in (text, html):
        assert "paired by seed" in table
        assert "adjusted for the 2 comparisons of this table" in table
    alone = quick(["dfca-auto", slow], seed=[3])
    assert "one seed: no interval" in repr(alone)
    assert "†" not in repr(alone)


def test_a_comparison_marks_who_diverged() -> None:
    with pytest.warns(dfca.DfcaWarning, match="training"):
        comparison = quick(["dfedavgm", "local"], seed=[3, 4], learning_rate=1e4)
    assert "dfedavgm ‡" in repr(comparison)
    assert "in 2 of 2 seeds" in repr(comparison)
    twin = pickle.loads(pickle.dumps(comparison))
    assert repr(twin) == repr(comparison), "alarms keep their numbers"


def test_several_algorithms_and_seeds_are_compared() -> None:
    comparison = quick(["dfca-gi", "local"], seed=[3, 4])
    assert [(result.algorithm, result.seed) for result in comparison] == [
        ("dfca-gi", 3), ("local", 3), ("dfca-gi", 4), ("local", 4)
    ]  # fmt: skip
    alone = quick("local", seed=4)
    assert torch.equal(comparison["local", 4].banks, alone.banks), "each is what it is alone"
    table = comparison.to_pandas()
    values = [comparison["dfca-gi", seed].accuracy for seed in (3, 4)]
    assert table.loc["dfca-gi", ("accuracy", "mean")] == pytest.approx(np.mean(values))
    assert table.loc["dfca-gi", ("accuracy", "std")] == pytest.approx(np.std(values, ddof=1))
    assert len(comparison.metrics) == 8
    assert list(comparison.metrics.columns[:3]) == ["algorithm", "seed", "round"]
    lines = repr(comparison).splitlines()
    better = max(("dfca-gi", "local"), key=lambda name: table.loc[name, ("accuracy", "mean")])
    title = f"algorithm accuracy % minus {better} ± 95 % all models % right cluster % all clusters found"
    assert " ".join(lines[0].split()).startswith(title)
    mean, spread = 100 * np.mean(values), 100 * np.std(values, ddof=1)
    assert " ".join(lines[1].split()).startswith(f"dfca-gi {mean:.1f} ± {spread:.1f} ")
    assert lines[2].split().count("–") >= 2, "local has no clusters"
    assert "mean ± standard deviation over seeds" in lines, "what `dfca report` says of a run folder"
    assert "mean ± standard deviation over seeds" in comparison._repr_html_()
    with pytest.raises(ConfigError, match="no result of 'ifca' with seed 3; there are dfca-gi, local with seeds 3, 4"):
        comparison["ifca"]
    assert len(pickle.loads(pickle.dumps(comparison))) == 4


def test_a_function_of_clients_and_seed_is_no_data() -> None:
    with pytest.raises(ConfigError, match=r"data is called as data\(seed\), .*'seed'; .* lambda seed: function"):
        dfca.simulate(make_toy_model, lambda clients, seed: make_toy_split(seed=seed), "local", **QUICK)


def test_data_may_depend_on_the_seed() -> None:
    comparison = dfca.simulate(make_toy_model, lambda seed: make_toy_split(seed=seed), "local", seed=range(2), **QUICK)
    assert not torch.equal(comparison["local", 0].banks, comparison["local", 1].banks)


def test_virtual_time_by_name_table_or_world() -> None:
    named, table, world = (quick(world=given, rounds=3) for given in ("ideal", {"preset": "ideal"}, World()))
    assert torch.equal(named.banks, table.banks)
    assert torch.equal(named.banks, world.banks)
    rounds = quick(rounds=3, aggregation="sequential")
    torch.testing.assert_close(named.banks, rounds.banks)
    assert named.evaluations[-1]["time_s"] == 3
    slow = quick(world={"compute": {"step_s": 2.0}}, rounds=3)
    assert slow.evaluations[-1]["time_s"] == 6
    assert quick(world="ideal", rounds=9, clock={"until_s": 2}).evaluations[-1]["round"] == 2
    assert named.model(0, 1) is not None


def test_what_may_be_wrong_is_warned_of_once() -> None:
    lonely = nx.cycle_graph(5)
    lonely.add_node(5)
    with pytest.warns(dfca.DfcaWarning) as caught:
        quick(topology=lonely, rounds=4)
    texts = [str(warning.message) for warning in caught]
    assert texts == [
        "1 of 6 clients have no neighbours (first: 5) and learn alone",
        "the graph has 2 components; models cannot pass between them",
    ]
    assert {warning.filename for warning in caught} == {__file__.replace("\\", "/")}, (
        "the line of the user's call is named"
    )
    with pytest.warns(dfca.DfcaWarning, match="the training loss of|training diverged at"):
        quick(learning_rate=1e6, rounds=4, steps=3)


def test_progress_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    quick(["local", "dfca-gi"], progress=True)
    shown = capsys.readouterr().err
    assert "4/4" in shown
    assert "dfca-gi" in shown
    assert "dfca-gi: start" in shown, "before a start has taken its time"


def test_the_bar_is_the_one_of_notebooks_where_there_is_a_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    class Bar(tqdm.std.tqdm):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            made.append(options)
            super().__init__(*arguments, **options, disable=True)

    monkeypatch.setattr(tqdm.auto, "tqdm", Bar)
    quick("local", progress=True)
    assert [options["total"] for options in made] == [2]


def test_a_result_can_be_pickled() -> None:
    result = quick()
    twin = pickle.loads(pickle.dumps(result))
    assert twin.simulation is None
    assert repr(twin) == repr(result)
    x = make_toy_split().test.of(0)[0]
    assert torch.equal(twin.model(0)(x), result.model(0)(x))
    assert twin.evaluations == result.evaluations


def test_metrics_by_round_and_by_client() -> None:
    result = quick()
    table = result.evaluations.to_pandas()
    assert table["round"].tolist() == [1, 2]
    assert table["accuracy"].iloc[-1] == result.accuracy
    assert "seconds_train" in table
    assert "assignments" not in table
    clients = result.evaluations.to_pandas(by="client")
    assert len(clients) == 12
    assert clients.query("round == 2")["cluster"].tolist() == result.assignments.tolist()
    assert clients.query("round == 2")["accuracy"].mean() == pytest.approx(result.accuracy)
    with pytest.raises(ValueError, match='by must be "round" or "client", got \'day\''):
        result.evaluations.to_pandas(by="day")  # type: ignore[arg-type]
    html = result._repr_html_()
    assert repr(result) in html
    assert "<script" not in html


def test_exported_models_compute_what_the_result_does(tmp_path: Path) -> None:
    result = quick("ifca", rounds=6)
    paths = result.export(tmp_path)
    used = sorted(set(result.assignments.tolist()))
    assert [path.name for path in paths] == [f"ifca-seed0-cluster{j}.safetensors" for j in used]
    (one,) = result.export(tmp_path, client=3, cluster=1)
    assert one.name == "ifca-seed0-cluster1-client3.safetensors"
    module = make_toy_model()
    module.load_state_dict(load_file(one))
    x = make_toy_split().test.of(3)[0]
    torch.testing.assert_close(module(x), result.model(3, 1)(x))
    with safe_open(paths[0], "pt") as file:
        facts = file.metadata()
    first = result.assignments.tolist().index(used[0])
    assert (facts["algorithm"], facts["seed"], facts["cluster"], facts["client"]) == (
        "ifca",
        "0",
        str(used[0]),
        str(first),
    )
    assert json.loads(facts["accuracy"]) == result.evaluations[-1]["accuracy_by_client"][first]
    assert "Linear(in_features=4" in facts["model"]
    with pytest.raises(ConfigError, match='unknown format "pt"'):
        result.export(tmp_path, "pt")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"client must be in 0\.\.5, got 6"):
        result.export(tmp_path, client=6)
    with pytest.raises(ConfigError, match=r"cluster must be in 0\.\.1, got 2"):
        result.export(tmp_path, cluster=2)


def test_who_is_exported() -> None:
    assert holders([1, 1, 0], None, None) == [(2, 0), (0, 1)]
    assert holders([1, 1, 0], 1, None) == [(1, 1)]
    assert holders([1, 1, 0], 1, 0) == [(1, 0)]
    assert holders([1, 1, 1], None, 0) == [(0, 0)], "nobody uses it: the copy of client 0"


@pytest.mark.slow
def test_onnx_computes_what_the_result_does(tmp_path: Path) -> None:
    runtime = pytest.importorskip("onnxruntime")
    result = quick()
    (path,) = result.export(tmp_path, "onnx", client=0)
    session = runtime.InferenceSession(str(path))
    x = make_toy_split().test.of(0)[0]
    (outputs,) = session.run(["output"], {"input": x.numpy()})
    torch.testing.assert_close(torch.tensor(outputs), result.model(0)(x).detach(), rtol=1e-5, atol=1e-5)
    assert session.get_modelmeta().custom_metadata_map["algorithm"] == "dfca-gi"


def choose(view: dfca.View) -> Choice:
    return Choice(0)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"start": "shard"}, 'unknown start of algorithm mine "shard"; did you mean "shared"?'),
        ({"exchange": "gosip"}, 'unknown exchange of algorithm mine "gosip"; did you mean "gossip"?'),
        ({"models": "two"}, 'unknown models of algorithm mine "two". Known: clusters, one'),
        ({"needs": ["losses"]}, "unknown needs of algorithm mine"),
        ({"weights": "metro"}, "unknown weights of algorithm mine"),
        ({"share": "everything"}, "unknown share of algorithm mine"),
        ({"informed": 1}, "informed of algorithm mine must be True or False, got 1"),
        ({"momentum": 1.0}, "momentum of algorithm mine must be in [0, 1), got 1.0"),
        ({"finetuning": 25}, "finetuning of algorithm mine must be FineTuning, got 25"),
        ({"choose": "lowest"}, "choose of algorithm mine must be a function, got 'lowest'"),
        ({"personal": 3}, "personal of algorithm mine must be a function, got 3"),
        ({"name": "a/b"}, "name of an algorithm must be letters, digits"),
        ({"revives": True}, 'algorithm mine revives clusters, which needs start="elected"'),
        ({"start": "elected", "exchange": "server"}, "algorithm mine elects its start, which needs"),
    ],
)
def test_an_algorithm_refuses_unknown_values(changes: dict[str, Any], sentence: str) -> None:
    good: dict[str, Any] = {"name": "mine", "start": "shared", "exchange": "gossip", "choose": choose}
    Algorithm(**good)
    with pytest.raises(ConfigError) as error:
        Algorithm(**good | changes)
    assert sentence in str(error.value)


def test_a_choice_that_is_none_is_one_sentence() -> None:
    for wrong in (Choice(2), Choice(torch.tensor(0)), 0, None):  # type: ignore[arg-type]
        mine = Algorithm("mine", start="shared", exchange="gossip", choose=lambda view, wrong=wrong: wrong)
        with pytest.raises(ConfigError, match=r"choose of algorithm mine must return a Choice whose cluster is an int"):
            quick(mine)


def test_the_contracts_find_what_is_wrong() -> None:
    def by_chance(view: dfca.View) -> Choice:
        return Choice(int(torch.randint(2, ())))  # the global generator: another one in every run

    mine = Algorithm("mine", start="shared", exchange="gossip", choose=by_chance)
    with pytest.raises(ContractError, match=r"mine breaks the contract 'same seed same bits': .* view\.random"):
        check_algorithm(mine)
    check_algorithm("dfca-gi")
    with pytest.raises(ContractError, match="an algorithm must be an Algorithm, got int"):
        check_algorithm(lambda: 3)  # type: ignore[arg-type,return-value]


CALLS: list[int] = []


def counts(view: dfca.View) -> Choice:
    CALLS.append(0)
    return Choice(len(CALLS) % len(view.losses))


def writes(view: dfca.View) -> Choice:
    best = dfca.lowest(view.losses)
    view.losses[best] = 0.0
    return Choice(best)


def fails(view: dfca.View) -> Choice:
    raise KeyError("mine")


def asserts(view: dfca.View) -> Choice:
    assert len(view.losses) > 5, "too few"
    return Choice(0)


def negative(view: dfca.View) -> Choice:
    assert view.sample_losses is not None
    return Choice(0, weights=-torch.ones_like(view.sample_losses))


SOFT = {"needs": "samples", "share": "all", "trains": "all"}


@pytest.mark.parametrize(
    ("record", "sentence"),
    [
        ({"choose": counts}, "'choose is a pure function': `choose` reads its view and nothing else"),
        ({"choose": writes}, "it wrote into its view"),
        ({"choose": fails}, "choose of mine raises KeyError: 'mine' (test_api.py, line"),
        ({"choose": asserts}, "choose of mine raises AssertionError: too few (test_api.py, line"),
        ({"choose": negative, **SOFT}, "a choice has weights that are not >= 0"),
        (
            {"memory": lambda models, clients: torch.full((models,), 0.7), "mixture": lambda memory: memory},
            "'mixtures are weights': The weights of a mixture are (m,), at least 0, and their sum is 1; so are a "
            "choice's weights at least 0. they are [0.7, 0.7]",
        ),
        (
            {"memory": lambda models, clients: torch.ones(models), "mixture": lambda memory: memory[:1]},
            "they have the shape (1,)",
        ),
    ],
)
def test_wrong_algorithms_are_blamed_for_what_they_do(record: dict[str, Any], sentence: str) -> None:
    best = {"choose": lambda view: Choice(dfca.lowest(view.losses))}
    mine = Algorithm("mine", start="shared", exchange="gossip", **best | record)
    with pytest.raises(ContractError) as error:
        check_algorithm(mine)
    assert sentence in str(error.value)


def test_results_are_drawn_and_written_for_a_paper(tmp_path: Path) -> None:
    comparison = quick(["dfca-gi", "local"], seed=[0, 1], rounds=4, evaluate_every=2)
    figure = comparison.plot(against="traffic", width=3.4, font_size=8)
    assert figure.axes[0].get_xlabel() == "MB per client"
    figure.savefig(tmp_path / "curve.pdf")
    shown = comparison["dfca-gi"].plot("cluster_accuracy")._repr_html_()
    assert "currentColor" in shown
    assert "cluster accuracy (%)" in shown
    with pytest.raises(ConfigError, match='unknown value of names "papers"; did you mean "paper"'):
        comparison.to_latex(names="papers")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match='unknown measure "acc"; did you mean "accuracy"'):
        comparison.plot("acc")
    with pytest.raises(ConfigError, match='unknown measure "acuracy"; did you mean "accuracy"'):
        comparison.plot("acuracy")
    text = comparison.to_latex(["accuracy"], caption="Ours", names="paper")
    assert text.startswith("\\begin{table}[t]")
    assert "DFCA-GI & " in text
    blind = dfca.simulate(make_toy_model, (ROWS, LABELS, OWNER), "local", rounds=1)
    with pytest.raises(ConfigError, match='no row has a value for the column "right-cluster"; those of clusters need'):
        blind.to_latex(["accuracy", "right-cluster"])
    alone = comparison["local"].to_latex()
    assert "local & " in alone


def test_metrics_of_a_result_and_of_a_run_are_data_frames() -> None:
    result = quick("local")
    assert list(result.metrics["round"]) == [1, 2]
    assert list(result.metrics["accuracy"]) == result.evaluations["accuracy"]


def own(model: Any = make_toy_model, data: Any = None, **options: Any) -> Any:
    return dfca.simulate(model, make_toy_split() if data is None else data, "dfca-gi", **QUICK | options)


def bad_factory() -> nn.Module:
    raise ValueError("my width is wrong")


class BadForward(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).foo  # type: ignore[attr-defined, no-any-return]


ROWS = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))
LABELS = (ROWS[:, 0] > 0).long()


def fails(*_: Any, **__: Any) -> Any:
    raise ValueError("not today")


OWNER = [f"device {i // 10}" for i in range(60)]


@pytest.mark.parametrize(
    "data",
    [(ROWS, LABELS, OWNER), [ROWS, LABELS, torch.arange(60) // 10], (ROWS.tolist(), LABELS.tolist(), OWNER)],
    ids=["a list of owners", "a list of arrays", "three lists"],
)
def test_rows_with_their_owners_may_be_lists(data: Any) -> None:
    split = dfca.split_from(data)
    assert (split.train.clients, split.train.shape) == (6, (4,))


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: own(lr=0.1), 'unknown option of simulate "lr"; did you mean "learning_rate"?'),
        (lambda: own(optim="adam"), 'unknown option of simulate "optim"; did you mean "optimizer"?'),
        (lambda: own(local_epochs=3), 'unknown option of simulate "local_epochs"; did you mean "epochs"?'),
        (lambda: own(bad_factory), f"fails with ValueError: my width is wrong ({__file__}, line "),
        (
            lambda: own(lambda: BadForward(4, 2)),
            f"AttributeError: 'Tensor' object has no attribute 'foo' ({__file__}, ",
        ),
        (lambda: own(loss=fails), f"fails failed with ValueError: not today ({__file__}, line "),
        (lambda: own(metric=fails), f"fails failed with ValueError: not today ({__file__}, line "),
        (lambda: own(optimizer=fails), f"fails failed with ValueError: not today ({__file__}, line "),
        (
            lambda: own(data=lambda seed: 1 / 0),
            f"data(seed) failed with ZeroDivisionError: division by zero ({__file__}",
        ),
        (lambda: dfca.DataOptions(samples=3), 'unknown key "samples"'),  # type: ignore[call-arg]
        (lambda: dfca.make_split("digits", 4, 2, 0), 'give dfca.DataOptions(name="digits")'),  # type: ignore[arg-type]
        (lambda: dfca.split_from((ROWS, torch.stack([LABELS, 5 * LABELS], 1), OWNER)), 'task="tokens" for the next'),
        (lambda: dfca.split_from((ROWS, torch.stack([LABELS, LABELS], 1), OWNER)), 'task="multilabel"'),
        (lambda: dfca.split_from((ROWS, torch.stack([LABELS, LABELS], 1).float(), OWNER)), 'task="multilabel"'),
        (
            lambda: own(nn.Linear(4, 2), (ROWS, 1_000_000 * LABELS, OWNER)),
            "are labels numbered 0, 1, 2, ... without gaps?",
        ),
        (
            lambda: own(lambda: nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2)), (ROWS, LABELS, OWNER), batch_size=1),
            "batch norm cannot train on 1 sample, and a step of some client has 1; use a batch_size >= 2",
        ),
    ],
)
def test_mistakes_of_a_user_are_sentences(call: Any, sentence: str) -> None:
    with pytest.raises(DfcaError) as caught:
        call()
    assert sentence in str(caught.value)


def not_a_number(outputs: Tensor, targets: Tensor) -> float:
    return float("nan")


SAME = nn.Linear(4, 2)


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: own(lambda: SAME, (ROWS, LABELS, OWNER)), "returns the same module again"),
        (lambda: own(lambda: nn.Linear(4, 2).half(), (ROWS, LABELS, OWNER)), "the module is of torch.float16"),
        (lambda: own(metric=not_a_number), "is not a number: NaN in the last evaluation"),
        (
            lambda: own(world="ideal", clock={"target": 3}),
            "accuracy is at most 1, so clock.target = 3 is never reached",
        ),
    ],
)
def test_what_looks_wrong_is_warned_of(call: Any, sentence: str) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    assert [str(one.message) for one in caught if sentence in str(one.message)], [str(one.message) for one in caught]


def named_otherwise() -> Algorithm:
    return dataclasses.replace(dfca.ALGORITHMS["ifca"](), name="ifca-of-mine")


def test_an_algorithm_has_the_name_by_which_it_was_asked_for() -> None:
    name = f"{__name__}:named_otherwise"
    assert quick(name).algorithm == name, "as in the tables of `dfca run`"
    assert quick(named_otherwise()).algorithm == "ifca-of-mine"
