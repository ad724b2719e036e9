"""The command `stormplus`, and which code may import which."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from stormplus_bench import cli

ROOT = Path(__file__).parents[1]


def call(*arguments):
    return CliRunner().invoke(cli.main, list(arguments))


def test_the_list_of_commands_imports_no_framework():
    code = (
        "import sys\nfrom stormplus_bench.cli import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit:\n    pass\n"
        "print([m for m in ('torch', 'pandas', 'matplotlib', 'rich') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert all(name in done.stdout for name in cli.COMMANDS)
    assert done.stdout.endswith("[]\n")


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_has_help(name):
    done = call(name, "--help")
    assert done.exit_code == 0
    assert "Usage:" in done.output


def test_a_wrong_command_is_a_usage_error():
    assert call("compar").exit_code == 2
    assert call("--version").exit_code == 0


def imports(path):
    """The modules that a file imports, anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


def test_imports_go_one_way():
    """The library imports no benchmark; the benchmark's package imports no benchopt folder."""
    for path in (ROOT / "src").rglob("*.py"):
        assert not [m for m in imports(path) if m.split(".")[0] in ("stormplus_bench", "benchopt")]
    for path in (ROOT / "benchmark" / "stormplus_bench").rglob("*.py"):
        assert not [m for m in imports(path) if "benchmark_stormplus" in m], path
        assert not [m for m in imports(path) if m.startswith("stormplus.") and "._" in m], path


def private_attributes(path):
    """Private attributes of objects other than self and cls."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and re.match("_[^_]", node.attr):
            owner = node.value
            if not (isinstance(owner, ast.Name) and owner.id in ("self", "cls")):
                yield node.attr


def test_the_benchmark_uses_public_names_only():
    torchs = {"_BatchNorm", "_C", "_is_param", "_make_wrapper_subclass", "_schema"}
    for path in (ROOT / "benchmark").rglob("*.py"):
        assert set(private_attributes(path)) <= torchs | {"_getframe", "_replace"}, path


def test_integrations_use_public_names_of_the_optimizers_only():
    """A trainer's private attributes are sometimes necessary; the optimizers' are not."""
    ours = {
        name
        for source in (ROOT / "src/stormplus/torch").rglob("*.py")
        for node in ast.walk(ast.parse(source.read_text()))
        for name in (getattr(node, "name", ""), getattr(node, "attr", ""), getattr(node, "id", ""))
        if re.match("_[^_]", str(name))
    }
    assert "_scalars" in ours
    for path in (ROOT / "src/stormplus/integrations").glob("*.py"):
        assert not set(private_attributes(path)) & ours - {"_version"}, path
        assert not [m for m in imports(path) if m.startswith("stormplus.torch.")], path
