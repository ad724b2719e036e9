"""Steps inside the user's torch.compile."""

import pytest
import torch
from torch import nn

from stormplus import StormPlus, Untuned
from tests.torch.optimizers import Run, values


# torch warns about itself when any optimizer's closure returns a loss inside torch.compile
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_a_pair_inside_the_users_torch_compile():
    """The optimizer itself stays outside the graph; the result is that of the plain call."""
    ends = []
    for wrap in (lambda step: step, torch.compile):
        run, calls = Run(StormPlus, dtype=torch.float32, lr=0.3), []
        step = wrap(run.opt.step)
        for i in range(4):
            step(run.closure(i, calls))
        assert len(calls) == 7
        ends.append(values(run.params))
    torch.testing.assert_close(*ends, rtol=1e-4, atol=1e-6)


def untuned_run(wrap, **options):
    """Return the parameters after four steps with given gradients."""
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(shape)) for shape in [(20, 30), (30,), (1, 30)]]
    opt = Untuned(params, **options)
    step = wrap(opt.step)
    for _ in range(4):
        for p in params:
            p.grad = torch.randn_like(p)
        step()
    return values(params)


BF16_STATE = {"state_dtype": torch.bfloat16}


@pytest.mark.skipif(torch.__version__.startswith("2.4."), reason="docs/versions.md: a known limit")
@pytest.mark.parametrize(
    ("backend", "options"),
    [
        pytest.param("aot_eager", {}, id="aot_eager"),
        pytest.param("inductor", {}, id="inductor", marks=pytest.mark.long),
        pytest.param("inductor", BF16_STATE, id="bfloat16 state", marks=pytest.mark.long),
    ],
)
def test_untuned_compiles_without_a_graph_break_and_equals_eager(backend, options):
    torch._dynamo.reset()
    compiled = untuned_run(
        lambda step: torch.compile(step, fullgraph=True, backend=backend), **options
    )
    tolerance = 1e-2 if options else 1e-5
    eager = untuned_run(lambda step: step, **options)
    torch.testing.assert_close(compiled, eager, rtol=tolerance, atol=tolerance)
