"""How a command that runs for long shows that it is alive where no progress bar can be seen."""

from __future__ import annotations

import time

from rich.console import Console

MINUTE = 60.0


class Pulse:
    """A line every minute in a log or a pipe; nothing on a terminal, which has the bar.

    Args:
        console: Where the bar would be.
        every: Seconds between two lines.
    """

    def __init__(self, console: Console, every: float = MINUTE) -> None:
        self.console, self.every = console, every
        self.last = time.monotonic()

    def beat(self, text: str) -> None:
        """Print the text if it is time; call this as often as you like."""
        now = time.monotonic()
        if not self.console.is_terminal and now - self.last >= self.every:
            self.last = now
            self.console.print(text, highlight=False, markup=False, soft_wrap=True)
