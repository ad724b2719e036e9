"""Lightning: one callback for `Untuned`, and one for paired optimizers.

    trainer = Trainer(callbacks=[UntunedCallback()])
    trainer = Trainer(callbacks=[StormPlusCallback()])

Lightning passes a closure in fp32 and bf16 only, and it evaluates only the last micro-batch when
gradients are accumulated. With `StormPlusCallback` both evaluations cover all micro-batches in
every precision. `UntunedCallback` lets Lightning validate and save the average.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial, wraps
from typing import Any

from stormplus.install import how_to
from stormplus.integrations.replay import CLIPPING, Replay
from stormplus.integrations.untuned import Average
from stormplus.torch import PairedOptimizer, Untuned
from stormplus.trainers import NO_FINDER
from stormplus.versions import order_is_drawn_again

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.callbacks import LearningRateFinder, StochasticWeightAveraging
    from lightning.pytorch.plugins.precision import MixedPrecision, Precision
    from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
    from lightning.pytorch.trainer import call
    from lightning.pytorch.utilities.model_helpers import is_overridden
    from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
    from lightning_utilities.core.rank_zero import rank_zero_warn
    from torchmetrics import Metric
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(f"this integration needs lightning: {how_to('lightning')}") from error

CHECKPOINT_KEY = "stormplus"


class UntunedCallback(Callback):
    """Validates, saves and leaves the average of `Untuned`, and trains its iterate.

    A run that is resumed from a checkpoint continues from the iterate, exactly.

    Args:
        recalibrate_batches: Recompute BatchNorm's running statistics over this many of the last
            training batches whenever the average is swapped in; 0 leaves them as they are.
    """

    def __init__(self, *, recalibrate_batches: int = 0) -> None:
        self._batches = recalibrate_batches
        self._installed = ExitStack()
        self._average = Average(recalibrate_batches=recalibrate_batches)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        _check_package(trainer)
        if any(isinstance(other, LearningRateFinder) for other in trainer.callbacks):
            raise RuntimeError(NO_FINDER)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        optimizers = [opt for opt in trainer.optimizers if isinstance(opt, Untuned)]
        if not optimizers:
            raise TypeError(
                f"UntunedCallback is for Untuned, got {_names(trainer)}: return Untuned from "
                "configure_optimizers, or leave the callback out"
            )
        if any(isinstance(other, StochasticWeightAveraging) for other in trainer.callbacks):
            raise ValueError("Untuned averages by itself: leave StochasticWeightAveraging out")
        average = self._average = Average(optimizers, pl_module, self._batches)
        save = trainer.save_checkpoint

        @wraps(save)
        def save_checkpoint(*args: Any, **kwargs: Any) -> None:
            with average.swapped_in():
                save(*args, **kwargs)

        self._installed.enter_context(_replaced(trainer, "save_checkpoint", save_checkpoint))
        if self._batches:
            self._remember_batches(trainer, pl_module, average)

    def _remember_batches(
        self, trainer: Trainer, pl_module: LightningModule, average: Average
    ) -> None:
        if not pl_module.automatic_optimization:
            raise ValueError(
                f"recalibrate_batches={self._batches} calls training_step again, which steps with "
                "manual optimization: leave it out, and call stormplus.recalibrate in "
                "on_validation_start"
            )
        user_training_step = pl_module.training_step

        def evaluate_again(*args: Any, **kwargs: Any) -> None:
            with _without_logging(pl_module), trainer.precision_plugin.train_step_context():
                user_training_step(*args, **kwargs)

        @wraps(user_training_step)
        def training_step(*args: Any, **kwargs: Any) -> Any:
            average.remember(partial(evaluate_again, *args, **kwargs))
            return user_training_step(*args, **kwargs)

        self._installed.enter_context(_replaced(pl_module, "training_step", training_step))

    def on_train_batch_start(self, *_: Any) -> None:
        self._average.swap_out()

    def on_validation_start(self, *_: Any) -> None:
        self._average.swap_in()

    def on_train_end(self, *_: Any) -> None:
        self._average.swap_in()

    def on_exception(self, *_: Any) -> None:
        self._average.swap_in(recalibrated=False)  # other ranks may not get here
        self._installed.close()  # Lightning calls no teardown after an exception

    def teardown(self, *_: Any, **__: Any) -> None:
        self._installed.close()


class StormPlusCallback(Callback):
    """Makes `StormPlus`, `SimplifiedStormPlus` and `Storm` exact under Lightning's trainer.

    With automatic optimization the two evaluations of a step see the same micro-batches and
    random numbers, running statistics move once, and `self.log` and torchmetrics see the second
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
        self._last: Callable[[], Any] | None = None  # evaluates the last micro-batch
        self._resumed: dict[str, Any] | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        _check_package(trainer)
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
            plugin._after_closure(pl_module, opt)  # hooks and clipping, as for the first gradient

        replay = self._replay = Replay(opt, pl_module, process, scaler)
        self._installed.callback(replay.remove)
        user_training_step, user_optimizer_step = pl_module.training_step, pl_module.optimizer_step

        @wraps(user_training_step)
        def training_step(*args: Any, **kwargs: Any) -> Any:
            if not replay.running:
                batch = trainer._results.batch
                again = partial(_evaluate_again, trainer, opt, batch, args, kwargs)
                replay.record(self._last or again)
            counts = not opt.started or opt.pending
            with nullcontext() if counts else _without_logging(pl_module):
                return user_training_step(*args, **kwargs)

        @wraps(user_optimizer_step)
        def optimizer_step(
            epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Callable[[], Any]
        ) -> None:
            def first() -> Any:
                loss = optimizer_closure()
                if loss is None and all(p.grad is None for p in opt.parameters()):
                    raise _SampleSkipped
                return loss

            self._last = optimizer_closure
            try:
                user_optimizer_step(epoch, batch_idx, optimizer, first)
            except _SampleSkipped:
                pass
            except BaseException as error:
                replay.close(error)
                raise
            finally:
                self._last = None
            replay.finish()

        self._installed.enter_context(_replaced(pl_module, "training_step", training_step))
        self._installed.enter_context(_replaced(pl_module, "optimizer_step", optimizer_step))

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self._resumed is not None and self._resumed["mid_epoch"]:
            self._rewind(trainer)  # creating the loader's iterator has drawn random numbers
        self._resumed = None
        if self._replay is not None and batch_idx % trainer.accumulate_grad_batches == 0:
            self._replay.finish()  # left by an epoch that was ended early

    def on_train_batch_end(
        self, trainer: Any, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
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

    def on_exception(self, *_: Any) -> None:
        self.on_train_end()

    # -- random numbers in checkpoints: in one process, because a checkpoint has one copy ---------

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        if trainer.world_size == 1 and trainer.optimizers:  # none after `trainer.validate`
            checkpoint[CHECKPOINT_KEY] = {
                "rng": _paired_optimizers(trainer)[0].random_streams().pack(),
                "mid_epoch": not trainer.is_last_batch,
            }

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        if trainer.world_size == 1:
            self._resumed = checkpoint.get(CHECKPOINT_KEY)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._rewind(trainer)  # before the order of the next epoch is drawn

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if order_is_drawn_again(trainer):
            self._rewind(trainer)

    def _rewind(self, trainer: Trainer) -> None:
        if self._resumed is None:
            return
        packed, streams = self._resumed["rng"], _paired_optimizers(trainer)[0].random_streams()
        if packed.numel() != streams.size:
            rank_zero_warn(
                f"the checkpoint holds {packed.numel()} bytes of random state, this process has "
                f"{streams.size}: it was made with other devices or generators, and the run "
                "continues with other random numbers"
            )
            self._resumed = None
            return
        streams.unpack(packed)
        streams.rewind()


class _SampleSkipped(Exception):  # not an error: the user skips this batch
    """Raised when `training_step` returned None."""


def _evaluate_again(trainer: Any, opt: PairedOptimizer, batch: Any, args: Any, kwargs: Any) -> None:
    """Evaluate a micro-batch that is not the last: DDP does not synchronise its gradient."""
    strategy, results = trainer.strategy, trainer._results
    with (
        strategy.block_backward_sync() if isinstance(strategy, DDPStrategy) else nullcontext(),
        _replaced(results, "batch", batch),  # `self.log` weighs by its size
        _replaced(results, "batch_size", None),  # Lightning's cache of that size
    ):
        output = call._call_strategy_hook(trainer, "training_step", *args, **kwargs)
        loss = output.get("loss") if isinstance(output, Mapping) else output
        if loss is not None:
            scaled = loss / trainer.accumulate_grad_batches
            call._call_strategy_hook(trainer, "backward", scaled, opt)


@contextmanager
def _without_logging(pl_module: LightningModule) -> Iterator[None]:
    """Let `self.log` do nothing, and restore the module's metrics afterwards."""
    saved = []
    for metric in (module for module in pl_module.modules() if isinstance(module, Metric)):
        states = {
            name: list(state) if isinstance(state, list) else state.detach().clone()
            for name, state in metric.metric_state.items()
        }
        saved.append((metric, metric._update_count, states))
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
    setattr(owner, name, value)
    try:
        yield
    finally:
        if had_one:
            setattr(owner, name, before)
        else:
            delattr(owner, name)


def _paired_optimizers(trainer: Trainer) -> list[PairedOptimizer]:
    found: list[Any] = [opt for opt in trainer.optimizers if isinstance(opt, PairedOptimizer)]
    if not found:
        raise TypeError(
            "StormPlusCallback is for StormPlus, SimplifiedStormPlus and Storm, got "
            f"{_names(trainer)}: return one of them from configure_optimizers, or leave the "
            "callback out. Untuned needs UntunedCallback"
        )
    return found


def _names(trainer: Trainer) -> str:
    return ", ".join(type(opt).__name__ for opt in trainer.optimizers) or "nothing"


def _check_package(trainer: Any) -> None:
    if not isinstance(trainer, Trainer):
        kind = type(trainer)
        raise TypeError(
            f"the trainer is a {kind.__module__.split('.')[0]}.{kind.__qualname__}: import "
            "Trainer, LightningModule and callbacks from lightning.pytorch, not from "
            "pytorch_lightning"
        )


def _check(trainer: Any, pl_module: LightningModule) -> None:
    """Raise if the two gradients of a sample would silently be wrong."""
    plugin, strategy = trainer.precision_plugin, trainer.strategy
    passes_closure = (Precision.optimizer_step, MixedPrecision.optimizer_step)
    if type(plugin).optimizer_step not in passes_closure:
        raise TypeError(
            f"the precision plugin {type(plugin).__name__} does not pass the closure on: use "
            'precision="32-true", "64-true", "bf16-mixed" or "16-mixed"'
        )
    if not isinstance(strategy, (SingleDeviceStrategy, DDPStrategy)):
        raise TypeError(
            f"the strategy {type(strategy).__name__} has not been verified: use one device or "
            'strategy="ddp", or FSDP2 in your own loop (docs/many-machines.md)'
        )
    if any(isinstance(other, StochasticWeightAveraging) for other in trainer.callbacks):
        raise ValueError(
            "StochasticWeightAveraging ends with steps without gradients: average with "
            "EMAWeightAveraging, or with stormplus.UniformIterate"
        )
    if pl_module.automatic_optimization and is_param_in_hook_signature(
        pl_module.training_step, "dataloader_iter", explicit=True
    ):
        raise TypeError(
            "training_step(self, dataloader_iter) draws another batch each time it is called: take "
            "(self, batch, batch_idx), or use manual optimization with one draw before the closure"
        )
    if getattr(plugin, "scaler", None) is not None and not pl_module.automatic_optimization:
        raise ValueError(
            "with manual optimization and 16-mixed Lightning steps without the closure: use "
            "bf16-mixed, or automatic optimization"
        )
    if trainer.gradient_clip_val or is_overridden("configure_gradient_clipping", pl_module):
        rank_zero_warn(f"gradient clipping {CLIPPING}: Trainer(gradient_clip_val=None)")
