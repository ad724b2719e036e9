"""The hidden units of STORM+: ResNet34 on CIFAR-10 (large gradients).

    python docs/scripts/hidden_units.py --data-dir DIR

`DIR` holds `cifar-10-batches-bin` (the binary release of CIFAR-10). Writes
`docs/results/hidden_units_resnet34.json`; `hidden_units_figure.py` draws it. The loop below
is Algorithm 1 in the order "move, then estimate", with the scalar rules of `stormplus.rules`;
the reference `sgd` is plain SGD, and `|g_1|` is the first gradient's norm.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from stormplus.rules import StormPlusRule, Sums

HERE = Path(__file__).parent
RESULT = HERE.parent / "results" / "hidden_units_resnet34.json"


class Residual(nn.Module):
    """Two 3x3 convolutions and a shortcut."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels_in != channels:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels_in, channels, 1, stride, bias=False), nn.BatchNorm2d(channels)
            )

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.norm1(self.conv1(x)))
        return torch.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


def resnet34() -> nn.Sequential:
    """ResNet34 as in torchvision: 7x7 stem, 3-4-6-3 modules; He initialisation, 10 classes."""
    layers: list[nn.Module] = [
        nn.Conv2d(3, 64, 7, 2, 3, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, 1),
    ]
    channels_in = 64
    for stage, (channels, depth) in enumerate(((64, 3), (128, 4), (256, 6), (512, 3))):
        for i in range(depth):
            layers.append(Residual(channels_in, channels, 2 if stage and not i else 1))
            channels_in = channels
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10)]
    model = nn.Sequential(*layers)
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return model


def load_train(data_dir: Path) -> tuple[Tensor, Tensor]:
    """The 50,000 training images, standardised by channel, and their labels."""
    files = sorted((data_dir / "cifar-10-batches-bin").glob("data_batch_*.bin"))
    if not files:
        raise SystemExit(f"no cifar-10-batches-bin/data_batch_*.bin in {data_dir}")
    rows = np.concatenate([np.fromfile(f, np.uint8).reshape(-1, 3073) for f in files])
    images = torch.from_numpy(rows[:, 1:].reshape(-1, 3, 32, 32)).float() / 255
    mean, std = images.mean((0, 2, 3), keepdim=True), images.std((0, 2, 3), keepdim=True)
    return (images - mean) / std, torch.from_numpy(rows[:, 0].astype(np.int64))


def batch_gradient(
    model: nn.Module, images: Tensor, labels: Tensor, order: np.ndarray
) -> Callable[[int], tuple[float, list[Tensor]]]:
    """The loss and gradient of sample t, a batch of 100 as in the paper."""

    def gradient(t: int) -> tuple[float, list[Tensor]]:
        batch = order[100 * (t - 1) : 100 * t]
        model.zero_grad()
        loss = nn.functional.cross_entropy(model(images[batch]), labels[batch])
        loss.backward()
        return float(loss.detach()), [p.grad for p in model.parameters()]  # type: ignore[misc]

    return gradient


def norm_sq(tensors: list[Tensor]) -> float:
    return float(sum(float(t.double().square().sum()) for t in tensors))


def storm_plus(
    gradient: Callable[[int], tuple[float, list[Tensor]]],
    parameters: list[Tensor],
    steps: int,
    lr: float,
    unit: float,
) -> list[dict[str, float]]:
    """Algorithm 1; `unit` divides the loss, and so sets the unit of the gradient."""
    rule, sums, rows = StormPlusRule(), Sums(), []
    a = eta = 1.0
    d: list[Tensor] = []
    for t in range(1, steps + 1):
        if t > 1:
            _, g_tilde = gradient(t)
            for x, d_i, g_i in zip(parameters, d, g_tilde):
                x.sub_(d_i, alpha=lr * eta)  # Alg. 1, line 4
                d_i.sub_(g_i, alpha=1 / unit).mul_(1 - a)  # Alg. 1, line 6
        loss, g = gradient(t)
        if not np.isfinite(loss):
            rows.append({"t": t, "loss": float("inf")})
            break
        d = (
            [g_i / unit for g_i in g]
            if t == 1
            else [d_i.add_(g_i, alpha=1 / unit) for d_i, g_i in zip(d, g)]
        )
        g_sq, d_sq = norm_sq(g) / unit**2, norm_sq(d)
        sums, a, eta = rule(sums, g_sq, d_sq, t)  # Alg. 1, line 3
        rows.append(
            {
                "t": t,
                "loss": loss,
                "gain": a,
                "step_size": eta,
                "grad_norm": g_sq**0.5,
                "estimator_norm": d_sq**0.5,
            }
        )
    return rows


def sgd(
    gradient: Callable[[int], tuple[float, list[Tensor]]],
    parameters: list[Tensor],
    steps: int,
    lr: float,
) -> list[dict[str, float]]:
    rows = []
    for t in range(1, steps + 1):
        loss, g = gradient(t)
        for x, g_i in zip(parameters, g):
            x.sub_(g_i, alpha=lr)
        rows.append({"t": t, "loss": loss, "grad_norm": norm_sq(g) ** 0.5})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--lr", type=float, nargs="*", default=[0.01, 0.1, 1.0])
    parser.add_argument("--unit-lr", type=float, nargs="*", default=[0.1, 1.0])
    parser.add_argument("--sgd-lr", type=float, nargs="*", default=[0.01])
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    images, labels = load_train(args.data_dir)
    order = np.random.default_rng(args.seed).permutation(len(labels))

    runs: list[dict[str, Any]] = []
    first_norm = 1.0
    plan = [("storm+", lr, 1.0) for lr in args.lr]
    plan += [("sgd", lr, 1.0) for lr in args.sgd_lr]
    plan += [("storm+, loss / |g_1|", lr, 0.0) for lr in args.unit_lr]
    for name, lr, unit in plan:
        torch.manual_seed(args.seed)
        model = resnet34().train()
        parameters = [p.data for p in model.parameters()]
        gradient = batch_gradient(model, images, labels, order)
        start = time.perf_counter()
        if name == "sgd":
            rows = sgd(gradient, parameters, args.steps, lr)
        else:
            rows = storm_plus(gradient, parameters, args.steps, lr, unit or first_norm)
        seconds = time.perf_counter() - start
        if name == "storm+":
            first_norm = rows[0]["grad_norm"]
        runs.append(
            {
                "name": name,
                "lr": lr,
                "unit": unit or first_norm,
                "seconds": round(seconds, 1),
                "rows": rows,
            }
        )
        losses = [round(row["loss"], 3) for row in rows[:: max(1, args.steps // 8)]]
        print(name, lr, f"{seconds:.0f} s", losses, flush=True)
    result = {
        "command": "python docs/scripts/hidden_units.py --data-dir DIR",
        "model": "ResNet34",
        "batch": 100,
        "seed": args.seed,
        "steps": args.steps,
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "machine": f"{platform.machine()}, {torch.get_num_threads()} threads",
        "runs": runs,
    }
    for run in runs:
        for row in run["rows"]:  # four digits are enough for a figure
            row.update({key: float(f"{value:.4g}") for key, value in row.items()})
    RESULT.write_text(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
