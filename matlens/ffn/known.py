"""What is kept of a model so that its value vectors can be read without it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from matlens.errors import InputError
from matlens.ffn.norms import FFN_OUT, linear_head, norm_after_ffn
from matlens.ffn.projection import Projection
from matlens.ffn.values import ValueParts, ValueVectors
from matlens.ffn.weights import NotInFiles, WeightFiles, build_modules, module_record, named_tensors
from matlens.io.files import read_json, write_json
from matlens.models.identity import ModelIdentity
from matlens.models.layout import output_layer
from matlens.models.readout import narrowing
from matlens.models.tokens import token_texts

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge

Reading = Literal["plain", "norm", "head"]
_RECORD, _TOKENIZER = "parts.json", "tokenizer.json"
_REASON = "not_in_files"  # why there is nothing else in a record


class Known:
    """The recorded parts of a model, read from its files."""

    def __init__(self, folder: Path, files: WeightFiles, dtype: torch.dtype, device: torch.device) -> None:
        self.folder, self._files, self._dtype, self._device = folder, files, dtype, device
        self._record: Mapping[str, Any] = read_json(folder / _RECORD)

    @property
    def reason(self) -> str | None:
        """Why the parts are not in the files, if they were looked for in vain."""
        return self._record.get(_REASON)

    @property
    def identity(self) -> ModelIdentity:
        """Which model it is."""
        return ModelIdentity.from_json(self._record["identity"])

    def matrix(self, layer: int) -> Tensor:
        """The output matrix of a layer's FFN, a row for each coefficient."""
        record = self._record["matrices"][layer]
        tensor = self._files.take(record, self._dtype).to(self._device)
        return tensor.T if record["turned"] else tensor

    def values(self, identity: ModelIdentity, matrix: Callable[[int], Tensor]) -> ValueVectors:
        """The value vectors; each matrix is read when it is first used."""
        shape, matrices = tuple(self._record["shape"]), _Lazy(len(self._record["matrices"]), matrix)
        biases = list(map(self._take, self._record["biases"]))
        norms = self._modules(self._record["norms"])
        return ValueVectors(ValueParts(identity, self._device, shape, matrices, biases, norms))

    def projection(self, identity: ModelIdentity, reading: Reading) -> Projection | None:
        """How vectors are read in the vocabulary; None if there is no final norm where one is needed."""
        norm, width = None, self._record["shape"][1]
        if reading != "plain":
            norm = next(iter(self._modules(self._record["final"])), None)
            if norm is None:
                return None
            if reading == "head":
                norm = linear_head(self._take(self._record["dense"]), norm, width)
        rows = self._files.take(self._record["unembedding"], self._dtype).to(self._device).float()
        return Projection(rows, _read_tokenizer(self.folder, self._record["tokenizer"]), norm, identity)

    def _take(self, record: Mapping[str, Any] | None) -> Tensor | None:
        return None if record is None else self._files.take(record, self._dtype).to(self._device)

    def _modules(self, records: Sequence[Mapping[str, Any]]) -> list[nn.Module]:
        modules = build_modules(self._record["class"], self._files, records, self._dtype) if records else []
        return [module.to(self._device) for module in modules]


class _Lazy(Sequence[Tensor]):
    """Tensors that are each read when they are first used."""

    def __init__(self, n: int, read: Callable[[int], Tensor]) -> None:
        self._n, self._read = n, cache(read)

    def __len__(self) -> int:
        return self._n

    def __getitem__(self, layer: Any) -> Any:
        return self._read(layer)


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
    """Write down where the parts of a model lie in its files; raises NotInFiles if one is not there."""
    values = ValueVectors(model)
    if not values.one_matrix_a_layer:
        raise NotInFiles("one matrix of value vectors a layer")
    if not hasattr(model, "unembed") or narrowing(model):
        raise NotInFiles("the unembedding")
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
    for ours, theirs in zip(built, [*after, *final], strict=True):
        if repr(ours) != repr(theirs):  # which has the class and its settings
            raise NotInFiles(repr(theirs))
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
        raise NotInFiles(f"{_TOKENIZER} is not there") from error
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(text), **special)
