"""The site builds strictly, its links hold, it names everything public and loads nothing remote."""

import importlib
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

pytest.importorskip("mkdocs")
pytest.importorskip("mkdocstrings")

pytestmark = pytest.mark.long
ROOT = Path(__file__).parents[1]
# Attributes whose address a browser loads by itself.
LOADED = {"script": "src", "img": "src", "iframe": "src", "source": "src", "link": "href"}


class Document(HTMLParser):
    def __init__(self, path):
        super().__init__()
        self.ids, self.links, self.loaded = set(), [], []
        self.text = path.read_text()
        self.feed(self.text)

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        self.ids |= {attributes[key] for key in ("id", "name") if attributes.get(key)}
        if tag == "a" and attributes.get("href"):
            self.links.append(attributes["href"])
        address = attributes.get(LOADED.get(tag))
        if address:
            navigation = attributes.get("rel") in ("next", "prev", "canonical")
            (self.links if navigation else self.loaded).append(address)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT, check=False, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return {str(p.relative_to(folder)): Document(p) for p in folder.rglob("*.html")} | {"": folder}


def pages(site):
    return {name: page for name, page in site.items() if isinstance(page, Document)}


def test_links_and_anchors_resolve(site):
    folder, found = site[""], pages(site)
    for name, document in found.items():
        if name == "404.html":  # served at any depth, its addresses are absolute
            continue
        for link in [*document.links, *document.loaded]:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (folder / name).parent / unquote(parts.path) if parts.path else folder / name
            target = target.resolve()
            if target.is_dir():
                target /= "index.html"
            assert target.exists(), f"{name} links to {link}"
            page = found.get(str(target.relative_to(folder)))
            if page and parts.fragment and parts.fragment != "__skip":
                assert unquote(parts.fragment) in page.ids, f"{name} links to {link}"


def test_nothing_is_loaded_from_elsewhere(site):
    for name, document in pages(site).items():
        for address in document.loaded:
            parts = urlsplit(address)
            assert parts.scheme in ("", "data"), f"{name} loads {address}"
            assert not parts.netloc, f"{name} loads {address}"


@pytest.mark.parametrize(
    "module", ["stormplus", "stormplus.jax", "stormplus.theory.problems", "stormplus.theory"]
)
def test_every_public_name_has_an_entry(site, module):
    if module == "stormplus.jax":
        pytest.importorskip("jax")
    entries = set().union(*(d.ids for name, d in pages(site).items() if name.startswith("api/")))
    package = importlib.import_module(module)
    for name in package.__all__:
        value = getattr(package, name)
        assert {f"{module}.{name}", f"{value.__module__}.{value.__qualname__}"} & entries, name


def test_every_integration_and_command_is_in_the_reference(site):
    ids = site["api/integrations.html"].ids
    for path in (ROOT / "src" / "stormplus" / "integrations").glob("[!_]*.py"):
        assert any(i.startswith(f"stormplus.integrations.{path.stem}.") for i in ids), path.stem
    cli = pytest.importorskip("stormplus_bench.cli")
    commands = {f"stormplus-{command}" for command in cli.COMMANDS}
    assert commands <= site["api/command-line.html"].ids


def test_formulas_are_marked_and_katex_is_shipped(site):
    page = site["untuned-rule.html"]
    assert page.text.count('class="arithmatex"') > 20
    assert any(address.endswith("katex.min.js") for address in page.loaded)
    style = (site[""] / "assets" / "katex" / "katex.min.css").read_text()
    for font in re.findall(r"url\((fonts/[\w-]+\.woff2)\)", style):
        assert (site[""] / "assets" / "katex" / font).is_file()


def test_search_finds_the_how_to_and_no_sources_of_examples(site):
    index = (site[""] / "search" / "search_index.js").read_text()
    assert '"location":"examples/' not in index
    assert '"location":"untuned.html#weight-decay"' in index
