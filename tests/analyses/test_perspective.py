"""The API is asked as it wants to be asked, against a server of our own, and its refusals are told."""

from __future__ import annotations

import json
import threading
import types
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from control import perspective
from control.graders import ATTRIBUTES
from control.perspective import Perspective, retry_seconds, within

from matlens import InputError

SECRET = "a-secret-key"


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
        given = {"url": server.url, "per_second": 1e6, "backoff": 0.0} | options
        made.append(Perspective(SECRET, tuple(ATTRIBUTES), **given))
        return made[-1]

    yield make
    for grader in made:
        grader.close()


def test_every_text_is_asked_for_with_all_six_attributes(
    server: Server, ask: Callable[..., Perspective]
) -> None:
    grader = ask()
    graded = grader.grade(["abc", "", "  ", "hello world"])
    assert grader.attributes == tuple(ATTRIBUTES) == tuple(graded)
    for i, name in enumerate(sorted(ATTRIBUTES)):
        assert graded[name].tolist() == [(i + 3) / 100, 0, 0, (i + 11) / 100]
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
    ("first", "message"),
    [
        ((400, {}, {"error": {"message": "Not valid."}}), r"status 400 \(Not valid.\)\. Is the key valid"),
        ((403, {}, {"error": {"message": f"{SECRET} is off"}}), r"status 403 \(\.\.\. is off\).*enabled"),
        ((401, {}, "<html>no</html>"), r"status 401\. Is the key valid"),
        ((418, {}, {"error": "odd"}), r"status 418\. Try again later"),
        ((200, {}, "<html>a login page</html>"), "gave no score"),
        ((200, {}, {"attributeScores": {}}), "gave no score of toxicity"),
        ((200, {}, [1]), "gave no score"),
        ((302, {"Location": "http://127.0.0.1:1/"}, ""), r"status 302\. It sends to another address"),
    ],
)  # fmt: skip
def test_what_the_api_refuses_is_told_without_the_key(
    first: Any, message: str, server: Server, ask: Callable[..., Perspective]
) -> None:
    server.first = [first]
    with pytest.raises(InputError, match=message) as raised:
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


def scored(value: Any) -> dict[str, Any]:
    names = [name.upper() for name in ATTRIBUTES]
    return {"attributeScores": {name: {"summaryScore": {"value": value}} for name in names}}


@pytest.mark.parametrize(
    "value", ["0.5", None, True, float("nan"), float("inf"), -0.1, 1.0001, [0.5], {}, 10**400]
)
def test_what_is_no_score_from_0_to_1_is_told(
    value: Any, server: Server, ask: Callable[..., Perspective]
) -> None:
    server.first = [(200, {}, scored(value))]
    with pytest.raises(
        InputError, match=r"The Perspective API gave .* score of toxicity\. Expected"
    ) as raised:
        ask().grade(["abc"])
    assert len(str(raised.value)) < 700


@pytest.mark.parametrize(
    "content",
    [
        "[" * 50_000, '{"attributeScores": ' + "9" * 6000 + "}", '{"attributeScores": {"TOXICITY": 1}}',
        '{"attributeScores": "x"}', "null", "", b"\xff\xfe\x00".decode("latin-1"), '{"a": 1, "a": 2}',
    ],
)  # fmt: skip
def test_odd_answers_have_no_score(content: str, server: Server, ask: Callable[..., Perspective]) -> None:
    server.first = [(200, {}, content)]
    with pytest.raises(InputError, match="gave no score of toxicity"):
        ask().grade(["abc"])


def test_an_answer_is_no_larger_than_scores_are(server: Server, ask: Callable[..., Perspective]) -> None:
    server.first = [(200, {}, " " * 2**21)]
    with pytest.raises(InputError, match="answers with more than 1,048,576 bytes"):
        ask().grade(["abc"])


def test_what_a_server_says_is_cut_and_does_nothing_to_the_terminal(
    server: Server, ask: Callable[..., Perspective]
) -> None:
    said = f"\x1b]0;owned\x07\u202e{SECRET}\r\n{'x' * 10_000}"
    server.first = [(400, {}, {"error": {"message": said}})]
    with pytest.raises(InputError) as raised:
        ask().grade(["abc"])
    assert_silent(raised.value)
    assert str(raised.value).isprintable()
    assert len(str(raised.value)) < 500
    assert "x1b]0;owned" in str(raised.value)


@pytest.mark.parametrize(
    ("asked", "pause", "told"),
    [
        ("0", 0, ""),
        ("3", 3, ""),
        (" 30 ", 30, "asking again in 30 seconds."),
        ("86400", 60, "in 60 seconds, though it asks for longer"),
        ("9" * 5000, 60, "though it asks for longer"),
        ("-5", 0, ""),
        ("1e9", 0, ""),
        ("soon", 0, ""),
        ("nan", 0, ""),
        ("", 0, ""),
        ("Thu, 01 Jan 1970 00:00:00 GMT", 0, ""),
        ("Thu, 01 Jan 2970 00:00:00 GMT", 60, "asks for longer"),
        ("Thu, 99 Foo 99999 99:99:99 XXX", 0, ""),
    ],
)
def test_the_pause_that_a_server_asks_for_is_capped_and_told(
    asked: str, pause: float, told: str, server: Server, ask: Callable[..., Perspective],
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    pauses: list[float] = []
    monkeypatch.setattr("time.sleep", pauses.append)
    server.first = [(429, {"Retry-After": asked}, "")]
    ask().grade(["abc"])
    assert max(pauses) == pytest.approx(pause)
    assert told in (printed := capsys.readouterr().out)
    assert bool(told) == ("busy" in printed)


def test_a_date_is_so_many_seconds_away() -> None:
    then = datetime.now(UTC) + timedelta(seconds=1000)
    for text in (format_datetime(then, usegmt=True), format_datetime(then)):
        assert retry_seconds(text) == pytest.approx(1000, abs=30)


def test_work_that_takes_too_long_is_left_to_itself() -> None:
    waiting = threading.Event()
    with pytest.raises(TimeoutError, match="no whole answer"):
        within(0.05, lambda: waiting.wait(20))
    waiting.set()
    assert within(20, lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        within(20, lambda: 1 / 0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"url": "ftp://x/y"}, "address of the API is not usable"),
        ({"url": "x"}, "address"),
        ({"url": "http://[::1"}, "address"),
        ({"per_second": 0}, r"^per_second must be"),
        ({"retries": -1}, r"^retries must be"),
        ({"backoff": -1}, r"^backoff must be"),
    ],
)
def test_odd_options_are_told(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Perspective(SECRET, ("toxicity",), **options)


def test_the_address_is_told_without_what_is_secret_in_it(ask: Callable[..., Perspective]) -> None:
    grader = ask(url=f"http://user:{SECRET}@127.0.0.1:9/{SECRET}/x?key={SECRET}", retries=0)
    with pytest.raises(InputError, match=r"connection to http://127\.0\.0\.1:9/\.\.\./x\.") as raised:
        grader.grade(["abc"])
    assert_silent(raised.value)


def assert_silent(error: BaseException | None) -> None:
    """The key is in no message, of what was raised first neither."""
    while error is not None:
        assert SECRET not in f"{error} {error!r}"
        error = error.__cause__ or error.__context__


@pytest.mark.parametrize("key", ["", "a b", "schlüssel-öde", f"{SECRET}\nX-More: 1"])
def test_what_cannot_travel_in_a_header_is_no_key(key: str) -> None:
    with pytest.raises(InputError, match="key of the Perspective API is not usable") as raised:
        Perspective(key, tuple(ATTRIBUTES))
    assert not key or key not in str(raised.value)
    assert SECRET not in str(raised.value)
