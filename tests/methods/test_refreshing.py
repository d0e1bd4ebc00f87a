"""`HeadRefresher`: recorded texts, training while the target generates, and unchanged output."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_spec import AssistantError, HeadRefresher, OptionError
from hf_spec.adapters.folder import save_adapter
from hf_spec.adapters.published import write_published
from hf_spec.methods.eagle.head import build
from hf_spec.methods.eagle.settings import EagleTrainSettings
from hf_spec.methods.eagle.spec import canonical_names
from hf_spec.methods.eagle.training import layout, new_head
from hf_spec.methods.falcon.head import FalconHead, FalconShape
from hf_spec.training.features import Text, text_features
from hf_spec.training.responses import Response

NEW_TOKENS = 10


def eagle(model: PreTrainedModel, responses: list[Response], folder: Path) -> str:
    """Save an untrained EAGLE-3 head with a reduced vocabulary and return its folder."""
    torch.manual_seed(0)
    settings = EagleTrainSettings(vocabulary_size=60, mlp_size=24)
    head = new_head(model, [Text(response) for response in responses], settings, folder)
    config, tensors = layout(build(head, model), canonical_names(head.tensors), model, 4)
    write_published(folder, config, tensors, "")
    return str(folder)


def falcon(model: PreTrainedModel, responses: list[Response], folder: Path) -> str:
    """Save an untrained Falcon head that drafts two tokens per pass, with a reduced vocabulary."""
    torch.manual_seed(0)
    known = torch.tensor(sorted({token for one in responses for token in one.response}))
    save_adapter(folder, FalconHead(model, FalconShape(2), known).to_adapter({"max_depth": 4}))
    return str(folder)


METHODS = {"eagle": eagle, "falcon": falcon}


@pytest.fixture(params=METHODS)
def strategy(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def assistant(
    strategy: str, model: PreTrainedModel, responses: list[Response], tmp_path: Path
) -> str:
    return METHODS[strategy](model, responses, tmp_path / "assistant")


Generate = Callable[..., Any]


@pytest.fixture
def generate(
    model: PreTrainedModel, responses: list[Response], strategy: str, assistant: str
) -> Generate:
    """Return a function that generates for three ragged prompts and checks the greedy output."""
    prompts = [response.prompt for response in responses[:3]]
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    given: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": NEW_TOKENS}

    def call(**options: Any) -> Any:
        plain = model.generate(ids, do_sample=False, pad_token_id=0, **given)
        found = model.generate(
            ids,
            do_sample=False,
            pad_token_id=0,
            return_dict_in_generate=True,
            spec_strategy=strategy,
            **given,
            **{"assistant": assistant, **options},
        )
        assert torch.equal(found.sequences, plain)
        return found

    return call


def test_texts_are_recorded_with_the_features_of_training(
    model: PreTrainedModel, assistant: str, generate: Generate
) -> None:
    refresher = HeadRefresher(model, assistant)
    sequences: Tensor = generate().sequences
    texts = refresher._recorder.take()
    assert len(texts) == len(sequences)
    for text, sequence in zip(texts, sequences, strict=True):
        response = text.response
        assert sequence[: -response.num_tokens].tolist() == [0] * (
            len(sequence) - response.num_tokens
        )
        assert sequence[-response.num_tokens :].tolist() == [*response.prompt, *response.response]
        assert len(response.response) == NEW_TOKENS
        (expected,) = text_features(model, [response], refresher._recorder.layers)
        assert text.features is not None
        torch.testing.assert_close(text.features, expected.bfloat16(), atol=1e-2, rtol=1e-2)
    assert refresher._recorder.take() == []


def test_drafts_improve_and_the_output_stays(
    model: PreTrainedModel, assistant: str, generate: Generate
) -> None:
    refresher = HeadRefresher(model, assistant, learning_rate=3e-3)
    before, losses = generate().spec_stats.tau, []
    for _ in range(15):
        generate()
        figures = refresher.refresh()
        losses.append(figures["loss"])
        assert figures["tokens"] >= 2 * NEW_TOKENS
    assert losses[-1] < losses[0] - 1
    assert generate().spec_stats.tau > before + 0.5
    # The loaded head is the same object.
    assert generate(assistant=refresher.head).spec_stats.tau > before + 0.5


def test_it_follows_the_target(model: PreTrainedModel, assistant: str, generate: Generate) -> None:
    """The loss is computed with the target's current weights."""
    refresher = HeadRefresher(model, assistant, learning_rate=3e-3)
    for _ in range(8):
        generate()
        before = refresher.refresh()["loss"]
    with torch.no_grad():
        model.get_output_embeddings().weight.neg_()
    generate()
    assert refresher.refresh()["loss"] > before + 0.5


def test_a_copied_output_head_follows_the_target(
    model: PreTrainedModel, responses: list[Response], tmp_path: Path
) -> None:
    refresher = HeadRefresher(model, falcon(model, responses, tmp_path))
    with torch.no_grad():
        model.get_output_embeddings().weight.neg_()
    refresher.refresh()
    copied: Any = refresher.head.head
    assert torch.equal(copied.scores.weight, model.lm_head.weight[copied.vocabulary])


def test_nothing_happens_without_texts(
    model: PreTrainedModel, assistant: str, generate: Generate
) -> None:
    refresher = HeadRefresher(model, assistant)
    before = {name: weight.clone() for name, weight in refresher.head.state_dict().items()}
    assert refresher.refresh() == {"loss": 0.0, "tokens": 0}
    after = refresher.head.state_dict()
    assert all(torch.equal(weight, after[name]) for name, weight in before.items())


def test_heads_built_in_inference_mode(
    model: PreTrainedModel, assistant: str, generate: Generate
) -> None:
    with torch.inference_mode():
        generate()
    refresher = HeadRefresher(model, assistant)
    with torch.inference_mode():
        generate()
    assert refresher.refresh()["tokens"]
    generate()
    assert refresher.refresh()["tokens"]


def test_half_precision_weights_are_trained_in_float32(
    model: PreTrainedModel, responses: list[Response], strategy: str, tmp_path: Path
) -> None:
    """Updates too small for bfloat16 accumulate."""
    half = model.to(torch.bfloat16)
    refresher = HeadRefresher(
        half, METHODS[strategy](half, responses, tmp_path), learning_rate=1e-3, num_steps=1
    )
    before = {name: weight.clone() for name, weight in refresher.head.state_dict().items()}
    for _ in range(8):
        half.generate(
            torch.tensor([responses[0].prompt]),
            max_new_tokens=NEW_TOKENS,
            spec_strategy=strategy,
            assistant=refresher.head,
        )
        refresher.refresh()
    large = [
        (weight, before[name])
        for name, weight in refresher.head.state_dict().items()
        if name.endswith("norm.weight")
    ]
    assert large
    assert {weight.dtype for weight, _ in large} == {torch.bfloat16}
    assert any(not torch.equal(weight, old) for weight, old in large)


def test_the_head_is_left_as_other_heads(
    model: PreTrainedModel, assistant: str, generate: Generate
) -> None:
    refresher = HeadRefresher(model, assistant)
    generate()
    refresher.refresh()
    head = refresher.head
    assert not head.training
    assert not any(weight.requires_grad or weight.grad is not None for weight in head.parameters())
    refresher.close()
    generate()
    assert refresher._recorder.take() == []
    HeadRefresher(model, assistant).close()


def test_an_error_in_the_loss_restores_the_head(
    model: PreTrainedModel, assistant: str, generate: Generate, monkeypatch: pytest.MonkeyPatch
) -> None:
    refresher = HeadRefresher(model, assistant)
    generate()
    monkeypatch.setattr("hf_spec.methods.refreshing.optimizer_step", None)
    with pytest.raises(TypeError):
        refresher.refresh()
    assert not refresher.head.training
    assert not any(weight.requires_grad for weight in refresher.head.parameters())
    generate()


def test_the_oldest_texts_are_dropped(
    model: PreTrainedModel, assistant: str, generate: Generate
) -> None:
    refresher = HeadRefresher(model, assistant, max_tokens=30)
    generate()
    last = generate().sequences[-1]
    texts = refresher._recorder.take()
    assert 0 < sum(text.response.num_tokens - 1 for text in texts) <= 30
    assert texts[-1].response.response == last[-NEW_TOKENS:].tolist()


def test_texts_that_continue_a_cache_are_left_out(
    model: PreTrainedModel, assistant: str, strategy: str, responses: list[Response]
) -> None:
    refresher = HeadRefresher(model, assistant)
    ids = torch.tensor([responses[0].prompt])
    options: dict[str, Any] = {
        "max_new_tokens": 4,
        "do_sample": False,
        "return_dict_in_generate": True,
        "spec_strategy": strategy,
        "assistant": assistant,
    }
    first = model.generate(ids, **options)
    assert len(refresher._recorder.take()) == 1
    model.generate(first.sequences, past_key_values=first.past_key_values, **options)
    assert refresher._recorder.take() == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"learning_rate": 0}, "learning_rate=0 must be above 0"),
        ({"num_steps": -1}, "num_steps=-1 must be above 0"),
        ({"max_tokens": 0}, "max_tokens=0 must be above 0"),
    ],
)
def test_numbers(
    model: PreTrainedModel, assistant: str, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(OptionError, match=message):
        HeadRefresher(model, assistant, **change)


def test_one_refresher_per_head(model: PreTrainedModel, assistant: str) -> None:
    refresher = HeadRefresher(model, assistant)
    with pytest.raises(OptionError, match="has a HeadRefresher already"):
        HeadRefresher(model, refresher.head)


@pytest.mark.parametrize("assistant", [None, "truncated:1", torch.nn.Linear(1, 1)])
def test_other_assistants(model: PreTrainedModel, assistant: Any) -> None:
    with pytest.raises(AssistantError, match="pass one for spec_strategy='eagle' or 'falcon'"):
        HeadRefresher(model, assistant)
