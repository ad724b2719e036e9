"""FSDP2 and tensor parallelism: norms are global, the run is that of one process."""

import fsdp_jobs
import pytest
import torch
from small_models import EVEN, WIDTHS, assert_equal_runs, assert_same_bits, joined_run

long = pytest.mark.long

STEPS = 40

# With lr = 1 the runs would magnify rounding.
FIRST = {"unit": "first", "lr": 0.1}
UNTUNED = {"method": "untuned"}


def check(runs, options, **more):
    """As derived in test_ddp.py.

    That the squared norm is now a sum over shards adds another rounding of float64 to the sums, in
    float32 runs too. The stochastic rounding of a bfloat16 state differs from shard to shard.
    """
    rtol, calls = (1e-10 if options.get("dtype") is None else 1e-3), 2 * STEPS - 1
    if "untuned" in options.values():
        rtol, calls = (0.05 if "state_dtype" in options else 1e-12), STEPS
    assert_same_bits(runs)
    assert_equal_runs(runs[0], joined_run(STEPS, **options, **more), rtol)
    assert [run["calls"] for run in runs] == [calls] * len(runs)


PAIRED = [
    {},
    FIRST,
    {"foreach": True},
    {"foreach": False},
    {"weight_decay": 0.01, "check_finite": False},
    {"weight_decay": 0.01, "decoupled_weight_decay": True},
    {"method": "simplified"},
    {"method": "storm"},
    {"dtype": torch.float32},
    FIRST | {"dtype": torch.float32, "foreach": True},
]
CASES = [
    *PAIRED,
    UNTUNED,
    UNTUNED | {"weight_decay": 0.1},
    UNTUNED | {"state_dtype": torch.bfloat16},
]


@long
@pytest.mark.parametrize("options", [*PAIRED, FIRST | {"weight_decay": 0.01}], ids=str)
@pytest.mark.parametrize("widths", [WIDTHS, EVEN], ids=str)
def test_runs_do_not_magnify_rounding(options, widths):
    options = {k: v for k, v in options.items() if k != "dtype"}
    runs = [joined_run(60, widths=widths, nudge=by, **options) for by in (0.0, 1e-10)]
    for key in ("x", "d"):
        for a, b in zip(runs[0][key], runs[1][key]):
            assert float((a - b).abs().max() / b.abs().max()) < 100 * 1e-10


@pytest.mark.parametrize(
    ("size", "options"),
    [
        pytest.param(size, options, marks=() if size == 2 and options in ({}, UNTUNED) else long)
        for size in (2, 4)
        for options in CASES
    ],
    ids=str,
)
def test_equals_the_unsharded_run(cluster, size, options):
    runs = cluster.run(size, fsdp_jobs.parity, STEPS, **options)
    check(runs, options)
    # The last layer has one row: all but one rank hold none of it, and no rank hangs.
    assert [run["shards"][-1] for run in runs] == [1] + [0] * (size - 1)


@long
def test_move_and_estimate(cluster):
    check(cluster.run(4, fsdp_jobs.parity, STEPS, halves=True), {})


@long
@pytest.mark.parametrize("options", [{}, FIRST], ids=str)
@pytest.mark.parametrize(("mesh", "last"), [((2, 2), [1, 0, 1, 0]), ((4, 1), [1] * 4)], ids=str)
def test_hybrid_sharding(cluster, mesh, last, options):
    runs = cluster.run(4, fsdp_jobs.parity, STEPS, mesh=mesh, **options)
    check(runs, options)
    assert [run["shards"][-1] for run in runs] == last


@long
@pytest.mark.parametrize("options", [{}, FIRST], ids=str)
@pytest.mark.parametrize("size", [2, 4])
def test_sharded_and_plain_parameters_together(cluster, size, options):
    check(cluster.run(size, fsdp_jobs.mixed, STEPS, **options), options)


@pytest.mark.parametrize(
    ("options", "first_half", "second_half"),
    [
        ({"check_finite": False}, [], [2]),
        ({"check_finite": True}, [1], [2]),
        ({"check_finite": False, "mesh": (2, 2)}, [], [2]),
        ({"check_finite": True, "mesh": (2, 2)}, [1, 1], [2, 2]),
        ({"check_finite": True, "mesh": (4, 1)}, [1], [2]),  # four replicas, each in one piece
    ],
    ids=str,
)
@long
def test_one_small_all_reduce_per_half_and_process_group(cluster, options, first_half, second_half):
    # A flag before the move; |g|^2 and |d|^2 after it. Replicas take part to agree on a NaN.
    first, second = ([("allreduce_", n) for n in half] for half in (first_half, second_half))
    for seen in cluster.run(4, fsdp_jobs.counted, 4, **options):
        assert seen == ["step", *second, *(["step", *first, *second] * 3)]


@pytest.mark.parametrize(
    ("size", "value", "options"),
    [
        pytest.param(2, "nan", {}, id="nan"),
        pytest.param(2, "inf", {}, id="inf"),
        pytest.param(4, "nan", {"mesh": (2, 2)}, id="2 replicas", marks=long),
        pytest.param(4, "nan", {"mesh": (4, 1)}, id="4 replicas", marks=long),
        pytest.param(4, "nan", {"foreach": False}, id="foreach=False", marks=long),
        pytest.param(4, "nan", {"foreach": True}, id="foreach=True", marks=long),
    ],
)
@pytest.mark.parametrize("bad_call", [4, 5], ids=["first evaluation", "second evaluation"])
def test_a_bad_shard_on_one_rank_stops_all_ranks_together(cluster, bad_call, size, value, options):
    runs = cluster.run(size, fsdp_jobs.one_bad_shard, 8, bad_call, 1, float(value), **options)
    assert_same_bits(runs)
    # Call 4 opens the third step, which then moves nothing; call 5 closes it.
    retry = {4: "nothing has moved", 5: "the step is pending"}
    for rank, run in enumerate(runs):
        (error,) = run["errors"]
        assert ("parameter 0 of group 0" if rank == 1 else "on another process") in error
        assert retry[bad_call] in error
        assert run["pending"] == [bad_call == 5]
        assert run["unmoved"] == (bad_call == 4)
        assert run["calls"] == 14  # as in test_ddp.py
        assert run["numbers"]["step"] == 7
        assert all(torch.isfinite(p).all() for p in run["x"])


@long
@pytest.mark.parametrize("options", [{}, FIRST, UNTUNED], ids=str)
@pytest.mark.parametrize(("before", "after"), [(2, 4), (4, 2)])
def test_a_checkpoint_goes_on_over_another_number_of_processes(
    cluster, tmp_path, before, after, options
):
    folder = str(tmp_path / "checkpoint")
    saved = cluster.run(before, fsdp_jobs.save, 20, folder, **options)
    resumed = cluster.run(after, fsdp_jobs.load, 20, folder, **options)
    for loaded, _ in resumed:
        assert_same_bits([saved[0], loaded])
        assert loaded["schedule"] == saved[0]["schedule"]
    finals = [final for _, final in resumed]
    assert_same_bits(finals)
    expected = joined_run(40, schedule=fsdp_jobs.cosine, **options)
    assert_equal_runs(finals[0], expected, 1e-12 if options == UNTUNED else 1e-10)


@long
@pytest.mark.parametrize(
    "options", [{}, UNTUNED, UNTUNED | {"averaged": True}], ids=["storm+", "Untuned", "average"]
)
def test_a_checkpoint_goes_on_bit_by_bit_over_as_many_processes(cluster, tmp_path, options):
    folder = str(tmp_path / "checkpoint")
    cluster.run(2, fsdp_jobs.save, 15, folder, **options)
    resumed = [final for _, final in cluster.run(2, fsdp_jobs.load, 15, folder, **options)]
    own = {k: v for k, v in options.items() if k != "averaged"}
    assert_same_bits([*resumed, *cluster.run(2, fsdp_jobs.uninterrupted, **own)])


@pytest.mark.parametrize("options", [{}, FIRST, {"foreach": True}], ids=str)
@pytest.mark.parametrize(
    ("mesh", "first_layer"),
    [
        ((2,), "(Shard(dim=0),)"),
        ((2, 2), "(_StridedShard(dim=0, sf=2), Shard(dim=0))"),
    ],
    ids=["tensor parallel", "FSDP2 over tensor parallel"],
)
@long
def test_tensor_parallel_layers(cluster, mesh, first_layer, options):
    size = 2 ** len(mesh)
    runs = cluster.run(size, fsdp_jobs.tensor_parallel, STEPS, mesh, **options)
    assert runs[0]["placements"] == first_layer
    # One for each process group, twice with check_finite, once on the first step.
    assert runs[0]["sent"] == len(mesh) * (2 * STEPS - 1)
    check(runs, options, widths=EVEN)


@long
@pytest.mark.parametrize("kind", ["fsdp", "ddp"])
def test_a_validation_in_between_sees_the_average_and_leaves_the_iterate(cluster, kind):
    runs = cluster.run(2, fsdp_jobs.validating, 20, kind)
    assert_same_bits(runs)
    assert_equal_runs(runs[0], fsdp_jobs.validating(20, "alone"), rtol=1e-12)


@long
@pytest.mark.parametrize("of", ["module", "parameters"])
def test_uniform_iterate_of_a_sharded_model(cluster, of):
    runs = cluster.run(2, fsdp_jobs.uniform_iterate, 12, of)
    for run in runs:
        assert run["at"] == runs[0]["at"] < 12  # not the last, which would prove nothing
        assert all(torch.equal(a, b) for a, b in zip(run["x"], run["expected"], strict=True))


@long
def test_statistics_that_join_processes_are_not_taken_anew_behind_a_save(cluster):
    for errors in cluster.run(2, fsdp_jobs.follow_joined_statistics):
        (error,) = errors
        assert "SyncBatchNorm" in error
