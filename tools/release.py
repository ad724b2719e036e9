"""`make release-check`: build what a release uploads, check it, and say what it is.

    python tools/release.py out/release

The wheels are built from the source distributions, as pip would build them, so that nothing of
the working folder can get in. Nothing is uploaded.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PROJECTS = (ROOT, ROOT / "benchmark")


def run(*command: object, cwd: Path = ROOT) -> None:
    done = subprocess.run([sys.executable, *map(str, command)], cwd=cwd, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, command))} ended with {done.returncode}")


def build(project: Path, target: Path) -> None:
    """A source distribution, and a wheel from it."""
    before = set(target.iterdir())
    run("-m", "hatchling", "build", "-t", "sdist", "-d", target, cwd=project)
    (source,) = set(target.iterdir()) - before
    with tempfile.TemporaryDirectory() as scratch, tarfile.open(source) as archive:
        archive.extractall(scratch, filter="data")
        (unpacked,) = Path(scratch).iterdir()
        run("-m", "hatchling", "build", "-t", "wheel", "-d", target, cwd=unpacked)


def stays_here(path: Path) -> bool:
    """The package index takes no wheel for plain "linux", for nobody knows which."""
    return path.suffix == ".whl" and "-linux_" in path.name


def main(folder: str) -> None:
    target = Path(folder).resolve()
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    for project in PROJECTS:
        build(project, target)
    files = sorted(target.iterdir())
    run("-m", "twine", "check", "--strict", *files)
    print("\nwould be uploaded:")
    for path in files:
        if not stays_here(path):
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
            print(f"  {path.name}  {path.stat().st_size:,} bytes  sha256 {digest}")
    for path in filter(stays_here, files):
        print(f"would not: {path.name}: the index refuses its tag; pip builds it from the source")


if __name__ == "__main__":
    main(*sys.argv[1:])
