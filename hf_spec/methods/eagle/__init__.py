"""EAGLE heads: one trained layer drafts from the target's hidden states.

Papers: EAGLE (Li et al. 2024, arXiv 2401.15077), EAGLE-2 (Li et al. 2024, arXiv 2406.16858) and
EAGLE-3 (Li et al. 2025, arXiv 2503.01840).

One round:

1. Each committed token t_{i+1} and the feature of position i form pair i.
2. The head runs all new pairs in one pass; its last output gives the first draft distribution.
3. Each further level runs the drafted tokens, with the outputs of their parents as features.
4. Per level the `width` most probable paths are expanded (EAGLE-2); of all nodes the most probable
   `max_nodes` are sent to the target.
5. The target verifies the tree. Keys and values of draft pairs are overwritten in the next round.

`head` has features and layer (EAGLE-3, section 3.1), `training` the training-time test (section
3.2), `spec` how published files are read, and `layouts` files for vLLM and SGLang. Pairs are run by
`hf_spec.methods.feature_pairs`, dynamic trees are grown by `hf_spec.drafting.level_drafter`.

Differences from the papers: batches; a chain as an alternative to the tree; a length policy and a
cost model choose depth and number of nodes; heads run in bfloat16 for float16 targets. Trees are
verified by node draw, chains by residual rejection; both preserve the target's distribution.
EAGLE-3.1 and P-EAGLE heads are supported, too.
"""
