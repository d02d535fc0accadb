"""The page at /, in a headless Chromium."""

import json
import re
import time
from types import SimpleNamespace

import httpx
import pytest
from http_server import in_the_making
from page_in_browser import CONTRASTS, QUESTION, chromium, chunk

from gearbx_mlx.serving.job import Batch
from gearbx_mlx.serving.web import Gatekeeper, Guard
from gearbx_mlx.telemetry.trace import gear_color

pytestmark = pytest.mark.browser

pytest_plugins = ["page_fixtures"]

GEARS = ("low", "mid", "high")


def test_tokens_appear_in_the_colour_of_their_gear_with_a_point_each(page):
    page.send(QUESTION)
    answer = page.answer()
    assert len(answer["points"]) == 40
    assert "".join(span["text"] for span in answer["spans"]) == answer["text"] != ""
    colors = dict(zip(GEARS, (gear_color(index, 3) for index in range(3))))
    for span in answer["spans"]:
        gear, entropy = span["title"].split("; ")[-1].split(", ")
        assert span["color"] == colors[gear]
        assert any(f"{point['entropy']:.2f} bits" == entropy for point in answer["points"] if point["gear"] == gear)
    marks = page.run(
        "return [...document.querySelectorAll('.point')].map((mark) => [mark.dataset.gear, mark.getAttribute('fill')])"
    )
    assert marks == [[point["gear"], colors[point["gear"]]] for point in answer["points"]]
    assert len(page.run("return [...document.querySelector('#trace .mean').points]")) == 40
    assert len(page.all("#trace .threshold")) == 2
    assert page.find("#message").get_attribute("value") == ""


def test_mode_and_gear_are_those_that_were_chosen(page):
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
def test_text_has_a_contrast_of_4_5(page, scripted, scheme):
    chromium.show_as(page.driver, 1000, 760, scheme)
    scripted(*(chunk(gear, (gear, 1.0, 1.0)) for gear in GEARS), {"error": {"message": "no"}})
    page.send("Hello")
    page.answer()
    found = page.run(CONTRASTS)
    assert len(found) > 15
    assert {name: contrast for name, contrast in found.items() if contrast < 4.5} == {}


def test_everything_has_a_name_for_those_who_do_not_see_it(page, scripted):
    scripted(chunk("Yes", ("low", 1.0, 1.0)))
    page.send("Hello")
    page.answer()
    for selector in ("#mode", "#gear", "#message", "#trace", "main", "#panel", "#legend"):
        assert page.find(selector).accessible_name, selector
    answer = page.find(".answer")
    assert (answer.get_attribute("aria-live"), answer.get_attribute("aria-busy")) == ("polite", "false")
    assert page.find("#problem").aria_role == "alert"


def test_the_page_is_one_file_that_no_browser_keeps(client):
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
    body = {"messages": [{"role": "user", "content": QUESTION}], "stream": True, "max_tokens": 8}
    asked = {"mode": "route", "thresholds": [0.5, 2.5]}
    with httpx.Client(base_url=client.server.where, timeout=60) as http:
        lines = http.post("/v1/chat/completions", json={**body, "gearbx": asked}).text.splitlines()
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert chunks[0]["gearbx"]["thresholds"] == [0.5, 2.5]
    tokens = [token for one in chunks for token in one["gearbx"]["tokens"]]
    assert tokens[0]["mean_entropy"] == tokens[0]["entropy"]
    assert tokens[1]["mean_entropy"] == pytest.approx((tokens[0]["entropy"] + tokens[1]["entropy"]) / 2, abs=1e-4)


HOSTILE = '<img src=x onerror="window.hacked=1"><script>window.hacked=1</script>&lt;b&gt;'


def ask_for_a_key(monkeypatch):
    """The server asks for the key `sesame` from now on."""
    check = Gatekeeper.check_key
    monkeypatch.setattr(
        Gatekeeper, "check_key", lambda _, headers: check(SimpleNamespace(guard=Guard("sesame")), headers)
    )


@pytest.mark.browser
def test_the_key_is_asked_for_and_kept_for_the_tab(page, monkeypatch):
    ask_for_a_key(monkeypatch)
    page.driver.refresh()  # the list of models needs it too
    for key, why in (("wrong", "asks for a key"), ("sesame", "does not take this key")):
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


@pytest.mark.browser
def test_an_error_of_the_server_is_one_line(page):
    page.run("document.getElementById('message').value = 'word '.repeat(600)")
    page.send("")
    page.wait(lambda: page.text("#problem"))
    assert "tokens, and the model's context 512" in page.text("#problem")
    assert page.find("#problem").size["height"] == 24
    page.run("document.getElementById('message').value = ''")
    page.send("Hi")
    assert page.text("#problem") == ""
    page.answer()


@pytest.mark.browser
def test_an_answer_that_breaks_off_keeps_what_came(page, scripted):
    scripted(chunk("Half", ("low", 1.0, 1.0)), ended=False)
    page.send("Hello")
    answer = page.answer()
    assert (answer["text"], len(answer["points"])) == ("Half", 1)
    assert page.text("#problem") == "The answer broke off: the server ended the connection."
    assert page.text(".summary").startswith("broken off · 1 token · ")


@pytest.mark.browser
def test_hostile_text_is_text(page, scripted):
    tokens = (HOSTILE, 1.0, 1.0), ("low", 1.0, 1.0)
    error = {"error": {"message": HOSTILE}}
    scripted({"choices": [{"delta": {"reasoning": HOSTILE}}]}, chunk(HOSTILE, *tokens), error)
    page.send(HOSTILE)
    assert page.answer()["text"] == HOSTILE
    assert page.text(".question") == page.text(".thoughts") == page.text("#problem") == HOSTILE
    assert page.text(".answer") == HOSTILE + HOSTILE
    assert page.all("img") == []
    assert page.run("return window.hacked ?? null") is None
