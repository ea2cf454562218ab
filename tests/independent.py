"""Reference values of `mat` and `id` (definitions, sections 1-4), computed the plain way and without matlens.

Sentences run one at a time through the Hugging Face model, forward hooks take the representations, LAPACK
solves each least-squares problem from the data itself, scikit-learn scores it. Slow, short, and meant to be
checked by eye: tests compare the library's numbers with these.
"""

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.metrics import r2_score
from torch import Tensor, nn
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

KS = (1, 5, 10)

# Where a model keeps its layers, and the module between h^L and the output embedding.
LAYOUTS = {
    "model.layers": "model.norm",  # Llama, Mistral, Qwen, Gemma
    "transformer.h": "transformer.ln_f",  # GPT-2, GPT-J
    "gpt_neox.layers": "gpt_neox.final_layer_norm",  # Pythia
    "bert.encoder.layer": "cls.predictions.transform",  # BERT: dense, activation, norm
}


@dataclass(frozen=True)
class Reference:
    """Quality of `mat` and `id`; rows are source layers, columns target layers or k = 1, 5, 10."""

    r2_mat: np.ndarray  # [L+1, L+1], nan where source >= target
    r2_id: np.ndarray  # [L+1, L+1], likewise
    precision_mat: np.ndarray  # [L+1, 3], mat_{l->L}; at l = L the representation itself
    precision_id: np.ndarray  # [L+1, 3]
    surprisal_mat: np.ndarray  # [L+1], natural logarithm
    surprisal_id: np.ndarray  # [L+1]


def layout(model: PreTrainedModel) -> tuple[list[nn.Module], list[nn.Module]]:
    """Return the model's layers in order, and the modules that read h^L out to logits in order."""
    for layers, norm in LAYOUTS.items():
        try:
            blocks = list(model.get_submodule(layers))
            return blocks, [model.get_submodule(norm), model.get_output_embeddings()]
        except AttributeError:
            continue
    raise NotImplementedError(f"unknown layout: {type(model).__name__}")


@torch.inference_mode()
def hidden_states(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    sentences: Sequence[str],
    positions: Sequence[int],
    mask: bool = False,
    max_length: int | None = None,
) -> np.ndarray:
    """Return h^0..h^L at the given position of each sentence, `[L+1, n, d]` in float32.

    h^0 is the input of layer 0, h^l the output of layer l-1; the final norm has not been applied to h^L.
    With `mask`, the token at the position is replaced by the mask token first.
    """
    if model.training:
        raise ValueError("the model is in training mode: call model.eval() first")
    layers, _ = layout(model)
    taken: list[Tensor] = []
    position = 0  # of the sentence under way; the hooks read it

    def take(hidden: Tensor) -> None:
        taken.append(hidden[0, position].to("cpu", torch.float32, copy=True))

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        take(args[0] if args else kwargs["hidden_states"])

    def after(_: nn.Module, __: tuple[Any, ...], output: Any) -> None:
        take(output[0] if isinstance(output, tuple) else output)

    handles = [layers[0].register_forward_pre_hook(before, with_kwargs=True)]
    handles += [layer.register_forward_hook(after) for layer in layers]
    rows: list[Tensor] = []
    try:
        for sentence, position in tqdm(list(zip(sentences, positions, strict=True)), desc="sentences"):
            ids = tokenizer(sentence, truncation=max_length is not None, max_length=max_length)["input_ids"]
            if not 0 <= position < len(ids):
                raise IndexError(f"position {position} of {len(ids)} tokens")
            if mask:
                ids[position] = tokenizer.mask_token_id
            taken.clear()
            model.base_model(input_ids=torch.tensor([ids], device=model.device))  # no logits are wanted
            rows.append(torch.stack(taken))
    finally:
        for handle in handles:
            handle.remove()
    return torch.stack(rows, dim=1).numpy()


def make_readout(model: PreTrainedModel) -> Callable[[Tensor], Tensor]:
    """Return the function from representations `[n, d]` at layer L to logits `[n, d_vocab]`, in float32."""
    config = model.config.get_text_config()
    for name in ("logit_scale", "logits_scaling"):  # models differ in whether they multiply or divide
        if getattr(config, name, None) not in (None, 1.0):
            raise NotImplementedError(f"readout with {name}")
    cap = getattr(config, "final_logit_softcapping", None)
    head = nn.Sequential(*(deepcopy(module).to("cpu", torch.float32) for module in layout(model)[1]))

    def readout(hidden: Tensor) -> Tensor:
        logits = head(hidden.float())
        return logits if cap is None else cap * torch.tanh(logits / cap)

    return readout


@torch.inference_mode()
def prediction_quality(
    readout: Callable[[Tensor], Tensor], substitutes: Tensor, final: Tensor, chunk: int = 256
) -> tuple[np.ndarray, np.ndarray]:
    """Return Precision@k `[L+1, 3]` and surprisal `[L+1]` of `[L+1, n, d]` substitutes for `[n, d]` h^L."""
    n_layers, n, _ = substitutes.shape
    hits, surprisal = np.zeros((n_layers, len(KS))), np.zeros(n_layers)
    for start in range(0, n, chunk):
        part = slice(start, start + chunk)
        log_p = readout(final[part]).double().log_softmax(-1)
        for layer in range(n_layers):
            t = readout(substitutes[layer, part]).argmax(-1, keepdim=True)
            log_p_t = log_p.gather(-1, t)
            more_probable = (log_p > log_p_t).sum(-1)  # t is among the k best if fewer than k beat it
            hits[layer] += [(more_probable < k).sum().item() for k in KS]
            surprisal[layer] -= log_p_t.sum().item()
    return hits / n, surprisal / n


def reference(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    train_sentences: Sequence[str],
    train_positions: Sequence[int],
    validation_sentences: Sequence[str],
    validation_positions: Sequence[int],
    *,
    pairs: Literal["all", "last"] = "all",
    mask: bool = False,
    max_length: int | None = None,
) -> Reference:
    """Fit every mat_{l->l'} on the training sentences and score `mat` and `id` on the validation sentences.

    With `pairs="last"` only the target L is fitted and scored; the other entries of r^2 stay nan.
    """
    taken = hidden_states(model, tokenizer, train_sentences, train_positions, mask, max_length)
    train = torch.from_numpy(taken).double()
    taken = hidden_states(model, tokenizer, validation_sentences, validation_positions, mask, max_length)
    valid = torch.from_numpy(taken).double()
    last = len(train) - 1
    r2_mat, r2_id = np.full((2, last + 1, last + 1), np.nan)
    substitutes = valid.clone()  # row l becomes mat_{l->L}(h^l); row L stays h^L
    for source in tqdm(range(last), desc="fits"):
        targets = range(source + 1, last + 1) if pairs == "all" else [last]
        wanted = torch.cat([train[target] for target in targets], dim=-1)
        solution = torch.linalg.lstsq(train[source], wanted, driver="gelsd").solution  # A^T, side by side
        mapped = (valid[source] @ solution).chunk(len(targets), dim=-1)
        for target, prediction in zip(targets, mapped, strict=True):
            r2_mat[source, target] = r2_score(valid[target].numpy(), prediction.numpy())
            r2_id[source, target] = r2_score(valid[target].numpy(), valid[source].numpy())
        substitutes[source] = mapped[-1]
    readout = make_readout(model)
    precision_mat, surprisal_mat = prediction_quality(readout, substitutes, valid[last])
    precision_id, surprisal_id = prediction_quality(readout, valid, valid[last])
    return Reference(r2_mat, r2_id, precision_mat, precision_id, surprisal_mat, surprisal_id)


def judged_by_hand(plain: Any, truth: Tensor, substitutes: Mapping[Any, Tensor]) -> dict[Any, list[float]]:
    """Precision@1, 5, 10 and surprisal of each substitute for ``h^L``."""
    stacked = torch.stack([h.float() for h in substitutes.values()])
    precision, surprisal = prediction_quality(make_readout(plain), stacked, truth.float())
    numbers = zip(precision.tolist(), surprisal.tolist(), strict=True)
    return {key: [*shares, nats] for key, (shares, nats) in zip(substitutes, numbers, strict=True)}


def in_table(table: pd.DataFrame, method: str, layer: float) -> list[float]:
    """The same four numbers of a table's method at a layer."""
    rows = table[(table["method"] == method) & (table["layer"] == layer)]
    assert rows["metric"].tolist() == ["precision"] * 3 + ["surprisal"], (method, layer)
    assert rows["k"].tolist()[:3] == [1, 5, 10]
    return [float(value) for value in rows["value"]]


def assert_judged(
    table: pd.DataFrame, expected: Mapping[tuple[str, int], list[float]], *, nats: float = 1e-4
) -> None:
    """The table's numbers are the expected ones, by method and layer, and each method has its own."""
    for (method, layer), numbers in expected.items():
        assert in_table(table, method, layer) == pytest.approx(numbers, abs=nats), (method, layer)
