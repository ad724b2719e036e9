"""A check of the optimizers on a device: parity with the CPU, launches, syncs and time.

`python -m stormplus.doctor --device cuda` runs it.
"""

from __future__ import annotations

import math
import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from stormplus.torch import BaseOptimizer, PairedOptimizer, StormPlus, Untuned

Step: TypeAlias = Callable[[], Any]
Shapes: TypeAlias = Sequence[tuple[int, ...]]

STEPS = 20


class NoDeviceError(RuntimeError):
    """torch cannot use a device here."""


class Parity(NamedTuple):
    """One optimizer on two devices, with a tolerance for |x_device - x_cpu| / |x_cpu - x_1|.

    In bf16 a difference in the last bit of float32 can round up on one and down on the other.
    """

    name: str
    make: Callable[[Iterable[nn.Parameter]], BaseOptimizer]
    dtype: torch.dtype = torch.float32
    tolerance: float = 1e-4


PARITIES: Sequence[Parity] = (
    Parity("Untuned", Untuned),
    Parity("Untuned, bf16 parameters", Untuned, torch.bfloat16, tolerance=1e-2),
    Parity("Untuned, bf16 state", partial(Untuned, state_dtype=torch.bfloat16), tolerance=1e-2),
    Parity("StormPlus, pairs", StormPlus),
)
OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "Untuned": Untuned,
    "StormPlus, a pair": StormPlus,
    "Adam(fused=True)": partial(torch.optim.Adam, fused=True),
    "Adam(foreach=True)": partial(torch.optim.Adam, foreach=True),
}


class Counts(NamedTuple):
    """How often a step uses a device; None where that cannot be counted."""

    launches: int | None = None  # kernels, and copies within the device
    syncs: int | None = None
    to_device: int | None = None  # copies
    to_host: int | None = None


def describe(device: torch.device) -> str:
    """Return the device and its name."""
    module = _module(device)
    if hasattr(module, "get_device_name"):
        return f"{device}, {module.get_device_name(device)}"
    return str(device)


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type != "cpu" and hasattr(_module(device), "synchronize"):
        _module(device).synchronize()


def count(device: torch.device, step: Step) -> Counts:
    """Take a step, and count its launches, syncs and copies."""
    syncs = _syncs(step) if device.type == "cuda" else None
    activities = [
        activity
        for activity in torch.profiler.supported_activities()
        if activity.name in ("CPU", device.type.upper())
    ]
    if len(activities) < 2:  # the CPU itself, or a device that the profiler does not know
        return Counts(syncs=syncs)
    with torch.profiler.profile(activities=activities) as profile:
        step()
        synchronize(device)
    return Counts(syncs=syncs, **count_events(profile.events()))


def seconds(device: torch.device, step: Step) -> tuple[float, float]:
    """Return the median seconds until a step returns, and until the device is done."""
    returned, done = [], []
    for _ in range(STEPS):
        synchronize(device)
        start = time.perf_counter()
        step()
        returned.append(time.perf_counter() - start)
        synchronize(device)
        done.append(time.perf_counter() - start)
    return statistics.median(returned), statistics.median(done)


def _module(device: torch.device) -> Any:
    return getattr(torch, device.type, None)  # torch.cuda, torch.xpu, ...


def _syncs(step: Step) -> int:
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode(before)
    return sum("synchronizing" in str(warning.message) for warning in found)


def count_events(events: Iterable[Any]) -> dict[str, int]:
    """Count launches and copies among the events of a profile."""
    found = {"launches": 0, "to_device": 0, "to_host": 0}
    for event in events:
        name = event.name.lower()
        annotation = getattr(event, "is_user_annotation", False)
        if event.device_type.name == "CPU" or annotation or name.startswith("optimizer."):
            continue  # torch 2.4 does not mark the annotations of optimizers
        upload = "htod" in name or "hosttodevice" in name
        download = "dtoh" in name or "devicetohost" in name
        found["to_device" if upload else "to_host" if download else "launches"] += 1
    return found


def check_device(name: str, shapes: Shapes | None = None) -> bool:
    """Check the optimizers on a device, print a report, and return whether all checks passed.

    Steps are counted and timed on tensors of these shapes, by default ResNet34's.
    """
    device = _usable_device(name)
    shapes = resnet34_shapes() if shapes is None else shapes
    print(f"device           {describe(device)}")
    print(f"torch            {torch.__version__}")
    print(f"triton           {'installed' if find_spec('triton') else 'not installed'}")
    print(f"\nParity with the CPU after {STEPS} steps with the same gradients:")
    print("|x_device - x_cpu| / |x_cpu - x_1|, the largest over the tensors")
    print(f"{'':32s}{'difference':>12s}{'tolerance':>11s}        backend")
    passed = []
    for parity in PARITIES:
        difference, backends = _compare_with_cpu(parity, device)
        passed.append(difference <= parity.tolerance)
        verdict = "PASS" if passed[-1] else "FAIL"
        print(f"{parity.name:32s}{difference:12.1e}{parity.tolerance:11.0e}  {verdict}  {backends}")
    millions = sum(torch.Size(shape).numel() for shape in shapes) / 1e6
    print(f"\nOne step on {len(shapes)} tensors with {millions:.1f} M parameters in float32")
    print("(a launch is a kernel, or a copy within the device; - is not counted on this device)")
    columns = ("launches", "syncs", "H2D", "D2H", "host ms", "total ms")
    print(f"{'':32s}" + "".join(f"{column:>10s}" for column in columns))
    for title, make in OPTIMIZERS.items():
        try:
            opt = make(_tensors(shapes, device))
        except (RuntimeError, NotImplementedError) as error:  # Adam(fused) is not everywhere
            print(f"{title:32s}  not on this device: {str(error).splitlines()[0][:60]}")
            continue
        step = partial(_step, opt)
        for _ in range(3):  # compile, and fill caches
            step()
        synchronize(device)
        counts, times = count(device, step), seconds(device, step)
        cells = ["-" if number is None else str(number) for number in counts]
        cells += [f"{1e3 * time:.2f}" for time in times]
        verdict = "  waits for the device" if counts.syncs else ""
        print(f"{title:32s}" + "".join(f"{cell:>10s}" for cell in cells) + verdict)
        passed.append(not (counts.syncs and isinstance(opt, BaseOptimizer)))
    print("(host: until the call returns; total: until the device is done; medians)")
    print("\nPASS" if all(passed) else "\nFAIL: please open an issue with this output")
    return all(passed)


def _usable_device(name: str) -> torch.device:
    """Return the device of this name after one sum on it, or raise `NoDeviceError`."""
    try:
        device = torch.device(name)
        if float(torch.ones(2, device=device).sum()) == 2:
            return device
        reason = "it does not compute"
    except (RuntimeError, AssertionError, NotImplementedError, AttributeError) as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
    raise NoDeviceError(f"torch {torch.__version__} cannot use the device {name!r} here: {reason}")


def _step(*opts: torch.optim.Optimizer, evaluate: Step = lambda: None) -> None:
    """Take one step with optimizers of one kind; a pair is evaluated twice."""
    evaluate()
    pairs = [opt for opt in opts if isinstance(opt, PairedOptimizer)]
    if pairs and pairs[0].started:
        for pair in pairs:
            pair.move()
        evaluate()
    for pair in pairs:
        pair.estimate()
    for opt in opts:
        if opt not in pairs:
            opt.step()


def _compare_with_cpu(parity: Parity, device: torch.device) -> tuple[float, str]:
    """Return the difference after some steps (see `Parity`), and the backends on the device."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 300), nn.Tanh(), nn.Linear(300, 10)).to(parity.dtype)
        batches = [(torch.randn(32, 64), torch.randint(10, (32,))) for _ in range(STEPS)]
    on_cpu = list(model.parameters())
    start = [p.detach().clone() for p in on_cpu]
    on_device = [nn.Parameter(p.detach().to(device)) for p in on_cpu]
    cpu_opt, device_opt = parity.make(on_cpu), parity.make(on_device)
    for x, y in batches:

        def evaluate(x: Tensor = x, y: Tensor = y) -> None:
            model.zero_grad()
            nn.functional.cross_entropy(model(x.to(parity.dtype)), y).backward()
            for p, q in zip(on_cpu, on_device):
                q.grad = None if p.grad is None else p.grad.to(device)

        _step(cpu_opt, device_opt, evaluate=evaluate)
    backends = sorted({info.kernels.__name__ for info in device_opt._infos if info.kernels})
    differences = [
        _distance(q.detach().cpu(), p.detach()) / _distance(p.detach(), x_1)
        for p, q, x_1 in zip(on_cpu, on_device, start)
    ]
    difference = max(differences) if all(map(math.isfinite, differences)) else math.inf
    return difference, ", ".join(name.rpartition(".")[2] for name in backends)


def _distance(a: Tensor, b: Tensor) -> float:
    return float(torch.linalg.vector_norm(a.double() - b.double()))


def resnet34_shapes() -> list[tuple[int, ...]]:
    """Return the shapes of the 110 parameters of a ResNet34."""
    shapes: list[tuple[int, ...]] = [(64, 3, 7, 7), (64,), (64,)]
    inputs = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for _ in range(blocks):
            shapes += [(width, inputs, 3, 3), (width,), (width,)]
            shapes += [(width, width, 3, 3), (width,), (width,)]
            if inputs != width:
                shapes += [(width, inputs, 1, 1), (width,), (width,)]
            inputs = width
    return [*shapes, (1000, 512), (1000,)]


def _tensors(shapes: Shapes, device: torch.device) -> list[nn.Parameter]:
    """Return parameters that have gradients."""
    generator = torch.Generator().manual_seed(0)
    params = []
    for shape in shapes:
        x, g = 0.01 * torch.randn(2, *shape, generator=generator)
        params.append(nn.Parameter(x.to(device)))
        params[-1].grad = g.to(device)
    return params
