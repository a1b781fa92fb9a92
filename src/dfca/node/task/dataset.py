"""The samples of a device as its model sees them: matched with the swarm's facts, scaled, some held out, read again.

Which samples are held out depends on their content alone (a hash), so that old samples keep their side while data
grows, and two equal samples never stand on both sides.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dfca.base.errors import DataError, DfcaError
from dfca.node.task.config import NodeConfig
from dfca.node.task.csv_table import listed
from dfca.node.task.facts import Facts, InputFacts
from dfca.node.task.reading import DataRequest, Raw, read
from dfca.node.task.scaling import CLIP, Scaling

Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class DeviceSamples:
    """Scaled samples, ready to train and to score with: x (n, *shape) float32 and y (n,) int64 of each part;
    tokens are int64; numbers to predict are float32, scaled too, and several labels (n, labels) are 0 or 1."""

    train: Pair
    held_out: Pair
    dropped: int = 0

    def to(self, device: str) -> DeviceSamples:
        """Move everything to a device."""
        train, held_out = ((x.to(device), y.to(device)) for x, y in (self.train, self.held_out))
        return DeviceSamples(train, held_out, self.dropped)


def problems(raw: Raw, facts: Facts) -> list[str]:
    """List everything about samples that does not fit a swarm, each with its cure."""
    reasons = _input_problems(raw, facts)
    if facts.task == "multilabel" and raw.targets is not None and raw.targets.shape[1] != len(facts.classes):
        reasons.append(
            f"{raw.targets.shape[1]} labels ({listed(raw.target_names)}) are not the swarm's {len(facts.classes)}, "
            f"{listed(facts.classes)}: name these, in this order, by --label or data.label"
        )
    if facts.task == "forecasting" and len(raw.x) < facts.inputs.window:
        reasons.append(
            f"{len(raw.x)} rows are too few: a forecast looks at {facts.inputs.window} of them, without a gap"
        )
    if raw.labels is not None:
        unknown = sorted(set(raw.labels) - set(facts.classes))
        if unknown:
            reasons.append(
                f'{"class" if len(unknown) == 1 else "classes"} {listed(unknown)} in "{facts.label}" '
                f"{'is' if len(unknown) == 1 else 'are'} not of the swarm, which knows {listed(facts.classes)}: "
                "correct the labels, remove these samples, or found a new swarm"
            )
    return reasons


def _input_problems(raw: Raw, facts: Facts) -> list[str]:
    inputs = facts.inputs
    if inputs.features or inputs.kind == "series":
        if raw.names is None:
            return [
                f"the swarm's samples are named columns ({listed(inputs.features)}) and these have no names: add "
                'an array "features" with their names, or list them in data.features'
            ]
        here, known = set(raw.names), {*inputs.features, *inputs.ignored}
        missing = [name for name in inputs.features if name not in here]
        more = [name for name in raw.names if name not in known]
        reasons = []
        if missing:
            reasons.append(f"column {listed(missing)} is missing: the swarm's model needs it; add it, or rename one")
        if more:
            reasons.append(f"column {listed(more)} is not one of the swarm's: remove it, or name it in data.ignore")
        return reasons
    if raw.names is not None:
        return [f"these samples are columns ({listed(raw.names)}) and the swarm's are arrays of shape {inputs.shape}"]
    if raw.x.shape[1:] != inputs.shape:
        return [f"samples have shape {raw.x.shape[1:]} and the swarm's {inputs.shape}: bring them to that shape"]
    if raw.kind != inputs.kind:
        return [f"samples are {_kind(raw.kind)} and the swarm's {_kind(inputs.kind)}: bring them to that form"]
    return []


def _kind(kind: str) -> str:
    return {"images": "images of bytes (uint8)", "tokens": "tokens"}.get(kind, "arrays of numbers")


def matched(raw: Raw, inputs: InputFacts) -> np.ndarray:
    """Return x (n, *shape) with the columns in the swarm's order; the samples must fit.

    Of a series, a sample is a window: the last `window` values of the target, then of each feature, at every row
    that has as many before it.
    """
    x = raw.x
    if raw.names is not None and raw.names != inputs.features:
        place = {name: i for i, name in enumerate(raw.names)}
        x = x[:, [place[name] for name in inputs.features]]
    if inputs.kind != "series" or raw.targets is None:
        return x
    return np.lib.stride_tricks.sliding_window_view(np.concatenate([raw.targets, x], axis=1), inputs.window, axis=0)


def held_out_rows(x: np.ndarray, share: float) -> np.ndarray:
    """Say which samples x (n, *shape) are held out, (n,) bool: those whose hash lies in the first `share`."""
    if share <= 0:
        return np.zeros(len(x), dtype=bool)
    rows = np.ascontiguousarray(x).reshape(len(x), -1)
    limit = int(share * 2**64)
    digests = (hashlib.blake2b(row.tobytes(), digest_size=8, person=b"dfca held-out").digest() for row in rows)
    return np.fromiter((int.from_bytes(digest, "little") < limit for digest in digests), dtype=bool, count=len(x))


def load(config: NodeConfig, folder: Path, facts: Facts) -> DeviceSamples:
    """Read, match, part and scale the samples of a device. Raises DataError with everything that does not fit.

    Of a series the newest are held out: what is learned of the past is scored on what came after it.
    """
    raw = _fitting(request_of(config, folder, facts), facts)
    x, y = _arranged(raw, config, facts)
    if config.data.test is not None:
        aside = config.changed(data=config.data.changed(path=config.data.test, format="auto"))
        test = _arranged(_fitting(request_of(aside, folder, facts), facts), aside, facts)
        return DeviceSamples(_scaled(x, y, facts), _scaled(*test, facts), raw.dropped)
    share = config.data.held_out
    newest = np.arange(len(x)) >= round(len(x) * (1 - share))
    out = newest if facts.task == "forecasting" else held_out_rows(x, share)
    if out.all():
        raise DataError(
            f"{config.data.path} has {len(out)} samples, and none is left to train with; collect more, or lower "
            f"data.held_out (now {config.data.held_out:g})"
        )
    return DeviceSamples(_scaled(x[~out], y[~out], facts), _scaled(x[out], y[out], facts), raw.dropped)


def load_inputs(config: NodeConfig, folder: Path, facts: Facts) -> Tensor:
    """Read samples to predict, raw: (n, *shape) in the swarm's order of columns; classes are not needed."""
    raw = _fitting(replace(request_of(config, folder, facts), labelled=False), facts)
    return torch.from_numpy(np.ascontiguousarray(_within_limits(matched(raw, facts.inputs), config)))


def request_of(config: NodeConfig, folder: Path, facts: Facts) -> DataRequest:
    """Return what is asked of the files of a member."""
    most = config.limits.data_bytes
    return DataRequest(config.data, folder, inputs=facts.inputs, most_bytes=most, task=facts.task)


def _fitting(request: DataRequest, facts: Facts) -> Raw:
    raw = read(request)
    if not request.labelled:
        raw = replace(raw, labels=None)
    if wrong := problems(raw, facts):
        raise DataError(f"{request.data.path} does not fit the swarm: {'; '.join(wrong)}")
    return raw


def _arranged(raw: Raw, config: NodeConfig, facts: Facts) -> tuple[np.ndarray, np.ndarray]:
    """Return x (n, *shape) and y: places of classes (n,), scaled numbers (n,) or labels (n, labels)."""
    x, targets, inputs = matched(raw, facts.inputs), raw.targets, facts.inputs
    if targets is None:
        place = {name: i for i, name in enumerate(facts.classes)}
        return x, np.array([place[label] for label in raw.labels or ()], np.int64)
    if facts.task == "multilabel":
        return x, targets.astype(np.float32)
    y = ((targets[:, 0] - facts.target.mean) / facts.target.scale).clip(-CLIP, CLIP).astype(np.float32)
    if inputs.kind != "series":
        return x, y
    check_rows(len(y), inputs, config.data.path)
    return _within_limits(x[: -inputs.horizon], config), y[inputs.window + inputs.horizon - 1 :]


def check_rows(rows: int, inputs: InputFacts, path: str) -> None:
    """Raise DataError where a series has no window with something to forecast."""
    if rows < (least := inputs.window + inputs.horizon):
        raise DataError(
            f"{path} has {rows} rows, and a forecast {inputs.horizon} ahead from {inputs.window} needs at least "
            f"{least}; collect more"
        )


def _within_limits(x: np.ndarray, config: NodeConfig) -> np.ndarray:
    """Return samples whose copy in memory is not too large: the windows of a series overlap."""
    if x.nbytes > config.limits.data_bytes:
        raise DataError(
            f"the windows of {config.data.path} must take at most {config.limits.data_bytes} bytes "
            f"(limits.data_bytes), got {x.nbytes}"
        )
    return x


def _scaled(x: np.ndarray, y: np.ndarray, facts: Facts) -> Pair:
    scaling = Scaling.of(facts.scaling, facts.inputs)
    return scaling.apply(torch.from_numpy(np.ascontiguousarray(x))), torch.from_numpy(y)


Signature = tuple[tuple[str, int, int, int], ...]


def signature(paths: Sequence[Path]) -> Signature:
    """Describe files by name, size, time and inode; folders by all files in their subfolders."""
    described: list[tuple[str, int, int, int]] = []
    for path in paths:
        files = [path, *sorted(path.glob("*/*"))] if path.is_dir() else [path]
        for file in files:
            try:
                status = os.stat(file)
            except OSError:
                continue
            described.append((str(file), status.st_size, status.st_mtime_ns, status.st_ino))
    return tuple(described)


class DeviceData:
    """The samples of a device, read again when their file has changed.

        data = DeviceData(config, folder, facts)       # raises DataError
        if data.refresh(): ...                         # data.samples are new

    A file that is being written is left alone until it looks the same twice. One that can no longer be used leaves the
    old samples in place, and `problem` says why.
    """

    def __init__(self, config: NodeConfig, folder: Path, facts: Facts) -> None:
        self._config, self._folder, self._facts = config, folder, facts
        self._read = self._seen = self._look()
        self.problem: str | None = None
        self.samples = load(config, folder, facts)

    def is_stale(self) -> bool:
        """Return whether the files are others than those that were read."""
        return self._look() != self._read

    def changed(self) -> bool:
        """Return whether the files are others than those that were read, and the same as at the last look."""
        now = self._look()
        settled, self._seen = now == self._seen, now
        return settled and now != self._read

    def refresh(self) -> bool:
        """Read the samples again where they have changed; returns whether they are new."""
        if not self.changed():
            return False
        self._read = self._seen
        try:
            samples = load(self._config, self._folder, self._facts)
        except DfcaError as error:
            self.problem = str(error)
            return False
        self.samples, self.problem = samples, None
        return True

    def _look(self) -> Signature:
        return signature(self._config.data_paths(self._folder))
