"""A real Chromium, headless, with what it complained about."""

import contextlib
import json
import os
import shutil

import pytest

_WAIT_S = 45


def obstacle():
    """Why no browser can be started here; empty if one can."""
    try:
        import selenium  # noqa: F401
    except ModuleNotFoundError:
        return "needs selenium: pip install 'tiered-kvstore[test]'"
    missing = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
    return f"needs {' and '.join(missing)}: apt-get install chromium chromium-driver" if missing else ""


needs_browser = pytest.mark.skipif(bool(obstacle()), reason=obstacle() or "there is one")


@contextlib.contextmanager
def browser(*, width=1000, height=900, dark=False):
    """Yield a driver of a fresh browser of that size, whose page may take long on a busy machine."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium")
    for word in (
        "--headless=new",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--disable-background-networking",
        "--disable-component-update",
        "--no-first-run",
        "--hide-scrollbars",
    ):
        options.add_argument(word)
    if os.geteuid() == 0:  # Chromium's sandbox does not start as root
        options.add_argument("--no-sandbox")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    with _direct():
        driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
        try:
            driver.set_page_load_timeout(90)
            driver.set_script_timeout(90)
            driver.execute_cdp_cmd(
                "Emulation.setDeviceMetricsOverride",
                {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600},
            )
            driver.execute_cdp_cmd("Emulation.setFocusEmulationEnabled", {"enabled": True})
            scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
            driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
            yield driver
        finally:
            driver.quit()


@contextlib.contextmanager
def _direct():
    """Have Selenium talk to its driver without a proxy that the environment may name."""
    named = {name: os.environ.pop(name) for name in list(os.environ) if name.lower().endswith("_proxy")}
    try:
        yield
    finally:
        os.environ.update(named)


def complaints(driver):
    """What the browser's console says, but for answers with an error status."""
    return [
        entry["message"]
        for entry in driver.get_log("browser")
        if "Failed to load resource" not in entry["message"]
    ]


def text_of(driver, selector):
    """The text of an element; empty if there is none."""
    script = "const found = document.querySelector(arguments[0]); return found ? found.innerText : ''"
    return driver.execute_script(script, selector)


def table_of(driver, section):
    """The rows of a section's table, as lists of texts without thin spaces."""
    script = """return [...document.querySelectorAll(`#${arguments[0]} tbody tr`)].map(
        (row) => [...row.cells].map((cell) => cell.textContent.replaceAll('\\u202f', '')))"""
    return driver.execute_script(script, section)


def wait_for(driver, condition, what="what was waited for"):
    """Ask until it holds, and return what it said."""
    from selenium.webdriver.support.ui import WebDriverWait

    seen = lambda _: condition() or False  # noqa: E731
    return WebDriverWait(driver, _WAIT_S, poll_frequency=0.1).until(
        seen, f"{what}: {json.dumps(text_of(driver, 'body'))[:2000]}"
    )
