"""The page at `/`: one file, and headers under which a browser runs nothing that is not in it."""

import functools
import hashlib
import re
from base64 import b64encode
from importlib.resources import files

from .guarded import Guarded

INLINE = re.compile(rb"<(script|style)>(.*?)</\1>", re.DOTALL)


class Paged(Guarded):
    """A handler that has the page. A subclass sends it for `/`, without a key: the page asks for one."""

    def do_HEAD(self) -> None:
        if self.path.partition("?")[0] == "/":
            self.send_page(body=False)
        else:
            super().do_HEAD()

    def public(self, path: str) -> bool:
        return path == "/" or super().public(path)

    def send_page(self, body: bool = True) -> None:
        """Send the page, or its headers alone."""
        text = page()
        self.start(200, headers(text))
        self.end_headers()
        if body:
            self.wfile.write(text)


@functools.cache
def page() -> bytes:
    return files("gearbx_mlx.serving").joinpath("page.html").read_bytes()


def headers(text: bytes) -> dict[str, str]:
    """Of a page that is never kept, and neither loads nor asks anything but its own server."""
    return {
        "Content-Type": "text/html; charset=utf-8",
        "Content-Length": str(len(text)),
        "Content-Security-Policy": policy(text),
        "Cache-Control": "no-store",
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
    }


def policy(text: bytes) -> str:
    """The Content-Security-Policy of a page: its own scripts and styles by their hashes, pictures inside it, requests
    to its server."""
    found: dict[bytes, list[str]] = {b"script": [], b"style": []}
    for kind, inside in INLINE.findall(text):
        found[kind].append(f"'sha256-{b64encode(hashlib.sha256(inside).digest()).decode()}'")
    return "; ".join(
        (
            "default-src 'none'",
            f"script-src {' '.join(found[b'script'])}",
            f"style-src {' '.join(found[b'style'])}",
            "img-src data:",
            "connect-src 'self'",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        )
    )
