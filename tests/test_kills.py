"""States of streams, trainings and federated rounds: a process killed between any two writes loses and repeats nothing.

After every kill the job goes on, publishes in every bit what a job that was never killed does, and is charged once.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def killed():
    """(job, careless) -> the cuts, and what went wrong."""
    worker = Path(__file__).with_name("kill_worker.py")
    with subprocess.Popen(
        [sys.executable, worker], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:

        def run(job, careless):
            if job not in ("stream", "endless"):
                pytest.importorskip("torch")
            # in memory where that is possible: a kill does not lose what was written, so no disk is needed
            with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
                process.stdin.write(json.dumps([job, careless, folder]) + "\n")
                process.stdin.flush()
                return json.loads(process.stdout.readline())

        yield run


@pytest.mark.parametrize("job", ["stream", "endless", "training", "redrawn", "rounds"])
def test_kills_lose_no_step_and_draw_no_second_noise(killed, job):
    found = killed(job, careless=False)
    assert found["cuts"] > 35
    assert found["wrong"] == []


@pytest.mark.parametrize("job", ["stream", "endless", "training", "rounds"])
def test_the_kills_do_find_a_second_noise(killed, job):
    assert any("in two ways" in finding for _, finding in killed(job, careless=True)["wrong"])
