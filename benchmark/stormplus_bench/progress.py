"""Progress in a log or a pipe, where a bar cannot be seen."""

from __future__ import annotations

import time

from rich.console import Console


class Pulse:
    """Prints a line per minute unless the console is a terminal, which shows a bar.

    Args:
        console: Where the bar would be.
        every: Seconds between two lines.
    """

    def __init__(self, console: Console, every: float = 60.0) -> None:
        self.console, self.every = console, every
        self.last = time.monotonic()

    def beat(self, text: str) -> None:
        """Print the text if a line is due."""
        now = time.monotonic()
        if not self.console.is_terminal and now - self.last >= self.every:
            self.last = now
            self.console.print(text, highlight=False, markup=False, soft_wrap=True)
