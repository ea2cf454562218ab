"""The readout ``delta``: from approximations of ``h^L`` to distributions over tokens."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.utils import parametrize

from matlens.errors import InputError, check_int, checked
from matlens.models.hooks import reading
from matlens.models.identity import ModelIdentity, Provenance, check_raw
from matlens.models.inputs import ENCODER, probe_inputs, stack_of
from matlens.models.layout import ModelLayout
from matlens.models.registry import Family, ask
from matlens.models.tokens import token_texts
from matlens.models.weights import float32_on
from matlens.numerics import (
    all_finite,
    check_finite,
    has_float64,
    log_softmax,
    product_eps,
    without_autocast,
)

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge

# Settings of a configuration that change logits after the unembedding.
_OF_LOGITS = re.compile(r"^(?!.*att).*(logit|lm_head|^output_|^softcap)")
_FACTOR, _CAP = re.compile(r"scal|multiplier"), re.compile(r"cap")
_TOGETHER = 1 << 24  # logits in memory at once
_AT_ONCE = 4096  # logits that are computed in float64 at once


@checked
class Readout:
    """Everything after the last block of a model: norm, unembedding, scaling; in float32.

    For decoders the final norm and the unembedding; for masked-LM models the whole head. Logit scaling and
    soft capping are part of it (paper A, Eq. 2; BERT: section 4.2). In a vision transformer, classes take the
    place of tokens. Raises InputError if ``h^L`` read out this way does not give the model's own logits;
    every method does for vectors that are not finite.
    """

    def __init__(self, model: TransformerBridge) -> None:
        check_raw(model)
        modules = head_modules(model)
        self.identity = ModelIdentity.from_model(model)
        self.tokenizer = model.tokenizer
        self.d_model = int(model.cfg.d_model)
        # Of a model on several devices, all of its head is brought to where the unembedding is.
        self.device = next(modules[-1].parameters()).device
        self._head: Any = nn.Sequential(*(float32_on(module, self.device) for module in modules))
        self._scale: float = 1.0
        self._cap: float | None = None  # found from the model's own logits
        self._agrees_with(model)

    def __repr__(self) -> str:
        return f"Readout({self.identity.name!r}, {self.d_model} -> {self.d_vocab})"

    def check_same(self, other: Provenance | ModelIdentity, *, theirs: str = "the activations") -> None:
        """Raise InputError for vectors of another model; vectors of unknown origin pass."""
        if isinstance(other, ModelIdentity) or other.model is not None:
            Provenance(self.identity).check_same(other, ours="the readout", theirs=theirs)

    @property
    def multiplications(self) -> int:
        """Multiplications for one vector: the parameters of all matrices."""
        return sum(weight.numel() for weight in self._head.parameters() if weight.ndim == 2)

    @without_autocast()
    def logits(
        self,
        h: Float[Tensor, "... d_model"],
        *,
        tokens: Int[Tensor, " k"] | None = None,
        gradients: bool = False,
    ) -> Float[Tensor, "... k"]:
        """Scores of all tokens or of some, in float32; differentiable with ``gradients``."""
        check_vectors(h, self.d_model)
        if tokens is not None:
            self._check_tokens(tokens)
        *modules, unembedding = self._head
        with nullcontext() if gradients else torch.no_grad():
            features = h.to(self.device, torch.float32)
            for module in modules:
                features = _with_constants(module, features)
            if tokens is None or not isinstance(unembedding, nn.Linear):  # a score may depend on other tokens
                scores = self._scaled(_with_constants(unembedding, features))
                return scores if tokens is None else scores[..., tokens]
            bias = None if unembedding.bias is None else unembedding.bias.detach()[tokens]
            return self._scaled(nn.functional.linear(features, unembedding.weight.detach()[tokens], bias))

    def _scaled(self, logits: Tensor) -> Tensor:
        if self._scale != 1:
            logits = logits * self._scale
        return torch.tanh(logits / self._cap) * self._cap if self._cap else logits

    def _check_tokens(self, tokens: Tensor) -> None:
        if len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < self.d_vocab:
            raise InputError(f"tokens must be between 0 and {self.d_vocab - 1}.")

    def top_ids(self, h: Float[Tensor, "n d_model"]) -> Int[Tensor, " n"]:
        """The token with the highest logit for each vector, the first of equals.

        The same for all batches and numbers of threads: close logits are computed in float64.
        """
        return self._tops(h, None)[0]

    def top_ids_and_ranks(
        self, h: Float[Tensor, "n d_model"], ids: Int[Tensor, " n"]
    ) -> tuple[Int[Tensor, " n"], Int[Tensor, " n"]]:
        """The top token of each vector, and the rank of a given token (1 is the best)."""
        if ids.shape != h.shape[:1]:
            raise InputError(f"ids must be a token for each of the {len(h)} vectors, got {len(ids)}.")
        self._check_tokens(ids)
        tops, above = self._tops(h, ids.to(self.device, torch.int64))
        return tops, above + 1

    @torch.no_grad()
    @without_autocast()
    def _tops(self, h: Tensor, ids: Tensor | None) -> Any:
        """The best tokens, and how many are above given ones; a few vectors at a time."""
        check_vectors(h, self.d_model)
        *modules, unembedding = self._head
        # A cap grows with the logit and a factor is greater than 0, so neither changes which token is above.
        exact = is_plain_linear(unembedding) and self._scale > 0
        n_parts = max(-(-len(h) // max(_TOGETHER // self.d_vocab, 1)), 1)  # of one size, none of a few rows
        parts, results = h.tensor_split(n_parts), list[Any]()
        given = [None] * n_parts if ids is None else ids.tensor_split(n_parts)
        for part, tokens in zip(parts, given, strict=True):
            features = part.to(self.device, torch.float32)
            for module in modules:
                features = module(features)
            if exact:
                results.append(top_and_rank(unembedding, features, tokens))
            else:
                results.append(_largest(self.logits(part), tokens))
        tops, ranks = zip(*results, strict=True)
        return torch.cat(tops), None if ids is None else torch.cat(ranks)

    def log_probs(self, h: Float[Tensor, "... d_model"]) -> Float[Tensor, "... d_vocab"]:
        """Natural logarithms of ``delta(h)``."""
        return log_softmax(self.logits(h))

    def top_tokens(self, h: Float[Tensor, " d_model"], k: int = 5) -> list[tuple[str, float]]:
        """The ``k`` most probable tokens of ``delta(h)`` and their probabilities."""
        k = check_int(k, "k", min=1, max=self.d_vocab)
        probability, token = self.log_probs(h).exp().topk(k)
        return list(zip(token_texts(self.tokenizer, token.tolist()), probability.tolist(), strict=True))

    @without_autocast()
    def _agrees_with(self, model: TransformerBridge) -> None:
        seen: list[Tensor] = []
        last = ModelLayout.from_model(model).hook(model.cfg.n_layers)
        with torch.no_grad(), reading(model, [(last, lambda h, hook: seen.append(h))]):
            truth = model(probe_inputs(model)[0], return_type="logits")
        if not seen:
            raise InputError(
                f"The output of the last block of {type(model.original_model).__name__} cannot be read: the "
                f"hook {last} does not fire. Use a model whose blocks run through TransformerLens."
            )
        check_finite(seen[0], f"h.{model.cfg.n_layers}")
        # Classifiers have one row of logits per input, from its class token, the first.
        read = seen[0][:, 0] if truth.ndim == 2 else seen[0]
        raw, self.d_vocab = self.logits(read), int(truth.shape[-1])
        truth = truth.to(raw)
        # The model may compute in half precision what is done in float32 here.
        slack = max(1e-4, 4 * _precision(head_modules(model), seen[0])) * truth.abs().max()
        errors = {}
        for scaling in _scalings(model) if raw.shape == truth.shape else ():
            self._scale, self._cap = scaling
            errors[scaling] = float((self._scaled(raw) - truth).abs().max())
        self._scale, self._cap = min(errors, key=errors.__getitem__, default=(1.0, None))
        if not errors.get((self._scale, self._cap), math.inf) <= slack:
            raise InputError(
                f"The readout of {model.cfg.architecture} is not known: final norm and unembedding do "
                "not give the model's own logits. Register a matlens.models.Family with its head, or report "
                "the model."
            )


def is_plain_linear(module: nn.Module) -> bool:
    """True for a linear layer in float32 that nothing changes on the way."""
    if type(module) is not nn.Linear or module.weight.dtype != torch.float32:
        return False
    hooked = module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module)
    return not hooked and not parametrize.is_parametrized(module)


def top_and_rank(
    unembed: nn.Linear, x: Float[Tensor, "n d"], ids: Int[Tensor, " n"] | None
) -> tuple[Int[Tensor, " n"], Int[Tensor, " n"] | None]:
    """The first token with the highest logit of each row, and how many are above the given one.

    As in float64: logits within rounding of the highest or of the given one are computed again.
    """
    weight, bias = unembed.weight.detach(), unembed.bias
    logits, n = nn.functional.linear(x, weight, None if bias is None else bias.detach()), len(x)
    size = x.norm(dim=1) * weight.norm(dim=1).max() + (0 if bias is None else bias.detach().abs().max())
    # The sum of d products, in any order, of factors that TF32 or bfloat16 rounds first.
    unit = (x.shape[1] + 4) * 2.0**-23 + product_eps(x.dtype)
    slack = unit * size
    if not bool(slack.isfinite().all()):  # logits overflow
        return _largest(logits, ids)

    def in_full(row: Tensor, token: Tensor) -> Tensor:
        precision = torch.float64 if has_float64(x.device) else torch.float32
        products = [
            (weight[tokens].to(precision) * x[rows].to(precision)).sum(1)
            for rows, tokens in zip(row.split(_AT_ONCE), token.split(_AT_ONCE), strict=True)
        ]
        exact = torch.cat(products)
        return exact if bias is None else exact + bias.detach()[token].to(precision)

    row, token = _places(logits >= (logits.amax(1) - 2 * slack)[:, None])
    value = in_full(row, token)
    best = value.new_full((n,), -torch.inf).scatter_reduce(0, row, value, "amax")
    on_top = value == best[row]
    top = torch.full((n,), len(weight), device=x.device).scatter_reduce(0, row[on_top], token[on_top], "amin")
    if ids is None:
        return top, None
    given = in_full(torch.arange(n, device=x.device), ids)
    surely = logits > (given + 2 * slack)[:, None].float()
    row, token = _places((logits >= (given - 2 * slack)[:, None].float()) & ~surely)
    above = (in_full(row, token) > given[row]) & (token != ids[row])
    return top, surely.sum(1).index_add_(0, row[above], torch.ones_like(row[above]))


def _largest(logits: Tensor, ids: Tensor | None) -> tuple[Tensor, Tensor | None]:
    return logits.argmax(-1), None if ids is None else (logits > logits.gather(1, ids[:, None])).sum(1)


def _places(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Rows and columns of the true entries; NumPy finds them much faster than torch."""
    if mask.device.type != "cpu":
        rows, columns = mask.nonzero(as_tuple=True)
        return rows, columns
    places = torch.from_numpy(np.flatnonzero(mask.numpy()))
    return places // mask.shape[1], places % mask.shape[1]


def check_vectors(vectors: Tensor, width: int) -> None:
    """Refuse vectors of another width or that are not finite."""
    if vectors.shape[-1] != width:
        raise InputError(f"Vectors must have {width} dimensions, like the model, got {vectors.shape[-1]}.")
    if not all_finite(vectors):
        raise InputError(
            "Vectors must be finite, got NaN or infinity. Maps fitted on too few samples can overflow."
        )


def _with_constants(module: nn.Module, x: Tensor) -> Tensor:
    """The output of a module whose weights are constants, differentiable in its input."""
    # Inference tensors cannot be part of a computation with gradients.
    weights = ((name, weight.detach()) for name, weight in module.named_parameters())
    constants = {name: weight.clone() if weight.is_inference() else weight for name, weight in weights}
    return torch.func.functional_call(module, constants, (x,))


def head_modules(model: TransformerBridge) -> list[nn.Module]:
    """The modules after the last block."""
    if not hasattr(model, "unembed"):
        raise InputError(
            "This model has no unembedding, so there is nothing to read out. Load it with its "
            "language-model head (a ...ForCausalLM or ...ForMaskedLM checkpoint)."
        )
    if stack_of(model) == ENCODER:
        raise InputError(
            "An encoder has no readout: only the decoder reads its last layer. Load the model with "
            "stack='decoder'. The encoder's layers can be collected and mapped."
        )
    norm = [model.ln_final.original_component] if hasattr(model, "ln_final") else []
    return ask(Family.head, model) or [*norm, *output_projection(model), model.unembed.original_component]


def output_projection(model: TransformerBridge) -> list[nn.Module]:
    """The projection to narrower embeddings, as in OPT-350m."""
    return [model.project_out.original_component] if hasattr(model, "project_out") else []


def _scalings(model: TransformerBridge) -> list[tuple[float, float | None]]:
    """Factors on the logits and soft caps after them that the configuration may mean, the simplest first."""
    config = model.original_model.config
    named: dict[str, float] = {}
    for part in (config, config.get_text_config(decoder=True)):
        for name, value in vars(part).items():
            if isinstance(value, int | float) and value and not isinstance(value, bool):
                named[name] = float(value)
    of_logits = {name: value for name, value in named.items() if _OF_LOGITS.search(name)}
    factors, caps = [1.0], list[float | None]([None])
    for name, value in of_logits.items():
        if _CAP.search(name):
            caps.append(value)
        elif _FACTOR.search(name):  # Cohere multiplies, Granite divides
            factors += [value, 1 / value]
    if getattr(config, "scale_decoder_outputs", False):  # T5 with one matrix for embedding and unembedding
        factors.append(config.d_model**-0.5)
    return [(factor, cap) for cap in caps for factor in factors]


def _precision(head: Sequence[nn.Module], vectors: Tensor) -> float:
    """The largest rounding of vectors or of the modules that read them."""
    kinds = {weight.dtype for module in head for weight in module.parameters()} | {vectors.dtype}
    return max(product_eps(kind) for kind in kinds if kind.is_floating_point)
