"""What the research scripts share: arguments, paths, versions, colors, and JSON files."""

from __future__ import annotations

import argparse
import json
import platform
from pathlib import Path
from typing import Any

import numpy as np

DOCS = Path(__file__).parents[1] / "docs"
WIDTH = 7.6  # inches: a column of text
COLORS = {
    "STORM+": "#d9480f",
    "simplified STORM+": "#e8308a",
    "STORM": "#7048e8",
    "SGD": "#495057",
    "AdaGrad-norm": "#b08968",
    "Adam": "#1971c2",
}


def parser(doc: str) -> argparse.ArgumentParser:
    """Return a parser whose help is the script's docstring."""
    raw = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(description=doc, formatter_class=raw)


def versions() -> dict[str, str]:
    """Return what a number depends on besides the code."""
    return {
        "python": platform.python_version(),
        "numpy": np.__version__,
        "machine": platform.machine(),
    }


def load(name: str) -> dict[str, Any]:
    """Return the content of docs/results/`name`, or an empty dict."""
    file = DOCS / "results" / name
    content: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    return content


def save(name: str, content: dict[str, Any]) -> None:
    """Write docs/results/`name`."""
    (DOCS / "results" / name).write_text(json.dumps(content, indent=1) + "\n")
