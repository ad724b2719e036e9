"""Checkpoints, the average and the kept iterate of models on many processes."""

import pytest

from tests.distributed import jobs
from tests.distributed.small_models import assert_equal_runs, assert_same_bits, joined_run

pytestmark = pytest.mark.long

FIRST = {"unit": "first", "lr": 0.1}
UNTUNED = {"method": "untuned"}


@pytest.mark.parametrize("options", [{}, FIRST, UNTUNED], ids=str)
@pytest.mark.parametrize(("before", "after"), [(2, 4), (4, 2)])
def test_a_checkpoint_goes_on_over_another_number_of_processes(
    cluster, tmp_path, before, after, options
):
    saved = cluster.run(before, jobs.part_of_a_run, 0, 20, save=tmp_path, **options)
    resumed = cluster.run(after, jobs.part_of_a_run, 20, 40, load=tmp_path, **options)
    for began, _ in resumed:
        assert_same_bits([saved[0][1], began])
        assert began["schedule"] == saved[0][1]["schedule"]
    ends = [ended for _, ended in resumed]
    assert_same_bits(ends)
    expected = joined_run(40, schedule=jobs.cosine, **options)
    assert_equal_runs(ends[0], expected, 1e-12 if options == UNTUNED else 1e-10)


@pytest.mark.parametrize(
    "options", [{}, UNTUNED, UNTUNED | {"averaged": True}], ids=["storm+", "Untuned", "average"]
)
def test_a_checkpoint_goes_on_bit_by_bit_over_as_many_processes(cluster, tmp_path, options):
    cluster.run(2, jobs.part_of_a_run, 0, 15, save=tmp_path, **options)
    resumed = cluster.run(2, jobs.part_of_a_run, 15, 40, load=tmp_path, **options)
    whole = cluster.run(2, jobs.part_of_a_run, 0, 40, **options)
    assert_same_bits([ended for _, ended in (*resumed, *whole)])


@pytest.mark.parametrize("make", [jobs.fsdp, jobs.ddp])
def test_a_validation_in_between_sees_the_average_and_leaves_the_iterate(cluster, make):
    runs = cluster.run(2, jobs.validating, 20, make)
    assert_same_bits(runs)
    assert_equal_runs(runs[0], jobs.validating(20), rtol=1e-12)


@pytest.mark.parametrize("of", ["module", "parameters"])
def test_uniform_iterate_of_a_sharded_model(cluster, of):
    assert len(set(cluster.run(2, jobs.uniform_iterate, 12, of))) == 1


def test_statistics_of_all_processes_are_not_recomputed_by_a_save(cluster):
    cluster.run(2, jobs.follow_joined_statistics)
