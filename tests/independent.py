"""Reference values of `mat` and `id` (definitions, sections 1-4), computed the plain way and without matlens.

Sentences run one at a time through the Hugging Face model, forward hooks take the representations, LAPACK
solves each least-squares problem from the data itself, scikit-learn scores it. Slow, short, and meant to be
checked by eye: tests compare the library's numbers with these.
"""

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
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
Part = tuple[Sequence[str], Sequence[int]]  # sentences, and the position of each

# Where a model keeps its layers, and the module between h^L and the output embedding.
LAYOUTS = {
    "model.layers": "model.norm",  # Llama, Mistral, Qwen, Gemma
    "transformer.h": "transformer.ln_f",  # GPT-2, GPT-J
    "gpt_neox.layers": "gpt_neox.final_layer_norm",  # Pythia
    "bert.encoder.layer": "cls.predictions.transform",  # BERT: dense, activation, norm
}


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
) -> Tensor:
    """Return h^0..h^L at the given position of each sentence, `[L+1, n, d]` in float64.

    h^0 is the input of layer 0, h^l the output of layer l-1; the final norm has not been applied to h^L.
    """
    layers, _ = layout(model)
    taken: list[Tensor] = []

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        taken.append(args[0] if args else kwargs["hidden_states"])

    def after(_: nn.Module, __: tuple[Any, ...], output: Any) -> None:
        taken.append(output[0] if isinstance(output, tuple) else output)

    handles = [layers[0].register_forward_pre_hook(before, with_kwargs=True)]
    handles += [layer.register_forward_hook(after) for layer in layers]
    rows: list[Tensor] = []
    for sentence, position in tqdm(list(zip(sentences, positions, strict=True)), desc="sentences"):
        taken.clear()
        model.base_model(input_ids=torch.tensor([tokenizer(sentence)["input_ids"]]))  # no logits are wanted
        rows.append(torch.stack([hidden[0, position] for hidden in taken]))
    for handle in handles:
        handle.remove()
    return torch.stack(rows, dim=1).double()


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


def quality_by_hand(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, fitted_on: Part, tested_on: Part, *,
    pairs: Literal["all", "last"] = "all"
) -> dict[str, np.ndarray]:  # fmt: skip
    """Fit every mat_{l->l'} on some sentences and score `mat` and `id` on others, each with its positions.

    ``r2_mat`` and ``r2_id`` are `[L+1, L+1]`, nan where source >= target; with `pairs="last"` only the target
    L is fitted and scored. Precision is `[L+1, 3]` and surprisal `[L+1]`, at l = L of the vectors themselves.
    """
    train, valid = (hidden_states(model, tokenizer, *part) for part in (fitted_on, tested_on))
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
    found = {"r2_mat": r2_mat, "r2_id": r2_id}
    for name, vectors in (("mat", substitutes), ("id", valid)):
        precision, surprisal = prediction_quality(readout, vectors, valid[last])
        found |= {f"precision_{name}": precision, f"surprisal_{name}": surprisal}
    return found


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
