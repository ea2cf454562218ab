"""WikiLM for transformers: adaptive input and output, sinusoidal positions, ReLU."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import DynamicCache, GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from matlens.errors import check_choice
from matlens.models.families.wikilm.adaptive import AdaptiveInput, AdaptiveSoftmax

ARCHITECTURE, MODEL_TYPE = "WikiLMForCausalLM", "wikilm"
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"relu": nn.functional.relu, "gelu": nn.functional.gelu}
_SLOWEST = 10_000.0  # the longest wave of the positions, in multiples of the shortest


class WikiLMConfig(PreTrainedConfig):
    """Configuration of a WikiLM; by default that of WikiText-103.

    Attributes
    ----------
    cutoffs, adaptive_factor
        Where bands of words end, and how many times narrower each is than the one before.
    tie_word_embeddings, tie_projections
        Whether the output takes the embeddings of the input, and their projections.
    final_norm
        Whether a norm follows the last block; not in the one of WikiText-103.
    """

    model_type = MODEL_TYPE

    vocab_size: int = 267_744
    hidden_size: int = 1024
    num_hidden_layers: int = 16
    num_attention_heads: int = 8
    intermediate_size: int = 4096
    max_position_embeddings: int = 512
    cutoffs: Sequence[int] = (20_000, 60_000)
    adaptive_factor: float = 4.0
    tie_word_embeddings: bool = True
    tie_projections: bool = True
    final_norm: bool = False
    scale_embedding: bool = True
    hidden_act: str = "relu"
    dropout: float = 0.0
    layer_norm_eps: float = 1e-5
    use_cache: bool = True
    bos_token_id: int | None = 2
    eos_token_id: int | None = 2
    pad_token_id: int | None = 1

    def __post_init__(self, **kwargs: Any) -> None:
        check_choice(self.hidden_act, ACTIVATIONS, "hidden_act")
        self.cutoffs = list(self.cutoffs)
        if "architectures" not in kwargs and not getattr(self, "architectures", None):
            self.architectures = [ARCHITECTURE]
        super().__post_init__(**kwargs)


class SinusoidalPositions(nn.Module):
    """Sines, then cosines, of waves of 1 to 10,000 times ``2 pi`` tokens, from ``padding + 1`` on."""

    def __init__(self, width: int, padding: int) -> None:
        super().__init__()
        self.width, self.padding = width, padding

    def forward(self, positions: Int[Tensor, "batch length"]) -> Float[Tensor, "batch length d_model"]:
        """The vectors of some positions, in float32."""
        half = self.width // 2
        steps = torch.arange(half, dtype=torch.float32, device=positions.device)
        rates = torch.exp(steps * -(math.log(_SLOWEST) / (half - 1)))
        angles = positions[..., None].float() * rates
        vectors = torch.cat([angles.sin(), angles.cos()], -1)
        vectors = nn.functional.pad(vectors, (0, self.width - 2 * half))
        return vectors * (positions != self.padding)[..., None]


class WikiLMAttention(nn.Module):
    """Attention of several heads to what stands before."""

    def __init__(self, config: WikiLMConfig, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx, self.n_heads = layer_idx, config.num_attention_heads
        d = config.hidden_size
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(d, d) for _ in range(4))

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        **_: Any,
    ) -> tuple[Tensor, Tensor]:
        """Attention output and pattern, ``[batch, head, to, from]``."""
        batch, length, d = hidden_states.shape
        queries, keys, values = (
            projected(hidden_states).view(batch, length, self.n_heads, -1).transpose(1, 2)
            for projected in (self.q_proj, self.k_proj, self.v_proj)
        )
        if past_key_values is not None:
            keys, values = past_key_values.update(keys, values, self.layer_idx)
        scores = (queries * (d // self.n_heads) ** -0.5) @ keys.transpose(2, 3)
        if attention_mask is None:
            attention_mask = _causal(length, keys.shape[2], scores)
        pattern = (scores + attention_mask).softmax(-1)
        mixed = (pattern @ values).transpose(1, 2).reshape(batch, length, d)
        return self.out_proj(mixed), pattern


class WikiLMFeedForward(nn.Module):
    """``W_2 relu(W_1 x + b_1) + b_2``."""

    def __init__(self, config: WikiLMConfig) -> None:
        super().__init__()
        self.fc1 = nn.Linear(config.hidden_size, config.intermediate_size)
        self.fc2 = nn.Linear(config.intermediate_size, config.hidden_size)
        self.activation = config.hidden_act

    def forward(self, hidden_states: Tensor) -> Tensor:
        """The FFN output."""
        return self.fc2(ACTIVATIONS[self.activation](self.fc1(hidden_states)))


class WikiLMBlock(nn.Module):
    """Pre-norm attention and FFN with residual connections."""

    def __init__(self, config: WikiLMConfig, layer_idx: int) -> None:
        super().__init__()
        self.self_attn_layer_norm, self.final_layer_norm = (
            nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps) for _ in range(2)
        )
        self.self_attn = WikiLMAttention(config, layer_idx)
        self.mlp = WikiLMFeedForward(config)
        self.dropout = config.dropout

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, past_key_values: Any = None
    ) -> Tensor:
        """The residual stream after the block."""
        written, _ = self.self_attn(
            self.self_attn_layer_norm(hidden_states),
            attention_mask=attention_mask,
            past_key_values=past_key_values,
        )
        hidden_states = hidden_states + self._dropped(written)
        return hidden_states + self._dropped(self.mlp(self.final_layer_norm(hidden_states)))

    def _dropped(self, written: Tensor) -> Tensor:
        return nn.functional.dropout(written, self.dropout, self.training)


class WikiLMForCausalLM(PreTrainedModel, GenerationMixin):
    """The model, whose logits are log-probabilities. Padding may be on either side."""

    config_class = WikiLMConfig
    base_model_prefix = ""

    def __init__(self, config: WikiLMConfig) -> None:
        super().__init__(config)
        sizes = (config.hidden_size, config.vocab_size, list(config.cutoffs), config.adaptive_factor)
        self.embed_tokens = AdaptiveInput(*sizes)
        self.embed_positions = SinusoidalPositions(config.hidden_size, _padding(config))
        self.layers = nn.ModuleList(WikiLMBlock(config, i) for i in range(config.num_hidden_layers))
        if config.final_norm:
            self.layer_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.lm_head = AdaptiveSoftmax(*sizes)
        self._tied_weights_keys = {}
        if config.tie_word_embeddings:
            self.lm_head.tie(self.embed_tokens, projections=config.tie_projections)
            self._tied_weights_keys = _tied(self.lm_head, config.tie_projections)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        """The embeddings of words."""
        return self.embed_tokens

    def get_output_embeddings(self) -> nn.Module:
        """The readout of log-probabilities."""
        return self.lm_head

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Xavier initialization of matrices; adaptive parts initialize themselves."""
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
            nn.init.zeros_(module.bias)
        elif isinstance(module, nn.LayerNorm):
            nn.init.ones_(module.weight)
            nn.init.zeros_(module.bias)

    def features(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, past_key_values: Any = None
    ) -> Float[Tensor, "batch length d_model"]:
        """Input of the adaptive softmax: the residual stream after the last block and its norm, if any."""
        past = 0 if past_key_values is None else past_key_values.get_seq_length()
        length = input_ids.shape[1]
        present = input_ids.new_ones(len(input_ids), past + length)
        if attention_mask is not None:
            present = attention_mask.to(present.dtype)
        positions = present.cumsum(1) * present + self.embed_positions.padding
        vectors = self.embed_tokens(input_ids)
        if self.config.scale_embedding:
            vectors = vectors * math.sqrt(self.config.hidden_size)
        hidden_states = vectors + self.embed_positions(positions[:, past:]).to(vectors.dtype)
        hidden_states = nn.functional.dropout(hidden_states, self.config.dropout, self.training)
        mask = _causal(length, past + length, hidden_states)
        if attention_mask is not None:
            hidden = torch.finfo(mask.dtype).min * (1 - present.to(mask.dtype))
            mask = torch.minimum(mask, hidden[:, None, None, :])
        for layer in self.layers:
            hidden_states = layer(hidden_states, attention_mask=mask, past_key_values=past_key_values)
        return self.layer_norm(hidden_states) if self.config.final_norm else hidden_states

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool | None = None,
        logits_to_keep: int = 0,
        **_: Any,
    ) -> CausalLMOutputWithPast:
        """Log-probabilities of the next word after each token, or after the last ``logits_to_keep``.

        The mask is of all tokens, those in the cache included.
        """
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        features = self.features(input_ids, attention_mask, past_key_values)
        logits = self.lm_head(features[:, -logits_to_keep:] if logits_to_keep else features)
        return CausalLMOutputWithPast(logits=logits, past_key_values=past_key_values)


def _padding(config: WikiLMConfig) -> int:
    return config.pad_token_id if config.pad_token_id is not None else 0


def _causal(length: int, total: int, like: Tensor) -> Tensor:
    """Causal mask that is added to scores, ``[1, 1, length, total]``."""
    lowest = torch.finfo(like.dtype).min
    mask = torch.full((length, total), lowest, dtype=like.dtype, device=like.device)
    return mask.triu(total - length + 1)[None, None]


def _tied(head: AdaptiveSoftmax, projections: bool) -> dict[str, str]:
    """Names of the parameters of the output that are those of the input, as transformers wants them."""
    names = {rf"lm_head\.words\.{i}$": rf"embed_tokens\.words\.{i}$" for i in range(len(head.words))}
    if projections:
        for i in range(len(head.projections)):
            names[rf"lm_head\.projections\.{i}$"] = rf"embed_tokens\.projections\.{i + 1}$"
    return names
