"""What `hf_spec` itself exports; importing it enables `spec_strategy=` and `assistant=`."""

from hf_spec.adapters.folder import SpecAdapter
from hf_spec.decoding.streaming import BatchStreamer, BatchTextStreamer
from hf_spec.errors import AssistantError, HubError, OptionError, SpecError, UnsupportedError
from hf_spec.execution.cpu_linear import clear_cpu_packing, cpu_packing_bytes, set_cpu_packing
from hf_spec.execution.step_graphs import set_cuda_graphs
from hf_spec.generation.custom_generate import custom_generate
from hf_spec.generation.hook import disable, enable
from hf_spec.models.truncated import truncated_draft
from hf_spec.outputs import SpecBatchOutput, SpecGenerateOutput, SpecRequestOutput, SpecStats
from hf_spec.strategies import (
    AutoConfig,
    DiscoConfig,
    DraftConfig,
    FalconConfig,
    GsdConfig,
    LookupConfig,
    NoneConfig,
    SdsatConfig,
    StrategyConfig,
    TreeConfig,
    known_strategies,
)

__all__ = [
    "AssistantError",
    "AutoConfig",
    "BatchStreamer",
    "BatchTextStreamer",
    "DiscoConfig",
    "DraftConfig",
    "FalconConfig",
    "GsdConfig",
    "HubError",
    "LookupConfig",
    "NoneConfig",
    "OptionError",
    "SdsatConfig",
    "SpecAdapter",
    "SpecBatchOutput",
    "SpecError",
    "SpecGenerateOutput",
    "SpecRequestOutput",
    "SpecStats",
    "StrategyConfig",
    "TreeConfig",
    "UnsupportedError",
    "clear_cpu_packing",
    "cpu_packing_bytes",
    "custom_generate",
    "disable",
    "enable",
    "known_strategies",
    "set_cpu_packing",
    "set_cuda_graphs",
    "truncated_draft",
]

enable()
