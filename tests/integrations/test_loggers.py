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


def test_mlflow(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # a folder, where no database is
    monkeypatch.setenv("GIT_PYTHON_REFRESH", "quiet")
    mlflow.set_tracking_uri((tmp_path / "runs").as_uri())
    try:
        with mlflow.start_run() as run:
            expected = logged(lambda numbers, step: mlflow.log_metrics(numbers, step=step))
        for name in expected[0]:
            history = mlflow.MlflowClient().get_metric_history(run.info.run_id, name)
            assert [m.value for m in history] == pytest.approx([row[name] for row in expected])
    finally:
        mlflow.set_tracking_uri(None)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
def test_wandb(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    for name in ("WANDB_DIR", "WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")
    with wandb.init(mode="offline", project="test", dir=tmp_path) as run:
        expected = logged(lambda numbers, step: run.log(numbers))
        assert {name: run.summary[name] for name in expected[-1]} == pytest.approx(expected[-1])


def test_tensorboard_in_the_example(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run_example("tensorboard_diagnostics.py", "--samples", 9, "--out", tmp_path)
    events = EventAccumulator(str(next(tmp_path.rglob("events*")).parent)).Reload()
    assert any(len(events.Scalars(tag)) == 9 for tag in events.Tags()["scalars"] if "gain" in tag)
