"""Untuned in the benchmark, and the tables of its study."""

import importlib.util
from pathlib import Path

import pytest
import torch

from stormplus import Untuned
from stormplus_bench.train.catalogue import digits
from stormplus_bench.train.steppers import AtAverage
from stormplus_bench.train.training import Training

ROOT = Path(__file__).parents[2]


@pytest.mark.usefixtures("one_thread")
def test_the_average_is_measured_and_the_run_continues_from_the_iterate():
    def weights(model):
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    runs = [
        Training(digits("mlp"), lambda t: AtAverage(Untuned(t.model.parameters())), 0)
        for _ in range(2)
    ]
    for run in runs:
        run.advance(20)
    iterate = weights(runs[0].model)
    assert not torch.equal(weights(runs[0].stepper.result(runs[0])), iterate)
    runs[0].stepper.resume()
    for run in runs:
        run.advance(40)
    assert torch.equal(weights(runs[0].model), weights(runs[1].model))


@pytest.mark.long
def test_the_study_page_says_what_the_rows_say(tmp_path, monkeypatch):
    """The committed tables are those that `make untuned` writes."""
    path = ROOT / "research" / "untuned_study.py"
    spec = importlib.util.spec_from_file_location("untuned_study", path)
    study = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(study)
    page = study.PAGE.read_text()
    for name in ("PAGE", "FIGURE"):
        monkeypatch.setattr(study, name, tmp_path / getattr(study, name).name)
    study.PAGE.write_text(page)
    study.main()
    assert study.PAGE.read_text() == page
    assert study.FIGURE.stat().st_size > 10_000
