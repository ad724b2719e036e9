"""Ways of a model and its optimizer into another pair: what a user saves and loads."""

import io

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)


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
    dcp.save({"model": weights, "opt": state}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    weights, state = get_state_dict(new_model, new_opt, options=options)
    dcp.load({"model": weights, "opt": state}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    set_state_dict(
        new_model, new_opt, model_state_dict=weights, optim_state_dict=state, options=options
    )


def through_flat_dcp(*arguments):
    through_dcp(*arguments, flat=True)
