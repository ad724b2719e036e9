"""The workloads that are judged by validation."""

import importlib
from pathlib import Path

import pytest
import torch
from torch import nn

from stormplus_bench.train.small_data import SMALL_DATA

ROOT = Path(__file__).parents[2]


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
    assert isinstance(model.head, nn.Linear)
    mask = [1, 1, 1, 0]
    first, second = (model(torch.tensor([[[1, 2, 3, last], mask]])) for last in (4, 19))
    assert first.shape == (1, 3)
    torch.testing.assert_close(first, second)
