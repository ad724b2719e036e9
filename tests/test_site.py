"""The site: it builds strictly, its links hold, it names everything public, it fetches nothing."""

import importlib.util
import logging
import re
import subprocess
import sys
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import unquote, urlsplit

import pytest

pytest.importorskip("mkdocs")
pytest.importorskip("mkdocstrings")
pytest.importorskip("latex2mathml")

pytestmark = pytest.mark.long
ROOT = Path(__file__).parents[1]
# Tags whose address a browser fetches by itself; a link is followed by its reader only.
FETCHED = {"script": "src", "img": "src", "iframe": "src", "source": "src", "link": "href"}


class Document(HTMLParser):
    def __init__(self, path):
        super().__init__()
        self.ids, self.links, self.fetched, self.emphasised = set(), [], [], []
        self._open = False
        self.feed(path.read_text())

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        self._open |= tag == "em"
        self.ids |= {attributes[key] for key in ("id", "name") if attributes.get(key)}
        if tag == "a" and attributes.get("href"):
            self.links.append(attributes["href"])
        if tag in FETCHED and attributes.get(FETCHED[tag]):
            if attributes.get("rel") not in ("next", "prev", "canonical"):
                self.fetched.append(attributes[FETCHED[tag]])
            else:
                self.links.append(attributes["href"])

    def handle_endtag(self, tag):
        self._open &= tag != "em"

    def handle_data(self, data):
        if self._open:
            self.emphasised.append(data)


@pytest.fixture(scope="module")
def hooks():
    spec = importlib.util.spec_from_file_location("hooks", ROOT / "docs/scripts/site_hooks.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("link", "written", "warned"),
    [
        ("../../README.md#caveats", "Text", "docs/caveats.md instead"),
        ("../../docs/caveats.md#hidden-units", "Text", "docs/caveats.md instead"),
        ("../../README.md#one-line-changed", "Text", ""),
        ("../../examples/ddp.py", "[Text](../examples/ddp.md)", ""),
        ("../caveats.md#hidden-units", "[Text](../caveats.md#hidden-units)", ""),
    ],
)
def test_a_link_that_is_dropped_though_there_is_a_page_warns(caplog, hooks, link, written, warned):
    pages = {"caveats.md", "examples/ddp.md"}
    files = SimpleNamespace(get_file_from_path=lambda path: path if path in pages else None)
    page = SimpleNamespace(file=SimpleNamespace(src_uri="integrations/loggers.md"))
    with caplog.at_level(logging.WARNING, "mkdocs.hooks"):
        assert hooks.on_page_markdown(f"[Text]({link})", page, None, files) == written
    assert bool(caplog.records) == bool(warned)
    assert warned in caplog.text


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT, check=False, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return {path: Document(path) for path in folder.rglob("*.html")}


def test_builds_strictly_with_every_page(site):
    names = {path.name for path in site}
    for page in (ROOT / "docs").rglob("*.md"):
        assert f"{page.stem}.html" in names


def test_links_and_anchors_resolve(site):
    checked = 0
    for path, document in site.items():
        if path.name == "404.html":  # served at any depth, its addresses are absolute
            continue
        for link in [*document.links, *document.fetched]:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if target.is_dir():
                target /= "index.html"
            assert target.exists(), f"{path.name} links to {link}"
            if parts.fragment and target in site and parts.fragment != "__skip":
                assert unquote(parts.fragment) in site[target].ids, f"{path.name} links to {link}"
            checked += 1
    assert checked > 500


@pytest.mark.parametrize(
    "module", ["stormplus", "stormplus.jax", "stormplus.theory.problems", "stormplus.theory"]
)
def test_every_public_name_has_an_entry(site, module):
    if module == "stormplus.jax":
        pytest.importorskip("jax")
    entries = {
        i for path, document in site.items() if path.parent.name == "api" for i in document.ids
    }
    package = importlib.import_module(module)
    for name in package.__all__:
        value = getattr(package, name)  # a name that is a module's too is listed by its home
        assert {f"{module}.{name}", f"{value.__module__}.{value.__qualname__}"} & entries, name


def test_no_formula_is_taken_for_emphasis(site):
    for path, document in site.items():
        for text in document.emphasised:
            assert not set(text) & set("{}|^=~<>"), f"{path.name}: {text}"


def test_every_integration_is_in_the_reference(site):
    folder = ROOT / "src" / "stormplus" / "integrations"
    page = next(d for path, d in site.items() if path.parts[-2:] == ("api", "integrations.html"))
    for path in folder.glob("*.py"):
        if not path.name.startswith("_"):
            prefix = f"stormplus.integrations.{path.stem}"
            assert any(name.startswith(prefix) for name in page.ids), prefix


def test_every_command_is_in_the_reference(site):
    from stormplus.cli import COMMANDS

    page = next(d for path, d in site.items() if path.name == "command-line.html")
    for command in COMMANDS:
        assert f"stormplus-{command}" in page.ids


def test_formulas_are_set_as_mathematics(site):
    folder = next(path.parent for path in site if path.name == "404.html")
    for name in ("algorithm.html", "theory.html", "untuned.html"):
        assert (folder / name).read_text().count("<math") > 5
    for path in site:
        assert "arithmatex" not in path.read_text(), path.name


def test_the_font_of_formulas_has_their_characters(site):
    """One that it lacks is taken from another font: `\\epsilon` came out bold."""
    font = pytest.importorskip("fontTools.ttLib").TTFont(ROOT / "docs/assets/formulas.woff")
    has = font.getBestCmap()
    for path in site:
        for variable, text in re.findall(r"<m(i|n|o|text)\b[^>]*>([^<]*)</m", path.read_text()):
            characters = unescape(text)
            if variable == "i" and len(characters) == 1:
                characters = italic(characters)
            assert all(ord(c) in has for c in characters), f"{path.name}: {text}"


def italic(letter):
    """What a browser shows for a single letter: Greek from alpha on, epsilon's other form last."""
    if letter == "h":
        return "\u210e"
    for first, last, start in (
        ("A", "Z", 0x1D434),
        ("a", "z", 0x1D44E),
        ("\u03b1", "\u03c9", 0x1D6FC),
    ):
        if first <= letter <= last:
            return chr(start + ord(letter) - ord(first))
    return "\U0001d716" if letter == "ϵ" else letter


def test_formulas_break_between_them_and_keep_their_stops(hooks):
    def set_(html):
        return hooks.on_page_content(html, None, None, None)

    inline = set_(r'so (<span class="arithmatex">\(|x| = -1\)</span>), and')
    assert inline.startswith('so <span class="maths">(<math')
    assert inline.endswith("</math>),</span> and")
    assert inline.count('lspace="0" rspace="0">&#x0007C;') == 2
    assert '<mo form="prefix">&#x02212;</mo>' in inline
    assert set_(r'<div class="arithmatex">\[a = 1 \qquad b = 2\]</div>').count("<math") == 2


def test_a_figure_opens_at_its_full_size(site):
    page = next(
        path for path in site if path.parts[-1:] == ("theory.html",) and not path.match("api/*")
    )
    assert {"figures/rates.png", "figures/rivals.png"} <= set(site[page].links)


def test_maps_have_colours(site, hooks):
    def ink(cells):
        row = "".join(f"<td>{cell}</td>" for cell in cells)
        marked = f"<!-- {name} -->\n<table><tr>{row}</tr></table>"
        page = hooks.on_page_content(marked, None, None, None)
        found = re.findall(r"<td(?: style=\"background: #(\w{6}); [^>]*)?>", page)
        return [sum(bytes.fromhex(paint)) if paint else None for paint in found]

    name = "map of costs"  # the worst is the darkest
    none, least, more, most, diverged, missing = ink(
        ["STORM+", "&lt;0.1", "27", "100", "div.", "·"]
    )
    assert none is missing is None
    assert least > more > most == diverged
    name = "bar:begin"  # the earliest is the darkest
    early, late, missed = ink(["<strong>0.50</strong>", "<strong>1.00</strong>", "(1.2)"])
    assert early < late
    assert missed is None
    for page in ("benchmark.html", "untuned.html"):
        path = next(path for path in site if path.name == page)
        assert path.read_text().count('<td style="background') > 20


def test_the_first_page_has_readmes_table(site):
    start = next(
        path for path in site if path.name == "index.html" and path.parent.name != "report"
    )
    assert start.read_text().count("data-narrow") == 1
    assert "<td>Schedule-Free</td>" in start.read_text()
    assert "report/index.html" in site[start].links  # the navigation has it


def test_it_can_be_searched_from_the_folder_and_has_the_report(site):
    folder = next(path.parent for path in site if path.name == "404.html")
    assert (folder / "search" / "search_index.js").is_file()
    assert (folder / "report" / "index.html").is_file()


def test_nothing_is_fetched_from_elsewhere(site):
    for path, document in site.items():
        for address in document.fetched:
            parts = urlsplit(address)
            assert parts.scheme in ("", "data"), f"{path.name} fetches {address}"
            assert not parts.netloc, f"{path.name} fetches {address}"
