"""Value vectors: the rows of the output matrices of FFNs (paper B, section 2).

An FFN computes ``sum_i m_i v_i + b``: coefficients ``m`` times value vectors ``v_i``. ``L3D12`` is vector 12
of layer 3, both counted from 0. They are float32 for any precision of the model.

Where a norm follows the FFN (Gemma 2 and 3), ``m_i v_i`` reaches the residual stream as ``s m_i (g * v_i)``
with the norm's gain ``g`` and one positive scale ``s`` per token; there the value vectors are ``g * v_i``. A
norm of the residual stream (BERT) is not included. A multiplier of the FFN's output (Granite) is.

A mixture of experts has the value vectors of all experts: ``L3E5D120`` is vector 120 of expert 5 in layer 3;
a shared expert is the last. The router's weight is part of the coefficient, which is 0 where the expert is
not selected, so that sub-updates add up here too.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from matlens.errors import InputError, PositiveInt, Seed, check_int, checked, is_int, short
from matlens.models.identity import ModelIdentity, check_raw
from matlens.models.layout import ModelLayout, mixture, output_layer, output_multiplier
from matlens.models.norms import NormGain
from matlens.models.sites import COEFFICIENTS, FFN_OUT, NORMED_OUT
from matlens.models.weights import float32_on, rows_of_linear
from matlens.numerics import without_autocast

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge

_SAMPLED = 2**22  # random numbers that are ranked together


@checked
@dataclass(frozen=True, order=True)
class ValueVector:
    """The name of a value vector: ``ValueVector(3, 12)`` is ``L3D12``, counted from 0.

    In a mixture of experts ``ValueVector(3, 120, 5)`` is ``L3E5D120``, the vector 120 of expert 5.
    """

    layer: int
    index: int
    expert: int | None = None

    def __str__(self) -> str:
        return f"L{self.layer}{'' if self.expert is None else f'E{self.expert}'}D{self.index}"

    @classmethod
    def parse(cls, text: ValueName) -> ValueVector:
        """Read ``"L3D12"``, ``"L3E5D120"``, or a pair of a layer and an index."""
        if isinstance(text, ValueVector):
            return text
        if isinstance(text, str):
            parts = re.fullmatch(r"[Ll](-?[0-9]{1,18})(?:[Ee]([0-9]{1,18}))?[Dd](-?[0-9]{1,18})", text)
            if parts is not None:
                return cls(int(parts[1]), int(parts[3]), None if parts[2] is None else int(parts[2]))
        elif isinstance(text, Sequence) and list(map(is_int, text)) == [True, True]:
            return cls(int(text[0]), int(text[1]))
        raise InputError(
            f"{short(text)} is not a value vector. Write 'L3D12', or 'L3E5D120' in a mixture of experts."
        )


ValueName: TypeAlias = str | Sequence[int] | ValueVector


@dataclass(frozen=True, eq=False)
class ValueParts:
    """The components of value vectors, layer by layer; from a model, or complete vectors from the cache."""

    identity: ModelIdentity
    device: torch.device
    shape: tuple[int, int]  # (d_mlp, d_model)
    output_kind: str
    matrices: Sequence[Tensor | None]  # a row for each coefficient
    biases: Sequence[Tensor | None]
    norms: Sequence[nn.Module] = ()  # after each FFN, before its output joins the residual stream
    mixtures: Sequence[Any] = ()  # the experts of each layer, or None
    multiplier: float = 1.0  # of FFN outputs
    from_cache: bool = False  # complete vectors, with their norms applied

    @classmethod
    def from_model(cls, model: TransformerBridge) -> ValueParts:
        """The parts of a model in memory."""
        check_raw(model)
        layout = ModelLayout.from_model(model)
        layers, shape = range(layout.n_layers), (layout.d_mlp, layout.d_model)
        mixtures = [mixture(model, layer) for layer in layers]
        if COEFFICIENTS not in layout.kinds:
            plain = [str(layer) for layer in layers if mixtures[layer] is None]
            reason = f" (its blocks are {layout.wiring.name})"
            if 0 < len(plain) < layout.n_layers:
                reason = (
                    f": some layers have experts and some a plain FFN (layer {', '.join(plain)}), so their "
                    "numbers of coefficients differ. They can be mapped and replaced all the same"
                )
            raise InputError(f"The FFNs of {model.cfg.architecture} have no known value vectors{reason}.")
        modules = [None if mixtures[layer] else output_layer(model, layer) for layer in layers]
        kind = NORMED_OUT if NORMED_OUT in layout.kinds else FFN_OUT
        norms = [block.ln2_post.original_component for block in model.blocks] if kind == NORMED_OUT else []
        return cls(
            ModelIdentity.from_model(model),
            torch.device(model.cfg.device),
            shape,
            kind,
            [None if module is None else rows_of_linear(module, shape) for module in modules],
            [getattr(module, "bias", None) for module in modules],
            norms,
            mixtures,
            output_multiplier(model),
        )


@checked
class ValueVectors:
    """All value vectors of a model, as they reach its residual stream (paper B, section 2).

    Attributes
    ----------
    n_layers, d_mlp, d_model
        There are ``n_layers x d_mlp`` vectors of ``d_model`` dimensions.
    output_kind
        The site that is added to the residual stream: ``ffn_out``, or ``ln2_post_out`` if a norm follows.
    """

    def __init__(self, model: TransformerBridge | ValueParts) -> None:
        parts = model if isinstance(model, ValueParts) else ValueParts.from_model(model)
        self.n_layers, (self.d_mlp, self.d_model) = len(parts.matrices), parts.shape
        self.device, self.identity = parts.device, parts.identity
        self._matrices, self._biases = parts.matrices, parts.biases
        self._from_cache = parts.from_cache
        self._norms = [float32_on(copy.deepcopy(norm), self.device) for norm in parts.norms]
        self._mixtures, self._multiplier = parts.mixtures or [None] * self.n_layers, parts.multiplier
        self.output_kind = parts.output_kind
        self._gains = [NormGain.from_module(norm, self.d_model) for norm in self._norms]

    def __len__(self) -> int:
        return self.n_layers * self.d_mlp

    def resolve(self, name: ValueName) -> ValueVector:
        """Check a name against this model; negative layers and indices count from the end."""
        value = ValueVector.parse(name)
        layer = self.resolve_layer(value.layer)
        experts = self._mixtures[layer]
        if value.expert is not None:
            if experts is None or experts.column(value.expert, value.index) is None:
                raise InputError(f"There is no value vector {value} in this model: {self._described(layer)}.")
            return ValueVector(layer, value.index, value.expert)
        if not -self.d_mlp <= value.index < self.d_mlp:
            raise InputError(
                f"index must be between {-self.d_mlp} and {self.d_mlp - 1}, got {value.index} in {value}."
            )
        return self.vector(layer, value.index % self.d_mlp)

    def vector(self, layer: int, column: int) -> ValueVector:
        """The value vector of a column of a layer's coefficients."""
        layer = self.resolve_layer(layer)
        column = check_int(column, "column", min=0, max=self.d_mlp - 1)
        experts = self._mixtures[layer]
        if experts is None:
            return ValueVector(layer, column)
        expert, index = experts.name(column)
        return ValueVector(layer, index, expert)

    def column(self, name: ValueName) -> int:
        """The column of a value vector in its layer's coefficients: its index, but for experts."""
        value = self.resolve(name)
        experts = self._mixtures[value.layer]
        if experts is None or value.expert is None:
            return value.index
        return int(experts.column(value.expert, value.index) or 0)

    def _described(self, layer: int) -> str:
        experts = self._mixtures[layer]
        if experts is None:
            return f"its FFNs have no experts, and each layer the value vectors 0 to {self.d_mlp - 1}"
        shared = f", and expert {experts.n_experts} 0 to {experts.shared_width - 1}"
        return (
            f"each of its experts 0 to {experts.n_experts - 1} has the value vectors 0 to {experts.width - 1}"
            f"{shared if experts.shared_width else ''}"
        )

    def resolve_layer(self, layer: int) -> int:
        """Check a layer; negative ones count from the end."""
        if not -self.n_layers <= layer < self.n_layers:
            raise InputError(
                f"layer must be between {-self.n_layers} and {self.n_layers - 1}, got {short(layer)}."
            )
        return int(layer) % self.n_layers

    def at(self, row: int) -> ValueVector:
        """The value vector of a row of all value vectors, layer after layer."""
        check_int(row, "row", min=0, max=len(self) - 1)
        return self.vector(*divmod(row, self.d_mlp))

    def matrix(self, layer: int) -> Float[Tensor, "d_mlp d_model"]:
        """The rows of a layer's output matrix, without a norm's gain or a multiplier."""
        self._check_from_model()
        return self._rows(layer).clone()

    def layer(self, layer: int) -> Float[Tensor, "d_mlp d_model"]:
        """All value vectors of a layer, in float32 on the model's device."""
        return self.layer_view(layer).clone()

    def layer_view(self, layer: int) -> Float[Tensor, "d_mlp d_model"]:
        """`layer` without a copy, to be read only: it can be the model's own weights."""
        return self._reaching(layer, self._rows(layer))

    def bias(self, layer: int) -> Float[Tensor, " d_model"]:
        """The output bias of a layer, independent of the coefficients; zeros if the model has none."""
        bias = self._biases[self.resolve_layer(layer)]
        if bias is None:
            return torch.zeros(self.d_model, dtype=torch.float32, device=self.device)
        return self._reaching(layer, bias.detach().to(self.device, torch.float32, copy=True))

    @torch.no_grad()
    def scale(self, layer: int, outputs: Float[Tensor, "n d_model"]) -> Float[Tensor, " n"]:
        """The factor of a norm after the FFN for all sub-updates of a token; 1 without such a norm.

        ``outputs`` are the vectors of ``ffn_out``, before the norm.
        """
        layer = self.resolve_layer(layer)
        if self.output_kind == FFN_OUT:
            return torch.ones(len(outputs), dtype=torch.float32, device=self.device)
        self._check_from_model()
        outputs = outputs.to(self.device, torch.float32)
        normed, unscaled = self._norms[layer](outputs), self._reaching(layer, outputs)
        size = unscaled.square().sum(1)
        return ((normed * unscaled).sum(1) / size).where(size > 0, torch.ones_like(size))

    @torch.no_grad()
    @without_autocast()
    def check_sums(
        self,
        layer: int,
        coefficients: Float[Tensor, "n d_mlp"],
        ffn_outputs: Float[Tensor, "n d_model"],
        outputs: Float[Tensor, "n d_model"],
    ) -> None:
        """Raise InputError unless the sub-updates of a layer add up to the vectors of `output_kind`.

        ``ffn_outputs`` are the vectors of ``ffn_out``, the same where no norm follows.
        """
        m, ffn_outputs, outputs = (x.to(self.device).float() for x in (coefficients, ffn_outputs, outputs))
        vectors, scale = self.layer_view(layer), self.scale(layer, ffn_outputs)
        error = (scale[:, None] * (m @ vectors + self.bias(layer)) - outputs).norm(dim=1)
        terms = (m.square() @ vectors.square().sum(1)).sqrt()
        # Far above rounding, also of models that use TF32 or autocast.
        tolerance = max(1e-2, 8 * torch.finfo(getattr(torch, str(self.identity.dtype))).eps)
        if bool((error > tolerance * (outputs.norm(dim=1) + scale * terms)).any()):
            raise InputError(
                f"The sub-updates of layer {layer} must add up to the FFN's outputs, got other outputs. They "
                "were collected while the FFN was replaced or its output was hooked: collect them without."
            )

    def _check_from_model(self) -> None:
        if self._from_cache:
            raise InputError(
                "These value vectors are from the cache, without norms. Use ValueVectors(model)."
            )

    def _rows(self, layer: int) -> Float[Tensor, "d_mlp d_model"]:
        layer = self.resolve_layer(layer)
        matrix, experts = self._matrices[layer], self._mixtures[layer]
        rows = matrix if experts is None else experts.matrix()
        assert rows is not None  # there are experts, or a matrix
        return rows.to(self.device, torch.float32)

    def _reaching(self, layer: int, vectors: Tensor) -> Tensor:
        """Terms of an FFN's output as they reach the residual stream, up to the token's scale."""
        if self._gains:
            return self._gains[self.resolve_layer(layer)](vectors)
        return vectors if self._multiplier == 1 else self._multiplier * vectors

    def vectors(self, names: Iterable[ValueName]) -> Float[Tensor, "n d_model"]:
        """Value vectors by name, one row each."""
        values = map(self.resolve, names)
        return torch.stack([self._reaching(value.layer, self._row(value)) for value in values])

    def _row(self, value: ValueVector) -> Float[Tensor, " d_model"]:
        matrix, experts = self._matrices[value.layer], self._mixtures[value.layer]
        if experts is not None:
            return experts.rows(torch.tensor([self.column(value)]))[0].to(self.device, torch.float32)
        return matrix[value.index].to(self.device, torch.float32)  # type: ignore[index]

    def norms(self, layer: int) -> Float[Tensor, " d_mlp"]:
        """Norm of each value vector of a layer."""
        return self.layer_view(layer).norm(dim=1)

    def random(self, layer: int, n: PositiveInt, *, seed: Seed = 0) -> Float[Tensor, "n d_model"]:
        """Normal random vectors with the mean and standard deviation of a layer's in each dimension.

        The baseline of paper B, section 4.1; the same for a seed on any device.
        """
        layer = self.resolve_layer(layer)
        vectors = self.layer_view(layer)
        generator = torch.Generator().manual_seed((seed * self.n_layers + layer) % 2**63)
        noise = torch.randn(n, self.d_model, generator=generator, dtype=torch.float32).to(self.device)
        return vectors.mean(0) + noise * vectors.std(0)

    def random_sub_updates(
        self, n: PositiveInt, k: PositiveInt, *, seed: Seed = 0
    ) -> list[Int[Tensor, "n k"]]:
        """For each layer the columns of ``k`` different sub-updates of each of ``n`` examples."""
        check_int(n, "n", min=1, max=2**31)
        generator = torch.Generator().manual_seed(seed)
        sizes = [len(rows) for rows in torch.arange(n).split(max(_SAMPLED // self.d_mlp, 1))]

        def sample(rows: int) -> Tensor:
            chances = torch.rand((rows, self.d_mlp), generator=generator, dtype=torch.float32)
            return chances.topk(k).indices.to(torch.int32)

        return [torch.cat([sample(rows) for rows in sizes]) for _ in range(self.n_layers)]

    def name_columns(self, rows: Iterable[int]) -> pd.DataFrame:
        """Names of value vectors by their rows (see `at`), with the columns ``value, layer, index``."""
        names = [self.at(row) for row in rows]
        columns = ([*map(str, names)], [name.layer for name in names], [name.index for name in names])
        return pd.DataFrame(dict(zip(("value", "layer", "index"), columns, strict=True)))
