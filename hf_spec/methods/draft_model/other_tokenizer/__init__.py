"""Draft models whose tokenizer differs from the target's.

Timor et al. 2025, "Accelerating LLM Inference with Lossless Speculative Decoding Algorithms for
Heterogeneous Vocabularies", arXiv 2502.05202. The draft model reads the text so far in its own
tokens (`draft_text`). Its drafts become target tokens in one of two ways (`translation`):

- "shared" (TLI, algorithm 4): it drafts only tokens that both vocabularies have. Its probabilities,
  normalized over these, are those of target tokens, so sampled drafts are verified by residual
  rejection.
- "text" (compare SLEM, algorithm 2): it drafts any of its tokens. The text of every path is encoded
  with the target's tokenizer and verified by node draw. Drafts are never sampled.

Differences: vocabularies are compared by decoded text, not by token name (`tokenizers`); both ways
draft trees and graphs; "shared" is the default if it covers half of the target's vocabulary.

Text that a tokenizer does not reproduce exactly only lowers the acceptance rate; the output is
always the target's.
"""
