"""Compare a block head trained by hf_spec with the same head in vLLM's speculators package.

    python -m examples.studies.block.in_speculators --model MODEL --head FOLDER

Needs the package speculators, in a separate environment. The package loads the target by the name
in the head's config, so a link to MODEL is created in a temporary folder.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from speculators.models.dflash import DFlashDraftModel
from torch import Tensor

from examples.studies.models import load_model
from hf_spec.adapters.published import known_head
from hf_spec.common.prompts import load_prompts
from hf_spec.methods.block.anchored import anchored_blocks, use_plain_attention
from hf_spec.methods.block.layouts import build_block_head


@torch.no_grad()
def compare(folder: Path, target: Any, tokens: Tensor, blocks: int = 8) -> tuple[Tensor, Tensor]:
    """Return (1, A, levels, R) logits of A blocks of a text, from speculators and from hf_spec.

    `tokens` are (1, T) int64.
    """
    head = build_block_head(known_head(folder), target)
    use_plain_attention(head)
    theirs: Any = DFlashDraftModel.from_pretrained(folder).eval().float()
    theirs.embed_tokens.weight.data.copy_(target.get_input_embeddings().weight)
    hidden = target(tokens, output_hidden_states=True).hidden_states
    states = [hidden[layer] for layer in head.shape.hidden_layers]
    mask = torch.ones(tokens.shape)
    mask[:, :2] = 0
    _, logits, _, _, places = theirs._backbone_forward(
        torch.cat(states, dim=-1),
        tokens,
        mask,
        torch.zeros_like(states[0]),
        torch.zeros_like(tokens),
        max_anchors=blocks,
    )
    size = head.shape.block_size
    anchors = places[::size][None]
    outputs = anchored_blocks(head, states, tokens[:, anchors[0]], anchors - 1)
    wanted = logits.view(1, -1, size, logits.shape[-1])[:, :, 1:]
    return wanted, torch.stack([head.logits(outputs[:, :, i]) for i in range(1, size)], dim=2)


def main(argv: list[str] | None = None) -> None:
    """Compare the logits on one text, and print the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="folder")
    parser.add_argument("--head", type=Path, required=True, help="folder")
    options = parser.parse_args(argv)
    model, tokenizer = load_model(options.model)
    tokens = load_prompts()[0].encode(tokenizer)[:, :96]
    folder = options.head.absolute()
    entries = known_head(folder).config["speculators_config"]["verifier"]
    with tempfile.TemporaryDirectory() as place:
        link = Path(place) / entries["name_or_path"]
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(Path(options.model).absolute())
        before = Path.cwd()
        os.chdir(place)
        try:
            wanted, ours = compare(folder, model, tokens, 16)
        finally:
            os.chdir(before)
    same = int((wanted.argmax(-1) == ours.argmax(-1)).sum())
    gap = float((wanted - ours).abs().max() / wanted.abs().max())
    print(f"{same} of {wanted[..., 0].numel()} drafts equal, largest difference {gap:.1e}")


if __name__ == "__main__":
    main()
