"""The report's page: it stands alone, can be read in several ways, and works in a browser."""

import html
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser

import pytest

pytest.importorskip("pandas")
pytest.importorskip("matplotlib")
pytest.importorskip("click")

from bench_reports import call, finished, write_rows
from bench_rows import make_run


@pytest.fixture(scope="module")
def finished_report(tmp_path_factory):
    return finished(tmp_path_factory.getbasetemp())


class Page(HTMLParser):
    """What a page refers to, and what it says about its pictures and headings."""

    def __init__(self, text):
        super().__init__()
        self.references, self.labels, self.headers, self.ids = [], [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        self.references += [
            v for k, v in attrs if k in ("src", "href", "xlink:href", "action", "data")
        ]
        self.ids += [found["id"]] if "id" in found else []
        if tag == "svg":
            self.labels.append(found.get("aria-label") or found.get("aria-hidden"))
        if tag == "th":
            self.headers.append(found)


def test_the_page_needs_nothing_from_outside(finished_report):
    folder, _ = finished_report
    text = (folder / "docs" / "r" / "index.html").read_text()
    page = Page(text)
    assert page.references
    assert all(value.startswith("#") for value in page.references)
    assert {value[1:] for value in page.references} <= set(page.ids)
    assert len(set(page.ids)) == len(page.ids)
    assert "default-src 'none'" in text
    assert not re.search(r"@import|url\((?!#)", text)
    assert len(text) < 1_000_000


def test_the_page_can_be_read_without_seeing_it(finished_report):
    folder, _ = finished_report
    page = Page((folder / "docs" / "r" / "index.html").read_text())
    assert all(page.labels)
    assert any(
        label.startswith("Training loss on a. Final, at the defaults: STORM+ 2, SGD 4, Adam div")
        for label in page.labels
    )
    sortable = [header for header in page.headers if "data-key" in header]
    assert len(sortable) == 19
    assert all(h["aria-sort"] == "none" and h["scope"] == "col" for h in sortable)


def test_the_page_states_what_was_run(finished_report):
    folder, _ = finished_report
    text = html.unescape((folder / "docs" / "r" / "index.html").read_text())
    for fact in (
        "16, of which 3 diverged",
        "stormplus 0.1.0, torch 2.13.0",
        "a test",
        "a 100 (batch 64), b 100 (batch 64)",
        "<dt>Seeds</dt><dd>0, 1</dd>",
        "<dt>Best rates</dt><dd>In 2 of 2 cases (a method on a workload) the best rate is at an",
    ):
        assert fact in text
    assert "measured on</dt>" not in text  # the rows do not tell


def test_a_best_rate_at_an_end_is_marked_and_sorts_as_a_number(finished_report):
    folder, _ = finished_report
    text = (folder / "docs" / "r" / "index.html").read_text()
    assert text.count('<td data-value="1">1 (end)</td>') == 2  # STORM+ and SGD on a
    assert text.count(" (only)</td>") == 4
    assert '<td data-value="0.001">0.001 (only)</td>' in text


@pytest.mark.long  # draws the whole page
def test_the_page_tells_on_how_many_examples_was_measured(tmp_path):
    run = make_run([2, 1], measured=2000)
    result = call(write_rows(tmp_path / "rows.jsonl", [run]), "--output", tmp_path / "out")
    assert result.exit_code == 0, result.output
    text = (tmp_path / "out" / "index.html").read_text()
    assert "<dt>Examples that the losses are measured on</dt><dd>w 2,000</dd>" in text


CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")

# What a reader does: two clicks on a heading, another workload, one method less.
CLICKS = """<script>
const say = (name, value) => document.body.setAttribute("data-" + name, JSON.stringify(value));
const column = (i) => [...document.querySelectorAll("#results tbody tr")].map(
  (row) => row.cells[i].textContent);
const header = document.querySelector("th[data-key=loss]");
const shown = (query) => [...document.querySelectorAll(query)].filter(
  (part) => getComputedStyle(part).display !== "none").length;
say("before", column(2));
header.querySelector("button").click();
say("up", column(2)); say("sort-up", header.getAttribute("aria-sort"));
header.querySelector("button").click();
say("down", column(2)); say("sort-down", header.getAttribute("aria-sort"));
say("sections", shown("section.workload"));
const lines = document.getElementById("lines-of");
lines.value = "b"; lines.dispatchEvent(new Event("change"));
say("rows", shown("#results tbody tr"));
const count = () => shown('svg [id*="m--sgd--"]');
const had = count();
document.querySelector("fieldset.methods input[value=sgd]").click();
say("lines", [had > 0, count()]);
say("requests", performance.getEntriesByType("resource").map((entry) => entry.name));
</script></body>"""


@pytest.mark.long
@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on PATH")
def test_the_page_works_in_a_browser_without_a_network(finished_report, tmp_path):
    folder, _ = finished_report
    text = (folder / "docs" / "r" / "index.html").read_text()
    page = tmp_path / "page.html"
    page.write_text(text.replace("</body>", CLICKS))
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu"]
    command += ["--host-resolver-rules=MAP * ~NOTFOUND", f"--user-data-dir={tmp_path / 'profile'}"]
    command += ["--enable-logging=stderr", "--dump-dom", page.as_uri()]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    said = {
        name: json.loads(html.unescape(value))
        for name, value in re.findall(r'data-([a-z-]+)="([^"]*)"', _body_tag(result.stdout))
    }
    # Final losses at the defaults by workload and method, as they stand in the page.
    assert said["before"] == ["diverged", "4", "2", "diverged", "0.5", "1"]
    assert said["up"] == ["0.5", "1", "2", "4", "diverged", "diverged"]
    assert said["down"] == ["diverged", "diverged", "4", "2", "1", "0.5"]
    assert [said["sort-up"], said["sort-down"]] == ["ascending", "descending"]
    assert said["sections"] == 1  # the figures of one workload at a time
    assert said["rows"] == 3
    assert said["lines"] == [True, 0]
    assert said["requests"] == []
    assert "Content Security Policy" not in result.stderr
    assert "Uncaught" not in result.stderr


def _body_tag(text):
    return re.search(r"<body[^>]*>", text)[0]
