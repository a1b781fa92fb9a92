"""The config: what it accepts, and the sentence for everything that it does not."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dfca.base.device import find_device
from dfca.base.errors import ConfigError
from dfca.core.method import StepTable
from dfca.experiment.config import Config
from dfca.experiment.load import load_experiment, presets, read_stored

SMALL = {"clients": 8, "clusters": 2, "rounds": 3, "algorithms": ["dfca-gi", "local"]}


def small(**values: object) -> Config:
    return Config.of(SMALL | values)


def problem(**values: object) -> str:
    with pytest.raises(ConfigError) as caught:
        small(**values)
    return str(caught.value)


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        (
            {"local": {"learning_rate": -0.1}},
            "local.learning_rate must be > 0, got -0.1; for no training at all use local.steps = 0",
        ),
        (
            {"participation": 1.5},
            "participation must be > 0 and <= 1, got 1.5; 1.0 is every client in every round",
        ),
        ({"rounds": 0}, "rounds must be >= 1, got 0"),
        ({"rounds": 10.5}, "rounds must be an integer, got 10.5"),
        ({"rounds": True}, "rounds must be an integer, got true"),
        ({"clients": "24"}, 'clients must be an integer, got "24"'),
        (
            {"clusters": 9},
            "clusters must be <= clients (8), got 9; lower clusters or raise clients",
        ),
        ({"clusters": 0}, 'clusters must be "auto" or >= 1, got 0; one cluster is plain federated averaging'),
        (
            {"local": {"batch_size": "half"}},
            'local.batch_size must be "full" or an integer, got "half"; '
            '"full" is all samples of the client in every step',
        ),
        (
            {"local": {"batch_size": 0}},
            'local.batch_size must be "full" or >= 1, got 0; "full" is all samples of the client in every step',
        ),
        (
            {"local": {"learning_rate": float("nan")}},
            "local.learning_rate must be a finite number, got NaN; for no training at all use local.steps = 0",
        ),
        ({"local": 3}, "local must be a table, got 3"),
        (
            {"mixing": {"weights": "metropols"}},
            'mixing.weights must be "uniform", "metropolis" or "samples", got "metropols"',
        ),
        ({"engine": "fast"}, 'engine must be "auto", "stacked", "loop" or "threads", got "fast"'),
        ({"seeds": 0}, "seeds must be >= 1 or a list of integers, got 0"),
        ({"seeds": [0, -1]}, "seeds must be >= 0, got -1"),
        ({"seeds": [1, 1]}, "seeds must not repeat a value, got 1 2 times"),
        ({"seeds": ["a"]}, 'seeds[0] must be an integer, got "a"'),
        ({"seeds": []}, "seeds must be a list of at least 1, got []"),
        ({"algorithms": []}, "algorithms must be a list of at least 1, got []"),
        ({"algorithms": "dfca-gi"}, 'algorithms must be a list, got "dfca-gi"'),
        ({"algorithm": {"dfca-gi": 1}}, "algorithm.dfca-gi must be a table, got 1"),
        (
            {"device": "gpu"},
            'device must be "cpu", "cuda", "cuda:N", "mps" or "auto", got "gpu"; "auto" takes a GPU where there is one',
        ),
        ({"evaluation": {"samples": 1}}, "evaluation.samples must be >= 2, got 1"),
        (
            {"algorithm": {"dfca-auto": {"level": "low"}}},
            'algorithm.dfca-auto.level must be a finite number, got "low"',
        ),
        (
            {"algorithm": {"dfca-auto": {"level": float("nan")}}},
            "algorithm.dfca-auto.level must be a finite number, got NaN",
        ),
        ({"algorithm": {"dfca-auto": {"support": 2.5}}}, "algorithm.dfca-auto.support must be an integer, got 2.5"),
        ({"algorithm": {"dfca-auto": {"support": True}}}, "algorithm.dfca-auto.support must be an integer, got true"),
        ({"model": {"hidden": "16"}}, 'model.hidden must be an integer, got "16"'),
        ({"model": {"channels": [0, 4]}}, "model.channels[0] must be >= 1, got 0"),
        ({"model": {"channels": [4]}}, "model.channels must have more items: model.channels[1] is missing"),
        (
            {"data": {"transform": "axis-rotation"}},
            'transform "axis-rotation" does not fit digits (images); use "rotation"',
        ),
    ],
)
def test_a_bad_value_is_told_with_key_value_and_bound(values: dict[str, object], sentence: str) -> None:
    assert problem(**values) == sentence


def test_an_unknown_key_is_told_with_near_matches_and_all_keys_of_its_section() -> None:
    assert problem(local={"learnig_rate": 0.1}) == (
        'unknown key in [local] "learnig_rate"; did you mean "learning_rate"? '
        f"Known: {', '.join(sorted(StepTable.descriptions()))}"
    )
    assert problem(round=3).startswith('unknown key "round"; did you mean "rounds"? Known: algorithm, algorithms, ')


def test_a_key_in_the_wrong_section_is_sent_home() -> None:
    assert problem(learning_rate=0.1).endswith('; "learning_rate" belongs in [local]')
    assert problem(local={"rounds": 5}).endswith(
        '; "rounds" belongs at the top of the file, before the first [section]'
    )


def test_all_problems_are_listed_at_once() -> None:
    sentence = problem(rounds=0, participation=2.0, local={"steps": -1}, seeds=[0, "x"])
    assert sentence == (
        "4 problems: (1) rounds must be >= 1, got 0; (2) participation must be > 0 and <= 1, got 2.0; 1.0 is every "
        'client in every round; (3) seeds[1] must be an integer, got "x"; (4) local.steps must be >= 0, got -1'
    )


def test_a_missing_key_is_told() -> None:
    with pytest.raises(
        ConfigError, match=r"^clients is missing; add it to the experiment file or .* --set clients=VALUE$"
    ):
        Config.of({key: value for key, value in SMALL.items() if key != "clients"})


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"algorithms": ["dfca-ig"]}, r'^unknown algorithm "dfca-ig"; did you mean "dfca-gi"'),
        ({"algorithm": {"ifcaa": {}}}, r'^unknown algorithm "ifcaa"; did you mean .*"ifca"'),
        ({"algorithm": {"ifca": {"temperature": 1}}}, r'^unknown option of ifca "temperature"'),
        ({"topology": {"name": "rings"}}, r'^unknown topology "rings"; did you mean "ring"'),
        ({"topology": {"p": 2.0}}, r"^topology.p must be in 0..1, got 2.0"),
        ({"model": {"name": "mpl"}}, r'^unknown model "mpl"; did you mean "mlp"'),
        ({"data": {"name": "mnits"}}, r'^unknown data ?set "mnits"; did you mean .*"mnist"'),
    ],
)
def test_an_unknown_name_is_told_before_any_work(values: dict[str, object], sentence: str) -> None:
    assert re.search(sentence, problem(**values))


def test_automatic_clusters_need_the_true_number_only_where_there_is_one() -> None:
    assert problem(clusters="auto").startswith('clusters = "auto" needs data.distributions')
    assert problem(clusters="auto", data={"name": "har", "partition": "owner"}).startswith('clusters = "auto" needs')
    assert small(clusters="auto", data={"name": "femnist", "partition": "owner"}).distributions == 1
    assert small(clusters="auto", data={"transform": "none"}).distributions == 1


def test_an_algorithm_option_that_is_a_float_takes_an_integer() -> None:
    assert small(algorithm={"dfedavgm": {"momentum": 0}}).algorithm == {"dfedavgm": {"momentum": 0}}


def test_seeds_are_a_count_or_a_list() -> None:
    assert small(seeds=3).seeds == (0, 1, 2)
    assert small(seeds=[5, 2]).seeds == (5, 2)


def test_a_full_batch_is_none_in_the_core() -> None:
    assert small().local.options().batch_size is None
    assert small(local={"batch_size": 16}).local.options().batch_size == 16


@given(
    rounds=st.integers(1, 10**6),
    learning_rate=st.floats(1e-9, 1e3, exclude_min=True),
    seeds=st.lists(st.integers(0, 2**40), min_size=1, max_size=4, unique=True),
    title=st.text(st.characters(exclude_categories=("Cs",)), max_size=30),
    batch_size=st.one_of(st.just("full"), st.integers(1, 1000)),
)
def test_toml_carries_every_config_exactly(
    rounds: int, learning_rate: float, seeds: list[int], title: str, batch_size: str | int
) -> None:
    local = {"learning_rate": learning_rate, "batch_size": batch_size}
    config = small(rounds=rounds, seeds=seeds, title=title, local=local, algorithm={"local": {}})
    again = read_stored(config.to_toml())[0]
    assert again == config
    assert again.digest() == config.digest()


def test_the_stored_config_is_complete() -> None:
    text = small().to_toml()
    for key in ("participation", "learning_rate", "[topology]", "aggregation", "every_s", "seeds"):
        assert key in text


def test_the_digest_covers_what_changes_numbers_and_nothing_else() -> None:
    digest = small().digest()
    assert small(title="x", seeds=5, algorithms=["ifca"], checkpoint={"every_s": 1.0}).digest() == digest
    assert small(rounds=4).digest() != digest
    assert small(topology={"p": 0.5}).digest() != digest


def test_differences_name_key_and_both_values() -> None:
    assert small().differences(small(rounds=5, local={"learning_rate": 0.2}, seeds=4)) == [
        "local.learning_rate is 0.1 there and 0.2 here",
        "rounds is 3 there and 5 here",
    ]


# --- reading experiments


@pytest.mark.parametrize("name", sorted(presets()))
def test_every_preset_loads_and_has_a_title(name: str) -> None:
    assert presets()[name]
    assert load_experiment(name).name == name


def test_an_unknown_preset_is_told_with_near_matches() -> None:
    with pytest.raises(ConfigError, match=r'^unknown preset "quikstart"; did you mean "quickstart"\? Known: .*\.toml$'):
        load_experiment("quikstart")


def test_overrides_are_toml_values_or_plain_strings() -> None:
    overrides = ["local.learning_rate=0.05", "topology.name=ring", "seeds=[3, 4]", 'title="a = b"', "description=a=b"]
    config = load_experiment("quickstart", overrides=overrides).config
    assert config.local.learning_rate == 0.05
    assert config.topology.name == "ring"
    assert config.seeds == (3, 4)
    assert config.title == "a = b"
    assert config.description == "a=b"


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("rounds", '--set needs key=value, got "rounds"; for example --set local.learning_rate=0.05'),
        (".=3", '--set needs key=value, got ".=3"; for example --set local.learning_rate=0.05'),
        ("local=3", "local must be a table, got 3"),
        ("rounds.x=3", 'rounds must be an integer, got {"x": 3}'),
        ("scale.desk=3", '--set cannot change a scale, got "scale.desk=3"; use --scale NAME'),
        ("clusters=99", "clusters must be <= clients (24), got 99; lower clusters or raise clients"),
    ],
)
def test_a_bad_override_is_told(override: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_experiment("quickstart", overrides=[override])
    assert str(caught.value) == sentence


def test_named_arguments_win_over_the_file() -> None:
    experiment = load_experiment("quickstart", overrides=["seeds=9"], algorithms=["ifca"], seeds=2, device="auto")
    assert experiment.config.algorithms == ("ifca",)
    assert experiment.config.seeds == (0, 1)
    assert experiment.config.device in ("cpu", "cuda", "mps")


SCALED = """
clients = 8
clusters = 2
rounds = 3
algorithms = ["local"]
[topology]
name = "erdos-renyi"
p = 0.5
[scale.desk.topology]
p = 0.25
[scale.paper]
clients = 100
"""


def test_a_scale_is_laid_over_the_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(SCALED)
    desk, paper, plain = (load_experiment(path, scale) for scale in (None, "paper", "default"))
    assert (desk.name, desk.scale, desk.config.clients, desk.config.topology.p) == ("mine", "desk", 8, 0.25)
    assert (paper.scale, paper.config.clients, paper.config.topology.p) == ("paper", 100, 0.5)
    assert (plain.scale, plain.config.clients, plain.config.topology.p) == ("default", 8, 0.5)
    with pytest.raises(ConfigError, match=r'^unknown scale "papr"; did you mean "paper"\?'):
        load_experiment(path, "papr")
    with pytest.raises(ConfigError, match=r'^this experiment has no scales, got --scale "paper"; leave --scale out$'):
        load_experiment("mnist-small", "paper")


def test_a_file_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"^cannot read the experiment file .*none.toml: No such file or directory; t"
    ):
        load_experiment(tmp_path / "none.toml")
    bad = tmp_path / "bad.toml"
    bad.write_text("rounds = \n")
    with pytest.raises(ConfigError, match=r"bad.toml is not valid TOML: Invalid value \(at line 1, column 10\)"):
        load_experiment(bad)
    bad.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="not UTF-8 text"):
        load_experiment(bad)
    bad.write_text("scale = 3")
    with pytest.raises(ConfigError, match=r"^scale must be a table of tables"):
        load_experiment(bad)


def test_a_device_that_is_not_here_is_told() -> None:
    with pytest.raises(ConfigError, match=r'^device "cuda:77" is not on this machine \(it has: .*cpu\); use --device'):
        find_device("cuda:77")
