"""A server of models in gears, a proxy between two servers, and other servers as sources of tokens. Knows no flag.

Here are the names and defaults that flags show, and what an address is: importing them costs nothing.
"""

import ipaddress

APIS = AUTO, OPENAI, OLLAMA = ("auto", "openai", "ollama")  # of other servers
DEFAULT_TIMEOUT = 120.0  # seconds, for another server
ASSUMED_VOCABULARY = 262144  # Gemma's, the largest that is common: for smaller ones the upper bounds hold too


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
