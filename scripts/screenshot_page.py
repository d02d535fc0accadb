"""Take pictures of the server's page with an answer of the demo model: light, dark, and as wide as a phone.

    python scripts/screenshot_page.py docs/images

The text is in the fonts of this machine. Needs Chromium, its driver and selenium.
"""

import argparse
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import chromium

from gearbx_mlx.cli.settings import command_settings
from gearbx_mlx.server import ServerSettings
from gearbx_mlx.server.run import serving

QUESTION = "Claire makes a 3 egg omelet every morning for breakfast. How many dozens of eggs will she eat in 4 weeks?"
PATIENCE = 60  # seconds


@dataclass(frozen=True)
class Picture:
    name: str
    width: int
    height: int
    scheme: str


PICTURES = (
    Picture("page_light.png", 900, 660, "light"),
    Picture("page_dark.png", 900, 660, "dark"),
    Picture("page_phone.png", 390, 760, "light"),
)


def ask(driver: Any, url: str) -> None:
    """Open the page, ask, and wait for the whole answer. Raises TimeoutError."""
    driver.get(url)
    driver.find_element("id", "message").send_keys(QUESTION + "\ue007")
    until = time.monotonic() + PATIENCE
    while not driver.execute_script("return answers.at(-1)?.ended"):
        if time.monotonic() > until:
            raise TimeoutError(f"no answer in {PATIENCE} s")
        time.sleep(0.1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="Directory of the pictures.")
    out = parser.parse_args().out
    if why := chromium.why_not():
        sys.exit(why)
    with serving(command_settings(ServerSettings, {"port": 0})) as server, chromium.browser() as driver:
        for picture in PICTURES:
            chromium.show_as(driver, picture.width, picture.height, picture.scheme, scale=1.5)
            ask(driver, server.where)
            driver.save_screenshot(str(out / picture.name))
            print(out / picture.name)


if __name__ == "__main__":
    main()
