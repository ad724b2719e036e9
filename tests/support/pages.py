"""Pages and examples, run as a reader would, and Python in a process of its own."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def blocks_of(page):
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


def run_page(page, together=True):
    """Run the Python blocks of a page in order, together in one namespace or each in its own."""
    namespace = {}
    for block in blocks_of(page):
        namespace = namespace if together and namespace else {"__name__": "__main__"}
        exec(compile(block, page.name, "exec"), namespace)


def run_python(*arguments, **options):
    """Run Python in a new process; return the process when it has ended."""
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        check=False, capture_output=True, text=True, timeout=900, **options,
    )  # fmt: skip


def run_example(name, *args, data=None):
    """What an example prints; `data` is the folder of STORMPLUS_DATA, if any."""
    environment = {k: v for k, v in os.environ.items() if k != "STORMPLUS_DATA"}
    environment |= {} if data is None else {"STORMPLUS_DATA": str(data)}
    done = run_python(ROOT / "examples" / name, *args, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout
