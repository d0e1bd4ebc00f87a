"""Executes the notebooks of examples/.

`python -m tests.examples.notebooks [NAME ...]` renews their outputs.

Outputs on standard error are left out: progress and warnings tell of a machine, not of the library.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import nbformat
from nbclient import NotebookClient

from tests.examples.stand_ins import STAND_INS

EXAMPLES = Path(__file__).parents[2] / "examples"
NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))
# What needs a large model is run with a stand-in, whose outputs would tell nobody anything.
RECORDED = [path for path in NOTEBOOKS if path.stem not in STAND_INS]
# Of one cell, in seconds: a training on two cores that are busy otherwise.
TIMEOUT = 1800

# What a reader's machine does not have: our folders, addresses and errors.
OUT_OF_PLACE = re.compile(
    r"(?<![\w.])(?:/(?:root|home|tmp|work|workspace|Users|opt|usr|var|mnt|private)/|[A-Z]:\\)"
    r"|Traceback|https?://(?!huggingface\.co|arxiv\.org|www\.w3\.org)"
)


def execute(
    path: Path,
    environment: Mapping[str, str] | None = None,
    smaller: Mapping[str, str] | None = None,
    folder: Path | None = None,
) -> Any:
    """Run a notebook, with everything it may keep in a folder that goes.

    Args:
        path: of the notebook, which is left as it is.
        environment: variables that the kernel sees beside those of this process.
        smaller: texts of its cells and what stands for them in this run, so that it takes less
            time; each must be there.
        folder: where it runs, by default its own.

    Returns:
        The notebook with new outputs.

    Raises:
        CellExecutionError: if a cell raises.
    """
    notebook = nbformat.read(path, as_version=4)
    for text, shorter in (smaller or {}).items():
        cells = [cell for cell in notebook.cells if text in cell.source]
        assert cells, f"{path.name} has no {text!r}"
        for cell in cells:
            cell.source = cell.source.replace(text, shorter)
    resources = {"metadata": {"path": str(folder or path.parent)}}
    client = NotebookClient(
        notebook,
        timeout=TIMEOUT,
        kernel_name="python3",
        resources=resources,
        record_timing=False,
        coalesce_streams=True,
    )
    with tempfile.TemporaryDirectory() as scratch:
        own = {
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "IPYTHONDIR": f"{scratch}/ipython",
            "HF_MODULES_CACHE": f"{scratch}/modules",
            "JUPYTER_RUNTIME_DIR": f"{scratch}/runtime",
            "MPLBACKEND": "agg",
            "PYTHONDONTWRITEBYTECODE": "1",
            "TQDM_DISABLE": "1",
        }
        with mock.patch.dict(os.environ, {**own, **(environment or {})}):
            client.execute()
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = [one for one in cell.outputs if one.get("name") != "stderr"]
    return notebook


def faults(notebook: Any) -> list[str]:
    """What is wrong with the outputs of a notebook."""
    found = []
    for number, cell in enumerate(notebook.cells):
        if cell.cell_type != "code":
            continue
        if cell.execution_count is None:
            found.append(f"cell {number} was not executed")
        for output in cell.outputs:
            if output.output_type == "error" or output.get("name") == "stderr":
                found.append(f"cell {number} has an error or a warning: {output}")
            data = {k: v for k, v in output.get("data", {}).items() if k != "image/png"}
            texts = "\n".join(map(str, [output.get("text", ""), *data.values()]))
            for place in OUT_OF_PLACE.finditer(texts):
                found.append(f"cell {number} shows {place.group()!r}")
    if not any(cell.get("outputs") for cell in notebook.cells):
        found.append("no cell has an output")
    return found


def main(names: list[str]) -> None:
    """Execute the named notebooks, all that are recorded by default, and write their outputs."""
    for path in [EXAMPLES / f"{name}.ipynb" for name in names] or RECORDED:
        start = time.perf_counter()
        nbformat.write(execute(path), path)
        sys.stdout.write(f"{path.name}: {time.perf_counter() - start:.0f} s\n")


if __name__ == "__main__":
    main(sys.argv[1:])
