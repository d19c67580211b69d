"""A headless Chromium to look at pages with."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest


@contextmanager
def open_chromium(width: int = 1100) -> Iterator[Any]:
    """Skips the test, with the reason, where there is no Chromium, no driver for it, or no selenium."""
    binary, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if binary is None or driver is None:
        pytest.skip("no chromium and chromedriver here: apt-get install chromium chromium-driver")
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed: scripts/install dev")
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for flag in ("headless=new", "no-sandbox", "disable-gpu", "disable-dev-shm-usage", f"window-size={width},900"):
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    browser = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    try:
        yield browser
    finally:
        browser.quit()


def open_page(browser: Any, page: Path) -> None:
    """Open a report, and wait until it can draw."""
    browser.get(page.as_uri())
    wait_for(browser, "return window.Plotly !== undefined")


def wait_for(browser: Any, script: str, timeout_s: float = 30.0) -> Any:
    """What a script returns, once that is true."""
    from selenium.webdriver.support.ui import WebDriverWait

    return WebDriverWait(browser, timeout_s, poll_frequency=0.05).until(lambda one: one.execute_script(script))
