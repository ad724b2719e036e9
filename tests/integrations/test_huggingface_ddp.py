"""Two processes under the trainer, or under Accelerate, make the step of one process."""

from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from trainer_cases import ROWS, assert_equal_ranks, joined_run, launch_two_ranks

JOB = Path(__file__).parent / "huggingface_ddp_job.py"
BATCHES = 16


def dealt(pair):
    """As Accelerate deals them: batches to the ranks in turn."""
    first = torch.arange(2 * pair * ROWS, (2 * pair + 1) * ROWS)
    return first, first + ROWS


@pytest.mark.long
@pytest.mark.parametrize("kind", ["trainer", "accelerate"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_equals_one_process_on_both_ranks_rows(tmp_path, kind, accumulate):
    ranks = launch_two_ranks(JOB, tmp_path, kind, BATCHES, accumulate)
    steps = BATCHES // 2 // accumulate
    parts = [dealt(pair) for pair in range(BATCHES // 2)]
    expected, _ = joined_run([parts[k * accumulate : (k + 1) * accumulate] for k in range(steps)])
    assert_equal_ranks(ranks, expected)
    for rank in ranks:
        assert rank["evaluations"] == accumulate * (2 * steps - 1)
        assert rank["steps"] == steps
