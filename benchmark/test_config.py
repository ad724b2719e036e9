"""What `benchopt test` should know: data that is not there is skipped, with the reason."""

import pytest
from benchmark_utils.availability import or_reason

from stormplus.bench import data


def check_test_dataset_get_data(benchmark, dataset):
    name = {"paper": "cifar10"}.get(dataset.name, dataset.name)
    if name in data.NAMES:
        reason = or_reason(lambda: data.load(name))["reason"]
        if reason:
            pytest.skip(reason)
