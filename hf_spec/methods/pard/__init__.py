"""PARD: a draft model that predicts all tokens of a draft in one forward pass.

An et al. 2025, "PARD: Accelerating LLM Inference with Low-Cost PARallel Draft Model Adaptation",
arXiv 2504.18583. Each round:

1. The input of the draft model is the new committed tokens, the root, and K - 1 mask tokens.
2. One forward pass: the root predicts the first draft token, mask i predicts draft token i + 1. No
   prediction depends on the other draft tokens.
3. The target verifies the chain of the most probable tokens.
4. Keys and values of mask tokens are dropped. Accepted tokens are fed as tokens in the next round.

The mask token id is `pard_token` in the config of the draft model. Training it (the paper's
conditional drop, COD) is not implemented; published models are loaded.

Differences: a length policy or the cost model may shorten a draft; `children` > 1 gives a tree of
several tokens per position, at the cost of no further forward pass; chains can be sampled.
"""
