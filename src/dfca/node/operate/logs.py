"""The log of a node: lines for people, or one JSON object per line for machines; to the terminal and to node.log.

`NodeLog` writes what happens at a peer, and counts it for status and metrics.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any, Literal

from dfca.node.operate.status import counted
from dfca.peer.records.work import Note

FILE = "node.log"
MOST_BYTES = 5 * 2**20
KEPT = 3
_NAME = "dfca.node"


class Log:
    """Logs events: a sentence, and named values for machines. last_error: the last warning or error, and when."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self.last_error: dict[str, Any] | None = None

    def debug(self, text: str, **values: Any) -> None:
        """Log details for finding a fault."""
        self._write(logging.DEBUG, text, values)

    def info(self, text: str, **values: Any) -> None:
        """Log normal events."""
        self._write(logging.INFO, text, values)

    def warning(self, text: str, **values: Any) -> None:
        """Log a problem; the status shows it as the last error."""
        self._write(logging.WARNING, text, values)

    def error(self, text: str, **values: Any) -> None:
        """Log what ends the node, or a part of it."""
        self._write(logging.ERROR, text, values)

    def _write(self, level: int, text: str, values: dict[str, Any]) -> None:
        if level >= logging.WARNING:
            self.last_error = {"text": text, "time": datetime.now(UTC).isoformat(timespec="seconds")}
        self._logger.log(level, "%s", text, extra={"values": values})

    def close(self) -> None:
        """Close the files."""
        for handler in list(self._logger.handlers):
            self._logger.removeHandler(handler)
            with suppress(OSError):  # a full disk loses the last lines, but must not hide the error that ends the node
                handler.close()


def open_log(
    folder: Path | None, format: Literal["human", "json"], level: str, stream: Any = None, name: str = ""
) -> Log:
    """Open the log of the node in a folder; None: the terminal only. name: of the node, where there are several."""
    logger = logging.getLogger(f"{_NAME}.{name or (folder.name if folder else 'node')}")
    logger.propagate = False
    logger.setLevel(level.upper())
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
        handler.close()
    handlers: list[logging.Handler] = [logging.StreamHandler(stream or sys.stderr)]
    log = Log(logger)
    if folder is not None:
        try:
            handlers.append(RotatingFileHandler(folder / FILE, maxBytes=MOST_BYTES, backupCount=KEPT, encoding="utf-8"))
        except OSError as error:
            now = datetime.now(UTC).isoformat(timespec="milliseconds")
            log.last_error = {"text": f"{FILE} cannot be written: {error.strerror}", "time": now}
    for handler in handlers:
        handler.setFormatter(_Json() if format == "json" else _Human())
        handler.handleError = _ignore  # type: ignore[method-assign]
        logger.addHandler(handler)
    return log


def _ignore(record: logging.LogRecord) -> None:
    """A full disk or a closed terminal must not stop a node."""


class _Human(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        when = datetime.fromtimestamp(record.created).strftime("%Y-%m-%d %H:%M:%S")
        level = "" if record.levelno == logging.INFO else f"{record.levelname.lower()}: "
        return f"{when}  {level}{_clean(record.getMessage())}"


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "text": record.getMessage(),
            **getattr(record, "values", {}),
        }
        return json.dumps(line, default=str)


def _clean(text: str) -> str:
    """Make what others chose harmless for a terminal: no control characters, one line."""
    return "".join(c if c.isprintable() else " " for c in text)


REMEMBERED = 200  # folds of which the age is remembered


@dataclass
class NodeLog:
    """Counts the notes of a peer by kind. name: returns the name of a member by its number."""

    log: Log
    name: Callable[[int], str] = str
    counts: Counter[str] = field(default_factory=Counter)
    ages: deque[float] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    finished_at: float | None = None
    round_s: float | None = None
    now: Callable[[], float] = time.monotonic
    _began: float = 0.0

    def note(self, note: Note) -> None:
        """Count a note, and log it if it is of interest."""
        self.counts[note.kind] += 1
        if note.kind == "start":
            self._began = self.now()
        elif note.kind == "finish":
            self.finished_at = self.now()
            self.round_s = self.finished_at - self._began
            self._log_round(note)
        elif note.kind == "fold":
            self.ages.append(note.number)
        elif note.kind in LOGGED:
            number = int(note.number)
            text = LOGGED[note.kind].format(
                other=self.name(note.other),
                cluster=note.cluster,
                round=note.round,
                are="is" if number == 1 else "are",
                clusters=counted(number, "cluster"),
                models=counted(number, "model"),
                steps=counted(number, "personal step"),
            )
            (self.log.debug if note.kind in ("timeout", "warmed") else self.log.info)(text, event=note.kind)

    def _log_round(self, note: Note) -> None:
        """Log the first ten rounds, then every tenth, then every hundredth; the others as debugging."""
        if note.cluster < 0:
            self.log.warning(f"round {note.round}: training diverged, the model is left as it was; is the data scaled?")
            return
        log = self.log.debug if note.round % 10 ** (len(str(note.round)) - 1) else self.log.info
        text = f"round {note.round} is done, cluster {note.cluster}"
        log(text, event="round", round=note.round, cluster=note.cluster, seconds=self.round_s)

    @property
    def staleness(self) -> float | None:
        """The mean age of the last folds."""
        return sum(self.ages) / len(self.ages) if self.ages else None


LOGGED = {
    "warm": "trains a model of its own, to vote with",
    "warmed": "the warm-up ended",
    "elect": "an election ended: there {are} {clusters}",
    "survey": "a survey ended: {clusters} {are} left",
    "join": "took over the {models} of {other}",
    "switch": "took over the {models} of {other}, whose election counts more",
    "adopt": "took cluster {cluster} from {other}",
    "afresh": "nobody is there: begins with models of its own",
    "jump": "continues with round {round} of its neighbours",
    "timeout": "stopped waiting for neighbours in round {round}",
    "measure": "measures which number of personal steps is best on its held-out samples",
    "tune": "takes {steps} from the model that it uses",
    "done": "all {round} rounds are done; continues to serve its neighbours",
}
