"""The trainers are installed for the long parts only, so all of these tests are long."""

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

HERE = Path(__file__).parent
TRAINERS = ("accelerate", "fastai", "huggingface", "keras", "lightning", "skorch")
PACKAGES = dict(zip(TRAINERS, TRAINERS)) | {"huggingface": "transformers"}
collect_ignore = [f"test_{name}.py" for name in TRAINERS if find_spec(PACKAGES[name]) is None]
THEIRS = [  # warnings of the trainers' own
    "ignore:.*does not have many workers",  # Lightning's
    "ignore:.*isinstance.treespec, LeafSpec",
    "ignore:Checkpoint directory .* exists",
    "ignore:__array__ implementation:DeprecationWarning",  # Keras's: NumPy 1's way to an array
    "ignore:mtime may not be reliable:UserWarning",  # transformers's, of quick checkpoints
    "ignore:numpy.core is deprecated:DeprecationWarning",  # fastai's, from learn.load
]


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(items):
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.long)
            item.add_marker(pytest.mark.filterwarnings(*THEIRS))


@pytest.fixture(autouse=True)
def _fresh_accelerate():
    """Accelerate keeps its settings for the whole process."""
    yield
    if "accelerate.state" in sys.modules:
        states = sys.modules["accelerate.state"]
        states.AcceleratorState._reset_state(True)
        states.GradientState._reset_state()
