"""What training adaptive tokens did to the model itself: perplexity on texts it was not trained on.

Behind every text, in the same forward pass, follow adaptive tokens; for a model without them,
ordinary tokens, so that both passes have one shape. With adapters of mode "gated" and "embeddings"
the losses of the text are equal to the bit, unless the embeddings or the LoRA reach rows that are
not theirs. A LoRA for all positions and a fine-tuned model (Liu et al. 2024, arXiv 2403.18647,
section 3.4) have others. Run as `python -m examples.studies.sdsat.perplexity --help` says.
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

# Tokens behind every text.
NUM_ADAPTIVE = 3


@torch.no_grad()
def losses(
    model: PreTrainedModel, texts: Sequence[Response], tokens: AdaptiveTokens | None = None
) -> Tensor:
    """(N,) float32, the cross-entropy of every answer token in nats, one text a forward.

    Args:
        model: in evaluation mode, and with the adaptive tokens active if they are given.
        texts: prompts with answers; the prompts are read, not counted.
        tokens: what follows every text; by default tokens of the model's vocabulary.
    """
    # The first kind is the only one that every adapter has.
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
    """`losses` of a model that an SDSAT adapter is loaded into, adaptive tokens behind the texts.

    Args:
        model: the adapter's base; an adapter of mode "lora" is merged into it.
        adapter: folder or Hub id.
        texts: as for `losses`.
    """
    loaded = load_adapter(adapter, METHOD)
    if loaded.options.get("mode") == "lora":
        merge_lora(model, loaded)
    tokens, _ = adaptive_tokens(model, loaded)
    with tokens.active(model):
        return losses(model, texts, tokens)


def main(argv: list[str] | None = None) -> None:
    """Command line; prints a line of JSON per model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="the base: folder or Hub id")
    parser.add_argument("--adapter", action="append", default=[], help="of SDSAT; may be repeated")
    parser.add_argument("--tuned", action="append", default=[], help="a fine-tuned model, likewise")
    parser.add_argument("--texts", type=Path, required=True, help="of `hf-spec train responses`")
    parser.add_argument("--num-texts", type=int, help="the first so many; all by default")
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
