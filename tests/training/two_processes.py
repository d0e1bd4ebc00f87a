"""The same training script on one process and on two."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run_on_one_and_two(source: str, folder: Path, port: int) -> tuple[Path, Path]:
    """Run a script that writes into the folder it is told; the two folders.

    Args:
        source: of the script.
        folder: for the script and what it writes.
        port: free; a test of its own has its own.
    """
    script = folder / "script.py"
    script.write_text(source)
    one, two = folder / "one", folder / "two"
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={port}"]
    environment = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"}
    for start, out in (([], one), (launcher, two)):
        command = [sys.executable, *start, str(script), str(out)]
        done = subprocess.run(
            command, check=False, env=environment, capture_output=True, text=True, cwd=ROOT
        )
        assert done.returncode == 0, done.stderr[-3000:]
    return one, two
