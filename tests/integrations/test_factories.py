"""The optimizers by name, from timm and from pytorch_optimizer."""

import importlib.util
import re
import sys
import types
from pathlib import Path
from types import SimpleNamespace

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
from stormplus.torch import BaseOptimizer
from stormplus.versions import release

PAGE = Path(__file__).parents[2] / "docs" / "integrations" / "factories.md"
IGNORED = r"lr=0.5 is ignored: Untuned measures its own .*Leave it out, or pass 1.0"
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
    register_pytorch_optimizer()
    yield module
    registry.clear()
    registry.update(before)


@pytest.fixture(params=["timm", "pytorch_optimizer"])
def factory(request):
    """What the two have in common, under one set of names."""
    if request.param == "timm":
        timm = request.getfixturevalue("timm_optim")
        register_timm()
        return SimpleNamespace(
            title="timm",
            register=register_timm,
            names=timm.list_optimizers,
            kind=timm.get_optimizer_class,
            make=timm.create_optimizer_v2,
            ahead=lambda net, name: timm.create_optimizer_v2(net, f"lookahead_{name}", lr=1.0),
        )
    other = request.getfixturevalue("pytorch_optimizer")
    return SimpleNamespace(
        title="pytorch_optimizer",
        register=register_pytorch_optimizer,
        names=other.get_supported_optimizers,
        kind=other.load_optimizer,
        make=other.create_optimizer,
        ahead=lambda net, name: other.create_optimizer(net, name, lr=1.0, use_lookahead=True),
    )


def train(net, opt, wrap=lambda closure: closure):
    run = Run()
    names = [name for name in ("optimizer", "_base_optimizer") if hasattr(opt, name)]
    inner = run.opt = opt if isinstance(opt, BaseOptimizer) else getattr(opt, names[0])
    run.net = net
    for i, (x, y) in enumerate(zip(*(part.split(ROWS) for part in data()))):
        torch.manual_seed(i)

        def closure():
            opt.zero_grad()
            loss = loss_of(net, x, y)
            loss.backward()
            return loss

        if isinstance(inner, Untuned):
            closure()
            opt.step()
        else:
            opt.step(same_sample(inner, net)(wrap(closure)))
        run.states.append(snapshot(net))
    return run


def test_the_factory_knows_the_names(factory, caplog):
    factory.register()  # again: nothing happens
    assert not caplog.records
    assert set(NAMES) <= set(factory.names())
    for name, kind in NAMES.items():
        assert type(factory.kind(name)(network().parameters())) is kind


@pytest.mark.parametrize("name", NAMES)
def test_the_run_is_the_plain_loops(factory, name):
    net = network()
    lr = {} if name == "untuned" else {"lr": 0.5}
    run = train(net, factory.make(net, name.upper(), **lr or {"lr": 1.0}))
    assert_same_runs(run, plain_run(epochs=1, kind=NAMES[name], **lr))
    assert net.evaluations == (BATCHES if name == "untuned" else 2 * BATCHES - 1)


def test_a_learning_rate_for_untuned_is_ignored_with_a_warning(factory):
    net = network()
    with pytest.warns(UserWarning, match=IGNORED) as told:
        opt = factory.make(net, "untuned", lr=0.5)
    assert len(told) == 1
    assert type(opt) is Untuned
    assert [group["lr"] for group in opt.param_groups] == [1.0]
    assert_same_runs(train(net, opt), plain_run(epochs=1, kind=Untuned))


def test_no_learning_rate_is_no_warning_unless_the_factory_has_one(factory, recwarn):
    groups = factory.make(network(), "untuned", weight_decay=0.1).param_groups
    told = [str(warning.message) for warning in recwarn if "is ignored" in str(warning.message)]
    # pytorch_optimizer passes 0.001 on where nothing is said
    assert [text[:8] for text in told] == (["lr=0.001"] if "pytorch" in factory.title else [])
    assert {group["lr"] for group in groups} == {1.0}
    assert {group["weight_decay"] for group in groups} == {0.0, 0.1}


def test_lookahead_is_refused_to_who_takes_pairs(factory):
    with pytest.raises(RuntimeError, match="without it"):
        factory.ahead(network(), "stormplus").step(lambda: None)
    net = network()
    run = train(net, factory.ahead(net, "untuned"))
    assert net.evaluations == run.opt.grad_evaluations == BATCHES
    others = factory.ahead(net, "adamw")
    loss_of(net, *data(1)).backward()
    others.step()


def test_a_script_without_a_closure_is_refused(factory):
    with pytest.raises(TypeError, match="needs a closure"):
        factory.make(network(), "stormplus").step()


# -- timm ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_timm_gives_the_options_that_there_are(timm_optim, name):
    register_timm()
    opt = timm_optim.create_optimizer_v2(network(), name, momentum=0.9, eps=1e-8)
    assert type(opt) is NAMES[name]
    assert opt.param_groups[0]["lr"] == 1.0
    assert timm_optim.get_optimizer_info(name).description


def test_the_pages_lines_for_timm_run(timm_optim):
    (lines,) = re.findall(r"^```text\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    namespace = {"model": network()}
    exec(compile(lines, PAGE.name, "exec"), namespace)
    assert isinstance(namespace["opt"], StormPlus)
    assert namespace["opt"].param_groups[0]["lr"] == 1.0


def test_timm_weight_decay_spares_vectors(timm_optim):
    register_timm()
    net, other = network(), network()
    opt = timm_optim.create_optimizer_v2(net, "stormplus", weight_decay=0.1, norm="mean")
    groups = [
        {"params": [p for p in other.parameters() if p.ndim == 1], "weight_decay": 0.0},
        {"params": [p for p in other.parameters() if p.ndim > 1], "weight_decay": 0.1},
    ]
    assert_same_runs(train(net, opt), train(other, StormPlus(groups, norm="mean")))


# -- pytorch_optimizer ---------------------------------------------------------------------------


def test_pytorch_optimizer_projects_both_gradients(pytorch_optimizer):
    net, other = network(), network()
    opt = pytorch_optimizer.create_optimizer(net, "stormplus", lr=0.5, use_orthograd=True)
    project = pytorch_optimizer.OrthoGrad(torch.optim.SGD(other.parameters()))

    def projected(closure):
        def evaluate():
            loss = closure()
            project.apply_orthogonal_gradients(other.parameters())
            return loss

        return evaluate

    plain = train(other, StormPlus(other.parameters(), lr=0.5), wrap=projected)
    assert_same_runs(train(net, opt), plain)


def test_pytorch_optimizer_may_be_asked_to_compile(pytorch_optimizer):
    if release("pytorch_optimizer") < (4, 0):
        pytest.skip("pytorch_optimizer before 4.0 cannot be asked to compile")
    opt = pytorch_optimizer.create_optimizer(network(), "stormplus", lr=0.5, compile=True)
    assert isinstance(opt, StormPlus)  # it looks whether it is given a class


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
