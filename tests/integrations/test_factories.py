"""The optimizers by name, from timm and from pytorch_optimizer."""

import importlib.util
import re
import sys
import types
from pathlib import Path

import pytest
import torch
from trainer_cases import (
    BATCHES,
    ROWS,
    Run,
    assert_same_runs,
    data,
    loss_of,
    network,
    plain_run,
    snapshot,
)

from stormplus import SimplifiedStormPlus, Storm, StormPlus, Untuned, same_sample
from stormplus.integrations.factories import register_pytorch_optimizer, register_timm

PAGE = Path(__file__).parents[2] / "docs" / "integrations" / "factories.md"
NAMES = {
    "stormplus": StormPlus,
    "simplifiedstormplus": SimplifiedStormPlus,
    "storm": Storm,
    "untuned": Untuned,
}


@pytest.fixture(scope="module")
def timm_optim():
    """timm's own `timm.optim`.

    Importing `timm` or `timm.models` imports every model, which needs a torchvision that fits
    the installed torch. Where there is none, the two are empty packages whose folders are
    timm's, so that all of `timm.optim` is the real code; what it takes from `timm.models` is
    for `layer_decay` alone, which no test here uses.
    """
    if importlib.util.find_spec("timm") is None:
        pytest.skip("timm is not installed")
    if importlib.util.find_spec("torchvision") is None:
        for name in ("timm", "timm.models"):
            bare = types.ModuleType(name)
            bare.__spec__ = importlib.util.find_spec(name)
            bare.__path__ = bare.__spec__.submodule_search_locations
            sys.modules[name] = bare
        bare.group_parameters = None
    yield importlib.import_module("timm.optim")
    for name in [name for name in sys.modules if name.split(".")[0] == "timm"]:
        del sys.modules[name]


@pytest.fixture
def pytorch_optimizer():
    module = pytest.importorskip("pytorch_optimizer")
    registry = sys.modules["pytorch_optimizer.optimizer"].OPTIMIZERS
    before = dict(registry)
    yield module
    registry.clear()
    registry.update(before)


def train(net, opt, wrap=lambda closure: closure):
    run = Run()
    run.net, run.opt = net, opt if isinstance(opt, (StormPlus, Untuned)) else opt.optimizer
    for i, (x, y) in enumerate(zip(*(part.split(ROWS) for part in data()))):
        torch.manual_seed(i)

        def closure():
            opt.zero_grad()
            loss = loss_of(net, x, y)
            loss.backward()
            return loss

        if isinstance(run.opt, Untuned):
            closure()
            opt.step()
        else:
            opt.step(same_sample(run.opt, net)(wrap(closure)))
        run.states.append(snapshot(net))
    return run


def decayed(model, decay):
    """Weight decay for matrices only, as the factories have it."""
    return [
        {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": decay},
    ]


def test_timm_knows_the_names(timm_optim, caplog):
    register_timm()
    register_timm()  # again: nothing happens
    assert not caplog.records
    assert set(NAMES) <= set(timm_optim.list_optimizers())
    for name, kind in NAMES.items():
        assert timm_optim.get_optimizer_class(name) is kind
        assert timm_optim.get_optimizer_info(name).description


@pytest.mark.parametrize("name", NAMES)
def test_timm_makes_the_optimizer(timm_optim, name):
    register_timm()
    opt = timm_optim.create_optimizer_v2(network(), name, momentum=0.9, eps=1e-8)
    assert isinstance(opt, NAMES[name])
    assert opt.param_groups[0]["lr"] == 1.0


def test_timm_runs_as_the_plain_loop(timm_optim):
    register_timm()
    model = network()
    opt = timm_optim.create_optimizer_v2(model, "stormplus", lr=0.5)
    assert_same_runs(train(model, opt), plain_run(epochs=1, lr=0.5))
    assert model.evaluations == 2 * BATCHES - 1


def test_the_pages_lines_for_timm_run(timm_optim):
    (lines,) = re.findall(r"^```text\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    namespace = {"model": network()}
    exec(compile(lines, PAGE.name, "exec"), namespace)
    assert isinstance(namespace["opt"], StormPlus)
    assert namespace["opt"].param_groups[0]["lr"] == 1.0


def test_timm_weight_decay_spares_vectors(timm_optim):
    register_timm()
    model, other = network(), network()
    opt = timm_optim.create_optimizer_v2(model, "stormplus", weight_decay=0.1, norm="mean")
    run = train(model, opt)
    assert_same_runs(run, train(other, StormPlus(decayed(other, 0.1), norm="mean")))


def test_timms_lookahead_is_refused(timm_optim):
    register_timm()
    opt = timm_optim.create_optimizer_v2(network(), "lookahead_stormplus")
    with pytest.raises(RuntimeError, match="without it"):
        opt.step(lambda: None)


def test_a_script_without_a_closure_is_refused(timm_optim):
    register_timm()
    with pytest.raises(TypeError, match="needs a closure"):
        timm_optim.create_optimizer_v2(network(), "stormplus").step()


def test_pytorch_optimizer_knows_the_names(pytorch_optimizer):
    register_pytorch_optimizer()
    register_pytorch_optimizer()
    assert set(NAMES) <= set(pytorch_optimizer.get_supported_optimizers())
    for name, kind in NAMES.items():
        assert pytorch_optimizer.load_optimizer(name) is kind


def test_pytorch_optimizer_runs_as_the_plain_loop(pytorch_optimizer):
    register_pytorch_optimizer()
    model = network()
    opt = pytorch_optimizer.create_optimizer(model, "StormPlus", lr=0.5)
    assert_same_runs(train(model, opt), plain_run(epochs=1, lr=0.5))
    assert model.evaluations == 2 * BATCHES - 1


def test_pytorch_optimizer_projects_both_gradients(pytorch_optimizer):
    register_pytorch_optimizer()
    model, other = network(), network()
    opt = pytorch_optimizer.create_optimizer(model, "stormplus", lr=0.5, use_orthograd=True)
    plain_opt = StormPlus(other.parameters(), lr=0.5)
    project = pytorch_optimizer.OrthoGrad(torch.optim.SGD(other.parameters()))

    def projected(closure):
        def evaluate():
            loss = closure()
            project.apply_orthogonal_gradients(other.parameters())
            return loss

        return evaluate

    assert_same_runs(train(model, opt), train(other, plain_opt, wrap=projected))


def test_pytorch_optimizers_lookahead_is_refused(pytorch_optimizer):
    register_pytorch_optimizer()
    opt = pytorch_optimizer.create_optimizer(network(), "stormplus", use_lookahead=True)
    with pytest.raises(RuntimeError, match="without it"):
        opt.step(lambda: None)


@pytest.mark.parametrize("lookahead", [False, True])
def test_untuned_by_name_from_pytorch_optimizer(pytorch_optimizer, lookahead):
    register_pytorch_optimizer()
    model = network()
    opt = pytorch_optimizer.create_optimizer(model, "Untuned", lr=1.0, use_lookahead=lookahead)
    run = train(model, opt)
    if not lookahead:
        assert_same_runs(run, plain_run(epochs=1, kind=Untuned))
    assert model.evaluations == run.opt.grad_evaluations == BATCHES


def test_lookahead_does_not_concern_other_optimizers(pytorch_optimizer):
    register_pytorch_optimizer()
    model = network()
    opt = pytorch_optimizer.create_optimizer(model, "adamw", use_lookahead=True)
    loss_of(model, *data(1)).backward()
    opt.step()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_pytorch_optimizer_may_be_asked_to_compile(pytorch_optimizer):
    register_pytorch_optimizer()
    model = network()
    opt = pytorch_optimizer.create_optimizer(model, "stormplus", lr=0.5, compile=True)
    assert isinstance(opt, StormPlus)


@pytest.mark.parametrize(
    ("register", "package", "extra"),
    [
        (register_timm, "timm", "timm"),
        (register_pytorch_optimizer, "pytorch_optimizer", "pytorch-optimizer"),
    ],
    ids=["timm", "pytorch_optimizer"],
)
def test_a_missing_package_is_named(monkeypatch, register, package, extra):
    for name in [name for name in sys.modules if name.split(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ModuleNotFoundError, match=rf"pip install 'stormplus\[{extra}\]'"):
        register()
