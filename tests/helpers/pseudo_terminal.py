"""A process in a terminal of its own, as a user starts it."""

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Mapping, Sequence

PATIENCE = 120  # seconds: MLX starts slowly on a loaded machine
ESCAPES = re.compile(r"\x1b\[[0-9;?>]*[A-Za-z]|\x1b[=>()][0-9A-B]?")


def _as_in_a_shell() -> None:
    """Let the new process own its terminal, and receive signals that its parents ignore, as under nohup."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)


class PseudoTerminal:
    """Runs a command in a new session on a terminal of 100 columns. `shown` is all that it wrote, escapes included."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str] | None = None):
        self.master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 100, 0, 0))
        settings = {"TERM": "xterm-256color", "COLORTERM": "truecolor", "PROMPT_TOOLKIT_NO_CPR": "1"}
        self.process = subprocess.Popen(
            command,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=os.environ | settings | dict(environment or {}),
            start_new_session=True,
            preexec_fn=_as_in_a_shell,
        )
        self.slave = slave
        self.shown = ""
        self._seen = 0

    def __enter__(self) -> "PseudoTerminal":
        return self

    def __exit__(self, *error: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self.slave)
        os.close(self.master)

    @property
    def text(self) -> str:
        """What it wrote, without escapes."""
        return ESCAPES.sub("", self.shown).replace("\r", "")

    def type(self, keys: str) -> None:
        self.type_bytes(keys.encode())

    def type_bytes(self, keys: bytes) -> None:
        os.write(self.master, keys)

    def expect(self, pattern: str) -> re.Match[str]:
        """Wait until something is written that was not expected before; what follows it is expected next."""
        ending = time.monotonic() + PATIENCE
        while (found := re.compile(pattern).search(self.text, self._seen)) is None:
            assert time.monotonic() < ending, f"{pattern!r} did not come:\n{self.text[self._seen :]!r}"
            self._read()
        self._seen = found.end()
        return found

    def _read(self) -> None:
        if select.select([self.master], [], [], 0.05)[0]:
            self.shown += os.read(self.master, 65536).decode(errors="replace")

    def interrupt(self) -> None:
        """Ctrl-C, as the terminal turns it into a signal."""
        self.type("\x03")

    def ends(self) -> int:
        """The exit status, when the process has ended."""
        ending = time.monotonic() + PATIENCE
        while self.process.poll() is None:
            assert time.monotonic() < ending, self.text[self._seen :]
            self._read()
        while select.select([self.master], [], [], 0)[0]:
            self._read()
        return self.process.returncode

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def is_cooked(self) -> bool:
        """Whether the terminal was left as a shell needs it: it shows what is typed, and Enter ends a line."""
        flags = termios.tcgetattr(self.slave)[3]
        return bool(flags & termios.ECHO and flags & termios.ICANON)
