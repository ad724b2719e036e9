"""The site builds strictly, links and anchors included, and names everything public."""

import importlib
import re

import pytest

from tests.support.pages import ROOT, run_python

pytest.importorskip("mkdocs")
pytest.importorskip("mkdocstrings")

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The text of each page."""
    folder = tmp_path_factory.mktemp("site")
    done = run_python("-m", "mkdocs", "build", "--strict", "--site-dir", folder, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return {
        path.relative_to(folder).as_posix(): path.read_text() for path in folder.rglob("*.html")
    }


def test_nothing_is_loaded_from_elsewhere(site):
    loaded = (
        r"<(?:script|img|iframe|source)[^>]+src=\"?(https?:|//)[^\">]*|<link[^>]+stylesheet[^>]+//"
    )
    for name, text in site.items():
        assert not re.search(loaded, text), name
        assert 'data-md-component="source"' not in text, name  # asks api.github.com for stars


def test_every_public_name_integration_and_command_is_in_the_reference(site):
    reference = "".join(text for name, text in site.items() if name.startswith("api/"))
    entries = set(re.findall(r'id="([^"]+)"', reference))
    for module in ("stormplus", "stormplus.jax", "stormplus.theory.problems", "stormplus.theory"):
        package = importlib.import_module(module)
        for name in package.__all__:
            value = getattr(package, name)
            known = {f"{module}.{name}", f"{value.__module__}.{value.__qualname__}"}
            assert known & entries, name
    for path in (ROOT / "src" / "stormplus" / "integrations").glob("[!_]*.py"):
        assert any(i.startswith(f"stormplus.integrations.{path.stem}.") for i in entries), path.stem
    commands = importlib.import_module("stormplus_bench.cli").COMMANDS
    assert {f"stormplus-{command}" for command in commands} <= entries
