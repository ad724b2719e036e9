"""One rank of a DDP run; started twice by `test_huggingface_ddp.py`."""

import sys
import warnings
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import distributed as dist
from torch.utils.data import DataLoader, TensorDataset
from trainer_cases import ROWS, data, loss_of, network, snapshot

from stormplus import StormPlus


def with_trainer(folder, batches, accumulate):
    from huggingface_cases import run

    states, trainer, model = run(
        folder, batches, dropout=0.0, gradient_accumulation_steps=accumulate, ddp_backend="gloo"
    )
    assert isinstance(trainer.model_wrapped, torch.nn.parallel.DistributedDataParallel)
    return states, model.evaluations, trainer.state.global_step


def with_accelerate(_, batches, accumulate):
    from accelerate import Accelerator

    from stormplus.integrations.accelerate import prepare

    accelerator = Accelerator(cpu=True)
    model = network(dropout=0.0)
    opt = StormPlus(model.parameters())
    loader = DataLoader(TensorDataset(*data(batches)), batch_size=ROWS)
    model, opt, loader = prepare(accelerator, model, opt, loader)
    assert isinstance(model, torch.nn.parallel.DistributedDataParallel)
    states, window, evaluations = [], [], 0
    for batch in loader:
        window.append(batch)
        if len(window) < accumulate:
            continue

        def closure():
            nonlocal evaluations
            opt.zero_grad()
            for i, (x, y) in enumerate(window):
                evaluations += 1
                with nullcontext() if i == accumulate - 1 else accelerator.no_sync(model):
                    loss = loss_of(model, x, y) / accumulate
                    accelerator.backward(loss)
            return loss

        opt.step(closure)
        states.append(snapshot(model.module))
        window = []
    return states, evaluations, len(states)


def main(folder, kind, batches, accumulate):
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    run = {"trainer": with_trainer, "accelerate": with_accelerate}[kind]
    states, evaluations, steps = run(folder, batches, accumulate)
    answer = {"states": states, "evaluations": evaluations, "steps": steps}
    torch.save(answer, Path(folder) / f"rank{dist.get_rank()}.pt")
    dist.barrier()  # a process that leaves while gloo still works can crash on its way out
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
