"""Every Python block of the README and of the docs runs, in order, in one namespace a file.

Those of the first pages that a visitor sees run each by itself.
"""

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
FIRST = (ROOT / "README.md", DOCS / "index.md")  # their blocks can be copied one at a time
OTHERS = [ROOT / "CONTRIBUTING.md", *sorted((ROOT / ".github").rglob("*.md"))]
# A page that imports one of these runs if it is installed; some must be the first of their kind
# in a process (Keras takes its backend at import), or start threads that outlive the page.
OPTIONAL = {
    "jax", "optax", "lightning", "transformers", "accelerate", "skorch", "fastai", "keras",
    "pytorch_optimizer", "mlflow", "wandb", "timm", "composer",
}  # fmt: skip
IN_A_PROCESS_OF_ITS_OWN = "integrations"  # the folder; long, as importing a trainer takes seconds
RUN = [
    pytest.param(page, marks=[pytest.mark.long] * (page.parent.name == IN_A_PROCESS_OF_ITS_OWN))
    for page in PAGES
]


def name_of(page):
    return str(page.relative_to(ROOT))


def code_blocks(page):
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", RUN, ids=name_of)
def test_code_blocks_run(page, tmp_path, monkeypatch):
    blocks = code_blocks(page)
    imported = set(re.findall(r"^\s*(?:import|from) (\w+)", "\n".join(blocks), re.MULTILINE))
    if any("stormplus.jax" in block for block in blocks):
        imported |= {"jax", "optax"}
    if page.parent.name == IN_A_PROCESS_OF_ITS_OWN:
        run_apart(blocks, imported & OPTIONAL, tmp_path)
        return
    for module in sorted(imported & OPTIONAL):
        pytest.importorskip(module)
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "__main__"}
    for block in blocks:
        if page in FIRST:
            namespace = {"__name__": "__main__"}
        exec(compile(block, page.name, "exec"), namespace)
    assert "README" not in page.name or len(blocks) >= 4


def test_the_readme_is_short_and_has_one_figure():
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 120
    assert text.count("![") == 1
    for said in ("git clone", "make demo", "make test", "not run on CUDA here"):
        assert said in text


def run_apart(blocks, modules, tmp_path):
    from importlib.util import find_spec

    absent = sorted(module for module in modules if find_spec(module) is None)
    if absent:
        pytest.skip(f"not installed: {', '.join(absent)}")
    script = tmp_path / "page.py"
    script.write_text("\n".join(blocks))
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=tmp_path,
        check=False,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr


def bare(code):
    """Without comments and white space, however it is wrapped and indented."""
    return re.sub(r"\s", "", re.sub(r"(^|\s)#.*", "", code))


def is_python(text):
    try:
        ast.parse(text)
    except SyntaxError:
        return False
    return True


def fragments():
    """Python that is not marked so: page, code, and the sentence before it."""
    for page in [*PAGES, ROOT / "CONTRIBUTING.md"]:
        parts = re.split(r"^```(.*)\n((?s:.*?))^```$", page.read_text(), flags=re.MULTILINE)
        for before, language, code in zip(parts[::3], parts[1::3], parts[2::3]):
            if language not in ("python", "sh") and is_python(code):
                yield page, code, before.strip().split("\n\n")[-1]


FRAGMENTS = list(fragments())


def test_fragments_are_found():
    assert [page.name for page, *_ in FRAGMENTS] == ["factories.md"] + 4 * ["many-machines.md"]


@pytest.mark.parametrize(("page", "code", "before"), FRAGMENTS)
def test_fragments_are_lines_of_the_file_that_is_named(page, code, before):
    named = re.findall(r"(?:examples|tests)/[\w/]+\.py", before)
    assert named, f"{page.name} names no file with these lines, and no test runs them:\n{code}"
    source = (ROOT / named[-1]).read_text()
    if page.name in source:  # a test that runs the page's own lines
        return
    place, whole = 0, bare(source)
    for line in filter(None, map(bare, code.splitlines())):
        place = whole.find(line, place) + len(line)
        assert place >= len(line), f"{page.name}: {line} is not in {named[-1]}, in this order"


@pytest.mark.parametrize("page", [*PAGES, *OTHERS], ids=name_of)
def test_links_between_files_hold(page):
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", [*PAGES, *OTHERS], ids=name_of)
def test_every_test_named_exists(page):
    for named in re.findall(r"`(?:tests/)?([a-z]+/test_[a-z_]+\.py)", page.read_text()):
        assert (ROOT / "tests" / named).is_file(), f"{page.name} names {named}"


def test_every_make_target_named_exists():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    workflows = sorted((ROOT / ".github").rglob("*.yml"))
    for page in [*PAGES, *OTHERS, *workflows]:
        named = set(re.findall(r"(?:^|`|run: )make ([a-z-]+)", page.read_text(), re.MULTILINE))
        assert named <= targets, f"{page.name} names {named - targets}"


def test_every_figure_has_a_command_beside_it():
    for page in PAGES:
        text = page.read_text()
        for figure in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", text):
            assert (page.parent / figure).is_file(), f"{page.name} shows {figure}"
            assert re.search(
                r"python (docs/scripts|examples)/|stormplus [a-z]+|make [a-z]+", text
            ), f"{page.name} shows {figure} and names no command that draws it"


def test_every_example_is_listed():
    listed = set(re.findall(r"\.\./examples/([\w.]+)\)", (DOCS / "examples.md").read_text()))
    there = {
        path.name for path in (ROOT / "examples").iterdir() if path.suffix in (".py", ".ipynb")
    }
    assert listed == there


def test_every_page_is_in_the_navigation():
    navigation = (ROOT / "mkdocs.yml").read_text().split("\nnav:")[1]
    assert set(re.findall(r": (\S+\.md)$", navigation, re.MULTILINE)) == {
        str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")
    }


def test_the_map_names_every_package():
    rows = re.findall(r"^\| (.+?) \|", (DOCS / "how-it-is-built.md").read_text(), re.MULTILINE)
    package = ROOT / "src" / "stormplus"
    for path in package.iterdir():
        if path.is_dir() and (path / "__init__.py").exists():
            assert any(f"`{path.name}/" in row for row in rows), path.name


def test_choosing_quotes_the_recorded_numbers():
    recorded = json.loads((DOCS / "results" / "choosing.json").read_text())
    text = (DOCS / "choosing.md").read_text()
    rows = re.findall(r"^\| (.+?) \| ([\d.]+) \((\S+)\) \| ([\d.]+) \((\S+)\) \|$", text, re.M)
    assert len(rows) == 7
    for name, *quoted in rows:
        key = re.sub(r'`norm="(\w+)"`', r"\1", name)
        for model, loss, lr in zip(
            ("perceptron, 64-64-10", "two convolutions, BatchNorm"), quoted[::2], quoted[1::2]
        ):
            losses = recorded[model][key]
            assert losses[lr] == min(losses.values()) == float(loss)


def test_speed_quotes_the_recorded_step_times():
    recorded = json.loads((DOCS / "results" / "step_time.json").read_text())["/ Adam(fused)"]
    text = (DOCS / "speed.md").read_text()
    for name, ratio in recorded.items():
        assert f"| {name} | {ratio:.2g} |" in text
