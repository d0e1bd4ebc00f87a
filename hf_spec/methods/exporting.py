"""`hf-spec export`: EAGLE-3 heads in the layout of another engine."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from hf_spec.adapters.card import GENERATED
from hf_spec.adapters.folder import is_adapter, load_adapter
from hf_spec.adapters.importing import license_of
from hf_spec.adapters.published import PublishedHead, known_head, write_published
from hf_spec.common.errors import AssistantError, OptionError
from hf_spec.common.files import check_new_folder
from hf_spec.common.hub import load_named
from hf_spec.methods.eagle.layouts import LAYOUTS, Verifier
from hf_spec.methods.eagle.spec import EagleSpec, canonical_names, read_spec, verifier_name

# Draft tokens for heads whose config has no number of steps.
STEPS = 3


def export_head(
    name: str | os.PathLike[str], out: Path, engine: str, model: str | None = None
) -> str:
    """Write an EAGLE-3 head in the layout of another engine ("vllm" or "sglang").

    `out`, a new or empty folder, gets config, weights and a card. Of the target, by default the one
    that the head names, only the config is read.

    Returns:
        The command that starts the engine with the head.

    Raises:
        OptionError: if `out` is not empty, or the target is not known.
        AssistantError: if it is not a head, or one that the engine has no network for.
        HubError: if the Hub cannot be reached.
    """
    check_new_folder(out)
    head = _exportable(os.fspath(name))
    named, steps = verifier_name(head.config), _steps(head.config)
    if model is None and named is None:
        raise OptionError(f"{head.name} does not name its target; pass --base-model")
    target = load_named(AutoConfig, model or str(named))
    architectures = tuple(target.architectures or ())
    verifier = Verifier(named or str(model), architectures, target.get_text_config())
    tensors = canonical_names(head.tensors)
    spec = read_spec(head, tensors, verifier.text)
    config, tensors = LAYOUTS[engine](spec, tensors, verifier, steps)
    # Cards are shared: no local paths.
    card = _card(head, verifier, _command(engine, verifier, out.name, spec, steps))
    write_published(out, config, tensors, card)
    return _command(engine, verifier, str(out), spec, steps)


def _exportable(name: str) -> PublishedHead:
    if is_adapter(name):
        adapter = load_adapter(name)
        raise AssistantError(
            f"{name} is an adapter of the method {adapter.method!r} "
            f"({adapter.record.title.format(adapter.base.name)}), which no other "
            "engine supports; train a head that they support on the same answers: "
            "`hf-spec train eagle`"
        )
    head = known_head(name)
    if head.family not in ("eagle3", "peagle"):
        raise AssistantError(
            f"{name} is of the family {head.family!r}, which needs no export: engines that "
            "run such heads read this layout; only EAGLE-3 heads are exported"
        )
    return head


def _steps(config: Mapping[str, Any]) -> int:
    inner = config.get("speculators_config")
    methods = inner.get("proposal_methods") if isinstance(inner, Mapping) else None
    first = methods[0] if isinstance(methods, list) and methods else None
    steps = first.get("speculative_tokens") if isinstance(first, Mapping) else None
    return steps if type(steps) is int and steps > 0 else STEPS


def _command(engine: str, verifier: Verifier, head: str, spec: EagleSpec, steps: int) -> str:
    if engine == "vllm":
        speculation = {"method": "eagle3", "model": head, "num_speculative_tokens": steps}
        if spec.mask_token is not None:
            speculation["parallel_drafting"] = True
        words = ["vllm", "serve", verifier.name, "--speculative-config", json.dumps(speculation)]
        return shlex.join(words)
    options = {
        "model-path": verifier.name,
        "speculative-algorithm": "EAGLE3",
        "speculative-draft-model-path": head,
        "speculative-num-steps": str(steps),
        "speculative-eagle-topk": "1",
        "speculative-num-draft-tokens": str(steps + 1),
    }
    words = [word for name, value in options.items() for word in (f"--{name}", value)]
    return shlex.join(["python", "-m", "sglang.launch_server", *words])


def _card(head: PublishedHead, verifier: Verifier, command: str) -> str:
    license_name = license_of(head.folder)
    lines = [
        *(["---", f"license: {license_name}", "---", ""] if license_name else []),
        GENERATED,
        "",
        f"# An EAGLE-3 head for {verifier.name}",
        "",
        f"Written by `hf-spec export` from `{Path(head.name).name}`, whose license applies"
        + (f" ({license_name})." if license_name else "."),
        "",
        "```bash",
        command,
        "```",
        "",
    ]
    return "\n".join(lines)
