"""The metrics of a run: metrics/<trial>.jsonl, one line per evaluated round, written by the process of that trial.

Version 0.1 (form 1) wrote the lines of all trials into one metrics.jsonl. Both are read; before a run is continued,
`MetricsFiles.prepare` makes the first out of the second.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from dfca.base.errors import RunError
from dfca.base.files import append_line, atomic_write, read_text
from dfca.base.renamed import earlier, renamed
from dfca.experiment.sweep import Trial, trial_name
from dfca.sim.metrics_table import EvaluationRow, JsonObject, StoredRow, without_nan

FOLDER, OLD = "metrics", "metrics.jsonl"


class MetricsFiles:
    """The metrics of a run folder, trial by trial."""

    def __init__(self, run_folder: Path) -> None:
        self._run_folder = run_folder

    def append(self, trial: Trial, metrics: JsonObject) -> None:
        """Append one line and put it on the disk."""
        append_line(self._path(trial), _line({**trial.head, **metrics}))

    def rewind(self, trial: Trial, round: int, time_s: float = 0.0) -> None:
        """Drop the lines of a trial beyond a round (and a virtual time), and a last line that was cut off."""
        path, end = self._path(trial), (round, time_s)
        if path.exists():
            lines = _read_lines(path)
            _write_lines(path, [line for line in lines if (line["round"], line.get("time_s") or 0.0) <= end])

    def put(self, trial: Trial, metrics: Iterable[JsonObject]) -> None:
        """Write all lines of a trial, instead of those that are there."""
        _write_lines(self._path(trial), [{**trial.head, **row} for row in metrics])

    def count(self, trial: Trial) -> int:
        return count_lines(self._path(trial))

    def prepare(self, swept: bool) -> None:
        """Make the folder, and divide the lines of a folder of version 0.1 into one file per trial.

        A process that is killed meanwhile leaves the old file, and the next one begins again.
        """
        (self._run_folder / FOLDER).mkdir(exist_ok=True)
        old = self._run_folder / OLD
        if not old.exists():
            return
        lines: dict[str, list[JsonObject]] = {}
        for line in _read_lines(old):
            name = trial_name(line["algorithm"], line["seed"], line.get("digest", "") if swept else "")
            lines.setdefault(name, []).append(line)
        for name, own in lines.items():
            _write_lines(self._run_folder / FOLDER / f"{name}.jsonl", own)
        old.unlink()

    def _path(self, trial: Trial) -> Path:
        return trial.file(self._run_folder / FOLDER, ".jsonl")


def read_metrics(run_folder: Path, rows: Sequence[StoredRow] = ()) -> list[EvaluationRow]:
    """Read the metrics of all trials: in the order of their rows in the summary, then by name.

    A last line that was cut off does not count; of two lines of one round the last one does. Raises RunError if a line
    is no line of metrics.
    """
    if (run_folder / FOLDER).is_symlink():
        raise RunError(f"{run_folder / FOLDER} is a link, and links in a run folder are not followed; remove it")
    places: dict[str, int] = {}
    for place, row in enumerate(rows):
        for swept in (False, True):  # only the names of a sweep's trials have the digest
            _, seed, digest = row.key(swept)
            for name in (row.algorithm, earlier(row.algorithm)):
                places.setdefault(trial_name(name, seed, digest), place)
    files = sorted(
        (run_folder / FOLDER).glob("*.jsonl"), key=lambda path: (places.get(path.stem, len(rows)), path.name)
    )
    old = run_folder / OLD
    lines: dict[tuple[object, ...], EvaluationRow] = {}
    for path in [old, *files] if old.exists() else files:
        for row in map(EvaluationRow.of, _read_lines(path)):
            lines[row.algorithm, row.seed, row.digest, row.round, row.time_s] = row
    return list(lines.values())


def check_lines(path: Path) -> str | None:
    """Return which line of a file is no line of metrics, None where all are, or only the last one was cut off."""
    try:
        _read_lines(path)
    except RunError as error:
        return str(error).partition(";")[0].removeprefix(f"{path}, ")
    return None


def count_lines(path: Path) -> int:
    """Count the lines of a file of metrics; none where it is missing or has a damaged line."""
    try:
        return len(_read_lines(path))
    except RunError:
        return 0


def _read_lines(path: Path) -> list[JsonObject]:
    try:
        lines = read_text(path, errors="replace").split("\n")
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror}; restore it or run again") from error
    read: list[JsonObject] = []
    for number, text in enumerate(lines, start=1):
        if not text.strip():
            continue
        try:
            line = renamed(json.loads(text))
            _ = hash((line["algorithm"], line["seed"], line["round"], line.get("digest"), line.get("time_s")))
            if not isinstance(line["round"], int) or not isinstance(line.get("time_s") or 0.0, int | float):
                raise ValueError("its round or its time is no number")
            read.append(line)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            if number == len(lines):
                break
            raise RunError(
                f"{path}, line {number}, is not a line of metrics; restore the file, or `dfca repair "
                f"{path.parent.parent}` moves it aside and the same `dfca run` command computes it again"
            ) from None
    return read


def _write_lines(path: Path, lines: Iterable[JsonObject]) -> None:
    text = "".join(_line(line) + "\n" for line in lines)
    if not path.exists() or read_text(path, errors="replace") != text:
        atomic_write(path, text)


def _line(values: JsonObject) -> str:
    return json.dumps(without_nan(values), separators=(",", ":"))
