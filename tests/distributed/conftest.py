import sys
from pathlib import Path

import pytest

# What these tests share with each other and with the processes they start.
sys.path.append(str(Path(__file__).parent))


@pytest.fixture(scope="session")
def cluster(tmp_path_factory):
    from cluster import Cluster

    with Cluster(tmp_path_factory.mktemp("cluster")) as started:
        yield started
