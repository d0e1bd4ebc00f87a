"""The built-in methods: one import each registers strategy, adapter method and published heads."""

from hf_spec.methods.auto.drafter import AutoConfig
from hf_spec.methods.block.config import BlockConfig
from hf_spec.methods.disco.drafter import DiscoConfig
from hf_spec.methods.draft_model.loading import DraftConfig, TreeConfig
from hf_spec.methods.eagle.config import EagleConfig
from hf_spec.methods.falcon.drafter import FalconConfig
from hf_spec.methods.gemma_assistant.drafter import GemmaAssistantConfig
from hf_spec.methods.gsd.config import GsdConfig
from hf_spec.methods.lookup.drafter import LookupConfig
from hf_spec.methods.medusa.config import HeadsConfig
from hf_spec.methods.mtp.config import MtpConfig
from hf_spec.methods.none import NoneConfig
from hf_spec.methods.pard.drafter import PardConfig
from hf_spec.methods.sdsat.drafter import SdsatConfig

__all__ = [
    "AutoConfig",
    "BlockConfig",
    "DiscoConfig",
    "DraftConfig",
    "EagleConfig",
    "FalconConfig",
    "GemmaAssistantConfig",
    "GsdConfig",
    "HeadsConfig",
    "LookupConfig",
    "MtpConfig",
    "NoneConfig",
    "PardConfig",
    "SdsatConfig",
    "TreeConfig",
]
