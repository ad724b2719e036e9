"""How users save a model with its optimizer, and load them into others."""

import io
import warnings
from contextlib import contextmanager

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)

from stormplus.versions import release


def through_torch_save(model, opt, new_model, new_opt, tmp_path):
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "opt": opt.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    new_model.load_state_dict(saved["model"])
    new_opt.load_state_dict(saved["opt"])


def through_dcp(model, opt, new_model, new_opt, tmp_path, *, flat=False):
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    weights, state = get_state_dict(model, opt, options=options)
    dcp_save({"model": weights, "opt": state}, tmp_path / "dcp")
    weights, state = get_state_dict(new_model, new_opt, options=options)
    dcp_load({"model": weights, "opt": state}, tmp_path / "dcp")
    set_state_dict(
        new_model, new_opt, model_state_dict=weights, optim_state_dict=state, options=options
    )


def through_flat_dcp(*arguments):
    if release("torch") < (2, 10):
        pytest.skip("torch flattens no nested state before 2.10")
    through_dcp(*arguments, flat=True)


def dcp_save(state, folder):
    with alone():
        dcp.save(state, checkpoint_id=folder)


def dcp_load(state, folder):
    with alone():
        dcp.load(state, checkpoint_id=folder)


@contextmanager
def alone():
    """Ignore the warning of torch's checkpoint that there is only one process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is", UserWarning)
        yield
