"""Falcon: its newer blocks and its ALiBi, read as transformers reads them.

The joint query, key and value matrix of newer blocks (``falcon-40b``, ``falcon-11B``) has its rows group by
group, each with queries, a key and a value. TransformerLens 4.3 reads all queries, then all keys, then all
values, and knows one arrangement of norms. It also adds ALiBi's distances twice, as transformers' ``eager``
attention does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from transformer_lens.factories.architecture_adapter_factory import ArchitectureAdapterFactory
from transformer_lens.model_bridge.generalized_components import NormalizationBridge
from transformer_lens.model_bridge.supported_architectures.falcon import FalconArchitectureAdapter

from matlens.models.registry import Family, Repair, register
from matlens.models.weights import linear_of

_ARCHITECTURE = "FalconForCausalLM"
_WITH_DISTANCES = "ALiBiJointQKVAttentionBridge"  # the class of TransformerLens


@register
class Falcon(Family):
    """Falcon, with newer or older blocks, with or without ALiBi."""

    def adapters(self) -> Mapping[str, type]:
        """An adapter that reads newer blocks, unless somebody else has registered one."""
        ours = ArchitectureAdapterFactory._adapters[_ARCHITECTURE] is FalconArchitectureAdapter
        return {_ARCHITECTURE: FalconAdapter} if ours else {}

    def repairs(self, model: Any) -> list[Repair]:
        """Distances are counted once."""
        parts: list[Any] = [getattr(block, "attn", None) for block in getattr(model, "blocks", ())]
        return [Repair(part, count_once) for part in parts if type(part).__name__ == _WITH_DISTANCES]

    def beyond_repair(self, model: Any) -> str | None:
        """Newer blocks behind TransformerLens' own adapter."""
        newer = getattr(model.original_model.config, "new_decoder_architecture", False)
        if newer and type(model.adapter) is FalconArchitectureAdapter:
            return "attention takes queries, keys and values from other rows of the joint matrix"
        return None


class FalconAdapter(FalconArchitectureAdapter):
    """TransformerLens' adapter, with attention and norms of newer blocks corrected."""

    def __init__(self, cfg: Any) -> None:
        newer = bool(getattr(cfg, "new_decoder_architecture", False))
        if newer:
            cfg.multi_query = False  # which newer blocks ignore: they have groups instead
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
        query, key, value = map(linear_of, weights, biases)
        return query, key, value


def count_once(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    """Take the distances from attention where the mask holds them: then they have an axis more."""
    alibi = kwargs.get("alibi")
    return (args, {**kwargs, "alibi": None}) if isinstance(alibi, Tensor) and alibi.ndim == 4 else None


def _of_groups(rows: Tensor, groups: int, queries: int) -> tuple[Tensor, ...]:
    """Rows of queries, of keys and of values, from rows that stand group by group."""
    heads = rows.detach().unflatten(0, (groups, queries + 2, -1))
    return tuple(part.flatten(0, 2).clone() for part in heads.split((queries, 1, 1), 1))
