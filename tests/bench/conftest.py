from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmark"


@pytest.fixture(scope="session")
def benchmark():
    """The benchopt benchmark, which makes `benchmark_utils` importable."""
    benchopt = pytest.importorskip("benchopt.benchmark")
    return benchopt.Benchmark(BENCHMARK, no_cache=True)
