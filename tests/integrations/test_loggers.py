"""Logging `diagnostics()`: a logger returns what the optimizer says, for every step."""

import pytest
from pages import run_example
from trainer_cases import SAMPLES, plain_run


def logged(log):
    """Run the plain loop with `log(numbers, step)` after every sample; return all numbers."""
    expected = []

    def after(opt, *_):
        expected.append(opt.diagnostics())
        log(expected[-1], len(expected))

    def before(step, opt, net):
        if step == 0:
            opt.register_step_post_hook(after)

    plain_run(before=before)
    assert len(expected) == SAMPLES
    return expected


def tensorboard(folder, monkeypatch):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(folder) as writer:

        def log(numbers, step):
            for name, value in numbers.items():
                writer.add_scalar(name, value, step)

        expected = logged(log)
    events = EventAccumulator(str(folder)).Reload()
    return expected, {name: [e.value for e in events.Scalars(name)] for name in expected[0]}


def mlflow(folder, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # a folder, where no database is
    monkeypatch.setenv("GIT_PYTHON_REFRESH", "quiet")
    mlflow.set_tracking_uri((folder / "runs").as_uri())
    try:
        with mlflow.start_run() as run:
            expected = logged(lambda numbers, step: mlflow.log_metrics(numbers, step=step))
        history = mlflow.MlflowClient().get_metric_history
        found = {name: history(run.info.run_id, name) for name in expected[0]}
        return expected, {name: [m.value for m in metrics] for name, metrics in found.items()}
    finally:
        mlflow.set_tracking_uri(None)


def wandb(folder, monkeypatch):
    wandb = pytest.importorskip("wandb")
    for name in ("WANDB_DIR", "WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(folder))
    monkeypatch.setenv("WANDB_SILENT", "true")
    with wandb.init(mode="offline", project="test", dir=folder) as run:
        expected = logged(lambda numbers, step: run.log(numbers))
        return expected[-1:], {name: [run.summary[name]] for name in expected[-1]}


@pytest.mark.filterwarnings(
    "ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::ResourceWarning"
)
@pytest.mark.parametrize("logger", [tensorboard, mlflow, wandb], ids=lambda f: f.__name__)
def test_every_number_of_every_step_is_logged(logger, tmp_path, monkeypatch):
    expected, found = logger(tmp_path, monkeypatch)
    for name, values in found.items():
        assert values == pytest.approx([numbers[name] for numbers in expected])


def test_the_example_runs(tmp_path):
    pytest.importorskip("tensorboard")
    out = run_example("tensorboard_diagnostics.py", "--samples", 9, "--out", tmp_path)
    assert "9 samples logged" in out
