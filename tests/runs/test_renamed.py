"""`dfca` is no algorithm: who asks for it is told the three names, and files that say it are read as `dfca-auto`."""

from __future__ import annotations

import json
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from reports import report_of
from tiny_runs import TINY, Listener
from typer.testing import CliRunner

import dfca
from dfca.algorithms import ALGORITHMS
from dfca.base.errors import ConfigError
from dfca.base.files import text_sha256
from dfca.base.renamed import AMBIGUOUS
from dfca.cli import app
from dfca.experiment.config import Config
from dfca.experiment.load import Experiment, read_stored
from dfca.experiment.sweep import Sweep
from dfca.faults.world import read_world
from dfca.node.task.facts import Facts
from dfca.report.formats import markdown
from dfca.report.page import write_report
from dfca.report.results import load_results, save_results
from dfca.runs.replay import replay_run
from dfca.runs.runner import run
from dfca.runs.signals import Interrupted
from dfca.runs.store.reading import load_run
from dfca.runs.store.repair import repair
from dfca.watch.run_source import RunSource

LABELS = ["dfca-auto", "dfca-auto, plain", "ifca"]
FACTS = {"name": "s", "founder": "a" * 52, "nonce": "0" * 32, "inputs": {"features": ["a"]}, "classes": ["x", "y"]}


def make_experiment(sweep: dict[str, Any] | None = None, **values: Any) -> Experiment:
    options = {"dfca-auto": {"warmup_steps": 5}, LABELS[1]: {"momentum": 0.0, "warmup_steps": 5}}
    config = TINY | {"algorithms": LABELS, "algorithm": options, "participation": 1.0} | values
    return Experiment("tiny", "default", Config.of(config), Sweep.of(sweep or {}))


def make_old(new: Path, out: Path) -> Path:
    """Copy a run folder as version 0.2 would have written it: everywhere `dfca`, also in the names of files."""
    for path in (path for path in sorted(new.rglob("*")) if path.is_file()):
        place = out / str(path.relative_to(new)).replace("dfca-auto", "dfca")
        place.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix in (".toml", ".json", ".jsonl"):
            place.write_text(path.read_text().replace("dfca-auto", "dfca"))
        else:
            shutil.copy(path, place)
    summary = json.loads((out / "summary.json").read_text())
    summary["config_sha256"] = text_sha256((out / "config.toml").read_text())
    (out / "summary.json").write_text(json.dumps(summary))
    return out


def lines_of(out: Path) -> list[dict[str, Any]]:
    lines = [{key: value for key, value in line.items() if key != "seconds"} for line in load_run(out).metrics]
    return sorted(lines, key=lambda line: (line["algorithm"], str(line.get("point")), line["round"]))


# Asking for it.


@pytest.mark.parametrize(
    "ask",
    [
        lambda: dfca.algorithms.get("dfca"),
        lambda: ALGORITHMS["dfca"],
        lambda: dfca.simulate(lambda: None, None, "dfca", rounds=1),
        lambda: dfca.simulate(lambda: None, None, ["dfca-gi", {"name": "dfca", "momentum": 0.5}], rounds=1),
        lambda: Config.of(TINY | {"algorithms": ["dfca"]}),
        lambda: Config.of(TINY | {"algorithms": ["dfca, plain"], "algorithm": {"dfca, plain": {}}}),
        lambda: Config.of(TINY | {"algorithm": {"dfca": {"level": 0.1}}}),
        lambda: Facts.checked(FACTS | {"algorithm": "dfca"}),
        lambda: read_world("FaultWorld(1, algorithm='dfca')"),
    ],
)
def test_who_asks_for_dfca_is_told_the_three_names(ask: Callable[[], object]) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(AMBIGUOUS)}$"):
        ask()
    assert all(f'"{name}"' in AMBIGUOUS for name in ("dfca-gi", "dfca-li", "dfca-auto"))


@pytest.mark.parametrize(
    "arguments",
    [
        "run quickstart --algorithms dfca",
        "run quickstart --algorithms dfca-gi,dfca",
        "run quickstart --set algorithm.dfca.level=0.1",
        "run mine.toml",
        "swarm quickstart --nodes 2 --algorithm dfca",
        "node init kitchen --data a.csv --label c --algorithm dfca",
        "node init kitchen --data a.csv --label c --agree algorithm=dfca",
        "export run --algorithm dfca",
        "replay run --algorithms dfca",
    ],
)
def test_so_is_the_command_line(arguments: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ran: Path) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.toml").write_text('clients = 4\nclusters = 2\nrounds = 1\nalgorithms = ["dfca"]\n')
    Path("a.csv").write_text("a,b,c\n" + "1,2,x\n3,4,y\n" * 10)
    Path("run").symlink_to(ran)
    result = CliRunner().invoke(app, arguments.split(), prog_name="dfca")
    said = " ".join(result.output.split()) or str(result.exception)
    assert AMBIGUOUS in said
    assert "Traceback" not in said
    assert result.exit_code != 0


def test_an_unknown_name_is_still_unknown() -> None:
    with pytest.raises(KeyError):
        ALGORITHMS["dfcaa"]
    assert "dfca" not in ALGORITHMS
    with pytest.raises(ConfigError, match="unknown algorithm"):
        dfca.algorithms.get("dfcaa")


def test_the_list_and_the_docstring_begin_with_which_is_which() -> None:
    first = CliRunner().invoke(app, ["list"], prog_name="dfca").output.splitlines()[0]
    assert first == "dfca-gi, dfca-li: the paper's DFCA; dfca-auto: ours, recommended"
    assert "the paper's DFCA" in " ".join((dfca.simulate.__doc__ or "").split()[:40])
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    assert "are the paper's DFCA; `dfca-auto` is ours, recommended" in "\n".join(readme.splitlines()[:10])


# Files that say it.


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "new"
    run(make_experiment(), out, save_models=True)
    return out


@pytest.fixture
def old(ran: Path, tmp_path: Path) -> Path:
    return make_old(ran, tmp_path / "old")


def test_digests_are_those_of_the_old_name() -> None:
    table = {"dfca-auto": {"level": 0.01}, LABELS[1]: {"momentum": 0.0}}
    config = make_experiment(algorithm=table).config
    numbers = config._numbers()
    assert numbers["algorithm"] == table
    numbers["algorithm"] = {"dfca": table["dfca-auto"], "dfca, plain": table[LABELS[1]]}
    assert config.digest() == text_sha256(json.dumps(numbers, sort_keys=True, separators=(",", ":")))


def test_an_old_folder_is_shown_by_todays_names(ran: Path, old: Path) -> None:
    assert lines_of(old) == lines_of(ran)
    stored = dfca.load_run(old)
    assert stored.algorithms == LABELS
    assert list(stored.config["algorithm"]) == LABELS[:2]
    for name in LABELS[:2]:
        assert stored.bank(0, algorithm=name).equal(dfca.load_run(ran).bank(0, algorithm=name))
        assert stored._models(stored._row(name, None, None)).facts["algorithm"] == name
    with pytest.raises(ConfigError, match=re.escape(AMBIGUOUS)):
        stored.model(0, algorithm="dfca")
    page = write_report(old).read_text()
    assert "dfca-auto, plain" in page
    assert page.count(">dfca<") == write_report(ran).read_text().count(">dfca<"), "that of the package's version"
    assert not re.search(r"dfca, plain|algorithm\.dfca\b(?!-)|(&#34;|&quot;|\")dfca(&#34;|&quot;|\")", page)
    source = RunSource(old)
    source.poll()
    assert list(source.whole()["algorithms"]) == LABELS
    assert repair(old) == []


def test_the_config_of_an_old_run_is_run_again_but_a_new_file_must_say_which(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(Path(__file__).parents[1] / "golden/0.2/runs/rounds", tmp_path / "old")
    monkeypatch.chdir(tmp_path)
    command = "run {} --out again --set rounds=1"
    result = CliRunner().invoke(app, command.format("old/config.toml").split(), prog_name="dfca")
    assert result.exit_code == 0, result.output
    labels = load_run(tmp_path / "again").config["algorithms"]
    assert "dfca-auto" in labels
    assert "dfca" not in labels
    assert "dfca-auto" in result.output
    Path("mine").mkdir()
    shutil.copy("old/config.toml", "mine/config.toml")
    result = CliRunner().invoke(app, command.format("mine/config.toml").split(), prog_name="dfca")
    assert AMBIGUOUS in " ".join(result.output.split()) or AMBIGUOUS in str(result.exception)
    assert result.exit_code != 0


def test_an_old_folder_is_repaired(old: Path) -> None:
    """The summary that is made anew belongs to config.toml as it is, with the old name."""
    (old / "summary.json").write_text("{")
    assert len(repair(old)) == 1
    assert dfca.load_run(old).algorithms == LABELS


def test_an_old_folder_is_continued_as_the_same_trials(old: Path, ran: Path) -> None:
    heard = Listener()
    run(make_experiment(), old, heard, save_models=True)
    assert heard.trials == [], "all is finished"
    before = sorted(path.name for path in (old / "metrics").iterdir())
    assert before == ["dfca, plain-0.jsonl", "dfca-0.jsonl", "ifca-0.jsonl"]
    run(make_experiment(seeds=[0, 1]), old, heard, save_models=True)
    assert heard.trials == [(name, 1, 0) for name in LABELS], "only the new seed"
    assert {path.name for path in (old / "metrics").iterdir()} == {
        *before, "dfca-auto-1.jsonl", "dfca-auto, plain-1.jsonl", "ifca-1.jsonl",
    }  # fmt: skip
    assert '"dfca"' not in (old / "config.toml").read_text()
    assert [line for line in lines_of(old) if line["seed"] == 0] == lines_of(ran)


def test_an_interrupted_old_trial_continues_from_its_checkpoint(ran: Path, tmp_path: Path) -> None:
    stopping = Listener(lambda round: signal.raise_signal(signal.SIGINT) if round == 3 else None)
    with pytest.raises(Interrupted):
        run(make_experiment(), tmp_path / "new", stopping, save_models=True)
    old, heard = make_old(tmp_path / "new", tmp_path / "old"), Listener()
    assert (old / "checkpoint" / "dfca-0").is_dir()
    run(make_experiment(), old, heard, save_models=True)
    assert heard.trials[0] == ("dfca-auto", 0, 3)
    assert lines_of(old) == lines_of(ran)


def test_a_sweep_over_an_option_of_it(tmp_path: Path) -> None:
    sweep = {"grid": {"algorithm.dfca-auto.support": [1, 2]}}
    experiment = make_experiment(sweep, algorithms=["dfca-auto"], algorithm={}, rounds=2)
    run(experiment, tmp_path / "new", workers=1)
    old, heard = make_old(tmp_path / "new", tmp_path / "old"), Listener()
    assert lines_of(old) == lines_of(tmp_path / "new")
    assert dfca.load_run(old).assignments["true_cluster"].notna().all()
    run(experiment, old, heard)
    assert heard.trials == []
    assert len(json.loads((old / "topology.json").read_text())) == 2
    config, stored = read_stored((tmp_path / "old" / "config.toml").read_text())
    assert [point.digest for point in stored.expand(config)] == [point.digest for point in experiment.points]


def test_an_old_trace_is_replayed(tmp_path: Path) -> None:
    run(make_experiment(algorithms=["dfca-auto"], algorithm={}, world={"trace": True}, rounds=2), tmp_path / "new")
    old = make_old(tmp_path / "new", tmp_path / "old")
    assert (old / "trace" / "dfca-0.jsonl").exists()
    assert [(result.trial.algorithm, result.difference) for result in replay_run(old)] == [("dfca-auto", "")]


def test_old_results_are_shown_by_todays_names(ran: Path, tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    save_results(report_of(ran), file)
    new = load_results(file)
    file.write_text(file.read_text().replace("dfca-auto", "dfca"))
    old = load_results(file)
    assert old == new | {"config_sha256": old["config_sha256"]}
    assert "| dfca-auto, plain |" in markdown(report_of(file))
    assert "| dfca |" not in markdown(report_of(file))
    committed = Path(__file__).parents[2] / "results" / "quickstart.json"
    assert "minus dfca-auto" in markdown(report_of(committed))


def test_a_swarm_keeps_its_bytes_and_its_id() -> None:
    facts = Facts.checked(FACTS)
    assert facts.algorithm == "dfca-auto"
    data = facts.to_bytes()
    assert b'"algorithm":"dfca"' in data, "as nodes of 0.2 write and read it"
    assert Facts.from_bytes(data) == facts
    assert Facts.from_bytes(data).make_algorithm().name == "dfca-auto"
    assert b'"algorithm":"dfca-fi"' in Facts.checked(FACTS | {"algorithm": "dfca-fi"}).to_bytes()
