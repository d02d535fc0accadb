"""A headless Chromium, for the tests of the server's page and for its pictures."""

import contextlib
import importlib.util
import shutil
from collections.abc import Iterator
from typing import Any

CHROMIUM, DRIVER = "chromium", "chromedriver"
FLAGS = (
    "--headless=new",
    "--no-sandbox",  # root has none
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
)


def why_not() -> str | None:
    """Return the missing parts of a browser; None if it is complete."""
    missing = [name for name in (CHROMIUM, DRIVER) if not shutil.which(name)]
    if importlib.util.find_spec("selenium") is None:
        missing.append("selenium (pip install selenium)")
    return f"{', '.join(missing)} is not installed" if missing else None


@contextlib.contextmanager
def browser() -> Iterator[Any]:
    """Return a context with a Selenium driver, its own profile, and all output of a page's console."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which(CHROMIUM) or CHROMIUM
    for flag in FLAGS:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options, Service(shutil.which(DRIVER)))
    try:
        yield driver
    finally:
        driver.quit()


def show_as(driver: Any, width: int, height: int, scheme: str = "light", scale: float = 1.0) -> None:
    """Set the size of the window (CSS pixels), the colour scheme and the device pixels per CSS pixel."""
    screen = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
