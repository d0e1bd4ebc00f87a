"""Lookup: drafts copied from text that is already there, without a model.

LLMA (Yang et al. 2023, "Inference with Reference", arXiv 2304.04487) and prompt lookup (Saxena
2023). Each round:

1. Match the last n tokens of the sequence against earlier positions (LLMA: n = 2).
2. Copy the k tokens that follow a match (LLMA: k = 7).
3. Verify them in one forward pass, as any other draft.

Differences: the output is indexed too, not only the prompt (`prompt_only=True` restores LLMA); all
n from 8 down to 1 are tried; several matches become branches of one tree. Without a configured
length, the cost model (`hf_spec.drafting.cost_model`) chooses it by measured acceptance rates,
separate ones for short and long matches.

With `across_answers`, drafts are also copied from earlier answers, as in SuffixDecoding (Oliaro et
al. 2024, arXiv 2411.04975, section 3; see `answer_store`).
"""
