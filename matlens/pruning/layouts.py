"""Blocks and matrices of Hugging Face models, and their residual streams on a text."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from matlens.errors import InputError, checked
from matlens.models.weights import plain_model, plain_state
from matlens.numerics import check_finite, in_float64, log_softmax
from matlens.parallel import Bar

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge

    from matlens.data.examples import Examples

_TOKENS = 1024  # of a batch
_TRIED = 6  # tokens to check the sum of a block
_TOLERANCE = 1e-4  # relative to the largest output of a block
MOST_BYTES = 8 << 30  # of the streams of all layers; set matlens.pruning.layouts.MOST_BYTES for more


@dataclass(frozen=True)
class Layout:
    """A plain model, and where its blocks and their output matrices are.

    Attributes
    ----------
    path
        Of the list of blocks.
    ffn, attention
        In a block, of the modules that end its FFN and its attention; None if there is none.
    """

    model: Any
    path: str
    ffn: str | None = None
    attention: str | None = None

    @classmethod
    def from_model(cls, model: TransformerBridge) -> Layout:
        """The layout of a plain copy of a model."""
        return cls(
            plain_copy(model), model.adapter.component_mapping["blocks"].name,
            _path_of(model.blocks[0], "mlp", "out"), _path_of(model.blocks[0], "attn", "o"),
        )  # fmt: skip

    @property
    def blocks(self) -> nn.ModuleList:
        """The blocks of the model."""
        blocks = self.model.get_submodule(self.path)
        assert isinstance(blocks, nn.ModuleList)
        return blocks

    @contextmanager
    def with_blocks(self, blocks: Sequence[nn.Module]) -> Iterator[Any]:
        """Run the model with other blocks instead of its own."""
        own, (parent, _, name) = self.blocks, self.path.rpartition(".")
        place = self.model.get_submodule(parent)
        setattr(place, name, nn.ModuleList(blocks))
        try:
            yield self.model
        finally:
            setattr(place, name, own)

    def writer_of(self, block: nn.Module) -> Any:
        """The output module of a block's FFN; raises InputError if there is none."""
        if self.ffn is None:
            raise InputError(
                f"The FFN of {type(self.model).__name__} must have one output matrix to fold a map into. Use "
                "method='out' (--method out)."
            )
        return block.get_submodule(self.ffn)

    def attention_of(self, block: nn.Module) -> Any:
        """The module whose output a block's attention adds to the residual stream."""
        if self.attention is None:
            raise InputError(f"The attention of {type(self.model).__name__} must have one output matrix.")
        return block.get_submodule(self.attention)

    def without_attention(self, block: nn.Module) -> nn.Module:
        """A copy of a block whose attention output is zero."""
        silent = copy.deepcopy(block)
        silence(self.attention_of(silent))
        return silent

    def weight_of(self, block: nn.Module) -> Float[Tensor, "d_model d_mlp"]:
        """Its matrix ``[d_out, d_in]``; GPT-2 stores the transpose."""
        module = self.writer_of(block)
        return module.weight if isinstance(module, nn.Linear) else module.weight.T

    @torch.no_grad()
    def write(self, block: nn.Module, weight: Tensor, bias: Tensor | None) -> None:
        """Replace the matrix of a block, and its bias if it has one."""
        module = self.writer_of(block)
        matrix = weight if isinstance(module, nn.Linear) else weight.T
        module.weight.copy_(matrix.to(module.weight.dtype))
        if bias is not None:
            module.bias.copy_(bias.to(module.bias.dtype))


def _path_of(component: Any, *names: str) -> str | None:
    """The path of a component of a block in the plain model, by the names of a bridge."""
    path = []
    for name in names:
        component = component.submodules.get(name)
        if component is None:
            return None
        path.append(component.name)
    return ".".join(filter(None, path))


@torch.no_grad()
def silence(module: nn.Module) -> None:
    """Set the output of a linear module to zero."""
    for parameter in module.parameters():
        parameter.zero_()


@checked
@torch.inference_mode(False)  # its weights can be trained
def plain_copy(model: TransformerBridge) -> Any:
    """A copy of the plain Hugging Face model in a bridge."""
    source = model.original_model
    copied: Any = plain_model(model, as_loaded=True)
    if copied is None:
        raise InputError(f"{model.cfg.model_name} cannot be built from its configuration alone.")
    state = {name: tensor.clone() for name, tensor in plain_state(model).items()}
    if len(devices := {tensor.device for tensor in state.values()}) > 1:
        raise InputError(f"The model must be on one device, got {', '.join(sorted(map(str, devices)))}.")
    names = {name for name, _ in [*copied.named_parameters(), *copied.named_buffers()]}
    if names - state.keys():
        missing = ", ".join(sorted(names - state.keys())[:3])
        raise InputError(f"{model.cfg.model_name} has no weights for {missing}. Use matlens.load.")
    for name in names:
        place, _, last = name.rpartition(".")
        module = copied.get_submodule(place)
        if last in module._parameters:
            module._parameters[last] = nn.Parameter(state[name])
        else:
            module._buffers[last] = state[name]
    copied.tie_weights()
    copied.config.use_cache = True  # a bridge keeps none
    if getattr(source, "generation_config", None) is not None:
        copied.generation_config = copy.deepcopy(source.generation_config)
    return copied.eval()


# Streams


def full_windows(windows: Examples) -> Int[Tensor, "n length"]:
    """The tokens of the windows that are as long as the first."""
    length = int(windows.lengths[0])
    starts = windows.offsets[:-1][windows.lengths == length]
    return torch.stack([torch.from_numpy(windows.tokens[start : start + length]) for start in starts]).long()


class Streams:
    """The streams ``h^0 .. h^L`` on texts of equal length."""

    def __init__(self, layout: Layout, tokens: Int[Tensor, "n length"], *, progress: bool = True) -> None:
        self.layout, self.tokens = layout, tokens
        config = layout.model.config.get_text_config()
        of_vector = config.hidden_size * layout.model.dtype.itemsize
        size = (config.num_hidden_layers + 1) * tokens.numel() * of_vector
        if size > MOST_BYTES:
            raise InputError(
                f"The residual streams of {tokens.numel():,} tokens must fit into {MOST_BYTES / 2**30:.0f} "
                f"GiB, got {size / 2**30:.1f}. Use fewer or shorter windows, or set "
                "matlens.pruning.layouts.MOST_BYTES."
            )
        self._step = max(1, _TOKENS // tokens.shape[1])
        self._rest: tuple[Any, ...] | None = None  # what blocks return after their vectors
        self._calls: list[list[tuple[tuple[Any, ...], dict[str, Any]]]] = []
        self.h: list[Tensor] = self._run(progress)

    @torch.no_grad()
    def _run(self, progress: bool) -> list[Tensor]:
        """Run the model, and record the arguments of each block."""
        calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        seen: list[Tensor] = []

        def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            rest = dict(kwargs)
            seen.append((args[0] if args else rest.pop("hidden_states")).cpu())
            calls.append((args[1:], rest))

        def after(_: nn.Module, __: Any, output: Any) -> None:
            self._rest = tuple(output[1:]) if isinstance(output, tuple | list) else None
            seen.append(_first(output).cpu())

        blocks, parts = self.layout.blocks, []
        with ExitStack() as stack:
            for block in blocks:
                stack.callback(block.register_forward_pre_hook(before, with_kwargs=True).remove)
            stack.callback(blocks[-1].register_forward_hook(after).remove)
            bar = stack.enter_context(
                Bar(total=len(self.tokens), desc="streams", unit="window", disable=not progress)
            )
            for batch in self.tokens.split(self._step):
                self.layout.model(batch.to(self.layout.model.device), use_cache=False)
                self._calls.append(calls[:])
                parts.append(seen[:])
                calls.clear()
                seen.clear()
                bar.update(len(batch))
        streams = [torch.cat(layer) for layer in zip(*parts, strict=True)]
        for layer, h in enumerate(streams):
            check_finite(h, f"h.{layer}")
        return streams

    @classmethod
    def tried(cls, layout: Layout) -> Streams:
        """Residual streams of a few sampled tokens for checks of sums, at least float32.

        In float32, so that rounding hides no difference; see `full_block`.
        """
        generator = torch.Generator().manual_seed(0)
        vocabulary = layout.model.config.get_text_config().vocab_size
        tokens = torch.randint(vocabulary, (1, _TRIED), generator=generator)
        streams = cls(layout, tokens, progress=False)
        streams._calls, streams.h = _in_full(streams._calls), _in_full(streams.h)
        return streams

    def beginning(self, n_tokens: int) -> Streams:
        """Streams of the first texts: at least this many tokens, in full batches."""
        n_batches = max(1, -(-n_tokens // (self._step * self.tokens.shape[1])))
        part = copy.copy(self)
        part._calls = self._calls[:n_batches]
        part.tokens = self.tokens[: n_batches * self._step]
        part.h = [h[: n_batches * self._step] for h in self.h]
        return part

    @torch.no_grad()
    def after(self, index: int, block: nn.Module, h: Float[Tensor, "n length d_model"]) -> Tensor:
        """The stream after a block, or another in its place, run on a stream before it."""
        device = self.layout.model.device
        return torch.cat(
            [
                _first(block(part.to(device), *calls[index][0], **calls[index][1])).cpu()
                for part, calls in zip(h.split(self._step), self._calls, strict=True)
            ]
        )

    def through(
        self, index: int, block: nn.Module, h: Float[Tensor, "n length d_model"], module: nn.Module
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The stream after a block, and the input and output of one of its linear modules."""
        reads: list[Tensor] = []
        writes: list[Tensor] = []

        def hook(_: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
            reads.append(args[0].cpu())
            writes.append(output.to("cpu", copy=True))  # some blocks add in place

        handle = module.register_forward_hook(hook)
        try:
            out = self.after(index, block, h)
        finally:
            handle.remove()
        read, written = (
            torch.cat([x.reshape(-1, h.shape[1], x.shape[-1]) for x in parts]) for parts in (reads, writes)
        )
        return out, read, written

    @torch.no_grad()
    def losses(self, h: Float[Tensor, "n length d_model"]) -> Float[Tensor, " n"]:
        """Mean next-token loss of each text, from an approximation of the last layer."""
        losses = []
        for part, tokens in zip(h.split(self._step), self.tokens.split(self._step), strict=True):
            log_p = self.log_probs(self.layout, len(self.layout.blocks), part, tokens)[:, :-1]
            of_next = log_p.gather(2, tokens[:, 1:, None].to(log_p.device))[..., 0]
            losses.append(-in_float64(of_next).mean(1).cpu())
        return torch.cat(losses)

    def log_probs(
        self, layout: Layout, start: int, h: Float[Tensor, "n length d_model"], tokens: Tensor
    ) -> Float[Tensor, "n length d_vocab"]:
        """Log-probabilities of a model from the residual stream before block ``start``."""
        device = layout.model.device
        # Inference tensors cannot be part of a computation with gradients.
        known = _ConstantBlock(h.clone().to(device), self._rest)
        with layout.with_blocks([known] * start + list(layout.blocks[start:])) as model:
            return log_softmax(model(tokens.to(device), use_cache=False).logits.float())


class _ConstantBlock(nn.Module):
    """A block that returns a stored value."""

    def __init__(self, h: Tensor, rest: tuple[Any, ...] | None) -> None:
        super().__init__()
        self._returned = h if rest is None else (h, *rest)

    def forward(self, *_: Any, **__: Any) -> Any:
        """Return the stored value for any input."""
        return self._returned


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


def differ(result: Tensor, expected: Tensor, scale: Tensor) -> bool:
    """Whether streams differ by more than rounding at ``scale``, or are not finite."""
    return not bool((result - expected).abs().max() <= _TOLERANCE * scale.abs().max())
