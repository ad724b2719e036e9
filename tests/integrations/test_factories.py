"""The optimizers by name, from timm and from pytorch_optimizer."""

import importlib
import importlib.util
import sys
import types
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
    with pytest.warns(UserWarning, match="lr=0.5 is ignored: Untuned"):
        opt = factory.make(net, "untuned", lr=0.5)
    assert type(opt) is Untuned
    assert_same_runs(train(net, opt), plain_run(epochs=1, kind=Untuned))


@pytest.mark.filterwarnings("ignore:lr=0.001 is ignored")  # pytorch_optimizer's default
def test_weight_decay_spares_vectors(factory):
    groups = factory.make(network(), "untuned", weight_decay=0.1).param_groups
    assert {group["weight_decay"] for group in groups} == {0.0, 0.1}


def test_lookahead_is_refused_for_paired_optimizers(factory):
    with pytest.raises(RuntimeError, match="without it"):
        factory.ahead(network(), "stormplus").step(lambda: None)
    net = network()
    run = train(net, factory.ahead(net, "untuned"))
    assert net.evaluations == run.opt.grad_evaluations == BATCHES
    others = factory.ahead(net, "adamw")
    loss_of(net, *data(1)).backward()
    others.step()


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
    assert isinstance(opt, StormPlus)  # it checks that it gets a class


@pytest.mark.parametrize(
    ("register", "extra"),
    [(register_timm, "timm"), (register_pytorch_optimizer, "pytorch-optimizer")],
    ids=["timm", "pytorch_optimizer"],
)
def test_a_missing_package_is_named(monkeypatch, register, extra):
    package = extra.replace("-", "_")
    for name in [name for name in sys.modules if name.split(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ModuleNotFoundError, match=rf"pip install .*\[{extra}\]"):
        register()


def test_what_scripts_pass_to_a_class_that_they_import_by_its_name():
    """kohya's scripts: values of --optimizer_args are literals, and groups have their own lr."""
    path = "stormplus.integrations.factories.UntunedScheduleFree"
    kind = getattr(importlib.import_module(path.rpartition(".")[0]), path.rpartition(".")[2])
    net = network()
    groups = [
        {"params": net.body[0].parameters(), "lr": 1e-4},
        {"params": net.body[4].parameters(), "lr": 5e-5},
    ]
    with pytest.warns(UserWarning, match="is ignored: Untuned") as warned:
        opt = kind(groups, lr=1e-4, weight_decay=0.01, state_dtype="bfloat16")
    assert len(warned) == 1
    assert type(opt) is Untuned
    assert [group["lr"] for group in opt.param_groups] == [1.0, 1.0]
    assert opt.param_groups[0]["weight_decay"] == 0.01
    assert opt.state[net.body[0].weight]["z_minus_x"].dtype == torch.bfloat16
    # Axolotl passes strings.
    opt = kind(net.parameters(), lr=1.0, weight_decay="0.01", maximize="False", state_dtype="None")
    group = opt.param_groups[0]
    assert (group["weight_decay"], group["maximize"]) == (0.01, False)
