"""Scripts run in one process or in several, with the environment of `torch.distributed.run`.

They are forked from an interpreter with the imports already done, because the imports take longer
than the scripts.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]

# Arguments: a script, then pairs of a process count and the folder passed to the script.
FORK = """
import os, runpy, signal, socket, sys
import accelerate, hf_spec, transformers
import tests.tiny_models

def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]

script, *runs = sys.argv[1:]
for count, folder in zip(runs[::2], runs[1::2]):
    shared, running = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}, set()
    for rank in map(str, range(int(count))):
        pid = os.fork()
        if not pid:
            if count != "1":
                own = {"RANK": rank, "LOCAL_RANK": rank}
                os.environ.update(shared, **own, WORLD_SIZE=count, LOCAL_WORLD_SIZE=count)
            sys.argv = [script, folder]
            runpy.run_path(script, run_name="__main__")
            sys.exit()
        running.add(pid)
    while running:
        pid, status = os.wait()
        running.remove(pid)
        if status:
            # The others would wait for it.
            for other in running:
                os.kill(other, signal.SIGKILL)
            sys.exit("a process has failed")
"""


def run_together(
    script: Path, runs: Mapping[Path, int], **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a script for each folder, one after the other, in the given number of processes."""
    told = [word for folder, count in runs.items() for word in (str(count), str(folder))]
    paths = f"{ROOT}:{ROOT / 'kernels'}"
    usual = {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"}
    return subprocess.run(
        [sys.executable, "-c", FORK, str(script), *told],
        check=False,
        env={**usual, **variables},
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=600,
    )


def run_on_one_and_two(source: str, folder: Path) -> tuple[Path, Path]:
    """Run a script in one process and in two, and return the folders passed to it."""
    script = folder / "script.py"
    script.write_text(source)
    one, two = folder / "one", folder / "two"
    done = run_together(script, {one: 1, two: 2})
    assert done.returncode == 0, done.stderr[-3000:]
    return one, two
