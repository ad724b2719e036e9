"""Configuration of `benchopt test`: skip data sets that are missing."""

import pytest

from stormplus_bench import data


def check_test_dataset_get_data(benchmark, dataset):
    name = {"long": "shakespeare"}.get(dataset.name, dataset.name)
    if name in data.NAMES:
        try:
            data.load(name)
        except data.MissingData as missing:
            pytest.skip(str(missing))
