"""Plain Hugging Face models: their blocks, and the matrix that writes what an FFN adds to the stream."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from matlens.errors import InputError, checked
from matlens.models.weights import plain_model, plain_state

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge

_ATTENTION = frozenset({"attn", "attention", "self_attn", "self_attention"})
_WRITERS = ("down_proj", "c_proj", "dense_4h_to_h", "fc_out", "fc2", "w2", "wo", "proj")


@dataclass(frozen=True)
class Layout:
    """A plain model, and the path of its list of blocks."""

    model: Any
    path: str

    @classmethod
    def from_model(cls, model: Any) -> Layout:
        """Find the blocks.

        Raises
        ------
        InputError
            The model predicts no next token, or its blocks are not found.
        """
        n_layers = model.config.get_text_config().num_hidden_layers
        lists = [
            (path, module)
            for path, module in model.named_modules()
            if isinstance(module, nn.ModuleList) and len(module) == n_layers and path.count(".") < 4
        ]
        if model.get_output_embeddings() is None or not lists:
            raise InputError(
                f"{type(model).__name__} is no model that predicts the next token from a list of {n_layers} "
                "blocks: expected a decoder such as GPT-2, Llama or GPT-NeoX."
            )
        return cls(model, lists[0][0])

    @cached_property
    def writer(self) -> str:
        """The path, in each block, of the matrix that writes what its FFN adds to the stream.

        Raises
        ------
        InputError
            There is not one, as in a mixture of experts: blocks can be left out of it, but nothing folded.
        """
        return _writer_path(self.blocks[0], type(self.model).__name__)

    @property
    def blocks(self) -> nn.ModuleList:
        """The blocks of the model."""
        blocks = self.model.get_submodule(self.path)
        assert isinstance(blocks, nn.ModuleList)
        return blocks

    def writer_of(self, block: nn.Module) -> Any:
        """The module that writes what a block's FFN adds to the stream."""
        return block.get_submodule(self.writer)

    def weight_of(self, block: nn.Module) -> Float[Tensor, "d_model d_mlp"]:
        """Its matrix, as one that is multiplied from the left; GPT-2 keeps it the other way round."""
        module = self.writer_of(block)
        return module.weight if isinstance(module, nn.Linear) else module.weight.T

    @torch.no_grad()
    def write(self, block: nn.Module, weight: Tensor, bias: Tensor | None) -> None:
        """Put a matrix and a bias in the place of a block's own; a bias where the block has one."""
        module = self.writer_of(block)
        matrix = weight if isinstance(module, nn.Linear) else weight.T
        module.weight.copy_(matrix.to(module.weight.dtype))
        if bias is not None:
            module.bias.copy_(bias.to(module.bias.dtype))


def matrices(block: nn.Module, names: Sequence[str], *, of_attention: bool) -> list[str]:
    """Paths of the modules of these names that have a matrix, in a block's attention or outside of it."""
    return [
        path
        for path, module in block.named_modules()
        if path.rpartition(".")[2] in names
        and getattr(module, "weight", torch.empty(0)).ndim == 2
        and bool(_ATTENTION & set(path.split("."))) == of_attention
    ]


def _writer_path(block: nn.Module, name: str) -> str:
    paths = matrices(block, _WRITERS, of_attention=False)
    if len(paths) != 1:
        what = "more than one matrix" if paths else "no matrix"
        raise InputError(
            f"The blocks of {name} have {what} that writes what their FFN adds to the stream "
            f"({', '.join(paths[:4]) or 'none of ' + ', '.join(_WRITERS)}). Expected one, as in GPT-2, "
            "Llama, GPT-NeoX and GPT-J; FFNs of several experts cannot be folded into. With method='out' "
            "(--method out) blocks are left out alone, of such a model too."
        )
    return paths[0]


@checked
def plain_copy(model: TransformerBridge) -> Any:
    """The plain Hugging Face model under a bridge: the same numbers, in memory of its own.

    Raises
    ------
    InputError
        The model's configuration does not make it, as where its weights are kept quantized.
    """
    source = model.original_model
    copied: Any = plain_model(model, as_loaded=True)
    if copied is None:
        raise InputError(
            f"{model.cfg.model_name} cannot be built from its configuration alone. Expected a model of "
            "transformers without code of its own."
        )
    state = {name: tensor.clone() for name, tensor in plain_state(model).items()}
    if len(devices := {tensor.device for tensor in state.values()}) > 1:
        raise InputError(
            f"{model.cfg.model_name} lies on the devices {', '.join(sorted(map(str, devices)))}, and a plain "
            "copy of it could not be run. Expected a model on one device."
        )
    wanted = {name for name, _ in [*copied.named_parameters(), *copied.named_buffers()]}
    if wanted - state.keys():
        missing = ", ".join(sorted(wanted - state.keys())[:3])
        raise InputError(
            f"{model.cfg.model_name} has no weights for {missing}. Expected a model as matlens.load gives it."
        )
    for name in wanted:
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
