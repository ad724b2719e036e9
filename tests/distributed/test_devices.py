"""The same runs on GPUs over NCCL. Here they are run on the CPU and skipped elsewhere."""

import device_jobs
import pytest
import torch
from fsdp_jobs import grouped
from small_models import assert_equal_runs, assert_same_bits, batches, joined_run

from stormplus import StormPlus

pytestmark = pytest.mark.long

STEPS = 20
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
PLACES = [("cpu", "gloo"), pytest.param("cuda", "nccl", marks=two_gpus)]


@pytest.mark.parametrize(("kind", "backend"), PLACES)
@pytest.mark.parametrize(
    ("job", "options"),
    [
        (device_jobs.replicated, {}),
        (device_jobs.sharded, {}),
        (device_jobs.sharded, {"foreach": True, "scope": "tensor"}),
    ],
)
def test_equals_one_process(cluster, job, options, kind, backend):
    runs = cluster.run(2, job, kind, STEPS, backend=backend, **options)
    expected = joined_run(batches(STEPS), lambda m: StormPlus(grouped(m), **options))
    assert_same_bits(runs)
    assert_equal_runs(runs[0], expected, 1e-10)


@two_gpus
def test_sync_batchnorm_equals_the_joined_batch(cluster):
    runs = cluster.run(2, device_jobs.sync_batchnorm, "cuda", STEPS, backend="nccl")
    expected = device_jobs.joined_batchnorm(STEPS)
    assert_same_bits(runs)
    # BatchNorm divides by small variances, and the GPU's kernels add in another order.
    assert_equal_runs(runs[0], expected, 1e-8)
    for a, b in zip(runs[0]["buffers"], expected["buffers"], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-8)


def test_batchnorm_reference_moves_statistics_once():
    # What SyncBatchNorm will be compared with, checked where it can run.
    run = device_jobs.joined_batchnorm(STEPS)
    tracked = [int(b) for b in run["buffers"] if b.dtype == torch.long]
    assert tracked == [STEPS, STEPS]
    assert run["calls"] == 2 * STEPS - 1
