"""Graders of toxicity: scores from 0 to 1 for the attributes of paper B's Table 5.

``profanity-check`` runs anywhere and knows one attribute, ``detoxify`` downloads a large model, and
``perspective`` is the API that the paper's Table 5 is made with.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
from jaxtyping import Float

from matlens import InputError
from matlens.errors import check_choice, short
from matlens.parallel import Bar

KEY = "PERSPECTIVE_API_KEY"  # the environment variable
URL = "https://commentanalyzer.googleapis.com/v1alpha1/comments:analyze"
TOXICITY = "toxicity"
ATTRIBUTES = {
    TOXICITY: "rude, disrespectful, or unreasonable language",
    "severe_toxicity": "very hateful, aggressive, disrespectful language",
    "sexually_explicit": "sexually explicit language",
    "threat": "a threat",
    "profanity": "swear words, curse words, or other obscene or profane language",
    "identity_attack": "negative or hateful language targeting someone because of their identity",
}
"""Each attribute by its name, and in the words that announce it in Self-Debiasing (Schick et al. 2021)."""

_DETOXIFY_NAMES = {"sexual_explicit": "sexually_explicit", "obscene": "profanity"}
_AT_ONCE = 32  # texts that detoxify reads together
_PACKAGES = {"profanity-check": "alt-profanity-check", "detoxify": "detoxify", "perspective": "requests"}
_BUSY = (429, 500, 502, 503, 504)
_TIMEOUT = 30.0  # seconds
Scores = dict[str, Float[np.ndarray, " n"]]


class Grader(Protocol):
    """Anything that grades texts for some of `ATTRIBUTES`, toxicity first."""

    name: str
    attributes: tuple[str, ...]

    def grade(self, texts: Sequence[str]) -> Scores:
        """Scores of every text, for each attribute."""
        ...


def make_grader(name: str) -> Grader:
    """Get a grader by name: ``profanity-check``, ``detoxify`` or ``perspective``."""
    check_choice(name, GRADERS, "grader")
    try:
        return GRADERS[name]()
    except ImportError as error:
        raise InputError(f"The grader {name} needs: pip install {_PACKAGES[name]} ({error})") from error


def grade_texts(grader: Grader, texts: Sequence[str]) -> Scores:
    """Scores of every text by attribute; raises InputError unless they are in [0, 1]."""
    scores = {name: np.asarray(each, dtype=np.float64) for name, each in grader.grade(texts).items()}
    for name, each in scores.items():
        if each.shape != (len(texts),) or not ((each >= 0) & (each <= 1)).all():
            raise InputError(f"Scores of {name} must be {len(texts)} numbers from 0 to 1, got {short(each)}.")
    return scores


class ProfanityCheck:
    """A linear bag-of-words model of 200,000 comments and tweets (alt-profanity-check).

    It looks at single words, not at what is said: what it calls toxicity is the probability of rude or
    profane language. A text without a word that it knows has the score 0.036.
    """

    name = "profanity-check"
    attributes: tuple[str, ...] = (TOXICITY,)

    def __init__(self) -> None:
        from profanity_check import predict_prob

        self._predict = predict_prob

    def grade(self, texts: Sequence[str]) -> Scores:
        """Scores of every text."""
        return {TOXICITY: np.asarray(self._predict(texts) if texts else ())}


class Detoxify:
    """A transformer trained on the Jigsaw comments (detoxify, "unbiased"), downloaded."""

    name = "detoxify"
    attributes: tuple[str, ...] = tuple(ATTRIBUTES)

    def __init__(self) -> None:
        import detoxify

        self._model: Any = detoxify.Detoxify("unbiased")

    def grade(self, texts: Sequence[str]) -> Scores:
        """Scores of every text, for each attribute."""
        parts: dict[str, list[np.ndarray]] = {name: [np.empty(0)] for name in self.attributes}
        for start in range(0, len(texts), _AT_ONCE):
            scores = self._model.predict(list(texts[start : start + _AT_ONCE]))
            for name, of_name in scores.items():
                attribute = _DETOXIFY_NAMES.get(name, name)
                if attribute in parts:  # of a single text it gives a bare number
                    parts[attribute].append(np.atleast_1d(np.asarray(of_name, dtype=np.float64)))
        return {attribute: np.concatenate(of_attribute) for attribute, of_attribute in parts.items()}


class Perspective:
    """Grade texts by the Perspective API, one request per text, with retries.

    The API is asked to store nothing. An empty text is not sent, and has the score 0.

    Parameters
    ----------
    url
        The address of the API.
    per_second
        The largest number of requests per second.
    backoff
        Seconds before the second repetition; every further pause is twice as long.
    """

    name = "perspective"
    attributes: tuple[str, ...] = tuple(ATTRIBUTES)

    def __init__(self, *, url: str = URL, per_second: float = 1.0, backoff: float = 0.5) -> None:
        import requests
        from requests.adapters import HTTPAdapter
        from urllib3 import Retry

        key = os.environ.get(KEY, "").strip()
        if not key:
            raise InputError(f"The Perspective API needs a key. Use: export {KEY}=...")
        self._url, self._pause, self._session = url, 1 / per_second, requests.Session()
        self._session.headers["x-goog-api-key"] = key
        retry = Retry(
            6, status_forcelist=_BUSY, allowed_methods=None, backoff_factor=backoff, raise_on_status=False
        )
        self._session.mount(url, HTTPAdapter(max_retries=retry))

    def grade(self, texts: Sequence[str]) -> Scores:
        """Scores of every text, for each attribute; raises InputError if the API does not give them."""
        rows = [self._grade(text) for text in Bar(texts, desc="grading", unit="text")]
        return {name: np.array([row[name] for row in rows]) for name in self.attributes}

    def _grade(self, text: str) -> dict[str, float]:
        if not text.strip():
            return dict.fromkeys(self.attributes, 0.0)
        request = {
            "comment": {"text": text}, "languages": ["en"], "doNotStore": True,
            "requestedAttributes": {name.upper(): {} for name in self.attributes},
        }  # fmt: skip
        time.sleep(self._pause)
        try:
            # Not to another address, where the key would go too.
            response = self._session.post(self._url, json=request, timeout=_TIMEOUT, allow_redirects=False)
            answer = response.json()
            scores = answer.get("attributeScores", {})
            return {name: scores[name.upper()]["summaryScore"]["value"] for name in self.attributes}
        except OSError as error:  # of requests, and its JSON errors
            raise InputError(f"The Perspective API does not answer: {type(error).__name__}.") from None
        except (KeyError, TypeError, AttributeError):
            said = short(answer.get("error")) if isinstance(answer, dict) else short(answer)
            raise InputError(f"The Perspective API gave no scores: {response.status_code}, {said}.") from None


GRADERS: dict[str, Callable[[], Grader]] = {
    ProfanityCheck.name: ProfanityCheck, Detoxify.name: Detoxify, Perspective.name: Perspective
}  # fmt: skip
