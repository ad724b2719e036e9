"""Lightning: one callback for `Untuned`, and one for paired optimizers.

Lightning passes a closure in fp32 and bf16 only, and when gradients are accumulated the closure
evaluates only the last micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial, wraps
from typing import Any

from stormplus.install import required
from stormplus.integrations.replay import CLIPPING, Replay
from stormplus.integrations.untuned import AverageCallback
from stormplus.torch import PairedOptimizer
from stormplus.versions import order_is_drawn_again

with required("lightning"):
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.callbacks import StochasticWeightAveraging
    from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
    from lightning.pytorch.trainer import call
    from lightning.pytorch.utilities.model_helpers import is_overridden
    from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
    from lightning_utilities.core.rank_zero import rank_zero_warn
    from torchmetrics import Metric

CHECKPOINT_KEY = "stormplus"


class UntunedCallback(AverageCallback, Callback):
    """Validates, saves and leaves the average of `Untuned`, and trains its iterate.

    A run that is resumed from a checkpoint continues from the iterate, exactly. For
    `recalibrate_batches` see `Average`.
    """

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._begin(trainer.optimizers, pl_module, "return Untuned from configure_optimizers")
        if _has_swa(trainer):
            raise ValueError("leave StochasticWeightAveraging out: Untuned averages by itself")
        if self._average.recalibrate_batches and not pl_module.automatic_optimization:
            raise ValueError(
                "recalibrate_batches calls training_step again, which steps with manual "
                "optimization: leave it out, and call stormplus.recalibrate in on_validation_start"
            )
        save = trainer.save_checkpoint

        def save_checkpoint(*args: Any, **kwargs: Any) -> None:
            with self._average.swapped_in():
                save(*args, **kwargs)

        self._hooks.enter_context(_replaced(trainer, "save_checkpoint", save_checkpoint))

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._average.swap_out()
        if not self._average.recalibrate_batches:
            return
        takes_index = is_param_in_hook_signature(pl_module.training_step, "batch_idx", min_args=2)
        args = (batch, batch_idx) if takes_index else (batch,)

        def evaluate() -> None:
            with _without_logging(pl_module), trainer.precision_plugin.train_step_context():
                pl_module.training_step(*args)

        self._average.remember(evaluate)

    def on_validation_start(self, *_: Any) -> None:
        self._average.swap_in()

    def on_train_end(self, *_: Any) -> None:
        self._end()

    def on_exception(self, *_: Any) -> None:
        for opt in self._average.optimizers:
            opt.eval()  # without new statistics: other ranks may not get here
        self._hooks.close()


class StormPlusCallback(Callback):
    """Makes `StormPlus`, `SimplifiedStormPlus` and `Storm` exact under Lightning's trainer.

    With automatic optimization the two evaluations of a step see the same micro-batches and
    random numbers, running statistics move once, and `self.log` and torchmetrics see the first
    evaluation only. With manual optimization call
    `opt.step(same_sample(opt.optimizer, self)(closure))`.

    A checkpoint also holds torch's random state, so that a run in one process resumes exactly.

    Args:
        log: Log `opt.diagnostics()` under "stormplus/", every `log_every_n_steps` steps.
    """

    def __init__(self, *, log: bool = True) -> None:
        self._log_diagnostics = log
        self._installed = ExitStack()
        self._replay: Replay | None = None
        self._resumed: dict[str, Any] | None = None

    def setup(self, *_: Any, **__: Any) -> None:
        self._resumed = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        _check(trainer, pl_module)
        if pl_module.automatic_optimization:
            self._install(trainer, pl_module, _paired_optimizers(trainer)[0])

    def _install(self, trainer: Trainer, pl_module: LightningModule, opt: PairedOptimizer) -> None:
        plugin = trainer.precision_plugin
        scaler = getattr(plugin, "scaler", None)

        def process() -> None:
            if scaler is not None:
                scaler.unscale_(opt)
            with _without_logging(pl_module):
                plugin._after_closure(pl_module, opt)  # hooks and clipping, as the first time

        replay = self._replay = Replay(opt, pl_module, process, scaler)
        self._installed.callback(replay.remove)
        user_training_step, user_optimizer_step = pl_module.training_step, pl_module.optimizer_step

        def training_step(*args: Any, **kwargs: Any) -> Any:
            if not replay.running:
                replay.record(partial(_evaluate_again, trainer, opt, args, kwargs))
            return user_training_step(*args, **kwargs)

        def optimizer_step(epoch: Any, batch_idx: Any, optimizer: Any, closure: Any) -> None:
            def first() -> Any:
                loss = closure()
                if loss is None and all(p.grad is None for p in opt.parameters()):
                    raise _SampleSkipped
                return loss

            try:
                user_optimizer_step(epoch, batch_idx, optimizer, first)
            except _SampleSkipped:
                pass
            finally:
                replay.finish()

        self._installed.enter_context(_replaced(pl_module, "training_step", training_step))
        self._installed.enter_context(_replaced(pl_module, "optimizer_step", optimizer_step))

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self._resumed is not None and self._resumed["mid_epoch"]:
            self._rewind(trainer)  # the loader's new iterator has drawn random numbers
        self._resumed = None
        if self._replay is not None and batch_idx % trainer.accumulate_grad_batches == 0:
            self._replay.finish()  # left by an epoch that was ended early

    def on_train_batch_end(self, trainer: Any, pl_module: LightningModule, *_: Any) -> None:
        every = trainer.log_every_n_steps
        if not self._log_diagnostics or not every or trainer.global_step % every:
            return
        optimizers = _paired_optimizers(trainer)
        for i, opt in enumerate(optimizers):
            prefix = "stormplus/" if len(optimizers) == 1 else f"stormplus/{i}/"
            pl_module.log_dict({prefix + name: v for name, v in opt.diagnostics().items()})

    def on_train_end(self, *_: Any) -> None:
        self._installed.close()
        self._replay = None

    on_exception = on_train_end

    # -- random numbers in checkpoints: in one process, because a checkpoint has one copy ---------

    def on_save_checkpoint(self, trainer: Trainer, _: Any, checkpoint: dict[str, Any]) -> None:
        if trainer.world_size == 1 and trainer.optimizers:  # none after `trainer.validate`
            checkpoint[CHECKPOINT_KEY] = {
                "rng": _paired_optimizers(trainer)[0].random_streams().states,
                "mid_epoch": not trainer.is_last_batch,
            }

    def on_load_checkpoint(self, trainer: Trainer, _: Any, checkpoint: dict[str, Any]) -> None:
        if trainer.world_size == 1:
            self._resumed = checkpoint.get(CHECKPOINT_KEY)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._rewind(trainer)  # before the loader shuffles the next epoch

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if order_is_drawn_again(trainer):
            self._rewind(trainer)

    def _rewind(self, trainer: Trainer) -> None:
        if self._resumed is None:
            return
        streams = _paired_optimizers(trainer)[0].random_streams()
        saved = [state.cpu() for state in self._resumed["rng"]]
        if [state.shape for state in saved] != [state.shape for state in streams.states]:
            rank_zero_warn(
                "the checkpoint was made with other devices or generators: the run continues with "
                "other random numbers"
            )
            self._resumed = None
            return
        streams.states = saved
        streams.restore()


class _SampleSkipped(Exception):
    """Raised when `training_step` returned None: the user skips this batch."""


def _evaluate_again(trainer: Any, opt: PairedOptimizer, args: Any, kwargs: Any, last: bool) -> None:
    """Evaluate a micro-batch as Lightning's loop does; DDP synchronizes at the last one."""
    strategy = trainer.strategy
    waits = isinstance(strategy, DDPStrategy) and not last
    with (
        strategy.block_backward_sync() if waits else nullcontext(),
        _without_logging(trainer.lightning_module),
    ):
        output = call._call_strategy_hook(trainer, "training_step", *args, **kwargs)
        loss = output.get("loss") if isinstance(output, Mapping) else output
        if loss is not None:
            scaled = loss / trainer.accumulate_grad_batches
            call._call_strategy_hook(trainer, "backward", scaled, opt)


@contextmanager
def _without_logging(pl_module: LightningModule) -> Iterator[None]:
    """Let `self.log` do nothing, and restore the module's metrics afterwards."""
    metrics = [module for module in pl_module.modules() if isinstance(module, Metric)]
    saved = [(metric, metric._update_count, metric._copy_state_dict()) for metric in metrics]
    with _replaced(pl_module, "log", lambda *args, **kwargs: None):
        yield
    for metric, count, states in saved:
        metric._update_count, metric._computed = count, None
        for name, value in states.items():
            setattr(metric, name, value)


@contextmanager
def _replaced(owner: object, name: str, value: Any) -> Iterator[None]:
    """Replace an attribute of this one object inside the context."""
    had_one, before = name in vars(owner), vars(owner).get(name)
    setattr(owner, name, wraps(getattr(owner, name))(value) if callable(value) else value)
    try:
        yield
    finally:
        if had_one:
            setattr(owner, name, before)
        else:
            delattr(owner, name)


def _paired_optimizers(trainer: Trainer) -> list[PairedOptimizer]:
    paired: list[Any] = [opt for opt in trainer.optimizers if isinstance(opt, PairedOptimizer)]
    if not paired:
        names = ", ".join(type(opt).__name__ for opt in trainer.optimizers) or "nothing"
        raise TypeError(
            f"StormPlusCallback got {names}: return StormPlus from configure_optimizers. Untuned "
            "needs UntunedCallback"
        )
    return paired


def _has_swa(trainer: Trainer) -> bool:
    return any(isinstance(other, StochasticWeightAveraging) for other in trainer.callbacks)


def _check(trainer: Any, pl_module: LightningModule) -> None:
    """Raise if the two gradients of a sample would silently be wrong."""
    if not isinstance(trainer, Trainer):
        raise TypeError("import Trainer from lightning.pytorch, not from pytorch_lightning")
    if not isinstance(trainer.strategy, (SingleDeviceStrategy, DDPStrategy)):
        raise TypeError(
            f"{type(trainer.strategy).__name__} has not been verified: use one device or "
            'strategy="ddp", or FSDP2 in your own loop (docs/many-machines.md)'
        )
    if _has_swa(trainer):
        raise ValueError("leave StochasticWeightAveraging out: average with EMAWeightAveraging")
    if not pl_module.automatic_optimization:
        if getattr(trainer.precision_plugin, "scaler", None) is not None:
            raise ValueError("16-mixed drops the closure of manual optimization: use bf16-mixed")
    elif is_param_in_hook_signature(pl_module.training_step, "dataloader_iter", explicit=True):
        raise TypeError(
            "training_step(self, dataloader_iter) draws another batch each time it is called: take "
            "(self, batch, batch_idx), or use manual optimization with one draw before the closure"
        )
    if trainer.gradient_clip_val or is_overridden("configure_gradient_clipping", pl_module):
        rank_zero_warn(f"gradient clipping {CLIPPING}: Trainer(gradient_clip_val=None)")
