"""The page at / when something is wrong: keys, errors, interrupted answers, hostile text."""

import time
from types import SimpleNamespace

import pytest
from fastapi import APIRouter
from page_in_browser import QUESTION, Page, chunk

from gearbx_mlx.serving.listening import Server
from gearbx_mlx.serving.web import Gatekeeper, Guard, application, front

pytestmark = pytest.mark.browser

pytest_plugins = ["page_fixtures"]

HOSTILE = '<img src=x onerror="window.hacked=1"><script>window.hacked=1</script>&lt;b&gt;'


def ask_for_a_key(monkeypatch):
    """The server asks for the key `sesame` from now on."""
    check = Gatekeeper.check_key
    monkeypatch.setattr(
        Gatekeeper, "check_key", lambda _, headers: check(SimpleNamespace(guard=Guard("sesame")), headers)
    )


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


def test_an_answer_that_breaks_off_keeps_what_came(page, scripted):
    scripted(chunk("Half", ("low", 1.0, 1.0)), ended=False)
    page.send("Hello")
    answer = page.answer()
    assert (answer["text"], len(answer["points"])) == ("Half", 1)
    assert page.text("#problem") == "The answer broke off: the server ended the connection."
    assert page.text(".summary").startswith("broken off · 1 token · ")


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


def test_even_a_script_in_the_page_would_not_run(page):
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


def test_a_server_that_has_gone(driver):
    router = APIRouter()
    router.include_router(front)

    @router.get("/v1/models")
    async def models():  # of a server that has no gears
        return {"data": [{"id": "other"}]}

    page = Page(driver)
    with Server("127.0.0.1", 0) as server:
        server.start(application(router, Guard()))
        page.open(server.where)
        page.wait(lambda: page.text("#model") == "other")
        server.stop()
    page.send("Hello")
    page.wait(lambda: page.text("#problem"))
    assert page.text("#problem") == "The server does not answer. Is it still running?"
    assert page.find("#message").get_attribute("value") == "Hello"
