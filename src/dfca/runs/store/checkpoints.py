"""Checkpoints of the trials under way: checkpoint/<trial>/round-000120.safetensors and round-000120.json beside it.

The JSON file (sidecar) is written last and holds the checksum of the tensors: a checkpoint counts once it is there.

    round     rounds done                     seconds   the trial has taken so far
    sha256    of the tensors                  facts     what else the simulation needs (`Simulation.state`)
    state     which kind of facts; 1 where it is missing, as in files of version 0.1
    check     SHA-256 of all the other keys as JSON; files of version 0.1 have none
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from dfca.base.files import Stream, atomic_save, atomic_write, read_text, sha256, text_sha256
from dfca.experiment.sweep import Trial
from dfca.sim.metrics_table import JsonObject

KEPT = 2  # checkpoints of a running trial: the last one and the one before, in case the disk spoils the last


@dataclass(frozen=True)
class Checkpoint:
    """The state of a trial after a round."""

    round: int
    seconds: float
    tensors: Mapping[str, Tensor]
    facts: JsonObject
    bank: Stream | None = None  # where it is not among the tensors
    state: int = 1  # version of tensors and facts; raised when a simulation cannot restore earlier ones


class Checkpoints:
    """The checkpoints of a run folder."""

    def __init__(self, run_folder: Path) -> None:
        self._run_folder = run_folder

    def save(self, trial: Trial, checkpoint: Checkpoint) -> None:
        """Store the state of a trial; the tensors first, then the sidecar that makes them count."""
        folder = self._folder(trial)
        stem = f"round-{checkpoint.round:06}"
        bank = {} if checkpoint.bank is None else {"bank": checkpoint.bank}
        digest = atomic_save(folder / f"{stem}.safetensors", {**checkpoint.tensors, **bank})
        sidecar = {
            "round": checkpoint.round,
            "seconds": checkpoint.seconds,
            "state": checkpoint.state,
            "sha256": digest,
            "facts": checkpoint.facts,
        }
        atomic_write(folder / f"{stem}.json", json.dumps(sidecar | {"check": _check(json.loads(json.dumps(sidecar)))}))
        for old in sorted(folder.glob("round-*.json"))[:-KEPT]:
            old.unlink()
            old.with_suffix(".safetensors").unlink(missing_ok=True)

    def latest(self, trial: Trial, state: int = 1) -> tuple[Checkpoint | None, list[str]]:
        """Load the last good checkpoint of a trial with that version of its state, and say which ones were not good."""
        warnings: list[str] = []
        for sidecar in sorted(self._folder(trial).glob("round-*.json"), reverse=True):
            name = f"checkpoint {sidecar.relative_to(self._run_folder).with_suffix('')}"
            try:
                checkpoint = _load(sidecar)
            except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, SafetensorError) as error:
                reason = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
                warnings.append(f"{name} is damaged ({reason}) and is not used")
                continue
            if checkpoint.state == state:
                return checkpoint, warnings
            other = f"state {checkpoint.state}, this one reads {state}"
            warnings.append(f"{name} is of another version of dfca ({other}) and is not used")
        return None, warnings

    def forget(self, trial: Trial) -> None:
        shutil.rmtree(self._folder(trial), ignore_errors=True)

    def any(self) -> bool:
        return any(self._run_folder.glob("checkpoint/*/round-*.json"))

    def _folder(self, trial: Trial) -> Path:
        return trial.file(self._run_folder / "checkpoint")


def _load(sidecar: Path) -> Checkpoint:
    stored = json.loads(read_text(sidecar))
    if "check" in stored and stored.pop("check") != _check(stored):
        raise ValueError("its JSON was changed or cut off")
    if type(stored["round"]) is not int or type(stored["seconds"]) not in (int, float):
        raise ValueError("its round or its seconds are no numbers")
    if not isinstance(stored["facts"], dict):
        raise ValueError("its facts are no table")
    path = sidecar.with_suffix(".safetensors")
    if sha256(path) != stored["sha256"]:
        raise ValueError("its checksum does not fit")
    return Checkpoint(
        round=stored["round"],
        seconds=stored["seconds"],
        tensors=load_file(path),
        facts=stored["facts"],
        state=stored.get("state", 1),
    )


def _check(sidecar: JsonObject) -> str:
    return text_sha256(json.dumps(sidecar, sort_keys=True))
