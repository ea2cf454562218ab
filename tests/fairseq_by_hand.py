"""Checkpoints as fairseq writes them, made without matlens, and what their weights compute by torch alone."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

WIDTH, HEADS, LAYERS, HIDDEN, FACTOR = 16, 4, 3, 24, 2
WORDS = [f"w{i}" for i in range(50)]
N_WORDS, CUTOFFS = 56, [14, 30]  # special words, words and fillers
BANDS = [(0, 14), (14, 30), (30, 56)]
SOFTMAX, EMBEDDINGS = "decoder.adaptive_softmax", "decoder.embed_tokens.embeddings"


def settings(**changes: Any) -> argparse.Namespace:
    """The arguments that fairseq keeps of a training of its transformer_lm_wiki103."""
    written = {
        "arch": "transformer_lm_wiki103", "task": "language_modeling", "decoder_layers": LAYERS,
        "decoder_attention_heads": HEADS, "decoder_embed_dim": WIDTH, "decoder_ffn_embed_dim": HIDDEN,
        "adaptive_input": True, "adaptive_input_cutoff": "14,30", "adaptive_softmax_cutoff": "14,30",
        "adaptive_input_factor": FACTOR, "adaptive_softmax_factor": FACTOR, "tie_adaptive_weights": True,
        "tie_adaptive_proj": True, "no_decoder_final_norm": True, "tokens_per_sample": 48,
        "adaptive_softmax_dropout": 0.2, "dropout": 0.3,
    }  # fmt: skip
    return argparse.Namespace(**written | changes)


def weights(args: argparse.Namespace, *, seed: int = 0) -> dict[str, Tensor]:
    """Random weights of the model that the arguments describe, by fairseq's names."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator) * 0.3

    made = {"decoder.version": torch.tensor([3.0]), f"{SOFTMAX}.version": torch.tensor([1])}
    made["decoder.embed_positions._float_tensor"] = torch.zeros(1)
    for band, (start, end) in enumerate(BANDS):
        width = WIDTH // FACTOR**band
        made[f"{EMBEDDINGS}.{band}.0.weight"] = random(end - start, width)
        made[f"{EMBEDDINGS}.{band}.1.weight"] = random(WIDTH, width)
    made[f"{SOFTMAX}.head.word_proj.weight"] = made[f"{EMBEDDINGS}.0.0.weight"]
    made[f"{SOFTMAX}.head.class_proj.weight"] = random(len(CUTOFFS), WIDTH)
    for band in range(1, len(BANDS)):
        for ours, given in ((0, 1), (2, 0)):
            made[f"{SOFTMAX}.tail.{band - 1}.{ours}.weight"] = made[f"{EMBEDDINGS}.{band}.{given}.weight"]
    for layer in range(args.decoder_layers):
        place = f"decoder.layers.{layer}"
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            made[f"{place}.self_attn.{name}.weight"] = random(WIDTH, WIDTH)
            made[f"{place}.self_attn.{name}.bias"] = random(WIDTH)
        for name, shape in (("fc1", (HIDDEN, WIDTH)), ("fc2", (WIDTH, HIDDEN))):
            made[f"{place}.{name}.weight"], made[f"{place}.{name}.bias"] = random(*shape), random(shape[0])
        for name in ("self_attn_layer_norm", "final_layer_norm"):
            made[f"{place}.{name}.weight"], made[f"{place}.{name}.bias"] = 1 + random(WIDTH), random(WIDTH)
    if not args.no_decoder_final_norm:
        made["decoder.layer_norm.weight"], made["decoder.layer_norm.bias"] = 1 + random(WIDTH), random(WIDTH)
    return made


def save(folder: Path, args: Any = None, tensors: Any = None, **more: Any) -> Path:
    """Write a checkpoint and its dictionary, as fairseq does."""
    args = settings() if args is None else args
    folder.mkdir(parents=True, exist_ok=True)
    content = {"args": args, "model": weights(args) if tensors is None else tensors, **more}
    torch.save(content, folder / "model.pt")
    fillers = [f"madeupword{i:04d}" for i in range(N_WORDS - 4 - len(WORDS))]
    lines = [f"{word} {100 - i}\n" for i, word in enumerate(WORDS)] + [f"{word} 0\n" for word in fillers]
    (folder / "dict.txt").write_text("".join(lines))
    return folder / "model.pt"


def output_layer(tensors: dict[str, Tensor]) -> torch.nn.AdaptiveLogSoftmaxWithLoss:
    """torch's own adaptive softmax, with these weights."""
    layer = torch.nn.AdaptiveLogSoftmaxWithLoss(WIDTH, N_WORDS, CUTOFFS, div_value=FACTOR)
    head = [tensors[f"{SOFTMAX}.head.{part}_proj.weight"] for part in ("word", "class")]
    state = {"head.weight": torch.cat(head)}
    for i in range(len(CUTOFFS)):
        state[f"tail.{i}.0.weight"] = tensors[f"{SOFTMAX}.tail.{i}.0.weight"].T
        state[f"tail.{i}.1.weight"] = tensors[f"{SOFTMAX}.tail.{i}.2.weight"]
    layer.load_state_dict(state)
    return layer


def positions(length: int) -> Tensor:
    """The vectors of the first positions, number by number."""
    half = WIDTH // 2
    rows = []
    for place in range(2, length + 2):  # behind the padding's number, which is 1
        angles = [place / 10_000 ** (i / (half - 1)) for i in range(half)]
        rows.append([*map(math.sin, angles), *map(math.cos, angles)])
    return torch.tensor(rows)


@torch.no_grad()
def run(args: argparse.Namespace, tensors: dict[str, Tensor], tokens: list[int]) -> dict[str, Tensor]:
    """Every vector of one sentence, ``[length, width]`` by site, and ``"logits"``."""

    def linear(x: Tensor, place: str) -> Tensor:
        return functional.linear(x, tensors[f"{place}.weight"], tensors[f"{place}.bias"])

    def norm(x: Tensor, place: str) -> Tensor:
        return functional.layer_norm(x, (WIDTH,), tensors[f"{place}.weight"], tensors[f"{place}.bias"])

    rows = []
    for token in tokens:
        band = next(i for i, (start, end) in enumerate(BANDS) if start <= token < end)
        row = tensors[f"{EMBEDDINGS}.{band}.0.weight"][token - BANDS[band][0]]
        rows.append(tensors[f"{EMBEDDINGS}.{band}.1.weight"] @ row)
    h = math.sqrt(WIDTH) * torch.stack(rows) + positions(len(tokens))
    seen = {"h.0": h}
    for layer in range(args.decoder_layers):
        place = f"decoder.layers.{layer}"
        x = norm(h, f"{place}.self_attn_layer_norm")
        q, k, v = (
            linear(x, f"{place}.self_attn.{letter}_proj").view(len(tokens), HEADS, -1).transpose(0, 1)
            for letter in "qkv"
        )
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        written = linear(mixed.transpose(0, 1).reshape(len(tokens), WIDTH), f"{place}.self_attn.out_proj")
        mid = h + written
        given = norm(mid, f"{place}.final_layer_norm")
        coefficients = linear(given, f"{place}.fc1").relu()
        update = linear(coefficients, f"{place}.fc2")
        h = mid + update
        seen |= {
            f"ln1_out.{layer}": x, f"attn_out.{layer}": written, f"mid.{layer}": mid,
            f"ffn_in.{layer}": given, f"ffn_post.{layer}": coefficients, f"ffn_out.{layer}": update,
            f"h.{layer + 1}": h,
        }  # fmt: skip
    if not args.no_decoder_final_norm:
        h = norm(h, "decoder.layer_norm")
    seen["logits"] = output_layer(tensors).log_prob(h)
    return seen
