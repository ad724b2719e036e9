"""Builds the native passes when the package is installed, if there is a C compiler.

Without one, or with STORMPLUS_NATIVE=0, the package is pure Python and works all the same:
`stormplus doctor` says what is missing. STORMPLUS_NATIVE=1 makes a failure an error.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

FLAGS = ["-O3", "-std=c11", "-shared", "-fPIC", "-fno-math-errno", "-fno-trapping-math"]
FLAGS += ["-ffp-contract=off"]  # else a result would depend on the machine's instructions
FOLDER = Path("src/stormplus/torch/core")


class NativeBuildHook(BuildHookInterface):  # type: ignore[type-arg]
    """One C file, one shared library beside the module that loads it."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        wanted = os.environ.get("STORMPLUS_NATIVE", "")
        library = Path(self.root) / FOLDER / "_native.so"
        library.unlink(missing_ok=True)
        if wanted == "0":
            return
        problem = build(Path(self.root) / FOLDER / "native.c", library)
        if problem is not None:
            if wanted == "1":
                raise RuntimeError(f"the native passes could not be built: {problem}")
            self.app.display_warning(f"stormplus without native passes: {problem}")
            return
        build_data["artifacts"].append(str(FOLDER / library.name))
        if version != "editable":
            build_data["pure_python"] = False
            platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
            build_data["tag"] = f"py3-none-{platform}"  # bound to no version of Python

    def clean(self, versions: list[str]) -> None:
        (Path(self.root) / FOLDER / "_native.so").unlink(missing_ok=True)


def build(source: Path, library: Path) -> str | None:
    """Compile, with OpenMP if the compiler has it; returns what went wrong."""
    names = [os.environ.get("CC", ""), "cc", "gcc", "clang"]
    compiler = next((found for name in names if name and (found := shutil.which(name))), None)
    if compiler is None:
        return "there is no C compiler (cc, gcc, clang, or $CC)"
    problem = ""
    for threads in (["-fopenmp"], []):
        command = [compiler, *FLAGS, *threads, "-o", str(library), str(source)]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        if done.returncode == 0:
            return None
        problem = f"{compiler}: {done.stderr.strip()[:500]}"
    return problem
