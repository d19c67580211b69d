"""JSON lines, a line at a time: a torn last line is dropped and counted, any other broken line is an error."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic_core import from_json

from placement.errors import TraceError
from placement.interchange.pieces import Notes

MOST_BYTES_A_LINE = 1 << 30
TORN = "torn last lines"


def raw_lines(path: Path, notes: Notes) -> Iterator[tuple[int, bytes]]:
    """Line numbers from 1 and lines that are not blank. Raises TraceError where one is over a gigabyte."""
    try:
        with path.open("rb") as file:
            number = 0
            while line := file.readline(MOST_BYTES_A_LINE):
                number += 1
                if len(line) == MOST_BYTES_A_LINE and not line.endswith(b"\n"):
                    raise TraceError(f"{path}, line {number}: longer than {MOST_BYTES_A_LINE} bytes; not JSON lines?")
                notes.bytes_read += len(line)
                if line.strip():
                    yield number, line
    except OSError as error:
        raise TraceError(f"{path}: cannot be read: {error.strerror}") from error


def parsed(line: bytes, path: Path, number: int, notes: Notes) -> Any | None:
    """A line's value; None where it is a last line that was cut. Raises TraceError that names file and line."""
    try:
        return from_json(line)
    except ValueError as error:
        if not line.endswith(b"\n"):
            notes.drop(TORN, 1, f"{path}, line {number}")
            return None
        raise TraceError(f"{path}, line {number}: not JSON: {error}") from error


def json_lines(path: Path, notes: Notes) -> Iterator[tuple[str, Any]]:
    """Each line's place, for messages, and its value."""
    for number, line in raw_lines(path, notes):
        value = parsed(line, path, number, notes)
        if value is not None:
            yield f"{path}, line {number}", value


def one_json(path: Path, notes: Notes) -> Iterator[tuple[str, Any]]:
    """The one value of a JSON file, in the form of `json_lines`."""
    yield str(path), read_json(path)
    notes.bytes_read += path.stat().st_size


def read_json(path: Path) -> Any:
    """A JSON file. Raises TraceError that names it."""
    try:
        return from_json(path.read_bytes())
    except OSError as error:
        raise TraceError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise TraceError(f"{path}: not JSON: {error}") from error
