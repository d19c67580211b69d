"""What a report says, in order, without its charts: the forms that are text alone are made from this."""

from __future__ import annotations

from dataclasses import dataclass

from placement.report import tables
from placement.report.noun import Report
from placement.report.promises import promises_in_words
from placement.report.tables import Table
from placement.report.words import cache_in_words, migration_in_words


@dataclass(frozen=True, slots=True, kw_only=True)
class Chapter:
    heading: str
    text: str
    tables: tuple[Table, ...]


def chapters(report: Report) -> list[Chapter]:
    """Those that have something to say."""
    scores = [tables.scores(report)] if report.measured.scores else []
    if report.measured.trust:
        scores.append(tables.trust(report))
    found = [
        Chapter(
            heading="Before and after",
            text="" if scores else "This plan carries no measured figures.",
            tables=tuple(scores),
        )
    ]
    if report.live:
        found.append(_chapter("Measured live", "", tables.live(report.live)))
    if report.traffic_after.arrivals:
        found.append(_chapter("Topology and traffic", "", tables.levels(report)))
    found.append(_chapter("Load and memory of the ranks", "", tables.ranks(report)))
    found.append(_chapter("Load of the experts", "", tables.experts(report)))
    if report.activation:
        found.append(_chapter("Experts by position", "", tables.activation(report.activation)))
    if report.coactivation:
        found.append(_chapter("Experts used together", "", tables.together(report)))
    if report.transitions:
        found.append(_chapter("From layer to layer", "", tables.transitions(report)))
    if report.rounds:
        found.append(_chapter("Migration", migration_in_words(report), tables.rounds(report)))
    if report.cache:
        words = cache_in_words(report.cache, report.plan.placement.rows_per_rank)
        found.append(_chapter("Cache", words, tables.cache(report.cache)))
    if report.past:
        found.append(_chapter("Past plans", promises_in_words(report.past), tables.past(report.past)))
    return found


def _chapter(heading: str, text: str, table: Table) -> Chapter:
    return Chapter(heading=heading, text=text, tables=(table,))
