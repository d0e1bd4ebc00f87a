"""Effect of training adaptive tokens on the model itself: perplexity on held-out texts.

Adaptive tokens follow every text in the same forward pass. A model without them gets ordinary
tokens instead, so both passes have the same shape. With adapters of mode "gated" and "embeddings",
the losses of the text are identical to the bit, unless the embeddings or the LoRA affect rows that
are not theirs. A LoRA for all positions and a fine-tuned model (Liu et al. 2024, arXiv 2403.18647,
section 3.4) have different losses. For usage, run
`python -m examples.studies.sdsat.perplexity --help`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F
from tqdm import tqdm
from transformers import AutoModelForCausalLM, PreTrainedModel

from hf_spec.adapters.folder import load_adapter
from hf_spec.methods.sdsat.adaptive_tokens import (
    METHOD,
    AdaptiveTokens,
    adaptive_tokens,
    merge_lora,
)
from hf_spec.training.responses import Response, read_responses

# Number of tokens appended to every text.
NUM_ADAPTIVE = 3


@torch.no_grad()
def losses(
    model: PreTrainedModel, texts: Sequence[Response], tokens: AdaptiveTokens | None = None
) -> Tensor:
    """Return the (N,) float32 cross-entropy of every answer token in nats.

    Args:
        model: in evaluation mode, with the adaptive tokens active if given.
        texts: prompts with answers, one per forward pass; prompt tokens are not counted.
        tokens: adaptive tokens to append. Default: ordinary tokens of the model's vocabulary.
    """
    # Only the first kind exists in every adapter.
    behind = [0] * NUM_ADAPTIVE if tokens is None else tokens.chain(1) * NUM_ADAPTIVE
    found = []
    for text in tqdm(texts, desc="texts", disable=None):
        read = [*text.prompt, *text.response]
        ids = torch.tensor([[*read, *behind]], device=model.device)
        if tokens is None:
            logits = model(inputs_embeds=model.get_input_embeddings()(ids)).logits[0]
        else:
            with tokens.embedded(model, ids) as embeddings:
                logits = model(inputs_embeds=embeddings).logits[0]
        answer = slice(len(text.prompt), len(read))
        logits = logits[answer.start - 1 : answer.stop - 1].float()
        found.append(F.cross_entropy(logits, ids[0, answer], reduction="none"))
    return torch.cat(found).cpu()


def with_adapter(model: PreTrainedModel, adapter: str | Path, texts: Sequence[Response]) -> Tensor:
    """Return the `losses` of a model with an SDSAT adapter, adaptive tokens after the texts.

    Args:
        model: base of the adapter; an adapter of mode "lora" is merged into it.
        adapter: folder or Hub id.
        texts: see `losses`.
    """
    loaded = load_adapter(adapter, METHOD)
    if loaded.options.get("mode") == "lora":
        merge_lora(model, loaded)
    tokens, _ = adaptive_tokens(model, loaded)
    with tokens.active(model):
        return losses(model, texts, tokens)


def main(argv: list[str] | None = None) -> None:
    """Run the command line and print a line of JSON per model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="the base: folder or Hub id")
    parser.add_argument("--adapter", action="append", default=[], help="of SDSAT; may be repeated")
    parser.add_argument("--tuned", action="append", default=[], help="a fine-tuned model, likewise")
    parser.add_argument("--texts", type=Path, required=True, help="of `hf-spec train responses`")
    parser.add_argument("--num-texts", type=int, help="only the first N texts")
    options = parser.parse_args(argv)
    texts = list(read_responses(options.texts))[: options.num_texts]

    def base(name: str) -> PreTrainedModel:
        return AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32).eval()

    untouched = losses(base(options.model), texts)
    results = {options.model: untouched}
    for adapter in options.adapter:
        results[adapter] = with_adapter(base(options.model), adapter, texts)
    for name in options.tuned:
        results[name] = losses(base(name), texts)
    for name, found in results.items():
        row = {
            "model": name,
            "tokens": len(found),
            "perplexity": float(found.double().mean().exp()),
            "equal_to_the_bit": torch.equal(found, untouched),
        }
        print(json.dumps(row))


if __name__ == "__main__":
    main()
