"""A report as a reader has it before them: in a real browser, by mouse, by keyboard, on a phone, on paper."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from placement.report import render_html, tables
from tests.browser.chromium import open_chromium, open_page, wait_for
from tests.placement.report_case import HOSTILE, case_report

pytestmark = pytest.mark.browser

CHARTS = (
    "scores",
    "rank-load",
    "rank-memory",
    "expert-load",
    "activation",
    "together",
    "transitions",
    "migration",
    "cache",
)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(render_html(case_report()))
    return path


@pytest.fixture(scope="module")
def browser(page: Path) -> Iterator[Any]:
    with open_chromium() as browser:
        open_page(browser, page)
        yield browser


@pytest.fixture
def report(browser: Any, page: Path) -> Iterator[Any]:
    """The page, open; at the end of each test its console must be empty."""
    if browser.current_url != page.as_uri():
        open_page(browser, page)
    yield browser
    assert browser.get_log("browser") == []


def _show(browser: Any, chart: str) -> Any:
    """Scroll to a chart and wait until it is drawn."""
    browser.execute_script(f"document.getElementById('chart-{chart}').scrollIntoView()")
    wait_for(browser, f"return document.querySelector('#chart-{chart} .main-svg')")
    return browser.find_element("css selector", f"#chart-{chart} .plot")


def _reading(browser: Any, chart: str) -> str:
    text: str = browser.execute_script(f"return document.querySelector('#chart-{chart} .reading').textContent")
    return text


def test_charts_are_drawn_when_they_come_into_sight(report: Any, page: Path) -> None:
    open_page(report, page)
    assert report.execute_script("return document.querySelectorAll('.chart').length") == len(CHARTS)
    assert not report.execute_script("return document.querySelector('#chart-cache .main-svg')")
    for chart in CHARTS:
        _show(report, chart)


def test_hovering_shows_the_numbers(report: Any) -> None:
    from selenium.webdriver.common.action_chains import ActionChains

    plot = _show(report, "expert-load")
    ActionChains(report).move_to_element_with_offset(plot, 30, 30).perform()
    label = wait_for(report, "return document.querySelector('#chart-expert-load .hovertext')?.textContent")
    assert "layer" in label
    assert "x the mean" in label


def test_arrow_keys_read_the_numbers_of_a_heat_map(report: Any) -> None:
    plot = _show(report, "expert-load")
    plot.send_keys("\ue014")
    assert _reading(report, "expert-load") == "layer 0, expert 0 on 0, 1: 1.00 (load over the layer's mean)"
    plot.send_keys("\ue015\ue014\ue014")
    assert _reading(report, "expert-load").startswith("layer 1, expert 2 on")
    assert wait_for(report, "return document.querySelector('#chart-expert-load .hovertext')?.textContent")


def test_arrow_keys_read_the_numbers_of_bars(report: Any) -> None:
    plot = _show(report, "scores")
    plot.send_keys("\ue014\ue015\ue015")
    assert _reading(report, "scores") == "plan, other nodes: 0.6"


def test_a_list_picks_what_a_chart_shows(report: Any) -> None:
    from selenium.webdriver.support.ui import Select

    _show(report, "activation")
    lists = report.find_elements("css selector", "#chart-activation select")
    Select(lists[0]).select_by_visible_text("prose (80 tokens)")
    Select(lists[1]).select_by_visible_text("1")
    shown = "return document.querySelector('#chart-activation .plot').data[0].z"
    share = report.execute_script(f"{shown}.map((row) => Array.from(row))")
    expected = 100 * case_report().activation.share[1, 1]  # type: ignore[union-attr]
    assert [value for row in share for value in row] == pytest.approx(expected.ravel().tolist(), abs=0.01)


def test_every_chart_writes_its_numbers_as_a_table(report: Any) -> None:
    for chart in CHARTS:
        fold = f"document.querySelector('#chart-{chart} .all')"
        report.execute_script(f"{fold}.open = true")
        wait_for(report, f"return {fold}.querySelector('tbody td')")
    rows = "return [...document.querySelectorAll('#chart-expert-load .all tr')].map((row) => row.innerText)"
    assert report.execute_script(rows)[1].split() == ["0", *["1.00"] * 8]
    rows = rows.replace("expert-load", "migration")
    assert [row.split() for row in report.execute_script(rows)] == [["copies"], ["1", "1"], ["2", "8"], ["3", "7"]]


def test_the_theme_button_goes_from_the_systems_to_light_to_dark(report: Any) -> None:
    button = report.find_element("id", "theme")
    paper = "return getComputedStyle(document.body).backgroundColor"
    seen = []
    for _ in range(3):
        button.click()
        seen.append((button.text, report.execute_script(paper)))
    assert seen[:2] == [("Theme: light", "rgb(255, 255, 255)"), ("Theme: dark", "rgb(21, 24, 29)")]
    assert seen[2][0] == "Theme: system"


def test_everything_can_be_reached_by_tab_and_has_a_name(report: Any) -> None:
    nameless = """
        const named = (one) => one.getAttribute('aria-label') || one.closest('label') || one.textContent.trim();
        return [...document.querySelectorAll('button, select, summary, a, .plot')]
          .filter((one) => one.tabIndex < 0 || !named(one)).length
    """
    assert report.execute_script(nameless) == 0
    tags = report.execute_script("return [...document.querySelectorAll('h1, h2, main, nav')].map((one) => one.tagName)")
    assert tags.count("H1") == tags.count("MAIN") == 1
    assert len(set(report.execute_script("return [...document.querySelectorAll('[id]')].map((one) => one.id)"))) > 20


def test_a_phone_shows_the_page_without_sideways_scrolling(report: Any, page: Path) -> None:
    size = {"width": 390, "height": 800, "deviceScaleFactor": 2, "mobile": True}
    report.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    try:
        open_page(report, page)
        for chart in CHARTS:
            _show(report, chart)
        wait_for(report, "return document.documentElement.scrollWidth <= 390")
    finally:
        report.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_paper_has_every_chart_and_every_fold(report: Any) -> None:
    printed = base64.b64decode(report.execute_cdp_cmd("Page.printToPDF", {"printBackground": True})["data"])
    assert printed.startswith(b"%PDF")
    assert report.execute_script("return document.querySelectorAll('.plot .main-svg').length") >= len(CHARTS)
    assert report.execute_script("return document.querySelectorAll('details[open]:not(.all)').length") == 0


def test_hostile_names_are_text(browser: Any, tmp_path: Path) -> None:
    path = tmp_path / "hostile.html"
    path.write_text(render_html(case_report(HOSTILE)))
    open_page(browser, path)
    for chart in CHARTS:
        _show(browser, chart)
        browser.execute_script(f"document.querySelector('#chart-{chart} .all').open = true")
        wait_for(browser, f"return document.querySelector('#chart-{chart} .all td')")
    assert browser.execute_script("return window.hacked") is None
    assert browser.execute_script("return document.images.length") == 0
    assert HOSTILE in browser.execute_script("return document.body.textContent")
    assert HOSTILE in browser.execute_script("return document.querySelector('#chart-activation option').textContent")
    assert browser.title == HOSTILE
    assert browser.get_log("browser") == []


def test_without_scripts_the_numbers_are_there(browser: Any, page: Path) -> None:
    hits = tables.cache(case_report().cache).rows[0][1]  # type: ignore[arg-type]
    browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    try:
        browser.get(page.as_uri())
        assert "Without scripts charts are not drawn" in browser.find_element("css selector", "noscript").text
        assert browser.find_element("css selector", "#cache details td").get_attribute("textContent") == hits
    finally:
        browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})
