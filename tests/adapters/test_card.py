"""Model cards: metadata for the Hub, measured figures, and protection of existing cards."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard
from transformers import dynamic_module_utils

from hf_spec import AssistantError, SpecAdapter
from hf_spec.adapters.card import GENERATED, save_with_card, write_card
from hf_spec.adapters.folder import load_adapter
from hf_spec.common.installing import install_command
from hf_spec.common.small_models import GEMMA3, SMOLLM2
from tests import tiny_models
from tests.adapters.cards import card_metrics
from tests.adapters.samples import METHODS, fresh_model, sample, save_sample

EXAMPLES = Path(__file__).parents[2] / "examples/adapters"
# The other folders hold heads in the layout of third-party published heads.
ADAPTERS = sorted(file.parent for file in EXAMPLES.glob("*/adapter_config.json"))
# Prefix of the names of shipped adapters -> Hub id and license of their base.
BASES = {
    "smollm2-135m": (SMOLLM2.hub_id, "apache-2.0"),
    "gemma-3-270m": (GEMMA3.hub_id, "gemma"),
    "qwen2.5-coder-0.5b": ("Qwen/Qwen2.5-Coder-0.5B-Instruct", "apache-2.0"),
}
# Adapter -> source of its prompts, if they are not from a dataset on the Hub.
PROMPTS = {"qwen2.5-coder-0.5b-sdsat": "signatures and docstrings of functions of CPython's"}


def base_of(folder: Path) -> tuple[str, str]:
    """Return the Hub id and license of the base of a shipped adapter."""
    return next(base for begin, base in BASES.items() if folder.name.startswith(begin))


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
        load_adapter(folder),
        base_model="org/base",
        license="apache-2.0",
        datasets=["org/texts", "org/more"],
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
    assert f'spec_strategy="{sample(method).strategy}", assistant=adapter' in card.text
    assert 'adapter = "mine"' in card.text
    assert 'from_pretrained("org/base")' in card.text
    assert f"```bash\n{install_command()}\n```" in card.text


@pytest.mark.full
@pytest.mark.parametrize("method", METHODS)
def test_the_examples_of_a_card_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """They run in the parent folder of the adapter, with a base in a local folder."""
    base = tmp_path / "base"
    fresh_model().save_pretrained(base)
    tiny_models.tokenizer().save_pretrained(base)
    save_sample(tmp_path / "mine", method)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    card = ModelCard.load(write_card(load_adapter("mine"), base_model=str(base)))
    # The Hub does not accept a folder as a model id.
    assert card.data.base_model is None
    names: dict[str, Any] = {}
    for code in re.findall(r"```python\n(.*?)```", card.text, re.S):
        exec(code, names)
    assert names["adapter"] == "mine"


def test_numbers_of_the_adapter(tmp_path: Path) -> None:
    options = {
        **sample("falcon").options,
        "held_back": {"slot_1": 0.56861478, "tau": 1.25},
        "training": {"epochs": 5, "shape": {"block_size": 2}, "tasks": ["a"], "start": None},
    }
    falcon = sample("falcon")
    SpecAdapter("falcon", falcon.base, options, falcon.tensors).save_pretrained(tmp_path)
    text = ModelCard.load(write_card(load_adapter(tmp_path))).text
    for row in ("| `slot_1` | 0.5686 |", "| `tau` | 1.25 |", "| `epochs` | 5 |"):
        assert row in text
    assert "| `shape.block_size` | 2 |" in text
    assert "tasks" not in text
    assert "## Speed" not in text


def test_metrics_are_the_figures_of_the_adapter_alone(tmp_path: Path) -> None:
    """Settings and the figures of rules it was compared with are left out."""
    disco = sample("disco")
    options = {
        **disco.options,
        "held_back": {"tau": 1.23456, "places": 16, "kind": "greedy"},
        "validation": {"rules": {"disco": {"f1": 0.75}, "static 1": {"f1": 0.4}}},
        "training": {"learning_rate": 0.001},
    }
    SpecAdapter("disco", disco.base, options, disco.tensors).save_pretrained(tmp_path / "mine")
    path = write_card(load_adapter(tmp_path / "mine"))
    assert card_metrics(path.parent) == {"tau": 1.235, "f1": 0.75}
    assert ModelCard.load(path).data.model_name == "mine"
    rows = results(tmp_path / "r.json", result("disco@mine"), result("disco@mine", batch_size=4))
    speed = "speed relative to plain generate(), disco@mine, batch "
    found = card_metrics(write_card(load_adapter(tmp_path / "mine"), results=rows).parent)
    assert found == {"tau": 1.235, "f1": 0.75, f"{speed}1": 1.756, f"{speed}4": 1.756}


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
    text = ModelCard.load(write_card(load_adapter(folder), results=path)).text
    assert "| `falcon@head` | 1 | 1.76 | 1.50 | 2.25 | 1.23 |" in text
    assert '| `falcon:tree="chain"@head` | 4 | 1.76 | 1.50 | 2.25 |  |' in text
    assert "device some CPU" in text
    for other in ("9.00", "head-2", "`plain`"):
        assert other not in text


def test_results_without_a_name_go_by_the_strategy(tmp_path: Path) -> None:
    folder = save_sample(tmp_path / "draft", "draft")
    path = results(tmp_path / "r.json", result("tree"), result("lookup"))
    text = ModelCard.load(write_card(load_adapter(folder), results=path)).text
    assert "| `tree` |" in text
    assert "lookup" not in text


def test_results_that_say_nothing(tmp_path: Path) -> None:
    folder = save_sample(tmp_path / "head", "falcon")
    path = results(tmp_path / "r.json", result("lookup"), result("falcon@other"))
    with pytest.raises(AssistantError, match=r"no rows of 'head' .* have falcon@other, lookup"):
        write_card(load_adapter(folder), results=path)
    for content in ("{", "[]", '{"summary": [1]}', "{}"):
        path.write_text(content)
        with pytest.raises(AssistantError, match="holds no results"):
            write_card(load_adapter(folder), results=path)
    with pytest.raises(AssistantError, match="holds no results"):
        write_card(load_adapter(folder), results=tmp_path / "nowhere.json")
    assert not (folder / "README.md").exists()


def test_a_card_is_not_replaced_unasked(tmp_path: Path) -> None:
    folder = save_sample(tmp_path, "disco")
    (folder / "README.md").write_text("by hand")
    with pytest.raises(AssistantError, match="by hand; overwrite=True"):
        write_card(load_adapter(folder))
    save_with_card(folder, sample("disco"))
    assert (folder / "README.md").read_text() == "by hand"
    write_card(load_adapter(folder), overwrite=True)
    assert "by hand" not in (folder / "README.md").read_text()


def test_a_written_card_is_replaced_and_what_it_states_stays(tmp_path: Path) -> None:
    """A card without the line that marks it as generated is not replaced."""
    folder = tmp_path / "head"
    save_with_card(folder, sample("falcon"))
    write_card(
        load_adapter(folder), license="apache-2.0", datasets=["org/texts"], base_model="org/base"
    )
    falcon = sample("falcon")
    options = {**falcon.options, "held_back": {"tau": 1.5}}
    save_with_card(folder, SpecAdapter("falcon", falcon.base, options, falcon.tensors))
    path = folder / "README.md"
    data = ModelCard.load(path).data
    assert (data.license, data.datasets, data.base_model) == (
        "apache-2.0",
        ["org/texts"],
        "org/base",
    )
    assert card_metrics(folder) == {"tau": 1.5}
    mine = path.read_text().replace(GENERATED, "")
    path.write_text(mine)
    save_with_card(folder, falcon)
    assert path.read_text() == mine


def test_an_adapter_without_a_folder() -> None:
    with pytest.raises(AssistantError, match="save it to one first"):
        write_card(sample("falcon"))


@pytest.mark.parametrize("folder", ADAPTERS, ids=lambda path: path.name)
def test_the_shipped_adapters_name_their_base_by_its_hub_id(folder: Path) -> None:
    config = json.loads((folder / "adapter_config.json").read_text())
    hub_id, _ = base_of(folder)
    assert config["base_model_name_or_path"] == config["base"]["name"] == hub_id


@pytest.mark.parametrize("folder", ADAPTERS, ids=lambda path: path.name)
def test_terms_of_their_own_travel_with_the_shipped_adapters(folder: Path) -> None:
    """The Gemma terms require a notice and a copy of the terms with every derived model."""
    _, license_name = base_of(folder)
    terms = folder / "LICENSE"
    assert terms.exists() == (license_name == "gemma")
    if terms.exists():
        text = terms.read_text()
        assert text.startswith("Gemma is provided under and subject to the Gemma Terms of Use")
        assert "Section 3: DISTRIBUTION AND RESTRICTIONS" in text


def as_generated(adapter: SpecAdapter, folder: Path) -> Path:
    """Save a copy of an adapter without its card and return its folder."""
    adapter.save_pretrained(folder / "copy")
    return folder / "copy"


@pytest.mark.parametrize("folder", ADAPTERS, ids=lambda path: path.name)
def test_the_shipped_cards_have_what_the_hub_reads(folder: Path, tmp_path: Path) -> None:
    data = ModelCard.load(folder / "README.md").data.to_dict()
    assert (data["base_model"], data["license"]) == base_of(folder)
    assert data["library_name"] == "hf_spec"
    assert data["base_model_relation"] == "adapter"
    if folder.name in PROMPTS:
        assert "datasets" not in data
        assert PROMPTS[folder.name] in (folder / "README.md").read_text()
    else:
        assert data["datasets"]
    adapter = load_adapter(folder)
    assert ModelCard.load(folder / "README.md").data.model_name == folder.name
    copy = as_generated(adapter, tmp_path)
    write_card(load_adapter(copy))
    assert card_metrics(folder) == card_metrics(copy) != {}
    assert install_command() in (folder / "README.md").read_text()
    method = adapter.method
    assert "speculative-decoding" in data["tags"]
    # Some cards of draft models are written by hand.
    assert {method, f"{method}-model"} & set(data["tags"])
