"""Graders give each text its scores, and say what is missing: a package, weights or a key."""

from __future__ import annotations

import json
import sys
import threading
import types
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import pytest
from control.graders import ATTRIBUTES, Perspective, grade_texts, make_grader

from matlens import InputError


def test_profanity_check_tells_rude_texts_from_kind_ones():
    grader = make_grader("profanity-check")
    rude, kind = ["You stupid idiot", "shut up, you moron"], ["Thank you, my dear friend", "", "zxqv"]
    scores = grader.grade([*rude, *kind])
    assert (scores["toxicity"][:2] > 0.9).all()
    assert (scores["toxicity"][2:] < 0.1).all()


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


def test_detoxify_is_asked_in_parts_and_its_attributes_get_the_tables_names(monkeypatch):
    monkeypatch.setitem(sys.modules, "detoxify", types.SimpleNamespace(Detoxify=Scored))
    Scored.asked = []
    grader = make_grader("detoxify")
    texts = ["x" * n for n in range(33)]
    graded = grader.grade(texts)
    assert [len(one) for one in Scored.asked] == [32, 1]
    assert grader.attributes == tuple(ATTRIBUTES) == tuple(graded)
    for name, scores in graded.items():
        expected = np.arange(33) / 100
        np.testing.assert_allclose(scores, 1 - expected if name == "profanity" else expected)


@pytest.fixture
def server(monkeypatch):
    """Answers with a score by attribute and length of the text, after what is put in ``first``."""
    seen = types.SimpleNamespace(first=[], asked=[])

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            seen.asked.append((self.headers["x-goog-api-key"], body))
            length = len(body["comment"]["text"])
            scores = {
                name: {"summaryScore": {"value": (i + length) / 100}}
                for i, name in enumerate(body["requestedAttributes"])
            }
            status, answer = seen.first.pop(0) if seen.first else (200, {"attributeScores": scores})
            text = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.send_header("Location", "/elsewhere")
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: Any) -> None:
            pass

    running = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    monkeypatch.setenv("PERSPECTIVE_API_KEY", "a-secret-key")
    url = f"http://127.0.0.1:{running.server_port}/analyze"
    seen.grader = Perspective(url=url, per_second=1000, backoff=0.0)
    yield seen
    running.shutdown()
    thread.join()
    running.server_close()


def test_perspective_is_asked_for_all_attributes_again_while_it_is_busy(server):
    server.first = [(429, {}), (503, {})]
    scores = grade_texts(server.grader, ["four", " ", "seven77"])
    for i, name in enumerate(ATTRIBUTES):
        assert scores[name].tolist() == pytest.approx([(i + 4) / 100, 0, (i + 7) / 100])
    assert [body["comment"]["text"] for _, body in server.asked] == ["four"] * 3 + ["seven77"]
    assert {key for key, _ in server.asked} == {"a-secret-key"}
    assert all(body["doNotStore"] for _, body in server.asked)


@pytest.mark.parametrize("first", [(400, {"error": {"message": "no"}}), (302, {}), (200, [1])])
def test_an_answer_without_scores_is_refused_without_the_key(first, server):
    server.first = [first]
    with pytest.raises(InputError, match=f"gave no scores: {first[0]}") as error:
        server.grader.grade(["text"])
    assert "secret" not in str(error.value)
    assert len(server.asked) == 1
