"""Falcon's newer blocks (``falcon-40b``, ``falcon-11B``, ``falcon-180B``), read as transformers reads them.

The rows of their matrix of queries, keys and values stand group by group: the queries of a group, its key,
its value. TransformerLens takes them for all queries, then all keys, then all values; so it fails, or where
the number of rows happens to be the same computes another model. And of their norms it knows one arrangement.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from transformer_lens.factories.architecture_adapter_factory import ArchitectureAdapterFactory
from transformer_lens.model_bridge.generalized_components import NormalizationBridge
from transformer_lens.model_bridge.supported_architectures.falcon import FalconArchitectureAdapter

_ARCHITECTURE = "FalconForCausalLM"


class FalconAdapter(FalconArchitectureAdapter):
    """TransformerLens' adapter; of newer blocks the parts of attention and the norms are put right."""

    def __init__(self, cfg: Any) -> None:
        newer = bool(getattr(cfg, "new_decoder_architecture", False))
        if newer:
            cfg.multi_query = False  # which newer blocks pass over: they have groups instead
        super().__init__(cfg)
        if newer:
            two = getattr(cfg, "num_ln_in_parallel_attn", None) != 1
            norms = {"ln1": "ln_attn", "ln2": "ln_mlp"} if two else {"ln1": "input_layernorm"}
            assert self.component_mapping is not None
            self.component_mapping["blocks"].submodules |= {
                part: NormalizationBridge(name=name, config=self.cfg) for part, name in norms.items()
            }

    def _split_falcon_qkv(self, original_attention_component: Any) -> tuple[nn.Linear, nn.Linear, nn.Linear]:
        if not self._is_new_arch:
            return super()._split_falcon_qkv(original_attention_component)
        joint = original_attention_component.query_key_value
        groups = self.cfg.n_key_value_heads or self.cfg.n_heads
        queries = self.cfg.n_heads // groups
        weights: Any = _of_groups(joint.weight, groups, queries)
        biases: Any = 3 * [None] if joint.bias is None else _of_groups(joint.bias, groups, queries)
        query, key, value = map(_linear, weights, biases)
        return query, key, value


@contextmanager
def newer_falcons() -> Iterator[None]:
    """Let TransformerLens read Falcon's newer blocks as they are, for as long as it boots a model here."""
    before = ArchitectureAdapterFactory._adapters[_ARCHITECTURE]
    if before is not FalconArchitectureAdapter:  # somebody else's, or there already
        yield
        return
    ArchitectureAdapterFactory.register_adapter(_ARCHITECTURE, FalconAdapter)
    try:
        yield
    finally:
        ArchitectureAdapterFactory.register_adapter(_ARCHITECTURE, before)


def _of_groups(rows: Tensor, groups: int, queries: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of queries, of keys and of values, out of rows that stand group by group."""
    heads = rows.detach().unflatten(0, (groups, queries + 2, -1))
    of_queries, of_keys, of_values = heads.split((queries, 1, 1), 1)
    return of_queries.flatten(0, 2).clone(), of_keys.flatten(0, 2).clone(), of_values.flatten(0, 2).clone()


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    linear.weight = nn.Parameter(weight)
    if bias is not None:
        linear.bias = nn.Parameter(bias)
    return linear
