"""The optimizers by name, from timm and from pytorch_optimizer."""

import importlib.util
import sys
import types
from types import SimpleNamespace

import pytest
import torch
from tests.support.trainer_cases import SAMPLES, assert_same_runs, data, loss_of, network, plain_run

from stormplus import SimplifiedStormPlus, Storm, StormPlus, Untuned
from stormplus.integrations import factories

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
def pytorch_optimizer(monkeypatch):
    module = pytest.importorskip("pytorch_optimizer")
    inner = sys.modules["pytorch_optimizer.optimizer"]
    for name in NAMES:
        monkeypatch.delitem(inner.OPTIMIZERS, name, raising=False)
    factories.register_pytorch_optimizer()
    return module


@pytest.fixture(params=["timm", "pytorch_optimizer"])
def factory(request):
    """What the two have in common, under one set of names."""
    if request.param == "timm":
        timm = request.getfixturevalue("timm_optim")
        return SimpleNamespace(
            register=factories.register_timm,
            names=timm.list_optimizers,
            make=timm.create_optimizer_v2,
            ahead=lambda net, name: timm.create_optimizer_v2(net, f"lookahead_{name}", lr=1.0),
        )
    other = request.getfixturevalue("pytorch_optimizer")
    return SimpleNamespace(
        register=factories.register_pytorch_optimizer,
        names=other.get_supported_optimizers,
        make=other.create_optimizer,
        ahead=lambda net, name: other.create_optimizer(net, name, lr=1.0, use_lookahead=True),
    )


@pytest.mark.parametrize("name", NAMES)
def test_the_run_is_the_plain_loops(factory, name, caplog):
    for _ in range(2):  # the second time nothing happens
        factory.register()
    assert not caplog.records
    assert name in factory.names()
    kind, lr = NAMES[name], 1.0 if name == "untuned" else 0.5
    run = plain_run(kind=kind, lr=lr, make=lambda net: factory.make(net, name.upper(), lr=lr))
    assert type(run.opt) is kind
    assert_same_runs(run, plain_run(kind=kind, lr=lr))


def test_untuned_ignores_a_learning_rate_and_vectors_do_not_decay(factory):
    factory.register()
    with pytest.warns(UserWarning, match="lr=0.5 is ignored: Untuned"):
        opt = factory.make(network(), "untuned", lr=0.5, weight_decay=0.1)
    assert {(group["lr"], group["weight_decay"]) for group in opt.param_groups} == {
        (1.0, 0.0),
        (1.0, 0.1),
    }


def test_lookahead_is_refused_for_paired_optimizers(factory):
    factory.register()
    with pytest.raises(RuntimeError, match="without it"):
        factory.ahead(network(), "stormplus").step(lambda: None)
    run = plain_run(kind=Untuned, make=lambda net: factory.ahead(net, "untuned"))
    assert run.net.evaluations == run.opt.grad_evaluations == SAMPLES
    others = factory.ahead(run.net, "adamw")
    loss_of(run.net, *data(1)).backward()
    others.step()


def test_pytorch_optimizer_projects_both_gradients(pytorch_optimizer):
    def make(net):
        return pytorch_optimizer.create_optimizer(net, "stormplus", lr=0.5, use_orthograd=True)

    def project(net):
        opt = pytorch_optimizer.OrthoGrad(torch.optim.SGD(net.parameters()))
        opt.apply_orthogonal_gradients(net.parameters())

    assert_same_runs(plain_run(lr=0.5, make=make), plain_run(lr=0.5, process=project))


@pytest.mark.parametrize("extra", ["timm", "pytorch-optimizer"])
def test_a_missing_package_names_the_extra(extra, monkeypatch):
    package = extra.replace("-", "_")
    for name in [name for name in sys.modules if name.split(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ModuleNotFoundError, match=rf"pip install .*\[{extra}\]"):
        getattr(factories, f"register_{package}")()


def test_what_scripts_pass_to_a_class_that_they_import_by_its_name():
    """kohya's scripts: values of --optimizer_args are literals, and groups have their own lr."""
    net, kind = network(), factories.UntunedScheduleFree
    groups = [
        {"params": net.body[0].parameters(), "lr": 1e-4},
        {"params": net.body[4].parameters(), "lr": 5e-5},
    ]
    with pytest.warns(UserWarning, match="is ignored: Untuned") as warned:
        opt = kind(groups, lr=1e-4, weight_decay=0.01, state_dtype="bfloat16")
    assert len(warned) == 1
    assert type(opt) is Untuned
    assert [(g["lr"], g["weight_decay"]) for g in opt.param_groups] == [(1.0, 0.01)] * 2
    assert opt.state[net.body[0].weight]["z_minus_x"].dtype == torch.bfloat16
    # torchtitan's groups have the options of Adam, OneTrainer's call those of Schedule-Free.
    adam = {"betas": (0.9, 0.95), "eps": 1e-8}
    groups = [{"params": net.parameters(), "lr": 1.0, "weight_decay": 0.1, **adam}]
    assert kind(groups).param_groups[0]["weight_decay"] == 0.1
    with pytest.warns(UserWarning, match="no betas, eps, foreach, warmup_steps: leave them out"):
        opt = kind(params=net.parameters(), lr=1.0, foreach=False, warmup_steps=10, **adam)
    assert type(opt) is Untuned
    # Axolotl passes strings.
    opt = kind(net.parameters(), lr=1.0, weight_decay="0.01", maximize="False", state_dtype="None")
    group = opt.param_groups[0]
    assert (group["weight_decay"], group["maximize"]) == (0.01, False)
