"""Fused operations for speculative decoding, one folder each, beside their torch references.

=======================  =========================================================================
`ragged_tree_attention`  packed queries of many token trees against a pool of keys and values
`kv_write`, `kv_keep`    new keys and values into their slots; accepted ones moved together
`verify_tree`            which draft tokens the target accepts, decided on the device
`draft_features`         largest probabilities and entropy in one pass over the vocabulary
`distill_loss`           distance to a teacher's distribution without tables of log-probabilities
`packed_linear`          linear layers of a few rows on a CPU, at the speed of memory
=======================  =========================================================================

The last one is C++ for a CPU and has a module of its own. Every other op takes `impl="auto" |
"triton" | "torch"`. "auto" is the kernel for tensors on a GPU and the reference elsewhere;
`ragged_tree_attention` and `kv_write` also have a form "cpp", which "auto" is on a CPU. The
machine's compiler builds C++ once, when it is first needed. What a kernel cannot read is a
TypeError or a ValueError. Importing this package imports torch alone; Triton follows with the first
kernel, and where it, or a compiler, is missing, the references serve.
"""

from hf_spec_kernels.dispatch import has_triton, launches, serves, using
from hf_spec_kernels.distill_loss import DistillWeights, distill_loss
from hf_spec_kernels.draft_features import draft_features
from hf_spec_kernels.kv_keep import Moves, kv_keep
from hf_spec_kernels.kv_write import kv_write
from hf_spec_kernels.ragged_tree_attention import RaggedLayout, Scoring, ragged_tree_attention
from hf_spec_kernels.verify_tree import TreeVerdict, verify_tree

__all__ = [
    "DistillWeights",
    "Moves",
    "RaggedLayout",
    "Scoring",
    "TreeVerdict",
    "distill_loss",
    "draft_features",
    "has_triton",
    "kv_keep",
    "kv_write",
    "launches",
    "ragged_tree_attention",
    "serves",
    "using",
    "verify_tree",
]
