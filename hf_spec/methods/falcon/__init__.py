"""Falcon: a head on the target's features that drafts k tokens per pass, and trees of them.

Paper: Gao et al. 2024, "Falcon: Faster and Parallel Inference of Large Language Models through
Enhanced Semi-Autoregressive Drafting and Custom-Designed Decoding Tree", arXiv 2412.12639.

1. The target's last features and the tokens that follow them form *pairs* (section 3.1).
2. Two LSTM layers and relaxed causal attention map the newest k pairs to the next k features, and
   the target's output head maps these to a list of tokens for each of the next k depths.
3. A fixed tree of ranks takes its tokens from the lists. Its nodes at depth k that have children
   become the blocks of another pass, which rests on predicted features (section 3.4).
4. The target verifies the tree. The true pairs of the accepted tokens replace the predicted ones.
5. Training replaces some input pairs by the answers of their block (CSGD, section 3.2).

Equation (1) is `head.FalconHead`. The relaxed causal mask of section 3.4 is `head.block_mask` in
training and `feature_pairs.runner` in drafts, the decoding tree (figure 3) `drafter` and
`trees.json`. `csgd.GlancingLoss` has equations (2) to (8), `settings.CsgdSettings.share` the share
lambda of replaced pairs. Trees are built from the acceptance by rank, `rank_stats.ranks_along`.

Differences: the tree is calibrated for the machine and may send its most probable nodes only
(`hf-spec calibrate falcon`); a length policy may stop between passes; rows of a batch draft
together. `fused` heads read several layers, and `own_features` trains on predicted features. Where
paper and released code differ, `csgd` names both and has an option.
"""
