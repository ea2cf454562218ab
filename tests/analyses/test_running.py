"""Training by hand: the same steps in a loop of torch, and the same again after a kill."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from training import running
from training.running import next_token_losses, sequence_losses, train, warmed_cosine
from transformers import GPT2Config, GPT2LMHeadModel

from matlens import InputError
from matlens.models.families.wikilm import WikiLMConfig, WikiLMForCausalLM

V = 24
GENERATOR = np.random.default_rng(1)
SEQUENCES = [[2, *map(int, GENERATOR.integers(4, V, GENERATOR.integers(2, 9)))] for _ in range(30)]
HELD_OUT = [[2, 5, 6, 7, 2], [2, 23, 4]]


def make(kind: str, dropout: float = 0.1) -> Any:
    torch.manual_seed(0)
    if kind == "wikilm":
        return WikiLMForCausalLM(
            WikiLMConfig(
                vocab_size=V, d_model=8, num_layers=2, attention_heads=2, ffn_dim=12,
                max_position_embeddings=16, cutoffs=[8, 16], adaptive_factor=2.0, dropout=dropout,
            )
        )  # fmt: skip
    ends = dict.fromkeys(("bos_token_id", "eos_token_id"), 2)
    return GPT2LMHeadModel(GPT2Config(vocab_size=V, n_embd=8, n_layer=2, n_head=2, n_positions=16, **ends))


def options(folder: Path, **changes: Any) -> dict[str, Any]:
    return {
        "folder": folder, "n_updates": 6, "batch_size": 4, "every": 2, "rate": 1e-2,
    } | changes  # fmt: skip


@pytest.mark.parametrize("kind", ["wikilm", "gpt2"])
def test_losses_are_of_each_next_token(kind):
    model = make(kind).eval()
    expected = []
    with torch.no_grad():
        for tokens in HELD_OUT:
            log_p = model(torch.tensor([tokens])).logits[0].log_softmax(-1)
            expected += [-float(log_p[i - 1, tokens[i]]) for i in range(1, len(tokens))]
    ours = sequence_losses(model, HELD_OUT, batch_size=2)
    torch.testing.assert_close(ours, torch.tensor(expected), atol=1e-5, rtol=0)
    torch.testing.assert_close(sequence_losses(model, HELD_OUT, batch_size=1), ours, atol=1e-5, rtol=0)


def test_updates_are_those_of_a_plain_loop(tmp_path):
    ours, theirs = make("wikilm", dropout=0.0), make("wikilm", dropout=0.0)
    seen: dict[int, torch.Tensor] = {}

    def keep(update: int) -> None:
        seen[update] = next(ours.parameters()).detach().clone()

    run = train(ours, SEQUENCES, HELD_OUT, **options(tmp_path, n_updates=4), after_update=keep)
    optimizer = torch.optim.AdamW(theirs.parameters(), lr=1e-2, betas=(0.9, 0.98), weight_decay=0.01)
    losses = []
    assert list(seen) == [0, 1, 2, 3, 4]
    for step in range(4):
        torch.testing.assert_close(seen[step], next(theirs.parameters()))
        optimizer.param_groups[0]["lr"] = 1e-2 * warmed_cosine(step, 4)
        loss = next_token_losses(theirs, running._batch(SEQUENCES, step, 4, 0)).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    for (name, first), second in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(first, second, msg=name)
    assert [update for update, _, _ in run.curve] == [2, 4]
    assert [trained for _, trained, _ in run.curve] == pytest.approx(
        [sum(losses[:2]) / 2, sum(losses[2:]) / 2]
    )
    assert run.curve[-1][2] == pytest.approx(float(sequence_losses(theirs, HELD_OUT).mean()))
    assert run.seconds > 0
    assert not ours.training


@pytest.mark.parametrize("kind", ["wikilm", "gpt2"])
def test_a_run_that_was_killed_ends_with_the_same_weights(kind, tmp_path, monkeypatch):
    """With dropout, whose generator goes on too; what was done after the last state is done again."""
    whole, parts = make(kind), make(kind)
    expected = train(whole, SEQUENCES, HELD_OUT, **options(tmp_path / "whole"))
    counted, plain = [0], running.next_token_losses

    def killed(model: Any, batch: Any) -> Any:
        counted[0] += model.training
        if counted[0] == 4:
            raise KeyboardInterrupt
        return plain(model, batch)

    with monkeypatch.context() as patch:
        patch.setattr(running, "next_token_losses", killed)
        with pytest.raises(KeyboardInterrupt):
            train(parts, SEQUENCES, HELD_OUT, **options(tmp_path / "parts"))
    again = make(kind)
    run = train(again, SEQUENCES, HELD_OUT, **options(tmp_path / "parts"))
    assert run.curve == expected.curve
    for first, second in zip(again.parameters(), whole.parameters(), strict=True):
        assert torch.equal(first, second)
    assert train(make(kind), SEQUENCES, HELD_OUT, **options(tmp_path / "parts")).curve == run.curve


def test_the_state_of_another_training_is_refused(tmp_path):
    train(make("wikilm"), SEQUENCES, HELD_OUT, **options(tmp_path, n_updates=2))
    for changes in ({"seed": 1}, {"n_updates": 9}, {"rate": 0.1}):
        with pytest.raises(InputError, match="must be of the same training"):
            train(make("wikilm"), SEQUENCES, HELD_OUT, **options(tmp_path, n_updates=2) | changes)


def test_a_damaged_state_and_a_loss_that_is_none_are_refused(tmp_path):
    train(make("wikilm"), SEQUENCES, HELD_OUT, **options(tmp_path, n_updates=2))
    path = tmp_path / running.STATE
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(InputError, match="damaged"):
        train(make("wikilm"), SEQUENCES, HELD_OUT, **options(tmp_path, n_updates=2))
    broken = make("wikilm")
    with torch.no_grad():
        broken.lm_head.head["class_proj"].weight.fill_(math.nan)
    with pytest.raises(InputError):
        train(broken, SEQUENCES, HELD_OUT, **options(tmp_path / "b"))
