"""Real availability as a model of the world: who is away when, read from a file.

Two forms, CSV (with a header) or JSON lines, whichever the file's first line looks like:

  client,begin_s,end_s      presence: the client is there from begin_s to end_s. One line per stay
  client,time_s,online      switches: at time_s the client comes (1, true) or goes (0, false)

A client that the file names is there only when the file says so; before its first switch it is in the other state. A
client that the file does not name is always there. Times are seconds from the start of the run; a client's lines must
be in order and its stays must not overlap.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from dfca.errors import ConfigError
from dfca.sim.events.world import Absence

_STAYS, _SWITCHES = ("client", "begin_s", "end_s"), ("client", "time_s", "online")
_WORDS = {"1": True, "true": True, "0": False, "false": False}

Span = tuple[float, float]


def read_availability(path: str | Path) -> tuple[Absence, ...]:
    """Read who is away when. Raises ConfigError with the number of the first line that makes no sense."""
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the availability trace {path}: {error}") from error
    stays: dict[int, list[Span]] = {}
    switched: dict[int, tuple[float, bool]] = {}
    for number, row in _rows(path, text):
        where = f"{path}, line {number}"
        client = _client(where, row["client"])
        mine = stays.setdefault(client, [])
        if "online" in row:
            time, online = _seconds(where, "time_s", row["time_s"]), _truth(where, row["online"])
            _switch(where, client, mine, switched.get(client), time, online)
            switched[client] = (time, online)
        else:
            begin, end = _seconds(where, "begin_s", row["begin_s"]), _seconds(where, "end_s", row["end_s"], math.inf)
            if not begin < end:
                raise ConfigError(f"{where}: a stay must end after it begins ({begin:g} s), got end_s {end:g}")
            if mine and begin < mine[-1][1]:
                raise ConfigError(
                    f"{where}: client {client} comes at {begin:g} s, before its stay until {mine[-1][1]:g} s is over; "
                    "sort a client's lines by time and join those that overlap"
                )
            mine.append((begin, end))
    if not stays:
        raise ConfigError(f"{path} has no lines, so it says nothing about anybody; leave it out")
    return tuple(absence for client in sorted(stays) for absence in absences_of(client, stays[client]))


def absences_of(client: int, stays: Iterable[Span]) -> Iterator[Absence]:
    """Turn a client's stays, in order, into the absences between them."""
    gone = 0.0
    for begin, end in stays:
        if begin > gone:
            yield Absence(client, gone, begin)
        gone = end
    if gone < math.inf:
        yield Absence(client, gone, math.inf)


def _switch(
    where: str, client: int, stays: list[Span], before: tuple[float, bool] | None, time: float, online: bool
) -> None:
    """Add a switch to a client's stays: the last one is open while it is there."""
    if before is not None and time <= before[0]:
        raise ConfigError(
            f"{where}: client {client} switches at {time:g} s, not after its switch at {before[0]:g} s; "
            "sort a client's lines by time"
        )
    if before is not None and before[1] == online:
        return
    if online:
        stays.append((time, math.inf))
    elif before is None:
        if time > 0:
            stays.append((0.0, time))
    else:
        stays[-1] = (stays[-1][0], time)


def _rows(path: str | Path, text: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Read the lines of either format; the columns of the first line are those of all."""
    lines = [(number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    if not lines:
        return
    if lines[0][1].lstrip().startswith("{"):
        for number, line in lines:
            try:
                row = json.loads(line)
            except ValueError as error:
                raise ConfigError(f"{path}, line {number} is not JSON: {error}") from error
            yield number, _columns(path, number, row if isinstance(row, dict) else {})
        return
    header, *rest = lines
    names = [name.strip() for name in next(csv.reader(io.StringIO(header[1])))]
    _columns(path, header[0], dict.fromkeys(names))
    for number, line in rest:
        cells = [cell.strip() for cell in next(csv.reader(io.StringIO(line)))]
        if len(cells) != len(names):
            raise ConfigError(f"{path}, line {number} has {len(cells)} cells; the header has {len(names)}")
        yield number, dict(zip(names, cells, strict=True))


def _columns(path: str | Path, number: int, row: dict[str, Any]) -> dict[str, Any]:
    for names in (_STAYS, _SWITCHES):
        if set(names) <= set(row):
            return row
    raise ConfigError(
        f"{path}, line {number} has {', '.join(row) or 'nothing'}; an availability trace has {', '.join(_STAYS)} or "
        f"{', '.join(_SWITCHES)}"
    )


def _client(where: str, value: Any) -> int:
    try:
        if isinstance(value, bool) or int(value) != float(value) or int(value) < 0:
            raise ValueError
    except (TypeError, ValueError, OverflowError):
        raise ConfigError(f"{where}: client must be a number 0, 1, 2, ..., got {value!r}") from None
    return int(value)


def _seconds(where: str, name: str, value: Any, default: float | None = None) -> float:
    if default is not None and (value is None or value == ""):
        return default
    try:
        seconds = float("nan") if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        seconds = math.nan
    if not (0 <= seconds < math.inf):
        raise ConfigError(f"{where}: {name} must be >= 0 and finite, got {value!r}")
    return seconds


def _truth(where: str, value: Any) -> bool:
    if isinstance(value, str | bool | int) and (word := str(value).strip().lower()) in _WORDS:
        return _WORDS[word]
    raise ConfigError(f"{where}: online must be 1 or 0 (true or false), got {value!r}")
