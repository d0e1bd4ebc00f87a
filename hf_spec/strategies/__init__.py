"""The strategies that `spec_strategy=` can name, one file each; `hf_spec` exports their configs."""

from hf_spec.strategies.auto import AutoConfig
from hf_spec.strategies.block import BlockConfig
from hf_spec.strategies.disco import DiscoConfig
from hf_spec.strategies.draft_model import DraftConfig, TreeConfig
from hf_spec.strategies.eagle import EagleConfig
from hf_spec.strategies.falcon import FalconConfig
from hf_spec.strategies.gemma_assistant import GemmaAssistantConfig
from hf_spec.strategies.gsd import GsdConfig
from hf_spec.strategies.heads import HeadsConfig
from hf_spec.strategies.lookup import LookupConfig
from hf_spec.strategies.mtp import MtpConfig
from hf_spec.strategies.none import NoneConfig
from hf_spec.strategies.pard import PardConfig
from hf_spec.strategies.sdsat import SdsatConfig

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
