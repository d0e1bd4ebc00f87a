"""auto: several drafters at once, chosen by the cost model in every round.

There is no paper. Lookup always runs; draft models, adapters and heads run if `assistant=` names
them. In every round:

1. Lookup drafts for each row, at negligible cost.
2. The cost model decides which assistants draft, and to which depth.
3. All drafts of a row are merged into one tree.
4. The nodes with the most expected accepted tokens per second are verified.

For the measurements and the decision rule see `hf_spec.drafting.cost_model`. Where no draft pays,
nothing is drafted. Drafts are never sampled, and every decision follows from the text so far. So
`NodeDraw` verifies the tree exactly.
"""
