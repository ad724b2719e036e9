"""Compiles the native kernels when the package is built, if there is a C compiler.

Without one, or with STORMPLUS_NATIVE=0, the package is pure Python: everything works, slower, and
`python -m stormplus.doctor` says so. STORMPLUS_NATIVE=1 makes a failed build an error. Only the
builds on Linux were run; those on macOS and Windows were written from the compilers' manuals.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

FOLDER = Path("src/stormplus/torch/kernels")
SUFFIX = {"win32": ".dll", "darwin": ".dylib"}.get(sys.platform, ".so")
# No contraction to fused multiply-adds: results must not depend on the machine's instructions.
FLAGS = ["-O3", "-std=c11", "-shared", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off"]
MSVC_FLAGS = ["/nologo", "/O2", "/std:c11", "/Zc:preprocessor", "/fp:precise", "/LD"]


class NativeBuildHook(BuildHookInterface):  # type: ignore[type-arg]
    """Compiles one C file to one shared library next to the module that loads it."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        wanted = os.environ.get("STORMPLUS_NATIVE", "")
        self.clean([])
        if wanted == "0":
            return
        library = Path(self.root) / FOLDER / f"_native{SUFFIX}"
        problem = build(Path(self.root) / FOLDER / "native.c", library)
        if problem is not None:
            if wanted == "1":
                raise RuntimeError(f"the native kernels could not be built: {problem}")
            self.app.display_warning(f"stormplus without native kernels: {problem}")
            return
        build_data["artifacts"].append(str(FOLDER / library.name))
        if version != "editable":
            build_data["pure_python"] = False
            platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
            build_data["tag"] = f"py3-none-{platform}"  # loaded by ctypes: any version of Python

    def clean(self, versions: list[str]) -> None:
        for library in (Path(self.root) / FOLDER).glob("_native.*"):
            library.unlink()


def build(source: Path, library: Path) -> str | None:
    """Compile, with OpenMP if the compiler has it; return what went wrong, or None."""
    names = [os.environ.get("CC", ""), "cc", "gcc", "clang"]
    names += ["cl"] if sys.platform == "win32" else []
    compiler = next((found for name in names if name and (found := shutil.which(name))), None)
    if compiler is None:
        return f"no C compiler: {', '.join(filter(None, names))}"
    problem = ""
    for openmp in (True, False):
        with tempfile.TemporaryDirectory() as scratch:  # where MSVC puts its object files
            made = Path(scratch) / library.name
            done = subprocess.run(
                command(compiler, source, made, openmp),
                cwd=scratch,
                check=False,
                capture_output=True,
                text=True,
            )
            if done.returncode == 0:
                shutil.copy(made, library)
                return None
            problem = f"{compiler}: {(done.stderr or done.stdout).strip()[:500]}"
    return problem


def command(compiler: str, source: Path, library: Path, openmp: bool) -> list[str]:
    """Return the compiler's command line."""
    if Path(compiler).stem.lower() in ("cl", "clang-cl"):
        threads = ["/openmp"] if openmp else []
        return [compiler, *MSVC_FLAGS, *threads, str(source), f"/Fe:{library}"]
    flags = [*FLAGS, "-fopenmp"] if openmp else list(FLAGS)
    if sys.platform != "win32":
        flags.append("-fPIC")
    if sys.platform == "darwin":  # as in the wheel's tag, such as macosx-11.0-arm64
        _, version, machine = sysconfig.get_platform().split("-")
        flags.append(f"-mmacosx-version-min={version}")
        for arch in ("arm64", "x86_64") if machine == "universal2" else (machine,):
            flags += ["-arch", arch]
    return [compiler, *flags, "-o", str(library), str(source)]
