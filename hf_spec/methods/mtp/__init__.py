"""Multi-token prediction (MTP): the layer that some models ship to predict the token after next.

Paper: DeepSeek-V3 (DeepSeek-AI 2024, arXiv 2412.19437, section 2.2). DeepSeek-V3, GLM-4.5, Kimi-K2,
Qwen3-Next, Qwen3.5, MiMo and others are published with such a module.

One round:

1. Each committed token t_{i+1} and the target's last hidden state of position i form pair i.
2. The module norms both, concatenates and projects them, and runs one decoder layer of the target's
   class with its own keys and values; the target's head gives the logits (`head`).
3. The last output over the new pairs gives the first draft distribution.
4. Each further level runs the drafted tokens, with the outputs of their parents as features.
5. The target verifies the chain or tree; keys and values of draft pairs are overwritten.

`head` also maps the tensor names of each model family; pairs and levels are run by
`hf_spec.methods.feature_pairs`.

Differences: the paper chains one module per depth; here the first module drafts several tokens by
reading its own output, in batches of any size, as a chain or as EAGLE-2's dynamic tree.
"""
