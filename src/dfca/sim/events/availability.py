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
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from dfca.errors import ConfigError
from dfca.sim.events.world import Absence

_WORDS = {"1": True, "true": True, "0": False, "false": False}

Interval = tuple[float, float]


def _no_truth(value: Any) -> Any:
    """Refuse true and false where a number is meant, which pydantic takes for 1 and 0."""
    if isinstance(value, bool):
        raise ValueError
    return value


def _truth(value: Any) -> Any:
    """Translate 1, 0, true and false in any writing; pydantic would also take "yes" and 1.0."""
    word = str(value).strip().lower() if isinstance(value, str | int) else ""
    if word not in _WORDS:
        raise ValueError
    return _WORDS[word]


_Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False), BeforeValidator(_no_truth)]


class _Line(BaseModel):
    model_config = ConfigDict(frozen=True)

    client: Annotated[int, Field(ge=0), BeforeValidator(_no_truth)]


class _Stay(_Line):
    """The client is there from begin_s to end_s, or to the end."""

    begin_s: _Seconds
    end_s: Annotated[_Seconds | None, BeforeValidator(lambda value: None if value == "" else value)]


class _Switch(_Line):
    """The client comes or goes."""

    time_s: _Seconds
    online: Annotated[bool, BeforeValidator(_truth)]


_FORMS = (_Switch, _Stay)
_DEMANDS = {"client": "a number 0, 1, 2, ...", "online": "1 or 0 (true or false)"}


def read_availability(path: str | Path) -> tuple[Absence, ...]:
    """Read who is away when. Raises ConfigError with the number of the first line that makes no sense."""
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the availability trace {path}: {error}") from error
    stays: dict[int, list[Interval]] = {}
    switched: dict[int, _Switch] = {}
    for number, row in _rows(path, text):
        where = f"{path}, line {number}"
        line = _check(where, row)
        mine = stays.setdefault(line.client, [])
        if isinstance(line, _Switch):
            _add_switch(where, mine, switched.get(line.client), line)
            switched[line.client] = line
        elif isinstance(line, _Stay):
            _add_stay(where, mine, line)
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


def _check(where: str, row: dict[str, Any]) -> _Line:
    """Check the values of a line."""
    form = next(form for form in _FORMS if form.model_fields.keys() <= row.keys())
    try:
        return form.model_validate(row)
    except ValidationError as error:
        name = str(error.errors()[0]["loc"][0])
        demand = _DEMANDS.get(name, ">= 0 and finite")
        raise ConfigError(f"{where}: {name} must be {demand}, got {row[name]!r}") from None


def _add_stay(where: str, stays: list[Interval], stay: _Stay) -> None:
    begin, end = stay.begin_s, math.inf if stay.end_s is None else stay.end_s
    if not begin < end:
        raise ConfigError(f"{where}: a stay must end after it begins ({begin:g} s), got end_s {end:g}")
    if stays and begin < stays[-1][1]:
        raise ConfigError(
            f"{where}: client {stay.client} comes at {begin:g} s, before its stay until {stays[-1][1]:g} s is over; "
            "sort a client's lines by time and join those that overlap"
        )
    stays.append((begin, end))


def _add_switch(where: str, stays: list[Interval], before: _Switch | None, switch: _Switch) -> None:
    """Add a switch to a client's stays: the last one is open while it is there."""
    time = switch.time_s
    if before is not None and time <= before.time_s:
        raise ConfigError(
            f"{where}: client {switch.client} switches at {time:g} s, not after its switch at {before.time_s:g} s; "
            "sort a client's lines by time"
        )
    if before is not None and before.online == switch.online:
        return
    if switch.online:
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
    """Check that a line has the columns of one of the forms."""
    if any(form.model_fields.keys() <= row.keys() for form in _FORMS):
        return row
    known = " or ".join(", ".join(form.model_fields) for form in reversed(_FORMS))
    raise ConfigError(f"{path}, line {number} has {', '.join(row) or 'nothing'}; an availability trace has {known}")
