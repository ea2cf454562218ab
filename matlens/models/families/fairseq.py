"""WikiLM from fairseq's checkpoints, read without executing them, and fairseq's dictionaries.

A checkpoint is a pickle. torch reads it with ``weights_only``: tensors and plain values, and of other classes
only settings (``argparse.Namespace``) and meters of training, which are replaced by inert objects.
"""

from __future__ import annotations

import argparse
import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from matlens.errors import InputError, PositiveInt, checked, printable
from matlens.io.bounds import TABLE
from matlens.io.files import read_bounded
from matlens.models.families.wikilm import (
    ARCHITECTURE,
    MODEL_TYPE,
    WikiLMAdapter,
    WikiLMConfig,
    WikiLMForCausalLM,
)
from matlens.models.places import CHECKPOINT
from matlens.models.registry import Family, register

if TYPE_CHECKING:
    from tokenizers import Tokenizer

PREFIXES = {"model.": "decoder.", "lm_head.": "decoder.adaptive_softmax."}
"""What the names of parameters begin with here, and in fairseq."""
_SOFTMAX = PREFIXES["lm_head."]
_METERS = ("AverageMeter", "TimeMeter", "StopwatchMeter", "MetersDict")
_IGNORED = re.compile(r".*(version|_float_tensor)|decoder\.embed_positions\.weights")
_OLD_NORMS = {".layer_norms.0.": ".self_attn_layer_norm.", ".layer_norms.2.": ".final_layer_norm."}
_MAX_POSITIONS = 2**16
_NAMED = re.compile(r"GLOBAL ([\w.]+)|unsupported class ([\w.]+)")


@register
class WikiLM(Family):
    """fairseq's WikiLM, from its checkpoint or from a folder of `save_pretrained`."""

    def __init__(self) -> None:
        AutoConfig.register(MODEL_TYPE, WikiLMConfig, exist_ok=True)
        AutoModelForCausalLM.register(WikiLMConfig, WikiLMForCausalLM, exist_ok=True)

    def adapters(self) -> Mapping[str, type]:
        """Which module of a WikiLM is which part of a bridge."""
        return {ARCHITECTURE: WikiLMAdapter}

    def read_file(self, path: Path, dtype: torch.dtype) -> tuple[Any, Any] | None:
        """The tokenizer and the model of a checkpoint with its dictionary next to it."""
        if path.suffix.lower() != CHECKPOINT:
            return None
        model, dictionary = read_wikilm(path, dtype=dtype)
        return dictionary.tokenizer(longest=model.config.max_position_embeddings), model


class _Inert:
    """Replaces an object of a class that is not needed."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        pass


def read_wikilm(
    path: str | Path, *, dtype: torch.dtype = torch.float32
) -> tuple[WikiLMForCausalLM, WordDictionary]:
    """Read a checkpoint of fairseq, without executing it, and the ``dict.txt`` next to it."""
    path = Path(path)
    content = _read(path)
    dictionary = WordDictionary.read(path.parent / DICTIONARY)
    try:
        settings, tensors = vars(content["args"]), _renamed(content["model"])
        _check_settings(settings, tensors)
        tied = bool(settings["tie_adaptive_weights"])
        # Old checkpoints have the inverse setting.
        projections = settings.get("no_tie_adaptive_proj") is False or settings.get("tie_adaptive_proj")
        config = WikiLMConfig(
            vocab_size=len(dictionary), d_model=settings["decoder_embed_dim"],
            num_layers=settings["decoder_layers"], attention_heads=settings["decoder_attention_heads"],
            ffn_dim=settings["decoder_ffn_embed_dim"], tie_word_embeddings=tied,
            tie_projections=tied and bool(projections),
            max_position_embeddings=_n_positions(settings),
            cutoffs=[int(end) for end in settings["adaptive_input_cutoff"].split(",")],
            adaptive_factor=settings.get("adaptive_input_factor", 4),
            activation_function=settings.get("activation_fn", "relu"),
            scale_embedding=not settings.get("no_scale_embedding"),
            final_norm=not _lacks_final_norm(settings, tensors),
        )  # fmt: skip
        weights = _weights(tensors, config)
        with torch.device("meta"):
            model = WikiLMForCausalLM(config)
        model.load_state_dict(weights, assign=True)
        for ours, theirs in model.get_expanded_tied_weights_keys().items():
            if not torch.equal(weights[ours], weights[theirs]):
                raise InputError(f"{ours} and {theirs} must be equal by its settings, and differ")
        model.tie_weights()
        positions = model.model.embed_positions
        n_positions = config.max_position_embeddings + positions.offset
        positions.weights = positions.get_embedding(n_positions, config.d_model, config.pad_token_id)
    except Exception as error:  # a pickle can hold anything in place of settings and weights
        kind = "" if isinstance(error, InputError) else f"{type(error).__name__}: "
        reason = printable(" ".join(f"{kind}{error}".split()), limit=400)
        raise InputError(
            f"The checkpoint {path} cannot be used as a WikiLM with its {DICTIONARY}: {reason}. Expected "
            "fairseq's transformer_lm with adaptive input and adaptive softmax, as transformer_lm_wiki103 is."
        ) from error
    torch.nn.Module.to(model, dtype=dtype)  # that of transformers has no type
    return model.eval(), dictionary


def _read(path: Path) -> Mapping[str, Any]:
    """Content of a checkpoint, without executing code."""
    allowed: list[Any] = [argparse.Namespace]
    allowed += [
        (_Inert, f"fairseq.{module}.{name}") for module in ("meters", "logging.meters") for name in _METERS
    ]
    try:
        with path.open("rb") as file, torch.serialization.safe_globals(allowed):
            return torch.load(file, map_location="cpu", weights_only=True)
    except InputError:
        raise
    except Exception as error:  # readers of archives and pickles fail in too many ways to list
        named = _NAMED.search(str(error))
        reason = f"it is truncated, damaged or no file of torch ({type(error).__name__})"
        if named is not None:
            reason = f"it names {(named[1] or named[2])[:80]}, which may be code"
        raise InputError(f"The checkpoint {path} is not read: {reason}.") from error


def _renamed(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights under fairseq's present names: once norms had numbers and projections were one matrix."""
    renamed: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        for old, new in _OLD_NORMS.items():
            name = name.replace(old, new)
        place, joint, kind = name.partition("in_proj_")
        parts = zip("qkv", tensor.chunk(3), strict=True) if joint else ()
        renamed |= {f"{place}{letter}_proj.{kind}": part for letter, part in parts} or {name: tensor}
    return renamed


def _check_settings(settings: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Refuse settings that say more than the weights do."""
    n_blocks = len({name.split(".")[2] for name in tensors if name.startswith("decoder.layers.")})
    bands, others = (
        (settings.get(f"adaptive_{side}_cutoff"), settings.get(f"adaptive_{side}_factor", 4))
        for side in ("input", "softmax")
    )
    activation = settings.get("activation_fn", "relu")
    refused = {
        "input and output have no bands of words, or others": bands[0] is None or bands != others,
        # Before a model of any number of blocks is made.
        f"decoder_layers is not {n_blocks}, the number of blocks": settings["decoder_layers"] != n_blocks,
        "activation_fn is neither relu nor gelu": activation not in ("relu", "gelu"),
        "no_token_positional_embeddings is set": settings.get("no_token_positional_embeddings"),
        "add_bos_token is set": settings.get("add_bos_token"),
        # Before a table of any number of positions is made.
        f"it has more than {_MAX_POSITIONS:,} positions": _n_positions(settings) > _MAX_POSITIONS,
        "its first kind of adaptive softmax has bands elsewhere": f"{_SOFTMAX}version" not in tensors,
    }
    for reason, is_so in refused.items():
        if is_so:
            raise InputError(reason)


def _n_positions(settings: Mapping[str, Any]) -> int:
    return settings.get("max_target_positions") or settings["tokens_per_sample"]


def _lacks_final_norm(settings: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> bool:
    """Whether the final norm is missing, as in all checkpoints before version 3."""
    version = tensors.get("decoder.version")
    if version is not None and float(version) <= 2:
        return True
    if "decoder_final_norm" in settings:
        return not settings["decoder_final_norm"]
    return "no_tie_adaptive_proj" in settings or bool(settings.get("no_decoder_final_norm"))


def _weights(tensors: Mapping[str, Tensor], config: WikiLMConfig) -> dict[str, Tensor]:
    """A checkpoint's tensors by the names of the model."""
    weights: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if _IGNORED.fullmatch(name):
            continue
        ours = name.replace(_SOFTMAX, "lm_head.").replace("decoder.", "model.")
        if ours == "lm_head.head.weight":  # of an output that is not tied
            parts = tensor.tensor_split([config.bands[0][1]])
            weights |= zip(
                ("lm_head.head.word_proj.weight", "lm_head.head.class_proj.weight"), parts, strict=True
            )
        elif re.fullmatch(r"lm_head\.tail\.\d+\.0\.weight", ours) and not config.tie_projections:
            weights[ours] = tensor.T.contiguous()
        else:
            weights[ours] = tensor
    return weights


DICTIONARY = "dict.txt"
"""Name of the file of a dictionary, next to the checkpoint."""
BOS, PAD, EOS, UNK = SPECIAL = ("<s>", "<pad>", "</s>", "<unk>")
"""The words that every dictionary begins with; its file does not list them."""
# WikiText writes 'well @-@ known', '1 @,@ 000' and '3 @.@ 5' for what stands between letters or digits.
_JOINERS = ((r"(?<=\w)-(?=\w)", " @-@ "), (r"(?<=\d),(?=\d)", " @,@ "), (r"(?<=\d)\.(?=\d)", " @.@ "))
_WORD = r"@[-,.]@|<unk>|(?<=\w)'\w+|^'(?:s|t|re|ve|ll|d|m)$|\w+|[^\w\s]"
_LINE = re.compile(r"(.+) ([0-9]{1,18})( #fairseq:overwrite)?\s*")
_ENDED = re.compile(r"\w+\.")
_SELDOM = 100  # "album." ends a sentence if "album" is this many times more frequent


@dataclass(frozen=True)
class WordDictionary:
    """Words by number, the special ones first, and how often each was seen."""

    words: tuple[str, ...]
    counts: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.words)

    @classmethod
    def read(cls, path: Path) -> WordDictionary:
        """Read a ``dict.txt``: a word and its count on each line."""
        words, counts = list(SPECIAL), [0] * len(SPECIAL)
        ids = {word: number for number, word in enumerate(words)}
        text = read_bounded(path, TABLE).decode().rstrip()
        for row, line in enumerate(io.StringIO(text), start=1):  # not splitlines: words hold U+2028
            parts = _LINE.fullmatch(line)
            if parts is None or (parts[1] in ids and not parts[3]):
                raise InputError(
                    f"Line {row} of {path} must be another word, a space and its count, got {line[:60]!r}."
                )
            if parts[1] in ids:  # the earlier keeps its number, under a name that no text holds
                earlier = ids[parts[1]]
                words[earlier] = f"<overwritten {earlier}>"
            ids[parts[1]] = len(words)
            words.append(parts[1])
            counts.append(int(parts[2]))
        return cls(tuple(words), tuple(counts))

    def tokenizer(self, *, longest: PositiveInt | None = None) -> Any:
        """A tokenizer of transformers that splits text as WikiText is split, with ``</s>`` in front.

        ``well @-@ known``, ``1 @,@ 000``, ``it 's``. Between spaces, words of the dictionary stay whole
        (``U.S.``, ``...``), but not a word with a full stop that is seen a hundred times as often without.
        """
        from tokenizers import Tokenizer, models, processors
        from transformers import PreTrainedTokenizerFast

        ids = {word: number for number, word in enumerate(self.words)}
        tokenizer = Tokenizer(models.WordLevel(ids, unk_token=UNK))
        joiners = [pair for pair in _JOINERS if pair[1].strip() in ids]
        _take_apart(tokenizer, joiners, self._whole())
        ends = [(EOS, ids[EOS])]
        tokenizer.post_processor = processors.TemplateProcessing(single=f"{EOS} $A", special_tokens=ends)
        special: dict[str, Any] = {"bos_token": EOS, "eos_token": EOS, "unk_token": UNK, "pad_token": PAD}
        special["name_or_path"] = ""  # which bridges ask for
        if longest is not None:
            special["model_max_length"] = longest
        return PreTrainedTokenizerFast(tokenizer_object=tokenizer, padding_side="right", **special)

    def _whole(self) -> list[str]:
        """Words that are not split, although they contain punctuation."""
        count_of = dict(zip(self.words, self.counts, strict=True))
        mixed = [word for word in self.words[len(SPECIAL) :] if not word.isalnum()]
        return [
            word
            for word, parts in zip(mixed, words_of(mixed), strict=True)
            if len(parts) > 1
            and not any(map(str.isspace, word))
            and not (_ENDED.fullmatch(word) and count_of[word] * _SELDOM < count_of.get(word[:-1], 0))
        ]


def _take_apart(
    tokenizer: Tokenizer, joiners: Sequence[tuple[str, str]] = _JOINERS, whole: Sequence[str] = ()
) -> None:
    from tokenizers import Regex, normalizers, pre_tokenizers

    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Replace(Regex(pattern), joiner) for pattern, joiner in joiners]
    )
    by_first: dict[str, list[str]] = {}
    for word in whole:
        by_first.setdefault(word[0], []).append(re.escape(word[1:]))
    known = "|".join(f"{re.escape(first)}(?:{'|'.join(rest)})" for first, rest in by_first.items())
    pattern = rf"^\w+$|^(?:{known})$|{_WORD}" if known else _WORD
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Split(Regex(pattern), "isolated")]
    )


@checked
def words_of(texts: Sequence[str]) -> list[list[str]]:
    """Split texts into words and punctuation, like the tokenizer of a dictionary."""
    from tokenizers import Tokenizer, models

    tokenizer = Tokenizer(models.WordLevel({UNK: 0}, unk_token=UNK))
    _take_apart(tokenizer)
    normalizer, splitter = tokenizer.normalizer, tokenizer.pre_tokenizer
    assert normalizer is not None
    assert splitter is not None
    return [[word for word, _ in splitter.pre_tokenize_str(normalizer.normalize_str(text))] for text in texts]
