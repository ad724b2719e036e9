"""Configuration of `benchopt test`: skip data sets that are missing."""

import pytest

from stormplus_bench import data
from stormplus_bench.train.catalogue import or_reason


def check_test_dataset_get_data(benchmark, dataset):
    name = {"long": "mnist"}.get(dataset.name, dataset.name)
    if name in data.NAMES:
        reason = or_reason(lambda: data.load(name))["reason"]
        if reason:
            pytest.skip(reason)
