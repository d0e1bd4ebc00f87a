"""A model with a strategy: what it is given, and what it refuses."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_spec import AssistantError, OptionError
from hf_spec.cli.answer.speaker import Speaker
from hf_spec.cli.options import AnswerSettings, Placement
from tests.cli.answer.conftest import make_tokenizer
from tests.tiny_models import build


def test_a_seed_draws_the_same_again(folder: Path) -> None:
    texts = []
    for seed in (1, 1, 2):
        settings = AnswerSettings("lookup", 12, sample=True, temperature=2.0, seed=seed)
        speaker = Speaker.load(str(folder), Placement(device="cpu"), settings)
        texts.append(speaker.generate(torch.arange(9, 15)[None]).sequences.tolist())
    assert texts[0] == texts[1] != texts[2]


def test_a_dtype(folder: Path) -> None:
    speaker = Speaker.load(str(folder), Placement("bfloat16"), AnswerSettings("lookup"))
    assert speaker.model.dtype == torch.bfloat16


def test_a_strategy_with_its_options_and_assistant(speaker: Speaker, folder: Path) -> None:
    speaker.choose(f"draft:max_draft_tokens=3@{folder}")
    assert speaker.entry.config.to_dict()["max_draft_tokens"] == 3
    output: Any = speaker.generate(torch.arange(9, 15)[None])
    # The draft model is the target.
    assert output.spec_stats.accepted_tokens == output.spec_stats.drafted_tokens > 0


def test_an_assistant_goes_to_strategies_that_take_one(speaker: Speaker) -> None:
    speaker.assistants = ("some-folder",)
    speaker.choose("tree")
    assert speaker.entry.assistant == "some-folder"
    speaker.choose("lookup")
    assert speaker.entry.assistant is None


@pytest.mark.parametrize(
    ("entry", "error", "message"),
    [
        ("nonsense", OptionError, "unknown spec_strategy 'nonsense'"),
        ("lookup:depth=3", OptionError, "has no option depth"),
        ("draft", AssistantError, "needs --assistant"),
    ],
)
def test_a_wrong_strategy_changes_nothing(
    speaker: Speaker, entry: str, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        speaker.choose(entry)
    assert speaker.entry.name == "lookup"


def test_no_chat_template() -> None:
    speaker = Speaker(build("llama"), make_tokenizer(template=None), AnswerSettings())
    with pytest.raises(OptionError, match=r"has no chat template.*generate --raw"):
        speaker.encode([{"role": "user", "content": "w11"}])


def test_longer_than_the_context(speaker: Speaker) -> None:
    with pytest.raises(OptionError, match=r"the prompt has 240 tokens; with 24 new .* the 256"):
        speaker.generate(torch.full((1, 240), 9))


def test_code_of_a_model_is_not_run(folder: Path, tmp_path: Path) -> None:
    own = tmp_path / "model"
    shutil.copytree(folder, own)
    config = json.loads((own / "config.json").read_text())
    config |= {"model_type": "own", "auto_map": {"AutoConfig": "code.Config"}}
    (own / "config.json").write_text(json.dumps(config))
    (own / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    with pytest.raises(ValueError, match="custom code"):
        Speaker.load(str(own), Placement(device="cpu"), AnswerSettings("lookup"))
    assert not (tmp_path / "ran").exists()
