"""From sentences to what the model reads: tokens, positions in each sentence, and batches.

One sentence is one example and is never packed with another (definitions, section 2). Of a corpus one
position a sentence is drawn, from the seed and the sentence alone, so it is the same whatever the corpus
around it, the split, the order and the batches are.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from matlens.arguments import require_kind, require_seed, require_whole, short
from matlens.corpora.corpus import Corpus
from matlens.errors import InputError
from matlens.kinds.images import image_shape, is_visual
from matlens.kinds.stacks import DECODER, ENCODER, inputs_of, stack_of
from matlens.models.tokenization import encode_text, require_tokenizer, token_policy
from matlens.signatures import checked

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge


TOKENIZATION = "tokenization"  # the key under which examples say how their texts became tokens
LAST = "last token"  # where a position was chosen
ARRAYS = ("tokens", "offsets", "positions", "sentences")  # what is stored of examples beside vectors
OTHERS = ("source_tokens", "source_offsets", "images")  # and of those that have them
MAKE_EXAMPLES = (
    "Make examples of a corpus with matlens.make_examples(model, corpus), of prompts with "
    "matlens.make_prompts(model, texts), of token ids with matlens.make_token_examples(model, ids)."
)


@checked
@dataclass(frozen=True)
class Examples:
    """Tokenised sentences with positions in each.

    Attributes
    ----------
    tokens
        Token ids of all sentences end to end; sentence ``s`` is ``tokens[offsets[s]:offsets[s + 1]]``.
        Where a position was drawn in a masked-LM model, the token there is the mask already.
    offsets
        ``[n + 1]``, where each sentence starts.
    positions
        The positions at which vectors are read, sentence after sentence, counted from the sentence's first
        token, which is 0. `make_examples` and `make_prompts` choose one in each sentence, ``i_s``.
    provenance
        Corpus, seed, how positions were chosen, and how many sentences were cut.
    sentences
        The sentence that each position is in; by default there is one position in each, in their order.
    source_tokens, source_offsets
        For the decoder of an encoder-decoder, what its encoder reads, sentence by sentence; else empty.
    images
        For a vision transformer the images ``[n, channels, height, width]``, each of which stands for a
        sentence, and whose tokens are the numbers of its places; else empty.

    Raises
    ------
    InputError
        The arrays do not belong together: a position lies outside of its sentence, or a sentence has none.
    """

    tokens: Int[np.ndarray, " n_tokens"]
    offsets: Int[np.ndarray, " n_plus_1"]
    positions: Int[np.ndarray, " n_positions"]
    provenance: dict[str, Any] = field(default_factory=dict)
    sentences: Int[np.ndarray, " _"] = field(default_factory=lambda: np.arange(0))
    source_tokens: Int[np.ndarray, " n_source"] = field(default_factory=lambda: np.arange(0))
    source_offsets: Int[np.ndarray, " _"] = field(default_factory=lambda: np.arange(0))
    images: np.ndarray = field(default_factory=lambda: np.zeros(0, np.float32))

    def __post_init__(self) -> None:
        if not len(self.sentences):
            object.__setattr__(self, "sentences", np.arange(len(self.positions)))
        _require_consistent(self)

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, np.ndarray], data: Mapping[str, Any] | None) -> Examples:
        """The examples whose ``arrays`` were stored, and what they said of themselves.

        Raises
        ------
        InputError
            Some of the arrays are missing, or there are others.
        """
        names = {field.name for field in fields(cls)}
        absent = [name for name in ("tokens", "offsets", "positions") if name not in arrays]
        if absent or not {*arrays} <= names:
            raise InputError(f"The arrays are {short(list(arrays))}. Expected those of Examples.arrays.")
        return cls(**arrays, provenance=dict(data or {}))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def n_positions(self) -> int:
        """How many positions there are in all sentences: as many rows has what is read at them."""
        return len(self.positions)

    @property
    def lengths(self) -> Int[np.ndarray, " n"]:
        """Number of tokens of each sentence."""
        return np.diff(self.offsets)

    @property
    def places(self) -> Int[np.ndarray, " n_tokens"]:
        """Place of each token in its sentence, counted from 0."""
        return np.arange(len(self.tokens)) - np.repeat(self.offsets[:-1], self.lengths)

    @property
    def n_truncated(self) -> int:
        """How many sentences were longer than the model's context and were cut."""
        return int(self.provenance.get("n_truncated", 0))

    @property
    def fingerprint(self) -> str:
        """Sixteen hex digits of the tokens and positions."""
        digest = hashlib.sha256()
        several = self.n_positions > len(self)
        beside = [self.source_tokens, self.source_offsets] if self.has_sources else []
        more = [*([self.sentences] if several else []), *beside]
        for array in (self.tokens, self.offsets, self.positions, *more):
            digest.update(np.ascontiguousarray(array, dtype=np.int64).data)
        digest.update(np.ascontiguousarray(self.images).data)
        return digest.hexdigest()[:16]

    @property
    def arrays(self) -> dict[str, np.ndarray]:
        """The arrays that are stored beside vectors, by name."""
        others = [name for name in OTHERS if len(getattr(self, name))]
        return {name: getattr(self, name) for name in (*ARRAYS, *others)}

    @property
    def has_sources(self) -> bool:
        """Whether each sentence has a source, which the encoder of an encoder-decoder reads."""
        return len(self.source_offsets) > 0

    def head(self, n: int) -> Examples:
        """The first ``n`` sentences, with all of their positions."""
        n = min(require_whole(n, "The number of sentences", least=1), len(self))
        kept = int(np.searchsorted(self.sentences, n))
        return Examples(
            self.tokens[: self.offsets[n]], self.offsets[: n + 1], self.positions[:kept],
            {**self.provenance, "n": n}, self.sentences[:kept],
            self.source_tokens[: self.source_offsets[n] if self.has_sources else 0],
            self.source_offsets[: n + 1],
            self.images[:n],
        )  # fmt: skip

    def up_to_positions(self) -> Examples:
        """Every sentence cut after its last position: all that a decoder reads for its positions.

        A decoder's vectors at the positions are the same, and half of the tokens need not be run.
        """
        last = np.zeros(len(self), dtype=np.int64)
        np.maximum.at(last, self.sentences, self.positions)
        kept = self.places <= np.repeat(last, self.lengths)
        offsets = np.concatenate([[0], np.cumsum(last + 1)])
        return replace(self, tokens=self.tokens[kept], offsets=offsets)

    def rows_of(
        self, index: Int[np.ndarray, " batch"]
    ) -> tuple[Int[np.ndarray, " rows"], Int[np.ndarray, " rows"], Int[np.ndarray, " rows"]]:
        """Positions of some sentences, such as those of a batch.

        Returns
        -------
        row, position, number
            For each position of these sentences, one sentence after the other: which of ``index`` its
            sentence is, the position in it, and its number among all positions.
        """
        starts = np.searchsorted(self.sentences, np.arange(len(self) + 1))
        counts = np.diff(starts)[index]
        row = np.repeat(np.arange(len(index)), counts)
        within = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
        number = starts[:-1][index][row] + within
        return row, self.positions[number], number

    def batches(self, max_tokens: int) -> Iterator[Batch]:
        """Batches of sentences of like length, the longest first, so that a lack of memory shows at once.

        A batch holds at most ``max_tokens`` tokens, padding counted, and at least one sentence.
        """
        max_tokens = require_whole(max_tokens, "The number of tokens in a batch", least=1)
        order = np.argsort(-self.lengths, kind="stable")
        start = 0
        while start < len(order):
            length = int(self.lengths[order[start]])
            count = max(max_tokens // length, 1)
            yield self._batch(order[start : start + count], length)
            start += count

    def copies(self, sentence: int, n: int) -> Batch:
        """A batch of ``n`` copies of a sentence."""
        n = require_whole(n, "The number of copies", least=1)
        index = np.full(n, require_whole(sentence, "sentence", least=0, most=len(self) - 1))
        return self._batch(index, int(self.lengths[sentence]))

    def _batch(self, index: np.ndarray, length: int) -> Batch:
        source = _padded(self.source_tokens, self.source_offsets, index) if self.has_sources else None
        images = torch.from_numpy(self.images[index]) if len(self.images) else None
        return Batch(index, *_padded(self.tokens, self.offsets, index, length), source, images)


@dataclass(frozen=True)
class Batch:
    """Sentences padded on the right with token 0, which the mask keeps the model from reading.

    Attributes
    ----------
    index
        Numbers of the sentences.
    tokens, mask
        ``[batch, length]``; the mask is 1 where there is a token of the sentence, and 0 at padding.
    source
        Tokens and mask of what the encoder of an encoder-decoder reads, where the model is its decoder.
    images
        What a vision transformer reads.
    """

    index: Int[np.ndarray, " batch"]
    tokens: Int[Tensor, "batch length"]
    mask: Int[Tensor, "batch length"]
    source: tuple[Tensor, Tensor] | None = None
    images: Float[Tensor, "batch channels height width"] | None = None

    def inputs(self, model: TransformerBridge) -> tuple[Tensor, dict[str, Any]]:
        """What the model is called with, on its device: ``model(first, **others)``.

        Raises
        ------
        InputError
            The model stands for a decoder that reads an encoder, and the examples have no sources; or it
            reads images, and there are none.
        """
        device = torch.device(model.cfg.device)
        if is_visual(model):
            return _images_of(model, self.images), {}
        source = None if self.source is None else (self.source[0].to(device), self.source[1].to(device))
        first, others = inputs_of(model, self.tokens.to(device), self.mask.to(device), source)
        return first, {**others, "use_cache": False}


def _images_of(model: TransformerBridge, images: Tensor | None) -> Tensor:
    if images is None or tuple(images.shape[1:]) != image_shape(model):
        raise InputError(
            f"{model.cfg.architecture} reads images of the shape {image_shape(model)}, and the examples hold "
            "none. Make them with matlens.inputs.make_image_examples(model, images)."
        )
    return images.to(model.cfg.device, next(model.original_model.parameters()).dtype)


def _padded(
    tokens: np.ndarray, offsets: np.ndarray, index: np.ndarray, length: int | None = None
) -> tuple[Tensor, Tensor]:
    longest = int(np.diff(offsets)[index].max()) if length is None else length
    ids = np.zeros((len(index), longest), dtype=np.int64)
    mask = np.zeros((len(index), longest), dtype=np.int64)
    for row, sentence in enumerate(index):
        of_sentence = tokens[offsets[sentence] : offsets[sentence + 1]]
        ids[row, : len(of_sentence)], mask[row, : len(of_sentence)] = of_sentence, 1
    return torch.from_numpy(ids), torch.from_numpy(mask)


@checked
def make_examples(
    model: TransformerBridge, corpus: Corpus, *, seed: int = 0, draw_special: bool = True
) -> Examples:
    """Tokenise a corpus as the model's own tokenizer does and draw a position in each sentence.

    Parameters
    ----------
    model
        The model, which has the tokenizer and the length of the context. In a masked-LM model the token at
        the position is replaced by the mask.
    corpus
        The corpus. For tokens that are there already see `make_token_examples`.
    seed
        Seed of the positions.
    draw_special
        Whether the position may fall on tokens that the tokenizer adds (``[CLS]``, ``<s>``), as in the
        authors' code. With ``False`` they are read by the model but never drawn.

    Raises
    ------
    InputError
        There are no sentences, a sentence has no token to draw, the model has no tokenizer or is a masked-LM
        without a mask token, or what is given is no corpus.
    """
    require_model(model)
    require_kind(
        corpus, Corpus, "The corpus",
        way="Read one with matlens.load_corpus(); texts that are given to a model as they are go to "
        "matlens.make_prompts(), and token ids to matlens.make_token_examples().",
    )  # fmt: skip
    seed = require_seed(seed)
    require_readable(model)
    tokenizer = require_tokenizer(model)
    if stack_of(model) == DECODER:
        raise InputError(
            "This is a decoder that reads an encoder's last layer, and a corpus holds no sources for it. "
            "Make examples of both with matlens.inputs.make_pairs(model, sources, targets)."
        )
    if not len(corpus):
        raise InputError(f"{corpus.name} holds no sentences. Expected at least one.")
    mask_token = tokenizer.mask_token_id if is_masked(model) else None
    if is_masked(model) and mask_token is None:
        raise InputError("This is a masked-LM model, but its tokenizer has no mask token.")
    n_ctx = context_length(model)
    encoded = [encode_text(model, text) for text in corpus.sentences]
    too_long = [s for s, encoding in enumerate(encoded) if len(encoding.ids) > n_ctx]
    for s in too_long:
        encoded[s] = encode_text(model, corpus.sentences[s], longest=n_ctx)
    positions = np.array(
        [
            draw_position(text, encoding.added, seed, draw_special)
            for text, encoding in zip(corpus.sentences, encoded, strict=True)
        ]
    )
    ids = [np.asarray(encoding.ids, dtype=np.int64) for encoding in encoded]
    if mask_token is not None:
        for sentence, position in zip(ids, positions, strict=True):
            sentence[position] = mask_token
    provenance = {
        "corpus": corpus.name,
        "corpus_fingerprint": corpus.fingerprint,
        "seed": seed,
        "position": "uniform over all tokens" if draw_special else "uniform over tokens not special",
        "masked": mask_token is not None,
        TOKENIZATION: token_policy(model).digest,
        "n": len(ids),
        "n_truncated": len(too_long),
    }
    return end_to_end(ids, positions, provenance)


@checked
def is_masked(model: TransformerBridge) -> bool:
    """Whether a model predicts masked tokens rather than the next one."""
    return model.cfg.attention_dir == "bidirectional"


def reads_whole(model: TransformerBridge) -> bool:
    """Whether what stands behind a position bears on its vectors: not so in decoders."""
    return is_masked(model) or stack_of(model) == ENCODER or is_visual(model)


def end_to_end(
    ids: Sequence[np.ndarray],
    positions: np.ndarray,
    provenance: dict[str, Any],
    sentences: np.ndarray | None = None,
) -> Examples:
    """Examples of sentences that are given one by one."""
    offsets = np.concatenate([[0], np.cumsum([len(tokens) for tokens in ids])])
    of_each = np.arange(len(ids)) if sentences is None else sentences
    return Examples(np.concatenate(ids), offsets, positions, provenance, of_each)


def require_examples(examples: Any) -> None:
    """Refuse what are no examples, and say how they are made.

    Raises
    ------
    InputError
        A corpus, texts, or token ids were given instead.
    """
    require_kind(examples, Examples, "What the model is to read", way=MAKE_EXAMPLES)


def require_own_tokens(model: TransformerBridge, examples: Examples) -> None:
    """Refuse examples whose texts became tokens in another way than they do in this model.

    Raises
    ------
    InputError
        They were made with another tokenizer or another BOS, or a token is not in the vocabulary.
    """
    if is_visual(model):
        return  # what is read are images, see `Batch.inputs`
    require_tokens(model, examples.tokens, "the examples")
    made = examples.provenance.get(TOKENIZATION)
    if made is not None and made != token_policy(model).digest:
        raise InputError(
            "The examples were made for a model whose text becomes other tokens, by another tokenizer or "
            f"with another BOS. Expected those of this model ({token_policy(model).words}). {MAKE_EXAMPLES}"
        )


def require_tokens(model: TransformerBridge, tokens: np.ndarray, of: str) -> None:
    """Refuse tokens that a model does not have.

    Raises
    ------
    InputError
        An id is negative or past the vocabulary.
    """
    embedding = model.original_model.get_input_embeddings()
    size = min(model.cfg.d_vocab, getattr(embedding, "num_embeddings", model.cfg.d_vocab))
    outside = (tokens < 0) | (tokens >= size)
    if outside.any():
        place = int(outside.argmax())
        raise InputError(
            f"Token {place} of {of} is {tokens[place]}, and the model has the tokens 0 to {size - 1}. Were "
            "they made by the tokenizer of another model?"
        )


def require_model(model: Any) -> None:
    """Refuse what is no bridge of TransformerLens.

    Raises
    ------
    InputError
        It is a name, a model of Hugging Face, or something else.
    """
    if not all(hasattr(model, name) for name in ("cfg", "tokenizer", "original_model", "adapter")):
        raise InputError(
            f"The model is a {type(model).__name__}. Expected a TransformerBridge. Load one by its name with "
            "matlens.load()."
        )


def require_readable(model: TransformerBridge) -> None:
    """Refuse models whose layers predict nothing that could be read at a position.

    Raises
    ------
    InputError
        The model predicts neither the next token nor a single masked one.
    """
    if not is_masked(model) and not model.adapter.supports_causal_loss:
        raise InputError(
            f"{model.cfg.architecture} predicts neither the next token nor a single masked one, so what its "
            "layers predict cannot be read at a position."
        )


def context_length(model: TransformerBridge) -> int:
    """How many tokens the model and its tokenizer can take."""
    return int(min(model.cfg.n_ctx, model.tokenizer.model_max_length))


def draw_position(text: str, added: list[bool], seed: int, draw_special: bool) -> int:
    """A position in a sentence, from the seed and the text alone.

    Raises
    ------
    InputError
        The sentence has no token to draw.
    """
    allowed = np.arange(len(added)) if draw_special else np.flatnonzero(~np.asarray(added, dtype=bool))
    if not len(allowed):
        reason = (
            "of it the tokenizer makes only special tokens" if added else "the tokenizer makes none of it"
        )
        raise InputError(f"The sentence {short(text)} has no token whose position could be drawn: {reason}.")
    digest = hashlib.blake2b(f"{seed}\n{text}".encode(), digest_size=8).digest()
    return int(allowed[int.from_bytes(digest, "big") * len(allowed) >> 64])


def _require_consistent(examples: Examples) -> None:
    tokens, offsets, positions = examples.tokens, examples.offsets, examples.positions
    sentences = examples.sentences
    if not len(offsets) or offsets[0] != 0 or offsets[-1] != len(tokens) or (np.diff(offsets) < 0).any():
        raise InputError(
            f"The offsets of examples do not divide their {len(tokens)} tokens into sentences. Expected to "
            "start at 0, never to fall, and to end at the number of tokens."
        )
    if len(positions) != len(sentences) or (np.diff(sentences) < 0).any():
        raise InputError(
            f"The {len(positions)} positions of examples are not those of {len(sentences)} sentences in "
            "their order. Expected the number of its sentence for each position, never falling."
        )
    if examples.has_sources and (
        len(examples.source_offsets) != len(offsets)
        or examples.source_offsets[0] != 0
        or examples.source_offsets[-1] != len(examples.source_tokens)
        or (np.diff(examples.source_offsets) <= 0).any()
    ):
        raise InputError(
            f"The sources of examples are not {len(offsets) - 1} texts of one token or more. Expected one "
            "for each sentence."
        )
    if len(examples.images) not in (0, len(offsets) - 1):
        raise InputError(
            f"There are {len(examples.images)} images for {len(offsets) - 1} sentences. Expected as many."
        )
    if not np.array_equal(np.unique(sentences), np.arange(len(offsets) - 1)):
        raise InputError(
            f"The positions of examples are not in all of the {len(offsets) - 1} sentences and in no others. "
            "Expected one position or more in each sentence."
        )
    outside = (positions < 0) | (positions >= np.diff(offsets)[sentences])
    if outside.any():
        row = int(outside.argmax())
        sentence = int(sentences[row])
        raise InputError(
            f"The position {positions[row]} lies outside of sentence {sentence}, which has the tokens 0 to "
            f"{np.diff(offsets)[sentence] - 1}."
        )
