"""The Python blocks of README and docs run, their links hold, and the lists are complete."""

import re
from importlib.util import find_spec

import pytest

from tests.support.pages import ROOT, blocks_of, run_page, run_python

DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
OTHERS = [ROOT / "CONTRIBUTING.md", *sorted((ROOT / ".github").rglob("*.md"))]
FIRST = (ROOT / "README.md", DOCS / "index.md")  # readers copy their blocks one at a time
# A page that imports one of these is skipped where it is not installed.
OPTIONAL = {
    "jax", "optax", "lightning", "transformers", "accelerate", "skorch", "fastai", "keras",
    "pytorch_optimizer", "mlflow", "wandb", "timm", "composer", "flax", "equinox", "orbax",
}  # fmt: skip


def name_of(page):
    return str(page.relative_to(ROOT))


def skip_if_missing(blocks):
    imported = set(re.findall(r"^\s*(?:import|from) (\w+)", "\n".join(blocks), re.MULTILINE))
    if any("stormplus.jax" in block for block in blocks):
        imported |= {"jax", "optax"}
    missing = [module for module in sorted(imported & OPTIONAL) if find_spec(module) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")


def pages_with_code(integrations):
    pages = [p for p in PAGES if blocks_of(p) and (p.parent.name == "integrations") == integrations]
    return pytest.mark.parametrize("page", pages, ids=name_of)


@pages_with_code(integrations=False)
def test_code_blocks_run(page, tmp_path, monkeypatch):
    skip_if_missing(blocks_of(page))
    monkeypatch.chdir(tmp_path)
    run_page(page, together=page not in FIRST)


@pytest.mark.long
@pages_with_code(integrations=True)
def test_code_blocks_of_integrations_run(page, tmp_path):
    """In a process: Keras chooses its backend at import, trainers leave threads."""
    blocks = blocks_of(page)
    skip_if_missing(blocks)
    (tmp_path / "page.py").write_text("\n".join(blocks))
    done = run_python("page.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr


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


def test_every_example_and_every_page_is_listed():
    listed = set(re.findall(r"\.\./examples/([\w.]+)\)", (DOCS / "examples.md").read_text()))
    assert listed == {
        p.name for p in (ROOT / "examples").iterdir() if p.suffix in (".py", ".ipynb")
    }
    navigation = (ROOT / "mkdocs.yml").read_text().split("\nnav:")[1]
    pages = {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")}
    assert set(re.findall(r": (\S+\.md)$", navigation, re.MULTILINE)) == pages
