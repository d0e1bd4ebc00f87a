"""SDSAT: the target drafts for itself after semantic adaptive tokens.

Paper: Liu and Zhu 2024, arXiv 2403.18647. With k adaptive tokens a_1..a_k after the text the target
predicts several future tokens in one forward pass.

One round, two forward passes of the target (section 2.1):

1. Draft step 1 (eq. 1): run the last token and k adaptive tokens. The first output is exact, the
   next k are drafts.
2. The keys and values of the adaptive tokens are dropped.
3. Draft step 2 (eq. 2): run the exact token and the drafts, as a chain or as a tree.
4. Verification (eq. 3): accept drafts as long as they equal the outputs of step 2.
5. 2 to k + 2 tokens are committed per round.

The paper fine-tunes the whole model. Ours:

- training only the embeddings, or also a LoRA that acts at adaptive positions only; both leave the
  target's output unchanged
- training on branches of the clean text, as in decoding
- `fused=True`, which drafts and verifies in one forward pass
- lossless sampling by node draw; the paper's sampling rule changes the distribution and is
  available as `SdsatConfig(lossy=True)`
"""
