"""The Python blocks of README and docs run, their links hold, and the lists are complete."""

import ast
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
OTHERS = [ROOT / "CONTRIBUTING.md", *sorted((ROOT / ".github").rglob("*.md"))]
FIRST = (ROOT / "README.md", DOCS / "index.md")  # readers copy their blocks one at a time
# A page that imports one of these is skipped where it is not installed.
OPTIONAL = {
    "jax", "optax", "lightning", "transformers", "accelerate", "skorch", "fastai", "keras",
    "pytorch_optimizer", "mlflow", "wandb", "timm", "composer", "flax", "equinox", "orbax",
}  # fmt: skip
IN_A_PROCESS = (
    "integrations"  # a folder: Keras chooses its backend at import, trainers leave threads
)


def name_of(page):
    return str(page.relative_to(ROOT))


def blocks_of(page, language="python"):
    pattern = rf"^```{language}\n(.*?)^```"
    return re.findall(pattern, page.read_text(), re.MULTILINE | re.DOTALL)


def parses(text):
    try:
        ast.parse(text)
    except SyntaxError:
        return False
    return True


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=[pytest.mark.long] if page.parent.name == IN_A_PROCESS else [])
        for page in PAGES
        if blocks_of(page)
    ],
    ids=name_of,
)
def test_code_blocks_run(page, tmp_path, monkeypatch):
    blocks = blocks_of(page)
    imported = set(re.findall(r"^\s*(?:import|from) (\w+)", "\n".join(blocks), re.MULTILINE))
    if any("stormplus.jax" in block for block in blocks):
        imported |= {"jax", "optax"}
    missing = [module for module in sorted(imported & OPTIONAL) if find_spec(module) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")
    if page.parent.name == IN_A_PROCESS:
        script = tmp_path / "page.py"
        script.write_text("\n".join(blocks))
        done = subprocess.run(
            [sys.executable, str(script)],
            cwd=tmp_path, check=False, capture_output=True, text=True, timeout=300,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "__main__"}
    for block in blocks:
        if page in FIRST:
            namespace = {"__name__": "__main__"}
        exec(compile(block, page.name, "exec"), namespace)


def test_python_that_cannot_run_on_its_page_is_in_an_example_or_a_test():
    sources = [*(ROOT / "examples").glob("*.py"), *(ROOT / "tests").rglob("*.py")]
    known = "".join("".join(path.read_text().split()) for path in sources)  # however it is wrapped
    for page in PAGES:
        if page.parent.name == IN_A_PROCESS:  # tests/integrations runs these
            continue
        for block in blocks_of(page, "text"):
            if parses(block) or parses(f"if True:\n{block}"):
                for line in block.splitlines():
                    assert "".join(line.split()) in known, f"{page.name}: {line}"


@pytest.mark.parametrize("page", [*PAGES, *OTHERS], ids=name_of)
def test_links_between_files_hold(page):
    for target, anchor in re.findall(r"\]\(([^)#\s]+)(?:#([^)]*))?\)", page.read_text()):
        if "://" not in target and target != "report/index.html":
            found = page.parent / target
            assert found.exists(), f"{page.name} links to {target}"
            assert not anchor or anchor in anchors_of(found), f"{page.name}: {target}#{anchor}"


def anchors_of(page):
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    plain = (re.sub(r"[^\w\s-]", "", heading).strip().lower() for heading in headings)
    return {re.sub(r"[-\s]+", "-", heading) for heading in plain}


def test_every_make_target_named_exists():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in [*PAGES, *OTHERS, *sorted((ROOT / ".github").rglob("*.yml"))]:
        named = set(re.findall(r"(?:^|`|run: )make ([a-z-]+)", page.read_text(), re.MULTILINE))
        assert named <= targets, f"{page.name} names {named - targets}"


def test_every_example_is_listed():
    listed = set(re.findall(r"\.\./examples/([\w.]+)\)", (DOCS / "examples.md").read_text()))
    there = {path.name for path in (ROOT / "examples").iterdir()}
    assert listed == {name for name in there if name.endswith((".py", ".ipynb"))}


def test_every_page_is_in_the_navigation():
    navigation = (ROOT / "mkdocs.yml").read_text().split("\nnav:")[1]
    assert set(re.findall(r": (\S+\.md)$", navigation, re.MULTILINE)) == {
        str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")
    }
