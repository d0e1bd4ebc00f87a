"""Every class of logits processors in transformers has its step."""

from __future__ import annotations

import dis
import inspect

import pytest
from transformers.generation import logits_process as hf

from hf_spec.engine.decode import processor_steps
from hf_spec.engine.decode.logits_processors import UNSUPPORTED

# Classes that generate() never creates and that only run inside unsupported models, or that are
# exact when called as in plain generate().
AS_PLAIN_GENERATE_CALLS_THEM = {
    hf.SynthIDTextWatermarkLogitsProcessor,
    hf.AlternatingCodebooksLogitsProcessor,
    hf.BarkEosPrioritizerLogitsProcessor,
    hf.LogitsProcessor,
}


def test_every_class_of_transformers_has_been_decided_on() -> None:
    decided = {
        *processor_steps.PREFIX_FREE,
        *processor_steps.READS_PREFIX,
        *processor_steps.STORED_PER_ROW,
        *UNSUPPORTED,
        *AS_PLAIN_GENERATE_CALLS_THEM,
        hf.PrefixConstrainedLogitsProcessor,
        hf.WhisperNoSpeechDetection,
    }
    known = {
        kind
        for _, kind in inspect.getmembers(hf, inspect.isclass)
        if issubclass(kind, hf.LogitsProcessor) and kind.__module__ == hf.__name__
    }
    new = sorted(kind.__name__ for kind in known - decided)
    assert not new, (
        f"transformers has new logits processors: {new}. Add each to PREFIX_FREE, READS_PREFIX, "
        "or STORED_PER_ROW in hf_spec/engine/decode/processor_steps.py, to UNSUPPORTED in "
        "logits_processors.py, or to the list above"
    )


@pytest.mark.parametrize("kind", processor_steps.PREFIX_FREE)
def test_prefix_free_classes_do_not_read_the_prefix(kind: type) -> None:
    assert "input_ids" not in {step.argval for step in dis.get_instructions(kind.__call__)}
