"""Two processes under a trainer's DDP make the step of one process on both their rows."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from tests.support.pages import ROOT
from tests.support.trainer_cases import ROWS, data, fit, plain_run
from torch import distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]


def without_statistics(net):
    net.body[1] = nn.Identity()


SETTINGS = {"batches": 16, "epochs": 1, "dropout": 0.0, "setup": without_statistics}


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("name", ["huggingface", "accelerate", "lightning"])
def test_equals_one_process_on_both_ranks_rows(tmp_path, name, accumulate):
    pytest.importorskip({"huggingface": "transformers"}.get(name, name))
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    command = [*TORCHRUN, __file__, str(tmp_path), name, str(accumulate)]
    subprocess.run(command, env=env, check=True, timeout=300)
    (states, evaluations), (others, _) = (torch.load(tmp_path / f"rank{i}.pt") for i in range(2))

    plain = plain_run(accumulate=2 * accumulate, **SETTINGS)
    assert len(states) == len(others) == len(plain.states)
    assert evaluations == accumulate * (2 * len(states) - 1)
    for state, other, expected in zip(states, others, plain.states):
        for key, value in expected.items():  # to rounding: summed in another order
            torch.testing.assert_close(state[key], value, rtol=1e-12, atol=1e-12)
            assert torch.equal(state[key], other[key])


def one_rank(folder, name, accumulate):
    options = {"ddp_backend": "gloo"} if name == "huggingface" else {}
    if name == "lightning":
        from lightning.pytorch.strategies import DDPStrategy

        rows = TensorDataset(*data(16))
        share = DistributedSampler(rows, 2, int(os.environ["RANK"]), shuffle=False)
        options = {
            "devices": 2,
            "strategy": DDPStrategy(process_group_backend="gloo"),
            "use_distributed_sampler": False,
            "loader": DataLoader(rows, batch_size=ROWS, sampler=share),
        }
    run = fit(name, folder, accumulate=accumulate, **SETTINGS, **options)
    assert dist.get_world_size() == 2
    torch.save((run.states, run.net.evaluations), folder / f"rank{os.environ['RANK']}.pt")
    dist.barrier()
    time.sleep(0.2)  # torch 2.13 may hang if a thread of the group waits for the GIL: see the docs
    dist.destroy_process_group()


if __name__ == "__main__":  # started twice by the test
    one_rank(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
