"""Heads that read pairs of a token and a target feature: shared by Falcon, EAGLE and MTP.

`runner` stores the true pairs of every row and runs blocks of pairs with a KV cache of its own,
`drafter` grows chains and trees from them, and `draft_head` reads logits off predicted features.
Falcon has blocks of k pairs (Gao et al. 2024, arXiv 2412.12639, section 3.1); k is 1 in EAGLE (Li
et al. 2024, arXiv 2401.15077) and in MTP layers (DeepSeek-AI 2024, arXiv 2412.19437).
"""
