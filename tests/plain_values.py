"""Value vectors, unembedding and final norm read off the plain models, and where value vectors are many."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from conftest import LAYERS, MASKED, N_LAYERS, RESIDUAL_MULTIPLIER, SITE_MODULES, WIRINGS, plain_vectors
from torch import Tensor

from matlens.data.examples import Examples

D_MLP = {name: 128 if name in ("gpt2", "gptj") else 48 for name in WIRINGS}

D_VOCAB = 60


NORM_BEHIND = ("gemma2", "gemma3", "olmo2")  # whose FFNs write into the stream through a norm


def plain_matrix(name: str, plain: Any, layer: int) -> Tensor:
    """Rows of a layer's output matrix: Conv1D keeps it as it multiplies, Linear transposed."""
    block = plain.get_submodule(LAYERS[name][0])[layer]
    weight = block.get_submodule(SITE_MODULES[name]["ffn_post"][0]).weight.detach()
    return weight if name == "gpt2" else weight.T


def plain_values(name: str, plain: Any, layer: int) -> Tensor:
    """These rows, times the gain of the norm that follows, ``1 + weight`` in Gemma, or Granite's number."""
    rows = plain_matrix(name, plain, layer)
    if name == "granite":
        return RESIDUAL_MULTIPLIER * rows
    if name not in NORM_BEHIND:
        return rows
    return rows * ((name != "olmo2") + plain.model.layers[layer].post_feedforward_layernorm.weight.detach())


def plain_scale(name: str, plain: Any, ffn_out: Tensor) -> float:
    """One over the size of what the norm behind the FFN is given, by its formula; 1 where there is none."""
    if name not in NORM_BEHIND:
        return 1.0
    return float((ffn_out.double().square().mean() + plain.config.rms_norm_eps).rsqrt())


def plain_unit_vectors(name: str, plain: Any) -> np.ndarray:
    """All value vectors at length 1, layer after layer, in float64."""
    vectors = all_plain_values(name, plain).double().numpy()
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def all_plain_values(name: str, plain: Any) -> Tensor:
    return torch.cat([plain_values(name, plain, layer) for layer in range(N_LAYERS)])


def plain_unembedding(plain: Any) -> Tensor:
    return plain.get_output_embeddings().weight.detach()


@torch.inference_mode()
def plain_norm(name: str, plain: Any, vectors: Tensor) -> Tensor:
    path = "cls.predictions.transform.LayerNorm" if name == "bert" else LAYERS[name][1]
    return plain.get_submodule(path)(vectors)


@torch.inference_mode()
def plain_logits(name: str, plain: Any, vector: Tensor) -> Tensor:
    """The model's own final norm and head, in float32."""
    norm = copy.deepcopy(plain.get_submodule(LAYERS[name][1])).float()
    if name in MASKED:  # the module is the whole head
        return norm(vector.float())
    logits = copy.deepcopy(plain.get_output_embeddings()).float()(norm(vector.float()))
    logits /= getattr(plain.config, "logits_scaling", 1)
    cap = getattr(plain.config, "final_logit_softcapping", None)
    return cap * torch.tanh(logits / cap) if cap else logits


def plain_ffn(
    name: str, plain: Any, examples: Examples, layer: int, sentence: int = 0
) -> tuple[Tensor, Tensor]:
    """Coefficients of an FFN and what it adds to the stream, at a sentence's position, read alone.

    Coefficients are times the scale of a norm behind the FFN, by its formula.
    """
    start, end = examples.offsets[sentence : sentence + 2]
    vectors_by_site = plain_vectors(name, plain, torch.from_numpy(examples.tokens[start:end]))
    at = examples.positions[sentence]
    written = vectors_by_site[f"{'ln2_post_out' if name in NORM_BEHIND else 'ffn_out'}.{layer}"][0, at]
    scale = plain_scale(name, plain, vectors_by_site[f"ffn_out.{layer}"][0, at])
    return scale * vectors_by_site[f"ffn_post.{layer}"][0, at], written
