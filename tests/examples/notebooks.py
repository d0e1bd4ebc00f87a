"""Execute the notebooks of examples/.

`python -m tests.examples.notebooks [NAME ...]` regenerates their outputs.

Output to stderr is dropped: progress bars and warnings depend on the machine, not on the library.
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
# Notebooks for large models run with tiny stand-ins, whose outputs are useless to a reader.
RECORDED = [path for path in NOTEBOOKS if path.stem not in STAND_INS]
# Seconds per cell: enough for training on two cores that are also busy with other work.
TIMEOUT = 1800

# Text that must not appear in outputs: local folders, other addresses, and errors.
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
    """Run a notebook, with its caches in a temporary folder.

    Args:
        path: the notebook, which is not changed.
        environment: additional environment variables of the kernel.
        smaller: replacements of text in the cells that shorten this run; each text must occur.
        folder: working directory. Default: the notebook's folder.

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
    """Return the problems in the outputs of a notebook."""
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
    """Execute the named notebooks (default: all recorded ones) and write their outputs."""
    for path in [EXAMPLES / f"{name}.ipynb" for name in names] or RECORDED:
        start = time.perf_counter()
        nbformat.write(execute(path), path)
        sys.stdout.write(f"{path.name}: {time.perf_counter() - start:.0f} s\n")


if __name__ == "__main__":
    main(sys.argv[1:])
