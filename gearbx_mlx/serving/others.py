"""What requests to servers of others have in common: addresses, keys, and how they fail."""

import ipaddress
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum, auto
from functools import cache
from typing import Any
from urllib.parse import SplitResult, urlsplit

import httpx

from ..errors import GearbxError

HIDDEN = "***"
SUCH_AS = "give one such as http://127.0.0.1:8080/v1"


class Failure(Enum):
    """How a request came to nothing."""

    SLOW_CONNECTION = auto()
    NO_CONNECTION = auto()
    SILENT = auto()
    CUT = auto()


@contextmanager
def failures(described: Callable[[Failure, Exception], Exception]) -> Iterator[None]:
    """Turns what httpx raises inside into what `described` makes of it."""
    try:
        yield
    except httpx.ConnectTimeout as error:
        raise described(Failure.SLOW_CONNECTION, error) from error
    except httpx.TimeoutException as error:
        raise described(Failure.SILENT, error) from error
    except (httpx.ConnectError, UnicodeError) as error:  # the latter of a name that no host can have
        raise described(Failure.NO_CONNECTION, error) from error
    except (httpx.HTTPError, httpx.StreamError, httpx.InvalidURL) as error:
        raise described(Failure.CUT, error) from error


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


def parsed_url(url: str, flag: str) -> SplitResult:
    """The parts of a server's URL, which has a host and a path alone.

    Raises:
        GearbxError: no such URL; without what may be a password.
    """
    url = url.strip()
    shown = flag if set("@?#") & set(url) else f"{flag} {url[:100]!a}"
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise GearbxError(f"{shown} is no URL; {SUCH_AS}") from error
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0 or not url.isprintable():
        raise GearbxError(f"{shown} is no http or https URL; {SUCH_AS}")
    if set("?#\\ ") & set(url):
        raise GearbxError(f"{shown} has more than an address and a path; {SUCH_AS}")
    try:
        httpx.URL(url)
    except httpx.InvalidURL as error:
        raise GearbxError(f"{shown} is no URL; {SUCH_AS}") from error
    return parts
