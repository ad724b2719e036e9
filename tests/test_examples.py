"""Each example does what it promises."""

import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[1] / "examples"


def run(name, *args):
    return subprocess.run(
        [sys.executable, str(EXAMPLES / name), *map(str, args)],
        capture_output=True, text=True, check=True, timeout=300,
    ).stdout  # fmt: skip


def test_demo_ends_with_tables_and_a_figure(tmp_path):
    out = run("demo.py", "--evaluations", 60, "--out", tmp_path)
    for method in ("STORM+", "SGD", "Adam", "AdaGrad"):
        assert out.count(f"│ {method} ") == 2
    figure = tmp_path / "demo.png"
    assert f"figure: {figure}" in out
    assert figure.read_bytes().startswith(b"\x89PNG")
