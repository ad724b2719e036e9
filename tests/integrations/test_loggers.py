"""Loggers return the numbers of `diagnostics()`."""

import pytest
from tests.support.pages import run_example
from tests.support.trainer_cases import plain_run


def test_mlflow(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # a folder, where no database is
    monkeypatch.setenv("GIT_PYTHON_REFRESH", "quiet")
    mlflow.set_tracking_uri((tmp_path / "runs").as_uri())
    numbers = plain_run(epochs=1).opt.diagnostics()
    try:
        with mlflow.start_run() as run:
            mlflow.log_metrics(numbers, step=1)
        assert mlflow.get_run(run.info.run_id).data.metrics == pytest.approx(numbers)
    finally:
        mlflow.set_tracking_uri(None)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
def test_wandb(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    for name in ("WANDB_DIR", "WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")
    numbers = plain_run(epochs=1).opt.diagnostics()
    with wandb.init(mode="offline", project="test", dir=tmp_path) as run:
        run.log(numbers)
        assert {name: run.summary[name] for name in numbers} == pytest.approx(numbers)


def test_tensorboard_in_the_example(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run_example("tensorboard_diagnostics.py", "--samples", 9, "--out", tmp_path)
    events = EventAccumulator(str(next(tmp_path.rglob("events*")).parent)).Reload()
    assert any(len(events.Scalars(tag)) == 9 for tag in events.Tags()["scalars"] if "gain" in tag)
