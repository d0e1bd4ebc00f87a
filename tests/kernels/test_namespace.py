"""`kernels/` stays a namespace: transformers imports Hugging Face's own package of that name."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from transformers.utils.import_utils import KERNELS_MAX_VERSION, KERNELS_MIN_VERSION

ROOT = Path(__file__).parents[2]

# Minimal package for transformers' integration: decorators that change nothing, and a dummy class
# for every other name that it imports.
FAKE_PACKAGE = """
class Record:
    def __init__(self, *args, **kwargs):
        pass

def use_kernel_forward_from_hub(*args, **kwargs):
    return lambda decorated: decorated

use_kernelized_func = use_kernel_forward_from_hub

def register_kernel_mapping(*args, **kwargs):
    pass

def replace_kernel_forward_from_hub(*args, **kwargs):
    pass

def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return Record
"""

GENERATE = """
import importlib.util, sys
import hf_spec_kernels
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import is_kernels_available

config = LlamaConfig(
    vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
    num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=32,
)
model = LlamaForCausalLM(config).eval()
prompt = torch.tensor([[1, 2, 3]])
output = model.generate(prompt, max_new_tokens=4, min_new_tokens=4, do_sample=False, pad_token_id=0)
assert output.shape == (1, 7)
print(is_kernels_available(), importlib.util.find_spec("kernels").origin)
"""


def test_kernels_folder_has_no_init() -> None:
    assert (ROOT / "kernels").is_dir()
    assert not (ROOT / "kernels" / "__init__.py").exists()


def run_in_project_root(*extra_path: Path) -> str:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, (ROOT / "kernels", *extra_path))),
    }
    finished = subprocess.run(
        [sys.executable, "-c", GENERATE],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    return finished.stdout.splitlines()[-1]


def install_fake_kernels(folder: Path, version: str) -> None:
    package = folder / "kernels"
    (package / "layer").mkdir(parents=True)
    (package / "__init__.py").write_text(FAKE_PACKAGE)
    (package / "layer" / "__init__.py").write_text("")
    (package / "layer" / "mode.py").write_text("class Mode:\n    pass\n")
    info = folder / f"kernels-{version}.dist-info"
    info.mkdir()
    metadata = f"Metadata-Version: 2.1\nName: kernels\nVersion: {version}\n"
    (info / "METADATA").write_text(metadata)
    (info / "top_level.txt").write_text("kernels\n")


@pytest.mark.full
def test_transformers_generates_beside_our_folder() -> None:
    run_in_project_root()


# transformers must work whether or not it accepts the version. Our folder, which comes first on the
# path, must not hide the package.
@pytest.mark.full
@pytest.mark.parametrize(
    ("version", "accepted"), [(KERNELS_MIN_VERSION, True), (KERNELS_MAX_VERSION, False)]
)
def test_transformers_generates_with_a_kernels_package(
    tmp_path: Path, version: str, accepted: bool
) -> None:
    install_fake_kernels(tmp_path, version)
    available, origin = run_in_project_root(tmp_path).split(maxsplit=1)
    assert available == str(accepted)
    assert Path(origin) == tmp_path / "kernels" / "__init__.py"
