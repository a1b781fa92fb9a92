"""Files of released versions are read, continued and written as they were: runs, facts, saves, nodes, frames.

`make.py` says what is stored, and how a new version is added. A test that fails here has found a change that users of
the version would notice; the stored files are never changed to make it pass.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from golden_cases import RUNS, VERSIONS, differences, digests, facts_of, plain, run_node

from dfca.base.files import text_sha256
from dfca.base.renamed import current
from dfca.experiment.load import Experiment, read_stored
from dfca.node.disk.folder import NodeFolder
from dfca.node.disk.save_file import last_save
from dfca.node.disk.store import DiskStore, read_save
from dfca.node.operate.commands import predict_file
from dfca.node.operate.status import read_status
from dfca.node.task.facts import Facts
from dfca.node.wire import codec, frames, payload
from dfca.node.wire.frames import Refused
from dfca.report.page import write_report
from dfca.runs.runner import run
from dfca.runs.sink import NullSink
from dfca.runs.store.reading import load_run

LAST_DIGITS = 1e-6
"""Runs compute in float32, and processors round differently."""
SURVEYED = ("Question", "Answer")
"""Messages of surveys that were others in 0.2: they are refused, and no survey ends while a swarm is being upgraded."""

pytestmark = pytest.mark.parametrize("version", VERSIONS, ids=lambda path: path.name)


def read(path: Path) -> Any:
    return json.loads(path.read_text())


# Runs.


class Begun(NullSink):
    """Record which trials are run, and from which round on."""

    def __init__(self) -> None:
        self.trials: list[tuple[str, int]] = []

    def start_trial(self, trial: Any, round: int, time_s: float = 0.0) -> None:
        self.trials.append((trial.algorithm, round))


def copy_run(stored: Path, out: Path) -> Experiment:
    shutil.copytree(stored, out)
    config, sweep = read_stored((out / "config.toml").read_text())
    return Experiment(read(out / "summary.json")["experiment"], "default", config, sweep)


def name_of(path: Path) -> str:
    """Return the name of a trial by the name that its algorithm has today."""
    algorithm, _, seed = path.stem.rpartition("-")
    return f"{current(algorithm)}-{seed}"


def numbers(out: Path) -> Any:
    """Return all that a run has computed, without the seconds that it took."""
    stored = load_run(out)
    lines = [{key: value for key, value in line.items() if key != "seconds"} for line in stored.metrics]
    rows = [{key: value for key, value in row.items() if key != "seconds"} for row in stored.trials]
    order = sorted(lines, key=lambda line: (line["algorithm"], line["seed"], line["round"]))
    traces = {name_of(path): path.read_text().splitlines() for path in sorted(out.glob("trace/*.jsonl"))}
    parsed = {name: [json.loads(line) for line in trace] for name, trace in traces.items()}
    lanes = {name_of(path): read(path) for path in sorted(out.glob("timeline/*.json"))}
    text = (out / "config.toml").read_text()
    assert stored.head["config_sha256"] == text_sha256(text)
    head = {"config_sha256": text_sha256(text.replace('"dfca"', '"dfca-auto"')), "digest": stored.head["digest"]}
    return {"head": head, "lines": order, "rows": rows, "graphs": stored.topology, "traces": parsed, "lanes": lanes}


def merges(row: Any) -> bool:
    """Return whether clusters are merged in a trial by rounds."""
    return bool(row["algorithm"] == "dfca-auto")


@pytest.mark.parametrize("name", RUNS)
def test_a_finished_run_is_read_reported_and_reused_as_it_is(version: Path, name: str, tmp_path: Path) -> None:
    out, begun = tmp_path / "run", Begun()
    experiment = copy_run(version / "runs" / name, out)
    before = numbers(out)
    assert [row["algorithm"] for row in before["rows"] if row["finished"]] == list(experiment.config.algorithms)
    page = write_report(out).read_text()
    assert all(algorithm in page for algorithm in experiment.config.algorithms)
    run(experiment, out, begun)
    run(experiment, tmp_path / "new", begun, reuse=[version / "runs" / name])
    assert begun.trials == []
    assert numbers(out) == before
    reused = numbers(tmp_path / "new")
    assert [reused[key] for key in ("lines", "rows")] == [before[key] for key in ("lines", "rows")]


@pytest.mark.parametrize("name", RUNS)
def test_an_interrupted_run_ends_with_the_numbers_of_an_unbroken_one(version: Path, name: str, tmp_path: Path) -> None:
    out, begun = tmp_path / "run", Begun()
    experiment = copy_run(version / "runs" / f"{name}-interrupted", out)
    assert list(out.glob("checkpoint/*/*.safetensors"))
    write_report(out)
    run(experiment, out, begun)
    first, *others = begun.trials
    assert first[1] > 0, "it continues from the checkpoint"
    assert [round for _, round in others] == [0] * len(others)
    run(copy_run(version / "runs" / name, tmp_path / "old"), tmp_path / "unbroken")
    unbroken, resumed = numbers(tmp_path / "unbroken"), numbers(out)
    for key in ("lines", "rows"):  # an earlier version held the first surveys of dfca-auto
        unbroken[key], resumed[key] = ([row for row in part[key] if not merges(row)] for part in (unbroken, resumed))
    assert differences(unbroken, resumed, LAST_DIGITS) == []


@pytest.mark.parametrize("name", RUNS)
def test_a_new_run_of_a_stored_config_computes_the_same(version: Path, name: str, tmp_path: Path) -> None:
    run(copy_run(version / "runs" / name, tmp_path / "old"), tmp_path / "new")
    before, now = numbers(version / "runs" / name), numbers(tmp_path / "new")
    for key in ("lines", "rows"):  # dfca-auto merges clusters by other surveys since 0.3
        before[key], now[key] = ([row for row in part[key] if not merges(row)] for part in (before, now))
    for key in before.keys() & {"traces", "lanes"}:  # and measures its curve beside the rounds
        before[key], now[key] = (
            {trial: lines for trial, lines in part[key].items() if "auto" not in trial} for part in (before, now)
        )
    assert differences(before, now, LAST_DIGITS) == []


def test_digests_of_presets(version: Path) -> None:
    stored = read(version / "digests.json")
    stored = {key: value for key, value in stored.items() if not key.endswith(" bridge")}  # in 0.3 the scale is `hour`
    assert differences(stored, {key: value for key, value in digests().items() if key in stored}) == []


# Facts.


def test_facts_keep_their_bytes_and_the_swarm_its_id(version: Path, tmp_path: Path) -> None:
    made = facts_of(tmp_path)
    for name, swarm in read(version / "facts.json").items():
        data = (version / "facts" / f"{name}.json").read_bytes()
        facts = Facts.from_bytes(data)
        assert facts.swarm_id == swarm, name
        assert facts.to_bytes() == data, name
        assert made[name].to_bytes() == data, f"{name}: what is not said has another default"


# Saves and nodes.


def test_saves_come_back_field_by_field(version: Path, tmp_path: Path) -> None:
    folders = [path for path in (version / "saves").iterdir() if path.is_dir()]
    assert len(folders) == 4
    for folder in folders:
        held = read(folder.with_suffix(".json"))
        assert sorted(held) == sorted(path.name for path in folder.iterdir())
        for name, fields in held.items():
            saved = plain(read_save(folder / name)[1])
            assert differences(fields, {key: saved[key] for key in fields if key in saved}) == [], (folder.name, name)
        newest = DiskStore(folder).load()
        assert newest is not None
        assert differences(list(held.values())[-1], plain(newest)) == []
        again = DiskStore(tmp_path / folder.name)
        again.save(newest)
        assert differences(plain(newest), plain(DiskStore(tmp_path / folder.name).load())) == []


@pytest.fixture
def node(version: Path, tmp_path: Path) -> Path:
    out = tmp_path / "node"
    shutil.copytree(version / "node", out)
    (out / "key.pem").chmod(0o600)  # git does not keep it
    return out


def test_a_node_shows_its_status_and_predicts(version: Path, node: Path) -> None:
    held = read(version / "node.json")
    folder = NodeFolder.load(node)
    assert folder.facts.to_bytes() == (version / "node" / "facts.json").read_bytes()
    status = read_status(node)
    assert (status["running"], status["name"], status["id"]) == (False, "golden", folder.identity.id)
    assert (last_save(node / "state") or {})["round"] == held["round"]
    text, model = predict_file(node, str(node / "samples.csv"))
    assert model.round == held["round"]
    now, stored = ([line.split(",") for line in lines] for lines in (text.splitlines(), held["predictions"]))
    assert [line[:2] for line in now] == [line[:2] for line in stored]
    assert [float(line[2]) for line in now[1:]] == pytest.approx([float(line[2]) for line in stored[1:]], abs=1e-3)


def test_a_node_continues_after_a_restart(version: Path, node: Path) -> None:
    held = read(version / "node.json")
    before = read(node / "state" / "life.json")["incarnation"]
    status = run_node(node, 2)
    assert status["incarnation"] == before + 1
    assert status["round"] >= held["round"] + 2
    assert status["problems"] == []


# The wire.


def test_messages_keep_their_bytes(version: Path) -> None:
    for name, text, model in read(version / "wire.json")["messages"]:
        if version.name == "0.2" and name in SURVEYED:
            with pytest.raises(Refused, match=f"{name} with a value that it cannot have"):
                codec.decode(bytes.fromhex(text)).message(None)
            continue
        decoded = codec.decode(bytes.fromhex(text))
        assert decoded.kind.__name__ == name
        assert decoded.needs_model == (model is not None)
        sent = None if model is None else torch.tensor(model)
        data, carried = codec.encode(decoded.message(sent))
        assert data.hex() == text or (version.name, name) == ("0.2", "Count"), name  # it counted followers
        assert (carried is None and sent is None) or torch.equal(carried, sent), name


def test_frames_keep_their_bytes(version: Path) -> None:
    for kind, text in read(version / "wire.json")["frames"]:
        frame = frames.parse(bytes.fromhex(text))
        assert frame.WhichOneof("kind") == kind
        assert frame.SerializeToString(deterministic=True).hex() == text, kind


def test_payloads_keep_their_bytes(version: Path) -> None:
    stored = read(version / "wire.json")
    bank = torch.tensor(stored["bank"])
    for encoding, compressed, text, models in stored["payloads"]:
        data = bytes.fromhex(text)
        dtype = torch.float64 if encoding == "float64" else torch.float32
        assert payload.unpack(data, payload.Expect(32, dtype, 2, encoding)).tolist() == models, encoding
        if not compressed:  # those depend on the version of zstandard
            assert payload.pack(bank, encoding, False) == data, encoding
