"""Which sentences something was fitted on, and how many of them it is evaluated on."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from jaxtyping import Bool, UInt64
from torch import Tensor

from matlens.data.examples import Examples
from matlens.errors import InputWarning, warn
from matlens.models.identity import Provenance

FITTED_ON = "fitted_on"
"""The key of a fit's sentences in the details of its provenance."""
_BYTES = 6  # stored of a sentence's key: two sets of 100,000 share one by chance with p = 4e-5


class OverlapWarning(InputWarning):
    """Something is evaluated on sentences that it was fitted on."""


def sentence_keys(examples: Examples) -> UInt64[np.ndarray, " n"]:
    """A number for each sentence, from what the model reads of it: tokens, source and image."""
    keys = np.empty(len(examples), np.uint64)
    tokens, offsets = examples.tokens.astype("<i8"), examples.offsets
    for sentence in range(len(examples)):
        digest = hashlib.blake2b(tokens[offsets[sentence] : offsets[sentence + 1]].tobytes(), digest_size=8)
        if examples.has_sources:
            start, end = examples.source_offsets[sentence : sentence + 2]
            digest.update(examples.source_tokens[start:end].astype("<i8").tobytes())
        if len(examples.images):
            digest.update(np.ascontiguousarray(examples.images[sentence]).tobytes())
        keys[sentence] = int.from_bytes(digest.digest(), "little")
    return keys


def fitted_on(examples: Examples, rows: Bool[Tensor, " n"] | None = None) -> dict[str, Any]:
    """The sentences of a fit for the details of its provenance, eight characters each.

    ``rows`` is true for the fitted positions of the examples, by default all; it takes a bit each.
    """
    keys, record = sentence_keys(examples), {}
    if rows is not None:
        mask = rows.cpu().numpy()
        keys = keys[np.unique(examples.sentences[mask])]
        record = {"rows": _text(np.packbits(mask)), "of": examples.fingerprint}
    bytes_of = np.unique(keys).astype("<u8").view(np.uint8).reshape(-1, 8)
    return {FITTED_ON: {"sentences": _text(bytes_of[:, :_BYTES]), **record}}


def fitted_on_any(fits: Iterable[Provenance]) -> dict[str, Any]:
    """The record of several fits together; empty if none has one."""
    records = [fit.details[FITTED_ON] for fit in fits if FITTED_ON in fit.details]
    if any(record != records[0] for record in records):
        stored = np.concatenate([_bytes(record["sentences"]).reshape(-1, _BYTES) for record in records])
        return {FITTED_ON: {"sentences": _text(np.unique(stored, axis=0))}}
    return {FITTED_ON: records[0]} if records else {}


def warn_of_overlap(
    fits: Iterable[Provenance], examples: Examples, what: str, rows: Bool[Tensor, " n"] | None = None
) -> None:
    """Issue one `OverlapWarning` if some of the evaluated sentences were fitted on.

    Parameters
    ----------
    fits
        The provenances of everything that is evaluated; fits without a record are skipped.
    examples
        The examples of the evaluation, at its positions.
    what
        The subject of the message, such as ``"The maps"``.
    rows
        True for the positions that are evaluated, by default all. Of a fit on some positions of the same
        examples, positions are compared, and not their sentences.
    """
    used = np.ones(examples.n_positions, bool) if rows is None else rows.cpu().numpy()
    keys, chosen = _truncated(sentence_keys(examples)), np.unique(examples.sentences[used])
    seen = np.zeros(len(examples), bool)
    for fit in fits:
        record = fit.details.get(FITTED_ON)
        if record is None:
            continue
        if rows is not None and record.get("of") == examples.fingerprint:
            fitted = np.unpackbits(_bytes(record["rows"]), count=len(used)).astype(bool)
            seen[examples.sentences[fitted & used]] = True
        elif _same_text_read_otherwise(fit.data or {}, examples.provenance):
            seen[:] = True
        else:
            stored = _bytes(record["sentences"]).reshape(-1, _BYTES)
            padded = np.pad(stored, ((0, 0), (0, 8 - _BYTES)))
            seen |= np.isin(keys, padded.view("<u8")[:, 0])
    if n_seen := int(seen[chosen].sum()):
        warn(
            f"{what} were fitted on {n_seen:,} of {len(chosen):,} validation sentences, so they look better "
            "than on new text. Use other sentences, see Corpus.split.",
            OverlapWarning,
        )


def _same_text_read_otherwise(fitted: Mapping[str, Any], evaluated: Mapping[str, Any]) -> bool:
    """True if one text was cut into other windows, or masked at other tokens, so no sentence is equal."""
    compared = ["window", *(["seed"] if evaluated.get("masked") else [])]
    text = evaluated.get("corpus_fingerprint")
    same = text is not None and text == fitted.get("corpus_fingerprint")
    return same and any(fitted.get(key) != evaluated.get(key) for key in compared)


def _truncated(keys: UInt64[np.ndarray, " n"]) -> UInt64[np.ndarray, " n"]:
    return keys & np.uint64(2 ** (8 * _BYTES) - 1)


def _text(values: np.ndarray) -> str:
    return base64.b64encode(np.ascontiguousarray(values).tobytes()).decode()


def _bytes(text: str) -> np.ndarray:
    return np.frombuffer(base64.b64decode(text), np.uint8)
