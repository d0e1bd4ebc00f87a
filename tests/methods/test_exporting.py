"""Exporting a head: the target's config, the model card, and heads that cannot be exported."""

from __future__ import annotations

import copy
import json
import shlex
import shutil
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest

from hf_spec import AssistantError, HubError, OptionError
from hf_spec.adapters.published import known_head
from hf_spec.methods.exporting import export_head
from tests import published_heads as heads
from tests.tiny_models import build, disco_adapter


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a folder with the config of a target and no weights."""
    folder = tmp_path_factory.mktemp("target")
    config = copy.deepcopy(build("llama").config)
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    return str(folder)


def changed(folder: str, to: Path, **config: Any) -> str:
    """Return a copy of a head with changes in its config."""
    to.mkdir()
    told = json.loads((Path(folder) / "config.json").read_text())
    (to / "config.json").write_text(json.dumps({**told, **config}))
    weights = Path(folder) / "model.safetensors"
    (to / weights.name).write_bytes(weights.read_bytes())
    return str(to)


def test_a_head_that_names_nobody_is_told_its_target(target: str, tmp_path: Path) -> None:
    source = heads.sample("specforge").folder
    with pytest.raises(OptionError, match="does not name its target; pass --base-model"):
        export_head(source, tmp_path / "out", "vllm")
    command = export_head(source, tmp_path / "out", "vllm", target)
    config = known_head(tmp_path / "out").config
    assert config["speculators_config"]["verifier"]["name_or_path"] == target
    words = shlex.split(command)
    assert words[:3] == ["vllm", "serve", target]
    told = json.loads(words[words.index("--speculative-config") + 1])
    assert told["model"] == str(tmp_path / "out")
    assert told["num_speculative_tokens"] == 3


def test_the_name_in_a_head_stays_and_its_config_is_read(target: str, tmp_path: Path) -> None:
    inner = {
        "verifier": {"name_or_path": target, "architectures": ["LlamaForCausalLM"]},
        "proposal_methods": [{"speculative_tokens": 5}],
    }
    source = changed(heads.sample("speculators").folder, tmp_path / "a", speculators_config=inner)
    command = export_head(source, tmp_path / "out", "vllm")
    assert '"num_speculative_tokens": 5' in command
    named = changed(heads.sample("speculators").folder, tmp_path / "b")
    export_head(named, tmp_path / "other", "vllm", target)
    verifier = known_head(tmp_path / "other").config["speculators_config"]["verifier"]
    assert verifier == {"name_or_path": "org/other", "architectures": ["LlamaForCausalLM"]}


def test_the_license_of_a_repository_is_named(
    target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Path(changed(heads.sample().folder, tmp_path / "source"))
    (source / "README.md").write_text("---\nlicense: mit\n---\n")

    def download(repo_id: str, allow_patterns: list[str], **_: Any) -> str:
        cache = tmp_path / "cache"
        shutil.copytree(
            source,
            cache,
            dirs_exist_ok=True,
            ignore=lambda _, names: [
                name for name in names if not any(fnmatch(name, p) for p in allow_patterns)
            ],
        )
        return str(cache)

    monkeypatch.setattr("hf_spec.adapters.hub.snapshot_download", download)
    export_head("org/head", tmp_path / "out", "vllm", target)
    card = (tmp_path / "out" / "README.md").read_text()
    assert "from `head`, whose license applies (mit)" in card


def test_a_card_that_is_no_yaml_names_no_license(target: str, tmp_path: Path) -> None:
    source = Path(changed(heads.sample().folder, tmp_path / "my-head"))
    (source / "README.md").write_text("---\nlicense: [mit\n---\n")
    export_head(str(source), tmp_path / "out", "vllm", target)
    assert "whose license applies." in (tmp_path / "out" / "README.md").read_text()


def test_the_card_has_source_license_and_command(target: str, tmp_path: Path) -> None:
    source = Path(changed(heads.sample().folder, tmp_path / "my-head"))
    (source / "README.md").write_text("---\nlicense: mit\n---\n")
    command = export_head(source, tmp_path / "out", "sglang", target)
    assert "--speculative-num-steps 3" in command
    assert "--speculative-num-draft-tokens 4" in command
    card = (tmp_path / "out" / "README.md").read_text()
    assert card.startswith("---\nlicense: mit\n---\n")
    assert "from `my-head`, whose license applies (mit)" in card
    assert "--speculative-draft-model-path out " in card
    assert str(tmp_path / "out") not in card


def test_what_stays_here_is_named(tmp_path: Path) -> None:
    with pytest.raises(AssistantError, match=r"method 'disco' .* `hf-spec train eagle`"):
        export_head(disco_adapter("llama"), tmp_path / "out", "vllm")
    with pytest.raises(AssistantError, match="of the family 'eagle', which needs no export"):
        export_head(heads.sample("eagle").folder, tmp_path / "out", "vllm")
    build("llama").config.save_pretrained(tmp_path / "model")
    with pytest.raises(AssistantError, match="not a published head"):
        export_head(tmp_path / "model", tmp_path / "out", "vllm")
    assert not (tmp_path / "out").exists()


def test_nothing_is_overwritten(target: str, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("")
    with pytest.raises(OptionError, match="exists already"):
        export_head(heads.sample().folder, tmp_path, "vllm", target)


def test_another_target_is_refused(target: str, tmp_path: Path) -> None:
    wide = build("llama").config.to_dict() | {"hidden_size": 40}
    folder = tmp_path / "wide"
    type(build("llama").config)(**wide).save_pretrained(folder)
    with pytest.raises(AssistantError, match="is for another target"):
        export_head(heads.sample().folder, tmp_path / "out", "vllm", str(folder))


def test_a_target_out_of_reach_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(HubError, match="org/other is neither a folder nor in the cache"):
        export_head(heads.sample("speculators").folder, tmp_path / "out", "vllm")
