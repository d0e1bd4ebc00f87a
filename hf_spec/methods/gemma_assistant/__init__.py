"""Gemma 4 assistants: a few published layers that attend to the target's own keys and values.

Google publishes one per Gemma 4 model (google/gemma-4-*-it-assistant). There is no paper; the
format and the forward pass are those of `Gemma4AssistantForCausalLM` in transformers.

One round:

1. Per row the state is the target's last hidden state at the token before the root.
2. A step projects [target embedding of the token; state of its parent] to the assistant's width.
3. Its layers have queries only; they attend to the keys and values that the target stored in its
   last full-attention and its last sliding-window layer.
4. The output gives the draft distribution and, projected back, the state for the children.
5. The target verifies. The assistant has no KV cache, so nothing is fed after a round.

All steps of a draft use the position of the root. `head` has the network and how its files are
read, `drafter` the passes and the strategy.

Ours: batches, and trees, where one pass runs all nodes of a level.
"""
