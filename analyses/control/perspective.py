"""The Perspective API as a grader, over HTTP: the grader of paper B's Table 5."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Annotated, Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

import numpy as np
import requests
from jaxtyping import Float
from urllib3.exceptions import HTTPError

from matlens.errors import Between, InputError, NonNegative, checked, printable
from matlens.io.bounds import parse_json
from matlens.parallel import Bar

URL = "https://commentanalyzer.googleapis.com/v1alpha1/comments:analyze"
PER_SECOND = 1.0  # requests that a new key is allowed
LONGEST_PAUSE = 60.0  # seconds that are waited for a server at once, whatever it asks for
_SECONDS = 30.0  # for a connection, and for each piece of an answer
_SECONDS_IN_ALL = 90.0  # for an answer that comes piece by piece
_LARGEST_ANSWER = 2**20
_SHOWN_PAUSE = 5.0
_QUOTED = 300  # characters of what a server says
_BUSY = (429, 500, 502, 503, 504)
_BAR_DELAY = 1
Result = TypeVar("Result")


class _Answer(NamedTuple):
    status: int
    retry_after: str | None
    content: Any


@checked
class Perspective:
    """Grade texts by the Perspective API, one request a text.

    A request that is refused for now is repeated, later each time, or when the server says: but never more
    than `LONGEST_PAUSE` seconds later. The API is asked to store nothing, and is followed to no other
    address. An empty text is not sent, and has the score 0.

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
        The key, the address or another parameter is not usable.
    """

    name = "perspective"

    def __init__(
        self,
        key: str,
        attributes: Sequence[str],
        *,
        url: str = URL,
        per_second: Annotated[float, Between(1e-06)] = PER_SECOND,
        retries: Annotated[int, Between(0, 1000)] = 6,
        backoff: NonNegative = 1.0,
    ) -> None:
        if not (key.isascii() and key.isprintable() and " " not in key and 0 < len(key) <= 4096):
            raise InputError(
                "The key of the Perspective API is not usable. Expected letters, digits and signs of ASCII "
                "without a space."
            )
        self._key = key
        self.attributes = tuple(attributes)
        self._url, self._address = url, self._clean(_without_secrets(url))
        self._pause, self._last = 1 / per_second, -math.inf
        self._retries, self._backoff = retries, backoff
        self._session = requests.Session()
        # What a server packs could be of any size once it is unpacked.
        self._session.headers.update({"x-goog-api-key": key, "Accept-Encoding": "identity"})

    def grade(self, texts: Sequence[str]) -> dict[str, Float[np.ndarray, " n"]]:
        """Scores of every text, for each attribute.

        Raises
        ------
        InputError
            The API does not answer, refuses, or its answer has no scores from 0 to 1.
        """
        bar = Bar(texts, desc="grading", unit="text", delay=_BAR_DELAY)
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
        content = self._post(request)
        return {name: self._score(content, name) for name in self.attributes}

    def _score(self, content: Any, name: str) -> float:
        value = content
        for key in ("attributeScores", name.upper(), "summaryScore", "value"):
            value = value.get(key) if isinstance(value, Mapping) else None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise InputError(
                f"The Perspective API gave no score of {name}. Expected a summary score for each attribute; "
                "is the address that of the API?"
            )
        if not 0 <= value <= 1:
            raise InputError(
                f"The Perspective API gave {self._clean(repr(value))} as the score of {name}. Expected a "
                "number from 0 to 1; is the address that of the API?"
            )
        return float(value)

    def _post(self, request: dict[str, Any]) -> Any:
        """The content of the answer, asked for again where the server is busy."""
        time.sleep(max(self._last + self._pause - time.monotonic(), 0))
        for repetition in range(self._retries + 1):
            last, failure, answer = repetition == self._retries, None, None
            try:
                answer = within(_SECONDS_IN_ALL, lambda: self._ask(request))
            except (requests.RequestException, HTTPError, OSError) as error:
                failure, last = type(error).__name__, last or isinstance(error, ValueError)
            finally:
                self._last = time.monotonic()
            if answer is not None and (answer.status not in _BUSY or last):
                return self._content(answer)
            if failure and last:
                # Raised out here: the words of what was raised first may hold the address, and that a key.
                raise InputError(
                    f"The Perspective API does not answer: {failure}. Expected a connection to "
                    f"{self._address}. The grader profanity-check needs none."
                )
            self._wait(repetition, None if answer is None else answer.retry_after)
        raise AssertionError("the last repetition answers or raises")

    def _ask(self, request: dict[str, Any]) -> _Answer:
        with self._session.post(
            self._url, json=request, timeout=_SECONDS, allow_redirects=False, stream=True
        ) as response:
            body = b""
            if not response.is_redirect:
                body = response.raw.read(_LARGEST_ANSWER + 1, decode_content=False)
            if len(body) > _LARGEST_ANSWER:
                raise InputError(
                    f"The Perspective API answers with more than {_LARGEST_ANSWER:,} bytes. Expected scores; "
                    "is the address that of the API?"
                )
            try:
                content = parse_json(body.decode(), "its answer")
            except (InputError, UnicodeDecodeError):
                content = None
            return _Answer(response.status_code, response.headers.get("Retry-After"), content)

    def _content(self, answer: _Answer) -> Any:
        if answer.status == 200:
            return answer.content
        error = answer.content.get("error") if isinstance(answer.content, dict) else None
        message = error.get("message") if isinstance(error, dict) else None
        quoted = f" ({self._clean(message)})" if isinstance(message, str) and message else ""
        advice = {
            400: "Is the key valid?", 401: "Is the key valid?",
            403: "Is the key valid, and the API enabled for it?",
            429: "Too many requests for this key's quota: try again later.",
        }.get(answer.status, "Try again later.")  # fmt: skip
        if 300 <= answer.status < 400:
            advice = "It sends to another address, where the key does not go: is the address that of the API?"
        raise InputError(f"The Perspective API refuses with status {answer.status}{quoted}. {advice}")

    def _wait(self, repetition: int, asked: str | None) -> None:
        wanted = None if asked is None else retry_seconds(asked)
        if wanted is None:
            wanted = self._backoff * 2.0**repetition if repetition else 0.0
        pause = min(wanted, LONGEST_PAUSE)
        if pause >= _SHOWN_PAUSE or pause < wanted:
            longer = "" if pause == wanted else ", though it asks for longer"
            Bar.write(f"The Perspective API is busy; asking again in {pause:.0f} seconds{longer}.")
        time.sleep(pause)

    def _clean(self, text: str) -> str:
        return printable(text.replace(self._key, "..."), most=_QUOTED)


def retry_seconds(text: str) -> float | None:
    """Seconds that a ``Retry-After`` asks to wait, from now where it is a date; None where it is neither."""
    text = text.strip()
    if text.isascii() and text.isdigit():
        return float(text) if len(text) < 20 else math.inf
    try:
        date = parsedate_to_datetime(text)
        date = date if date.tzinfo else date.replace(tzinfo=UTC)
        return max((date - datetime.now(UTC)).total_seconds(), 0.0)
    except (ValueError, TypeError, OverflowError, IndexError):
        return None


def within(seconds: float, work: Callable[[], Result]) -> Result:
    """Do some work and wait for it no longer than this: a server can keep a connection busy for ever.

    Raises
    ------
    TimeoutError
        It takes longer. It is left to itself.
    """
    results: list[Result] = []
    failures: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as failure:
            failures.append(failure)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if failures:
        raise failures[0]
    if not results:
        raise TimeoutError("no whole answer in time")
    return results[0]


def _without_secrets(url: str) -> str:
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        host = None
    if not host or parts.scheme not in ("http", "https"):
        raise InputError("The address of the API is not usable. Expected one that begins with https://.")
    return f"{parts.scheme}://{host}{f':{port}' if port else ''}{parts.path}"
