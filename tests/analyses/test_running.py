"""Small models: their updates are those of a loop of torch, after a kill too, and their tables by hand."""

from __future__ import annotations

import math
import shutil
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from analysing import SCRIPTS, run
from training import running
from training.running import next_token_losses, sequence_losses
from training.tables import NgramModel
from transformers import AutoModelForMaskedLM, GPT2Config, GPT2LMHeadModel

import matlens
from matlens import InputError
from matlens.models import ModelLayout
from matlens.models.families.wikilm import WikiLMConfig, WikiLMForCausalLM

V, GENERATOR = 24, np.random.default_rng(1)
SEQUENCES = [[2, *map(int, GENERATOR.integers(4, V, GENERATOR.integers(2, 9)))] for _ in range(30)]
HELD_OUT = [[2, 5, 6, 7, 2], [2, 23, 4]]
OPTIONS: dict[str, Any] = {"n_updates": 6, "batch_size": 4, "every": 2, "rate": 1e-2}


def make(kind: str, dropout: float = 0.1) -> Any:
    torch.manual_seed(0)
    if kind == "wikilm":
        config = WikiLMConfig(
            vocab_size=V, d_model=8, num_layers=2, attention_heads=2, ffn_dim=12,
            max_position_embeddings=16, cutoffs=[8, 16], adaptive_factor=2.0, dropout=dropout,
        )  # fmt: skip
        return WikiLMForCausalLM(config)
    config = GPT2Config(
        vocab_size=V, n_embd=8, n_layer=2, n_head=2, n_positions=16, bos_token_id=2, eos_token_id=2,
        embd_pdrop=dropout, attn_pdrop=dropout, resid_pdrop=dropout,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def losses_by_hand(model: Any, texts: list[list[int]]) -> list[float]:
    """Of each token but the first."""
    losses = []
    for tokens in texts:
        with torch.no_grad():
            log_p = model(torch.tensor([tokens]))[0][0].log_softmax(-1)
        losses += [-float(log_p[i - 1, tokens[i]]) for i in range(1, len(tokens))]
    return losses


@pytest.mark.parametrize("kind", ["wikilm", "gpt2"])
def test_updates_are_those_of_a_plain_loop(kind, tmp_path):
    ours, theirs = make(kind, dropout=0.0), make(kind, dropout=0.0)
    for size in (1, 2):
        assert sequence_losses(ours, HELD_OUT, batch_size=size).tolist() == pytest.approx(
            losses_by_hand(ours, HELD_OUT), abs=1e-5
        )
    seen: dict[int, torch.Tensor] = {}

    def keep(update: int) -> None:
        seen[update] = next(ours.parameters()).detach().clone()

    options = OPTIONS | {"n_updates": 4, "after_update": keep}
    run = running.train(ours, SEQUENCES, HELD_OUT, folder=tmp_path, **options)
    optimizer = torch.optim.AdamW(theirs.parameters(), lr=1e-2, betas=(0.9, 0.98), weight_decay=0.01)
    losses, batches = [], []
    assert list(seen) == [0, 1, 2, 3, 4]
    for step in range(4):
        torch.testing.assert_close(seen[step], next(theirs.parameters()))
        optimizer.param_groups[0]["lr"] = (
            1e-2 * min(1, (step + 1) / 0.4) * (1 + math.cos(math.pi * step / 4)) / 2
        )
        batches += running._batch(SEQUENCES, step, 4, 0)
        loss = next_token_losses(theirs, batches[-4:]).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    assert len({*map(tuple, batches)}) == 16  # no sentence twice in an epoch
    for (name, first), second in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(first, second, msg=name)
    curve = np.array(run.curve)
    assert curve[:, 0].tolist() == [2, 4]
    assert curve[:, 1] == pytest.approx([sum(losses[:2]) / 2, sum(losses[2:]) / 2])
    assert curve[-1, 2] == pytest.approx(np.mean(losses_by_hand(theirs.eval(), HELD_OUT)))
    assert run.seconds > 0
    assert not ours.training


@pytest.mark.parametrize("kind", ["wikilm", "gpt2"])
def test_a_run_that_was_killed_ends_with_the_same_weights(kind, tmp_path, monkeypatch):
    """With dropout, whose generator goes on too; what was done after the last state is done again."""
    whole, counted, plain = make(kind), [0], running.next_token_losses
    train = partial(
        running.train, sequences=SEQUENCES, held_out=HELD_OUT, folder=tmp_path / "parts", **OPTIONS
    )
    expected = train(whole, folder=tmp_path / "whole")

    def killed(model: Any, batch: Any) -> Any:
        counted[0] += model.training
        if counted[0] == 4:
            raise KeyboardInterrupt
        return plain(model, batch)

    with monkeypatch.context() as patch:
        patch.setattr(running, "next_token_losses", killed)
        with pytest.raises(KeyboardInterrupt):
            train(make(kind))
    again = make(kind)
    assert train(again).curve == expected.curve
    for first, second in zip(again.parameters(), whole.parameters(), strict=True):
        assert torch.equal(first, second)
    assert train(make(kind)).curve == expected.curve
    for changes in ({"seed": 1}, {"n_updates": 9}, {"rate": 0.1}, {"sequences": SEQUENCES[1:]}):
        with pytest.raises(InputError, match="must be of the same training"):
            train(make(kind), **changes)
    path = tmp_path / "parts" / running.STATE
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(InputError, match="damaged"):
        train(make(kind))
    broken = make(kind)
    with torch.no_grad():
        next(broken.parameters()).fill_(math.nan)
    with pytest.raises(InputError):
        train(broken, folder=tmp_path / "broken")


# The scripts

SIZES: dict[str, list[object]] = {
    "small_wikilm": ["--words", 64, "--layers", 2, "--width", 16],
    "small_gpts": ["--pieces", 280, "--size", 2],
}
MODELS = {"small_wikilm": "small-wikilm/checkpoint.pt", "small_gpts": "small-gpt-2"}


@pytest.mark.parametrize("name", SIZES)
def test_a_small_model_is_trained_and_compared_with_ngrams(name, corpora, tmp_path):
    words = corpora / "words.txt"
    options = ["--corpus", words, "--train", 80, "--val", 20, "--updates", 4, "--out", tmp_path, *SIZES[name]]
    run(name, *options)
    table, model = pd.read_csv(tmp_path / f"{name}.csv"), matlens.load(tmp_path / MODELS[name], device="cpu")
    assert ModelLayout.from_model(model).wiring.name == "pre-norm"
    end, tokenizer = model.tokenizer.eos_token_id, model.tokenizer
    texts = [
        [[end, *tokenizer(text, add_special_tokens=False)["input_ids"], end] for text in part.sentences]
        for part in matlens.load_corpus(words).split(n_train=80, n_validation=20)
    ]
    losses = losses_by_hand(lambda tokens: (model(tokens),), texts[1])
    expected = {"model": (math.exp(np.mean(losses)), len(losses))}
    for order, method in enumerate(("unigrams", "bigrams", "trigrams"), start=1):
        ngrams = NgramModel(texts[0], d_vocab=len(tokenizer), order=order)
        expected[method] = ngrams.perplexity(texts[1])
    rows = table[table["metric"] == "perplexity"].set_index("method")[["value", "n"]]
    assert {*rows.index} == {*expected}
    for method, numbers in expected.items():
        assert rows.loc[method].tolist() == pytest.approx(numbers, rel=1e-4)
    (state,) = (tmp_path / MODELS[name].split("/")[0]).rglob(running.STATE)
    ((update, *of_parts),) = torch.load(state, weights_only=True)["run"]["curve"]
    curve = table[table["metric"] == "loss"].set_index("method")
    assert curve.loc[["training", "held-out"], "value"].tolist() == pytest.approx(of_parts)
    assert {*curve["k"]} == {update} == {4}
    before = (tmp_path / f"{name}.csv").read_bytes()
    run(name, *options)  # it is finished
    assert (tmp_path / f"{name}.csv").read_bytes() == before


def test_the_small_bert_learns_and_can_be_analysed(corpora, plain_model, model_folder, tmp_path):
    trunk, words = tmp_path / "trunk", corpora / "words.txt"
    plain_model("bert").bert.save_pretrained(trunk)  # without its head
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(model_folder("bert") / name, trunk)
    held_out, surprisal = matlens.load_corpus(words).split(n_train=80, n_validation=40)[1], []
    for steps in (1, 150):
        out = tmp_path / f"bert-{steps}"
        run(
            "small_bert",
            "--trunk",
            trunk,
            "--train",
            80,
            "--val",
            40,
            "--corpus",
            words,
            "--steps",
            steps,
            "--out",
            out,
        )
        loaded = matlens.load(str(out / "small-bert"), device="cpu")
        examples = matlens.make_examples(loaded, held_out, sample_special=False)
        bert, hits, losses = AutoModelForMaskedLM.from_pretrained(out / "small-bert").eval(), [], []
        for text, ids, at in zip(
            held_out.sentences,
            np.split(examples.tokens, examples.offsets[1:-1]),
            examples.positions,
            strict=True,
        ):
            true = loaded.tokenizer(text)["input_ids"][at]
            with torch.no_grad():
                log_p = bert(torch.from_numpy(ids)[None]).logits[0, at].log_softmax(-1)
            hits.append(int(log_p.argmax()) == true)
            losses.append(-float(log_p[true]))
        (row,) = pd.read_csv(out / "small_bert.csv").itertuples()
        assert (row.value, row.n) == (pytest.approx(np.mean(hits)), 40)
        surprisal.append(np.mean(losses))
    assert surprisal[1] < surprisal[0] - 0.1


def test_small_models_are_trained_on_none_of_what_others_are_validated_on():
    """Without options all of them split a corpus alike."""
    for name in ("small_bert", "small_gpts", "small_wikilm", "paper_a_fig5_masked", "paper_a_fig7_models"):
        (call,) = (line for line in SCRIPTS[name].read_text().splitlines() if "run_study(main" in line)
        assert "train=" not in call
        assert "val=" not in call
