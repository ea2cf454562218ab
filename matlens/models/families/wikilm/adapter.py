"""What TransformerLens has to be told of WikiLM, which it does not know."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformer_lens.factories import architecture_adapter_factory
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


class WikiLMAdapter(ArchitectureAdapter):
    """Which module of a WikiLM is which part of a bridge: all of them are run as they are."""

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
        """Say where the norm behind the last block is, where there is one."""
        if hf_model.config.final_norm:
            assert self.component_mapping is not None
            self.component_mapping["ln_final"] = self._norm("layer_norm")

    def _norm(self, name: str) -> NormalizationBridge:
        return NormalizationBridge(name=name, config=self.cfg, use_native_layernorm_autograd=True)


def register_wikilm() -> None:
    """Let TransformerLens and transformers know WikiLM; a second time changes nothing.

    After it ``AutoModelForCausalLM.from_pretrained`` and ``TransformerBridge.boot_transformers`` read the
    folder that a WikiLM's ``save_pretrained`` and its tokenizer's have written.
    """
    architecture_adapter_factory.SUPPORTED_ARCHITECTURES[ARCHITECTURE] = WikiLMAdapter
    architecture_adapter_factory.ArchitectureAdapterFactory.register_adapter(ARCHITECTURE, WikiLMAdapter)
    AutoConfig.register(MODEL_TYPE, WikiLMConfig, exist_ok=True)
    AutoModelForCausalLM.register(WikiLMConfig, WikiLMForCausalLM, exist_ok=True)


def load_wikilm(path: Path, dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """The tokenizer and the model of a fairseq checkpoint, which TransformerLens knows from then on."""
    register_wikilm()
    model, dictionary = read_wikilm(path)
    torch.nn.Module.to(model, dtype=dtype)  # that of transformers has no type
    return dictionary.tokenizer(longest=model.config.max_position_embeddings), model
