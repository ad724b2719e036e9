"""Pages and examples, run as a reader would."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run_page(name):
    """Every Python block of a page, in order, in one namespace, which is returned."""
    text = (ROOT / "docs" / name).read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    namespace = {"__name__": "__main__"}
    for block in blocks:
        exec(compile(block, name, "exec"), namespace)
    return namespace


def run_example(name, *args):
    return subprocess.run(
        [sys.executable, str(ROOT / "examples" / name), *map(str, args)],
        capture_output=True, text=True, check=True, timeout=600,
    ).stdout  # fmt: skip
