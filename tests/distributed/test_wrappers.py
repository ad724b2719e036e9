"""Wrappers that hand the optimizer a part of the parameters: refused, or known not to be."""

import pytest
import torch
import wrapper_jobs
from small_models import batches, joined_run

from stormplus import StormPlus

long = pytest.mark.long


@pytest.mark.parametrize("constructor", wrapper_jobs.CONSTRUCTORS)
@long
def test_zero_redundancy_optimizer_is_refused(cluster, constructor):
    for error in cluster.run(2, wrapper_jobs.zero_redundancy, constructor):
        assert error.startswith("RuntimeError: ZeroRedundancyOptimizer hands the optimizer a part")
        assert "fully_shard" in error


@pytest.mark.parametrize(
    ("action", "wrapper"),
    [
        (wrapper_jobs.distributed_optimizer, "DistributedOptimizer"),
        (wrapper_jobs.optimizer_in_backward, "_apply_optimizer_in_backward"),
    ],
)
def test_other_wrappers_of_torch_are_refused(action, wrapper):
    with pytest.raises(RuntimeError, match=f"{wrapper} hands the optimizer a part"):
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
@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"fused": True}], ids=str)
def test_partial_gradients_are_summed(cluster, options):
    runs = cluster.run(4, wrapper_jobs.partial_gradient, 20, **options)
    x, numbers = wrapper_jobs.partial_gradient_in_one_process(20, 4)
    for run_x, run_numbers in runs:
        torch.testing.assert_close(run_x, x, rtol=1e-10, atol=1e-12)
        assert run_numbers == pytest.approx(numbers, rel=1e-10)


@long
@pytest.mark.parametrize("scope", ["tensor", "global"])
def test_pipeline_stages_are_right_with_sums_of_their_own(cluster, scope):
    stages = cluster.run(2, wrapper_jobs.pipeline, 30, scope)
    expected = joined_run(batches(30), lambda m: StormPlus(m.parameters(), scope=scope))
    x = [p for stage in stages for p in stage["x"]]
    same = [torch.allclose(a, b, rtol=1e-10, atol=1e-12) for a, b in zip(x, expected["x"])]
    # With scope="global" a stage would need the norms of the others, and cannot know that
    # there are others: this is what the page "Many machines" warns of.
    assert all(same) if scope == "tensor" else not any(same)
