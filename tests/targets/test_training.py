"""Training on two processes equals training on one; sharded weights raise an error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from hf_spec import UnsupportedError
from hf_spec.adapters.folder import CONFIG_NAME, WEIGHTS_NAME
from hf_spec.training.trainer import CHECKPOINT, TrainSettings, train
from tests.training.test_trainer import metrics
from tests.training.two_processes import run_on_one_and_two, run_together

START = """
import sys
from dataclasses import replace
from pathlib import Path
import torch
from accelerate import PartialState
from hf_spec.training.responses import Response
from hf_spec.training.answers import Example
from hf_spec.training import trainer
from hf_spec.training.trainer import TrainSettings
from tests.tiny_models import build
torch.set_num_threads(1)
responses = [
    Response(f"p{n}", "t", [5 + n, 4, 6], [7 + (n * m) % 50 for m in range(5 + n % 4)])
    for n in range(20)
]
run = TrainSettings(epochs=2, accumulate=2, batch_tokens=40, learning_rate=0.01)
def opinion(response):
    tokens = torch.tensor([[token, 3] for token in response.response])
    return Example(response, tokens, torch.tensor([[0.7, 0.3]] * len(tokens)))
examples = [opinion(response) for response in responses]
saves = []
def count(save):
    def counting(*args, **kwargs):
        saves.append(1)
        return save(*args, **kwargs)
    return counting
trainer.save_with_card = count(trainer.save_with_card)
def start(method):
    saves.clear()
    torch.manual_seed(0)
    folder = Path(sys.argv[1], method)
    folder.mkdir(parents=True, exist_ok=True)
    return folder
def finish():
    (folder / f"saves{PartialState().process_index}").write_text(str(len(saves)))
"""
METHODS = {
    "draft": """
from hf_spec.methods.draft_model import training as draft
settings = draft.DraftTrainSettings(num_layers=2, rank=4, vocabulary_size=64, held_back=0.2)
draft.train_draft(build("llama"), examples, folder, settings, run)
""",
    "sdsat": """
from hf_spec.methods.sdsat import training as sdsat
settings = sdsat.SdsatTrainSettings(rank=4, held_back=0.2, window=3)
sdsat.train_sdsat(build("llama"), examples, folder, settings, run)
""",
    "disco": """
import hf_spec
from hf_spec.methods.disco import training as disco
settings = disco.DiscoTrainSettings(max_epochs=3, batch_size=64)
model = build("llama")
disco.train_disco(model, hf_spec.truncated_draft(model, 2), responses, folder, settings)
""",
}
# With dropout, noise and glancing, whose random numbers are seeded per micro-batch.
FALCON = """
from hf_spec.methods.falcon.training import train_falcon
from hf_spec.training.features import Text
from tests.methods.falcon import test_training as test_falcon
few = replace(test_falcon.RUN, epochs=2, accumulate=2, batch_tokens=40)
texts = [Text(response) for response in responses]
train_falcon(build("llama"), texts, folder, test_falcon.SETTINGS, few)
"""
LOOP = """
from tests.training import test_trainer
line = test_trainer.Line()
def loss(batch):
    errors = line.inputs[batch] @ line.slope - line.outputs[batch]
    return (errors**2).sum(), len(batch)
twice = replace(test_trainer.SETTINGS, accumulate=2)
trainer.train({"slope": line.slope}, loss, line.epochs, twice, folder)
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Train every method on one and on two processes; return both output folders."""
    # All methods share the processes: starting one takes longer than training in it.
    scripts = {**METHODS, "falcon": FALCON, "loop": LOOP}
    parts = [f"folder = start({name!r})\n{scripts[name]}\nfinish()" for name in scripts]
    source = START + "\n".join(parts)
    return run_on_one_and_two(source, tmp_path_factory.mktemp("trained"))


@pytest.mark.full
@pytest.mark.parametrize("method", METHODS)
def test_two_processes_equal_one(method: str, trained: tuple[Path, Path]) -> None:
    one, two = (folder / method for folder in trained)
    expected, found = (load_file(folder / WEIGHTS_NAME) for folder in (one, two))
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        # Adapters are stored in bfloat16.
        torch.testing.assert_close(found[name].float(), tensor.float(), rtol=1e-2, atol=1e-4)
    configs = [json.loads((folder / CONFIG_NAME).read_text()) for folder in (one, two)]
    assert configs[0]["options"].keys() == configs[1]["options"].keys()
    assert (two / "saves0").read_text() == (one / "saves0").read_text() == "1"
    assert (two / "saves1").read_text() == "0"


@pytest.mark.full
def test_a_falcon_head_on_two_processes_equals_one(trained: tuple[Path, Path]) -> None:
    one, two = (folder / "falcon" / "training" for folder in trained)
    expected, found = (load_file(folder / CHECKPOINT) for folder in (one, two))
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-3, atol=1e-5)
    for a, b in zip(metrics(one), metrics(two), strict=True):
        assert a == pytest.approx(b, rel=1e-3)


@pytest.mark.full
def test_the_loop_on_two_processes_equals_one(trained: tuple[Path, Path]) -> None:
    one, two = (folder / "loop" for folder in trained)
    expected, found = (load_file(folder / CHECKPOINT) for folder in (one, two))
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-7)
    for a, b in zip(metrics(one), metrics(two), strict=True):
        assert a == pytest.approx(b, rel=1e-5)


@pytest.mark.full
def test_fsdp_is_refused(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\nfrom pathlib import Path\nfrom tests.training.test_trainer import Line\n"
        "Line().fit(Path(sys.argv[1]))\n"
    )
    switches = {"ACCELERATE_USE_FSDP": "true", "ACCELERATE_USE_CPU": "true"}
    done = run_together(script, {tmp_path / "out": 2}, **switches)
    assert done.returncode != 0
    assert "UnsupportedError: sharded training (FSDP) is not supported" in done.stderr
    assert not (tmp_path / "out").exists()


def test_weights_that_are_divided_are_refused(tmp_path: Path) -> None:
    parameter: Any = nn.Parameter(torch.zeros(2))
    parameter.device_mesh = object()
    with pytest.raises(UnsupportedError, match="each process needs all trained weights"):
        train(
            {"p": parameter},
            lambda _: (parameter.sum(), 1),
            lambda _: [],
            TrainSettings(),
            tmp_path,
        )


@pytest.mark.gpu
def test_every_process_has_a_gpu_of_its_own(tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    source = """
import sys
from pathlib import Path
from hf_spec.cli.loading import own_device
folder = Path(sys.argv[1])
folder.mkdir(exist_ok=True)
(folder / str(own_device().index)).touch()
"""
    one, two = run_on_one_and_two(source, tmp_path, 29637)
    assert [path.name for path in one.iterdir()] == ["0"]
    assert sorted(path.name for path in two.iterdir()) == ["0", "1"]
