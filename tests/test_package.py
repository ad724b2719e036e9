"""What importing costs, which code may import which, and what a missing extra says."""

import ast

import pytest

import stormplus
from tests.support.pages import ROOT, run_python

FRAMEWORKS = ("torch", "jax", "optax", "sklearn", "matplotlib", "benchopt", "rich", "click")


@pytest.mark.parametrize(
    ("use", "unwanted"),
    [
        ("import stormplus; stormplus.minimize(lambda x, xi: x, [1.0], None, 2)", FRAMEWORKS),
        ("import stormplus.theory, stormplus.theory.problems", FRAMEWORKS),
        ("import stormplus.torch", ("torch._dynamo", "torch._inductor", "triton", "jax")),
        ("import stormplus.jax", ("torch", "scipy.optimize", "stormplus.reference")),
        (
            "from stormplus_bench.cli import main; main(['--help'], standalone_mode=False)",
            ("torch", "pandas", "matplotlib", "rich"),
        ),
    ],
    ids=["reference", "theory", "torch", "jax", "command line"],
)
def test_importing_imports_no_other_framework(use, unwanted):
    if use == "import stormplus.jax":
        pytest.importorskip("optax")
    out = run_python(
        "-c", f"{use}; import sys; print([name for name in {unwanted} if name in sys.modules])"
    )
    assert out.stdout.endswith("[]\n"), out.stderr


@pytest.mark.parametrize(
    ("missing", "use", "extra"),
    [
        ("torch", "import stormplus; stormplus.StormPlus", "torch"),
        ("jax", "import stormplus.jax", "jax"),
        ("optax", "import stormplus.jax", "jax"),
        ("torch", "from stormplus.theory.problems import *; BoundedNonConvex().module()", "torch"),
        ("sklearn", "from stormplus.theory.problems import *; breast_cancer()", "theory"),
        ("matplotlib", "from stormplus.theory import Observer; Observer().plot()", "theory"),
    ],
)
def test_a_missing_extra_says_what_to_install(missing, use, extra):
    done = run_python("-c", f"import sys\nsys.modules[{missing!r}] = None\n{use}")
    assert done.returncode != 0
    assert f"pip install 'stormplus[{extra}]'" in done.stderr


def test_public_names():
    assert {"StormPlus", "SimplifiedStormPlus", "Storm", "minimize"} <= set(dir(stormplus))
    assert all(getattr(stormplus, name).__doc__ for name in stormplus.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Adam'"):
        _ = stormplus.Adam


def imports(path):
    """Yield the modules that a file imports, anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


@pytest.mark.parametrize(
    ("folder", "forbidden"),
    [
        ("src", ("stormplus_bench", "benchopt")),
        ("benchmark", ("stormplus_bench.benchmark_stormplus", "stormplus.torch._")),
        ("src/stormplus/integrations", ("stormplus.torch.",)),
    ],
)
def test_imports_go_one_way(folder, forbidden):
    for path in (ROOT / folder).rglob("*.py"):
        assert not [module for module in imports(path) if module.startswith(forbidden)], path
