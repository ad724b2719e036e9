"""The older side of differences between versions; `make test-versions` runs real ones."""

import pytest
import torch
from torch import nn

from stormplus import versions


@pytest.fixture
def oldest(monkeypatch):
    """Pretend that torch is 2.4."""
    monkeypatch.setattr(versions, "release", lambda name: (2, 4))


@pytest.mark.parametrize(
    ("text", "numbers"), [("2.13.0+cpu", (2, 13)), ("0.4.35", (0, 4)), ("2.16.0.dev1", (2, 16))]
)
def test_release(text, numbers, monkeypatch):
    monkeypatch.setattr(versions, "version", lambda name: text)
    assert versions.release.__wrapped__("torch") == numbers


def test_version_counters_are_incremented_one_by_one(oldest):
    tensors = [torch.ones(2), torch.ones(3)]
    versions.version_increment()(tensors)
    assert [t._version for t in tensors] == [1, 1]


def test_names_are_split_from_parameters(oldest):
    net = nn.Linear(2, 3)
    group = {"params": net.named_parameters()}
    versions.split_named_parameters(group)
    assert group == {"params": [net.weight, net.bias], "param_names": ["weight", "bias"]}
    for given in (net.weight, [net.weight], {net.weight}, [("weight", net.weight), net.bias]):
        group = {"params": given}
        versions.split_named_parameters(group)
        assert group == {"params": given}


def test_without_explicit_sharding_there_is_no_mesh(monkeypatch):
    jax = pytest.importorskip("jax")
    monkeypatch.delattr(jax, "typeof", raising=False)
    assert versions.explicit_mesh(jax.numpy.ones(3)) is None
    untuned = pytest.importorskip("stormplus.jax").untuned
    untuned().init({"w": jax.numpy.ones((2, 3)), "b": jax.numpy.ones(())})
