"""Public names of `hf_spec`; importing this module enables `spec_strategy=` and `assistant=`."""

from hf_spec.adapters.folder import SpecAdapter
from hf_spec.backend.cpu.packed_weights import clear_cpu_packing, cpu_packing_bytes, set_cpu_packing
from hf_spec.backend.device.capture import set_cuda_graphs
from hf_spec.common.errors import AssistantError, HubError, OptionError, SpecError, UnsupportedError
from hf_spec.common.outputs import (
    SpecBatchOutput,
    SpecEncoderDecoderOutput,
    SpecGenerateOutput,
    SpecRequestOutput,
    SpecStats,
    collect_stats,
)
from hf_spec.drafting.config import StrategyConfig
from hf_spec.engine.decode.drafter import Drafter
from hf_spec.engine.decode.generation_state import GenerationState
from hf_spec.engine.decode.streaming import BatchStreamer, BatchTextStreamer
from hf_spec.engine.forward.draft_tree import DraftTree, Verdict
from hf_spec.engine.forward.output import ForwardOutput
from hf_spec.engine.runner import ModelRunner
from hf_spec.generation.compiling import CompileReport, compile  # noqa: A004 - as torch's
from hf_spec.generation.custom_generate import custom_generate
from hf_spec.generation.hook import disable, enable
from hf_spec.methods import builtin
from hf_spec.methods.auto.known_drafters import KnownDrafter, heads_for
from hf_spec.methods.builtin import *  # noqa: F403 - the configs
from hf_spec.methods.draft_model.truncated import truncated_draft
from hf_spec.methods.lookup.answer_store import LookupStore
from hf_spec.methods.refreshing import HeadRefresher
from hf_spec.methods.registry import known_strategies, register

__all__ = [
    "AssistantError",
    "BatchStreamer",
    "BatchTextStreamer",
    "CompileReport",
    "DraftTree",
    "Drafter",
    "ForwardOutput",
    "GenerationState",
    "HeadRefresher",
    "HubError",
    "KnownDrafter",
    "LookupStore",
    "ModelRunner",
    "OptionError",
    "SpecAdapter",
    "SpecBatchOutput",
    "SpecEncoderDecoderOutput",
    "SpecError",
    "SpecGenerateOutput",
    "SpecRequestOutput",
    "SpecStats",
    "StrategyConfig",
    "UnsupportedError",
    "Verdict",
    "clear_cpu_packing",
    "collect_stats",
    "compile",
    "cpu_packing_bytes",
    "custom_generate",
    "disable",
    "enable",
    "heads_for",
    "known_strategies",
    "register",
    "set_cpu_packing",
    "set_cuda_graphs",
    "truncated_draft",
]
__all__ += builtin.__all__

enable()
