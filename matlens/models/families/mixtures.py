"""Mixtures of experts: what their FFNs write for a token, as coefficients of value vectors.

A router chooses some experts for each token, with weights ``w``. An expert writes ``sum_j a_j v_j`` and the
layer ``sum_e sum_j (w_e a_ej) v_ej``: the coefficient of ``v_ej`` is ``w_e a_ej``, and 0 where the expert is
not chosen. An expert that all tokens share is the last; its weight is its gate's, or 1. Layers get a hook
point for these coefficients, which are computed only when it has hooks.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from matlens.models.registry import Family, register
from matlens.models.sites import MIXTURE_HOOK, block_hook
from matlens.numerics import product_eps

_SHARED = ("shared_expert", "shared_experts")  # what the expert that all tokens share is called
_GATE = "shared_expert_gate"
_ATTACHED = "matlens_mixture"


@register
class Mixtures(Family):
    """Models with mixtures of experts whose output is a sum over value vectors."""

    def experts(self, model: Any, layer: int) -> Mixture | None:
        """The experts of a block's FFN, with a hook for their coefficients."""
        from transformer_lens.hook_points import HookPoint

        mlp = getattr(model.blocks[layer], "mlp", None)
        block: Any = getattr(mlp, "original_component", None)
        if not isinstance(block, nn.Module):
            return None
        if not hasattr(block, _ATTACHED):
            mixture = Mixture.from_block(block)
            if mixture is None:
                return None
            point, name = HookPoint(), block_hook(layer, MIXTURE_HOOK)
            setattr(mlp, MIXTURE_HOOK.rpartition(".")[2], point)
            point.name = name
            model._hook_registry[name] = point
            mixture.attach(block, point)
            setattr(block, _ATTACHED, mixture)
        return getattr(block, _ATTACHED)


class Mixture:
    """The experts of one layer, with columns for their value vectors, expert after expert.

    ``n_experts`` routed experts have ``width`` value vectors each, the shared one ``shared_width``.
    """

    def __init__(self, experts: Any, shared: Any, gate: nn.Module | None) -> None:
        self._experts = experts
        self._shared = shared
        self._gate = gate
        self._point: Any = None  # where the coefficients pass
        self._given: dict[str, Tensor] = {}  # routing of the current pass, until they do
        self._transposed = bool(getattr(experts, "is_transposed", False))
        self.n_experts, *matrix = self._experts.down_proj.shape
        self.width = int(matrix[0] if self._transposed else matrix[1])
        self.shared_width = 0 if shared is None else int(_plain(shared.down_proj).weight.shape[1])

    @classmethod
    def from_block(cls, block: nn.Module) -> Mixture | None:
        """The experts of a layer; None without experts, or with output biases or a norm after each."""
        experts = _child(block, "experts")
        down, up = getattr(experts, "down_proj", None), getattr(experts, "gate_up_proj", None)
        for weight in (down, up):
            if not isinstance(weight, Tensor) or weight.ndim != 3 or not weight.is_floating_point():
                return None
        if experts is None or getattr(experts, "has_bias", False) or not hasattr(experts, "_apply_gate"):
            return None
        if getattr(experts, "has_post_expert_norm", False):
            return None
        shared = next(filter(None, (_child(block, name) for name in _SHARED)), None)
        if shared is not None:
            output = _child(shared, "down_proj")
            if not isinstance(output, nn.Linear) or output.bias is not None:
                return None
        return cls(experts, shared, _child(block, _GATE))

    def __len__(self) -> int:
        return self.n_experts * self.width + self.shared_width

    def name(self, column: int) -> tuple[int, int]:
        """The expert of a column, and the index of the value vector in that expert."""
        expert = min(column // self.width, self.n_experts)
        return expert, column - expert * self.width

    def column(self, expert: int, index: int) -> int | None:
        """The column of a value vector of an expert; ``None`` where there is none of that number."""
        width = self.shared_width if expert == self.n_experts else self.width
        exists = 0 <= expert <= self.n_experts and 0 <= index < width
        return expert * self.width + index if exists else None

    def matrix(self) -> Float[Tensor, "columns d_model"]:
        """All value vectors, a row each, in the precision of the model."""
        down = self._experts.down_proj.detach()
        rows = (down if self._transposed else down.transpose(1, 2)).flatten(0, 1)
        return rows if self._shared is None else torch.cat([rows, self._shared_rows()])

    def rows(self, columns: Int[Tensor, " n"]) -> Float[Tensor, "n d_model"]:
        """Some value vectors, in the precision of the model."""
        down = self._experts.down_proj.detach()
        columns = columns.to(down.device)
        expert, place = columns // self.width, columns % self.width
        routed = columns < self.n_experts * self.width
        known = expert.where(routed, torch.zeros_like(expert))
        rows = down[known, place] if self._transposed else down[known, :, place]
        if self._shared is not None and not bool(routed.all()):
            rows[~routed] = self._shared_rows()[columns[~routed] - self.n_experts * self.width]
        return rows

    def attach(self, block: nn.Module, point: nn.Module) -> None:
        """Send the coefficients through a hook point; what its hooks return is what the layer then writes."""
        self._point = point
        self._experts.register_forward_pre_hook(self._keep_routed, with_kwargs=True)
        if self._shared is not None:
            _plain(self._shared.down_proj).register_forward_pre_hook(self._keep_shared)
        if self._gate is not None:
            self._gate.register_forward_hook(self._keep_gate)
        block.register_forward_hook(self._send)

    def coefficients(
        self,
        x: Float[Tensor, "tokens d_model"],
        index: Int[Tensor, "tokens chosen"],
        weights: Float[Tensor, "tokens chosen"],
        shared: Float[Tensor, "tokens shared"] | None = None,
        gate: Float[Tensor, "tokens 1"] | None = None,
    ) -> Float[Tensor, "tokens columns"]:
        """Coefficients of all value vectors, in float32.

        ``x`` is what the experts read, ``index`` and ``weights`` are the router's choice, ``shared`` the
        activations of the shared expert and ``gate`` its gate before the sigmoid.
        """
        m = torch.zeros(len(x), len(self), dtype=torch.float32, device=x.device)
        for expert in index.unique().tolist():
            if expert < self.n_experts:
                token, place = torch.where(index == expert)
                up = self._experts.gate_up_proj[expert]
                gate_up = x[token] @ (up if self._transposed else up.T)
                activations = self._experts._apply_gate(gate_up).float()
                columns = slice(expert * self.width, (expert + 1) * self.width)
                m[token, columns] += activations * weights[token, place, None].float()
        if shared is not None:
            weight = 1.0 if gate is None else gate.flatten(0, -2).sigmoid().float()
            m[:, self.n_experts * self.width :] = shared.flatten(0, -2).float() * weight
        return m

    def adds_up(
        self, m: Float[Tensor, "... columns"], output: Float[Tensor, "... d_model"], multiplier: float
    ) -> bool:
        """Whether the layer's output is its value vectors times these coefficients, but for rounding."""
        coefficients, rows = m.flatten(0, -2).float(), self.matrix().float()
        parts = torch.arange(len(self)).split(self.width)
        each = torch.stack([coefficients[:, part] @ rows[part] for part in parts])
        error = (output.flatten(0, -2).float() - multiplier * each.sum(0)).abs()
        terms = (coefficients.square() @ rows.square()).sqrt()
        slack = 8 * product_eps(output.dtype) * abs(multiplier) * (each.abs().sum(0) + terms)
        overflown = ~(error + slack).isfinite()
        return bool(((error <= slack) | overflown).all())

    def _shared_rows(self) -> Tensor:
        return _plain(self._shared.down_proj).weight.detach().T

    def _keep_routed(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._point.has_hooks():
            x, index, weights = [*args, *kwargs.values()][:3]
            self._given |= {"x": x, "index": index, "weights": weights}

    def _keep_shared(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if self._point.has_hooks():
            self._given["shared"] = args[0]

    def _keep_gate(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        if self._point.has_hooks():
            self._given["gate"] = output

    def _send(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Add what hooks change in the coefficients to the output."""
        given, self._given = self._given, {}
        if "x" not in given or not isinstance(output, Tensor):
            return None
        before = self.coefficients(**given).view(*output.shape[:-1], -1).to(output.dtype)
        change = (self._point(before.clone()) - before).float()
        columns = change.flatten(0, -2).any(0).nonzero()[:, 0]
        if not len(columns):
            return None
        return output + (change[..., columns] @ self.rows(columns).float()).to(output.dtype)


def _child(module: Any, name: str) -> nn.Module | None:
    child = getattr(module, name, None)
    return _plain(child) if isinstance(child, nn.Module) else None


def _plain(module: Any) -> Any:
    """A module of the original model, unwrapped from TransformerLens."""
    while isinstance(getattr(module, "original_component", None), nn.Module):
        module = module.original_component
    return module
