"""Small trained tokenizers of every kind, and tiny models trained on a text with them."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers.processors import TemplateProcessing
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from hf_spec.methods.draft_model.other_tokenizer.tokenizers import TextTokens, TokenizerPair

SENTENCE = "the quick brown fox jumps over the lazy dog and the dog sleeps in the warm sun. "
TEXTS = [
    SENTENCE,
    "naïve café — déjà vu, 日本語 テスト 🙂",
    "numbers 12 345, words and more words",
] * 3
PROMPTS = ["the quick brown", "the quick brown fox jumps over the lazy", "the quick"]


def _fast(tokenizer: Tokenizer, **special: str) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


@cache
def bpe(size: int = 310) -> PreTrainedTokenizerFast:
    """Return a byte-level tokenizer like GPT-2's: no BOS, and every text round-trips."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<pad>", "<s>", "</s>", "<|user|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=special, initial_alphabet=alphabet
    )
    made.train_from_iterator(TEXTS, trainer)
    return _fast(made, pad_token="<pad>", bos_token="<s>", eos_token="</s>", sep_token="<|user|>")


@cache
def unigram(size: int = 90) -> PreTrainedTokenizerFast:
    """Return one like SentencePiece: word markers, a BOS, a normalizer, unknown characters."""
    made = Tokenizer(models.Unigram())
    made.normalizer = normalizers.NFKC()
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Metaspace()
    special = ["<pad>", "<bos>", "<eos>", "<unk>"]
    trainer = trainers.UnigramTrainer(vocab_size=size, special_tokens=special, unk_token="<unk>")
    made.train_from_iterator(TEXTS, trainer)
    made.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
    names = {"pad": "<pad>", "bos": "<bos>", "eos": "<eos>", "unk": "<unk>"}
    return _fast(made, **{f"{role}_token": name for role, name in names.items()})


@cache
def wordpiece(size: int = 120) -> PreTrainedTokenizerFast:
    """Return one like BERT's: lowercase, no spaces, a special token at both ends."""
    made = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer(lowercase=True)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece()
    special = ["[PAD]", "[CLS]", "[SEP]", "[UNK]"]
    trainer = trainers.WordPieceTrainer(vocab_size=size, special_tokens=special)
    made.train_from_iterator(TEXTS, trainer)
    ends = [("[CLS]", 1), ("[SEP]", 2)]
    made.post_processor = TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ends)
    return _fast(made, pad_token="[PAD]", eos_token="[SEP]", unk_token="[UNK]", cls_token="[CLS]")


@cache
def subset() -> PreTrainedTokenizerFast:
    """Return one with a subset of `bpe()`'s vocabulary: its bytes and its first merges."""
    return bpe(280)


KINDS = {"bpe": bpe, "unigram": unigram, "wordpiece": wordpiece, "subset": subset}


def letters(*words: str, merges: tuple[tuple[str, str], ...] = ()) -> PreTrainedTokenizerFast:
    """Return a tokenizer of a few tokens, decoded without separators; the first is padding."""
    vocab = {word: at for at, word in enumerate(["<pad>", *words])}
    made = Tokenizer(models.BPE(vocab, list(merges)))
    made.decoder = decoders.Fuse()
    return _fast(made, pad_token="<pad>")


def pair(target: Any, draft: Any) -> TokenizerPair:
    """Return a pair of tokenizers whose models have one embedding per token."""
    return TokenizerPair(
        TextTokens(target, len(target), "tokenizer"),
        TextTokens(draft, len(draft), "assistant_tokenizer"),
    )


def random_model(tokenizer: Any, seed: int = 0) -> LlamaForCausalLM:
    """Return a random model for the vocabulary of a tokenizer."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=256,
        initializer_range=0.4,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config).eval()


@cache
def learned(kind: str, steps: int = 60) -> LlamaForCausalLM:
    """Return a model trained to repeat the sentence, with the tokenizer of one kind."""
    tokenizer: Any = KINDS[kind]()
    model = random_model(tokenizer)
    ids = torch.tensor([tokenizer(SENTENCE * 3, add_special_tokens=False).input_ids])
    opening = tokenizer("the").input_ids[:1] if kind in {"unigram", "wordpiece"} else []
    ids = torch.cat([torch.tensor([opening], dtype=torch.long), ids], dim=1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    with torch.enable_grad():
        for _ in range(steps):
            optimizer.zero_grad()
            model(ids, labels=ids).loss.backward()
            optimizer.step()
    return model.requires_grad_(False).eval()


def batch(kind: str = "bpe", prompts: list[str] = PROMPTS) -> dict[str, torch.Tensor]:
    """Return prompts of different lengths, padded on the left."""
    made = KINDS[kind]()(prompts, return_tensors="pt", padding=True, padding_side="left")
    return {name: made[name] for name in ("input_ids", "attention_mask")}
