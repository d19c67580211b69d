"""Markdown, chat text and JSON against files that were read by a person: `python tests/placement/test_report_text.py`
writes them anew."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))

from placement.report import render_chat, render_markdown, report_to_json
from placement.report.chat import MOST_CHARACTERS
from placement.report.markdown import escaped
from tests.placement.report_case import HOSTILE, case_report

GOLDEN = Path(__file__).parent / "golden"


def _rounded(value: Any) -> Any:
    """Nine digits: the last ones are the machine's own."""
    if isinstance(value, dict):
        return {key: _rounded(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_rounded(inner) for inner in value]
    return float(f"{value:.9g}") if isinstance(value, float) else value


def _texts() -> dict[str, str]:
    report = case_report()
    found = _rounded(json.loads(report_to_json(report)))
    return {
        "report.md": render_markdown(report),
        "chat.txt": render_chat(report),
        "report.json": json.dumps(found, indent=1) + "\n",
    }


@pytest.mark.parametrize("name", ["report.md", "chat.txt", "report.json"])
def test_the_texts_are_as_they_were_read(name: str) -> None:
    assert _texts()[name] == (GOLDEN / name).read_text()


def test_a_hostile_name_makes_no_markup_in_markdown() -> None:
    text = render_markdown(case_report(HOSTILE))
    assert "<" not in text
    assert "@" not in text
    assert "://" not in text
    assert not re.search(r"(?<!\\)[\[\]`]", text)
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert all(line.endswith("|") for line in rows)


def test_a_line_break_in_a_name_stays_inside_its_cell() -> None:
    assert escaped("a\n# b\u2028c\x1b[31m") == "a \\# b c \\[31m"


def test_a_hostile_name_calls_nobody_and_links_nowhere_in_a_chat() -> None:
    text = render_chat(case_report(f"{HOSTILE} <!channel> http://x @everyone\n" * 30))
    assert not set("@<>`*") & set(text)
    assert "://" not in text
    assert len(text) <= MOST_CHARACTERS
    assert len(text.splitlines()) == 5


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for name, text in _texts().items():
        (GOLDEN / name).write_text(text)
