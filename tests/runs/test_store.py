"""Run folders: whole files, refused strangers, checkpoints that fall back, metrics that rewind."""

from __future__ import annotations

import errno
import json
import os
import resource
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dfca.base import files as disk
from dfca.base.errors import RunError
from dfca.base.files import append_line, atomic_save, atomic_write, sha256
from dfca.experiment.config import Config
from dfca.experiment.load import Experiment, read_stored
from dfca.experiment.sweep import Point, Trial
from dfca.runs.store.checkpoints import Checkpoint
from dfca.runs.store.folder import FORM, LOCK, RunFolder
from dfca.runs.store.metrics import read_metrics


def experiment(**values: Any) -> Experiment:
    small = {"clients": 8, "clusters": 2, "rounds": 3, "algorithms": ["local"]}
    return Experiment("tiny", "default", Config.of(small | values))


def local(seed: int = 0) -> Trial:
    return Trial("local", seed, Point(experiment().config))


def checkpoint(round: int) -> Checkpoint:
    return Checkpoint(round, 1.5, {"bank": torch.full((2, 8, 5), float(round))}, {"round": round, "note": [1, None]})


@pytest.fixture
def folder(tmp_path: Path) -> Any:
    with RunFolder.open_(tmp_path / "run", experiment()) as opened:
        yield opened


# --- files


def test_a_file_is_replaced_whole_and_leaves_nothing_beside(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "a.json"
    atomic_write(path, "old")
    atomic_write(path, b"new")
    assert path.read_bytes() == b"new"
    assert [entry.name for entry in path.parent.iterdir()] == ["a.json"]


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_full_disk_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    path = tmp_path / "summary.json"
    atomic_write(path, "old")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(disk.os, step, full)
    with pytest.raises(RunError) as caught:
        atomic_write(path, "new")
    assert str(caught.value) == (
        f"no space left for summary.json in {tmp_path} (No space left on device); finished work is kept: free some "
        "space and run the same command again, or use --out for another disk"
    )
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["summary.json"]


def test_a_disk_that_fills_up_in_the_middle_of_a_checkpoint_keeps_the_one_before(tmp_path: Path) -> None:
    """A limit on the size of files makes the system itself refuse the write, for root too."""
    path = tmp_path / "round-000001.safetensors"
    atomic_save(path, {"bank": torch.zeros(10)})
    before = sha256(path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(RunError, match=r"^no space left for round-000001.safetensors in .* \(File too large\);"):
            atomic_save(path, {"bank": torch.zeros(100_000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert sha256(path) == before
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


def test_a_file_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("a file where a folder should be")
    with pytest.raises(RunError, match=r"^cannot write b.json in .*/a: .*; finished work is kept: make the folder wri"):
        atomic_write(tmp_path / "a" / "b.json", "x")


def test_tensors_that_are_views_are_stored_too(tmp_path: Path) -> None:
    whole = torch.arange(12.0).view(3, 4)
    atomic_save(tmp_path / "views.safetensors", {"column": whole[:, 1], "row": whole[1]})
    from safetensors.torch import load_file

    loaded = load_file(tmp_path / "views.safetensors")
    assert torch.equal(loaded["column"], whole[:, 1])
    assert torch.equal(loaded["row"], whole[1])


# --- whose folder it is


def test_the_folder_holds_the_config_and_an_empty_summary(folder: RunFolder) -> None:
    assert read_stored((folder.path / "config.toml").read_text())[0] == experiment().config
    summary = folder.summary()
    assert (summary["experiment"], summary["scale"], summary["runs"]) == ("tiny", "default", [])


def test_another_config_is_refused_with_its_keys_and_ways_out(folder: RunFolder) -> None:
    folder.checkpoints.save(local(), checkpoint(1))
    folder.close()
    with pytest.raises(RunError) as caught:
        RunFolder.open_(folder.path, experiment(rounds=5, topology={"p": 0.7}))
    assert str(caught.value) == (
        f"{folder.path} holds a run of another config: rounds is 3 there and 5 here, topology.p is 0.1 there and 0.7 "
        "here; use --out for another folder, or --no-resume to discard this one"
    )


def test_a_run_that_never_began_makes_room_for_another_config(folder: RunFolder) -> None:
    folder.close()
    with RunFolder.open_(folder.path, experiment(rounds=5)) as again:
        assert read_stored((again.path / "config.toml").read_text())[0].rounds == 5
        assert again.summary()["digest"] == experiment(rounds=5).config.digest()


def test_more_algorithms_and_seeds_extend_the_folder(folder: RunFolder) -> None:
    folder.finish(local(), {"algorithm": "local", "seed": 0, "finished": True})
    folder.close()
    with RunFolder.open_(folder.path, experiment(algorithms=["ifca"], seeds=[2, 0])) as again:
        stored = read_stored((again.path / "config.toml").read_text())[0]
        assert stored.algorithms == ("local", "ifca")
        assert stored.seeds == (0, 2)
        assert [row["algorithm"] for row in again.rows()] == ["local"]


def test_starting_afresh_discards_the_run_and_nothing_else(folder: RunFolder) -> None:
    folder.finish(local(), {"algorithm": "local", "seed": 0, "finished": True})
    folder.checkpoints.save(local(1), checkpoint(1))
    (folder.path / "my-notes.txt").write_text("mine")
    folder.close()
    with RunFolder.open_(folder.path, experiment(rounds=9), resume=False) as again:
        assert again.rows() == []
        assert again.checkpoints.latest(local(1)) == (None, [])
        assert (again.path / "my-notes.txt").exists()


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    (tmp_path / ".thesis.tmp").write_text("and of nights")
    for resume in (True, False):
        with pytest.raises(RunError, match=r"not empty and not a run folder \(it has .thesis.tmp but no config.toml\)"):
            RunFolder.open_(tmp_path, experiment(), resume)
    with pytest.raises(RunError, match=r"thesis.tex is a file, not a folder; use --out for another place$"):
        RunFolder.open_(tmp_path / "thesis.tex", experiment())
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [".thesis.tmp", "thesis.tex"]


def test_a_folder_in_use_is_refused_and_free_after_a_kill(tmp_path: Path) -> None:
    """The other process holds the lock as dfca does, without the seconds that it takes to load torch."""
    script = (
        "import os, sys, time; from pathlib import Path; from filelock import FileLock\n"
        "path = Path(sys.argv[1]); lock = FileLock(path); lock.acquire(timeout=0)\n"
        "path.write_text(f'process {os.getpid()}'); print('locked', flush=True); time.sleep(60)"
    )
    command = [sys.executable, "-c", script, str(tmp_path / LOCK)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "locked\n"
        for _ in range(2):  # a refused process changes nothing
            with pytest.raises(RunError) as caught:
                RunFolder.open_(tmp_path, experiment())
            assert str(caught.value) == (
                f"{tmp_path} is in use by another dfca process (process {other.pid}); wait for it, stop it, or use "
                "--out for another folder"
            )
        assert sorted(entry.name for entry in tmp_path.iterdir()) == [LOCK]
        other.kill()
        other.wait()
    RunFolder.open_(tmp_path, experiment()).close()


def test_the_lock_is_held_until_close_and_its_file_stays(folder: RunFolder) -> None:
    """A lock file that is deleted lets one process hold the deleted file and another one its successor."""
    lock = folder.path / LOCK
    assert lock.read_text() == f"process {os.getpid()}"
    inode = lock.stat().st_ino
    with pytest.raises(RunError, match=rf"in use by another dfca process \(process {os.getpid()}\)"):
        RunFolder.open_(folder.path, experiment())
    folder.close()
    assert lock.stat().st_ino == inode
    with RunFolder.open_(folder.path, experiment()) as again:
        assert lock.stat().st_ino == inode
        with pytest.raises(RunError, match="in use by another dfca process"):
            RunFolder.open_(again.path, experiment())


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("summary.json", "{", r"summary.json is not valid JSON .*; restore it, or `dfca repair .*run` moves it aside$"),
        ("summary.json", "[]", r"summary.json must hold a JSON object, got list; restore it, or `dfca repair .*run` m"),
        (
            "summary.json",
            f'{{"form": {FORM + 1}, "runs": []}}',
            rf"newer version of dfca \(form {FORM + 1}, this one reads 1 to {FORM}\); use that version \(unknown\), or",
        ),
        ("summary.json", "{}", r'summary.json has no list "runs" of rows; restore it, or `dfca repair .*run` moves'),
        (
            "config.toml",
            "rounds = 3",
            r"config.toml cannot be used: 3 problems: .1. clients is missing; .*; use --out for another f",
        ),
    ],
)
def test_a_spoilt_file_is_told(folder: RunFolder, name: str, text: str, sentence: str) -> None:
    folder.close()
    (folder.path / name).write_text(text)
    with pytest.raises(RunError, match=sentence):
        RunFolder.open_(folder.path, experiment())


# --- metrics


def test_metrics_rewind_one_trial_and_keep_the_others(folder: RunFolder) -> None:
    for seed in (0, 1):
        for round in (1, 2, 3):
            folder.metrics.append(local(seed), {"round": round, "accuracy": 0.1 * round})
    folder.metrics.rewind(local(), 1)
    assert [(line["seed"], line["round"]) for line in read_metrics(folder.path)] == [(0, 1), (1, 1), (1, 2), (1, 3)]
    assert read_metrics(folder.path)[-1]["accuracy"] == 0.1 * 3


@pytest.mark.parametrize("torn", ['{"algorithm":"local","se', '{"round":3}', "\0\0\0", '{"a":"\xff'])
def test_a_torn_last_line_is_dropped(folder: RunFolder, torn: str) -> None:
    folder.metrics.append(local(), {"round": 1})
    with open(folder.path / "metrics" / "local-0.jsonl", "ab") as file:
        file.write(torn.encode("latin-1").replace(b'{"round":3}', b'{"algorithm":"local","seed":0,"round":3}'))
    folder.metrics.rewind(local(), 2)
    folder.metrics.append(local(), {"round": 2})
    lines = (folder.path / "metrics" / "local-0.jsonl").read_text().splitlines()
    assert [json.loads(line)["round"] for line in lines] == [1, 2]


def test_a_spoilt_line_in_the_middle_is_told(folder: RunFolder) -> None:
    folder.metrics.append(local(), {"round": 1})
    with open(folder.path / "metrics" / "local-0.jsonl", "a") as file:
        file.write('nonsense\n{"round": 2}\n')
    sentence = (
        r"local-0.jsonl, line 2, is not a line of metrics; restore the file, or `dfca repair .*run` moves it aside and"
    )
    with pytest.raises(RunError, match=sentence):
        read_metrics(folder.path)
    with pytest.raises(RunError, match=sentence):
        folder.metrics.rewind(local(), 1)


def test_json_has_no_nan(folder: RunFolder) -> None:
    folder.metrics.append(local(), {"round": 1, "train_loss": float("nan"), "list": [float("inf"), 1.0]})
    assert "NaN" not in (folder.path / "metrics" / "local-0.jsonl").read_text()
    assert read_metrics(folder.path)[0]["train_loss"] is None
    assert read_metrics(folder.path)[0]["list"] == [None, 1.0]


# --- checkpoints


def test_the_last_two_checkpoints_stay(folder: RunFolder) -> None:
    for round in (5, 10, 15):
        folder.checkpoints.save(local(), checkpoint(round))
    names = sorted(entry.name for entry in (folder.path / "checkpoint" / "local-0").iterdir())
    stems = ("round-000010", "round-000015")
    assert names == sorted(f"{stem}.{suffix}" for stem in stems for suffix in ("json", "safetensors"))
    latest, warnings = folder.checkpoints.latest(local())
    assert latest is not None
    assert (latest.round, latest.seconds, latest.facts) == (15, 1.5, {"round": 15, "note": [1, None]})
    assert torch.equal(latest.tensors["bank"], checkpoint(15).tensors["bank"])
    assert warnings == []


def test_a_damaged_checkpoint_gives_way_to_the_one_before(folder: RunFolder) -> None:
    for round in (5, 10):
        folder.checkpoints.save(local(), checkpoint(round))
    last = folder.path / "checkpoint" / "local-0" / "round-000010.safetensors"
    os.truncate(last, last.stat().st_size - 1)
    latest, warnings = folder.checkpoints.latest(local())
    assert latest is not None
    assert latest.round == 5
    assert warnings == [
        "checkpoint checkpoint/local-0/round-000010 is damaged (its checksum does not fit) and is not used"
    ]
    (last.parent / "round-000005.json").write_text("{")
    latest, warnings = folder.checkpoints.latest(local())
    assert latest is None
    assert len(warnings) == 2


def test_a_sidecar_that_is_cut_off_in_the_middle_leaves_the_one_before(folder: RunFolder) -> None:
    """A limit on the size of files makes the system refuse the rest of the sidecar; its tensors fit."""
    folder.checkpoints.save(local(), checkpoint(5))
    before = {path.name: path.read_bytes() for path in (folder.path / "checkpoint" / "local-0").iterdir()}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    for round in (5, 10):
        large = replace(checkpoint(round), facts={"round": round, "note": "x" * 100_000})
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))
        try:
            with pytest.raises(RunError, match=rf"^no space left for round-{round:06}.json in .* \(File too large\);"):
                folder.checkpoints.save(local(), large)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        latest, warnings = folder.checkpoints.latest(local())
        assert latest is not None
        assert (latest.round, warnings) == (5, [])
    after = {path.name: path.read_bytes() for path in (folder.path / "checkpoint" / "local-0").iterdir()}
    assert before.items() <= after.items()
    assert after.keys() - before.keys() == {"round-000010.safetensors"}


def test_a_checkpoint_of_another_version_of_the_state_is_not_used(folder: RunFolder) -> None:
    folder.checkpoints.save(local(), replace(checkpoint(5), state=2))
    latest, warnings = folder.checkpoints.latest(local(), state=2)
    assert latest is not None
    assert (latest.state, warnings) == (2, [])
    assert folder.checkpoints.latest(local(), state=1) == (
        None,
        [
            "checkpoint checkpoint/local-0/round-000005 is of another version of dfca (state 2, this one reads 1) and "
            "is not used"
        ],
    )
    sidecar = folder.path / "checkpoint" / "local-0" / "round-000005.json"
    stored = json.loads(sidecar.read_text())
    del stored["state"], stored["check"]  # as version 0.1 wrote it
    sidecar.write_text(json.dumps(stored))
    assert folder.checkpoints.latest(local(), state=1)[0] is not None


def test_tensors_without_facts_do_not_count(folder: RunFolder) -> None:
    folder.checkpoints.save(local(), checkpoint(5))
    (folder.path / "checkpoint" / "local-0" / "round-000010.safetensors").write_bytes(b"killed before the facts")
    latest, _ = folder.checkpoints.latest(local())
    assert latest is not None
    assert latest.round == 5


def test_a_finished_trial_has_a_row_and_no_checkpoint(folder: RunFolder) -> None:
    folder.checkpoints.save(local(), checkpoint(5))
    folder.finish(local(), {"algorithm": "local", "seed": 0, "finished": True})
    assert not (folder.path / "checkpoint" / "local-0").exists()
    assert folder.rows() == [{"algorithm": "local", "seed": 0, "finished": True, "lines": 0}]


def test_temporary_files_of_a_killed_process_go(folder: RunFolder) -> None:
    folder.checkpoints.save(local(), checkpoint(5))
    folder.close()
    leftover = folder.path / "checkpoint" / "local-0" / ".round-000010.safetensors.tmp"
    leftover.write_bytes(b"half")
    with RunFolder.open_(folder.path, experiment()):
        assert not leftover.exists()


# --- the rest


def test_a_changed_environment_is_told_and_the_old_one_kept(folder: RunFolder) -> None:
    assert folder.store_environment({"torch": "1", "cpus": 2}) == []
    assert folder.store_environment({"torch": "1", "cpus": 2}) == []
    assert folder.store_environment({"torch": "2", "cpus": 2}) == ["torch 1 -> 2"]
    stored = json.loads((folder.path / "environment.json").read_text())
    assert stored == {"torch": "2", "cpus": 2, "earlier": [{"torch": "1", "cpus": 2}]}


# --- other people's files


def test_no_resume_discards_only_what_carries_our_mark(tmp_path: Path) -> None:
    path = tmp_path / "somebody"
    (path / "checkpoint").mkdir(parents=True)
    (path / "checkpoint" / "weights.bin").write_text("precious")
    (path / "config.toml").write_text('[project]\nname = "not an experiment"\n')
    with pytest.raises(RunError, match=r"is not a run folder of dfca .*, so --no-resume does not empty it; use --out"):
        RunFolder.open_(path, experiment(), resume=False)
    assert (path / "checkpoint" / "weights.bin").read_text() == "precious"
    assert sorted(entry.name for entry in path.iterdir()) == ["checkpoint", "config.toml"]


def test_a_run_folder_with_a_spoilt_config_can_still_be_discarded(folder: RunFolder) -> None:
    folder.close()
    (folder.path / "config.toml").write_text("rounds = [")
    RunFolder.open_(folder.path, experiment(), resume=False).close()
    assert read_stored((folder.path / "config.toml").read_text())[0] == experiment().config


@pytest.mark.parametrize("name", [".lock", "summary.json", "metrics", "config.toml"])
def test_a_run_writes_to_no_link(folder: RunFolder, name: str, tmp_path: Path) -> None:
    folder.close()
    target = tmp_path / "elsewhere"
    if name == "metrics":
        target.mkdir()
        (folder.path / name).rmdir()
    else:
        target.write_text((folder.path / name).read_text())
        (folder.path / name).unlink()
    (folder.path / name).symlink_to(target)
    before = None if target.is_dir() else target.read_text()
    with pytest.raises(RunError, match=r"is a link"):
        RunFolder.open_(folder.path, experiment(), resume=False)
    assert target.is_dir() or target.read_text() == before


def test_a_temporary_file_never_follows_a_link(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_text("precious")
    (tmp_path / f".report.html.{os.getpid()}.tmp").symlink_to(target)
    atomic_write(tmp_path / "report.html", "new")
    assert (target.read_text(), (tmp_path / "report.html").read_text()) == ("precious", "new")
    (tmp_path / "log").symlink_to(target)
    with pytest.raises(RunError, match="cannot write log"):
        append_line(tmp_path / "log", "line")
    assert target.read_text() == "precious"


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text[: len(text) // 2],
        lambda text: text.replace('"round": 2', '"round": 3'),
        lambda text: "[1, 2]",
        lambda text: "null",
        lambda text: "[" * 100_000,
        lambda text: json.dumps({key: value for key, value in json.loads(text).items() if key != "facts"}),
        lambda text: json.dumps(json.loads(text) | {"facts": 3}),
    ],
)
def test_a_malformed_sidecar_falls_back_to_the_older_checkpoint(folder: RunFolder, change: Any) -> None:
    trial = local()
    for round in (1, 2):
        facts = {"a": {1: 0.1}, "b": [round]}
        folder.checkpoints.save(trial, Checkpoint(round, 0.5, {"bank": torch.zeros(2)}, facts))
    sidecar = folder.path / "checkpoint" / trial.name / "round-000002.json"
    sidecar.write_text(change(sidecar.read_text()))
    latest, warnings = folder.checkpoints.latest(trial)
    assert latest is not None
    assert (latest.round, latest.facts) == (1, {"a": {"1": 0.1}, "b": [1]})
    assert len(warnings) == 1
    assert "is damaged" in warnings[0]
