"""The plain PyTorch loop that every integration's run is compared with, step by step."""

import torch
from torch import nn
from torch.nn import functional as F

from stormplus import StormPlus, same_sample

SAMPLES, BATCH, FEATURES, CLASSES = 6, 8, 5, 3


def data(samples=SAMPLES, seed=0):
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(samples * BATCH, FEATURES, generator=draw)
    y = torch.randint(CLASSES, (samples * BATCH,), generator=draw)
    return x, y


def batches(epochs=1, samples=SAMPLES):
    x, y = data(samples)
    return list(zip(x.split(BATCH), y.split(BATCH))) * epochs


class Network(nn.Module):
    """Not linear, with running statistics and dropout; counts its evaluations in train mode."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.3),
            nn.Linear(8, CLASSES),
        )  # fmt: skip
        self.evaluations = 0

    def forward(self, x):
        self.evaluations += self.training
        return self.body(x)


def network(seed=0):
    torch.manual_seed(seed)
    return Network()


def snapshot(model):
    """Parameters and buffers."""
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def plain_run(model, samples, *, each=None, after=None, clip=None, autocast=None, **options):
    """Snapshots after every step, and the optimizer. `each(i, opt)` runs before sample i."""
    opt = StormPlus(model.parameters(), **options)
    model.train()
    snapshots = []
    for i, (x, y) in enumerate(samples):
        if each is not None:
            each(i, opt)

        def closure():
            opt.zero_grad()
            with torch.autocast("cpu", dtype=autocast, enabled=autocast is not None):
                out = model(x)
            loss = F.cross_entropy(out.float(), y)
            loss.backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            return loss

        opt.step(same_sample(opt, model)(closure))
        if after is not None:
            after(i, opt)
        snapshots.append(snapshot(model))
    return snapshots, opt


def assert_same_runs(run, plain):
    assert len(run) == len(plain) > 1
    for i, (mine, theirs) in enumerate(zip(run, plain)):
        assert mine.keys() == theirs.keys()
        for name in mine:
            assert torch.equal(mine[name], theirs[name]), f"{name} differs after sample {i + 1}"
    assert any(not torch.equal(run[0][name], run[-1][name]) for name in run[0])
