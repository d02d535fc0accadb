"""The page at / as its user sees it, and the sizes and contrasts that a ruler would show."""

import sys
import time
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "scripts"))
import chromium  # noqa: F401 - tests of the page import these from here

QUESTION = "Tom has 5 apples and buys 7 more. How many does he have?"


class Page:
    """The page in a browser; `driver` is Selenium's."""

    def __init__(self, driver):
        self.driver = driver

    def run(self, script, *arguments):
        return self.driver.execute_script(script, *arguments)

    def open(self, url):
        self.driver.get(url)
        self.run("sessionStorage.clear()")

    def find(self, selector):
        return self.driver.find_element("css selector", selector)

    def all(self, selector):
        return self.driver.find_elements("css selector", selector)

    def text(self, selector):
        return self.run("return document.querySelector(arguments[0])?.textContent ?? null", selector)

    def choose(self, select, value):
        self.find(f"#{select} option[value='{value}']").click()

    def point_at(self, element):
        from selenium.webdriver import ActionChains

        ActionChains(self.driver).move_to_element(element).perform()

    def send(self, text, key="\ue007"):
        self.find("#message").send_keys(text + key)

    def wait(self, condition, seconds=60):
        """Until `condition()` is true; returns what it is then."""
        deadline = time.monotonic() + seconds
        while not (found := condition()):
            assert time.monotonic() < deadline, f"not in {seconds} s; the page says {self.text('#problem')!r}"
            time.sleep(0.02)
        return found

    def answer(self):
        """The last answer's tokens, once it has ended: text, colour and title of each, and the page's own points."""
        self.wait(lambda: self.run("return running === null && answers.length > 0"))
        return self.run("""const answer = answers.at(-1);
            return {text: answer.text, points: answer.points.map(({gear, entropy, mean}) => ({gear, entropy, mean})),
              spans: [...answer.turn.querySelectorAll(".token")].map((span) =>
                ({text: span.textContent, color: span.style.getPropertyValue("--gear"), title: span.title}))}""")


def chunk(text, *tokens, **further):
    """A chunk as the server sends it; tokens are (gear, entropy, rolling mean), and perhaps who proposed each."""
    names = "gear", "entropy", "mean_entropy", "source"
    seen = [dict(zip(names, token)) for token in tokens]
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": None}
    return {"choices": [choice], "gearbx": {"tokens": seen, **further}}


# The contrast of every visible text with its background.
CONTRASTS = """
const canvas = new OffscreenCanvas(1, 1).getContext("2d", {willReadFrequently: true});
function over(colors) {  // what colours look like, the first under the others
  canvas.clearRect(0, 0, 1, 1);
  for (const color of colors) { canvas.fillStyle = color; canvas.fillRect(0, 0, 1, 1); }
  const [r, g, b] = [...canvas.getImageData(0, 0, 1, 1).data].map((c) => c / 255)
    .map((c) => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
}
const found = {};
for (const element of document.querySelectorAll("body *")) {
  const own = [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
  if (!own || !element.checkVisibility() || ["OPTION", "SCRIPT"].includes(element.tagName)) continue;
  const style = getComputedStyle(element), under = [];
  for (let each = element; each; each = each.parentElement) under.unshift(getComputedStyle(each).backgroundColor);
  const text = element.closest("svg") ? style.fill : style.color;
  const [dark, light] = [over(under), over([...under, text])].sort((a, b) => a - b);
  const kind = element.className.baseVal ?? element.className;
  found[`${element.tagName} ${element.id} ${kind} ${element.textContent}`] = (light + 0.05) / (dark + 0.05);
}
return found;
"""

# x, y, width and height of what may not move.
PLACES = """
const fixed = ["header", "main", "#panel", "#legend", "#trace", "#composer", "#problem", "#message"];
return fixed.map((each) => document.querySelector(each).getBoundingClientRect())
  .map(({x, y, width, height}) => [x, y, width, height]);
"""
