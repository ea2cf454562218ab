"""WikiLM (Baevski and Auli 2019): fairseq's decoder with adaptive input and adaptive softmax.

Its blocks are those of XGLM, another model of fairseq. Words are in bands by frequency: the embeddings of
band ``i`` are ``factor ** i`` times narrower, and projected. As an output (Grave et al. 2017) the first band
competes with one class per other band: ``log p(w) = log p(band of w) + log p(w | band)``. Modules have
fairseq's names.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformer_lens.model_bridge.supported_architectures.xglm import XGLMArchitectureAdapter
from transformers import XGLMConfig, XGLMForCausalLM
from transformers.models.xglm.modeling_xglm import (
    XGLMDecoderLayer,
    XGLMModel,
    XGLMPreTrainedModel,
    XGLMSinusoidalPositionalEmbedding,
)

from matlens.errors import InputError, short
from matlens.models.weights import linear_of
from matlens.numerics import log_softmax

ARCHITECTURE, MODEL_TYPE = "WikiLMForCausalLM", "wikilm"


class WikiLMConfig(XGLMConfig):
    """Configuration of a WikiLM; by default that of WikiText-103.

    Attributes
    ----------
    cutoffs, adaptive_factor
        Where bands of words end, and how many times narrower each is than the one before.
    final_norm
        Whether a norm follows the last block; not in the one of WikiText-103.
    """

    model_type = MODEL_TYPE

    vocab_size: int = 267_744
    num_layers: int = 16
    attention_heads: int = 8
    max_position_embeddings: int = 512
    activation_function: str = "relu"
    dropout: float | int = 0.0
    attention_dropout: float | int = 0.0
    bos_token_id: int | None = 2
    cutoffs: Sequence[int] = (20_000, 60_000)
    adaptive_factor: float | int = 4.0
    final_norm: bool = False

    def __post_init__(self, **kwargs: Any) -> None:
        self.cutoffs = list(self.cutoffs)
        increasing = all(end < later for end, later in pairwise([0, *self.cutoffs, self.vocab_size + 1]))
        if not self.cutoffs or not increasing:
            raise InputError(
                f"cutoffs must increase from above 0 to at most vocab_size ({self.vocab_size}), got "
                f"{short(self.cutoffs)}."
            )
        super().__post_init__(**{"architectures": [ARCHITECTURE], **kwargs})

    @property
    def bands(self) -> list[tuple[int, int, int]]:
        """First word, end and width of each band; the last ends with the vocabulary."""
        ends = pairwise(sorted({0, *self.cutoffs, self.vocab_size}))
        return [(*span, int(self.d_model // self.adaptive_factor**i)) for i, span in enumerate(ends)]


class AdaptiveInput(nn.Module):
    """An embedding of words in bands, each projected to ``d_model``."""

    def __init__(self, config: WikiLMConfig) -> None:
        super().__init__()
        self.bands, self.scale = config.bands, config.d_model**0.5 if config.scale_embedding else 1.0
        words, projections = _words(config), _projections(config, config.bands)
        self.embeddings = nn.ModuleList(
            nn.Sequential(nn.Embedding.from_pretrained(rows, freeze=False), linear_of(matrix))
            for rows, matrix in zip(words, projections, strict=True)
        )

    @property
    def weight(self) -> Float[Tensor, "d_vocab d_model"]:
        """The vectors of all words, projected."""
        return torch.cat([rows.weight @ matrix.weight.T for rows, matrix in list[Any](self.embeddings)])

    def forward(self, tokens: Int[Tensor, "*n"]) -> Float[Tensor, "*n d_model"]:
        """The vectors of some words."""
        parts: Any = self.embeddings
        flat = tokens.flatten()
        vectors = parts[0][1].weight.new_zeros(len(flat), parts[0][1].out_features)
        for (start, end, _), band in zip(self.bands, parts, strict=True):
            here = (start <= flat) & (flat < end)
            vectors[here] = band(flat[here] - start)
        return vectors.view(*tokens.shape, -1) * self.scale


class AdaptiveSoftmax(nn.Module):
    """Log-probabilities of words in bands, which serve as logits: a softmax leaves them as they are.

    Unlike in `torch.nn.AdaptiveLogSoftmaxWithLoss`, embeddings and projections are those of the input.
    """

    def __init__(self, config: WikiLMConfig) -> None:
        super().__init__()
        (first, *words), projections = _words(config), _projections(config, config.bands[1:])
        classes = torch.randn(len(words), config.d_model) * config.d_model**-0.5
        self.head = nn.ModuleDict({"word_proj": linear_of(first), "class_proj": linear_of(classes)})
        self.tail = nn.ModuleList(
            nn.Sequential(_Projection(matrix), nn.Identity(), linear_of(rows))
            for rows, matrix in zip(words, projections, strict=True)
        )

    @property
    def weight(self) -> Float[Tensor, "d_vocab d_model"]:
        """``E``, with projections and without the bands' classes: it compares words of one band only."""
        head, tail = dict[str, Any](self.head.items()), list[Any](self.tail)
        return torch.cat([head["word_proj"].weight, *(band[2].weight @ band[0].weight.T for band in tail)])

    def forward(self, features: Float[Tensor, "*n d_model"]) -> Float[Tensor, "*n d_vocab"]:
        """Natural logarithms of the probabilities of all words."""
        scores = torch.cat([layer(features) for layer in self.head.values()], -1)
        first, classes = log_softmax(scores).tensor_split([scores.shape[-1] - len(self.tail)], -1)
        bands = [log_softmax(band(features)) + classes[..., i, None] for i, band in enumerate(self.tail)]
        return torch.cat([first, *bands], -1)


class _Projection(nn.Module):
    """The projection of an input's band, applied backwards."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, features: Tensor) -> Tensor:
        return features @ self.weight


def _words(config: WikiLMConfig) -> list[Tensor]:
    """Embeddings with norms of about 1 for any width."""
    return [torch.randn(end - start, width) * width**-0.5 for start, end, width in config.bands]


def _projections(config: WikiLMConfig, bands: Sequence[tuple[int, int, int]]) -> list[Tensor]:
    return [nn.init.xavier_uniform_(torch.empty(config.d_model, width)) for *_, width in bands]


class WikiLMModel(XGLMModel):
    """XGLM with adaptive input, its norm after the last block optional. Padding may be on either side."""

    def __init__(self, config: WikiLMConfig) -> None:
        XGLMPreTrainedModel.__init__(self, config)
        self.dropout, self.layerdrop, self.gradient_checkpointing = config.dropout, 0.0, False
        self.embed_tokens: Any = AdaptiveInput(config)
        self.embed_positions = XGLMSinusoidalPositionalEmbedding(
            config.max_position_embeddings, config.d_model, config.pad_token_id
        )
        self.layers = nn.ModuleList(XGLMDecoderLayer(config, layer_idx=i) for i in range(config.num_layers))
        self.layer_norm: Any = nn.LayerNorm(config.d_model) if config.final_norm else nn.Identity()

    def _init_weights(self, module: nn.Module) -> None:
        """Compute positions, which no checkpoint holds; the rest is initialized where it is made."""
        if isinstance(module, XGLMSinusoidalPositionalEmbedding):
            XGLMPreTrainedModel._init_weights(self, module)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        **options: Any,
    ) -> Any:
        """The residual stream after the last block and its norm, if any."""
        if position_ids is None and attention_mask is not None:
            position_ids = (attention_mask.cumsum(1) - 1).clamp(min=0)[:, -input_ids.shape[1] :]
        return super().forward(input_ids, attention_mask, position_ids, **options)


class WikiLMForCausalLM(XGLMForCausalLM):
    """The model, whose logits are log-probabilities."""

    config_class = WikiLMConfig

    def __init__(self, config: WikiLMConfig) -> None:
        XGLMPreTrainedModel.__init__(self, config)
        self.model, self.lm_head = WikiLMModel(config), AdaptiveSoftmax(config)
        for layer in self.model.layers:
            attention = layer.self_attn
            projections = attention.q_proj, attention.k_proj, attention.v_proj, attention.out_proj
            for linear in (*projections, layer.fc1, layer.fc2):
                nn.init.xavier_uniform_(linear.weight)
                nn.init.zeros_(linear.bias)
        # The output takes the embeddings of the input, and their projections.
        tied = {"head.word_proj": "0.0"}
        for i in range(1, len(config.bands)):
            tied |= {f"tail.{i - 1}.2": f"{i}.0", f"tail.{i - 1}.0": f"{i}.1"}
        self._tied_weights_keys = {
            f"lm_head.{output}.weight": f"model.embed_tokens.embeddings.{given}.weight"
            for output, given in tied.items()
        }
        self.post_init()

    _init_weights = WikiLMModel._init_weights


class WikiLMAdapter(XGLMArchitectureAdapter):
    """TransformerLens' adapter of XGLM, without the final norm where there is none."""

    def prepare_model(self, hf_model: Any) -> None:
        """Leave out the norm after the last block, if there is none."""
        if not hf_model.config.final_norm:
            assert self.component_mapping is not None
            del self.component_mapping["ln_final"]
