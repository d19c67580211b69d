"""Reports: what a plan does, in numbers (`make_report`) and as one self-contained page (`render_html`)."""

from placement.report.noun import LiveFigure, Report, make_report
from placement.report.page import render_html

__all__ = ["LiveFigure", "Report", "make_report", "render_html"]
