from contextlib import closing

import pytest


@pytest.fixture(scope="session")
def cluster(tmp_path_factory):
    from tests.distributed.cluster import Cluster

    with closing(Cluster(tmp_path_factory.mktemp("cluster"))) as started:
        yield started
