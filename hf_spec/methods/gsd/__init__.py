"""GSD: a draft tree in which repeated token sequences are drafted once, as a graph.

Gong et al. 2024, "Graph-Structured Speculative Decoding", arXiv 2407.16207. Each round:

1. Grow a draft level by level from the draft model, up to k children per node.
2. Merge: a new token that repeats an earlier node off its own path, together with its last r
   ancestors, becomes an edge to that node instead of a new node (section 3).
3. Prune: nodes below `min_probability` (theta_prob) get no children; children below
   `min_sibling_ratio` (theta_sib) times their best sibling are dropped.
4. Unmerge the graph into its most probable paths. The target verifies them as a tree (section 4).
5. If the accepted path uses a merge edge, the draft model recomputes its keys and values after the
   first merged node.

Here r is `merge_length`: Table 5 of the paper calls it tau, while in its text tau is r + 1.
Without merging (None) this is the paper's TSD, with one child per node its SSD.

Differences: an edge that would close a cycle is refused (the released code relies on a node limit);
sampling is exact by node draw, and the paper's rule, which changes the output distribution, is
`GsdConfig(lossy=True)`.

The drafter is that of `draft` and `tree`; merging is in `hf_spec.drafting.token_graph`.
"""
