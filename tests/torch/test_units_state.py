"""Untuned: a copied or resumed run is the run, bit by bit, also at the average."""

import copy
import pickle

import pytest
import torch
from checkpoint_ways import through_dcp, through_torch_save
from problems_for_tests import Network
from torch import nn

from stormplus import SimplifiedStormPlus, Storm, StormPlus, Untuned

BOTH = pytest.mark.parametrize("correction", [False, True])
DTYPES = [torch.float64, torch.float32, torch.bfloat16]


class Model(nn.Module):
    """The test network as a module, so that a checkpoint has names."""

    def __init__(self, problem, dtype=torch.float64):
        super().__init__()
        self.problem = problem
        self.weights = nn.ParameterList(problem.parameters(dtype))

    def train_on(self, opt, samples):
        self.problem.run(opt, list(self.weights), samples)


def made(dtype=torch.float64, seed=0, **options):
    model = Model(Network(seed, samples=20), dtype)
    return model, Untuned(model.parameters(), 0.3, **options)


def values(model):
    return [p.detach().clone() for p in model.parameters()]


def same(ours, theirs):
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@BOTH
@pytest.mark.parametrize("averaged", [False, True])
@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))], ids=["copy", "pickle"]
)
def test_copies_go_on_alike_and_apart(correction, averaged, copied):
    options = {"correction": correction, "gradient": 0.5, "scope": "tensor"}
    model, opt = made(**options)
    model.train_on(opt, model.problem.samples[:8])
    if averaged:
        opt.eval()
    twin, twin_opt = copied((model, opt))
    assert twin_opt.pairs == correction
    assert twin_opt.at_average == averaged
    for net, optimizer in ((model, opt), (twin, twin_opt)):
        optimizer.train()
        net.train_on(optimizer, model.problem.samples[8:])
    assert same(values(model), values(twin))
    assert opt.diagnostics() == twin_opt.diagnostics()
    assert opt.diagnostics()["step"] == 20
    opt.eval()
    twin_opt.eval()
    assert same(values(model), values(twin))


WAYS = pytest.mark.parametrize("way", [through_torch_save, through_dcp])
QUIET = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


@QUIET
@WAYS
@BOTH
@pytest.mark.parametrize("averaged", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", [{}, {"scope": "tensor", "distance": 0.05}], ids=str)
def test_a_resumed_run_is_the_run(way, correction, averaged, dtype, options, tmp_path):
    options = options | {"correction": correction, "weight_decay": 0.01}
    whole, reference = made(dtype, **options)
    whole.train_on(reference, whole.problem.samples)
    model, opt = made(dtype, **options)
    model.train_on(opt, whole.problem.samples[:8])
    resumed, new_opt = made(dtype, seed=9, **options)
    if averaged:
        opt.eval()
        new_opt.eval()  # torch's distributed checkpoint loads only what is there already
    way(model, opt, resumed, new_opt, tmp_path)
    assert new_opt.at_average == averaged
    assert same(values(model), values(resumed))
    new_opt.train()
    resumed.train_on(new_opt, whole.problem.samples[8:])
    assert same(values(whole), values(resumed))
    assert reference.diagnostics() == new_opt.diagnostics()
    for a, b in zip(whole.parameters(), resumed.parameters()):
        for name in reference.buffers:
            ours, theirs = new_opt.state[b][name], reference.state[a][name]
            assert torch.equal(ours, theirs)
            assert ours.dtype == theirs.dtype


def test_a_state_saved_at_the_average_loads_into_a_fresh_optimizer():
    model, opt = made()
    model.train_on(opt, model.problem.samples[:8])
    x = values(model)
    opt.eval()
    resumed, new_opt = made(seed=9)
    through_torch_save(model, opt, resumed, new_opt, None)
    new_opt.train()
    assert same(values(resumed), x)


@QUIET
def test_an_average_without_its_iterate_is_refused(tmp_path):
    model, opt = made()
    model.train_on(opt, model.problem.samples[:8])
    opt.eval()
    resumed, new_opt = made()
    with pytest.raises(
        ValueError, match=r"saved after eval\(\).*Call opt.eval\(\) before you load"
    ):
        through_dcp(model, opt, resumed, new_opt, tmp_path)


def trained(cls=Untuned, **options):
    model = Model(Network(samples=3))
    opt = cls(model.parameters(), **options)
    model.train_on(opt, model.problem.samples)
    return opt.state_dict()


@pytest.mark.parametrize(
    ("own", "state", "message"),
    [
        ({}, lambda: trained(torch.optim.Adam), "not the state of Untuned .*exp_avg"),
        ({}, lambda: trained(StormPlus), "'StormPlusRule', Untuned has 'UnitsRule'"),
        ({"distance": 1.0}, lambda: trained(StormPlus), "'StormPlusRule', Untuned has"),
        ({}, lambda: trained(Storm), "rule 'StormRule'"),
        ({}, lambda: trained(correction=True), "rule 'CorrectedUnitsRule', .*has 'UnitsRule'"),
        ({"correction": True}, trained, "rule 'UnitsRule', .*has 'CorrectedUnitsRule'"),
        ({}, lambda: trained(distance=0.5), "distance=0.5, .* has distance=None"),
        ({"gradient": 2}, lambda: trained(gradient=3), "gradient=3.0, .* has gradient=2.0"),
        ({"gradient": 2}, trained, "gradient=None, .* has gradient=2.0"),
        ({}, lambda: trained(average=False), "average=False, .* has average=True"),
        ({"average": False}, trained, "average=True, .* has average=False"),
        ({}, lambda: trained(scope="tensor"), "scope 'tensor'"),
    ],
)
def test_other_states_are_refused_and_nothing_is_lost(own, state, message):
    model, opt = made(**own)
    model.train_on(opt, model.problem.samples[:5])
    before, numbers = copy.deepcopy(opt.state_dict()["state"]), opt.diagnostics()
    with pytest.raises(ValueError, match=message):
        opt.load_state_dict(state())
    assert opt.diagnostics() == numbers
    for i, entry in opt.state_dict()["state"].items():
        assert entry.keys() == before[i].keys()
        assert all(torch.equal(entry[name], before[i][name]) for name in opt.buffers)


def test_the_state_of_storm_plus_does_not_take_ours():
    model = Model(Network(samples=3))
    with pytest.raises(ValueError, match="'CorrectedUnitsRule', StormPlus has 'StormPlusRule'"):
        StormPlus(model.parameters()).load_state_dict(trained(correction=True))


def test_the_numbers_of_the_rules_in_saved_states_stay_what_they_were():
    codes = [
        trained(cls, **options)["state"][0]["rule"]
        for cls, options in (
            (StormPlus, {}),
            (SimplifiedStormPlus, {}),
            (Storm, {}),
            (Untuned, {"correction": True}),
            (Untuned, {}),
        )
    ]
    assert codes == [0, 1, 2, 4, 5]  # 3 is a rule of one's own
