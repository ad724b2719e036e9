"""One rank of a DDP run; started twice by `test_two_ranks.py`."""

import builtins
import os
import runpy
import sys
import warnings
from pathlib import Path

import torch
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from trainer_cases import ROWS


def huggingface(folder, accumulate):
    from huggingface_cases import fit

    run = fit(folder, batches=16, epochs=1, dropout=0.0, accumulate=accumulate, ddp_backend="gloo")
    assert isinstance(run.trainer.model_wrapped, DistributedDataParallel)
    return run, {}


def accelerate(folder, accumulate):
    from accelerate_cases import fit

    run = fit(folder, batches=16, epochs=1, dropout=0.0, accumulate=accumulate)
    assert isinstance(run.model, DistributedDataParallel)
    return run, {}


def lightning(folder, accumulate, manual=False):
    from lightning.pytorch.strategies import DDPStrategy
    from lightning_cases import Manual, Module, loader, run
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    from stormplus import same_sample

    class CountsReductions(Module):
        reductions = 0

        def on_train_start(self):
            def reduce(state, bucket):
                self.reductions += 1
                return default_hooks.allreduce_hook(None, bucket)

            self.trainer.strategy.model.register_comm_hook(None, reduce)

    def step(self, opt, closure):
        opt.step(same_sample(opt.optimizer, self)(closure))

    module = Manual(step, dropout=0.0) if manual else CountsReductions(dropout=0.0)
    dataset = loader(8).dataset
    share = DistributedSampler(dataset, 2, int(os.environ["LOCAL_RANK"]), shuffle=False)
    done, _ = run(
        module, DataLoader(dataset, batch_size=ROWS // 2, sampler=share),
        strategy=DDPStrategy(process_group_backend="gloo"), devices=2,
        use_distributed_sampler=False, accumulate_grad_batches=accumulate,
    )  # fmt: skip
    return done, {"reductions": getattr(module, "reductions", None)}


def manual(folder, accumulate):
    return lightning(folder, accumulate, manual=True)


def resume(folder, _):
    """Where the random streams of this rank stand after resuming, when training starts."""
    from lightning.pytorch import Callback
    from lightning.pytorch.strategies import DDPStrategy
    from lightning_cases import SAFELY, Module, Recorder, loader, trainer

    from stormplus.integrations.lightning import StormPlusCallback

    streams = []

    class Looks(Callback):
        def on_train_start(self, *_):
            streams.append(torch.get_rng_state())

    recorder = Recorder()
    fit = trainer(
        StormPlusCallback(), recorder, Looks(), epochs=2, devices=2,
        strategy=DDPStrategy(process_group_backend="gloo"),
    )  # fmt: skip
    module = Module(seeded=False)
    torch.manual_seed(100 + int(os.environ["LOCAL_RANK"]))
    fit.fit(module, loader(8), ckpt_path=str(folder / "alone.ckpt"), **SAFELY)
    return recorder.run, {"streams": streams[0], "steps": fit.global_step}


def main(folder, kind, accumulate):
    warnings.simplefilter("error")
    for line in runpy.run_path(str(Path(__file__).parents[1] / "conftest.py"))["filters"]():
        action, message, category, module = [*line.split(":"), ""][:4]
        warnings.filterwarnings(action, message, getattr(builtins, category), module)
    warnings.filterwarnings("ignore", ".*does not have many workers")
    warnings.filterwarnings("ignore", ".*isinstance.treespec, LeafSpec")
    warnings.filterwarnings("ignore", ".*sync_dist=True")
    torch.set_num_threads(1)
    jobs = (huggingface, accelerate, lightning, manual, resume)
    run, more = {job.__name__: job for job in jobs}[kind](folder, accumulate)
    answer = {
        "states": run.states,
        "evaluations": run.net.evaluations,
        "diagnostics": run.opt.diagnostics(),
    }
    torch.save(answer | more, folder / f"rank{os.environ['RANK']}.pt")
    if dist.is_initialized():
        dist.barrier()  # a process that leaves while gloo still works can crash on its way out
        dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
