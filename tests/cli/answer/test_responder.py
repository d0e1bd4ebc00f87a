"""`Responder`: settings of a model with a strategy, and rejected ones."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_spec import AssistantError, OptionError
from hf_spec.cli.answer.responder import Responder
from hf_spec.cli.options import AnswerSettings, Placement
from tests.cli.answer.conftest import make_tokenizer
from tests.tiny_models import build


def test_a_seed_draws_the_same_again(folder: Path) -> None:
    texts = []
    for seed in (1, 1, 2):
        settings = AnswerSettings("lookup", 12, sample=True, temperature=2.0, seed=seed)
        responder = Responder.load(str(folder), Placement(device="cpu"), settings)
        texts.append(responder.generate(torch.arange(9, 15)[None]).sequences.tolist())
    assert texts[0] == texts[1] != texts[2]


def test_a_dtype(folder: Path) -> None:
    responder = Responder.load(str(folder), Placement("bfloat16"), AnswerSettings("lookup"))
    assert responder.model.dtype == torch.bfloat16


def test_a_strategy_with_its_options_and_assistant(responder: Responder, folder: Path) -> None:
    responder.set_strategy(f"draft:max_draft_tokens=3@{folder}")
    assert responder.entry.config.to_dict()["max_draft_tokens"] == 3
    output: Any = responder.generate(torch.arange(9, 15)[None])
    # The draft model is the target.
    assert output.spec_stats.accepted_tokens == output.spec_stats.drafted_tokens > 0


def test_an_assistant_goes_to_strategies_that_take_one(responder: Responder) -> None:
    responder.assistants = ("some-folder",)
    responder.set_strategy("tree")
    assert responder.entry.assistant == "some-folder"
    responder.set_strategy("lookup")
    assert responder.entry.assistant is None


@pytest.mark.parametrize(
    ("entry", "error", "message"),
    [
        ("nonsense", OptionError, "unknown spec_strategy 'nonsense'"),
        ("lookup:depth=3", OptionError, "has no option depth"),
        ("draft", AssistantError, "needs --assistant"),
    ],
)
def test_a_wrong_strategy_changes_nothing(
    responder: Responder, entry: str, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        responder.set_strategy(entry)
    assert responder.entry.name == "lookup"


def test_no_chat_template() -> None:
    responder = Responder(build("llama"), make_tokenizer(template=None), AnswerSettings())
    with pytest.raises(OptionError, match=r"has no chat template.*generate --raw"):
        responder.encode([{"role": "user", "content": "w11"}])


def test_longer_than_the_context(responder: Responder) -> None:
    with pytest.raises(
        OptionError, match=r"the prompt has 240 tokens; with 24 new .* context of 256"
    ):
        responder.generate(torch.full((1, 240), 9))


def test_code_of_a_model_is_not_run(folder: Path, tmp_path: Path) -> None:
    own = tmp_path / "model"
    shutil.copytree(folder, own)
    config = json.loads((own / "config.json").read_text())
    config |= {"model_type": "own", "auto_map": {"AutoConfig": "code.Config"}}
    (own / "config.json").write_text(json.dumps(config))
    (own / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    with pytest.raises(ValueError, match="custom code"):
        Responder.load(str(own), Placement(device="cpu"), AnswerSettings("lookup"))
    assert not (tmp_path / "ran").exists()
