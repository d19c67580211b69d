"""The report in a few lines, to be posted where people talk. Names from outside call nobody and link nowhere."""

from __future__ import annotations

from placement.report.noun import Report
from placement.report.promises import promises_in_words
from placement.report.verdict import judge
from placement.report.words import copies_cost

MOST_CHARACTERS = 1200
_HARMLESS = str.maketrans({"@": "(at)", "<": "(", ">": ")", "`": "'", "*": "", "~": "", "|": "/"})


def render_chat(report: Report) -> str:
    """Plain text, at most 1,200 characters: what it is about, the verdict, what it costs, what it stands on."""
    placement, topology = report.plan.placement, report.topology
    lines = [
        f"{harmless(report.title)}: {harmless(report.model or 'a model')}, {placement.num_layers} layers x "
        f"{placement.num_experts} experts on {placement.num_ranks:,} GPUs ({harmless(topology.name)}), epoch "
        f"{placement.epoch}",
        judge(report.measured, report.part).text,
    ]
    if report.rounds:
        moves = sum(step.moves for step in report.rounds)
        lines.append(f"To move: {moves:,} experts{copies_cost(report)}, {len(report.rounds)} rounds.")
    if report.past:
        lines.append(promises_in_words(report.past))
    lines.append(_stands_on(report))
    text = "\n".join(lines)
    return (text if len(text) < MOST_CHARACTERS else text[: MOST_CHARACTERS - 2] + "…") + "\n"


def harmless(text: str) -> str:
    """One line of at most 80 characters, without what chats read as a mention, a link or a format."""
    plain = " ".join("".join(char if char.isprintable() else " " for char in text).translate(_HARMLESS).split())
    return (plain if len(plain) <= 80 else plain[:79] + "…").replace("://", ":/ /")


def _stands_on(report: Report) -> str:
    held_out = report.measured.held_out
    if report.counted is not None:
        return "Made from counts alone: load is known, which experts go together is not."
    if held_out is None:
        return f"Seen: {report.num_tokens:,} tokens of {report.num_requests:,} requests."
    return f"Judged on {held_out.tokens:,} tokens of {held_out.requests:,} requests that the plan was not fitted on."
