"""An adapter's `custom_generate/`: it runs only if it is trusted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import dynamic_module_utils

import hf_spec
from hf_spec import AssistantError
from hf_spec.adapters.adapter import FILES, FOLDER
from hf_spec.adapters.folder import WEIGHTS_NAME, load_adapter
from tests.adapters.samples import GREEDY, METHODS, PROMPT, fresh_model, plain, save_sample
from tests.tiny_models import build, ragged_batch

EXAMPLES = Path(__file__).parents[2] / "examples/adapters"
# The other examples are heads in a published layout.
ADAPTERS = sorted(file.parent for file in EXAMPLES.glob("*/adapter_config.json"))


@pytest.fixture(autouse=True)
def own_module_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use a temporary cache for the code that transformers copies."""
    cache = str(tmp_path / "modules")
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", cache)
    monkeypatch.syspath_prepend(cache)


def generate(model: Any, folder: Path, **arguments: Any) -> Any:
    return model.generate(
        input_ids=PROMPT,
        **{**GREEDY, "custom_generate": str(folder), "trust_remote_code": True, **arguments},
    )


@pytest.mark.parametrize("method", METHODS)
def test_every_method(tmp_path: Path, method: str) -> None:
    folder = save_sample(tmp_path / method, method)
    model = fresh_model()
    output = generate(model, folder, return_dict_in_generate=True)
    assert torch.equal(output.sequences, plain(model))
    assert output.spec_stats.drafted_tokens > 0


def test_what_generate_takes_gets_through(tmp_path: Path) -> None:
    folder = save_sample(tmp_path / "head", "falcon")
    model = fresh_model()
    batch = {**ragged_batch(), "repetition_penalty": 1.2, "max_new_tokens": 7}
    found = model.generate(**batch, custom_generate=str(folder), trust_remote_code=True)
    assert torch.equal(found, model.generate(**batch))
    found = model.generate(PROMPT, custom_generate=str(folder), trust_remote_code=True, **GREEDY)
    assert torch.equal(found, plain(model))


def test_through_a_peft_model(tmp_path: Path) -> None:
    folder = save_sample(tmp_path / "draft", "draft")
    other = PeftModel.from_pretrained(fresh_model(), str(save_sample(tmp_path / "x", "disco")))
    assert torch.equal(generate(other, folder), plain(build("llama")))


def test_a_folder_that_changed_is_read_again(tmp_path: Path) -> None:
    folder = save_sample(tmp_path / "adapter", "falcon")
    model = fresh_model()
    expected = plain(model)
    assert torch.equal(generate(model, folder), expected)
    save_sample(folder, "sdsat")
    output = generate(model, folder, return_dict_in_generate=True)
    assert torch.equal(output.sequences, expected)
    assert "adaptive_nodes" in output.spec_stats.counters


def test_without_trust_it_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_sample(tmp_path / "adapter", "falcon")
    monkeypatch.setattr("builtins.input", lambda *_: "n")
    for trust in (False, None):
        with pytest.raises(ValueError, match="trust_remote_code"):
            generate(fresh_model(), folder, trust_remote_code=trust)


def test_loading_never_runs_it(tmp_path: Path) -> None:
    folder = save_sample(tmp_path / "adapter", "falcon")
    trap = f"import os\nos.mkdir({str(tmp_path / 'executed')!r})\n"
    for name in ("custom_generate/generate.py", "custom_generate/__init__.py", "modeling.py"):
        (folder / name).write_text(trap)
    load_adapter(folder)
    model = fresh_model()
    model.generate(PROMPT, **GREEDY, spec_strategy="falcon", assistant=str(folder))
    model.load_adapter(str(folder))
    PeftModel.from_pretrained(fresh_model(), str(folder))
    assert not (tmp_path / "executed").exists()


def test_another_base(tmp_path: Path) -> None:
    folder = save_sample(tmp_path / "adapter", "falcon")
    with pytest.raises(AssistantError, match="trained for"):
        generate(fresh_model("qwen2"), folder)
    (folder / WEIGHTS_NAME).unlink()
    with pytest.raises(AssistantError, match="has no adapter_model"):
        generate(fresh_model(), folder)


def test_it_cannot_be_called_by_hand() -> None:
    with pytest.raises(AssistantError, match="is called by"):
        hf_spec.custom_generate(build("llama"), input_ids=PROMPT)


@pytest.mark.parametrize("folder", ADAPTERS, ids=lambda path: path.name)
def test_the_shipped_adapters_carry_the_same_code(folder: Path) -> None:
    found = {path.name: path.read_text() for path in (folder / FOLDER).iterdir()}
    assert found == FILES
