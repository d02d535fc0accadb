"""The page at /, in a headless Chromium."""

import re
import time
from types import SimpleNamespace

import chromium
import pytest
from http_server import events, in_the_making, served

from gearbx_mlx.server import app
from gearbx_mlx.server.answers import event_text
from gearbx_mlx.server.job import Batch
from gearbx_mlx.server.web import Gatekeeper, Guard, event_stream
from gearbx_mlx.telemetry.trace import gear_color

pytestmark = pytest.mark.browser

GEARS = ("low", "mid", "high")
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


@pytest.fixture(scope="module")
def client():
    if why := chromium.why_not():
        pytest.skip(f"THE PAGE WAS NOT CHECKED: {why}")
    with served(gears="4,8,16", mode="route", log_level="ERROR", max_tokens=40) as client:
        yield client


@pytest.fixture(scope="module")
def driver(client):
    with chromium.browser() as driver:
        yield driver


@pytest.fixture
def page(client, driver):
    """The page, opened again. Afterwards the console must have no error but the network's own, and no warning."""
    chromium.show_as(driver, 1000, 760)
    page = Page(driver)
    page.open(client.server.url)
    page.wait(lambda: page.all("#legend .token"))
    yield page
    said = [entry for entry in driver.get_log("browser") if entry["source"] != "network"]
    assert [entry for entry in said if entry["level"] != "INFO"] == []


@pytest.fixture
def scripted(monkeypatch):
    """Make the server stream these events instead of an answer; returns the requests that came."""
    asked = []

    def answer_with(*said, ended=True):
        async def complete(here, body, request, dialect):
            asked.append(request.model_dump(exclude_unset=True))
            sent = [event_text((None, one)) for one in ((*said, "[DONE]") if ended else said)]
            return event_stream(iter(sent))

        monkeypatch.setattr(app, "complete", complete)
        return asked

    return answer_with


def test_tokens_have_gear_color_and_point(page):
    page.send(QUESTION)
    answer = page.answer()
    assert len(answer["points"]) == 40
    assert "".join(span["text"] for span in answer["spans"]) == answer["text"] != ""
    colors = dict(zip(GEARS, (gear_color(index, 3) for index in range(3))))
    for span in answer["spans"]:
        gear, entropy = span["title"].split("; ")[-1].split(", ")
        assert span["color"] == colors[gear]
        assert any(f"{point['entropy']:.2f} bits" == entropy for point in answer["points"] if point["gear"] == gear)
    of_each = "(mark) => [mark.dataset.gear, mark.getAttribute('fill')]"
    marks = page.run(f"return [...document.querySelectorAll('.point')].map({of_each})")
    assert marks == [[point["gear"], colors[point["gear"]]] for point in answer["points"]]
    assert len(page.run("return [...document.querySelector('#trace .mean').points]")) == 40
    assert len(page.all("#trace .threshold")) == 2
    assert page.find("#message").get_attribute("value") == ""


def test_mode_and_gear_match_choice(page):
    modes = page.run("return [...document.querySelectorAll('#mode option')].map((option) => option.value)")
    assert modes == ["route", "kickdown", "lossless", "static"]
    page.choose("gear", "mid")
    assert page.find("#mode").get_attribute("value") == "static"
    page.send(QUESTION)
    assert {point["gear"] for point in page.answer()["points"]} == {"mid"}
    page.choose("mode", "route")
    assert page.find("#gear").get_attribute("value") == ""
    page.choose("mode", "static")
    assert page.find("#gear").get_attribute("value") == "high"
    page.send(QUESTION)
    assert {point["gear"] for point in page.answer()["points"]} == {"high"}
    assert page.all("#trace .threshold") == []


@pytest.mark.parametrize("how", ["escape", "button"])
def test_stop_ends_the_servers_work(page, client, monkeypatch, how):
    step = Batch.step

    def slowly(batch):
        time.sleep(0.1)
        return step(batch)

    monkeypatch.setattr(Batch, "step", slowly)
    page.send(QUESTION)
    page.wait(lambda: page.all(".point"))
    assert in_the_making(client) == 1
    if how == "escape":
        page.find("#message").send_keys("\ue00c")
    else:
        page.find("#stop").click()
    page.wait(lambda: in_the_making(client) == 0, 2)
    assert 0 < len(page.answer()["points"]) < 40
    assert page.text(".summary").startswith("stopped · ")
    assert page.text("#problem") == ""
    assert page.run("return document.activeElement.id") == "message"
    assert page.find("#send").is_displayed()
    assert not page.find("#stop").is_displayed()


def test_several_turns_are_one_conversation_until_reset(page, scripted):
    asked = scripted(chunk("Twelve.", ("low", 1.0, 1.0)))
    page.send("How many?")
    page.answer()
    page.send("Are\ue008\ue007\ue000you sure?")  # Shift+Enter, and no Shift any more
    page.answer()
    assert [message["content"] for message in asked[1]["messages"]] == ["How many?", "Twelve.", "Are\nyou sure?"]
    assert [message["role"] for message in asked[1]["messages"]] == ["user", "assistant", "user"]
    page.find("#reset").click()
    assert page.all(".turn") == page.all(".point") == []
    page.send("Again?")
    page.answer()
    assert len(asked[2]["messages"]) == 1


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_contrast_is_at_least_4_5(page, scripted, scheme):
    chromium.show_as(page.driver, 1000, 760, scheme)
    scripted(*(chunk(gear, (gear, 1.0, 1.0)) for gear in GEARS), {"error": {"message": "no"}})
    page.send("Hello")
    page.answer()
    found = page.run(CONTRASTS)
    assert len(found) > 15
    assert {name: contrast for name, contrast in found.items() if contrast < 4.5} == {}


def test_every_element_has_accessible_name(page, scripted):
    scripted(chunk("Yes", ("low", 1.0, 1.0)))
    page.send("Hello")
    page.answer()
    for selector in ("#mode", "#gear", "#message", "#trace", "main", "#panel", "#legend"):
        assert page.find(selector).accessible_name, selector
    answer = page.find(".answer")
    assert (answer.get_attribute("aria-live"), answer.get_attribute("aria-busy")) == ("polite", "false")
    assert page.find("#problem").aria_role == "alert"


def test_page_is_single_uncached_file(client):
    answer = client.get("/")
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert answer.headers["cache-control"] == "no-store"
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy
    assert set(re.findall(r"https?://[\w./]+", answer.text)) == {"http://www.w3.org/2000/svg"}
    head = client.head("/")
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-length"] == str(len(answer.content))
    assert client.head("/v1/models").status_code == 405


def test_thresholds_and_rolling_means_are_the_modes_own(client):
    body = {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 8}
    chunks = events(client, "/v1/chat/completions", **body, gearbx={"mode": "route", "thresholds": [0.5, 2.5]})
    assert chunks[0]["gearbx"]["thresholds"] == [0.5, 2.5]
    tokens = [token for one in chunks for token in one["gearbx"]["tokens"]]
    assert tokens[0]["mean_entropy"] == tokens[0]["entropy"]
    assert tokens[1]["mean_entropy"] == pytest.approx((tokens[0]["entropy"] + tokens[1]["entropy"]) / 2, abs=1e-4)


HOSTILE = '<img src=x onerror="window.hacked=1"><script>window.hacked=1</script>&lt;b&gt;'


def test_key_is_requested_and_kept_per_tab(page, monkeypatch):
    check, sesame = Gatekeeper.check_key, SimpleNamespace(guard=Guard("sesame"))
    monkeypatch.setattr(Gatekeeper, "check_key", lambda _, headers: check(sesame, headers))
    page.driver.refresh()  # the list of models needs it too
    for key, why in (("wrong", "requires a key"), ("sesame", "refuses this key")):
        page.wait(lambda why=why: why in page.text("#ask-why") and page.find("#ask").is_displayed())
        page.find("#key").send_keys(key + "\ue007")
    page.wait(lambda: page.all("#legend .token"))
    page.send(QUESTION)
    assert len(page.answer()["points"]) == 40
    kept = page.run("return [sessionStorage.getItem('gearbx-key'), localStorage.length, document.cookie]")
    assert kept == ["sesame", 0, ""]
    page.driver.refresh()
    page.wait(lambda: page.all("#legend .token"))
    assert not page.find("#ask").is_displayed()


def test_server_error_is_single_line(page):
    page.run("document.getElementById('message').value = 'word '.repeat(600)")
    page.send("")
    page.wait(lambda: page.text("#problem"))
    assert "tokens, and the model's context 512" in page.text("#problem")
    assert page.find("#problem").size["height"] == 24
    page.run("document.getElementById('message').value = ''")
    page.send("Hi")
    assert page.text("#problem") == ""
    page.answer()


def test_interrupted_answer_keeps_received_tokens(page, scripted):
    scripted(chunk("Half", ("low", 1.0, 1.0)), ended=False)
    page.send("Hello")
    answer = page.answer()
    assert (answer["text"], len(answer["points"])) == ("Half", 1)
    assert page.text("#problem") == "Incomplete answer: the server closed the connection."
    assert page.text(".summary").startswith("incomplete · 1 token · ")


def test_hostile_output_is_escaped(page, scripted):
    tokens = (HOSTILE, 1.0, 1.0), ("low", 1.0, 1.0)
    error = {"error": {"message": HOSTILE}}
    scripted({"choices": [{"delta": {"reasoning": HOSTILE}}]}, chunk(HOSTILE, *tokens), error)
    page.send(HOSTILE)
    assert page.answer()["text"] == HOSTILE
    assert page.text(".question") == page.text(".thoughts") == page.text("#problem") == HOSTILE
    assert page.text(".answer") == HOSTILE + HOSTILE
    assert page.all("img") == []
    assert page.run("return window.hacked ?? null") is None


def test_injected_script_in_page_is_blocked(page):
    page.run(
        """const script = document.createElement("script");
        script.textContent = "window.hacked = 1";
        document.body.append(script);
        document.body.insertAdjacentHTML("beforeend", arguments[0]);""",
        HOSTILE,
    )
    time.sleep(0.1)
    assert page.run("return window.hacked ?? null") is None
    refused = [entry["message"] for entry in page.driver.get_log("browser")]
    assert any("Content Security Policy" in message for message in refused)
