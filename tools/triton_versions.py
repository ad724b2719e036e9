"""Compile the Triton kernels for GPUs with other versions of Triton; nothing is run.

    python tools/triton_versions.py 3.0.0 3.7.1 3.9.0

torch 2.4, the oldest that is supported, ships Triton 3.0.0. Each version gets an environment under
`.versions/`, which has everything else from the environment that runs this.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TEST = "tests/torch/test_triton_compile.py"


def make(version: str) -> Path:
    """Return the interpreter of an environment with this version of Triton."""
    folder = ROOT / ".versions" / f"triton-{version}"
    inside = folder / "bin" / "python"
    if not (folder / "ready.txt").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        pip = [str(inside), "-m", "pip", "install", "--quiet"]
        subprocess.run([*pip, f"triton=={version}"], check=True)
        (packages,) = folder.glob("lib/python*/site-packages")
        (packages / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
        (folder / "ready.txt").write_text(version)
    return inside


def main(versions: list[str]) -> None:
    failed = []
    for version in versions:
        print(f"Triton {version}", flush=True)
        pytest = [str(make(version)), "-m", "pytest", "-q", "-p", "no:cacheprovider"]
        if subprocess.run([*pytest, "-m", "long", TEST], cwd=ROOT, check=False).returncode:
            failed.append(version)
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main(sys.argv[1:])
