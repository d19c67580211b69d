"""What `moetis report` does: files in, a report out."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from cluster.promises import past_epochs
from cluster.sources import hints_of, read_source
from placement.core import Placement
from placement.counts import Counts
from placement.errors import ConfigError
from placement.modelsizes import NamedSizes, named_sizes, sizes_by_shape
from placement.planfile import Plan, load_plan, plan_to_json
from placement.report import (
    Report,
    Sizes,
    make_counts_report,
    make_report,
    render_chat,
    render_html,
    render_markdown,
    report_to_json,
    take_part,
)
from placement.trace import RoutingTrace

FORM_OF_SUFFIX = {
    ".html": "html",
    ".htm": "html",
    ".md": "markdown",
    ".markdown": "markdown",
    ".json": "json",
    ".txt": "chat",
}
RENDERERS = {"html": render_html, "markdown": render_markdown, "json": report_to_json, "chat": render_chat}


def form_of(path: Path) -> str:
    """The form that a file's name asks for. Raises ConfigError where its suffix says nothing."""
    form = FORM_OF_SUFFIX.get(path.suffix.lower())
    if form is None:
        raise ConfigError(f"--out '{path}': ends in none of {', '.join(FORM_OF_SUFFIX)}; name the form with --format")
    return form


def render(report: Report, form: str) -> str:
    return RENDERERS[form](report)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportInput:
    """The files and figures that a report is asked for with; None where one was not given."""

    plan: str
    trace: str
    current: str | None
    history: str | None
    model: str | None
    expert_bytes: int | None
    token_bytes: int | None
    counts_key: str | None
    title: str


def gather(given: ReportInput) -> tuple[Report, Placement | None]:
    """The report, and the present placement if one was given. Raises as the readers and `make_report`."""
    plan = load_plan(given.plan)
    before = load_plan(given.current).placement if given.current is not None else None
    past = past_epochs(Path(given.history)) if given.history is not None else ()
    trace = read_source(given.trace, hints_of(plan, given.counts_key))
    sizes = _sizes(given, trace)
    if isinstance(trace, Counts):
        report = make_counts_report(plan, trace, before=before, past=past, sizes=sizes, title=given.title)
    else:
        report = make_report(plan, trace, before=before, past=past, sizes=sizes, title=given.title)
    return report, before


def _sizes(given: ReportInput, trace: RoutingTrace | Counts) -> Sizes:
    """As given; else of the model that is named, or that has the trace's shape; else not known."""
    named: NamedSizes | None = None
    if given.model is not None:
        named = named_sizes(given.model)
    elif isinstance(trace, RoutingTrace):
        named = sizes_by_shape(trace)
    if given.expert_bytes is not None and given.token_bytes is not None:
        named = None
    return Sizes(
        expert_bytes=given.expert_bytes or (None if named is None else round(named.sizes.expert_bytes)),
        token_bytes=given.token_bytes or (None if named is None else named.sizes.token_bytes),
        origin="" if named is None else named.origin,
    )


def part_of(report: Report, before: Placement | None) -> bytes:
    """The plan file of the part that the verdict names. Raises ConfigError where there is none."""
    if report.part is None or before is None:
        raise ConfigError("--part: no part of this plan brings nearly all of it for few copies; nothing is written")
    placement = take_part(before, report.plan.placement, report.part.layers)
    says = f"layers {', '.join(map(str, report.part.layers))} of a plan; the others as they are"
    measured = {name: value for name, value in report.plan.measured.items() if name == "layers"} | {"says": says}
    return plan_to_json(Plan(placement=placement, topology=report.topology, measured=measured)).encode()
