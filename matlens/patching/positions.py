"""Positions of the tokens that a forward pass reads, and where each prompt ends.

``"last"`` is the last token of a prompt and ``"new"`` every generated token, however generation is scheduled:
with or without a cache, in chunks, from a prefix in the cache, or with several candidates per pass. So the
length of the prompt is taken from the call of ``generate``, and the positions of tokens from each pass alone.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from threading import get_ident
from types import MethodType
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from matlens.errors import InputError
from matlens.models.inputs import DECODER, ENCODER, is_visual, n_image_positions, stack_of
from matlens.models.layout import ModelLayout
from matlens.models.sites import STREAM, Site

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge

Tokens = Literal["all", "not-first", "last", "new"] | Int[Tensor, " batch"] | Bool[Tensor, "batch longest"]

_WATCHED: WeakKeyDictionary[Any, TokenPositions] = WeakKeyDictionary()


@dataclass
class _Prompt:
    """The prompts of a call of ``generate``: their length with padding, and their mask if it was given.

    Before each pass over them transformers prepares its inputs. Other passes are of other sentences, such as
    those of guidance without the prompt.
    """

    length: int | None = None
    mask: Tensor | None = None
    is_prepared: bool = False
    n_read: int = 0  # by all its passes, which a recurrent state does not count


@dataclass(frozen=True)
class _Batch:
    """The tokens of a pass."""

    positions: Tensor  # [batch, length], counted from the first token of the sentence; -1 for padding
    ends: Tensor  # [batch], of the last token of the prompt
    olds: Tensor  # [batch], of the last token before the new ones
    whole: bool  # whether `ends` is the last position that a user can mean
    cache: Any = None  # of a pass of the user
    is_generated: bool = False


class TokenPositions:
    """The tokens of the running pass of a model; all contexts around the model share one object.

    Padding is never chosen: a map's output there could overflow and reach the other tokens as NaN through an
    attention weight of zero.
    """

    def __init__(self, model: TransformerBridge) -> None:
        self._model, self._inner = model, model.original_model
        self.read: dict[Any, Tensor] = {}  # vectors of the running pass that are still to be used
        self._batch: _Batch | str = "no pass of the model is running"  # or why it is unknown
        self._running: tuple[Any, int] | None = None  # the outermost module and its thread
        self._prompt: _Prompt | None = None  # of the outermost call of generate
        self._prepared: tuple[Tensor | None] | None = None  # the mask of its next pass, [batch, total]
        self._ends: WeakKeyDictionary[Any, Tensor] = WeakKeyDictionary()  # by the caches of the user's passes
        self._sizes: Tensor | None = None  # [batch, length], squared norms of the last layer's vectors
        self._n_contexts, self._installed = 0, ExitStack()
        # No methods, of which a copy of the model would have copies: its hooks would ask this object.
        self.functions = (lambda *given: self._look(*given), lambda *given: self._leave(*given))

    @classmethod
    def of(cls, model: TransformerBridge) -> TokenPositions:
        """The object that contexts around a model share."""
        return _WATCHED.get(model) or cls(model)

    @property
    def batch(self) -> _Batch:
        """The tokens of the running pass."""
        if isinstance(self._batch, str):
            raise InputError(
                f"The positions of tokens are unknown: {self._batch}. Call the model with token ids and a "
                "mask [batch, length], or use where='all'."
            )
        return self._batch

    def measuring(self) -> tuple[str, Callable[..., None]]:
        """A hook of a context's own at the last layer, and its name."""
        layout = ModelLayout.from_model(self._model)

        def measure(value: Tensor, hook: Any) -> None:
            # Where squared norms overflow, a norm makes 0 of finite vectors.
            self._sizes = value.to(_wide(value)).square().sum(-1)

        return layout.hook(Site(STREAM, layout.n_layers)), measure

    def chosen(self, where: Tokens) -> Bool[Tensor, "batch length"]:
        """The tokens at which something is changed."""
        batch = self.batch
        positions = batch.positions
        if isinstance(where, str):
            if where == "last":
                return (positions == batch.ends[:, None]) & (positions >= 0)
            if where == "new":
                return positions > batch.olds[:, None]
            return positions >= (1 if where == "not-first" else 0)
        if len(where) != len(positions):
            raise InputError(
                f"where must have a row for each of {len(positions)} sentences, got {len(where)} rows."
            )
        where = where.to(positions.device)
        if where.dtype != torch.bool:
            outside = (where > batch.ends) & (batch.ends >= 0)
            if batch.whole and bool(outside.any()):
                sentence = int(outside.int().argmax())
                raise InputError(
                    f"where must be at most {int(batch.ends[sentence])} in sentence {sentence}, got "
                    f"{int(where[sentence])}. A Boolean mask can include tokens to come."
                )
            return positions == where[:, None]
        known = positions < where.shape[1]
        meant = where.gather(1, positions.clamp(0, where.shape[1] - 1)) | ~known
        return meant & (positions >= 0)

    def keep(self, key: Any) -> Callable[..., None]:
        """A hook that keeps the vectors of the running pass, those of all heads concatenated."""

        def hook(value: Tensor, hook: Any) -> None:
            self.read[key] = value.flatten(2)

        return hook

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Record the tokens of each pass, and the calls of ``generate``, until the last context ends."""
        if not self._n_contexts:
            self._install()
        self._n_contexts += 1
        try:
            yield
        finally:  # contexts may end in another order than they began
            self._n_contexts -= 1
            if not self._n_contexts:
                del _WATCHED[self._model]
                self._installed.close()

    def _install(self) -> None:
        look, leave = self.functions
        for module in self._entrances():
            self._installed.callback(module.register_forward_pre_hook(look, with_kwargs=True).remove)
            self._installed.callback(module.register_forward_hook(leave, always_call=True).remove)
        methods = [
            (self._inner, "generate", self._noting_prompt), (self._model, "generate", self._noting_call),
            (self._model, "generate_stream", self._noting_stream),
            (self._inner, "prepare_inputs_for_generation", self._noting_mask),
        ]  # fmt: skip
        wrapped = []
        for owner, name, noting in methods:
            if hasattr(type(owner), name):
                generate = _unbound(getattr(owner, name))
                # A method, which a copy of the model has as its own.
                noted = MethodType(functools.wraps(generate)(noting(generate)), owner)
                wrapped.append((owner, name, noted))
        self._installed.enter_context(replaced_methods(wrapped))
        _WATCHED[self._model] = self

    def _entrances(self) -> list[Any]:
        """Modules whose arguments are the tokens: the model, the one without its head, and a stack."""
        stack = stack_of(self._model)
        modules = [self._inner, getattr(self._inner, "base_model", self._inner)]
        if stack is not None:
            modules.append(getattr(self._inner, f"get_{stack}")())
        return list(dict.fromkeys(modules))

    def _noting_prompt(self, generate: Callable[..., Any]) -> Callable[..., Any]:
        """The ``generate`` of transformers, which is given the prompts."""

        def noted(model: Any, *args: Any, **kwargs: Any) -> Any:
            with self._generating(self._prompt_of(*args, **kwargs)):
                return generate(model, *args, **kwargs)

        return noted

    def _noting_call(self, generate: Callable[..., Any]) -> Callable[..., Any]:
        """The ``generate`` of TransformerLens, whose first pass reads the prompts."""

        def noted(*args: Any, **kwargs: Any) -> Any:
            with self._generating(_Prompt()):
                return generate(*args, **kwargs)

        return noted

    def _noting_stream(self, generate: Callable[..., Any]) -> Callable[..., Any]:
        """A stream, which generates only while its next tokens are computed, not while it waits."""

        def noted(*args: Any, **kwargs: Any) -> Iterator[Any]:
            stream, prompt, end = generate(*args, **kwargs), _Prompt(), object()
            try:
                while True:
                    with self._generating(prompt):
                        item = next(stream, end)
                    if item is end:
                        return
                    yield item
            finally:
                stream.close()

        return noted

    def _noting_mask(self, prepare: Callable[..., Any]) -> Callable[..., Any]:
        """The last step before each pass of transformers' ``generate``, which is given a plain mask."""
        name = "decoder_attention_mask" if stack_of(self._model) is not None else "attention_mask"

        def noted(*args: Any, **kwargs: Any) -> Any:
            self._prepared = (kwargs.get(name),)
            return prepare(*args, **kwargs)

        return noted

    @contextmanager
    def _generating(self, prompt: _Prompt) -> Iterator[None]:
        outer = self._prompt
        if outer is None:
            self._prompt = prompt
        elif outer.length is None:  # of TransformerLens, which calls transformers
            vars(outer).update(vars(prompt))
        try:
            yield
        finally:
            self._prompt = outer

    def _prompt_of(self, *args: Any, **kwargs: Any) -> _Prompt:
        """The prompts that transformers' ``generate`` is given."""
        if stack_of(self._model) is not None:
            return _Prompt(None if kwargs.get("decoder_input_ids") is not None else 1, is_prepared=True)
        mask = kwargs.get("attention_mask")
        if mask is not None:  # it includes what the cache holds
            return _Prompt(mask.shape[1], mask, is_prepared=True)
        given = (kwargs.get("inputs_embeds"), *args[:1], kwargs.get("inputs"), kwargs.get("input_ids"))
        prompts = next((tokens for tokens in given if tokens is not None), None)
        return _Prompt(1 if prompts is None else prompts.shape[1], is_prepared=True)

    def _look(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._running is not None and module is not self._inner:
            return  # inside of a pass that is known
        self.read.clear()
        self._running, self._sizes = (module, get_ident()), None
        self._batch = self._read_batch(module, _arguments(module, args, kwargs))

    def _leave(self, module: Any, args: tuple[Any, ...], output: Any) -> None:
        if self._running != (module, get_ident()):
            return  # inside of a pass, or one of another thread that was refused
        batch, self._batch, self._running = self._batch, "no pass of the model is running", None
        self.read.clear()
        if output is None:  # the pass ended in an exception
            return
        self._check_finite(output, batch)
        if isinstance(batch, _Batch) and not batch.is_generated:
            cache = getattr(output, "past_key_values", None)
            cache = batch.cache if cache is None else cache
            if cache is not None:
                self._ends[cache] = batch.ends

    def _check_finite(self, output: Any, batch: _Batch | str) -> None:
        """Raise InputError where the changed model has overflowed, instead of generating from NaN or 0."""
        real = batch.positions >= 0 if isinstance(batch, _Batch) else None
        totals = []
        if self._sizes is not None:
            totals.append(self._sizes)
        scores = getattr(output, "logits", None)
        if isinstance(scores, Tensor) and scores.is_floating_point():
            total = scores.sum(-1, dtype=_wide(scores))
            totals.append(total.masked_fill(total == -torch.inf, 0))  # some models have logits of -inf
        for total in totals:
            overflowed = ~total.isfinite()
            if real is not None and total.shape[1:] and stack_of(self._model) != ENCODER:
                overflowed &= real[:, -total.shape[1] :].to(total.device)
            if bool(overflowed.any()):
                raise InputError(
                    f"The vectors and logits of the changed model must be finite in {self._model.cfg.dtype}, "
                    "got an overflow. Use smaller coefficients or maps."
                )

    def _read_batch(self, module: Any, given: Mapping[str, Any]) -> _Batch | str:
        """The tokens of a pass from its own arguments, or why they are unknown."""
        stack, prompt = stack_of(self._model), self._prompt
        prepared, self._prepared = self._prepared, None
        if prompt is not None and prompt.is_prepared and prepared is None:
            prompt = None
        if is_visual(self._model):
            images = given.get("pixel_values")
            if images is None:
                return "the pass has no images"
            n, length = len(images), n_image_positions(self._model)
            positions = torch.arange(length, device=images.device).expand(n, length)
            return _Batch(positions, positions[:, -1], positions[:, -1], whole=True)
        has_prefix = stack == DECODER and "decoder_input_ids" in _signature(module)
        prefix = "decoder_" if has_prefix else ""
        tokens = given.get(f"{prefix}input_ids")
        tokens = given.get(f"{prefix}inputs_embeds") if tokens is None else tokens
        if tokens is None:
            return "the pass has no token ids or embeddings"
        (n, length), cache = tokens.shape[:2], cache_of(given)
        mask = given.get(f"{prefix}attention_mask")
        if prepared is not None and (mask is None or isinstance(mask, Mapping) or mask.ndim == 4):
            # A static cache gets masks of attention instead, and a recurrent model none after the prompt.
            mask = prepared[0]
        if mask is None:
            n_stored = _n_stored(cache)
            if n_stored is None and prompt is not None:
                n_stored = prompt.n_read
            if n_stored is None:
                return f"its cache, {type(cache).__name__}, has no length"
            mask = torch.ones(n, length + n_stored, dtype=torch.bool, device=tokens.device)
        if mask.ndim != 2:
            return f"attention_mask must be [batch, length], got one of {mask.ndim} dimensions"
        real = mask.bool()
        past = max(real.shape[1] - length, 0)
        positions = (real.cumsum(1) - 1).masked_fill(~real, -1)[:, -length:]
        if prompt is not None and stack != ENCODER:
            prompt.n_read += length
            ends = _prompt_ends(prompt, real)
            return _Batch(positions, ends, ends, whole=True, is_generated=True)
        ends = positions.max(1).values
        if not past:
            return _Batch(positions, ends, ends, whole=True, cache=cache)
        known = None if cache is None else self._ends.get(cache)
        if known is not None and len(known) == n:  # the prompt was read inside of the context
            return _Batch(positions, known, known, whole=False, cache=cache)
        return _Batch(positions, ends, real[:, :past].sum(1) - 1, whole=False, cache=cache)


def _prompt_ends(prompt: _Prompt, real: Bool[Tensor, "batch total"]) -> Int[Tensor, " batch"]:
    """The position of the last token of each prompt, from the mask of a pass."""
    n, total = real.shape
    if prompt.length is None:
        prompt.length = total
    if total >= prompt.length:
        return real[:, : prompt.length].sum(1) - 1
    if prompt.mask is not None:  # a chunk of prompts that can end in padding
        return prompt.mask.to(real.device).bool().sum(1).repeat_interleave(n // len(prompt.mask)) - 1
    return real.sum(1) - 1 + prompt.length - total


def _wide(x: Tensor) -> torch.dtype:
    """The precision of sums: in float16 they overflow although their terms do not."""
    return torch.promote_types(x.dtype, torch.float32)


def _unbound(method: Callable[..., Any]) -> Callable[..., Any]:
    """The function of a method, or of what a user has put in its place."""
    return (
        method.__func__ if isinstance(method, MethodType) else lambda _, *args, **more: method(*args, **more)
    )


_CACHES = ("cache", "past_key_values", "cache_params", "state")  # the first from transformers 5.24 on


def cache_of(given: Mapping[str, Any]) -> Any:
    """The cache or state in the arguments of a pass or a block."""
    return next((given[name] for name in _CACHES if given.get(name) is not None), None)


def _n_stored(cache: Any) -> int | None:
    """How many tokens a cache holds; None for states of recurrent models, which do not count them."""
    try:
        return 0 if cache is None else cache.get_seq_length()
    except (AttributeError, ValueError):
        return None


def _signature(module: Any) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(module.forward).parameters


def _arguments(module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of a pass by their names."""
    return dict(zip(_signature(module), args, strict=False)) | dict(kwargs)


@contextmanager
def replaced_methods(methods: Sequence[tuple[Any, str, Callable[..., Any]]]) -> Iterator[None]:
    """Replace methods of objects, by their names."""
    # An attribute of the instance takes precedence over the class, and leaves no trace when deleted.
    before = [vars(owner).get(name) for owner, name, _ in methods]
    try:
        for owner, name, function in methods:
            vars(owner)[name] = function
        yield
    finally:
        for (owner, name, _), own in zip(methods, before, strict=True):
            vars(owner).pop(name, None)
            if own is not None:
                vars(owner)[name] = own
