"""fp16 with a loss scale: `scaled_step` in place of `scaler.step(opt); scaler.update()`.

    python examples/mixed_precision.py [--samples N]

For bf16, `torch.autocast(device, dtype=torch.bfloat16)` in the closure is enough.
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

from stormplus import StormPlus, scaled_step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=300)
    samples = parser.parse_args().samples
    torch.manual_seed(0)
    torch.set_num_threads(1)
    images, labels = load_digits(return_X_y=True)
    images, labels = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 10))
    opt = StormPlus(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24)  # too high: the first ones overflow

    for _ in range(samples):
        index = torch.randint(len(images), (64,))
        x, y = images[index], labels[index]

        def closure() -> torch.Tensor:
            opt.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                loss = F.cross_entropy(model(x), y)
            scaler.scale(loss).backward()
            return loss

        scaled_step(
            opt, scaler, closure, model,
            process=lambda: nn.utils.clip_grad_norm_(model.parameters(), 10.0),
        )  # fmt: skip

    taken = int(opt.diagnostics()["step"])
    model.eval()
    with torch.no_grad():
        accuracy = (model(images).argmax(1) == labels).float().mean().item()
    print(
        f"{samples} samples, {samples - taken} dropped by overflow, scale {scaler.get_scale():g}, "
        f"accuracy {accuracy:.3f}"
    )


if __name__ == "__main__":
    main()
