"""What is kept of a model so that its value vectors can be read without it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from matlens.errors import InputError
from matlens.ffn.norms import FFN_OUT, norm_after_ffn
from matlens.ffn.values import ValueVectors
from matlens.ffn.weights import (
    DamagedWeights,
    NotInFiles,
    WeightFiles,
    build_modules,
    check_same_modules,
    module_record,
    named_tensors,
)
from matlens.io.files import read_json, write_json
from matlens.models.identity import ModelIdentity
from matlens.models.layout import output_layer
from matlens.models.readout import narrowing
from matlens.models.vocabulary import token_texts

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge

_RECORD, _TOKENIZER = "parts.json", "tokenizer.json"
_REASON = "not_in_files"  # why there is nothing else in a record


class Known:
    """What is kept of a model, read beside its files.

    Parameters
    ----------
    folder
        Where it is kept.
    files
        The files of the model.
    dtype, device
        The precision of the model, and where its tensors go.

    Raises
    ------
    OSError, InputError
        It cannot be read.
    """

    def __init__(self, folder: Path, files: WeightFiles, dtype: torch.dtype, device: torch.device) -> None:
        self.folder, self.files, self.dtype, self.device = folder, files, dtype, device
        self._record: Mapping[str, Any] = read_json(folder / _RECORD)

    @property
    def reason(self) -> str | None:
        """Why the parts are not in the files, where it has been tried to find them there and failed."""
        reason = self._record.get(_REASON)
        return None if reason is None else str(reason)

    @property
    def identity(self) -> ModelIdentity:
        """Who the model is."""
        return ModelIdentity.from_json(self._record["identity"])

    @property
    def shape(self) -> tuple[int, int]:
        """``(d_mlp, d_model)``."""
        d_mlp, d_model = self._record["shape"]
        return int(d_mlp), int(d_model)

    @property
    def n_layers(self) -> int:
        """How many layers there are."""
        return len(self._record["matrices"])

    def matrix(self, layer: int) -> Tensor:
        """The output matrix of a layer's FFN, a row for each coefficient."""
        record = self._record["matrices"][layer]
        tensor = self._take(record)
        return tensor.T if record["turned"] else tensor

    def biases(self) -> list[Tensor | None]:
        """The output biases."""
        return [None if record is None else self._take(record) for record in self._record["biases"]]

    def norms(self) -> list[nn.Module]:
        """The norm after each FFN, in float32; empty where none follows."""
        return self._modules(self._record["norms"])

    def unembedding(self) -> Tensor:
        """The unembedding, in float32."""
        return self._take(self._record["unembedding"]).float()

    def final_norm(self) -> nn.Module | None:
        """The final norm in float32, ``None`` where there is none."""
        return next(iter(self._modules(self._record["final"])), None)

    def dense(self) -> Tensor | None:
        """The weights of the dense layer of a masked-LM head."""
        record = self._record["dense"]
        return None if record is None else self._take(record)

    @cached_property
    def tokenizer(self) -> Any:
        """A tokenizer that reads words and writes tokens as the model's own does.

        Raises
        ------
        DamagedWeights
            It is not there any more.
        """
        return _read_tokenizer(self.folder, self._record["tokenizer"])

    def check_there(self) -> None:
        """Refuse files that lack a tensor; their numbers are checked when they are read.

        Raises
        ------
        DamagedWeights
            One is not there.
        """
        records = [self._record["unembedding"], *self._record["matrices"]]
        for record in records:
            self.files.check_there(record)

    def _take(self, record: Mapping[str, Any]) -> Tensor:
        return self.files.take(record, self.dtype).to(self.device)

    def _modules(self, records: Sequence[Mapping[str, Any]]) -> list[nn.Module]:
        if not records:
            return []
        modules = build_modules(self._record["class"], self.files, records, self.dtype)
        return [module.to(self.device) for module in modules]


def describe_or_say_why(folder: Path, files: WeightFiles, model: TransformerBridge) -> None:
    """Write down where the parts of a model lie in its files, or why they cannot be read there.

    The reason holds as long as the files, their tokenizer and the software are the same, so it is not looked
    for again.
    """
    try:
        describe(folder, files, model)
    except (NotInFiles, InputError) as error:
        (folder / _TOKENIZER).unlink(missing_ok=True)
        write_json(folder / _RECORD, {_REASON: str(error)})


def describe(folder: Path, files: WeightFiles, model: TransformerBridge) -> None:
    """Write down where the parts of a model lie in its files.

    Raises
    ------
    NotInFiles
        A part is not there as the model has it.
    InputError
        The model has no value vectors, or no unembedding.
    """
    values = ValueVectors(model)
    if not values.one_matrix_a_layer:
        raise NotInFiles("one matrix of value vectors a layer")
    if not hasattr(model, "unembed"):
        raise NotInFiles("the unembedding")
    if narrowing(model):
        raise NotInFiles("the unembedding with what stands before it")
    names = named_tensors(model)

    def part(tensor: Tensor | nn.Module) -> dict[str, Any]:
        if isinstance(tensor, nn.Module) or id(tensor) not in names:
            raise NotInFiles("a tensor that is no parameter")
        return files.find(names[id(tensor)], tensor.detach())

    layers = range(values.n_layers)
    outputs = [output_layer(model, layer) for layer in layers]
    after = [norm_after_ffn(model, layer) for layer in layers] if values.output_kind != FFN_OUT else []
    final = [model.ln_final.original_component] if hasattr(model, "ln_final") else []
    head = model.mlm_head.original_component if hasattr(model, "mlm_head") else None
    architecture = type(model.original_model).__name__
    weights = [_weight(module) for module in outputs]
    norms, last = ([module_record(files, model, module) for module in modules] for modules in (after, final))
    built = build_modules(architecture, files, [*norms, *last], weights[0].dtype)
    check_same_modules(built, [*after, *final])
    record: dict[str, Any] = {
        "class": architecture,
        "identity": values.identity.to_json(),
        "shape": [values.d_mlp, values.d_model],
        "matrices": [
            {**part(weight), "turned": not torch.equal(weight.float(), values.matrix(layer))}
            for layer, weight in zip(layers, weights, strict=True)
        ],
        "biases": [part(m.bias) if getattr(m, "bias", None) is not None else None for m in outputs],
        "norms": norms,
        "unembedding": part(model.unembed.original_component.weight),
        "final": last,
        "dense": None if head is None else part(head.weight),
        "tokenizer": _write_tokenizer(folder, model.tokenizer),
    }
    write_json(folder / _RECORD, record)


def _weight(module: nn.Module) -> Tensor:
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor):
        raise NotInFiles(type(module).__name__)
    return weight


def _write_tokenizer(folder: Path, tokenizer: Any) -> dict[str, Any]:
    """Write a tokenizer, and refuse one that is another when it is read back; gives the record of it.

    A special token that the vocabulary lacks is left out: tokenizers add it when they are built, and a bridge
    names one without adding it.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if not isinstance(backend, Tokenizer):
        raise NotInFiles("the tokenizer")
    content = json.loads(backend.to_str()) | {"truncation": None, "padding": None}  # left by the last text
    (folder / _TOKENIZER).write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
    special, vocabulary = tokenizer.special_tokens_map, tokenizer.get_vocab()
    record = {name: token for name, token in special.items() if token in vocabulary}
    again = _read_tokenizer(folder, record)
    if _as_read(again) != _as_read(tokenizer):
        raise NotInFiles("the tokenizer")
    return record


def _as_read(tokenizer: Any) -> list[Any]:
    """All that value vectors are shown and words looked up by."""
    texts = token_texts(tokenizer, range(len(tokenizer)))
    words = tokenizer(texts, add_special_tokens=False)["input_ids"]
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    parts = [backend.get(part) for part in ("model", "normalizer", "pre_tokenizer", "decoder")]
    return [*parts, tokenizer.get_vocab(), tokenizer.unk_token_id, texts, words]


def _read_tokenizer(folder: Path, special: Mapping[str, str]) -> Any:
    from transformers import PreTrainedTokenizerFast

    try:
        text = (folder / _TOKENIZER).read_text(encoding="utf-8")
    except OSError as error:  # it was cleared meanwhile
        raise DamagedWeights(f"{_TOKENIZER} is not there") from error
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(text), **special)
