"""What requests to other servers have in common: addresses, keys, and how they fail."""

import ipaddress
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import httpx

from ..errors import GearbxError

HIDDEN = "***"
SUCH_AS = "give one such as http://127.0.0.1:8080/v1"


@contextmanager
def failures(described: Callable[[Exception], Exception]) -> Iterator[None]:
    """Turns what httpx raises inside into what `described` makes of it.

    A UnicodeError is among it: of a name that no host can have.
    """
    try:
        yield
    except (httpx.HTTPError, httpx.StreamError, httpx.InvalidURL, UnicodeError) as error:
        raise described(error) from error


class Clock:
    """Notices that nothing of worth has come for so many seconds."""

    def __init__(self, seconds: float):
        self.seconds, self._since = seconds, time.monotonic()

    def heard(self) -> None:
        """Something came: the time begins again."""
        self._since = time.monotonic()

    @property
    def over(self) -> bool:
        return time.monotonic() - self._since > self.seconds


def hidden(text: str, key: str | None) -> str:
    """The text without the key, which a server may repeat, also as JSON or a URL escapes it."""
    return spelled(key).sub(HIDDEN, text) if key else text


@cache
def spelled(key: str) -> re.Pattern[str]:
    """The ways to write a key of ASCII, each character as itself or escaped; JSON may stand inside JSON."""
    ways = ((re.escape(char), f"{ord(char):02x}") for char in key)
    return re.compile("".join(rf"(?:\\{{0,7}}{char}|(?i:\\{{1,7}}u00{code}|%{code}))" for char, code in ways))


def brief(text: str) -> str:
    """A server's words on one line, shortened."""
    return " ".join(text.split())[:300]


def said_in(error: Any) -> str:
    """The words of OpenAI's error object, or of what stands in its place."""
    return str(error.get("message", error) if isinstance(error, dict) else error)


def about_logprobs(status: int, said: str) -> bool:
    """Whether a server refused a request for the number or the kind of its log-probabilities."""
    return status in (400, 422) and any(word in said for word in ("logprobs", "n_probs"))


def address_of(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The address that a host's name is; None where it is a word."""
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None


def is_loopback(name: str) -> bool:
    """Whether only this machine is meant."""
    address = address_of(name)
    return name == "localhost" if address is None else address.is_loopback


def parsed_url(url: str, flag: str) -> httpx.URL:
    """A server's URL, which has a host and a path alone.

    Raises:
        GearbxError: no such URL; without what may be a password.
    """
    url = url.strip()
    shown = flag if set("@?#") & set(url) else f"{flag} {url[:100]!a}"
    try:
        parts = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise GearbxError(f"{shown} is not a URL; {SUCH_AS}") from error
    if parts.port is not None and not 0 < parts.port < 2**16:
        raise GearbxError(f"{shown} is not a URL; {SUCH_AS}")
    if parts.scheme not in ("http", "https") or not parts.host:
        raise GearbxError(f"{shown} is not an http or https URL; {SUCH_AS}")
    if set("?#\\ ") & set(url):
        raise GearbxError(f"{shown} has more than an address and a path; {SUCH_AS}")
    return parts
