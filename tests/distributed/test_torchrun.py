"""The examples under torchrun, as a user starts them; and a run that is really killed."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.long

EXAMPLES = Path(__file__).parents[2] / "examples"
SECONDS = 120


def command(size, example, *args, restarts=0):
    return [
        sys.executable, "-m", "torch.distributed.run", "--standalone",
        "--nproc-per-node", str(size), "--max-restarts", str(restarts),
        str(EXAMPLES / example), *map(str, args),
    ]  # fmt: skip


ENVIRONMENT = {
    **os.environ,
    "OMP_NUM_THREADS": "1",
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # as examples/elastic.py asks
}


def torchrun(size, example, *args):
    done = subprocess.run(
        command(size, example, *args),
        check=False, capture_output=True, text=True, timeout=SECONDS, env=ENVIRONMENT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def accuracy(out):
    return float(re.search(r"accuracy on rows not trained on: ([\d.]+)", out)[1])


def test_ddp_example():
    out = torchrun(2, "ddp.py", "--steps", 150)
    assert "identical on all processes: True" in out
    assert "BatchNorm counted 300 micro-batches in 150 steps" in out  # two a step
    assert accuracy(out) > 0.8


def test_fsdp2_example_resumes_with_four_processes_in_two_replicas(tmp_path):
    out = torchrun(2, "fsdp2.py", "--steps", 50, "--save", tmp_path / "half")
    assert "2 processes, steps 0 to 50, 8261 of 16522 here" in out
    resume = ("--resume", tmp_path / "half", "--replicas", 2)
    resumed = torchrun(4, "fsdp2.py", "--steps", 100, *resume)
    assert "4 processes, steps 50 to 100, 8261 of 16522 here" in resumed
    straight = torchrun(2, "fsdp2.py", "--steps", 100)
    numbers = re.compile(r"\|g\| ([\d.]+)  eta ([\d.]+)")
    # Other processes add in another order: float32 agrees to some digits, not to the bit.
    for a, b in zip(numbers.search(resumed).groups(), numbers.search(straight).groups()):
        assert float(a) == pytest.approx(float(b), rel=1e-3)
    assert accuracy(resumed) > 0.8


STEPS = 120


def elastic(out, restarts=0):
    arguments = ("--out", out, "--steps", STEPS, "--every", 10)
    return command(2, "elastic.py", *arguments, restarts=restarts)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    out = tmp_path_factory.mktemp("uninterrupted")
    subprocess.run(elastic(out), check=True, timeout=SECONDS, env=ENVIRONMENT)
    return torch.load(out / "weights.pt")


def start(out, log, restarts):
    with log.open("w") as file:
        return subprocess.Popen(
            elastic(out, restarts), stdout=file, stderr=subprocess.STDOUT, env=ENVIRONMENT
        )


def wait_for_checkpoints(out, process, log, count=3):
    deadline = time.monotonic() + SECONDS
    while len(list(out.glob("step-*/.metadata"))) < count:
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.005)


def workers(log):
    """Process ids and where they started from."""
    found = re.findall(r"rank (\d) is process (\d+) and starts after step (\d+)", log.read_text())
    return [(int(pid), int(step)) for _, pid, step in found]


def assert_same_weights(out, expected):
    weights = torch.load(out / "weights.pt")
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


def test_a_killed_process_is_restarted_and_ends_with_the_same_weights(tmp_path, uninterrupted):
    out, log = tmp_path / "out", tmp_path / "log"
    process = start(out, log, restarts=1)
    wait_for_checkpoints(out, process, log)
    os.kill(workers(log)[1][0], signal.SIGKILL)
    assert process.wait(timeout=SECONDS) == 0, log.read_text()
    starts = [step for _, step in workers(log)]
    assert starts[:2] == [0, 0]
    assert starts[2] == starts[3] >= 30  # both went on from a checkpoint
    assert_same_weights(out, uninterrupted)


def test_a_killed_machine_goes_on_with_the_same_command(tmp_path, uninterrupted):
    out, log = tmp_path / "out", tmp_path / "log"
    process = start(out, log, restarts=0)
    wait_for_checkpoints(out, process, log)
    process.kill()  # first torchrun, which would otherwise notice
    for pid, _ in workers(log):
        os.kill(pid, signal.SIGKILL)
    process.wait(timeout=SECONDS)
    assert not (out / "weights.pt").exists()

    second = start(out, log, restarts=0)
    assert second.wait(timeout=SECONDS) == 0, log.read_text()
    assert all(step >= 30 for _, step in workers(log))
    assert_same_weights(out, uninterrupted)
