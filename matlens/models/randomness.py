"""Modules whose outputs differ from pass to pass."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

# Rates in attributes and configurations, such as attention_dropout, layerdrop and router_jitter_noise.
_RATE = re.compile("drop|jitter|noise")


def is_random(modules: Iterable[nn.Module]) -> bool:
    """True if a module is in training mode, where dropout or noise makes every pass another."""
    training = [module for module in modules if module.training]
    configs = {id(config): config for module in training if (config := _config_of(module)) is not None}
    return any(map(_is_random, training)) or any(_has_rate(config.to_dict()) for config in configs.values())


def _is_random(module: nn.Module) -> bool:
    if isinstance(module, _DropoutNd):
        return module.p > 0
    # In training mode, the outputs of BatchNorm depend on the other texts of the batch.
    return isinstance(module, nn.RReLU | _BatchNorm) or _has_rate(vars(module))


def _config_of(module: nn.Module) -> Any:
    """The transformers configuration of a module of the model itself; bridges hold it without using rates."""
    config = vars(module).get("config")
    of_bridge = type(module).__module__.startswith("transformer_lens.")
    return config if hasattr(config, "to_dict") and not of_bridge else None


def _has_rate(settings: Mapping[str, Any]) -> bool:
    return any(
        _has_rate(value)
        if isinstance(value, Mapping)
        else isinstance(value, float) and value > 0 and _RATE.search(name) is not None
        for name, value in settings.items()
    )
