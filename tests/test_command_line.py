"""The command line: what is listed, what joins it, and what a missing distribution says."""

import ast
import re
import subprocess
import sys
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace

import click
import pytest
from click.testing import CliRunner

from stormplus import cli

ROOT = Path(__file__).parents[1]
BENCH = tomllib.loads((ROOT / "benchmark" / "pyproject.toml").read_text())["project"]


def call(*arguments):
    return CliRunner().invoke(cli.main, list(arguments))


@pytest.fixture
def added(monkeypatch):
    """The entry points that are there, as a test wants them."""
    found = {}
    monkeypatch.setattr(cli, "entry_points", lambda group: found.get(group, []))
    return found


def test_the_list_names_every_command_and_imports_none():
    assert {*BENCH["entry-points"]["stormplus.commands"], *cli.OWN} == set(cli.COMMANDS)
    code = (
        "import sys\nfrom stormplus.cli import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit:\n    pass\n"
        "print([m for m in ('torch', 'pandas', 'matplotlib', 'rich') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    for name, text in cli.COMMANDS.items():
        assert name in done.stdout
        assert text in done.stdout
    assert done.stdout.endswith("[]\n")
    assert call("nothing").exit_code == 2


def test_without_the_benchmark_its_commands_say_what_to_install(added):
    text = " ".join(call("--help").output.split())
    assert "Not installed: bench-step, compare, data, paper, report, robust. pip install" in text
    done = call("compare")
    assert done.exit_code == 1
    assert "pip install stormplus-bench (from a clone: pip install ./benchmark)" in done.output


@click.command()
def hello():
    click.echo("hello")


def test_another_distribution_can_add_a_command(added, monkeypatch):
    monkeypatch.setitem(sys.modules, "another", SimpleNamespace(command=hello))
    added[cli.GROUP] = [
        EntryPoint("hello", "another:command", cli.GROUP),
        EntryPoint("broken", "no_such_module:command", cli.GROUP),
    ]
    assert call("hello").output == "hello\n"
    assert "hello" in call("--help").output
    done = call("broken")
    assert done.exit_code == 1
    assert "No module named 'no_such_module': pip install broken" in done.output


def imports(path):
    """The modules that a file imports, anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


def test_imports_go_one_way():
    """The library knows no benchmark; the benchmark's package does not import benchopt's folder."""
    for path in (ROOT / "src").rglob("*.py"):
        assert not [m for m in imports(path) if m.split(".")[0] in ("stormplus_bench", "benchopt")]
    package = ROOT / "benchmark" / "stormplus_bench"
    folder = package / "benchmark_stormplus"
    for path in package.rglob("*.py"):
        assert not [m for m in imports(path) if "benchmark_stormplus" in m], path
        private = [m for m in imports(path) if m.startswith("stormplus.") and "._" in m]
        assert not private, path
    inside = {path.stem for path in folder.iterdir()}
    for path in folder.rglob("*.py"):
        assert not [m for m in imports(path) if m.split(".")[0] in inside], path


def private_attributes(path):
    """Of objects that are not the code's own: `opt._run` and the like."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and re.match("_[^_]", node.attr):
            owner = node.value
            if not (isinstance(owner, ast.Name) and owner.id in ("self", "cls")):
                yield node.attr


@pytest.mark.parametrize("path", sorted((ROOT / "benchmark").rglob("*.py")), ids=lambda p: p.name)
def test_the_benchmark_uses_public_names_only(path):
    assert set(private_attributes(path)) <= {"_BatchNorm"}  # torch's


INTEGRATIONS = sorted((ROOT / "src/stormplus/integrations").glob("*.py"))


@pytest.mark.parametrize("path", INTEGRATIONS, ids=lambda p: p.name)
def test_integrations_use_public_names_of_the_optimizers_only(path):
    """A trainer's private attributes are at times all there is; the optimizers' are not."""
    ours = {
        name
        for source in (ROOT / "src/stormplus/torch").rglob("*.py")
        for node in ast.walk(ast.parse(source.read_text()))
        for name in (getattr(node, "name", ""), getattr(node, "attr", ""), getattr(node, "id", ""))
        if re.match("_[^_]", str(name))
    }
    assert {"_run", "_roster", "_move"} <= ours
    torchs = {"_version"}
    assert not set(private_attributes(path)) & ours - torchs
    assert not [m for m in imports(path) if m.startswith("stormplus.torch.")]
