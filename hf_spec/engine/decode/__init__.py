"""The decoding engine, which names no method.

`loop` drafts, runs the target, verifies and commits, round by round, for any `drafter`. `verifiers`
accept draft tokens, after `logits_processors`. `generation_state` holds the rows: their tokens
(`row_tokens`), where they end (`stopping`; a new stop rule goes there) and their stream
(`streaming`). `continuous_batching` runs the same loop over rows that change their sequence.
"""
