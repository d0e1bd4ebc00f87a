"""Medusa heads and MLP speculators: drafts from the target's newest hidden state alone.

Papers: Medusa (Cai et al. 2024, arXiv 2401.10774, section 2.1) and MLP speculators (Wertheimer et
al. 2024, arXiv 2404.19124, section 3).

One round:

1. The hidden state of the newest token that the target has run is the feature; the target's own
   prediction from it is the root of the next draft.
2. Medusa: head i proposes tokens for depth i + 1 below the root, independent of the tokens between.
   MLP speculator: a recurrent state is mixed with each drafted token's embedding, level by level.
3. The most probable paths, or a fixed tree of ranks, are drafted.
4. The target verifies them in one forward pass.

`heads` has both networks and how their files are read, `config` the options; levels are grown by
`hf_spec.drafting.one_pass_drafter`.

Differences: drafts are verified losslessly by node draw. Medusa's "typical acceptance" changes the
output and is not supported. Trees follow the draft probabilities by default; published trees can be
passed as `tree=`.
"""
