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

from tests.torch.optimizers import assert_same

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


def test_a_killed_process_is_restarted_and_ends_with_the_same_weights(tmp_path):
    def elastic(name, restarts=0):
        arguments = ("--out", tmp_path / name, "--steps", 120, "--every", 10)
        return command(2, "elastic.py", *arguments, restarts=restarts)

    def workers():
        """Process ids, and after which step they started."""
        found = re.findall(r"is process (\d+) and starts after step (\d+)", log.read_text())
        return [(int(pid), int(step)) for pid, step in found]

    subprocess.run(elastic("whole"), check=True, timeout=SECONDS, env=ENVIRONMENT)
    log, deadline = tmp_path / "log", time.monotonic() + SECONDS
    with log.open("w") as file:
        process = subprocess.Popen(
            elastic("killed", restarts=1), stdout=file, stderr=subprocess.STDOUT, env=ENVIRONMENT
        )
    while len(list(tmp_path.glob("killed/step-*/.metadata"))) < 3:
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.005)
    os.kill(workers()[1][0], signal.SIGKILL)
    assert process.wait(timeout=SECONDS) == 0, log.read_text()
    starts = [step for _, step in workers()]
    assert starts[:2] == [0, 0]
    assert starts[2] == starts[3] >= 30  # both went on from a checkpoint
    whole, killed = (torch.load(tmp_path / name / "weights.pt") for name in ("whole", "killed"))
    assert_same(killed, whole)
