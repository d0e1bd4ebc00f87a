"""The notebooks and scripts of examples/ run, and the committed outputs are complete."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("nbformat", reason="needs the extra 'notebooks'")
pytest.importorskip("nbclient", reason="needs the extra 'notebooks'")

import nbformat
from nbformat.v4 import new_code_cell, new_notebook, new_output

from tests.adapters.local_hub import local_hub
from tests.examples.notebooks import EXAMPLES, NOTEBOOKS, RECORDED, execute, faults
from tests.examples.stand_ins import STAND_INS
from tests.forked_python import ForkedPython

SCRIPTS = sorted(EXAMPLES.glob("*.py"))
# Scripts that need another tool run in the tests of that tool.
ALONE = [path for path in SCRIPTS if path.name != "ray_data.py"]
TOPICS = {
    "quickstart",
    "five_methods",
    "train_a_falcon_head",
    "disco",
    "batches",
    "share_an_adapter",
    "eight_billion_on_colab",
    "images",
    "serving",
}


def contents() -> dict[str, int]:
    """Return the modification time of every file below examples/."""
    files = (path for path in EXAMPLES.rglob("*") if path.is_file())
    return {str(path.relative_to(EXAMPLES)): path.stat().st_mtime_ns for path in files}


def test_every_topic_has_its_notebook() -> None:
    assert {path.stem for path in NOTEBOOKS} == TOPICS


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_committed_notebooks_are_whole(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert faults(notebook) == [], "run: python -m tests.examples.notebooks " + path.stem
    numbers = [cell.execution_count for cell in notebook.cells if cell.cell_type == "code"]
    assert numbers == list(range(1, len(numbers) + 1))
    assert notebook.cells[0].source.startswith("# ")


@pytest.mark.parametrize("name", STAND_INS)
def test_nothing_is_recorded_of_stand_ins(name: str) -> None:
    notebook = nbformat.read(EXAMPLES / f"{name}.ipynb", as_version=4)
    nbformat.validate(notebook)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(cell.execution_count is None and not cell.outputs for cell in cells)
    assert "No outputs are stored here" in notebook.cells[0].source


def test_faults_are_seen() -> None:
    bad = [
        new_output("stream", name="stdout", text="saved to /home/me/head"),
        new_output("stream", name="stderr", text="a warning"),
        new_output("error", ename="ValueError", evalue="no", traceback=[]),
        new_output("display_data", data={"text/plain": "<Image at C:\\temp>"}),
    ]
    for output in bad:
        cell = new_code_cell("1", outputs=[output], execution_count=1)
        assert len(faults(new_notebook(cells=[cell]))) == 1, output
    good = new_output("stream", name="stdout", text="1/2 of https://huggingface.co/org/home/x")
    cell = new_code_cell("1", outputs=[good], execution_count=1)
    assert faults(new_notebook(cells=[cell])) == []
    assert len(faults(new_notebook(cells=[new_code_cell("1")]))) == 2


def test_the_documentation_names_every_notebook_and_script() -> None:
    page = (EXAMPLES.parent / "docs" / "measure.md").read_text(encoding="utf-8")
    names = {Path(name).name for name in re.findall(r"\.\./examples/(\w+\.(?:ipynb|py))", page)}
    assert names == {path.name for path in [*NOTEBOOKS, *SCRIPTS]}


# Replacements in the cells: fewer prompts and shorter responses than in the committed outputs.
SMALLER = {
    "batches": {'"max_new_tokens": 40': '"max_new_tokens": 16'},
    "disco": {
        "< 128]": "< 128][:8]",
        "max_new_tokens=64": "max_new_tokens=20",
        '"max_new_tokens": 64': '"max_new_tokens": 20',
    },
    "eight_billion_on_colab": {"128, 3": "24, 1"},
    "five_methods": {
        '"max_new_tokens": 48': '"max_new_tokens": 16',
        "max_new_tokens=48": "max_new_tokens=16",
    },
    "images": {
        "max_new_tokens=160": "max_new_tokens=32",
        '"max_new_tokens": 48': '"max_new_tokens": 16',
    },
    "quickstart": {
        '"max_new_tokens": 80': '"max_new_tokens": 32',
        "max_new_tokens=40": "max_new_tokens=16",
        "max_new_tokens=32": "max_new_tokens=12",
    },
    "serving": {"max_tokens=48": "max_tokens=8", "in range(3)": "in range(2)"},
    "share_an_adapter": {
        "[:24]": "[:8]",
        "max_new_tokens=48": "max_new_tokens=16",
        '"max_new_tokens": 48': '"max_new_tokens": 12',
    },
    "train_a_falcon_head": {
        "unseen = short[::12][:4]": "short = short[:11]; unseen = short[::12]",
        "max_new_tokens=96": "max_new_tokens=20",
        '"max_new_tokens": 48': '"max_new_tokens": 20',
        "epochs=10": "epochs=1",
        "evaluate_every=5": "evaluate_every=1",
        "vocabulary_size=4096": "vocabulary_size=512",
    },
}


# Replacements in the scripts.
SHORTER = {
    "batches": {"max_new_tokens=64": "max_new_tokens=16"},
    "five_methods": {'"max_new_tokens": 48': '"max_new_tokens": 16'},
    "quickstart": {'"max_new_tokens": 64': '"max_new_tokens": 24'},
}
# Runs changed source code under the path of the original file, in a working directory.
RUN = """
import os, sys
source, path, folder = sys.argv
os.chdir(folder)
exec(compile(source, path, "exec"), {"__file__": path, "__name__": "__main__"})
"""


@pytest.mark.full
@pytest.mark.parametrize("name", STAND_INS)
def test_notebooks_run_with_stand_ins(name: str, tmp_path: Path) -> None:
    """Tiny models have the names of the large ones, so the notebooks need no other changes."""
    STAND_INS[name](tmp_path)
    notebook = execute(EXAMPLES / f"{name}.ipynb", {"HF_HUB_OFFLINE": "1"}, SMALLER[name], tmp_path)
    assert faults(notebook) == []
    outputs = [one for cell in notebook.cells for one in cell.get("outputs", [])]
    said = "".join(one.get("text", "") for one in outputs)
    assert "times as fast" in said
    assert "same text" in said
    assert "False" not in said


@pytest.mark.by_default(path=lambda path: path.stem == "quickstart")
@pytest.mark.real
@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_notebooks_run(path: Path) -> None:
    before = contents()
    assert faults(execute(path, smaller=SMALLER.get(path.stem))) == []
    assert contents() == before


@pytest.mark.full
@pytest.mark.real
def test_the_shared_adapter_is_pushed_and_fetched(tmp_path: Path) -> None:
    """With `HUB_OWNER`, the adapter goes to a Hub, here a local one."""
    with local_hub("hf_local") as hub:
        environment = {
            "HF_ENDPOINT": hub.url,
            "HF_HUB_CACHE": str(tmp_path),
            "HF_HUB_DISABLE_XET": "1",
            "HF_TOKEN": "hf_local",
            "HUB_OWNER": "me",
        }
        notebook = execute(
            EXAMPLES / "share_an_adapter.ipynb", environment, SMALLER["share_an_adapter"]
        )
    assert set(hub.repositories) == {"me/my-disco", "me/smollm2-135m-draft"}
    texts = [
        output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", [])
    ]
    assert "pushed\n" in texts
    assert sum("same answer: True" in text for text in texts) == 4


@pytest.mark.full
@pytest.mark.real
@pytest.mark.parametrize("path", ALONE, ids=lambda path: path.stem)
def test_scripts_run(path: Path, tmp_path: Path, new_python: ForkedPython) -> None:
    """The working directory does not matter."""
    source = path.read_text(encoding="utf-8")
    for text, shorter in SHORTER.get(path.stem, {}).items():
        assert text in source
        source = source.replace(text, shorter)
    finished = new_python.run(RUN, source, str(path), str(tmp_path))
    assert finished.status == 0, finished.err
    assert finished.out.strip()
    assert "False" not in finished.out
    assert len(source.splitlines()) < 60
