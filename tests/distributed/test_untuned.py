"""Untuned over two processes: the run is that of one process on the joined batches."""

import pytest
import torch
import untuned_jobs
from small_models import assert_equal_runs, assert_same_bits

pytestmark = pytest.mark.long

STEPS = 40
KINDS = pytest.mark.parametrize("kind", ["fsdp", "ddp"])


@KINDS
@pytest.mark.parametrize(
    "options",
    [{}, {"weight_decay": 0.1}, {"state_dtype": torch.bfloat16}],
    ids=str,
)
def test_equals_one_process(cluster, kind, options):
    runs = cluster.run(2, untuned_jobs.parity, STEPS, kind, **options)
    expected = untuned_jobs.one_process(STEPS, **options)
    assert_same_bits(runs)
    # Rounding at random goes by the place of an element in its shard.
    assert_equal_runs(runs[0], expected, rtol=0.05 if "state_dtype" in options else 1e-12)
    assert {run["calls"] for run in runs} == {expected["calls"]}
    assert expected["calls"] == STEPS


@KINDS
def test_a_validation_in_between_sees_the_average_and_leaves_the_iterate(cluster, kind):
    runs = cluster.run(2, untuned_jobs.validating, 20, kind)
    assert_same_bits(runs)
    assert_equal_runs(runs[0], untuned_jobs.validating(20), rtol=1e-12)


@KINDS
def test_a_sample_that_is_not_finite_on_one_process_raises_on_both(cluster, kind):
    runs = cluster.run(2, untuned_jobs.one_bad_sample, 12, kind, bad_step=5)
    assert_same_bits(runs)
    for run in runs:
        (error,) = run["errors"]
        assert "nothing has moved" in error
        assert run["numbers"]["step"] == 11
        assert all(torch.isfinite(x).all() for x in run["x"])


@pytest.mark.parametrize("averaged", [False, True])
def test_a_distributed_checkpoint_goes_on_bit_by_bit(cluster, tmp_path, averaged):
    runs = cluster.run(2, untuned_jobs.resumed, STEPS, 15, str(tmp_path / "dcp"), averaged)
    expected = cluster.run(2, untuned_jobs.parity, STEPS, "fsdp")
    assert_same_bits([*runs, *expected])


@pytest.mark.parametrize(("first", "then"), [(2, 4), (4, 2)])
def test_a_checkpoint_goes_on_over_another_number_of_processes(cluster, tmp_path, first, then):
    cluster.run(first, untuned_jobs.saved, STEPS, 15, str(tmp_path / "dcp"))
    runs = cluster.run(then, untuned_jobs.loaded, STEPS, 15, str(tmp_path / "dcp"))
    assert_same_bits(runs)
    expected = untuned_jobs.one_process(STEPS)
    assert_equal_runs(runs[0], expected, rtol=1e-12)


def test_statistics_that_join_processes_are_not_taken_anew_behind_a_save(cluster):
    for errors in cluster.run(2, untuned_jobs.follow_joined_statistics):
        (error,) = errors
        assert "recalibrate_batches with SyncBatchNorm" in error
