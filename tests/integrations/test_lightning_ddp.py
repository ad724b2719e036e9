"""Two processes under Lightning's DDP make the step of one process on both their rows."""

from pathlib import Path

import pytest
import torch

pytest.importorskip("lightning")

from lightning_cases import Module, loader, run
from trainer_cases import ROWS, assert_equal_ranks, joined_run, launch_two_ranks

JOB = Path(__file__).parent / "lightning_ddp_job.py"
BATCHES = 8


def dealt(batch):
    """As DistributedSampler deals the rows of a batch."""
    rows = torch.arange(batch * ROWS, (batch + 1) * ROWS)
    return rows[0::2], rows[1::2]


@pytest.mark.long
@pytest.mark.parametrize(("mode", "accumulate"), [("auto", 1), ("auto", 2), ("manual", 1)])
def test_equals_one_process_on_both_ranks_rows(tmp_path, mode, accumulate):
    ranks = launch_two_ranks(JOB, tmp_path, mode, BATCHES, accumulate)
    steps = BATCHES // accumulate
    parts = [dealt(batch) for batch in range(BATCHES)]
    expected, opt = joined_run([parts[k * accumulate : (k + 1) * accumulate] for k in range(steps)])
    assert_equal_ranks(ranks, expected)
    for rank in ranks:
        assert rank["evaluations"] == accumulate * (2 * steps - 1)
        assert rank["global_step"] == steps
        assert rank["diagnostics"]["gain"] == pytest.approx(opt.diagnostics()["gain"], rel=1e-12)
        if mode == "auto":  # one bucket, sent once an evaluation and not for every micro-batch
            assert rank["reductions"] == 2 * steps - 1


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.*does not have many workers")
@pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec")
def test_a_checkpoint_of_one_process_leaves_each_rank_its_own_random_numbers(tmp_path):
    _, alone = run(Module(), loader(BATCHES))
    alone.save_checkpoint(tmp_path / "alone.ckpt")
    assert "stormplus" in torch.load(tmp_path / "alone.ckpt", weights_only=True)
    ranks = launch_two_ranks(JOB, tmp_path, "resume", BATCHES, 1)
    assert not torch.equal(ranks[0]["streams"], ranks[1]["streams"])
    assert [rank["global_step"] for rank in ranks] == [BATCHES + BATCHES // 2] * 2
