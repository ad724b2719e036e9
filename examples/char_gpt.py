"""A small GPT that learns to write, letter by letter: STORM+ and AdamW side by side.

    python examples/char_gpt.py [--evaluations N] [--lr LR] [--unit first]

Reads `$STORMPLUS_DATA/tinyshakespeare/input.txt`; without it, twelve lines of Shakespeare
inside this file, which a model of this size memorizes (the output says so). Both optimizers
start from the same weights, see batches of one stream, and take the same number of gradient
evaluations; STORM+ takes two per step. Prints validation losses, then a few lines that each
model wrote. On a transformer AdamW is far ahead: it has a scale for every weight, STORM+ one
step size for all.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from stormplus import StormPlus

CONTEXT, BATCH, WIDTH, HEADS, LAYERS = 64, 16, 64, 4, 2

SONNET = """Shall I compare thee to a summer's day?
Thou art more lovely and more temperate:
Rough winds do shake the darling buds of May,
And summer's lease hath all too short a date;
Sometime too hot the eye of heaven shines,
And often is his gold complexion dimm'd;
And every fair from fair sometime declines,
By chance or nature's changing course untrimm'd;
But thy eternal summer shall not fade,
Nor lose possession of that fair thou ow'st;
Nor shall death brag thou wander'st in his shade,
When in eternal lines to time thou grow'st:
"""


def read_text() -> tuple[str, str]:
    """The text, and where it is from."""
    path = Path(os.environ.get("STORMPLUS_DATA", ".")) / "tinyshakespeare" / "input.txt"
    if path.is_file():
        return path.read_text(), f"{path.parent.name}/{path.name}"
    return SONNET, "twelve lines inside this file (set STORMPLUS_DATA for all of Shakespeare)"


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.queries_keys_values = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.think = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        heads = [
            part.unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for part in self.queries_keys_values(self.before(x)).chunk(3, -1)
        ]
        seen = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.think(self.between(x))


class GPT(nn.Module):
    def __init__(self, letters: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.letter, self.place = nn.Embedding(letters, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, letters, bias=False)
        self.head.weight = self.letter.weight  # tied
        for name, p in self.named_parameters():
            if p.ndim == 2:
                nn.init.normal_(p, std=0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(p)

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1])
        return self.head(self.norm(self.blocks(self.letter(x) + self.place(places))))

    def loss(self, rows: Tensor) -> Tensor:
        return F.cross_entropy(self(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())

    @torch.no_grad()
    def write(self, count: int) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        text = torch.zeros(1, 1, dtype=torch.long)  # letter 0 is the line break
        for _ in range(count):
            chances = self(text[:, -CONTEXT:])[0, -1].div(0.8).softmax(0)
            text = torch.cat([text, torch.multinomial(chances, 1, generator=generator)[None]], 1)
        return text[0, 1:]


def rows_of(text: Tensor, count: int, generator: torch.Generator) -> Tensor:
    starts = torch.randint(len(text) - CONTEXT, (count, 1), generator=generator)
    return text[starts + torch.arange(CONTEXT + 1)]


def train(
    model: GPT, opt: torch.optim.Optimizer, train_text: Tensor, test_text: Tensor, evaluations: int
) -> float:
    stream = torch.Generator().manual_seed(1)
    held_out = rows_of(test_text, 64, torch.Generator().manual_seed(2))
    spent, shown, test = 0, 0, float("nan")
    while spent < evaluations:
        rows = rows_of(train_text, BATCH, stream)  # the sample, drawn outside the closure

        def closure() -> Tensor:
            nonlocal spent
            spent += 1
            opt.zero_grad()
            loss = model.loss(rows)
            loss.backward()
            return loss

        opt.step(closure)  # AdamW calls it once, STORM+ twice
        if spent * 4 >= evaluations * (shown + 1):
            shown += 1
            with torch.no_grad():
                test = model.loss(held_out).item()
            print(f"{spent:11d}  {test:15.3f}")
    return test


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--evaluations", type=int, default=1000, help="gradients per method")
    parser.add_argument("--lr", type=float, default=1.0, help="of STORM+")
    parser.add_argument("--unit", default="1", help="of STORM+: a number, or first")
    parser.add_argument("--adamw-lr", type=float, default=3e-3, help="of AdamW")
    parser.add_argument("--letters", type=int, default=300, help="to write at the end")
    args = parser.parse_args()
    torch.set_num_threads(1)
    text, source = read_text()
    alphabet = sorted(set(text))
    codes = torch.tensor([alphabet.index(letter) for letter in text])
    cut = len(codes) * 9 // 10
    train_text, test_text = (codes, codes) if text is SONNET else (codes[:cut], codes[cut:])
    print(f"text: {source}, {len(text)} letters")
    if text is SONNET:
        print("too short to hold any of it out: the losses are those of the training text")
    final = {}
    for name in ("STORM+", "AdamW"):
        model = GPT(len(alphabet))
        if name == "STORM+":
            unit = args.unit if args.unit == "first" else float(args.unit)
            opt: torch.optim.Optimizer = StormPlus(model.parameters(), args.lr, unit=unit)
        else:
            opt = torch.optim.AdamW(model.parameters(), args.adamw_lr)
        size = sum(p.numel() for p in model.parameters())
        print(f"\n{name}, {size} parameters\nevaluations  validation loss")
        final[name] = train(model, opt, train_text, test_text, args.evaluations)
        print("".join(alphabet[code] for code in model.write(args.letters)))
    print("\nat equal gradient evaluations:", *(f"{k} {v:.3f}" for k, v in final.items()))


if __name__ == "__main__":
    main()
