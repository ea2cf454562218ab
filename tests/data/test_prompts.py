"""A prompt is a text, token ids or a conversation, wherever a prompt is read."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from conftest import make_tokenizer, save_model
from tokenizers import processors
from typer.testing import CliRunner

import matlens
from matlens import InputError, explorer
from matlens.cli.app import app
from matlens.data import make_windows, making
from matlens.explorer import exploration
from matlens.explorer.changes import compare_changes
from matlens.lens import trajectory

CHAT = [{"role": "user", "content": "w1 w2 w3"}]
TEMPLATE = (
    "{{ bos_token }} {% for m in messages %}w40 {{ m.content }}{% if not loop.last %} w48 {% endif %}"
    "{% endfor %}{% if add_generation_prompt %} w48 w41{% endif %}"
)


@pytest.fixture(scope="module", params=["by the tokenizer", "not at all"])
def model(request, tmp_path_factory) -> Any:
    """A chat model; its tokenizer puts a BOS before every text, or none."""
    folder = save_model("llama", tmp_path_factory.mktemp("chat") / "model")
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"bos_token": "w49", "eos_token": "w48"})
    if request.param == "by the tokenizer":
        ids = [("w49", tokenizer.convert_tokens_to_ids("w49"))]
        backend = tokenizer.backend_tokenizer
        backend.post_processor = processors.TemplateProcessing(single="w49 $A", special_tokens=ids)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return matlens.load(folder, device="cpu")


def ids_of(model: Any, text: str) -> list[int]:
    return list(model.tokenizer(text, add_special_tokens=False)["input_ids"])


def test_a_templates_text_is_read_as_its_tokens(model):
    text = model.tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    ids = ids_of(model, "w49 w40 w1 w2 w3 w48 w41")
    assert matlens.make_prompts(model, [text]).tokens.tolist() == ids
    assert matlens.make_examples(model, [text]).tokens.tolist() == ids
    assert matlens.Lens.identity(model).trajectory(text).ids.tolist() == ids
    windows = make_windows(model, [text, "w5 " * 40], size=16)
    assert windows.tokens[: len(ids)].tolist() == ids
    if matlens.make_prompts(model, ["w1"]).tokens[0] == ids[0]:  # a BOS that precedes any text
        assert {*windows.tokens[windows.offsets[:-1]].tolist()} == {ids[0]}
    assert (windows.tokens == ids[0]).sum() in (1, len(windows))


def test_every_kind_of_prompt_gives_the_same_predictions(model):
    ids = ids_of(model, "w49 w40 w1 w2 w3 w48 w41")
    lens = matlens.Lens.identity(model)
    expected = lens.trajectory(ids)
    assert expected.ids.tolist() == ids
    assert expected.prompt == "w49 w40 w1 w2 w3 w48 w41"
    for prompt in (torch.tensor(ids), torch.tensor([ids]), np.array(ids), tuple(ids)):
        assert lens.trajectory(prompt).ids.tolist() == ids
    read = lens.trajectory(messages=CHAT)
    assert read.prompt == expected.prompt
    assert torch.equal(read.probabilities, expected.probabilities)
    assert explorer.explore(model, messages=CHAT, progress=False).tokens.tolist() == ids
    assert explorer.explore(model, ids, progress=False).tokens.tolist() == ids
    of_ids, of_chat = (compare_changes(model, prompt, [], n_tokens=2)[0] for prompt in (ids, CHAT))
    assert of_ids == of_chat
    mixed = matlens.make_prompts(model, [CHAT, ids, "w1 w2"])
    assert mixed.tokens[mixed.offsets[0] : mixed.offsets[2]].tolist() == ids * 2
    assert mixed.positions.tolist()[:2] == [6, 6]


def test_ids_are_read_as_they_are(model):
    ids = ids_of(model, "w1 w2")
    assert matlens.make_prompts(model, [ids]).tokens.tolist() == ids


def test_the_answer_of_the_assistant_is_continued(model):
    messages = [*CHAT, {"role": "assistant", "content": "w4"}]
    assert matlens.Lens.identity(model).trajectory(messages=messages).tokens[-3:] == ("w48", "w40", "w4")


@pytest.mark.parametrize(
    "arguments",
    [
        {}, {"prompt": "w1", "messages": CHAT}, {"prompt": []}, {"prompt": [999]}, {"prompt": [-1]},
        {"prompt": [0.5]}, {"prompt": torch.zeros(2, 3, dtype=torch.int64)}, {"messages": []},
        {"messages": "w1"}, {"prompt": [3] * 100}, {"prompt": torch.tensor(3)},
    ],
)  # fmt: skip
def test_what_is_no_prompt_raises(model, arguments):
    lens = matlens.Lens.identity(model)
    with pytest.raises(InputError):
        lens.trajectory(**arguments)
    with pytest.raises(InputError):
        explorer.explore(model, **arguments, progress=False)


def test_messages_need_a_chat_template(small_model):
    with pytest.raises(InputError, match="chat template"):
        matlens.Lens.identity(small_model("llama")).trajectory(messages=CHAT)


@pytest.mark.parametrize("words", [["lens", "show"], ["lens", "trajectory"], ["update"], ["explore"]])
def test_a_command_reads_a_prompt_as_a_message(words, model, tmp_path, monkeypatch):
    read, make = [], making.make_prompts

    def kept(model: Any, prompts: Any) -> Any:
        read.append(make(model, prompts))
        return read[-1]

    for module in (making, trajectory, exploration):
        monkeypatch.setattr(module, "make_prompts", kept)
    options = ["--out", str(tmp_path / "page.html")] if words == ["explore"] else []
    given = [*words, "w1 w2 w3", "--chat", "--model", model.cfg.model_name, *options]
    result = CliRunner().invoke(app, given)
    assert result.exit_code == 0, result.output
    assert read[0].tokens.tolist() == ids_of(model, "w49 w40 w1 w2 w3 w48 w41")
