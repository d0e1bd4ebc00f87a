"""Entry points of transformers: `model.generate(spec_strategy=...)` and `generate_batch()`.

A call goes through these modules, in this order:

1. `hook` wraps `generate()` and `generate_batch()`, and finds the strategy of a call.
2. `call_setup` resolves the call: `call_checks` and `target_checks` raise errors before anything
   runs, then the drafter is built.
3. transformers' own `generate()` prepares inputs, logits processors and stopping criteria.
4. `one_call` decodes with them: `own_prefill` where a prompt is more than text, `encoder_input`
   where the model has an encoder, then `hf_spec.engine.decode.loop`. For many prompts,
   `generate_batch` instead.
"""
