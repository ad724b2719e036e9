"""One rank of a DDP run under Lightning; started twice by `test_lightning_ddp.py`."""

import os
import sys
import warnings
from pathlib import Path

import torch
from lightning.pytorch import Callback
from lightning.pytorch.strategies import DDPStrategy
from lightning_cases import Manual, Module, loader, run, trainer
from torch.utils.data import DataLoader, DistributedSampler
from trainer_cases import ROWS

from stormplus import same_sample
from stormplus.integrations.lightning import StormPlusCallback


class CountsReductions(Module):
    def on_train_start(self):
        def reduce(state, bucket):
            self.reductions += 1
            return default_hooks.allreduce_hook(None, bucket)

        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        self.reductions = 0
        self.trainer.strategy.model.register_comm_hook(None, reduce)


def manual(self, opt, closure):
    opt.step(same_sample(opt.optimizer, self)(closure))


def resumed_streams(folder, batches):
    """Where the random streams of this rank stand after resuming, when training starts."""
    streams = []

    class Looks(Callback):
        def on_train_start(self, *_):
            streams.append(torch.get_rng_state())

    rank = int(os.environ["LOCAL_RANK"])
    fit = trainer(
        StormPlusCallback(), Looks(), epochs=2, devices=2,
        strategy=DDPStrategy(process_group_backend="gloo"),
    )  # fmt: skip
    module = Module(seeded=False)
    torch.manual_seed(100 + rank)
    fit.fit(module, loader(batches), ckpt_path=str(Path(folder) / "alone.ckpt"), weights_only=True)
    answer = {"streams": streams[0], "global_step": fit.global_step}
    torch.save(answer, Path(folder) / f"rank{fit.global_rank}.pt")


def main(folder, mode, batches, accumulate):
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", ".*does not have many workers")
    warnings.filterwarnings("ignore", ".*isinstance.treespec, LeafSpec")
    warnings.filterwarnings("ignore", ".*sync_dist=True")
    torch.set_num_threads(1)
    if mode == "resume":
        return resumed_streams(folder, batches)
    module = CountsReductions(dropout=0.0) if mode == "auto" else Manual(manual, dropout=0.0)
    dataset = loader(batches).dataset
    share = DistributedSampler(dataset, 2, int(os.environ["LOCAL_RANK"]), shuffle=False)
    states, fit = run(
        module, DataLoader(dataset, batch_size=ROWS // 2, sampler=share),
        strategy=DDPStrategy(process_group_backend="gloo"), devices=2,
        use_distributed_sampler=False,
        **({"accumulate_grad_batches": accumulate} if mode == "auto" else {}),
    )  # fmt: skip
    answer = {
        "states": states,
        "evaluations": module.evaluations,
        "global_step": fit.global_step,
        "reductions": getattr(module, "reductions", None),
        "diagnostics": fit.optimizers[0].diagnostics(),
    }
    torch.save(answer, Path(folder) / f"rank{fit.global_rank}.pt")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
