"""Published heads by the model that they were made for: a small table, as of November 2026.

Names are those that the projects themselves give in their documentation. Weights have the licence
of their own repository's card.
"""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PreTrainedModel

from hf_spec.adapters.base_name import base_name


@dataclass(frozen=True)
class KnownHead:
    """A head on the Hub.

    Attributes:
        repo: its Hub id, for `assistant=`.
        family: see `hf_spec.adapters.published.recognise`.
        pickle: whether it is published as a pickle alone, so that `hf-spec import-head` is needed.
    """

    repo: str
    family: str
    pickle: bool = False


def _red_hat(target: str, *families: str) -> list[KnownHead]:
    name = target.rpartition("/")[2]
    return [KnownHead(f"RedHatAI/{name}-speculator.{family}", family) for family in families]


def _table() -> dict[str, list[KnownHead]]:
    eagle3 = "eagle3"
    found = {
        target: _red_hat(target, eagle3)
        for target in (
            "meta-llama/Llama-3.1-8B-Instruct",
            "meta-llama/Llama-3.3-70B-Instruct",
            "meta-llama/Llama-4-Maverick-17B-128E-Instruct",
            "Qwen/Qwen3-14B",
            "Qwen/Qwen3-32B",
            "Qwen/Qwen3-30B-A3B-Instruct-2507",
            "Qwen/Qwen3-235B-A22B",
            "openai/gpt-oss-20b",
            "openai/gpt-oss-120b",
            "google/gemma-4-31B-it",
            "google/gemma-4-26B-A4B-it",
        )
    }
    found["Qwen/Qwen3-8B"] = _red_hat("Qwen/Qwen3-8B", eagle3, "peagle")
    others = {
        "meta-llama/Llama-3.1-8B-Instruct": "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B",
        "meta-llama/Llama-3.3-70B-Instruct": "yuhuili/EAGLE3-LLaMA3.3-Instruct-70B",
        "deepseek-ai/DeepSeek-R1-Distill-Llama-8B": "yuhuili/EAGLE3-DeepSeek-R1-Distill-LLaMA-8B",
        "lmsys/vicuna-13b-v1.3": "yuhuili/EAGLE3-Vicuna1.3-13B",
        "Qwen/Qwen3-1.7B": "AngelSlim/Qwen3-1.7B_eagle3",
        "Qwen/Qwen3-4B": "AngelSlim/Qwen3-4B_eagle3",
        "Qwen/Qwen3-8B": "AngelSlim/Qwen3-8B_eagle3",
        "Qwen/Qwen3-14B": "AngelSlim/Qwen3-14B_eagle3",
        "Qwen/Qwen3-32B": "AngelSlim/Qwen3-32B_eagle3",
        "openai/gpt-oss-20b": "zhuyksir/EAGLE3-gpt-oss-20b-bf16",
        "openai/gpt-oss-120b": "lmsys/EAGLE3-gpt-oss-120b-bf16",
    }
    for target, repo in others.items():
        found.setdefault(target, []).append(KnownHead(repo, eagle3))
    first = {
        "lmsys/vicuna-7b-v1.3": "yuhuili/EAGLE-Vicuna-7B-v1.3",
        "meta-llama/Meta-Llama-3-8B-Instruct": "yuhuili/EAGLE-LLaMA3-Instruct-8B",
        "Qwen/Qwen2-7B-Instruct": "yuhuili/EAGLE-Qwen2-7B-Instruct",
    }
    for target, repo in first.items():
        found.setdefault(target, []).append(KnownHead(repo, "eagle", pickle=True))
    return found


def heads_for(model: PreTrainedModel | str) -> list[KnownHead]:
    """The published heads for a model, or for its Hub id; the list may be empty.

    One that is listed may have been renamed, and one that is not may fit: any repository of a known
    family does as `assistant=`.
    """
    name = model if isinstance(model, str) else base_name(model)
    return _table().get(name, [])
