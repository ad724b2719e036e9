"""Two processes under a trainer's DDP make the step of one process on both their rows."""

from pathlib import Path

import pytest
import torch
from trainer_cases import ROWS, assert_equal_ranks, joined_run, launch_two_ranks

JOB = Path(__file__).parent / "two_ranks_job.py"


def dealt(kind, k, j, accumulate):
    """The rows of both ranks in micro-batch j of sample k."""
    if kind == "huggingface":  # batches to the ranks in turn
        first = 2 * (k * accumulate + j)
        starts = first, first + 1
    elif kind == "accelerate":  # batches of `accumulate` micro-batches, in turn
        first = 2 * k * accumulate + j
        starts = first, first + accumulate
    else:  # DistributedSampler deals the rows of a batch
        rows = torch.arange(ROWS) + (k * accumulate + j) * ROWS
        return rows[0::2], rows[1::2]
    return tuple(torch.arange(ROWS) + start * ROWS for start in starts)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("kind", ["huggingface", "accelerate", "lightning", "manual"])
def test_equals_one_process_on_both_ranks_rows(tmp_path, kind, accumulate):
    pytest.importorskip({"huggingface": "transformers", "manual": "lightning"}.get(kind, kind))
    if kind == "manual" and accumulate > 1:
        pytest.skip("Lightning does not accumulate there")
    ranks = launch_two_ranks(JOB, tmp_path, kind, accumulate)
    steps = 8 // accumulate
    expected, opt = joined_run(
        [[dealt(kind, k, j, accumulate) for j in range(accumulate)] for k in range(steps)]
    )
    assert_equal_ranks(ranks, expected)
    for rank in ranks:
        assert rank["evaluations"] == accumulate * (2 * steps - 1)
        assert rank["diagnostics"]["gain"] == pytest.approx(opt.diagnostics()["gain"], rel=1e-12)
        if kind == "lightning":  # one bucket, sent once an evaluation, not for every micro-batch
            assert rank["reductions"] == 2 * steps - 1


def test_a_checkpoint_of_one_process_leaves_each_rank_its_own_random_numbers(tmp_path):
    pytest.importorskip("lightning")
    from lightning_cases import Module, loader, run

    _, alone = run(Module(), loader(8))
    alone.save_checkpoint(tmp_path / "alone.ckpt")
    assert "stormplus" in torch.load(tmp_path / "alone.ckpt", weights_only=True)
    ranks = launch_two_ranks(JOB, tmp_path, "resume", 1)
    assert not torch.equal(ranks[0]["streams"], ranks[1]["streams"])
    assert [rank["steps"] for rank in ranks] == [8 + 8 // 2] * 2
