"""How a request to a server ends without an answer."""


class Failed(Exception):
    """A server gave no answer that can be used; the message is one line.

    Args:
        status: of HTTP, where its models were asked for.
    """

    def __init__(self, message: str, status: int | None = None):
        super().__init__(message)
        self.status = status


class Declined(Exception):
    """A server refused the request itself: its answer of 4xx.

    Args:
        retry_after: seconds or a date, as the server says; "" where it does not.
    """

    def __init__(self, status: int, kind: str, body: bytes, retry_after: str = ""):
        super().__init__(f"answers {status}")
        self.status, self.kind, self.body, self.retry_after = status, kind, body, retry_after
