"""llama.cpp as a peer: greedy answers from a GGUF file, also with prompt lookup or a draft model.

Runs in a separate environment and does not import hf_spec:

    python -m venv peers && peers/bin/pip install llama-cpp-python --no-binary llama-cpp-python
    peers/bin/python -m examples.studies.peers.llama_cpp_peer FILE --threads 2 --draft FILE

The last command reads the requests that `peer` describes. Compiled from source, llama.cpp uses all
instructions of this processor. Its KV cache is cleared before every prompt.
"""

from __future__ import annotations

import argparse
from itertools import islice
from typing import Any

from examples.studies.peers import answering


def load(options: argparse.Namespace) -> tuple[dict[str, Any], answering.Answer]:
    """Return facts about the model, and the function that answers with it."""
    import llama_cpp
    import numpy as np
    from llama_cpp.llama_speculative import LlamaDraftModel, LlamaPromptLookupDecoding

    def opened(path: str, drafter: Any = None) -> Any:
        return llama_cpp.Llama(
            path,
            n_ctx=options.context,
            n_threads=options.threads,
            n_threads_batch=options.threads,
            draft_model=drafter,
            # Verification needs the logits of all draft tokens.
            logits_all=drafter is not None,
            verbose=False,
        )

    small = None if options.draft is None else opened(options.draft)

    class SmallModel(LlamaDraftModel):  # type: ignore[misc]
        """Greedy drafter with `small`, whose cache needs only the new tokens of the text."""

        def __call__(self, input_ids: Any, /, **_: Any) -> Any:
            drafted = islice(small.generate(input_ids.tolist(), top_k=1), options.draft_tokens)
            return np.array(list(drafted), dtype=np.intc)

    drafter = None
    if small is not None:
        drafter = SmallModel()
    elif options.lookup:
        drafter = LlamaPromptLookupDecoding(options.match_length, options.draft_tokens)
    model = opened(options.file, drafter)
    ends = {model.token_eos(), *options.end}

    def answer(ids: list[int], new_tokens: int) -> list[int]:
        for one in filter(None, (model, small)):
            one.reset()
        tokens: list[int] = []
        for token in islice(model.generate(ids, top_k=1), new_tokens):
            tokens.append(token)
            if token in ends:
                break
        return tokens

    facts = {"llama_cpp_python": llama_cpp.__version__, "threads": options.threads}
    drafts = "a draft model" if small is not None else "lookup" if options.lookup else None
    return {**facts, "drafts": drafts, "draft_tokens": drafts and options.draft_tokens}, answer


def main(argv: list[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", help="GGUF")
    parser.add_argument("--draft", help="GGUF of a draft model")
    parser.add_argument("--context", type=int, default=1024, help="most tokens of a text")
    parser.add_argument("--end", type=int, action="append", default=[], help="another end token")
    answering.add_options(parser)
    answering.run(load, parser.parse_args(argv))


if __name__ == "__main__":
    main()
