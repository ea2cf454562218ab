"""Configurations, tokenizers and weights from files."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import version
from itertools import product
from typing import Any

import torch

from matlens.errors import InputError
from matlens.models.registry import families

# Texts at which pre-tokenizers and normalizers differ.
_PROBES = (
    "a", "Hello world", " a leading space", "  two  spaces ", "don't I'LL we've", "1 12 1234567 3.14 1,000",
    "tabs\tand\nnew\n\nlines \r\n", "naïve cafe\u0301 ﬁ Ⅸ Å", "camelCase snake_case CAPS", "Привет γεια",
    "日本語の文 한국어", "مرحبا नमस्ते", "🙂 — “quotes”…", "x=[(1+2)*3]//4; #!@$%^&",
)  # fmt: skip
# Of each kind that pre-tokenizers treat alike; all threes in a row are one more text.
_KINDS = (" ", "\n", "\t", "1", "23", "a", "B", "é", "日", ".", "_", "'s", "🙂")
_SENTENCEPIECE = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model")
_WORDS = 200  # of the vocabulary, in one more text
_READERS = ("gguf", "torch", "transformers", "tokenizers")


@contextmanager
def naming(problem: str) -> Iterator[None]:
    """Name the model that other libraries cannot read: they raise too many kinds of errors to list."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        raise InputError(f"{problem} {type(error).__name__}: {error}") from error


def read_configuration(folder: str, **options: Any) -> Any:
    """The configuration of a model, as the bridge reads it."""
    from transformer_lens.utilities.hf_utils import autoconfig_with_remote_post_init_compat
    from transformers import AutoConfig

    families()  # some let transformers know their configuration
    return autoconfig_with_remote_post_init_compat(
        folder, auto_config=AutoConfig, output_attentions=True, **options
    )


def modality(config: Any) -> str:
    """Input types and stacks of a model, such as ``"vision"`` and ``"seq2seq"``."""
    from transformer_lens.utilities.architectures import classify_model_config

    return str(classify_model_config(config))


def check_supported(name: str, config: Any, stack: str | None = None) -> None:
    """Raise InputError for models without an adapter, another stack than they have, or too many layers."""
    from transformer_lens.model_bridge.sources import _hf_format as formats

    has_stacks = modality(config) == "seq2seq"
    if has_stacks != (stack is not None):
        expected = "'encoder' or 'decoder'" if has_stacks else "None"
        raise InputError(f"stack must be {expected} for {name!r}, a {config.model_type}, got {stack!r}.")
    try:
        formats.determine_architecture_from_hf_config(config)
    except ValueError:  # which lists all architectures
        classes = ", ".join(map(str, getattr(config, "architectures", None) or ())) or "no class"
        raise InputError(
            f"The model {name!r} cannot be used: TransformerLens has no adapter for it (model type "
            f"{config.model_type!r}, {classes!r}). Expected a model that TransformerLens 4 supports."
        ) from None


def read_tokenizer(folder: str, **options: Any) -> Any:
    """The tokenizer of a model's ``tokenizer.json``, or else of its SentencePiece or slow files.

    transformers may put the class of the model's type in place of the file's pre-tokenizer, normalizer and
    special tokens. Tokens that ``tokenizer_config.json`` adds are kept.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast
    from transformers.models.auto.tokenization_auto import get_tokenizer_config

    revision = options.get("revision")
    file = _tokenizer_file(folder, revision=revision)
    if file is None:
        return _like_sentencepiece(folder, AutoTokenizer.from_pretrained(folder, **options), options)
    texts, vocabulary = _probes(file), file.get_vocab()
    # A class that is declared decides about BOS and EOS.
    with_ends = "tokenizer_class" not in get_tokenizer_config(folder, revision=revision)
    try:
        ours = AutoTokenizer.from_pretrained(folder, **options)
        same = _encode(ours, texts, with_ends) == _encode(file, texts, with_ends)
    except Exception:  # the class of the model's type can also fail on the file's vocabulary
        return PreTrainedTokenizerFast.from_pretrained(folder, **options)
    if type(ours) is PreTrainedTokenizerFast or (same and not {*ours.get_vocab()} - {*vocabulary}):
        return ours
    plain = PreTrainedTokenizerFast.from_pretrained(folder, **options)
    if same and ours.get_vocab() == plain.get_vocab():
        return ours
    if _encode(plain, texts) != _encode(file, texts):
        if _encode(plain, texts) == _encode(ours, texts):
            return ours  # both follow tokenizer_config.json
        raise InputError(
            f"The tokenizer of {folder!r} must encode texts as its tokenizer.json does, got other tokens "
            f"from {type(ours).__name__}. Correct its tokenizer_config.json."
        )
    for name, token in ours.special_tokens_map.items():
        if isinstance(token, str) and token in vocabulary and getattr(plain, name) is None:
            setattr(plain, name, token)
    return plain


def check_tokenizer_file(tokenizer: Any) -> None:
    """Raise InputError for a tokenizer that transformers made unlike the ``tokenizer.json`` next to it."""
    from transformers import PreTrainedTokenizerFast

    name = getattr(tokenizer, "name_or_path", "")
    file = _tokenizer_file(name, local_files_only=True) if name else None
    if file is None or type(tokenizer) is PreTrainedTokenizerFast:
        return
    texts = _probes(file)
    if _encode(tokenizer, texts) != _encode(file, texts):
        plain = PreTrainedTokenizerFast.from_pretrained(name, local_files_only=True)
        if _encode(plain, texts) != _encode(tokenizer, texts):
            raise InputError(
                f"The tokenizer must encode texts as {name}/tokenizer.json does, got other tokens from "
                f"{type(tokenizer).__name__}. Use matlens.load, or wrap(bridge, tokenizer="
                f"transformers.PreTrainedTokenizerFast.from_pretrained({name!r}))."
            )


def _like_sentencepiece(folder: str, tokenizer: Any, options: dict[str, Any]) -> Any:
    """The tokenizer if it reads words as the SentencePiece model does, or else one that does."""
    from sentencepiece import SentencePieceProcessor
    from transformers import LlamaTokenizer, PreTrainedTokenizerFast

    paths = (_file_path(folder, name, revision=options.get("revision")) for name in _SENTENCEPIECE)
    path = next((path for path in paths if path is not None), None)
    if path is None:
        return tokenizer
    model = SentencePieceProcessor()
    try:
        model.Load(path)
    except RuntimeError:  # a tiktoken file of the same name
        return tokenizer
    size = model.GetPieceSize()
    plain = [i for i in range(size) if not (model.IsControl(i) or model.IsByte(i) or model.IsUnknown(i))]
    text = " ".join(model.DecodeIds(plain[:: max(1, len(plain) // _WORDS)]).split())
    expected = model.EncodeAsPieces(text)
    for kind in (type(tokenizer), LlamaTokenizer, PreTrainedTokenizerFast):
        ours = tokenizer if kind is type(tokenizer) else kind.from_pretrained(folder, **options)
        if ours.convert_ids_to_tokens(ours.encode(text, add_special_tokens=False)) == expected:
            return ours
    raise InputError(
        f"The tokenizer of {folder!r} must read words as {path} does, got other tokens from "
        f"{type(tokenizer).__name__}. Save its tokenizer.json there."
    )


def _tokenizer_file(folder: str, **options: Any) -> Any | None:
    """The tokenizer that a model's ``tokenizer.json`` describes, without padding and truncation."""
    from tokenizers import Tokenizer

    path = _file_path(folder, "tokenizer.json", **options)
    if path is None:
        return None
    file = Tokenizer.from_file(path)
    file.no_padding()
    file.no_truncation()
    return file


def _file_path(folder: str, name: str, **options: Any) -> str | None:
    """Where a file of a model is, None if it has none."""
    from transformers.utils import cached_file

    with suppress(OSError):  # a folder that is no longer there, or the name of no model
        path: str | None = cached_file(folder, name, _raise_exceptions_for_missing_entries=False, **options)
        return path
    return None


def _probes(file: Any) -> list[str]:
    """Texts in several scripts, one of all kinds of neighbors, and one of words of the vocabulary."""
    size, neighbors = file.get_vocab_size(), "".join(map("".join, product(_KINDS, repeat=3)))
    return [*_PROBES, neighbors, file.decode(list(range(0, size, max(1, size // _WORDS))))]


def _encode(tokenizer: Any, texts: list[str], with_ends: bool = False) -> list[list[int]]:
    ids = [tokenizer.encode(text, add_special_tokens=with_ends) for text in texts]
    return [getattr(encoding, "ids", encoding) for encoding in ids]


def check_vocabulary(tokenizer: Any, name: str) -> Any:
    """Refuse a tokenizer that transformers made of nothing, since its files are not there."""
    if not {*tokenizer.get_vocab()} - {*tokenizer.all_special_tokens}:
        raise InputError(
            f"The model {name!r} has no tokenizer next to its weights. Save it there with "
            "AutoTokenizer.from_pretrained(...).save_pretrained(folder)."
        )
    return tokenizer


class CompleteModel:
    """In place of the class that the bridge loads: refuses missing tensors, which would be initialized.

    ``then`` gets the model on its device before it is wrapped.
    """

    def __init__(self, device: torch.device, then: Callable[[Any], Any]) -> None:
        self._device, self._then = device, then

    def from_pretrained(self, name: str, *, config: Any, **options: Any) -> Any:
        """The model of a folder or of the hub, with every tensor out of its checkpoint."""
        loaded = auto_class(config).from_pretrained(name, config=config, output_loading_info=True, **options)
        model = check_complete(name, *loaded).to(self._device).eval()
        self._then(model)
        return model


def auto_class(config: Any) -> Any:
    """The class of transformers that loads a model of this configuration."""
    from transformer_lens.model_bridge.sources._hf_format import determine_architecture_from_hf_config
    from transformer_lens.model_bridge.sources.transformers.helpers import get_hf_model_class_for_architecture

    return get_hf_model_class_for_architecture(determine_architecture_from_hf_config(config))


def check_complete(name: str, model: Any, report: dict[str, Any]) -> Any:
    """Raise InputError for a checkpoint that lacks tensors, or has more blocks than its configuration."""
    lacking = sorted(report["missing_keys"]) + sorted(map(str, report.get("mismatched_keys", ())))
    if lacking:
        raise InputError(
            f"The model {name!r} could not be loaded: its weights lack {len(lacking)} tensors, including "
            f"{lacking[0]}. Expected a complete checkpoint with its language-model head."
        )
    places = {re.sub(r"\d+", "#", key) for key, _ in model.named_parameters()}
    more = sorted(key for key in report.get("unexpected_keys", ()) if re.sub(r"\d+", "#", key) in places)
    if more:
        raise InputError(
            f"The model {name!r} could not be loaded: its weights hold {len(more)} tensors of blocks that "
            f"its configuration does not have, including {more[0]}. Expected the config.json of "
            "these weights."
        )
    return model


def software() -> dict[str, str]:
    """Versions of the libraries that read models."""
    return {name: version(name) for name in _READERS}
