"""The command `stormplus`, and which code may import which."""

import ast
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
