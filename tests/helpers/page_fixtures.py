"""What tests of the page at / share: a server, a browser that shows its page, and answers that a test writes itself."""

import pytest
from http_server import served
from page_in_browser import Page, chromium

from gearbx_mlx.serving import app
from gearbx_mlx.serving.answers import event_text
from gearbx_mlx.serving.web import event_stream


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
    """The page, opened again. Afterwards the console must be empty, except for the network's own errors."""
    chromium.show_as(driver, 1000, 760)
    page = Page(driver)
    page.open(client.server.where)
    page.wait(lambda: page.all("#legend .token"))
    yield page
    assert [entry for entry in driver.get_log("browser") if entry["source"] != "network"] == []


@pytest.fixture
def scripted(monkeypatch):
    """Make the server stream these events instead of an answer; returns the requests that came."""
    asked = []

    def answer_with(*said, ended=True):
        async def complete(here, body, request, dialect):
            asked.append(request.model_dump(exclude_unset=True))
            events = [event_text((None, one)) for one in ((*said, "[DONE]") if ended else said)]
            return event_stream(iter(events))

        monkeypatch.setattr(app, "complete", complete)
        return asked

    return answer_with
