"""Model cards: metadata the Hub reads, numbers that were measured, and no card is lost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard

from hf_spec import AssistantError, SpecAdapter
from hf_spec.adapters.card import write_card
from tests.adapters.samples import METHODS, sample, save_sample

EXAMPLES = Path(__file__).parents[2] / "examples/adapters"


def result(contender: str, task: str = "all", **more: Any) -> dict[str, Any]:
    row = {"contender": contender, "task": task, "batch_size": 1}
    return {**row, "ratio": 1.756, "ratio_p20": 1.5, "ratio_p80": 2.25, "tau": 1.234, **more}


def results(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text(json.dumps({"summary": rows, "environment": {"device": "some CPU"}}))
    return path


@pytest.mark.parametrize("method", METHODS)
def test_metadata_and_usage(tmp_path: Path, method: str) -> None:
    folder = save_sample(tmp_path / "mine", method)
    path = write_card(
        folder, base_model="org/base", license="apache-2.0", datasets=["org/texts", "org/more"]
    )
    assert path == folder / "README.md"
    card = ModelCard.load(path)
    assert card.data.to_dict() == {
        "base_model": "org/base",
        "base_model_relation": "adapter",
        "datasets": ["org/texts", "org/more"],
        "library_name": "hf_spec",
        "license": "apache-2.0",
        "pipeline_tag": "text-generation",
        "tags": ["speculative-decoding", method],
    }
    assert f'spec_strategy="{sample(method).strategy}", assistant="mine"' in card.text
    assert 'custom_generate="mine", trust_remote_code=True' in card.text
    assert 'from_pretrained("org/base")' in card.text


def test_numbers_of_the_adapter(tmp_path: Path) -> None:
    options = {
        **sample("falcon").options,
        "held_back": {"slot_1": 0.56861478, "tau": 1.25},
        "training": {"epochs": 5, "shape": {"block_size": 2}, "tasks": ["a"], "start": None},
    }
    falcon = sample("falcon")
    SpecAdapter("falcon", falcon.base, options, falcon.tensors).save_pretrained(tmp_path)
    text = ModelCard.load(write_card(tmp_path)).text
    for row in ("| `slot_1` | 0.5686 |", "| `tau` | 1.25 |", "| `epochs` | 5 |"):
        assert row in text
    assert "| `shape.block_size` | 2 |" in text
    assert "tasks" not in text
    assert "## Speed" not in text


def test_speeds_of_a_benchmark(tmp_path: Path) -> None:
    folder = save_sample(tmp_path / "head", "falcon")
    path = results(
        tmp_path / "r.json",
        result("plain", tau=None),
        result("falcon@head"),
        result('falcon:tree="chain"@head', batch_size=4, tau=None),
        result("falcon@head", task="code", ratio=9.0),
        result("falcon@head-2"),
    )
    text = ModelCard.load(write_card(folder, results=path)).text
    assert "| `falcon@head` | 1 | 1.76 | 1.50 | 2.25 | 1.23 |" in text
    assert '| `falcon:tree="chain"@head` | 4 | 1.76 | 1.50 | 2.25 |  |' in text
    assert "device some CPU" in text
    for other in ("9.00", "head-2", "`plain`"):
        assert other not in text


def test_results_without_a_name_go_by_the_strategy(tmp_path: Path) -> None:
    folder = save_sample(tmp_path / "draft", "draft")
    path = results(tmp_path / "r.json", result("tree"), result("lookup"))
    text = ModelCard.load(write_card(folder, results=path)).text
    assert "| `tree` |" in text
    assert "lookup" not in text


def test_results_that_say_nothing(tmp_path: Path) -> None:
    folder = save_sample(tmp_path / "head", "falcon")
    path = results(tmp_path / "r.json", result("lookup"), result("falcon@other"))
    with pytest.raises(AssistantError, match=r"nothing of 'head' .* have falcon@other, lookup"):
        write_card(folder, results=path)
    for content in ("{", "[]", '{"summary": [1]}', "{}"):
        path.write_text(content)
        with pytest.raises(AssistantError, match="holds no results"):
            write_card(folder, results=path)
    with pytest.raises(AssistantError, match="holds no results"):
        write_card(folder, results=tmp_path / "nowhere.json")
    assert not (folder / "README.md").exists()


def test_a_card_is_not_replaced_unasked(tmp_path: Path) -> None:
    folder = save_sample(tmp_path, "disco")
    (folder / "README.md").write_text("by hand")
    with pytest.raises(AssistantError, match="pass overwrite=True"):
        write_card(folder)
    assert (folder / "README.md").read_text() == "by hand"
    write_card(folder, overwrite=True)
    assert "by hand" not in (folder / "README.md").read_text()


def test_what_holds_no_adapter(tmp_path: Path) -> None:
    with pytest.raises(AssistantError, match="has no adapter_config"):
        write_card(tmp_path)
    with pytest.raises(AssistantError, match="is no folder"):
        write_card(tmp_path / "nowhere")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("folder", sorted(EXAMPLES.iterdir()), ids=lambda path: path.name)
def test_the_shipped_cards_have_what_the_hub_reads(folder: Path) -> None:
    data = ModelCard.load(folder / "README.md").data.to_dict()
    assert data["base_model"] == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert (data["library_name"], data["license"]) == ("hf_spec", "apache-2.0")
    assert data["base_model_relation"] == "adapter"
    assert data["datasets"]
    method = json.loads((folder / "adapter_config.json").read_text())["method"]
    assert {"speculative-decoding", "draft-model" if method == "draft" else method} <= set(
        data["tags"]
    )
