"""CSV files as devices write them: read with the csv module, every bad value named by line and column."""

from __future__ import annotations

import csv
import errno
import io
import math
import re
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from dfca.base.errors import DataError
from dfca.base.files import read_small
from dfca.base.validation import printable

if TYPE_CHECKING:
    from dfca.node.task.reading import DataRequest

DELIMITERS = (",", ";", "\t")
MISSING = frozenset({"", "na", "n/a", "nan", "null", "none", "?", "-"})
LONGEST_FIELD = 100_000  # characters of one value: an open quote must not swallow the rest of the file
SHOWN = 3


@dataclass
class Columns:
    """Named columns: values (n, features) float64, labels (n,) or None where there is no such column."""

    names: tuple[str, ...]
    values: np.ndarray
    labels: list[str] | None
    dropped: int = 0


def read_csv(path: Path, request: DataRequest) -> Columns:
    """Read a CSV file: a header, and a number in every column that is used.

    Commas, semicolons and tabs part columns, whichever the header has most of; in files with semicolons numbers may
    have a decimal comma. A last line that is not complete yet is left out: somebody is writing.

    Raises DataError.
    """
    text = _text(path, request.most_bytes)
    complete = text.endswith(("\n", "\r"))
    delimiter = _delimiter(text.lstrip("\r\n").partition("\n")[0])
    rows = _rows(path, text, delimiter)
    try:
        _, header = next(rows)
    except StopIteration:
        raise DataError(f"{path} is empty; its first line must name the columns") from None
    names = [name.strip() for name in header]
    if "" in names:
        raise DataError(f"{path}: column {names.index('') + 1} has no name; the first line must name all columns")
    if all(number(name, delimiter == ";") is not None for name in names):
        raise DataError(f"{path}: the first line holds numbers ({listed(names)}); it must name the columns")
    label, places = request.columns(names, path)
    reader = _Reader(path, names, label, places, delimiter == ";", request.data.missing == "drop")
    for line, row in rows:
        reader.add(line, row)
    return reader.table(complete)


def listed(names: Sequence[str], most: int = 8) -> str:
    """List names in quotes, and no more than a few of them."""
    shown = ", ".join(f'"{printable(name)}"' for name in names[:most])
    return f"{shown} and {len(names) - most} more" if len(names) > most else shown or "none"


def number(text: str, decimal_comma: bool = False) -> float | None:
    """Read a finite number; None where it is none."""
    if decimal_comma and "," in text and "." not in text:
        text = text.replace(",", ".")
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) and "_" not in text else None


def class_name(text: str) -> str:
    """Write a class as all formats do: "2.0" is the class 2."""
    text = text.strip()
    return text.partition(".")[0] if re.fullmatch(r"-?[0-9]+\.0+", text) else text


class _Reader:
    """Collects rows, and what is wrong with them."""

    def __init__(
        self, path: Path, names: list[str], label: int | None, places: list[int], comma: bool, drop: bool
    ) -> None:
        self._path, self._names, self._label, self._places = path, names, label, places
        self._comma, self._drop = comma, drop
        self._values = array("d")
        self._labels: list[str] = []
        self._lines: list[int] = []
        self._bad: list[tuple[int, str]] = []
        self._count = self._dropped = 0

    def add(self, line: int, row: list[str]) -> None:
        """Take one row, or note what is wrong with it."""
        if len(row) != len(self._names):
            self._note(line, f"line {line} has {len(row)} values and the first line {len(self._names)} columns")
            return
        label = None if self._label is None else class_name(row[self._label])
        try:
            texts = [row[place] for place in self._places]
            values = list(map(float, texts))
            fine = math.isfinite(sum(values)) and "_" not in "".join(texts)
        except (ValueError, OverflowError):
            fine = False
        if not fine or label == "":
            numbers = self._slowly(line, row, label)
            if numbers is None:
                return
            values = numbers
        self._values.extend(values)
        self._lines.append(line)
        if label is not None:
            self._labels.append(label)

    def _slowly(self, line: int, row: list[str], label: str | None) -> list[float] | None:
        """Read the values one by one; None where one of them cannot be used."""
        texts = {place: row[place].strip() for place in self._places}
        gaps = [self._names[place] for place, text in texts.items() if text.lower() in MISSING]
        if label is not None and label == "":
            gaps.append(self._names[self._label or 0])
        if gaps and self._drop:
            self._dropped += 1
            return None
        values = {place: number(text, self._comma) for place, text in texts.items()}
        if gaps:
            self._note(line, f'line {line}, column "{printable(gaps[0])}" is empty')
        elif wrong := [place for place, value in values.items() if value is None]:
            name, text = printable(self._names[wrong[0]]), printable(texts[wrong[0]])
            self._note(line, f'line {line}, column "{name}": "{text}" is not a number')
        else:
            return [value for value in values.values() if value is not None]
        return None

    def _note(self, line: int, problem: str) -> None:
        self._count += 1
        if len(self._bad) <= SHOWN:
            self._bad.append((line, problem))

    def table(self, complete: bool) -> Columns:
        """Make the table. Raises DataError with the first problems."""
        if self._count == 1 and not complete and self._bad[0][0] > max(self._lines, default=0):
            self._count = 0  # the last line is still being written
        if self._count:
            shown = "; ".join(problem for _, problem in self._bad[:SHOWN])
            more = f" (and {self._count - SHOWN} lines more)" if self._count > SHOWN else ""
            raise DataError(
                f"{self._path}: {shown}{more}; correct the file, leave columns out by data.ignore, or set "
                'data.missing = "drop" for rows with empty values'
            )
        if not self._lines:
            why = f", all {self._dropped} have empty values" if self._dropped else " below the names of the columns"
            raise DataError(f"{self._path} has no rows{why}")
        names = tuple(self._names[place] for place in self._places)
        values = np.array(self._values, dtype=np.float64).reshape(-1, len(names))
        return Columns(names, values, None if self._label is None else self._labels, self._dropped)


def _text(path: Path, most_bytes: int) -> str:
    try:
        data = read_small(path, most_bytes)
    except OSError as error:
        if error.errno == errno.EFBIG:
            size = path.stat().st_size
            raise DataError(f"{path} must be at most {most_bytes} bytes (limits.data_bytes), got {size}") from None
        raise unreadable(path, error) from None
    if b"\0" in data[:65_536]:
        raise DataError(f"{path} is not text; save it as CSV in UTF-8")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise DataError(f"{path}, line {line}: byte {error.start} is not UTF-8; save the file as UTF-8") from None


def unreadable(path: Path, error: OSError) -> DataError:
    """Make the error for a file that is not there, or not for us."""
    if isinstance(error, FileNotFoundError):
        return DataError(f"{path} does not exist; give the data by --data or data.path in node.toml")
    return DataError(f"{path} cannot be read: {printable(str(error.strerror or error).strip(), 200)}")


def _delimiter(header: str) -> str:
    """Pick what parts the header into most columns; quoted names may hold other delimiters."""
    outside = "".join(header.split('"')[::2])
    return max(DELIMITERS, key=outside.count)


def _rows(path: Path, text: str, delimiter: str) -> Iterator[tuple[int, list[str]]]:
    """Yield the rows that are not blank, each with its line."""
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, skipinitialspace=True)
    before = csv.field_size_limit(LONGEST_FIELD)
    try:
        for row in reader:
            if any(map(str.strip, row)):
                yield reader.line_num, row
    except csv.Error as error:
        raise DataError(f"{path}, line {reader.line_num}: {error}; is a quote not closed?") from None
    finally:
        csv.field_size_limit(before)


def write_csv(names: Sequence[str], rows: Iterator[Sequence[object]]) -> str:
    """Write a CSV text with a header."""
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(chain([names], rows))
    return out.getvalue()
