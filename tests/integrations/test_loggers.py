"""`diagnostics()` in one line: what is logged is what the optimizer says, every step."""

import pytest
from pages import run_example
from trainer_cases import SAMPLES, plain_run


def logged(log):
    """Run the plain loop with `log(opt, step)` after every sample; what it should have seen."""
    expected = []

    def before(step, opt, net):
        def after(opt, *_):
            log(opt, len(expected) + 1)
            expected.append(opt.diagnostics())

        if step == 0:
            opt.register_step_post_hook(after)

    plain_run(before=before)
    assert [int(row["grad_evaluations"]) for row in expected] == [
        2 * t - 1 for t in range(1, SAMPLES + 1)
    ]
    return expected


def test_tensorboard(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(tmp_path) as writer:

        def log(opt, step):
            for name, value in opt.diagnostics().items():
                writer.add_scalar(f"storm/{name}", value, step)

        expected = logged(log)

    events = EventAccumulator(str(tmp_path)).Reload()
    for name in expected[0]:
        seen = events.Scalars(f"storm/{name}")
        assert [event.step for event in seen] == list(range(1, SAMPLES + 1))
        assert [event.value for event in seen] == pytest.approx([row[name] for row in expected])


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_mlflow(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # a folder, where no database is
    monkeypatch.setenv("GIT_PYTHON_REFRESH", "quiet")
    mlflow.set_tracking_uri((tmp_path / "runs").as_uri())
    try:
        with mlflow.start_run() as run:
            expected = logged(lambda opt, step: mlflow.log_metrics(opt.diagnostics(), step=step))
        client = mlflow.MlflowClient()
        for name in expected[0]:
            seen = client.get_metric_history(run.info.run_id, name)
            assert [metric.step for metric in seen] == list(range(1, SAMPLES + 1))
            assert [metric.value for metric in seen] == [row[name] for row in expected]
    finally:
        mlflow.set_tracking_uri(None)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
def test_wandb(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    for name in ("WANDB_DIR", "WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")
    with wandb.init(mode="offline", project="test", dir=tmp_path) as run:
        expected = logged(lambda opt, step: run.log(opt.diagnostics()))
        summary = dict(run.summary)
    assert {name: summary[name] for name in expected[-1]} == pytest.approx(expected[-1])
    assert list(tmp_path.rglob("*.wandb"))


def test_the_example_runs(tmp_path):
    pytest.importorskip("tensorboard")
    out = run_example("tensorboard_diagnostics.py", "--samples", 9, "--out", tmp_path)
    assert "9 samples logged" in out
