"""Reports: what a plan does, in numbers (`make_report`), as one self-contained page (`render_html`), and as JSON."""

from placement.report.jsonform import report_to_json
from placement.report.noun import LiveFigure, Report, make_report
from placement.report.page import render_html

__all__ = ["LiveFigure", "Report", "make_report", "render_html", "report_to_json"]
