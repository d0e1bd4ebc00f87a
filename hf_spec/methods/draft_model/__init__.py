"""Drafts from a smaller model: a chain (`draft`) or a tree (`tree`).

Paper: speculative decoding (Leviathan et al. 2023, arXiv 2211.17192).

One round:

1. The draft model runs the tokens that the last round committed, then one forward pass per level.
2. A chain takes one token per level, sampled when the target samples; a tree takes the most
   probable children and expands the most probable paths.
3. The target runs all draft tokens in one forward pass.
4. Accepted tokens and one more are committed; the rule preserves the target's distribution.
5. The draft model keeps the keys and values of accepted tokens only.

The levels are grown by `hf_spec.drafting.level_drafter`. Differences: trees; batches; draft length
and number of nodes can follow measured costs; the draft model may know fewer tokens than the
target, or use another tokenizer.
"""
