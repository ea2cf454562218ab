"""The Perspective API as a grader, over HTTP: the grader of paper B's Table 5."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import requests
from jaxtyping import Float
from requests.adapters import HTTPAdapter
from tqdm.auto import tqdm
from urllib3.util import Retry

from matlens.errors import InputError
from matlens.signatures import checked

URL = "https://commentanalyzer.googleapis.com/v1alpha1/comments:analyze"
PER_SECOND = 1.0  # requests that a new key is allowed
_SECONDS = 30.0
_BUSY = (429, 500, 502, 503, 504)


@checked
class Perspective:
    """Grade texts by the Perspective API, one request a text.

    A request that is refused for now is repeated, later each time; the API is asked to store nothing. An
    empty text is not sent, and has the score 0.

    Parameters
    ----------
    key
        The key of the API. It travels in a header, and is in no message.
    attributes
        Attributes that every text is graded for, as the API names them but in small letters: ``toxicity``.
    url
        The address of the API, or of another server that speaks like it.
    per_second
        The largest number of requests in a second.
    retries
        How often a request is repeated.
    backoff
        Seconds between repetitions: the first follows at once, the second after twice this, and every pause
        is twice as long as the one before.

    Raises
    ------
    InputError
        The key is not usable.
    """

    name = "perspective"

    def __init__(
        self,
        key: str,
        attributes: Sequence[str],
        *,
        url: str = URL,
        per_second: float = PER_SECOND,
        retries: int = 6,
        backoff: float = 1.0,
    ) -> None:
        if not key or not key.isascii() or not key.isprintable() or " " in key:
            raise InputError(
                "The key of the Perspective API is not usable. Expected letters, digits and signs of ASCII "
                "without a space."
            )
        self.attributes = tuple(attributes)
        self._url, self._pause, self._last = url, 1 / per_second, -float("inf")
        repetition = Retry(
            total=retries, backoff_factor=backoff, status_forcelist=_BUSY, allowed_methods=("POST",),
            raise_on_status=False,
        )  # fmt: skip
        self._key, self._session = key, requests.Session()
        self._session.headers["x-goog-api-key"] = key
        for scheme in ("http://", "https://"):
            self._session.mount(scheme, HTTPAdapter(max_retries=repetition))

    def grade(self, texts: Sequence[str]) -> dict[str, Float[np.ndarray, " n"]]:
        """Scores of every text, for each attribute.

        Raises
        ------
        InputError
            The API does not answer, refuses, or its answer has no scores.
        """
        bar = tqdm(texts, desc="grading", unit="text", delay=1)
        rows = [self._scores(text) if text.strip() else dict.fromkeys(self.attributes, 0.0) for text in bar]
        return {name: np.array([row[name] for row in rows], dtype=np.float64) for name in self.attributes}

    def close(self) -> None:
        """Close the connection."""
        self._session.close()

    def _scores(self, text: str) -> dict[str, float]:
        request = {
            "comment": {"text": text},
            "languages": ["en"],
            "requestedAttributes": {name.upper(): {} for name in self.attributes},
            "doNotStore": True,
        }
        answer = self._post(request)
        try:
            scores = answer["attributeScores"]
            return {name: float(scores[name.upper()]["summaryScore"]["value"]) for name in self.attributes}
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(
                f"The Perspective API gave no score ({type(error).__name__}: {error}). Expected a summary "
                "score for each attribute; is the address that of the API?"
            ) from error

    def _post(self, request: dict[str, Any]) -> Any:
        time.sleep(max(self._last + self._pause - time.monotonic(), 0))
        try:
            answer = self._session.post(self._url, json=request, timeout=_SECONDS, allow_redirects=False)
        except requests.RequestException as failure:
            raise InputError(
                f"The Perspective API does not answer: {type(failure).__name__}. Expected a connection to "
                f"{self._url}. The grader profanity-check needs none."
            ) from failure
        finally:
            self._last = time.monotonic()
        try:
            content = answer.json()
        except requests.JSONDecodeError:
            content = None
        if answer.ok:
            return content
        error = content.get("error") if isinstance(content, dict) else None
        reason = str(error.get("message", "")) if isinstance(error, dict) else ""
        advice = {
            400: "Is the key valid?", 401: "Is the key valid?",
            403: "Is the key valid, and the API enabled for it?",
            429: "Too many requests for this key's quota: try again later.",
        }.get(answer.status_code, "Try again later.")  # fmt: skip
        quoted = f" ({reason.replace(self._key, '...')})" if reason else ""
        raise InputError(f"The Perspective API refuses with status {answer.status_code}{quoted}. {advice}")
