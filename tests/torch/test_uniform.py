"""UniformIterate: uniform, reproducible, complete."""

import numpy as np
import pytest
import torch
from scipy.stats import chi2
from torch import nn

from stormplus import UniformIterate
from tests.torch.optimizers import assert_same


@pytest.mark.parametrize("steps", [1, 2, 7])
def test_uniform_over_the_iterates(steps):
    # Chi-square over 1000 runs with fixed seeds; 99.9% of fair choices pass.
    runs, counts = 1000, np.zeros(steps)
    p = torch.zeros(1)
    for seed in range(runs):
        iterate = UniformIterate([p], seed=seed)
        for t in range(steps):
            p.fill_(t)
            iterate.update()
        assert iterate.count == steps
        counts[iterate.chosen - 1] += 1
        target = torch.empty(1)
        iterate.copy_to([target])
        assert int(target) == iterate.chosen - 1
    statistic = ((counts - runs / steps) ** 2 / (runs / steps)).sum()
    assert statistic <= chi2.ppf(0.999, max(steps - 1, 1))


def test_the_global_stream_is_untouched_and_ranks_and_devices_agree():
    before = torch.get_rng_state()
    first, second = (UniformIterate([torch.zeros(2)], seed=3) for _ in range(2))
    with torch.device("meta"):  # stands for a device that torch.set_default_device has chosen
        choices = [first.update() for _ in range(50)]
    assert choices == [second.update() for _ in range(50)]
    assert any(choices[1:])
    assert torch.equal(torch.get_rng_state(), before)


def test_buffers_come_along():
    model = nn.BatchNorm1d(3)
    iterate = UniformIterate(model)
    model(torch.randn(8, 3))
    assert iterate.update()  # the first iterate is always kept
    kept = {k: v.clone() for k, v in model.state_dict().items()}
    model(torch.randn(8, 3) + 5)
    nn.init.zeros_(model.weight)
    target = nn.BatchNorm1d(3)
    iterate.copy_to(target)
    assert_same(dict(target.state_dict()), kept)
    iterate.copy_to()
    assert_same(dict(model.state_dict()), kept)


def test_a_module_that_replaces_its_buffer_or_changes_its_dtype():
    model = nn.Linear(1, 1)
    model.register_buffer("level", torch.zeros(1))
    iterate = UniformIterate(model)
    model.double()
    model.level = model.level + 1 / 3
    assert iterate.update()
    model.level = torch.zeros(1).double()
    iterate.copy_to()
    assert float(model.level) == 1 / 3


def test_a_resumed_choice_is_the_same(tmp_path):
    p = torch.zeros(3)
    whole, half = UniformIterate([p], seed=1), UniformIterate([p], seed=1)
    resumed = UniformIterate([p], seed=99)
    for t in range(40):
        p.fill_(t)
        whole.update()
        if t == 20:
            torch.save(half.state_dict(), tmp_path / "it.pt")
            resumed.load_state_dict(torch.load(tmp_path / "it.pt", weights_only=True))
        (half if t < 20 else resumed).update()
    targets = torch.empty(3), torch.empty(3)
    for iterate, target in zip((whole, resumed), targets):
        iterate.copy_to([target])
    assert torch.equal(*targets)
    assert whole.chosen == resumed.chosen


def test_bad_use():
    with pytest.raises(ValueError, match="no parameters"):
        UniformIterate([])
    iterate = UniformIterate([torch.zeros(2)])
    with pytest.raises(RuntimeError, match=r"update\(\)"):
        iterate.copy_to()
    iterate.update()
    with pytest.raises(ValueError, match="shape"):
        iterate.copy_to([torch.zeros(3)])
    with pytest.raises(ValueError, match="shapes"):
        UniformIterate([torch.zeros(5)]).load_state_dict(iterate.state_dict())
