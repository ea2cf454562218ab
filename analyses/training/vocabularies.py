"""A vocabulary of pieces of words, learnt from a corpus, and its sentences as tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from matlens.data.corpus import Corpus
from matlens.errors import Between, InputError, PositiveInt, checked, short

END = "<|endoftext|>"  # as in GPT-2, before each text and behind it


@checked
def bpe_tokenizer(corpus: Corpus, *, n_tokens: Annotated[int, Between(258)], longest: PositiveInt) -> Any:
    """A tokenizer of GPT-2's kind, byte-level BPE, learnt from a corpus.

    Parameters
    ----------
    corpus
        The sentences.
    n_tokens
        How many tokens there are at most: 256 bytes, the end of a text, and as many merges as the text has.
    longest
        The longest text that the model will read, in tokens.
    """
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


@checked
def token_sequences(
    tokenizer: Any, corpus: Corpus, *, longest: Annotated[int, Between(3)]
) -> list[list[int]]:
    """Each sentence as the end of a text, its tokens, and the end of a text again.

    Parameters
    ----------
    tokenizer
        The tokenizer.
    corpus
        The sentences.
    longest
        Sentences that have more tokens, both ends included, are cut.
    """
    end = getattr(tokenizer, "eos_token_id", None)
    if end is None or not callable(tokenizer):
        raise InputError(f"tokenizer is {short(tokenizer)}. Expected one of transformers with an eos_token.")
    encoded = tokenizer(list(corpus.sentences), add_special_tokens=False, verbose=False)
    texts: Sequence[Sequence[int]] = encoded["input_ids"]
    return [[end, *tokens, end][:longest] for tokens in texts]
