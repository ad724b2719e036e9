"""Lightning: one callback, and every closure, batch and precision is accounted for.

    trainer = Trainer(callbacks=[StormPlusCallback()])   # two gradients a step
    trainer = Trainer(callbacks=[UntunedCallback()])     # Untuned

Lightning passes the closure in fp32 and bf16 only, re-runs only the last micro-batch when
gradients are accumulated, and steps without a closure in fp16. With the callback both
evaluations cover all micro-batches in each of them. Of `Untuned` it validates and saves the
iterate; with its callback the average.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial, wraps
from typing import Any

from stormplus.install import how_to
from stormplus.integrations.replay import Replay
from stormplus.integrations.untuned import FORGOTTEN, Average
from stormplus.torch import PairedOptimizer, Untuned
from stormplus.versions import order_is_drawn_again

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.callbacks import StochasticWeightAveraging
    from lightning.pytorch.core.optimizer import do_nothing_closure
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


class StormPlusCallback(Callback):
    """Makes `StormPlus`, `SimplifiedStormPlus` and `Storm` exact under Lightning's trainer.

    With automatic optimization the two evaluations of a step see the same micro-batches and
    random numbers, running statistics move once, and `self.log` and torchmetrics see the second
    evaluation only. What `training_step` itself keeps, it keeps of both: the one that counts is
    the one with `not opt.started or opt.pending`. With manual optimization call
    `opt.step(same_sample(opt.optimizer, self)(closure))`; a missing closure is refused.

    A checkpoint then also holds torch's random state, so that a run in one process resumes
    bit by bit.

    Args:
        log: Log `opt.diagnostics()` under "stormplus/", every `log_every_n_steps` steps.
    """

    def __init__(self, *, log: bool = True) -> None:
        self._log_diagnostics = log
        self._installed = ExitStack()
        self._replay: Replay | None = None
        self._last: Callable[[], Any] | None = None  # evaluates the last micro-batch
        self._resumed: dict[str, Any] | None = None

    # -- what is refused, and what is installed --------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        _refuse_the_other_package(trainer)
        self._resumed = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        check(trainer, pl_module)
        if pl_module.automatic_optimization:
            self._install(trainer, pl_module, _paired_optimizers(trainer)[0])
        else:
            for opt in _paired_optimizers(trainer):
                hook = opt.register_step_pre_hook(_refuse_missing_closure)
                self._installed.callback(hook.remove)

    def _install(self, trainer: Trainer, pl_module: LightningModule, opt: PairedOptimizer) -> None:
        plugin = trainer.precision_plugin
        scaler = getattr(plugin, "scaler", None)

        def process() -> None:
            if scaler is not None:
                scaler.unscale_(opt)
            plugin._after_closure(pl_module, opt)  # the hooks and the clipping of the first one

        replay = self._replay = Replay(opt, pl_module, process, scaler)
        self._installed.callback(replay.remove)
        user_training_step, user_optimizer_step = pl_module.training_step, pl_module.optimizer_step

        @wraps(user_training_step)
        def training_step(*args: Any, **kwargs: Any) -> Any:
            if not replay.running:
                batch = trainer._results.batch  # by whose size `self.log` weighs
                again = partial(_evaluate_again, trainer, opt, batch, args, kwargs)
                replay.record(self._last or again)
            counts = not opt.started or opt.pending
            with nullcontext() if counts else _without_trace(pl_module):
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
            self._rewind(trainer)  # making the loader's iterator has drawn random numbers
        self._resumed = None
        if self._replay is not None and batch_idx % trainer.accumulate_grad_batches == 0:
            self._replay.finish()  # an epoch that was left early; normally there is nothing

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._installed.close()
        self._replay = None

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        self.on_train_end(trainer, pl_module)

    # -- the log ---------------------------------------------------------------------------------

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

    # -- random numbers in checkpoints -----------------------------------------------------------

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        # A checkpoint has one copy, and each rank its own stream. There is no optimizer after
        # `trainer.validate`.
        if trainer.world_size == 1 and trainer.optimizers:
            checkpoint[CHECKPOINT_KEY] = {
                "rng": _paired_optimizers(trainer)[0].random_streams().pack(),
                "mid_epoch": not trainer.is_last_batch,
            }

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        if trainer.world_size == 1:  # else all ranks would go on with the same stream
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
                f"{streams.size}: it was made with other devices or generators. The run goes on "
                "with random numbers of its own"
            )
            self._resumed = None
            return
        streams.unpack(packed)
        streams.rewind()


class UntunedCallback(Callback):
    """Validates and saves the average of `Untuned`, and trains its iterate.

    The average is in the module from the start of a validation to the next training batch,
    while a checkpoint is saved, and when `fit` has ended. A run that is resumed from such a
    checkpoint goes on from the iterate, bit by bit: the optimizer's state has it.

    Args:
        recalibrate_batches: Take BatchNorm's running statistics anew over this many of the last
            training batches when the average comes in; they are kept for it. 0 leaves the
            statistics as they are.
    """

    def __init__(self, *, recalibrate_batches: int = 0) -> None:
        Average(recalibrate_batches=recalibrate_batches)  # looks at it
        self._batches = recalibrate_batches
        self._installed = ExitStack()
        self._average = Average()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        _refuse_the_other_package(trainer)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        optimizers = [opt for opt in trainer.optimizers if isinstance(opt, Untuned)]
        if not optimizers:
            raise TypeError(
                f"UntunedCallback is for Untuned, got {_names(trainer)}: return Untuned from "
                "configure_optimizers, or leave the callback out"
            )
        if any(isinstance(other, StochasticWeightAveraging) for other in trainer.callbacks):
            raise ValueError(
                "StochasticWeightAveraging moves what Untuned measures, and Untuned averages by "
                "itself: leave it out"
            )
        average = self._average = Average(optimizers, pl_module, self._batches)
        save = trainer.save_checkpoint

        @wraps(save)
        def save_checkpoint(*args: Any, **kwargs: Any) -> None:
            with average.shown():
                save(*args, **kwargs)

        self._installed.enter_context(_replaced(trainer, "save_checkpoint", save_checkpoint))
        if self._batches:
            self._remember_batches(trainer, pl_module, average)

    def _remember_batches(
        self, trainer: Trainer, pl_module: LightningModule, average: Average
    ) -> None:
        if not pl_module.automatic_optimization:
            raise ValueError(
                f"recalibrate_batches={self._batches} evaluates training_step again, which steps "
                "with manual optimization: leave it out, and call stormplus.recalibrate in "
                "on_validation_start"
            )
        user_training_step = pl_module.training_step

        def again(*args: Any, **kwargs: Any) -> None:
            with _without_trace(pl_module), trainer.precision_plugin.train_step_context():
                user_training_step(*args, **kwargs)

        @wraps(user_training_step)
        def training_step(*args: Any, **kwargs: Any) -> Any:
            average.saw(partial(again, *args, **kwargs))
            return user_training_step(*args, **kwargs)

        self._installed.enter_context(_replaced(pl_module, "training_step", training_step))

    def on_train_batch_start(self, *_: Any) -> None:
        self._average.take_out()

    def on_validation_start(self, *_: Any) -> None:
        self._average.put_in()

    def on_train_end(self, *_: Any) -> None:
        self._average.put_in()

    def on_exception(self, *_: Any) -> None:
        self._average.put_in(recalibrated=False)  # the others may be elsewhere, or the batch bad
        self._installed.close()  # there is no teardown then

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._installed.close()


class UntunedWatch(Callback):
    """Warns if `Untuned` is validated or saved at its iterate; Lightning adds it by itself."""

    def __init__(self) -> None:
        self._told = False

    def on_validation_batch_start(self, trainer: Trainer, *_: Any) -> None:
        if not trainer.sanity_checking:
            self._look(trainer)

    def on_save_checkpoint(self, trainer: Trainer, *_: Any) -> None:
        self._look(trainer)

    def _look(self, trainer: Trainer) -> None:
        forgotten = any(
            isinstance(opt, Untuned) and not opt.at_average for opt in trainer.optimizers
        )
        if forgotten and not self._told:
            self._told = True
            rank_zero_warn(
                FORGOTTEN + "Trainer(callbacks=[UntunedCallback()]), with UntunedCallback from "
                "stormplus.integrations.lightning"
            )


class _SampleSkipped(Exception):  # nothing is wrong: the user asked for it
    """`training_step` returned None."""


def _evaluate_again(trainer: Any, opt: PairedOptimizer, batch: Any, args: Any, kwargs: Any) -> None:
    """A micro-batch that is not the last: no gradients are sent."""
    strategy, results = trainer.strategy, trainer._results
    with (
        strategy.block_backward_sync() if isinstance(strategy, DDPStrategy) else nullcontext(),
        _replaced(results, "batch", batch),
        _replaced(results, "batch_size", None),  # Lightning's cache of the size of the last
    ):
        output = call._call_strategy_hook(trainer, "training_step", *args, **kwargs)
        loss = output.get("loss") if isinstance(output, Mapping) else output
        if loss is not None:
            scaled = loss / trainer.accumulate_grad_batches
            call._call_strategy_hook(trainer, "backward", scaled, opt)


@contextmanager
def _without_trace(pl_module: LightningModule) -> Iterator[None]:
    """A training step of which neither `self.log` nor a metric inside the module knows."""
    metrics = [module for module in pl_module.modules() if isinstance(module, Metric)]
    saved = [
        (m, m._update_count, {k: _copy(v) for k, v in m.metric_state.items()}) for m in metrics
    ]
    with _replaced(pl_module, "log", lambda *args, **kwargs: None):
        yield
    for metric, count, states in saved:
        metric._update_count, metric._computed = count, None
        for name, value in states.items():
            setattr(metric, name, value)


def _copy(state: Any) -> Any:
    return list(state) if isinstance(state, list) else state.detach().clone()


@contextmanager
def _replaced(owner: object, name: str, value: Any) -> Iterator[None]:
    """The attribute of this one object, for a while."""
    had_one, before = name in vars(owner), vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if had_one:
            setattr(owner, name, before)
        else:
            delattr(owner, name)


# -- what is refused, and why --------------------------------------------------------------------


def _paired_optimizers(trainer: Trainer) -> list[PairedOptimizer]:
    found: list[Any] = [opt for opt in trainer.optimizers if isinstance(opt, PairedOptimizer)]
    if not found:
        raise TypeError(
            "StormPlusCallback is for StormPlus, SimplifiedStormPlus and Storm, got "
            f"{_names(trainer)}: return one of them from configure_optimizers, or leave the "
            "callback out, which one gradient a step does not need. The callback of Untuned is "
            "UntunedCallback"
        )
    return found


def _names(trainer: Trainer) -> str:
    return ", ".join(type(opt).__name__ for opt in trainer.optimizers) or "nothing"


def _refuse_the_other_package(trainer: Any) -> None:
    if not isinstance(trainer, Trainer):
        kind = type(trainer)
        raise TypeError(
            f"the trainer is a {kind.__module__.split('.')[0]}.{kind.__qualname__}, and this "
            "callback works with that of the package lightning: import Trainer, "
            "LightningModule and callbacks from lightning.pytorch, not from pytorch_lightning"
        )


def check(trainer: Any, pl_module: LightningModule) -> None:
    plugin, strategy = trainer.precision_plugin, trainer.strategy
    passes_closure = (Precision.optimizer_step, MixedPrecision.optimizer_step)
    if type(plugin).optimizer_step not in passes_closure:
        raise TypeError(
            f"the precision plugin {type(plugin).__name__} steps in its own way, without our "
            'closure: use precision="32-true", "64-true", "bf16-mixed" or "16-mixed"'
        )
    if not isinstance(strategy, (SingleDeviceStrategy, DDPStrategy)):
        raise TypeError(
            f"the strategy {type(strategy).__name__} has not been verified: use one device or "
            'strategy="ddp", or FSDP2 in a loop of your own (docs/many-machines.md)'
        )
    if getattr(strategy, "_model_averager", None) is not None:
        raise ValueError("model averaging moves the parameters behind the optimizer's back")
    if any(isinstance(other, StochasticWeightAveraging) for other in trainer.callbacks):
        raise ValueError(
            "StochasticWeightAveraging ends with an epoch of steps without gradients: average "
            "with EMAWeightAveraging, or with stormplus.UniformIterate"
        )
    if pl_module.automatic_optimization and is_param_in_hook_signature(
        pl_module.training_step, "dataloader_iter", explicit=True
    ):
        raise TypeError(
            "training_step(self, dataloader_iter) draws another batch each time it is called, so "
            "that the two gradients of a sample would be of two samples: take (self, batch, "
            "batch_idx), or use manual optimization with one draw before the closure"
        )
    if getattr(plugin, "scaler", None) is not None and not pl_module.automatic_optimization:
        raise ValueError(
            "with manual optimization and 16-mixed Lightning steps without the closure: use "
            "bf16-mixed, or automatic optimization"
        )
    if trainer.gradient_clip_val or is_overridden("configure_gradient_clipping", pl_module):
        rank_zero_warn(
            "gradient clipping shortens the two gradients of a sample separately, so that their "
            "difference is no longer the change of one gradient. To bound the move instead: "
            "StormPlus(..., max_move=0.1)"
        )


def _refuse_missing_closure(opt: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    # Lightning puts an empty closure where there is none, inside a partial of its own.
    if getattr(kwargs.get("closure"), "args", [None])[-1] is do_nothing_closure:
        raise TypeError(
            "opt.step() was called without a closure, which Lightning replaces by an empty one: "
            "opt.step(same_sample(opt.optimizer, self)(closure)), where the closure calls "
            "opt.zero_grad(), computes the loss, calls self.manual_backward(loss), returns it"
        )
