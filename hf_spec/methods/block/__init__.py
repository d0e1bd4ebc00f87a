"""DFlash, DFlash 2, and DSpark: published heads that draft a block of tokens in one pass.

DFlash (Chen et al. 2026, arXiv 2602.06036); DFlash 2 from z-lab (2026); DSpark from deepseek-ai's
DeepSpec (2026).

One round:

1. Each committed token gives one context vector, projected from several hidden states of the
   target; every layer stores its keys and values.
2. The block is the last committed token followed by mask tokens, at consecutive positions.
3. One pass: each position of the block attends to the context and to the block.
4. Its outputs give the draft distributions. DSpark adds a Markov bias left to right, and a
   confidence per position. DFlash 2 chooses among the most probable tokens of each position by the
   token before, and convolves the positions in every layer.
5. The target verifies; keys and values of the block are dropped.

`head` has context, block and layers, `markov` DSpark's Markov and confidence heads, `dflash2` the
convolutions and the candidate selector, `runner` keys and values per row and the pass, `layouts`
how published files are read. Levels are grown by `hf_spec.drafting.one_pass_drafter`.

Ours: batches, length policies, and trees of the most probable paths (DDTree, arXiv 2604.12989), of
which the cost model sends as many nodes as pay. A tree is verified by node draw. A chain
(`children=1`) is sampled if the target samples, and verified by residual rejection.
"""
