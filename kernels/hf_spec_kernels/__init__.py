"""Fused operations for speculative decoding, one folder each, beside their torch references.

=======================  =========================================================================
`ragged_tree_attention`  attention of packed queries of many token trees on a KV pool
`kv_write`, `kv_keep`    write new keys and values to slots; compact accepted ones
`verify_tree`            select the accepted draft tokens on the device
`filter_scores`          temperature, top-k, top-p, and min-p without a sort
`draft_features`         largest probabilities and entropy in one pass over the vocabulary
`distill_loss`           distillation loss without materialized log-probabilities
`packed_linear`          linear layers of a few rows on a CPU, at memory bandwidth
`four_bit_linear`        the same with 4-bit weights of bitsandbytes, read in place
`eight_bit_linear`       the same with 8-bit weights of bitsandbytes and torchao
=======================  =========================================================================

`packed_linear`, `four_bit_linear`, and `eight_bit_linear` are C++ for a CPU, in modules of their
own. Every other op takes `impl="auto" | "triton" | "torch"`. "auto" selects the kernel on a GPU and
the reference elsewhere. `ragged_tree_attention` and `kv_write` also have "cpp", which "auto"
selects on a CPU. C++ is built once, at first use, by the machine's compiler. Inputs that a kernel
cannot read raise `TypeError` or `ValueError`. Importing this package imports torch and NumPy;
Triton is imported with the first kernel. Without Triton, or a compiler, the references run.
"""

from hf_spec_kernels.dispatch import has_triton, launches, serves, using
from hf_spec_kernels.distill_loss import DistillWeights, distill_loss
from hf_spec_kernels.draft_features import draft_features
from hf_spec_kernels.filter_scores import Filter, filter_scores
from hf_spec_kernels.kv_keep import Moves, kv_keep
from hf_spec_kernels.kv_write import kv_write
from hf_spec_kernels.ragged_tree_attention import RaggedLayout, Scoring, ragged_tree_attention
from hf_spec_kernels.verify_tree import TreeVerdict, verify_tree

__all__ = [
    "DistillWeights",
    "Filter",
    "Moves",
    "RaggedLayout",
    "Scoring",
    "TreeVerdict",
    "distill_loss",
    "draft_features",
    "filter_scores",
    "has_triton",
    "kv_keep",
    "kv_write",
    "launches",
    "ragged_tree_attention",
    "serves",
    "using",
    "verify_tree",
]
