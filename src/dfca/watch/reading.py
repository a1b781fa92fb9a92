"""Read files that another process writes, or that others made: nothing blocks, nothing is too large, no links.

`JsonFile` is read again when it changes; `LinesFile` reads what was appended. What cannot be read is a sentence in
`problem`, never an exception.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dfca.base.files import open_regular

MOST_JSON = 64 << 20  # bytes of a whole file (the graphs of a large sweep have some megabytes)
MOST_LINE = 4 << 20  # bytes of one line of metrics; 2,000 clients need about 50 kB
AT_A_TIME = 16 << 20  # bytes of appended lines that one call reads


class UnreadableError(Exception):
    """A file cannot be used; the message is a sentence for people."""


def read_file(path: Path, most: int = MOST_JSON, begin: int = 0) -> bytes:
    """Read up to `most` bytes of a regular file from `begin` on.

    A pipe would wait for ever, and a link may lead out of the folder: both are refused.

    Raises UnreadableError, FileNotFoundError.
    """
    try:
        with open(open_regular(path, follow_links=False), "rb") as file:
            file.seek(begin)
            return file.read(most)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise UnreadableError(f"{path.name} cannot be read: {error.strerror}") from error


def parse(data: bytes, name: str, load: Callable[[str], Any] = json.loads) -> dict[str, Any]:
    """Parse a JSON object, or what `load` parses. Raises UnreadableError."""
    try:
        value = load(data.decode())
    except (ValueError, RecursionError) as error:
        raise UnreadableError(f"{name} is damaged ({type(error).__name__})") from error
    if not isinstance(value, dict):
        raise UnreadableError(f"{name} must hold an object, got {type(value).__name__}")
    return value


class JsonFile:
    """A small file that is replaced as a whole; `value` is its newest good content, {} while there is none."""

    def __init__(self, path: Path, load: Callable[[str], Any] = json.loads, most: int = MOST_JSON) -> None:
        self.path, self._load, self._most = path, load, most
        self.value: dict[str, Any] = {}
        self.problem: str | None = None
        self._seen: tuple[int, ...] = ()

    def poll(self) -> bool:
        """Read the file if it has changed; return whether it has."""
        try:
            status = os.stat(self.path, follow_symlinks=False)
            seen: tuple[int, ...] = (status.st_ino, status.st_size, status.st_mtime_ns)
        except OSError:
            seen = ()
        if seen == self._seen:
            return False
        self._seen, self.problem = seen, None
        try:
            if seen and seen[1] > self._most:
                raise UnreadableError(
                    f"{self.path.name} has {seen[1]:,} bytes, more than the {self._most:,} shown here"
                )
            self.value = parse(read_file(self.path, self._most), self.path.name, self._load) if seen else {}
        except FileNotFoundError:
            self.value = {}
        except UnreadableError as error:
            self.problem = str(error)
        return True


class LinesFile:
    """A file of JSON lines that grows; a file that was replaced or cut is read from its start."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.problem: str | None = None
        self.more = False  # the last call left something
        self._inode = self._offset = self._line = 0

    def poll(self, size: int, inode: int) -> tuple[bool, list[dict[str, Any]]]:
        """Read what was appended, given the file's size and inode; return whether it began anew, and the new lines.

        A last line without its end is left for the next call: its writer is not done.
        """
        anew = inode != self._inode or size < self._offset
        if anew:
            self._inode, self._offset, self._line, self.problem = inode, 0, 0, None
        self.more = False
        if size == self._offset:
            return anew, []
        try:
            data = read_file(self.path, AT_A_TIME, self._offset)
        except FileNotFoundError:
            return anew, []
        except UnreadableError as error:
            self.problem = str(error)
            return anew, []
        whole = data[: data.rfind(b"\n") + 1]
        if not whole and len(data) > MOST_LINE:
            self.problem = f"{self.path.name} has a line of more than {MOST_LINE:,} bytes; what follows is not shown"
            return anew, []
        self._offset += len(whole)
        self.more = len(data) == AT_A_TIME
        return anew, self._parse(whole)

    def _parse(self, data: bytes) -> list[dict[str, Any]]:
        parsed = []
        for line in data.split(b"\n")[:-1]:
            self._line += 1
            if not line.strip():
                continue
            try:
                if len(line) > MOST_LINE:
                    raise UnreadableError(f"it has {len(line):,} bytes")
                parsed.append(parse(line, "it"))
            except UnreadableError as error:
                self.problem = f"{self.path.name}, line {self._line}, is left out: {error}"
        return parsed


def finite(value: Any) -> float | None:
    """Return a number that can be drawn, or None.

    >>> finite(3), finite("3"), finite(True), finite(float("nan")), finite(10**400)
    (3.0, None, None, None, None)
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if -1e300 < value < 1e300 else None


def text(value: Any, most: int = 200) -> str:
    """Return a short text of one line, without what a terminal or a page would take for a command.

    >>> text("a\\nb\\x1b[2J"), text(None), text("x" * 9, 4)
    ('a b[2J', '', 'xxx…')
    """
    line = " ".join(value[: 8 * most].split()) if isinstance(value, str) else ""
    shown = "".join(letter for letter in line if letter.isprintable())
    return shown if len(shown) <= most else shown[: most - 1] + "…"


def whole_numbers(value: Any, most: int = 100_000) -> list[int] | None:
    """Return a list of whole numbers, or None if it is none or too long."""
    if not isinstance(value, list) or len(value) > most or any(type(number) is not int for number in value):
        return None
    return value
