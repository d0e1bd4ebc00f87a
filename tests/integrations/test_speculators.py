"""Trained and exported heads have the same logits in vLLM's speculators as in hf_spec."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hf_spec.adapters.published import known_head, write_published
from hf_spec.methods.eagle.head import build
from hf_spec.methods.eagle.settings import EagleTrainSettings
from hf_spec.methods.eagle.training import layout, new_head
from hf_spec.methods.exporting import export_head
from hf_spec.training.features import stored_texts
from hf_spec.training.responses import Response
from tests import published_heads as heads
from tests.speculators_target import saved_target
from tests.tiny_models import build as tiny

pytest.importorskip(
    "speculators.models.eagle3", reason="needs the package speculators in an environment of its own"
)

from speculators.models.eagle3 import Eagle3DraftModel

pytestmark = pytest.mark.integration


@torch.no_grad()
@pytest.mark.parametrize("vocabulary", [60, None])
def test_a_head_says_the_same_there(
    vocabulary: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = saved_target(tmp_path, monkeypatch)
    responses = [
        Response(f"r{n}", "t", [5, 6], [7 + (n * m) % 80 for m in range(9)]) for n in range(9)
    ]
    settings = EagleTrainSettings(vocabulary_size=vocabulary)
    texts = stored_texts(target, responses, tmp_path / "features", (2, 4, 5, 8))
    made = new_head(target, texts, settings, tmp_path / "head")
    # Give every weight matrix its own random values.
    tensors = {
        name: torch.randn_like(t) * 0.3 if t.is_floating_point() and t.ndim > 1 else t
        for name, t in made.tensors.items()
    }
    tensors["lm_head.weight"] = made.tensors["lm_head.weight"]
    write_published(tmp_path / "head", *layout(build(made, target), tensors, target, 4), "")
    said = compared(tmp_path / "head", target)
    assert said.shape[-1] == len(made.tensors["lm_head.weight"])


@torch.no_grad()
@pytest.mark.parametrize("kind", ["eagle3", "specforge", "every token", "EAGLE-3.1"])
def test_an_exported_head_says_the_same_there(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Export heads of other layouts, and one with the norms of EAGLE-3.1."""
    target = saved_target(tmp_path, monkeypatch, tiny("llama"))
    source = heads.sample("eagle3").folder if kind == "EAGLE-3.1" else heads.sample(kind).folder
    if kind == "EAGLE-3.1":
        norms = {f"fc_norm.{i}.weight": (heads.WIDTH,) for i in range(3)}
        tensors = {**known_head(source).tensors, **heads.random_tensors(norms)}
        source = heads.save("eagle31", heads.plain_config(fc_norm=True, norm_output=True), tensors)
    export_head(source, tmp_path / "head", "vllm", "target")
    assert build(known_head(source), target).spec.norm_output == (kind == "EAGLE-3.1")
    compared(tmp_path / "head", target)


def compared(folder: Path, target: Any) -> torch.Tensor:
    """Return the logits of a head in speculators, after checking that they equal hf_spec's."""
    head = build(known_head(folder), target)
    theirs = Eagle3DraftModel.from_pretrained(folder).eval().float()
    # The head's file has no embedding, because it uses the target's.
    theirs.embed_tokens.weight.data.copy_(target.get_input_embeddings().weight)

    tokens = torch.randint(3, 90, (1, 12))
    states = torch.randn(1, 12, 3 * target.config.hidden_size)
    said: list[torch.Tensor] = []
    theirs.lm_head.register_forward_hook(lambda *given: said.append(given[2]))
    theirs(states, tokens, torch.zeros_like(tokens), ttt_steps=1)

    mixed, _ = head.mix(tokens, head.fuse(states.chunk(3, dim=-1)))
    mask = torch.ones(12, 12, dtype=torch.bool).tril()[None, None]
    outputs = head.attend(mixed, attention_mask=mask, position_ids=torch.arange(12)[None])
    torch.testing.assert_close(head.head.draft_logits(outputs), said[0], rtol=1e-4, atol=1e-4)
    assert len(said[0].argmax(-1).unique()) > 3
    return said[0]
