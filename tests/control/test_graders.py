"""Graders give each text its scores, and say what is missing; the API is asked as it wants to be asked."""

from __future__ import annotations

import json
import sys
import threading
import types
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import pytest

from matlens import InputError
from matlens.control import perspective
from matlens.control.attributes import ATTRIBUTES
from matlens.control.graders import make_grader
from matlens.control.perspective import Perspective

SECRET = "a-secret-key"


# The local one


def test_profanity_check_tells_rude_texts_from_kind_ones() -> None:
    grader = make_grader("profanity-check")
    assert (grader.name, grader.attributes) == ("profanity-check", ("toxicity",))
    rude, kind = ["You stupid idiot", "shut up, you moron"], ["Thank you, my dear friend", "", "zxqv"]
    found = grader.grade([*rude, *kind])
    assert set(found) == {"toxicity"}
    assert found["toxicity"].dtype == np.float64
    assert (found["toxicity"][:2] > 0.9).all()
    assert (found["toxicity"][2:] < 0.1).all()
    np.testing.assert_allclose(grader.grade(kind)["toxicity"], found["toxicity"][2:])
    assert grader.grade([])["toxicity"].shape == (0,)


# detoxify, which a stand-in of its interface takes the place of


class Scored:
    """Gives the length of each text, as lists, and as a bare number for a single one, as detoxify does."""

    asked: list[list[str]]

    def __init__(self, kind: str) -> None:
        assert kind == "unbiased"

    def predict(self, texts: list[str]) -> dict[str, Any]:
        self.asked.append(texts)
        lengths = [len(text) / 100 for text in texts]
        names = (
            "toxicity", "severe_toxicity", "obscene", "identity_attack", "insult", "threat",
            "sexual_explicit",
        )  # fmt: skip
        shown = lengths if len(texts) > 1 else lengths[0]
        return {name: shown if name != "obscene" else [1 - n for n in lengths] for name in names}


def test_detoxify_is_asked_in_parts_and_its_attributes_get_the_tables_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "detoxify", types.SimpleNamespace(Detoxify=Scored))
    Scored.asked = []
    grader = make_grader("detoxify")
    texts = ["x" * n for n in range(33)]
    found = grader.grade(texts)
    assert [len(one) for one in Scored.asked] == [32, 1]
    assert grader.attributes == tuple(ATTRIBUTES) == tuple(found)
    for name, scores in found.items():
        expected = np.arange(33) / 100
        np.testing.assert_allclose(scores, 1 - expected if name == "profanity" else expected)
    assert all(scores.shape == (0,) for scores in grader.grade([]).values())


def test_weights_of_detoxify_that_cannot_be_had_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(kind: str) -> None:
        raise OSError("no route to host")

    monkeypatch.setitem(sys.modules, "detoxify", types.SimpleNamespace(Detoxify=fail))
    with pytest.raises(InputError, match=r"weights of detoxify could not be had: no route to host\..*github"):
        make_grader("detoxify")


@pytest.mark.parametrize(
    ("name", "module", "told"),
    [
        ("profanity-check", "profanity_check", r"'matlens\[graders\]', or: pip install alt-profanity-check"),
        ("detoxify", "detoxify", r"'matlens\[detoxify\]', or: pip install detoxify"),
        ("perspective", "requests", r"'matlens\[graders\]', or: pip install requests"),
    ],
)
def test_a_package_that_is_not_there_is_told_with_how_to_get_it(
    name: str, module: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PERSPECTIVE_API_KEY", SECRET)
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.delitem(sys.modules, "matlens.control.perspective")
    with pytest.raises(InputError, match=told) as raised:
        make_grader(name)
    assert SECRET not in str(raised.value)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("wine", r"There is no grader 'wine'\. Expected one of profanity-check, detoxify, perspective\.$"),
        ("perspectve", r"Did you mean 'perspective'\?"),
        ("Detoxify", r"Did you mean 'detoxify'\?"),
    ],
)
def test_an_unknown_grader_is_told_with_the_names_there_are(name: str, told: str) -> None:
    with pytest.raises(InputError, match=told):
        make_grader(name)


# Perspective, against a server of our own


class Server:
    """Answers like the API, with what it is told to answer first, and remembers what it was asked."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.first: list[tuple[int, dict[str, str], Any]] = []
        self.asked: list[tuple[dict[str, str], dict[str, Any]]] = []


def answer(asked: dict[str, Any]) -> dict[str, Any]:
    """A score for each attribute that depends on the attribute and the text."""
    length = len(asked["comment"]["text"])
    return {
        "attributeScores": {
            name: {"summaryScore": {"value": (i + length) / 100, "type": "PROBABILITY"}}
            for i, name in enumerate(sorted(asked["requestedAttributes"]))
        }
    }


@pytest.fixture
def server() -> Iterator[Server]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            one.asked.append(({key.lower(): value for key, value in self.headers.items()}, body))
            status, headers, content = one.first.pop(0) if one.first else (200, {}, answer(body))
            text = (content if isinstance(content, str) else json.dumps(content)).encode()
            self.send_response(status)
            for key, value in ({"Content-Length": str(len(text))} | headers).items():
                self.send_header(key, value)
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: Any) -> None:
            pass

    running = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    running.daemon_threads = True
    one = Server(f"http://127.0.0.1:{running.server_port}/v1alpha1/comments:analyze")
    thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield one
    running.shutdown()
    thread.join()
    running.server_close()


@pytest.fixture
def ask(server: Server) -> Iterator[Callable[..., Perspective]]:
    made: list[Perspective] = []

    def make(**options: Any) -> Perspective:
        made.append(Perspective(SECRET, **{"url": server.url, "per_second": 1e6, "backoff": 0.0} | options))
        return made[-1]

    yield make
    for grader in made:
        grader.close()


def test_every_text_is_asked_for_with_all_six_attributes(
    server: Server, ask: Callable[..., Perspective]
) -> None:
    grader = ask()
    found = grader.grade(["abc", "", "  ", "hello world"])
    assert grader.attributes == tuple(ATTRIBUTES) == tuple(found)
    for i, name in enumerate(sorted(ATTRIBUTES)):
        assert found[name].tolist() == [(i + 3) / 100, 0, 0, (i + 11) / 100]
    assert [body["comment"]["text"] for _, body in server.asked] == ["abc", "hello world"]
    for headers, body in server.asked:
        assert headers["x-goog-api-key"] == SECRET
        assert set(body["requestedAttributes"]) == {name.upper() for name in ATTRIBUTES}
        assert (body["languages"], body["doNotStore"]) == (["en"], True)
    assert grader.grade([])["threat"].shape == (0,)


@pytest.mark.parametrize("status", [429, 500, 503])
def test_what_is_refused_for_now_is_asked_again(
    status: int, server: Server, ask: Callable[..., Perspective]
) -> None:
    server.first = [(status, {"Retry-After": "0"}, "busy")] * 3
    assert ask().grade(["abc"])["toxicity"].shape == (1,)
    assert len(server.asked) == 4


def test_the_pauses_between_repetitions_grow(
    server: Server, ask: Callable[..., Perspective], monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []
    monkeypatch.setattr("time.sleep", pauses.append)
    server.first = [(503, {}, "")] * 4
    ask(backoff=1.0).grade(["abc"])
    assert [pause for pause in pauses if pause > 0] == [2, 4, 8]


def test_no_more_requests_are_sent_in_a_second_than_allowed(
    server: Server, ask: Callable[..., Perspective], monkeypatch: pytest.MonkeyPatch
) -> None:
    now, pauses = [100.0], []

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        now[0] += seconds

    clock = types.SimpleNamespace(sleep=sleep, monotonic=lambda: now[0])
    monkeypatch.setattr(perspective, "time", clock)
    ask(per_second=4.0).grade(["a", "b", "c"])
    assert pauses == [0, 0.25, 0.25]
    assert ask(per_second=4.0) is not None
    now[0] += 1
    grader = ask(per_second=4.0)
    grader.grade(["a"])
    now[0] += 0.2
    grader.grade(["b"])
    assert pauses[3:] == [0, pytest.approx(0.05)]


@pytest.mark.parametrize(
    ("first", "told"),
    [
        ((400, {}, {"error": {"message": "Not valid."}}), r"status 400 \(Not valid.\)\. Is the key valid"),
        ((403, {}, {"error": {"message": f"{SECRET} is off"}}), r"status 403 \(\.\.\. is off\).*enabled"),
        ((401, {}, "<html>no</html>"), r"status 401\. Is the key valid"),
        ((418, {}, {"error": "odd"}), r"status 418\. Try again later"),
        ((200, {}, "<html>a login page</html>"), "gave no score"),
        ((200, {}, {"attributeScores": {}}), "gave no score .*'TOXICITY'"),
        ((200, {}, [1]), "gave no score"),
        ((302, {"Location": "http://127.0.0.1:1/"}, ""), "gave no score"),
    ],
)  # fmt: skip
def test_what_the_api_refuses_is_told_without_the_key(
    first: Any, told: str, server: Server, ask: Callable[..., Perspective]
) -> None:
    server.first = [first]
    with pytest.raises(InputError, match=told) as raised:
        ask().grade(["abc"])
    assert_silent(raised.value)
    assert len(server.asked) == 1


def test_an_api_that_stays_busy_is_told(server: Server, ask: Callable[..., Perspective]) -> None:
    server.first = [(429, {}, {"error": {"message": "Quota exceeded"}})] * 9
    with pytest.raises(InputError, match=r"status 429 \(Quota exceeded\)\. Too many requests"):
        ask(retries=2).grade(["abc"])
    assert len(server.asked) == 3


def test_an_api_that_does_not_answer_is_told(ask: Callable[..., Perspective]) -> None:
    with pytest.raises(InputError, match="does not answer: ConnectionError") as raised:
        ask(url="http://127.0.0.1:9/analyze", retries=1).grade(["abc"])
    assert_silent(raised.value)


def assert_silent(error: BaseException | None) -> None:
    """The key is in no message, of what was raised first neither."""
    while error is not None:
        assert SECRET not in f"{error} {error!r}"
        error = error.__cause__ or error.__context__


@pytest.mark.parametrize("key", [None, "", "  "])
def test_without_a_key_there_is_no_perspective(key: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PERSPECTIVE_API_KEY", raising=False)
    if key is not None:
        monkeypatch.setenv("PERSPECTIVE_API_KEY", key)
    with pytest.raises(InputError, match=r"PERSPECTIVE_API_KEY is not set.*export PERSPECTIVE_API_KEY="):
        make_grader("perspective")


@pytest.mark.parametrize("key", ["a b", "schlüssel-öde", f"{SECRET}\nX-More: 1"])
def test_what_cannot_travel_in_a_header_is_no_key(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERSPECTIVE_API_KEY", key)
    with pytest.raises(InputError, match="key of the Perspective API is none") as raised:
        make_grader("perspective")
    assert key not in str(raised.value)
    assert SECRET not in str(raised.value)


def test_the_key_comes_from_the_environment_and_is_shown_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERSPECTIVE_API_KEY", f" {SECRET}\n")
    grader = make_grader("perspective")
    assert isinstance(grader, Perspective)
    assert SECRET not in f"{grader} {grader!r}"
    grader.close()
