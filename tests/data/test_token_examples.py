"""Tokens that the user already has: read as they are, at any positions, and refused where they cannot be."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from conftest import N_CTX, assert_near, load_plain, plain_vectors, save_with_ends
from patched_models import LENGTHS, SENTENCES, padded, run_variants
from sentences import positions_of, sentences_of
from transformers import BatchEncoding

import matlens
from matlens import InputError, LinearMap, make_token_examples
from matlens.activations import Activations, stream
from matlens.ffn import Trace, text_losses
from matlens.patching import Replacement, Variant

ANSWERS = [[3, 4, 9], [0], [0], [2, 6]]


def marks(side: str) -> torch.Tensor:
    """The answers as a mask over the padded batch."""
    _, real = padded(SENTENCES, side)
    mask = torch.zeros_like(real, dtype=torch.bool)
    for s, positions in enumerate(ANSWERS):
        mask[s, real[s].nonzero()[:, 0][torch.tensor(positions)]] = True
    return mask


def ways() -> dict[str, tuple[Any, dict[str, Any]]]:
    """The same sentences with the same positions, as users have them."""
    right, left = padded(SENTENCES, "right"), padded(SENTENCES, "left")
    ragged = [[p in at for p in range(n)] for n, at in zip(LENGTHS, ANSWERS, strict=True)]
    negative = [[p - n for p in at] for n, at in zip(LENGTHS, ANSWERS, strict=True)]
    return {
        "lists": (SENTENCES, {"positions": ANSWERS}),
        "from the end": (SENTENCES, {"positions": negative}),
        "arrays": (
            [np.array(s, dtype=np.int32) for s in SENTENCES], {"positions": [np.array(at) for at in ANSWERS]}
        ),
        "left": (left[0], {"attention_mask": left[1].bool(), "positions": ANSWERS}),
        "right with marks": (
            right[0].numpy(), {"attention_mask": right[1].numpy(), "positions": marks("right")},
        ),
        "encoding": (
            BatchEncoding({"input_ids": left[0], "attention_mask": left[1], "length": LENGTHS}),
            {"positions": marks("left").numpy()},
        ),
        "encoding of lists": (
            {"input_ids": SENTENCES, "attention_mask": [[1] * n for n in LENGTHS]}, {"positions": ragged},
        ),
    }  # fmt: skip


@pytest.mark.parametrize("way", ways())
def test_all_ways_give_the_same_sentences_and_positions(way, small_model):
    tokens, options = ways()[way]
    examples = make_token_examples(small_model("gpt2"), tokens, name="answers", **options)
    assert sentences_of(examples) == SENTENCES
    assert positions_of(examples) == ANSWERS
    assert (len(examples), examples.n_positions) == (4, 7)
    assert examples.provenance["given_as"] == "tokens"
    assert (examples.provenance["corpus"], examples.provenance["n_positions"]) == ("answers", 7)
    expected = make_token_examples(small_model("gpt2"), SENTENCES, positions=ANSWERS)
    assert examples.fingerprint == expected.fingerprint


def test_tokens_of_another_vocabulary_raise(tmp_path):
    own = matlens.load(save_with_ends(tmp_path / "own"), device="cpu")
    folder = save_with_ends(tmp_path / "other")
    content = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["w7"], vocabulary["w9"] = vocabulary["w9"], vocabulary["w7"]
    (folder / "tokenizer.json").write_text(json.dumps(content))
    other = matlens.load(folder, device="cpu")
    examples = make_token_examples(own, SENTENCES)
    uses = [
        lambda model: matlens.collect(model, examples, progress=False),
        lambda model: text_losses(model, examples, progress=False),
        lambda model: Trace.run(model, examples, k=2, progress=False),
        lambda model: matlens.Updates.run(model, examples, progress=False),
    ]
    for use in uses:
        use(own)
        with pytest.raises(InputError, match="another tokenizer"):
            use(other)


def test_tokens_are_read_whatever_the_model_adds_to_texts(tmp_path):
    """Ids have no BOS that a model could add."""
    own = matlens.load(save_with_ends(tmp_path / "own"), device="cpu")
    other = matlens.load(save_with_ends(tmp_path / "other", front=True), device="cpu")
    examples = make_token_examples(own, SENTENCES)
    assert matlens.collect(other, examples, progress=False).examples.fingerprint == examples.fingerprint


def test_one_position_each_and_the_last(small_model):
    model, (tokens, mask) = small_model("gpt2"), padded(SENTENCES, "left")
    last = make_token_examples(model, tokens, attention_mask=mask)
    assert positions_of(last) == [[n - 1] for n in LENGTHS]
    one = make_token_examples(model, SENTENCES, positions=[1, -1, 0, np.int8(-7)])
    assert positions_of(one) == [[1], [3], [0], [0]]
    several = make_token_examples(model, SENTENCES, positions=[[1, 0], [0], [0], [0]])
    shifted = make_token_examples(model, SENTENCES, positions=[[0], [0, 1], [0], [0]])
    assert positions_of(several)[0] == [1, 0]  # rows stand in the order that was asked for
    assert len({made.fingerprint for made in (last, one, several, shifted)}) == 4


@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_rows_of_a_mask_are_those_of_hugging_face(name, small_model, model_folder, tmp_path):
    """In memory, streamed, on disk and read back; against a pass of the plain model over each sentence."""
    model, plain = small_model(name), load_plain(name, model_folder(name))
    tokens, mask = padded(SENTENCES, "left")
    examples = make_token_examples(model, tokens, attention_mask=mask, positions=marks("left"))
    alone = [plain_vectors(name, plain, torch.tensor(sentence)) for sentence in SENTENCES]
    kept = matlens.collect(model, examples, batch_tokens=12, progress=False)
    matlens.collect(model, examples, batch_tokens=12, folder=tmp_path / "rows", progress=False)
    loaded = Activations.load(tmp_path / "rows")
    for site in kept:
        expected = torch.cat([alone[s][site][0, at] for s, at in enumerate(ANSWERS)])
        assert kept[site].shape == (7, 32)
        assert_near(kept[site], expected)
        streamed = torch.empty_like(kept[site])
        for rows in stream(model, examples, [site], batch_tokens=12, progress=False):
            streamed[torch.from_numpy(rows.index)] = rows.vectors[site]
            assert rows.places.tolist() == examples.positions[rows.index].tolist()
        assert torch.equal(loaded[site], kept[site])
        assert_near(streamed, expected)
    assert positions_of(loaded.examples) == ANSWERS
    head = loaded.head(2)
    assert (head.n_rows, positions_of(head.examples)) == (4, ANSWERS[:2])
    assert head.places.tolist() == [3, 4, 9, 0]


@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_traces_and_variants_have_a_row_for_each_position(name, small_model):
    """As many sentences with one position each would have them."""
    model = small_model(name)
    several = make_token_examples(model, SENTENCES, positions=ANSWERS)
    alone = [(sentence, p) for sentence, at in zip(SENTENCES, ANSWERS, strict=True) for p in at]
    single = make_token_examples(model, [s for s, _ in alone], positions=[p for _, p in alone])
    linear = LinearMap(torch.eye(32).flip(0), None, "h.1", "h.2")
    traces, finals = [], []
    for examples in (several, single):
        traces.append(Trace.run(model, examples, k=3, progress=False))
        variants = {"mapped": Variant(1, [Replacement.from_map(linear)])}
        finals.append(run_variants(model, examples, variants, batch_tokens=12, progress=False)["mapped"])
    assert len(traces[0]) == 7
    assert torch.equal(traces[0].after, traces[1].after)
    assert torch.equal(traces[0].index["random"], traces[1].index["random"])
    assert_near(traces[0].norm, traces[1].norm)
    assert_near(*finals)


def test_a_masked_model_reads_its_masks_where_they_stand(small_model):
    mask = small_model("bert").tokenizer.mask_token_id
    tokens = [[7, mask, 12, mask, 9], [mask, 8]]
    examples = make_token_examples(small_model("bert"), tokens, positions=[[1, 3], [0]])
    assert sentences_of(examples) == tokens
    with pytest.raises(InputError, match=r"^positions must be those of the masks"):
        make_token_examples(small_model("bert"), tokens)


RAGGED = [[1, 2], [3]]
BATCH = torch.tensor([[5, 6], [7, 8]])
REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "past the vocabulary": ([[1, 60]], {}, "Token ids of sentence 0 .* 0 and 59, got 60"),
    "too long": ([[1] * (N_CTX + 1)], {}, f"at most {N_CTX} tokens, got {N_CTX + 1}"),
    "padded without a mask": (torch.tensor([[5, 6], [7, 1]]), {}, "attention_mask must be given.*sentence 1"),
    "empty by its mask": (BATCH, {"attention_mask": [[1, 1], [0, 0]]}, "attention_mask.*for sentence 1"),
    "a mask with a hole": ([[1, 2, 3]], {"attention_mask": [[1, 0, 1]]}, "attention_mask.*for sentence 0"),
    "a mask of another shape": (BATCH, {"attention_mask": torch.ones(2, 3).long()}, "attention_mask"),
    "segments": ({"input_ids": BATCH, "token_type_ids": BATCH * 0 + 1}, {}, "token_type_ids"),
    "positions of its own": ({"input_ids": BATCH, "position_ids": BATCH}, {}, "'position_ids'"),
    "outside": (RAGGED, {"positions": [1, 1]}, "positions of sentence 1 must be between 0 and 0, got 1"),
    "twice": (RAGGED, {"positions": [[1, -1], [0]]}, "sentence 0 must be one or more, and different"),
    "too few": (RAGGED, {"positions": [0]}, "positions must have 2 entries"),
    "padding": (
        BATCH, {"attention_mask": [[1, 1], [1, 0]], "positions": [[True, False], [False, True]]},
        "False at padding",
    ),
}  # fmt: skip


@pytest.mark.refused
@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_read_is_refused(case, small_model):
    tokens, options, message = REFUSED[case]
    with pytest.raises(InputError, match=message):
        make_token_examples(small_model("gpt2"), tokens, **options)
