"""The one exception that a user is meant to read."""


class GearbxError(ValueError):
    """A mistake that the user can mend: the message is one line that names the thing, its value and the remedy."""


class GearbxWarning(UserWarning):
    """Something that works, but perhaps not as the user thinks."""
