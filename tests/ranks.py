"""Two ranks of a test as processes of their own, as torchrun would start them."""

import os
import subprocess
import sys

from minitlt.launch import free_port


def two_ranks(script, *arguments, timeout=600):
    """Runs `script` twice; both must end with exit code 0. `timeout` in seconds, for both."""
    shared = dict(
        os.environ,
        WORLD_SIZE="2",
        LOCAL_WORLD_SIZE="2",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(free_port()),
        OMP_NUM_THREADS="1",
        ACCELERATE_USE_CPU="true",
    )
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), *map(str, arguments)],
            env=dict(shared, RANK=str(rank), LOCAL_RANK=str(rank)),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for rank in (0, 1)
    ]
    try:
        outputs = [process.communicate(timeout=timeout)[0].decode() for process in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    assert [process.returncode for process in ranks] == [0, 0], outputs
