"""Write a WikiLM and its dictionary in fairseq's format."""

from __future__ import annotations

import argparse
import io
from collections import Counter
from pathlib import Path

import torch

from matlens import InputError
from matlens.data import Corpus
from matlens.io import write_files
from matlens.models.families.dictionary import DICTIONARY, SPECIAL, WordDictionary, words_of
from matlens.models.families.fairseq import PREFIXES
from matlens.models.families.wikilm import WikiLMConfig, WikiLMForCausalLM

__all__ = ["WikiLMConfig", "WikiLMForCausalLM", "word_dictionary", "write_wikilm"]
_MULTIPLE = 8  # fairseq pads dictionaries to a multiple of this
_FILLER = "madeupword{:04d}"


def word_dictionary(corpus: Corpus, *, n_words: int) -> WordDictionary:
    """The ``n_words`` most frequent words of a corpus, padded to a multiple of 8.

    Ties are in alphabetical order.
    """
    counts = Counter(word for words in words_of(corpus.sentences) for word in words if word not in SPECIAL)
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))[: n_words - len(SPECIAL)]
    words, word_counts = (
        [*SPECIAL, *(word for word, _ in ordered)],
        [*(0,) * len(SPECIAL), *(n for _, n in ordered)],
    )
    fillers = [_FILLER.format(i) for i in range(-len(words) % _MULTIPLE)]
    return WordDictionary((*words, *fillers), (*word_counts, *(0,) * len(fillers)))


def write_wikilm(model: WikiLMForCausalLM, dictionary: WordDictionary, folder: str | Path) -> Path:
    """Write ``checkpoint.pt`` and ``dict.txt`` in fairseq's format; returns the first path."""
    folder, config = Path(folder), model.config
    if len(dictionary) != config.vocab_size:
        raise InputError(f"dictionary must have {config.vocab_size} words, got {len(dictionary)}.")
    cutoffs = ",".join(map(str, config.cutoffs))
    args = argparse.Namespace(
        arch="transformer_lm_wiki103", task="language_modeling", decoder_layers=config.num_layers,
        decoder_attention_heads=config.attention_heads, decoder_embed_dim=config.d_model,
        decoder_input_dim=config.d_model, decoder_output_dim=config.d_model,
        decoder_ffn_embed_dim=config.ffn_dim, decoder_normalize_before=True,
        no_decoder_final_norm=not config.final_norm, adaptive_input=True, adaptive_input_cutoff=cutoffs,
        adaptive_input_factor=config.adaptive_factor, adaptive_softmax_cutoff=cutoffs,
        adaptive_softmax_factor=config.adaptive_factor, tie_adaptive_weights=True,
        tie_adaptive_proj=True, activation_fn=config.activation_function, add_bos_token=False,
        no_scale_embedding=not config.scale_embedding, tokens_per_sample=config.max_position_embeddings,
        max_target_positions=config.max_position_embeddings, decoder_learned_pos=False,
        no_token_positional_embeddings=False, dropout=config.dropout,
    )  # fmt: skip
    tensors = {
        f"{theirs}{name.removeprefix(ours)}": tensor.detach().cpu()
        for ours, theirs in PREFIXES.items()
        for name, tensor in model.state_dict().items()
        if name.startswith(ours)
    }
    tensors["decoder.version"] = torch.tensor([3.0])
    tensors["decoder.adaptive_softmax.version"] = torch.tensor([1])
    buffer = io.BytesIO()
    torch.save({"args": args, "model": tensors, "optimizer_history": [], "extra_state": {}}, buffer)
    rows = list(zip(dictionary.words, dictionary.counts, strict=True))[len(SPECIAL) :]
    words = "".join(f"{word} {count}\n" for word, count in rows)
    write_files({folder / DICTIONARY: words, folder / "checkpoint.pt": buffer.getbuffer()})
    return folder / "checkpoint.pt"
