"""Registry of architectures that deviate, one class in `models.families` for each.

Most models need none. Their wiring is found from sums and their readout is checked against their own logits,
so no other module names an architecture.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, NamedTuple, ParamSpec, TypeVar

import torch
from torch import nn

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge

P = ParamSpec("P")
T = TypeVar("T")

_PACKAGE = "matlens.models.families"
_GROUP = "matlens.families"  # entry points of other packages, each a module that registers families


class Repair(NamedTuple):
    """A hook that makes a module of a bridge compute what the module of the model in it does."""

    module: nn.Module
    hook: Callable[..., Any]
    after: bool = False  # a forward hook, instead of a forward pre-hook with keyword arguments


class Family:
    """How an architecture deviates: override methods and decorate the class with `register`.

    A method returns None (or nothing) for models of other architectures.
    """

    def adapters(self) -> Mapping[str, type]:
        """Adapters for TransformerLens by class of the model, used while matlens loads one."""
        return {}

    def read_file(self, path: Path, dtype: torch.dtype) -> tuple[Any, Any] | None:
        """The tokenizer and the model that a single file holds."""

    def repairs(self, model: TransformerBridge) -> Sequence[Repair]:
        """Hooks without which the bridge computes something else than the model in it."""
        return ()

    def beyond_repair(self, model: TransformerBridge) -> str | None:
        """Why a bridge computes something else than the model in it, which no hook can put right."""

    def experts(self, model: TransformerBridge, layer: int) -> Any | None:
        """The experts of a block's FFN, as `matlens.models.families.mixtures.Mixture` describes them."""

    def head(self, model: TransformerBridge) -> list[nn.Module] | None:
        """The modules after the last block; raises InputError where nothing can be read out."""


F = TypeVar("F", bound=type[Family])
_REGISTERED: list[Family] = []


def register(family: F) -> F:
    """Add a family; of two that answer, the one that was registered later counts."""
    _REGISTERED.insert(0, family())
    return family


def families() -> Sequence[Family]:
    """All families: those of matlens, of installed packages and those registered since."""
    _find()
    return _REGISTERED


@cache
def _find() -> None:
    package = importlib.import_module(_PACKAGE)
    for module in pkgutil.walk_packages(package.__path__, f"{_PACKAGE}."):
        importlib.import_module(module.name)
    for point in entry_points(group=_GROUP):
        point.load()


def missing_repairs(model: TransformerBridge) -> list[Repair]:
    """The hooks that families ask for and the model does not have."""
    return [
        needed
        for family in families()
        for needed in family.repairs(model)
        if needed.hook
        not in (*needed.module._forward_pre_hooks.values(), *needed.module._forward_hooks.values())
    ]


def ask(question: Callable[Concatenate[Family, P], T | None], *args: P.args, **kwargs: P.kwargs) -> T | None:
    """The first family's answer, such as ``ask(Family.head, model)``, or None."""
    answers = (getattr(family, question.__name__)(*args, **kwargs) for family in families())
    return next((answer for answer in answers if answer is not None), None)


@contextmanager
def family_adapters() -> Iterator[None]:
    """Let TransformerLens use the families' adapters, and install nothing, inside the context."""
    from unittest.mock import patch

    from transformer_lens.factories import architecture_adapter_factory as factory
    from transformer_lens.model_bridge.sources.transformers import helpers

    ours = {name: adapter for family in reversed(families()) for name, adapter in family.adapters().items()}
    supported, known = factory.SUPPORTED_ARCHITECTURES, factory.ArchitectureAdapterFactory._adapters
    # TransformerLens 4.3 runs "pip install torchvision" for multimodal models, which can replace torch.
    installs = patch.object(helpers, "_ensure_torchvision", lambda: False, create=True)
    with patch.dict(supported, ours), patch.dict(known, ours), installs:
        yield
