"""The last token of a prompt and the new tokens are the same, however a text is generated."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from conftest import assert_near, make_tokenizer
from hand_controlled import controlled_by_hand
from handpatched import hand_vectors, submodule_part
from patched_models import hook_counts, padded, patched, replacement
from torch import Tensor

from matlens import InputError, Site
from matlens.ffn import controlled
from matlens.patching.replacements import Replacement

PROMPT = torch.tensor([[4, 7, 41, 4, 7, 12, 30, 4, 7]])
END, N_NEW = PROMPT.shape[1] - 1, 6
COEFFICIENTS = {"L0D5": 1.6, "L0D11": -1.5, "L2D7": 1.8}
GREEDY: dict[str, Any] = {
    "max_new_tokens": N_NEW, "do_sample": False, "output_logits": True, "return_dict_in_generate": True
}  # fmt: skip
MEANT: dict[str, Callable[[Tensor], Tensor]] = {
    "last": lambda place: place == END, "new": lambda place: place > END, "not-first": lambda place: place > 0
}  # fmt: skip


def added(m: Tensor, number: float) -> Tensor:
    return m + number


def by_hand(name: str, plain: Any, meant: Callable[[int], Tensor]) -> Any:
    return controlled_by_hand(name, plain, COEFFICIENTS, added, meant)


def bridged(cached: bool) -> Callable[[Any, Any], Any]:
    silent = {"stop_at_eos": False, "do_sample": False, "verbose": False, "output_logits": True}
    return lambda model, prefix: model.generate(PROMPT, N_NEW, use_past_kv_cache=cached, **silent)


def transformers_own(**options: Any) -> Callable[[Any, Any], Any]:
    return lambda model, prefix: model.original_model.generate(PROMPT, **GREEDY, **options)


SCHEDULES: dict[str, Callable[[Any, Any], Any]] = {
    "bridge with a cache": bridged(True),
    "bridge without a cache": bridged(False),
    "cache": transformers_own(),
    "no cache": transformers_own(use_cache=False),
    "prompt lookup": transformers_own(prompt_lookup_num_tokens=3),
    "chunks of the prompt": transformers_own(prefill_chunk_size=2),
    "static cache": transformers_own(cache_implementation="static"),
    "first layers as assistant": transformers_own(assistant_early_exit=2),
    "model as its own assistant": lambda model, prefix: transformers_own(
        assistant_model=model.original_model
    )(model, prefix),
    "prefix in the cache": lambda model, prefix: transformers_own(past_key_values=prefix)(model, prefix),
    "prefix and chunks": lambda model, prefix: transformers_own(past_key_values=prefix, prefill_chunk_size=2)(
        model, prefix
    ),
    "embeddings": lambda model, prefix: model.original_model.generate(
        inputs_embeds=model.original_model.get_input_embeddings()(PROMPT), **GREEDY
    ),
}


@pytest.fixture
def prefix(small_model):
    """A cache of the prompt's first tokens, filled outside of any context."""

    def fill(name: str) -> Any:
        with torch.no_grad():
            return small_model(name).original_model(PROMPT[:, :4], use_cache=True).past_key_values

    return fill


def assert_greedy(output: Any, plain: Any) -> None:
    """The logits of every step, and the tokens, are those of the plain model, which reads all at once."""
    logits, new = torch.stack(output.logits, 1)[0], output.sequences[0, -N_NEW:]
    with torch.no_grad():
        expected = plain(torch.cat([PROMPT[0], new])[None]).logits[0, END:-1]
    assert_near(logits, expected)
    assert torch.equal(new, expected.argmax(-1))


@pytest.mark.parametrize("where", ["last", "new"])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_every_schedule_controls_the_same_tokens(name, where, small_model, plain_model, prefix):
    model, plain = small_model(name), plain_model(name)
    twice = PROMPT.repeat(1, 2)
    with torch.no_grad():
        unchanged = plain(twice).logits
        with by_hand(name, plain, lambda n: MEANT[where](torch.arange(n))):
            assert float((plain(twice).logits - unchanged).abs().max()) > 1e-4
    for generate in SCHEDULES.values():
        cache = prefix(name)
        with controlled(model, COEFFICIENTS, how="add", where=where):
            output = generate(model, cache)
        with by_hand(name, plain, lambda n: MEANT[where](torch.arange(n))):
            assert_greedy(output, plain)


def test_every_schedule_patches_the_last_token_of_the_prompt(small_model, plain_model, prefix):
    model, plain = small_model("llama"), plain_model("llama")
    last = submodule_part("ffn", 1, where="last")
    for generate in SCHEDULES.values():
        cache = prefix("llama")
        with patched(model, [replacement(last)]):
            output = generate(model, cache)
        sentence = output.sequences[0, -N_NEW:].tolist()
        meant = [last._replace(where=(END,))]
        expected = hand_vectors("llama", plain, meant, [PROMPT[0].tolist() + sentence])[0]["logits"][END:-1]
        assert_near(torch.stack(output.logits, 1)[0], expected)
        assert sentence == expected.argmax(-1).tolist()


@pytest.mark.parametrize("where", ["last", "new"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_prompts_padded_on_either_side(side, where, small_model, plain_model):
    """The plain model generates without a cache, so it reads each row as a whole at every step."""
    model, plain = small_model("llama"), plain_model("llama")
    tokens, mask = padded([PROMPT[0].tolist(), PROMPT[0, 2:7].tolist(), [7]], side)
    ends = (mask * torch.arange(END + 1)).argmax(1)

    def meant(n: int) -> Tensor:
        column = torch.arange(n).expand(len(tokens), n)
        return column == ends[:, None] if where == "last" else column > END

    with by_hand("llama", plain, meant):
        expected = plain.generate(tokens, attention_mask=mask, use_cache=False, **GREEDY)
    options: list[dict[str, Any]] = [
        {}, {"use_cache": False}, {"prefill_chunk_size": 2}, {"cache_implementation": "static"}
    ]  # fmt: skip
    for option in options:
        with controlled(model, COEFFICIENTS, how="add", where=where):
            output = model.original_model.generate(tokens, attention_mask=mask, **GREEDY, **option)
        assert torch.equal(output.sequences, expected.sequences)
        for ours, theirs in zip(output.logits, expected.logits, strict=True):
            assert_near(ours, theirs)


@pytest.mark.parametrize("where", ["last", "new"])
def test_beams_are_those_of_the_plain_model_without_a_cache(where, small_model, plain_model):
    model, plain = small_model("llama"), plain_model("llama")
    search = {"max_new_tokens": N_NEW, "do_sample": False, "num_beams": 3, "num_return_sequences": 3}
    with by_hand("llama", plain, lambda n: MEANT[where](torch.arange(n))):
        expected = plain.generate(PROMPT, use_cache=False, **search)
    for option in ({}, {"use_cache": False}, {"prefill_chunk_size": 4}):
        with controlled(model, COEFFICIENTS, how="add", where=where):
            assert torch.equal(model.original_model.generate(PROMPT, **search, **option), expected)


@pytest.mark.parametrize("where", ["last", "new"])
def test_guidance_without_the_prompt_is_a_sentence_of_its_own(where, small_model, plain_model):
    """It begins with the prompt's last token, and the same new tokens follow."""
    model, plain = small_model("llama"), plain_model("llama")
    with controlled(model, COEFFICIENTS, how="add", where=where):
        output = model.original_model.generate(PROMPT, guidance_scale=3.0, **GREEDY)
    found, expected = output.sequences[0, -N_NEW:], []
    for end in (END, 0):

        def meant(n: int, end: int = end) -> Tensor:
            return torch.arange(n) == end if where == "last" else torch.arange(n) > end

        with torch.no_grad(), by_hand("llama", plain, meant):
            sentence = torch.cat([PROMPT[0, END - end :], found])
            expected.append(plain(sentence[None]).logits[0, end:-1].log_softmax(-1))
    guided = 3 * (expected[0] - expected[1]) + expected[1]
    assert torch.equal(found, guided.argmax(-1))


def test_every_call_of_generate_has_its_own_prompt(small_model, plain_model):
    model, plain = small_model("llama"), plain_model("llama")
    with controlled(model, COEFFICIENTS, how="add", where="last"):
        model.generate(PROMPT[:, :3], 2, do_sample=False, verbose=False, stop_at_eos=False)
        output = model.original_model.generate(PROMPT, **GREEDY)
        with pytest.raises(ZeroDivisionError), model.hooks(fwd_hooks=[("blocks.1.hook_in", _fail)]):
            model.generate(PROMPT[:, :2], 2, do_sample=False, verbose=False, stop_at_eos=False)
        again = model.original_model.generate(PROMPT, **GREEDY)
    assert torch.equal(output.sequences, again.sequences)
    with by_hand("llama", plain, lambda n: torch.arange(n) == END):
        assert_greedy(output, plain)


def _fail(value: Tensor, hook: Any) -> None:
    raise ZeroDivisionError


def test_a_stream_that_waits_leaves_other_passes_alone(small_model, plain_model):
    model, plain = small_model("llama"), plain_model("llama")
    silent: dict[str, Any] = {"stop_at_eos": False, "do_sample": False, "verbose": False}
    with controlled(model, COEFFICIENTS, how="add", where="last"), torch.no_grad():
        whole = model.generate(PROMPT, N_NEW, return_type="tokens", **silent)
        stream = model.generate_stream(PROMPT[:, :], N_NEW, max_tokens_per_yield=1, **silent)
        first = [next(stream), next(stream)]
        other = model(PROMPT[:, :5])
        short = model.generate(PROMPT[:, :2], 2, return_type="tokens", **silent)
        rest = list(stream)
        unfinished = model.generate_stream(PROMPT, N_NEW, max_tokens_per_yield=1, **silent)
        next(unfinished)
        after = model(PROMPT[:, :5])
    assert torch.equal(torch.cat([*first, *rest], 1), whole)
    assert torch.equal(other, after)
    for tokens, logits in ((PROMPT[:, :5], other), (short, None)):
        last = 4 if logits is not None else 1
        with torch.no_grad(), by_hand("llama", plain, lambda n, last=last: torch.arange(n) == last):
            expected = plain(tokens).logits
        if logits is not None:
            assert_near(logits, expected)
        else:
            assert torch.equal(expected[0, 1:-1].argmax(-1), tokens[0, 2:])


@pytest.mark.parametrize("kind", ["patched", "controlled"])
def test_a_pass_that_continues_a_cache_from_outside_has_a_last_token(kind, small_model, plain_model, prefix):
    """In a loop of one's own the tokens after it are new, as in generate."""
    model, plain = small_model("llama"), plain_model("llama")
    part = submodule_part("ffn", 1, where=(END,))
    context = {
        "patched": lambda: patched(model, [replacement(part._replace(where="last"))]),
        "controlled": lambda: controlled(model, COEFFICIENTS, how="add", where="last"),
    }[kind]
    cache, logits, tokens = prefix("llama"), [], PROMPT
    with context(), torch.no_grad():
        found = model.original_model(PROMPT[:, 4:], past_key_values=copy.deepcopy(cache)).logits
        result = model.original_model(PROMPT[:, 4:], past_key_values=cache)
        for _ in range(N_NEW):
            logits.append(result.logits[:, -1])
            tokens = torch.cat([tokens, logits[-1].argmax(-1)[None]], 1)
            result = model.original_model(tokens[:, -1:], past_key_values=cache)
    if kind == "patched":
        expected = hand_vectors("llama", plain, [part], tokens.tolist())[0]["logits"]
    else:
        with torch.no_grad(), by_hand("llama", plain, lambda n: torch.arange(n) == END):
            expected = plain(tokens).logits[0]
    assert_near(found[0], expected[4 : END + 1])
    assert_near(torch.cat(logits), expected[END:-1])


def test_the_model_without_its_head_reads_its_own_tokens(small_model, plain_model):
    model, plain = small_model("llama"), plain_model("llama")
    with controlled(model, COEFFICIENTS, how="add", where="last"), torch.no_grad():
        model(PROMPT)
        h = model.original_model.model(input_ids=PROMPT[:, :5]).last_hidden_state
        with pytest.raises(InputError, match="no pass of the model is running"):
            model.blocks[0].mlp(torch.zeros(1, 3, model.cfg.d_model))
    with torch.no_grad(), by_hand("llama", plain, lambda n: torch.arange(n) == 4):
        assert_near(h, plain.model(PROMPT[:, :5]).last_hidden_state)


def test_contexts_at_last_tokens_end_in_any_order(small_model):
    model = small_model("llama")
    before = hook_counts(model), set(vars(model)), set(vars(model.original_model))
    one, other = (controlled(model, [name], 3.0, where="last") for name in ("L0D1", "L1D1"))
    one.__enter__()
    other.__enter__()
    one.__exit__(None, None, None)
    with controlled(model, ["L2D1"], 3.0, where="new"):
        inside = model.generate(PROMPT, 3, do_sample=False, verbose=False, stop_at_eos=False)
    other.__exit__(None, None, None)
    assert (hook_counts(model), set(vars(model)), set(vars(model.original_model))) == before
    with controlled(model, {"L1D1": 3.0}, where="last"), controlled(model, {"L2D1": 3.0}, where="new"):
        again = model.generate(PROMPT, 3, do_sample=False, verbose=False, stop_at_eos=False)
    assert torch.equal(inside, again)


def test_a_copy_made_inside_of_a_context_generates_itself(small_model):
    """It keeps the hooks, and is another model."""
    model = small_model("llama")
    with controlled(model, COEFFICIENTS, how="add", where="last"):
        expected = model.original_model.generate(PROMPT, **GREEDY)
        other = copy.deepcopy(model)
        zeros = copy.deepcopy(model)
    with torch.no_grad():
        zeros.original_model.lm_head.weight.zero_()
    output = other.original_model.generate(PROMPT, **GREEDY)
    assert torch.equal(output.sequences, expected.sequences)
    assert_near(torch.stack(output.logits), torch.stack(expected.logits))
    assert not zeros.original_model.generate(PROMPT, **GREEDY).logits[0].any()


def test_encoder_and_decoder_have_their_own_last_tokens(model_folder):
    """Of the encoder it is the last of the source, of the decoder the start token."""
    import matlens

    source = torch.tensor([[7, 3, 41, 12]])
    for stack in ("encoder", "decoder"):
        model = matlens.load(str(model_folder("t5")), device="cpu", stack=stack)
        function = Replacement(torch.zeros_like, Site("ffn_in", 1), Site("ffn_out", 1), "last")
        expected = None
        for cached in (True, False):
            with matlens.patched(model, [function]):
                output = model.original_model.generate(source, use_cache=cached, **GREEDY)
            found = torch.stack(output.logits, 1)
            expected = found if expected is None else expected
            assert_near(found, expected)
        plain = model.original_model.generate(source, **GREEDY)
        assert float((torch.stack(plain.logits, 1)[:, 0] - expected[:, 0]).abs().max()) > 1e-5


@pytest.mark.parametrize("kind", ["mamba", "rwkv"])
def test_positions_are_known_where_the_state_has_no_length(kind, tmp_path):
    import matlens

    sizes = {"vocab_size": len(make_tokenizer()), "hidden_size": 32, "num_hidden_layers": 3, "state_size": 4}
    config = transformers.AutoConfig.for_model(kind, **sizes, bos_token_id=None, eos_token_id=None)
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    model = matlens.load(tmp_path, device="cpu")
    weight = 0.3 * torch.randn(32, 32)
    tokens = PROMPT
    for _ in range(3):  # passes over all tokens

        def change(h: Tensor) -> Tensor:
            return torch.where(torch.arange(h.shape[1])[:, None] > 0, h @ weight, h)

        with matlens.patched(model, [Replacement(change, 2, 2)]), torch.no_grad():
            tokens = torch.cat([tokens, model.original_model(tokens).logits[:, -1:].argmax(-1)], 1)
    with matlens.patched(model, [Replacement(lambda h: h @ weight, 2, 2, "not-first")]):
        found = model.original_model.generate(PROMPT, max_new_tokens=3, do_sample=False)
        bridged = model.generate(
            PROMPT, 3, do_sample=False, verbose=False, stop_at_eos=False, return_type="tokens"
        )
        with torch.no_grad():
            output = model.original_model(PROMPT, use_cache=True)
            state = {key: output[key] for key in ("cache_params", "state") if key in output}
            with pytest.raises(InputError, match="has no length"):
                model.original_model(tokens[:, -1:], use_cache=True, **state)
    assert torch.equal(found, tokens)
    assert torch.equal(bridged, tokens)


def test_a_jump_continues_a_cache_of_the_unchanged_model(small_model, prefix):
    """The blocks that it skips read nothing of the cache, which the unchanged model cannot continue."""
    model, cache = small_model("llama"), prefix("llama")
    weight = 0.3 * torch.randn(model.cfg.d_model, model.cfg.d_model)
    with patched(model, [Replacement(lambda h: h @ weight, 1, 2)]), torch.no_grad():
        first = model.original_model(PROMPT[:, 4:], past_key_values=cache).logits[:, -1]
        after = model.original_model(first.argmax(-1)[None], past_key_values=cache).logits
    assert after.isfinite().all()
    with torch.no_grad():
        assert model.original_model(PROMPT[:, -1:], past_key_values=cache).logits.isnan().all()
