"""The read-out ``delta``: from a vector that stands for ``h^L`` to a distribution over the vocabulary."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from matlens.errors import InputError, check, check_int, checked
from matlens.models.families.encoder_decoders import ENCODER, stack_of
from matlens.models.families.vision import is_visual, probe_images
from matlens.models.families.wikilm.adaptive import AdaptiveSoftmax
from matlens.models.hooks import reading
from matlens.models.identity import ModelIdentity, Provenance, check_raw
from matlens.models.layout import ModelLayout
from matlens.models.screening import Screen
from matlens.models.sites import check_finite
from matlens.models.weights import WeightChecksum, check_finite_weights, float32_on
from matlens.numerics import log_softmax

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge

_SCREENED = 1 << 24  # logits that are looked at together


@checked
class Readout:
    """What the model does after its last block, alone and in float32.

    For decoders the final norm and the unembedding; for masked-LM models the whole head (dense,
    activation, norm, decoder and its bias). Logit scaling and soft capping are part of it
    (paper A, Eq. 2; BERT: section 4.2). A half-precision model is read out in float32 too, with its
    own weights. The adaptive softmax of a WikiLM gives log-probabilities. In a vision transformer that
    classifies images, classes stand in the place of tokens.

    Raises
    ------
    InputError
        The model has no head, or read out this way ``h^L`` does not give the model's own logits.

    Attributes
    ----------
    identity
        The model whose weights these are.
    tokenizer, device
        The model's own.
    d_model, d_vocab
        The width of the vectors that are read, and the number of tokens.
    weights
        The head's weights; every method raises InputError once they have changed. Inside of
        ``with readout.weights.constant():`` they are compared at the beginning and at the end alone.
    """

    def __init__(self, model: TransformerBridge) -> None:
        check_raw(model)
        if stack_of(model) == ENCODER:
            raise InputError(
                "An encoder has no read-out: what its last layer holds is read by the decoder alone. Load "
                "the model with stack='decoder'. The encoder's layers can be collected and mapped."
            )
        if not hasattr(model, "unembed"):
            raise InputError(
                "This model has no unembedding, so there is nothing to read out. Load it with its "
                "language-model head (a ...ForCausalLM or ...ForMaskedLM checkpoint)."
            )
        check_finite_weights(model)
        self.identity = ModelIdentity.from_model(model, hash_unembedding=False).of_weights
        self.tokenizer = model.tokenizer
        self.d_model = int(model.cfg.d_model)
        modules = head_modules(model)
        self.weights = WeightChecksum(modules, "the read-out")
        # Of a model on several devices, all of its head is brought to where the unembedding is.
        self.device = next(modules[-1].parameters()).device
        self._head = nn.Sequential(*(float32_on(module, self.device) for module in modules))
        self._scale, self._cap = _scaling(model)
        self._screen: Screen | None = None
        self._agrees_with(model)

    def check_same(self, other: Provenance | ModelIdentity, *, theirs: str = "the activations") -> None:
        """Refuse vectors of another model; those of which no model is known are taken.

        Raises
        ------
        InputError
            The models differ; see `Provenance.check_same`.
        """
        if isinstance(other, ModelIdentity) or other.model is not None:
            Provenance(self.identity).check_same(other, ours="the read-out", theirs=theirs)

    @property
    def multiplications(self) -> int:
        """Numbers in the matrices of the read-out, which are its multiplications for one vector."""
        return sum(weight.numel() for weight in self._head.parameters() if weight.ndim == 2)

    def logits(
        self, h: Float[Tensor, "... d_model"], *, gradients: bool = False
    ) -> Float[Tensor, "... d_vocab"]:
        """Scores of all tokens for vectors that stand for ``h^L``, in float32 on the model's device.

        Parameters
        ----------
        h
            The vectors.
        gradients
            Whether the scores can be differentiated in ``h``; the head's weights are constants.

        Raises
        ------
        InputError
            The vectors are of another width, or not finite.
        """
        check_vectors(h, self.d_model)
        self.weights.check()
        if not gradients:
            with torch.inference_mode():
                return self._scores(h, self._head)
        constants = {name: weight.detach() for name, weight in self._head.named_parameters()}
        return self._scores(h, lambda x: torch.func.functional_call(self._head, constants, (x,)))

    def _scores(self, h: Tensor, head: Callable[[Tensor], Tensor]) -> Tensor:
        return self._scaled(head(h.to(self.device, torch.float32)))

    def _scaled(self, logits: Tensor) -> Tensor:
        if self._scale != 1:
            logits = logits * self._scale
        return torch.tanh(logits / self._cap) * self._cap if self._cap else logits

    def features(self, h: Float[Tensor, "... d_model"]) -> Float[Tensor, "... d_features"]:
        """What the unembedding is applied to: vectors after the norm and, for BERT, the rest of the head.

        It can be differentiated in ``h``; the head's weights are constants.

        Raises
        ------
        InputError
            The vectors are of another width, or not finite.
        """
        check_vectors(h, self.d_model)
        self.weights.check()
        features = h.to(self.device, torch.float32)
        for module in list(self._head)[:-1]:
            constants = {name: weight.detach() for name, weight in module.named_parameters()}
            features = torch.func.functional_call(module, constants, (features,))
        return features

    def token_scores(
        self, features: Float[Tensor, "... d_features"], tokens: Int[Tensor, " k"] | None = None
    ) -> Float[Tensor, "... k"]:
        """Scores of some tokens alone: those columns of `logits`, for the price of so many.

        Parameters
        ----------
        features
            What `features` gives; the scores can be differentiated in them.
        tokens
            The tokens, by default all.

        Raises
        ------
        InputError
            A token is not in the vocabulary, or the features are of another width.
        """
        self.weights.check()
        unembedding: Any = self._head[-1]
        adaptive = isinstance(unembedding, AdaptiveSoftmax)
        width = unembedding.in_features if adaptive else unembedding.weight.shape[1]
        if features.shape[-1] != width:
            raise InputError(
                f"The features have {features.shape[-1]} coordinates. Expected the {width} that "
                "Readout.features gives."
            )
        if adaptive:  # each score depends on those of other tokens
            constants = {name: weight.detach() for name, weight in unembedding.named_parameters()}
            scores = self._scaled(torch.func.functional_call(unembedding, constants, (features,)))
            return scores if tokens is None else scores[..., self._check_tokens(tokens)]
        parts = [unembedding.weight.detach(), None if unembedding.bias is None else unembedding.bias.detach()]
        if tokens is not None:
            tokens = self._check_tokens(tokens)
            parts = [None if part is None else part[tokens] for part in parts]
        weight, bias = parts
        assert weight is not None
        return self._scaled(nn.functional.linear(features, weight, bias))

    def _check_tokens(self, tokens: Tensor) -> Tensor:
        if len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < self.d_vocab:
            raise InputError(f"A token is not among those from 0 to {self.d_vocab - 1}. Expected these.")
        return tokens

    @torch.inference_mode()
    def top_ids(self, h: Float[Tensor, "n d_model"]) -> Int[Tensor, " n"]:
        """The token with the highest logit for each vector, the first of equals; on the model's device.

        The same for all batches and numbers of threads: logits that are too close to be told apart in
        another precision are computed in float64, from the head's input and weights in float32. That takes
        a fraction of the time of `logits`.

        Raises
        ------
        InputError
            The vectors are of another width, or not finite.
        """
        check_vectors(h, self.d_model, n_axes=2)
        with self.weights.constant():
            screened = [
                self.logits(part).argmax(-1) if screen is None else screen.top(features)
                for part, features, screen in self._screened(h)
            ]
        return torch.cat([h.new_empty(0, dtype=torch.int64, device=self.device), *screened])

    @torch.inference_mode()
    def top_ids_and_ranks(
        self, h: Float[Tensor, "n d_model"], ids: Int[Tensor, " n"]
    ) -> tuple[Int[Tensor, " n"], Int[Tensor, " n"]]:
        """For each vector the token with the highest logit, and the rank of a given one, 1 for the highest.

        Parameters
        ----------
        h, ids
            The vectors, and a token for each of them.

        Raises
        ------
        InputError
            The vectors are of another width, or not finite, or the ids are not as many tokens of the model.
        """
        check_vectors(h, self.d_model, n_axes=2)
        if ids.shape != h.shape[:1]:
            raise InputError(f"ids must be a token for each of the {len(h)} vectors, got {len(ids)}.")
        ids, start = self._check_tokens(ids).to(self.device, torch.int64), 0
        tops, ranks = [ids[:0]], [ids[:0]]
        with self.weights.constant():
            for part, features, screen in self._screened(h):
                of_part, start = ids[start : start + len(part)], start + len(part)
                if screen is None:
                    logits = self.logits(part)
                    top, rank = logits.argmax(-1), (logits > logits.gather(1, of_part[:, None])).sum(1)
                else:
                    top, rank = screen.top_and_rank(features, of_part)
                tops.append(top)
                ranks.append(rank)
        return torch.cat(tops), torch.cat(ranks) + 1

    def _screened(self, h: Tensor) -> Iterator[tuple[Tensor, Tensor, Screen | None]]:
        """Vectors a few at a time, what the unembedding makes logits of, and by what it is screened.

        A cap grows with the logit and a factor is greater than 0, so neither changes which token is above.
        """
        unembed: Any = self._head[-1]
        screened = Screen.suits(unembed) and self._scale > 0
        if screened and (self._screen is None or not self._screen.holds(unembed)):
            self._screen = Screen(unembed)
        most = max(_SCREENED // self.d_vocab, 1)
        for part in h.tensor_split(max(-(-len(h) // most), 1)):  # all of one size, none of a few rows
            features = part.to(self.device, torch.float32)
            for module in list(self._head)[:-1]:
                features = module(features)
            screen = self._screen if screened else None
            yield part, features, screen if screen is not None and screen.takes(features) else None

    def log_probs(self, h: Float[Tensor, "... d_model"]) -> Float[Tensor, "... d_vocab"]:
        """Natural logarithms of ``delta(h)``.

        Raises
        ------
        InputError
            The vectors are of another width, or not finite.
        """
        return log_softmax(self.logits(h))

    def top_tokens(self, h: Float[Tensor, " d_model"], k: int = 5) -> list[tuple[str, float]]:
        """The ``k`` most probable tokens of ``delta(h)`` and their probabilities, the most probable first.

        Raises
        ------
        InputError
            It is not one vector of the model's width, is not finite, ``k`` is more than there are tokens, or
            the model has no tokenizer.
        """
        k = check_int(k, "The number of tokens", min=1, max=self.d_vocab)
        if self.tokenizer is None:
            raise InputError("The model of this read-out has no tokenizer. Read its logits instead.")
        check_vectors(h, self.d_model, n_axes=1)
        probability, token = self.log_probs(h).exp().topk(k)
        return [
            (self.tokenizer.decode([t]), p) for t, p in zip(token.tolist(), probability.tolist(), strict=True)
        ]

    def _agrees_with(self, model: TransformerBridge) -> None:
        visual = is_visual(model)
        tokens = torch.arange(1, 9, device=model.cfg.device)[None] % max(model.cfg.d_vocab, 1)
        seen: list[Tensor] = []
        last = ModelLayout.from_model(model).hook(model.cfg.n_layers)
        with torch.inference_mode(), reading(model, [(last, lambda h, hook: seen.append(h))]):
            truth = model(probe_images(model) if visual else tokens, return_type="logits")
        if not seen:
            raise InputError(
                f"What the last block of {type(model.original_model).__name__} gives cannot be read: the "
                f"hook {last} does not fire. Expected a model whose blocks give vectors to TransformerLens."
            )
        check_finite(seen[0], f"h.{model.cfg.n_layers}")
        # Images are classified from their class token, the first.
        ours, self.d_vocab = self.logits(seen[0][:, 0] if visual else seen[0]), int(truth.shape[-1])
        truth = truth.to(ours)
        # The model may compute in half precision what is done in float32 here.
        slack = max(1e-4, 4 * torch.finfo(seen[0].dtype).eps) * truth.abs().max()
        if ours.shape != truth.shape or not (ours - truth).abs().max() <= slack:
            raise InputError(
                f"The read-out of {model.cfg.architecture} is not known: final norm and unembedding do "
                "not give the model's own logits. Please report the model."
            )


def check_vectors(vectors: Any, width: int, *, n_axes: int | None = None) -> None:
    """Refuse what is no tensor of finite vectors of this width.

    Parameters
    ----------
    vectors
        What the user gave, a vector along the last axis.
    width
        How many coordinates a vector has.
    n_axes
        How many axes there are, by default any number from one.

    Raises
    ------
    InputError
        It is something else; the message says what.
    """
    check(vectors, Tensor, "vectors")
    expected = (
        f"Expected {'one vector' if n_axes == 1 else 'vectors'} of {width} coordinates, the model's width"
    )
    if vectors.ndim < 1 or vectors.shape[-1] != width or n_axes not in (None, vectors.ndim):
        raise InputError(
            f"The vectors have the shape {tuple(vectors.shape)}. {expected}, along the last axis."
        )
    if not vectors.is_floating_point():
        raise InputError(f"The vectors are of {vectors.dtype}. {expected}, in float32 or another precision.")
    if not bool(vectors.isfinite().all()):
        raise InputError(
            "The vectors hold NaN or infinity, so no token can be read from them. Expected finite numbers; "
            "vectors mapped by a fit of too few samples can overflow."
        )


def head_modules(model: TransformerBridge) -> list[nn.Module]:
    """What a model does after its last block, module by module."""
    if hasattr(model, "mlm_head"):
        return [
            model.mlm_head.original_component,
            _Activation(_head_activation(model)),
            model.ln_final.original_component,
            model.unembed.original_component,
        ]
    norm = [model.ln_final.original_component] if hasattr(model, "ln_final") else []
    return [*norm, *narrowing(model), model.unembed.original_component]


def narrowing(model: TransformerBridge) -> list[nn.Module]:
    """What makes the stream as narrow as the embeddings are before the unembedding, as in OPT-350m."""
    return [model.project_out.original_component] if hasattr(model, "project_out") else []


def _head_activation(model: TransformerBridge) -> Any:
    """What a masked-LM head does between its dense layer and its norm: BERT's is its own, RoBERTa's GELU."""
    head = getattr(getattr(model.original_model, "cls", None), "predictions", None)
    return getattr(getattr(head, "transform", None), "transform_act_fn", nn.functional.gelu)


class _Activation(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def _scaling(model: TransformerBridge) -> tuple[float, float | None]:
    """Factor on the logits, and the soft cap after it."""
    config = model.original_model.config
    scale = float(getattr(config, "logit_scale", None) or 1.0)  # Cohere multiplies
    scale /= float(getattr(config, "logits_scaling", None) or 1.0)  # Granite divides
    if getattr(config, "scale_decoder_outputs", False):  # T5 with one matrix for embedding and unembedding
        scale *= config.d_model**-0.5
    cap = getattr(config, "final_logit_softcapping", None)
    return scale, float(cap) if cap else None
