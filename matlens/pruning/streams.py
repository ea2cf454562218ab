"""What a plain model's blocks read and write on calibration text, run block by block."""

from __future__ import annotations

import copy
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from matlens.errors import InputError
from matlens.models.sites import check_finite
from matlens.numerics.precision import in_float64
from matlens.numerics.probabilities import log_softmax
from matlens.parallel import Bar
from matlens.pruning.layouts import Layout

if TYPE_CHECKING:
    from matlens.data.examples import Examples

_TOKENS = 1024  # of a batch
_TRIED = 6  # tokens on which a block's sum is tried
TOLERANCE = 1e-4  # of the largest number that a block gives
MOST_BYTES = 8 << 30  # of the streams of all layers; set matlens.pruning.streams.MOST_BYTES for more


class Passed(NamedTuple):
    """What a block gives: the stream after it, what its output matrix read, and what that wrote."""

    h: Float[Tensor, "n length d_model"]
    read: Float[Tensor, "n length d_mlp"]
    written: Float[Tensor, "n length d_model"]


def whole_windows(windows: Examples) -> Int[Tensor, "n length"]:
    """The tokens of the windows that are as long as the first."""
    length = int(windows.lengths[0])
    parts = [
        torch.from_numpy(windows.tokens[start : start + length])
        for start, of_window in zip(windows.offsets[:-1].tolist(), windows.lengths.tolist(), strict=True)
        if of_window == length
    ]
    return torch.stack(parts).long()


class Streams:
    """The stream before every block and after the last, on texts of equal length.

    Attributes
    ----------
    h
        ``h^0 .. h^L``.
    rest
        What blocks give behind their vectors, where they do.
    """

    def __init__(self, layout: Layout, tokens: Int[Tensor, "n length"], *, progress: bool = True) -> None:
        self.layout, self.tokens = layout, tokens
        config = layout.model.config.get_text_config()
        of_vector = config.hidden_size * layout.model.dtype.itemsize
        size = (config.num_hidden_layers + 1) * tokens.numel() * of_vector
        if size > MOST_BYTES:
            raise InputError(
                f"The streams of all layers on {tokens.numel():,} tokens take {size / 2**30:.1f} GiB. "
                f"Expected {MOST_BYTES / 2**30:.0f} at most: take fewer or shorter windows, or set "
                "matlens.pruning.streams.MOST_BYTES."
            )
        self._step = max(1, _TOKENS // tokens.shape[1])
        self.rest: tuple[Any, ...] | None = None
        self._calls: list[list[tuple[tuple[Any, ...], dict[str, Any]]]] = []
        self.h: list[Tensor] = self._run(progress)

    @torch.inference_mode()
    def _run(self, progress: bool) -> list[Tensor]:
        """Run the model, and remember what each block was called with."""
        blocks, parts = self.layout.blocks, list[list[Tensor]]()
        with Bar(total=len(self.tokens), desc="streams", unit="window", disable=not progress) as bar:
            for batch in self.tokens.split(self._step):
                calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
                seen: list[Tensor] = []

                def before(
                    _: nn.Module,
                    args: tuple[Any, ...],
                    kwargs: dict[str, Any],
                    calls: Any = calls,
                    seen: Any = seen,
                ) -> None:
                    rest = dict(kwargs)
                    seen.append(args[0] if args else rest.pop("hidden_states"))
                    calls.append((args[1:], rest))

                def after(_: nn.Module, __: Any, output: Any, seen: Any = seen) -> None:
                    self.rest = tuple(output[1:]) if isinstance(output, tuple | list) else None
                    seen.append(_first(output))

                with ExitStack() as hooks:
                    for block in blocks:
                        hooks.callback(block.register_forward_pre_hook(before, with_kwargs=True).remove)
                    hooks.callback(blocks[-1].register_forward_hook(after).remove)
                    self.layout.model(batch.to(self.layout.model.device), use_cache=False)
                self._calls.append(calls)
                parts.append([vectors.cpu() for vectors in seen])
                bar.update(len(batch))
        streams = [torch.cat(layer) for layer in zip(*parts, strict=True)]
        for layer, h in enumerate(streams):
            check_finite(h, f"h.{layer}")
        return streams

    def beginning(self, n_tokens: int) -> Streams:
        """The same of the first texts alone: so many tokens or a few more, in whole batches."""
        n_batches = max(1, -(-n_tokens // (self._step * self.tokens.shape[1])))
        part = copy.copy(self)
        part._calls = self._calls[:n_batches]
        part.tokens = self.tokens[: n_batches * self._step]
        part.h = [h[: n_batches * self._step] for h in self.h]
        return part

    def in_full(self) -> Streams:
        """The same in float32 at least, so that no sum is hidden by rounding; see `full_block`."""
        part = copy.copy(self)
        part._calls, part.h = _in_full(self._calls), _in_full(self.h)
        return part

    @torch.inference_mode()
    def through(self, index: int, block: nn.Module, h: Float[Tensor, "n length d_model"]) -> Passed:
        """Run a block, or another in its place, on a stream before it."""
        reads: list[Tensor] = []
        writes: list[Tensor] = []

        def hook(_: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
            reads.append(args[0].cpu())
            writes.append(output.to("cpu", copy=True))  # to which some blocks add in place

        handle = self.layout.writer_of(block).register_forward_hook(hook)
        try:
            out = self._call(index, block, h)
        finally:
            handle.remove()
        shape = h.shape[:2]
        return Passed(
            out, torch.cat([x.reshape(-1, *shape[1:], x.shape[-1]) for x in reads]),
            torch.cat([x.reshape(-1, *shape[1:], x.shape[-1]) for x in writes]),
        )  # fmt: skip

    @torch.inference_mode()
    def after(self, index: int, block: nn.Module, h: Float[Tensor, "n length d_model"]) -> Tensor:
        """The stream after a block alone."""
        return self._call(index, block, h)

    def _call(self, index: int, block: nn.Module, h: Tensor) -> Tensor:
        device = self.layout.model.device
        return torch.cat(
            [
                _first(block(part.to(device), *calls[index][0], **calls[index][1])).cpu()
                for part, calls in zip(h.split(self._step), self._calls, strict=True)
            ]
        )

    @torch.inference_mode()
    def losses(self, h: Float[Tensor, "n length d_model"]) -> Float[Tensor, " n"]:
        """``-ln p`` of the next token, the mean over each text, from a stand-in for the last stream."""
        losses = []
        for part, tokens in zip(h.split(self._step), self.tokens.split(self._step), strict=True):
            log_p = log_softmax(self._logits(part, tokens)[:, :-1].float())
            of_next = log_p.gather(2, tokens[:, 1:, None].to(log_p.device))[..., 0]
            losses.append(-in_float64(of_next).mean(1).cpu())
        return torch.cat(losses)

    def _logits(self, h: Tensor, tokens: Tensor) -> Tensor:
        """The model's own read-out: the model, with one block that gives the stand-in for the last stream."""
        model, (parent, _, name) = self.layout.model, self.layout.path.rpartition(".")
        blocks, place = self.layout.blocks, self.layout.model.get_submodule(parent)
        setattr(place, name, nn.ModuleList([ConstantBlock(h.to(model.device), self.rest)]))
        try:
            return model(tokens.to(model.device), use_cache=False).logits
        finally:
            setattr(place, name, blocks)


class ConstantBlock(nn.Module):
    """A block that gives what it was made with."""

    def __init__(self, h: Tensor, rest: tuple[Any, ...] | None) -> None:
        super().__init__()
        self._h, self.rest = h, rest

    def forward(self, *_: Any, **__: Any) -> Any:
        """Give it, whatever is given."""
        return self._h if self.rest is None else (self._h, *self.rest)


def _first(output: Any) -> Tensor:
    return output[0] if isinstance(output, tuple | list) else output


def _in_full(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.float() if value.is_floating_point() and value.element_size() < 4 else value
    if isinstance(value, dict):
        return {key: _in_full(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_in_full, value))
    return value


def full_block(block: nn.Module) -> nn.Module:
    """A block in float32: itself, or a copy of one in half precision."""
    half = any(weight.element_size() < 4 for weight in block.parameters())
    return copy.deepcopy(block).float() if half else block


def tried_streams(layout: Layout) -> Streams:
    """Streams of a few drawn tokens, on which sums are tried, in float32 at least."""
    generator = torch.Generator().manual_seed(0)
    vocabulary = layout.model.config.get_text_config().vocab_size
    tokens = torch.randint(vocabulary, (1, _TRIED), generator=generator)
    return Streams(layout, tokens, progress=False).in_full()


def check_foldable(layout: Layout) -> None:
    """Refuse a model in whose blocks something stands between the FFN's output matrix and the stream.

    It is shown by a sum: with the matrix set to zero, a block must give what it gave less what the matrix had
    written.

    Raises
    ------
    InputError
        The sum does not hold in a block.
    """
    streams = tried_streams(layout)
    for index, block in enumerate(map(full_block, layout.blocks)):
        whole = streams.through(index, block, streams.h[index])
        silent = copy.deepcopy(block)
        layout.write(
            silent, torch.zeros_like(layout.weight_of(silent)), _zeros_like(layout.writer_of(silent).bias)
        )
        rest = streams.through(index, silent, streams.h[index])
        error = (whole.h - whole.written - rest.h).abs().max()
        if not bool(error <= TOLERANCE * whole.h.abs().max()):
            raise InputError(
                f"In block {index} of {type(layout.model).__name__} what the FFN's output matrix writes is "
                "not added to the stream as it is (a norm or a factor stands between, as in Gemma 2 and 3, "
                "Granite and post-norm models), so no map can be folded into it. Expected a model of "
                "GPT-2's, Llama's, GPT-NeoX's or GPT-J's kind."
            )


def _zeros_like(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else torch.zeros_like(bias)
