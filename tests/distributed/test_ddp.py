"""DDP: every rank makes the step that one process makes on the joined batch."""

import ddp_jobs
import fsdp_jobs
import pytest
import torch
from small_models import assert_equal_runs, assert_same_bits, joined_run

long = pytest.mark.long

STEPS = 60

# The mean over the ranks of the means over their rows is the mean over all rows, so the two
# runs differ by rounding alone. In float64 (u = 1.1e-16) a gradient is a sum of 8 rows and
# some 30 products: an evaluation adds a relative error of about 40 u = 4e-15, a step two of
# them, 60 steps 5e-13. A run magnifies what enters at its start less than 100 times (tested
# in test_fsdp.py; 5 to 30 were measured), later errors less: 5e-11, and 1e-10 is asked for. In
# float32 (u = 6e-8) the same bound is 3e-2, from worst cases that never meet; 1e-3 is asked for.
RTOL = {torch.float64: 1e-10, torch.float32: 1e-3}
FIRST = {"unit": "first", "weight_decay": 0.01, "lr": 0.1}
UNTUNED = {"method": "untuned"}


@pytest.mark.parametrize(
    ("size", "options"),
    [
        (2, {}),
        pytest.param(4, {}, marks=long),
        pytest.param(2, {"dtype": torch.float32}, marks=long),
        pytest.param(4, {"dtype": torch.float32}, marks=long),
        pytest.param(2, {"halves": True}, marks=long),
        pytest.param(2, {"method": "simplified"}, marks=long),
        pytest.param(2, {"method": "storm"}, marks=long),
        pytest.param(2, FIRST, marks=long),
        pytest.param(4, {"ddp": {"static_graph": True}}, marks=long),
        pytest.param(2, {"ddp": {"gradient_as_bucket_view": True}}, marks=long),
        pytest.param(2, {"ddp": {"static_graph": True}, "halves": True}, marks=long),
        pytest.param(2, UNTUNED, marks=long),
        pytest.param(2, UNTUNED | {"weight_decay": 0.1}, marks=long),
        pytest.param(2, UNTUNED | {"state_dtype": torch.bfloat16}, marks=long),
    ],
    ids=str,
)
def test_equals_one_process_on_the_joined_batch(cluster, size, options):
    runs = cluster.run(size, ddp_jobs.parity, STEPS, **options)
    own = {name: v for name, v in options.items() if name not in ("halves", "ddp")}
    assert_same_bits(runs)
    rtol = RTOL[options.get("dtype", torch.float64)]
    if "untuned" in options.values():
        rtol = 0.05 if "state_dtype" in options else 1e-12
    assert_equal_runs(runs[0], joined_run(STEPS, **own), rtol)
    calls = STEPS if "untuned" in options.values() else 2 * STEPS - 1
    assert [run["calls"] for run in runs] == [calls] * size


@long
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("size", [2, 4])
def test_accumulation_sends_the_gradients_once_an_evaluation(cluster, size, set_to_none):
    runs = cluster.run(size, ddp_jobs.accumulation, 30, micro=2, set_to_none=set_to_none)
    assert_same_bits(runs)
    assert_equal_runs(runs[0], joined_run(30), RTOL[torch.float64])
    # One bucket holds all gradients; without no_sync it would be sent for every micro-batch.
    assert runs[0]["reduced"] == runs[0]["calls"] == 59


@long
@pytest.mark.parametrize("size", [2, 4])
def test_unused_parameters(cluster, size):
    runs = cluster.run(size, ddp_jobs.unused_parameters, 30)
    expected = ddp_jobs.unused_parameters(30, size)
    assert_same_bits(runs)
    assert_equal_runs(runs[0], expected, RTOL[torch.float64])
    # A branch that no rank took has no gradient, on any rank, as in one process.
    assert [run["missing"] for run in runs] == [expected["missing"]] * size
    assert expected["missing"] > 0


def check_statistics(runs):
    for name, momentum in (("fixed", 0.3), ("cumulative", None)):
        like = runs[0]["buffers"][0][name]["running_mean"]
        before = {"running_mean": torch.zeros_like(like), "running_var": torch.ones_like(like)}
        for step in range(len(runs[0]["seen"])):
            factor = 1 / (step + 1) if momentum is None else momentum
            for run in runs:
                # DDP gives every rank the buffers of rank 0 before each forward pass; each
                # then adds its own sample, once, as the second evaluation saw it.
                after = run["buffers"][step][name]
                for key, seen in run["seen"][step][name].items():
                    expected = (1 - factor) * before[key] + factor * seen  # as documented
                    torch.testing.assert_close(after[key], expected, rtol=1e-12, atol=1e-14)
                assert int(after["num_batches_tracked"]) == step + 1
            before = runs[0]["buffers"][step][name]


@long
@pytest.mark.parametrize("halves", [False, True])
@pytest.mark.parametrize("size", [2, 4])
def test_batchnorm_and_dropout_for_200_steps(cluster, size, halves):
    runs = cluster.run(size, ddp_jobs.normalised, 200, halves=halves)
    assert_same_bits(runs)
    check_statistics(runs)
    assert [run["calls"] for run in runs] == [399] * size
    assert len({run["chosen"] for run in runs}) == 1  # UniformIterate
    for run in runs:  # both evaluations of a sample drop the same units ...
        masks = run["masks"]
        assert all(torch.equal(a, b) for a, b in zip(masks[1::2], masks[2::2], strict=True))
        assert not torch.equal(masks[1], masks[3])
    # ... and every rank drops its own.
    assert not torch.equal(runs[0]["masks"][1], runs[1]["masks"][1])


# Calls of pairs are 1, 2-3, 4-5, ...: call 4 opens the third step, call 5 closes it. A lost first
# evaluation costs its sample: 1 + 2 + 1 + 5 x 2. After a lost second one the next step restarts
# the estimator with one evaluation: 1 + 2 + 2 + 1 + 4 x 2. Either way 14 for 8 samples.
@pytest.mark.parametrize(
    ("make_model", "bad_call", "options", "calls"),
    [
        pytest.param(ddp_jobs.ddp_model, 4, {}, 14, id="first evaluation"),
        pytest.param(ddp_jobs.ddp_model, 5, {}, 14, id="second evaluation"),
        pytest.param(ddp_jobs.ddp_model, 5, UNTUNED, 8, id="Untuned", marks=long),
        pytest.param(fsdp_jobs.sharded, 5, UNTUNED, 8, id="Untuned, FSDP2", marks=long),
    ],
)
def test_a_bad_sample_on_one_rank_stops_all_ranks_together(
    cluster, make_model, bad_call, options, calls
):
    runs = cluster.run(2, ddp_jobs.one_bad_sample, make_model, 8, bad_call, **options)
    assert_same_bits(runs)
    for run in runs:
        assert len(run["errors"]) == 1
        assert run["calls"] == calls
        assert run["numbers"]["step"] == 7
        assert all(torch.isfinite(p).all() for p in run["x"])


@long
def test_a_bad_gradient_on_one_rank_after_the_average_stops_that_rank_alone(cluster):
    # The optimizer sends nothing under DDP, so nothing can tell the others: docs/many-machines.md.
    good, bad = cluster.run(2, ddp_jobs.one_bad_gradient_after_the_average, 4)
    assert bad["error"].startswith("FloatingPointError")
    assert not bad["moved"]
    assert bad["waited"] < 4
    assert good["error"].startswith("RuntimeError")  # its second evaluation has waited in vain
    assert good["moved"]
    assert good["pending"]
    assert good["waited"] >= 4
