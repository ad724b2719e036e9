"""Wrappers that hand the optimizer a part of the parameters: refused, or known not to be."""

import pytest
import torch

from stormplus import Untuned
from tests.distributed import jobs
from tests.support.problems import Tanh, batches, bounded_loss

long = pytest.mark.long


REFUSED = {
    "ZeroRedundancyOptimizer": (jobs.zero_redundancy, {}),
    "PostLocalSGDOptimizer": (jobs.post_local_sgd, {}),
    "FSDP1": (jobs.fsdp1, {"use_orig_params": False}),
    "FSDP1, original": (jobs.fsdp1, {"use_orig_params": True}),
    "FSDP1, made before": (jobs.fsdp1, {"use_orig_params": True, "before": True}),
    "a part of a sum": (jobs.partial_sum, {}),
}


@long
@pytest.mark.parametrize("name", REFUSED)
def test_what_hands_over_a_part_or_has_no_closure_is_refused(cluster, name):
    job, options = REFUSED[name]
    cluster.run(2, job, **options)


@pytest.mark.parametrize("action", [jobs.distributed_optimizer, jobs.optimizer_in_backward])
def test_other_wrappers_of_torch_are_refused(action):
    with pytest.raises(RuntimeError, match="gives the optimizer a part of the parameters"):
        action()


def test_step_in_backward_with_one_untuned_per_parameter():
    """The hooks take the same steps as a loop over the optimizers after the backward pass."""
    models = hooked, looped = Tanh(), Tanh()
    opts = {p: Untuned([p]) for model in models for p in model.parameters()}

    def step(p):
        opts[p].step()
        opts[p].zero_grad()

    for p in hooked.parameters():
        p.register_post_accumulate_grad_hook(step)
    for u, y in batches(30):
        for model in models:
            bounded_loss(model(u), y).backward()
        for p in looped.parameters():
            step(p)
    for p, q, start in zip(hooked.parameters(), looped.parameters(), Tanh().parameters()):
        assert p.grad is None
        assert torch.equal(p, q)
        assert not torch.equal(p, start)


@long
@pytest.mark.parametrize("options", [{}, {"foreach": True}], ids=str)
def test_partial_gradients_are_summed(cluster, options):
    runs = cluster.run(4, jobs.partial_gradient, 20, **options)
    x, numbers = jobs.partial_gradient(20, ranks=4)
    for run_x, run_numbers in runs:
        torch.testing.assert_close(run_x, x, rtol=1e-10, atol=1e-12)
        assert run_numbers == pytest.approx(numbers, rel=1e-10)
