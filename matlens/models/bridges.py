"""Bridges: those that were booted elsewhere, and how text becomes the tokens of the model's own tokenizer."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from matlens.errors import InputError, Tokenizer, checked
from matlens.models.agreement import check_plain_logits
from matlens.models.checkpoints import check_vocabulary
from matlens.models.configurations import check_supported
from matlens.models.constants import remember_settings
from matlens.models.families.bridging import amend
from matlens.models.families.encoder_decoders import Stack, choose_stack, stack_of
from matlens.models.identity import check_raw
from matlens.models.sites import stack_hooks
from matlens.models.tokens import check_tokenizer, encode_text
from matlens.models.weights import check_finite_weights

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge


@checked
def wrap(
    bridge: TransformerBridge,
    *,
    tokenizer: Tokenizer = None,
    prepend_bos: bool | None = None,
    stack: Stack | None = None,
) -> TransformerBridge:
    """Take a bridge that was booted elsewhere, and name how its text becomes tokens.

    ``TransformerBridge.boot_transformers`` puts a BOS in front of every text unless it is told otherwise;
    `load` does so where the model's own tokenizer does. What was made of other tokens does not go together,
    so the maps of the one model are refused with the other until both read the same.

    ``matlens.models.token_policy(bridge)`` says in words what a bridge does.

    Parameters
    ----------
    bridge
        The bridge; it is changed in place, put into evaluation mode, and returned.
    tokenizer
        Read text as this tokenizer alone does, what it puts around a text included. With
        ``AutoTokenizer.from_pretrained(name)`` that is what ``load(name)`` does.
    prepend_bos
        Put a BOS in front of every text (``True``) or of none (``False``). By default the bridge goes on as
        it does, by its ``cfg.default_prepend_bos``.
    stack
        The stack of an encoder-decoder that the bridge is to stand for, see `load`.

    Raises
    ------
    InputError
        It is no bridge of a decoder or masked-LM model, is in compatibility mode, has weights that are not
        finite, does not compute what transformers does, or cannot put a BOS in front; or both options are
        given.
    """
    from transformer_lens.model_bridge.sources._bridge_builder import configure_tokenizer

    amend(bridge.eval())
    check_raw(bridge)
    there = stack_of(bridge)
    check_supported(str(bridge.cfg.model_name), bridge.original_model.config, stack or there)
    if there not in (None, stack or there):
        raise InputError(f"This bridge stands for the {there} already. Boot another one for the {stack}.")
    if stack is not None and there is None:
        choose_stack(bridge, stack, stack_hooks(stack))
    if tokenizer is not None:
        if prepend_bos is not None:
            raise InputError("Give either a tokenizer, which decides on the BOS itself, or prepend_bos.")
        kept = keeping_itself(check_vocabulary(tokenizer, str(bridge.cfg.model_name)))
        d_vocab, d_vocab_out = bridge.cfg.d_vocab, bridge.cfg.d_vocab_out
        bridge.tokenizer = None
        bridge.tokenizer = configure_tokenizer(kept, bridge.cfg)
        bridge.cfg.d_vocab, bridge.cfg.d_vocab_out = d_vocab, d_vocab_out
        follow_tokenizer(bridge, tokenizer)
    elif prepend_bos is not None:
        _set_bos(bridge, prepend_bos)
    check_finite_weights(bridge)
    remember_settings(bridge)
    check_plain_logits(bridge)
    return bridge


def _set_bos(bridge: TransformerBridge, wanted: bool) -> None:
    tokenizer, before = check_tokenizer(bridge), bridge.cfg.default_prepend_bos
    if bridge.cfg.attention_dir == "bidirectional":
        raise InputError(
            "A masked-LM model reads its own [CLS] and [SEP] around a text, and no BOS. Give its tokenizer "
            "instead: matlens.wrap(bridge, tokenizer=AutoTokenizer.from_pretrained(name))."
        )
    bridge.cfg.default_prepend_bos = wanted
    (ids, added), bos = encode_text(bridge, "a"), tokenizer.bos_token_id
    # A BOS that the vocabulary does not have is read as the unknown token; GPT-2's is both, by name.
    is_piece = bos is not None and tokenizer.convert_ids_to_tokens(bos) == tokenizer.bos_token
    if (is_piece and ids[:1] == [bos] and added[0]) != wanted:
        bridge.cfg.default_prepend_bos = before
        raise InputError(
            f"prepend_bos is {wanted}, which the tokenizer cannot do: its BOS is {tokenizer.bos_token!r}, "
            f"and a text's first token is then {tokenizer.convert_ids_to_tokens(ids[:1])}. Give the "
            "tokenizer that reads text as you want instead."
        )


def follow_tokenizer(model: TransformerBridge, tokenizer: Any) -> None:
    """Let the bridge read text as the tokenizer does that it was given."""
    model.tokenizer.init_kwargs = tokenizer.init_kwargs
    # Text given to the bridge itself becomes the same tokens as here.
    model.cfg.default_prepend_bos = model.cfg.tokenizer_prepends_bos
    model.cfg.tokenizer_appends_eos = False  # an end of text that the tokenizer appends is not taken away


def keeping_itself(tokenizer: Any) -> Any:
    """Copy a tokenizer so that the bridge leaves it alone.

    The bridge replaces a tokenizer that does not prepend BOS by one that does, which it reloads by
    name from the hub; only a tokenizer that says it prepends BOS already is kept.
    """
    kept = copy.deepcopy(tokenizer)
    kept.init_kwargs = {**kept.init_kwargs, "add_bos_token": True}
    return kept
