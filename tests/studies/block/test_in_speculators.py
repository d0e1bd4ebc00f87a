"""speculators loads a block head that was trained by hf_spec, with equal predictions."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hf_spec.adapters.published import write_published
from hf_spec.methods.block.settings import BlockTrainSettings
from hf_spec.methods.block.training import layout, new_head, start_head, trained_weights
from hf_spec.training.features import stored_texts
from hf_spec.training.responses import Response
from tests.speculators_target import saved_target

pytest.importorskip(
    "speculators.models.dflash", reason="needs the package speculators in an environment of its own"
)

from examples.studies.block.in_speculators import compare

pytestmark = pytest.mark.integration


@torch.no_grad()
@pytest.mark.parametrize("vocabulary", [60, None])
def test_a_block_head_says_the_same_there(
    vocabulary: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = saved_target(tmp_path, monkeypatch)
    responses = [Response("r", "t", [5, 6], [7 + (n * 11) % 80 for n in range(60)])]
    settings = BlockTrainSettings(block_size=4, vocabulary_size=vocabulary)
    texts = stored_texts(target, responses, tmp_path / "features", (2, 4, 5, 8))
    initial = new_head(target, texts, settings, tmp_path / "head")
    head = start_head(initial, target, settings)
    trained = trained_weights(head)
    for weight in trained.values():
        if weight.ndim > 1:
            weight.copy_(torch.randn_like(weight) * 0.3)
    write_published(tmp_path / "head", *layout(head, initial, trained, target), "")
    said, ours = compare(tmp_path / "head", target, torch.randint(3, 90, (1, 20)))
    torch.testing.assert_close(ours, said, rtol=1e-4, atol=1e-4)
    assert len(said.argmax(-1).unique()) > 3
