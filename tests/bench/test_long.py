"""The tier `long`: its workloads, its methods, and what is held out."""

import importlib.util
from pathlib import Path

import pytest
import torch
from bench_rows import frame_of, make_row
from benchopt.benchmark import Benchmark, _list_parametrized_classes

from stormplus_bench.methods import METHODS, TIERS
from stormplus_bench.plan import FOLDER, read_suite
from stormplus_bench.train import catalogue, long
from stormplus_bench.train.training import Training

pytestmark = pytest.mark.usefixtures("one_thread")
ROOT = Path(__file__).parents[2]
HELD_OUT = {"vit-cifar10", "lora-cifar10"}


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


def methods():
    found = Benchmark(FOLDER, no_cache=True).check_solver_patterns(read_suite("long")["solver"])
    return [solver for solver, _ in _list_parametrized_classes(*found)]


def test_the_held_out_workloads_have_the_methods_of_the_others_and_are_not_among_them():
    suites = [read_suite(name) for name in ("long", "long-held-out")]
    assert suites[0]["solver"] == suites[1]["solver"]
    assert suites[0]["objective"] == suites[1]["objective"]
    names = [set(suite["dataset"][0]["long"]["workload"]) for suite in suites]
    assert names[1] == HELD_OUT
    assert not names[0] & names[1]
    assert names[0] | names[1] == set(long.LONG)
    path = FOLDER / "configs" / "long.yml"
    assert {solver.method for solver in methods()} <= set(METHODS)
    comment = next(line for line in path.read_text().splitlines() if "HELD OUT" in line)
    assert all(name in comment for name in HELD_OUT)


@pytest.mark.long
@pytest.mark.usefixtures("small")
def test_every_method_trains_what_is_to_be_trained_and_nothing_else():
    """On low-rank changes with BatchNorm: most weights have no gradient."""
    workload = long.lora()
    workload.budget = 4
    assert len(methods()) == 17
    assert {long.vit().name, long.lora().name, long.finetune().name} <= set(TIERS["long"])
    for solver in methods():
        lr = solver.default_lr if solver.lr is None else solver.lr
        run = Training(workload, lambda t, s=solver, lr=lr: s.stepper(t, lr), 0)
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
    tuned, changed = long.finetune(), long.lora()
    models = [workload.model(1).eval() for workload in (tuned, changed)]
    body = long._trained()[:-1].eval()
    x = catalogue.standard(tuned.train[0][:4])
    for model in models:  # B = 0: the changes begin at nothing
        torch.testing.assert_close(model[:-1](x), body(x))
    assert set(tuned.train[1].tolist()) == set(range(5))
    assert len(tuned.train[0]) == 200
    assert all(p.requires_grad for p in models[0].parameters())
    with torch.no_grad():  # every run has a copy of its own
        models[0][0].weight.zero_()
    torch.testing.assert_close(tuned.model(1)[0].weight, body[0].weight)


@pytest.mark.long
@pytest.mark.usefixtures("small")
def test_long_runs_are_measured_seven_times_and_learn():
    for name in ("resnet-cifar10", "finetune-cifar10"):
        workload = long.LONG[name]()
        assert len(workload.checkpoints) == 7
        assert workload.budget in workload.checkpoints
        workload.budget = 30
        solver = methods()[0]
        run = Training(workload, lambda t, s=solver: s.stepper(t, 1.0), 0)
        first = run.record()["train_loss"]
        run.advance(30)
        assert run.record()["train_loss"] < first


def test_crops_and_flips_move_and_mirror_and_nothing_more():
    # A picture whose pixels tell their place: 1 + row + 32 column is at most 1024.
    place = 1 + torch.arange(32)[:, None] + 32 * torch.arange(32)
    images = place.expand(200, 3, 32, 32)
    changed = long.crops_and_flips(images, torch.Generator().manual_seed(0))
    again = long.crops_and_flips(images, torch.Generator().manual_seed(0))
    assert torch.equal(changed, again)
    assert changed.shape == images.shape
    seen = set()
    for image in changed:
        assert torch.equal(image[0], image[2])
        rows, columns = (image[0] - 1) % 32, (image[0] - 1) // 32
        middle = slice(8, 24)  # never at the black edge
        down = (rows - torch.arange(32)[:, None])[middle, middle].unique()
        straight = (columns - torch.arange(32))[middle, middle].unique()
        mirrored = (columns + torch.arange(32) - 31)[middle, middle].unique()
        assert len(down) == 1
        assert (len(straight) == 1) != (len(mirrored) == 1)
        across = straight if len(straight) == 1 else mirrored
        assert abs(int(down)) <= 4
        assert abs(int(across)) <= 4
        seen.add((int(down), len(straight) == 1))
    assert len(seen) == 18  # nine rows, mirrored or not


@pytest.fixture
def script():
    path = ROOT / "benchmark" / "scripts" / "long.py"
    spec = importlib.util.spec_from_file_location("long_table", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_each_method_is_at_its_best_rate_in_the_tables(script):
    same = {"workload": "finetune-cifar10"}
    frame = frame_of(
        [
            make_row([5, 1], method="Adam", lr=0.1, **same),
            make_row([5, 3], method="Adam", lr=1.0, **same),
            make_row([5, 2], method="Untuned", lr=1.0, seed=0, **same),
            make_row([5, 4], method="Untuned", lr=1.0, seed=1, **same),
        ]
    )
    found = script.tables_of(frame)
    assert "| Untuned | 50 | 50 |" in found["long"]  # ends at 3 on average, of 5 -> 1
    assert "| Adam | 1 |" in found["long-validation"]  # the validation loss is the training loss


@pytest.mark.long
def test_the_page_says_what_the_rows_say(script, tmp_path, monkeypatch):
    """The committed tables are those that `make long` writes."""
    monkeypatch.chdir(ROOT)
    page = script.PAGE.read_text()
    monkeypatch.setattr(script, "PAGE", tmp_path / "benchmark.md")
    script.PAGE.write_text(page)
    script.main([])
    assert script.PAGE.read_text() == page
