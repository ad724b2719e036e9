"""The tiers `long` and `small-data`: their workloads and methods; the study's committed page."""

import importlib
from functools import partial
from pathlib import Path

import pytest
import torch
from benchopt.benchmark import Benchmark, _list_parametrized_classes

from stormplus_bench.methods import METHODS, TIERS
from stormplus_bench.plan import FOLDER, read_suite, suites
from stormplus_bench.train import catalogue, long, networks
from stormplus_bench.train.small_data import SMALL_DATA
from stormplus_bench.train.training import Training

ROOT = Path(__file__).parents[2]


@pytest.fixture
def small(monkeypatch):
    """Pictures of noise instead of CIFAR-10, whose class shows in their brightness."""
    generator = torch.Generator().manual_seed(0)

    def split(count):
        labels = torch.arange(count) % 10
        noise = torch.randint(100, (count, 3, 32, 32), generator=generator)
        return (noise + 15 * labels[:, None, None, None]).to(torch.uint8), labels

    train, valid = split(400), split(100)
    monkeypatch.setattr(catalogue, "pictures", lambda name: (train, valid))
    monkeypatch.setattr(long, "TRAINED", 20)
    long._trained.cache_clear()
    yield
    long._trained.cache_clear()


def methods(names):
    found = Benchmark(FOLDER, no_cache=True).check_solver_patterns(names)
    return [solver for solver, _ in _list_parametrized_classes(*found)]


def test_the_held_out_workloads_have_the_methods_of_the_others_and_are_not_among_them():
    seen, held_out = (read_suite(name) for name in ("long", "long-held-out"))
    assert seen["solver"] == held_out["solver"]
    assert seen["objective"] == held_out["objective"]
    names = [set(suite["dataset"][0]["long"]["workload"]) for suite in (seen, held_out)]
    assert names[1] == {"vit-cifar10", "lora-cifar10"}
    assert not names[0] & names[1]
    assert names[0] | names[1] == set(long.LONG)


@pytest.mark.parametrize("name", suites())
def test_the_solvers_of_every_suite_are_methods_of_the_benchmark(name):
    assert {solver.method for solver in methods(read_suite(name)["solver"])} <= set(METHODS)


@pytest.mark.parametrize("name", ["mars-approximate", "muon", "untuned[lr=0.1]"])
def test_a_run_that_makes_no_sense_is_skipped_with_its_reason(name):
    (solver,) = methods([name])
    assert "no" in solver.reason_to_skip(catalogue.nmf())


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_convolution_of_tiny_images_equals_torchs(size, stride):
    layer, x = networks.Conv3x3(3, 5, stride), torch.randn(4, 3, size, size)
    expected = torch.nn.functional.conv2d(x, layer.weight, stride=stride, padding=1)
    torch.testing.assert_close(layer(x), expected, rtol=1e-4, atol=1e-5)


def test_resnet34_has_the_size_of_its_paper():
    assert sum(p.numel() for p in networks.resnet34(1000).parameters()) == 21_797_672


@pytest.mark.long
@pytest.mark.usefixtures("small")
def test_every_method_trains_what_is_to_be_trained_and_nothing_else():
    """On low-rank changes with BatchNorm: most weights have no gradient."""
    workload = long.LONG["lora-cifar10"]()
    workload.budget = 4
    solvers = methods(read_suite("long")["solver"])
    assert len(solvers) == 23
    assert {long.LONG[n]().name for n in ("vit-cifar10", "finetune-cifar10")} <= {*TIERS["long"]}
    for solver in solvers:
        run = Training(workload, partial(solver.stepper, lr=solver.rate), 0)
        before = {name: p.detach().clone() for name, p in run.model.named_parameters()}
        run.advance(4)
        assert run.status == "done", solver.method
        for name, p in run.model.named_parameters():
            assert p.requires_grad == (name[:3] == "10." or name[-2:] in (".A", ".B")), name
            if not p.requires_grad:
                assert torch.equal(p, before[name]), (solver.method, name)
        assert not torch.equal(run.model[10].bias, before["10.bias"]), solver.method
        assert run.record()["train_loss"] > 0
        assert run.stepper.state_mb < 0.5  # of 31,000 weights 7,000 are trained


@pytest.mark.usefixtures("small")
def test_fine_tuning_starts_from_what_the_first_half_has_taught():
    tuned, changed = long.LONG["finetune-cifar10"](), long.LONG["lora-cifar10"]()
    models = [workload.model(1).eval() for workload in (tuned, changed)]
    body = long._trained()[:-1].eval()
    inputs, targets = tuned.train.tensors
    x = catalogue.standard(inputs[:4])
    for model in models:  # B = 0: the changes begin at nothing
        torch.testing.assert_close(model[:-1](x), body(x))
    assert len(tuned.checkpoints) == 7
    assert set(targets.tolist()) == set(range(5))
    assert len(inputs) == 200
    assert all(p.requires_grad for p in models[0].parameters())
    with torch.no_grad():  # every run has a copy of its own
        models[0][0].weight.zero_()
    torch.testing.assert_close(tuned.model(1)[0].weight, body[0].weight)


def test_crops_and_flips_move_and_mirror_and_nothing_more():
    # Every pixel has its own value: 1 + row + 32 column. A changed picture is one of 9 x 9 shifts
    # of the padded picture, mirrored or not.
    place = (1 + torch.arange(32)[:, None] + 32 * torch.arange(32)).expand(3, 32, 32)
    padded = torch.nn.functional.pad(place, (4, 4, 4, 4))
    shifts = [padded[:, i : i + 32, j : j + 32] for i in range(9) for j in range(9)]
    possible = {tuple(s.flatten().tolist()): k for k, s in enumerate(shifts)}
    possible |= {tuple(s.flip(2).flatten().tolist()): 81 + k for k, s in enumerate(shifts)}
    images = place.expand(200, 3, 32, 32)
    changed, again = (
        long.crops_and_flips(images, torch.Generator().manual_seed(0)) for _ in range(2)
    )
    assert torch.equal(changed, again)
    seen = {possible[tuple(image.flatten().tolist())] for image in changed}
    assert len(seen) > 80  # of 162


def test_the_noisy_digits_are_twenty_epochs_of_1400_images():
    workload = SMALL_DATA["resnet-noisy-digits"]()
    assert len(workload.train) == 1400
    assert len(workload.valid) == 397
    assert workload.budget == 20 * 43
    images, labels = workload.train[:]
    assert images.min() < -0.3  # the noise; the images are between 0 and 1
    assert labels.unique().tolist() == list(range(10))
    assert workload.measure(workload.model(0))["train_loss"] == pytest.approx(2.3, abs=0.1)


def test_the_encoder_ignores_padding(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "research")
    Encoder = importlib.import_module("untuned_docstrings").Encoder
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.BertConfig(vocab_size=20, intermediate_size=8, **sizes)
    transformers.BertModel(config, add_pooling_layer=False).save_pretrained(tmp_path)
    model = Encoder(tmp_path, classes=3).eval()
    assert isinstance(model.head, torch.nn.Linear)
    mask = [1, 1, 1, 0]
    first, second = (model(torch.tensor([[[1, 2, 3, last], mask]])) for last in (4, 19))
    assert first.shape == (1, 3)
    torch.testing.assert_close(first, second)


@pytest.mark.long
def test_the_study_says_what_its_rows_say(tmp_path, monkeypatch):
    """The committed tables are those that `make untuned` writes."""
    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(ROOT / "research")
    study = importlib.import_module("untuned_study")
    page = study.PAGE.read_text()
    for name in ("PAGE", "FIGURE"):
        monkeypatch.setattr(study, name, tmp_path / getattr(study, name).name)
    study.PAGE.write_text(page)
    study.main()
    assert study.PAGE.read_text() == page
