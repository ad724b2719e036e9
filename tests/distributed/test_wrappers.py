"""Wrappers that hand the optimizer a part of the parameters: refused, or known not to be."""

import pytest
import torch
import wrapper_jobs
from small_models import Tanh, batches, bounded_loss

from stormplus import StormPlus

long = pytest.mark.long


@pytest.mark.parametrize("constructor", wrapper_jobs.CONSTRUCTORS)
@long
def test_zero_redundancy_optimizer_is_refused(cluster, constructor):
    for error in cluster.run(2, wrapper_jobs.zero_redundancy, constructor):
        assert error.startswith("RuntimeError: torch.distributed.optim.zero_redundancy_optimizer ")
        assert "fully_shard" in error


@pytest.mark.parametrize(
    "action", [wrapper_jobs.distributed_optimizer, wrapper_jobs.optimizer_in_backward]
)
def test_other_wrappers_of_torch_are_refused(action):
    with pytest.raises(RuntimeError, match="gives the optimizer a part of the parameters"):
        action()


@long
def test_post_local_sgd_is_refused_for_it_has_no_closure(cluster):
    for error in cluster.run(2, wrapper_jobs.post_local_sgd):
        assert error.startswith("TypeError: StormPlus takes the gradient twice")


@long
@pytest.mark.parametrize(
    "options",
    [
        {"use_orig_params": False},
        {"use_orig_params": True},
        {"use_orig_params": True, "before": True},
    ],
    ids=str,
)
def test_fsdp1_is_refused(cluster, options):
    for error in cluster.run(2, wrapper_jobs.fsdp1, **options):
        assert error.startswith("RuntimeError: a parameter of FullyShardedDataParallel (FSDP1)")


@long
def test_partial_placements_are_refused(cluster):
    for partial, shard, replicate in cluster.run(2, wrapper_jobs.partial_sum):
        assert "placements (Partial(sum),) is only a part of a sum" in partial
        assert shard == replicate == "nothing was refused"


@long
@pytest.mark.parametrize("options", [{}, {"foreach": True}], ids=str)
def test_partial_gradients_are_summed(cluster, options):
    runs = cluster.run(4, wrapper_jobs.partial_gradient, 20, **options)
    x, numbers = wrapper_jobs.partial_gradient(20, ranks=4)
    for run_x, run_numbers in runs:
        torch.testing.assert_close(run_x, x, rtol=1e-10, atol=1e-12)
        assert run_numbers == pytest.approx(numbers, rel=1e-10)


@long
def test_each_pipeline_stage_has_sums_of_its_own(cluster):
    stages = cluster.run(2, wrapper_jobs.pipeline, 30)
    model = Tanh()
    parts = [list(model.parameters())[:4], list(model.parameters())[4:]]
    opts = [StormPlus(part) for part in parts]
    for u, y in batches(30):

        def backward(u=u, y=y):
            model.zero_grad()
            bounded_loss(model(u), y).backward()

        if opts[0].started:
            backward()
            for opt in opts:
                opt.move()
        backward()
        for opt in opts:
            opt.estimate()
    for stage, part in zip(stages, parts, strict=True):
        for ours, theirs in zip(stage["x"], part, strict=True):
            torch.testing.assert_close(ours, theirs.detach(), rtol=1e-10, atol=1e-12)
