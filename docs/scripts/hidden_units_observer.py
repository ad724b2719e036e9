"""What the estimator of STORM+ sees at the start of a ResNet34: `stormplus.theory.Observer`.

    python docs/scripts/hidden_units_observer.py --data-dir DIR

The first steps at lr 0.01, and again with a tenth and a hundredth of the move, which tells
whether |g_{t+1} - g~_t| is proportional to the move, as smoothness wants. (Much shorter
moves are lost in float32.) Writes `docs/results/hidden_units_observer.json`.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from pathlib import Path

import numpy as np
import torch
from hidden_units import load_train, resnet34
from torch import nn

from stormplus import StormPlus
from stormplus.theory import Observer

RESULT = Path(__file__).parents[1] / "results" / "hidden_units_observer.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=9)
    args = parser.parse_args()
    images, labels = load_train(args.data_dir)
    order = np.random.default_rng(0).permutation(len(labels))
    runs = []
    for lr in (0.01, 0.001, 0.0001):
        torch.manual_seed(0)
        model = resnet34().train()
        optimizer, observer = StormPlus(model.parameters(), lr=lr), Observer()
        start = time.perf_counter()
        with observer.attach(optimizer):
            for t in range(args.steps):
                batch = order[100 * t : 100 * (t + 1)]

                def closure(batch: np.ndarray = batch, model: nn.Module = model) -> torch.Tensor:
                    model.zero_grad()
                    loss = nn.functional.cross_entropy(model(images[batch]), labels[batch])
                    loss.backward()
                    return loss

                optimizer.step(closure)
        rows = [{k: float(f"{v:.4g}") for k, v in row.items()} for row in observer.rows]
        runs.append({"lr": lr, "rows": rows})
        print(lr, f"{time.perf_counter() - start:.0f} s", rows[1], rows[-1], flush=True)
    result = {
        "command": "python docs/scripts/hidden_units_observer.py --data-dir DIR",
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "seed": 0,
        "runs": runs,
    }
    RESULT.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
