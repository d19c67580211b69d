"""Reports: what a plan does, in numbers (`make_report`), as one page, Markdown, JSON, and a few lines for a chat."""

from placement.report.chat import render_chat
from placement.report.jsonform import report_to_json
from placement.report.markdown import render_markdown
from placement.report.noun import LiveFigure, Report, Sizes, make_counts_report, make_report
from placement.report.page import render_html
from placement.report.partly import take_part
from placement.report.promises import PastEpoch

__all__ = [
    "LiveFigure",
    "PastEpoch",
    "Report",
    "Sizes",
    "make_counts_report",
    "make_report",
    "render_chat",
    "render_html",
    "render_markdown",
    "report_to_json",
    "take_part",
]
