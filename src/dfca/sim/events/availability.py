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

from dfca.base.errors import ConfigError
from dfca.sim.events.world import Absence

_STAY, _SWITCH = ("client", "begin_s", "end_s"), ("client", "time_s", "online")
_WORDS = {"1": True, "true": True, "0": False, "false": False}
_DEMANDS = {"client": "a number 0, 1, 2, ...", "online": "1 or 0 (true or false)"}

Interval = tuple[float, float]


def read_availability(path: str | Path) -> tuple[Absence, ...]:
    """Read who is away when. Raises ConfigError with the number of the first line that makes no sense."""
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the availability trace {path}: {error}") from error
    stays: dict[int, list[Interval]] = {}
    switches: dict[int, tuple[float, bool]] = {}
    for number, row in _rows(path, text):
        where = f"{path}, line {number}"
        form = _SWITCH if row.keys() >= set(_SWITCH) else _STAY
        client, *values = (_read(where, name, row[name]) for name in form)
        mine = stays.setdefault(client, [])
        if form is _STAY:
            _add_stay(where, client, mine, *values)
        else:
            _add_switch(where, client, mine, switches.get(client), *values)
            switches[client] = (values[0], values[1])
    if not stays:
        raise ConfigError(f"{path} has no lines, so it says nothing about anybody; leave it out")
    return tuple(absence for client in sorted(stays) for absence in absences_of(client, stays[client]))


def absences_of(client: int, stays: Iterable[Interval]) -> Iterator[Absence]:
    """Turn a client's stays, in order, into the absences between them."""
    gone = 0.0
    for begin, end in stays:
        if begin > gone:
            yield Absence(client, gone, begin)
        gone = end
    if gone < math.inf:
        yield Absence(client, gone, math.inf)


def _read(where: str, name: str, value: Any) -> Any:
    """Read one value of a line. Raises ConfigError where it is no such value."""
    try:
        if name == "online":
            return _WORDS[str(value).strip().lower()]
        if name == "end_s" and value in ("", None):
            return math.inf
        number = math.nan if isinstance(value, bool) else float(value)
        if 0 <= number < math.inf and (name != "client" or number.is_integer()):
            return int(number) if name == "client" else number
    except (KeyError, TypeError, ValueError):
        pass
    raise ConfigError(f"{where}: {name} must be {_DEMANDS.get(name, '>= 0 and finite')}, got {value!r}")


def _add_stay(where: str, client: int, stays: list[Interval], begin: float, end: float) -> None:
    if not begin < end:
        raise ConfigError(f"{where}: a stay must end after it begins ({begin:g} s), got end_s {end:g}")
    if stays and begin < stays[-1][1]:
        raise ConfigError(
            f"{where}: client {client} comes at {begin:g} s, before its stay until {stays[-1][1]:g} s is over; "
            "sort a client's lines by time and join those that overlap"
        )
    stays.append((begin, end))


def _add_switch(
    where: str, client: int, stays: list[Interval], before: tuple[float, bool] | None, time: float, online: bool
) -> None:
    """Add a switch to a client's stays: the last one is open while it is there."""
    if before is not None and time <= before[0]:
        raise ConfigError(
            f"{where}: client {client} switches at {time:g} s, not after its switch at {before[0]:g} s; "
            "sort a client's lines by time"
        )
    if before is None:
        stays += [(time, math.inf)] if online else [(0.0, time)] if time > 0 else []
    elif online and not before[1]:
        stays.append((time, math.inf))
    elif before[1] and not online:
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
    """Check that a line has the columns of one of the forms."""
    if any(row.keys() >= set(form) for form in (_STAY, _SWITCH)):
        return row
    known = f"{', '.join(_STAY)} or {', '.join(_SWITCH)}"
    raise ConfigError(f"{path}, line {number} has {', '.join(row) or 'nothing'}; an availability trace has {known}")
