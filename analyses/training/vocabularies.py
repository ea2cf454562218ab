"""Vocabularies of a corpus: words (fairseq's dictionary) or subwords."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matlens.data import Corpus

END = "<|endoftext|>"  # as in GPT-2, before and after each text


def bpe_tokenizer(corpus: Corpus, *, n_tokens: int, longest: int) -> Any:
    """Train a byte-level BPE tokenizer, as in GPT-2, on a corpus."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=n_tokens, special_tokens=[END], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    tokenizer.train_from_iterator(corpus.sentences, trainer)
    ends = dict.fromkeys(("bos_token", "eos_token", "unk_token", "pad_token"), END)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, model_max_length=longest, name_or_path="", **ends
    )


def token_sequences(tokenizer: Any, corpus: Corpus, *, longest: int) -> list[list[int]]:
    """Token ids of each sentence, between two end-of-text tokens."""
    end = tokenizer.eos_token_id
    encoded = tokenizer(list(corpus.sentences), add_special_tokens=False, verbose=False)
    texts: Sequence[Sequence[int]] = encoded["input_ids"]
    return [[end, *tokens, end][:longest] for tokens in texts]
