"""WikiLM (Baevski and Auli 2019) as a family: its checkpoints, and its adapter for TransformerLens."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformer_lens.model_bridge.architecture_adapter import ArchitectureAdapter
from transformer_lens.model_bridge.generalized_components import (
    AttentionBridge,
    BlockBridge,
    EmbeddingBridge,
    LinearBridge,
    MLPBridge,
    NormalizationBridge,
    UnembeddingBridge,
)
from transformers import AutoConfig, AutoModelForCausalLM

from matlens.models.families.wikilm.checkpoint import read_wikilm
from matlens.models.families.wikilm.modelling import ARCHITECTURE, MODEL_TYPE, WikiLMConfig, WikiLMForCausalLM
from matlens.models.places import CHECKPOINT
from matlens.models.registry import Family, register


@register
class WikiLM(Family):
    """fairseq's WikiLM, from its checkpoint or from a folder of `save_pretrained`."""

    def __init__(self) -> None:
        AutoConfig.register(MODEL_TYPE, WikiLMConfig, exist_ok=True)
        AutoModelForCausalLM.register(WikiLMConfig, WikiLMForCausalLM, exist_ok=True)

    def adapters(self) -> Mapping[str, type]:
        """Which module of a WikiLM is which part of a bridge."""
        return {ARCHITECTURE: WikiLMAdapter}

    def read_file(self, path: Path, dtype: torch.dtype) -> tuple[Any, Any] | None:
        """The tokenizer and the model of a checkpoint with its dictionary next to it."""
        if path.suffix.lower() != CHECKPOINT:
            return None
        model, dictionary = read_wikilm(path)
        torch.nn.Module.to(model, dtype=dtype)  # that of transformers has no type
        return dictionary.tokenizer(longest=model.config.max_position_embeddings), model


class WikiLMAdapter(ArchitectureAdapter):
    """Maps the modules of a WikiLM to the parts of a bridge."""

    def __init__(self, cfg: Any) -> None:
        super().__init__(cfg)
        self.cfg.normalization_type = "LN"
        self.cfg.positional_embedding_type = "standard"
        self.cfg.final_rms = False
        self.cfg.gated_mlp = False
        self.cfg.attn_only = False
        self.component_mapping = {
            "embed": EmbeddingBridge(name="embed_tokens"),
            "blocks": BlockBridge(
                name="layers",
                submodules={
                    "ln1": self._norm("self_attn_layer_norm"),
                    "attn": AttentionBridge(
                        name="self_attn",
                        config=self.cfg,
                        submodules={
                            part: LinearBridge(name=f"{name}_proj")
                            for part, name in (("q", "q"), ("k", "k"), ("v", "v"), ("o", "out"))
                        },
                    ),
                    "ln2": self._norm("final_layer_norm"),
                    "mlp": MLPBridge(
                        name="mlp",
                        config=self.cfg,
                        submodules={"in": LinearBridge(name="fc1"), "out": LinearBridge(name="fc2")},
                    ),
                },
            ),
            "unembed": UnembeddingBridge(name="lm_head"),
        }

    def prepare_model(self, hf_model: Any) -> None:
        """Set the norm after the last block, if there is one."""
        if hf_model.config.final_norm:
            assert self.component_mapping is not None
            self.component_mapping["ln_final"] = self._norm("layer_norm")

    def _norm(self, name: str) -> NormalizationBridge:
        return NormalizationBridge(name=name, config=self.cfg, use_native_layernorm_autograd=True)
