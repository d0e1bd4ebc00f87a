"""The table of published drafters, the page generated from it, and the search on the Hub."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import HfApi, ModelInfo, constants
from huggingface_hub.errors import HfHubHTTPError

import hf_spec
from hf_spec.adapters.hub import HubRepo
from hf_spec.common.errors import AssistantError, HubError, OptionError
from hf_spec.methods.auto import known_drafters as module
from hf_spec.methods.auto.known_drafters import KnownDrafter, heads_for, known_drafters
from tests.adapters.local_hub import closed_port
from tests.tiny_models import build, prompts

PAGE = Path(__file__).parents[3] / "docs" / "published-heads.md"


@pytest.fixture(autouse=True)
def every_strategy(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {drafter.strategy for drafter in known_drafters()}
    monkeypatch.setattr(module, "known_strategies", lambda: sorted(names))


def test_the_table() -> None:
    repos = [drafter.repo for drafter in known_drafters()]
    assert len(set(repos)) == len(repos)
    for drafter in known_drafters():
        assert re.fullmatch(r"[\w.-]+/[\w.-]+", drafter.repo)
        assert drafter.targets
        assert all("/" not in target for target in drafter.targets)
        assert drafter.license
        assert drafter.family


@pytest.mark.parametrize(
    "name",
    [
        "Qwen/Qwen3-8B",
        "qwen3-8b",
        "/models/Qwen3-8B/",
        "Qwen/Qwen3-8B-AWQ",
        "unsloth/Qwen3-8B-bnb-4bit",
        "nvidia/Qwen3-8B-FP8-dynamic",
    ],
)
def test_names(name: str) -> None:
    repos = {drafter.repo for drafter in heads_for(name)}
    assert {"RedHatAI/Qwen3-8B-speculator.eagle3", "amd/PARD-Qwen3-0.6B"} <= repos
    assert "AngelSlim/Qwen3-4B_eagle3" not in repos


def test_modules_in_the_models_own_files() -> None:
    (module_inside,) = [d for d in heads_for("Qwen/Qwen3.8-27B") if d.strategy == "mtp"]
    assert module_inside.repo == "Qwen/Qwen3.8-27B"
    for drafter in known_drafters():
        if drafter.strategy == "mtp":
            assert drafter.targets == (drafter.repo.partition("/")[2],)


def test_metas_own_names() -> None:
    found = heads_for("meta-llama/Meta-Llama-3-8B-Instruct")
    assert "yuhuili/EAGLE-LLaMA3-Instruct-8B" in {drafter.repo for drafter in found}


def test_a_model_is_asked_for_by_its_name() -> None:
    model = copy.deepcopy(build("llama"))
    assert hf_spec.heads_for(model) == []
    model.config.name_or_path = "openai/gpt-oss-20b"
    assert {one.strategy for one in hf_spec.heads_for(model)} == {"eagle", "block"}


def test_something_else_has_no_name() -> None:
    with pytest.raises(OptionError, match="model of type int: pass a model or its Hub id"):
        heads_for(5)  # type: ignore[arg-type]


def test_drafters_that_nothing_serves_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "known_strategies", lambda: ["block"])
    assert {one.strategy for one in heads_for("Qwen/Qwen3-8B")} == {"block"}


def test_the_page_has_every_target() -> None:
    rows = dict(re.findall(r"^\| ([^|]+) \| (.+) \|$", PAGE.read_text(encoding="utf-8"), re.M))
    wanted: dict[str, list[str]] = {}
    for drafter in known_drafters():
        for target in drafter.targets:
            wanted.setdefault(target, []).append(drafter.repo)
    assert {target for target in rows if target in wanted} == set(wanted)
    for target, repos in wanted.items():
        assert re.findall(r"`([^`]+/[^`]+)`", rows[target]) == repos


TARGET = "Qwen/Qwen3-8B"
HEAD = ("config.json", "model.safetensors")
DFLASH = {"architectures": ["DFlashDraftModel"], "dflash_config": {"block_size": 16}}


@dataclass
class FakeHub:
    """Fake Hub with `list_models` and downloads of config.json."""

    folder: Path
    listed: list[ModelInfo] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)

    def add(
        self,
        repo: str,
        config: dict[str, Any] | None,
        files: tuple[str, ...] = HEAD,
        tags: tuple[str, ...] = (),
    ) -> None:
        """Add a repository; the Hub's list contains only its architectures and model type."""
        short = {k: v for k, v in (config or {}).items() if k in ("architectures", "model_type")}
        siblings = [{"rfilename": name} for name in files]
        base = (f"base_model:{TARGET}", f"base_model:finetune:{TARGET}")
        self.listed.append(
            ModelInfo(
                id=repo,
                tags=[*base, *tags],
                siblings=siblings,
                config=short or None,
                gated="manual" if config is None and "config.json" in files else False,
            )
        )
        if config is not None:
            (self.folder / repo).mkdir(parents=True)
            (self.folder / repo / "config.json").write_text(json.dumps(config))

    def list_models(self, **options: Any) -> Iterator[ModelInfo]:
        self.calls.append(options)
        return iter(self.listed)

    def config_folder(self, repo: str) -> Path:
        if not (self.folder / repo).exists():
            raise AssistantError("401 Client Error")
        return self.folder / repo


@pytest.fixture
def fake_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    hub = FakeHub(tmp_path)

    def fetch(repo: HubRepo, names: tuple[str, ...]) -> Path:
        assert names == ("config.json",)
        return hub.config_folder(repo.repo_id)

    monkeypatch.setattr(HfApi, "list_models", hub.list_models)
    monkeypatch.setattr(HubRepo, "fetch", fetch)
    monkeypatch.setattr(module, "reach_hub", lambda: None)
    return hub


def only(hub: FakeHub) -> KnownDrafter:
    """Return the only drafter that is not in the table."""
    (drafter,) = heads_for(TARGET, online=True)[len(heads_for(TARGET)) :]
    return drafter


class TestOnline:
    def test_the_hub_is_asked_by_base_model(self, fake_hub: FakeHub) -> None:
        fake_hub.add("me/Qwen3-8B-DFlash", DFLASH, tags=("license:mit",))
        assert only(fake_hub) == KnownDrafter(
            "me/Qwen3-8B-DFlash", "DFlash", "block", ("Qwen3-8B",), "mit", False
        )
        (options,) = fake_hub.calls
        assert options["filter"] == f"base_model:{TARGET}"
        assert options["limit"] == 1000
        assert options["fetch_config"]
        assert options["full"]

    def test_entries_of_the_table_come_once_and_first(self, fake_hub: FakeHub) -> None:
        repo = "z-lab/Qwen3-8B-DFlash-b16"
        fake_hub.add("me/Qwen3-8B-DFlash", DFLASH)
        fake_hub.add(repo, DFLASH)
        found = [drafter.repo for drafter in heads_for(TARGET, online=True)]
        assert found == [*(drafter.repo for drafter in heads_for(TARGET)), "me/Qwen3-8B-DFlash"]
        assert repo in found

    def test_copies_of_the_model_are_not_drafters(self, fake_hub: FakeHub) -> None:
        fake_hub.add("me/Qwen3-8B-tuned", {"architectures": ["Qwen3ForCausalLM"]})
        inside = {"architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe"}
        fake_hub.add("me/with-mtp-layers", {**inside, "num_nextn_predict_layers": 1})
        fake_hub.add("me/my-tune", None, tags=("base_model:adapter:org/eagle-7b",))
        assert heads_for(TARGET, online=True) == heads_for(TARGET)

    def test_drafters_that_are_models_may_be_quantized(self, fake_hub: FakeHub) -> None:
        config = {"architectures": ["Qwen3ForCausalLM"], "pard_token": 151670}
        fake_hub.add("me/PARD-Qwen3-8B", {**config, "quantization_config": {"bits": 4}})
        assert (only(fake_hub).strategy, only(fake_hub).problem) == ("pard", "")
        fake_hub.add("me/leopard", {"architectures": ["Qwen3ForCausalLM"]})
        assert only(fake_hub).repo == "me/PARD-Qwen3-8B"

    def test_a_class_is_enough(self, fake_hub: FakeHub) -> None:
        fake_hub.add("me/helper", {"model_type": "muse_glimmer_assistant"})
        assert (only(fake_hub).family, only(fake_hub).strategy) == ("DFlash", "block")

    def test_pickles_can_be_converted(self, fake_hub: FakeHub) -> None:
        config = {"architectures": ["LlamaForCausalLM"], "draft_vocab_size": 32000}
        fake_hub.add("me/Qwen3-8B-EAGLE3", config, ("config.json", "pytorch_model.bin"))
        drafter = only(fake_hub)
        assert (drafter.family, drafter.strategy) == ("EAGLE-3", "eagle")
        assert drafter.pickled
        assert not drafter.problem

    @pytest.mark.parametrize(
        ("config", "files", "problem"),
        [
            ({"architectures": ["DominoDraftModel"]}, HEAD, "Domino heads cannot be used yet"),
            (
                {**DFLASH, "quantization_config": {"quant_algo": "NVFP4"}},
                HEAD,
                "it is stored quantized (NVFP4)",
            ),
            (
                {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 16},
                HEAD,
                "its config is not that of a drafter",
            ),
            (DFLASH, ("config.json", "model.gguf"), "it has no weights as safetensors"),
            (DFLASH, ("model.gguf",), "it has no config.json"),
            (None, HEAD, "it is gated; request access on the Hub"),
        ],
        ids=["unsupported", "quantized", "a whole model", "GGUF", "no config", "gated"],
    )
    def test_problems_are_named(
        self,
        config: dict[str, Any] | None,
        files: tuple[str, ...],
        problem: str,
        fake_hub: FakeHub,
    ) -> None:
        fake_hub.add("me/Qwen3-8B-draft", config, files)
        assert problem in only(fake_hub).problem

    @pytest.mark.parametrize("name", ["Qwen3-8B", "/models/Qwen3-8B", "a/b/c", "."])
    def test_a_name_without_an_owner_cannot_be_looked_up(
        self, name: str, fake_hub: FakeHub
    ) -> None:
        with pytest.raises(OptionError, match="online=True needs the Hub id of a published model"):
            heads_for(name, online=True)
        assert fake_hub.calls == []

    def test_a_hub_that_rejects(self, fake_hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
        def list_models(api: HfApi, **options: Any) -> Iterator[ModelInfo]:
            raise OSError("429 Too Many Requests")
            yield

        monkeypatch.setattr(HfApi, "list_models", list_models)
        with pytest.raises(HubError, match=f"cannot list the drafters of '{TARGET}': 429"):
            heads_for(TARGET, online=True)
        assert issubclass(HfHubHTTPError, OSError)

    def test_without_a_network(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(constants, "ENDPOINT", closed_port())
        with pytest.raises(HubError, match=r"the Hub at http://\S+ cannot be reached"):
            heads_for(TARGET, online=True)

    def test_only_where_it_is_requested(
        self, fake_hub: FakeHub, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Neither the table nor a call without its head connects to the Hub."""
        monkeypatch.setattr(module, "reach_hub", lambda: pytest.fail("it looks for the Hub"))
        assert heads_for(TARGET)
        model = copy.deepcopy(build("llama"))
        model.config.name_or_path = TARGET
        with pytest.raises(AssistantError, match="heads_for"):
            model.generate(**prompts("llama", "one"), spec_strategy="block", max_new_tokens=2)
        assert fake_hub.calls == []
