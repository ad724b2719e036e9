"""Warnings are errors; on versions other than the pinned ones, only those of our own making."""

import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).parents[1]
THEIRS = (
    ":DeprecationWarning",
    ":PendingDeprecationWarning",
    ":FutureWarning",
    ".*deprecated:UserWarning",  # some of torch's
    "Skipping serialization of:UserWarning",  # torch.compile's, in 2.6
    "Guards may run slower on Python:RuntimeWarning",  # torch.compile's, of Python 3.13.0
)


def differs(name, pinned):
    try:
        return version(name).split("+")[0] != pinned  # 2.13.0+cpu is 2.13.0
    except PackageNotFoundError:
        return False


def filters():
    """Yield the filters to add, none on the pinned versions. The later one wins."""
    pins = dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.M))
    pins["torch"] = re.search(r"^TORCH \?= (\S+)", (ROOT / "Makefile").read_text(), re.M)[1]
    # An older or newer library deprecates things, in its own code or where a test calls it. What
    # the package itself calls or says stays an error.
    if any(differs(name, pinned) for name, pinned in pins.items()):
        for warning in THEIRS:
            yield f"ignore:{warning}"
            yield f"error:{warning}:stormplus"


def pytest_configure(config):
    for line in filters():
        config.addinivalue_line("filterwarnings", line)
