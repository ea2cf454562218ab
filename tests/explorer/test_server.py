"""The server, and what a request can change."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import httpx
import pytest
import torch
import uvicorn
from browsing import Visit, visiting
from conftest import make_sentences

import matlens
from matlens import InputError, MapSet
from matlens.explorer import LiveModel, explore
from matlens.explorer import server as server_module
from matlens.explorer.changes import Change, compare_changes, offered_maps
from matlens.ffn import controlled
from matlens.models.layout import ModelLayout
from matlens.patching import fit_submodules, mat_attn, mat_ffn, mat_ln1_ln2, submodule_pairs

TOKEN = "a-secret"
PORT = 8765
HUGE = b"1" + 400 * b"0"  # an integer past the range of floats


@pytest.fixture(scope="module")
def live(small_model):
    return LiveModel(small_model("gpt2"), token=TOKEN, port=PORT)


def ask(
    live: LiveModel, method: str, path: str, *, headers: dict[str, str] | None = None, **options: Any
) -> httpx.Response:
    async def answer() -> httpx.Response:
        transport = httpx.ASGITransport(live.application)
        async with httpx.AsyncClient(transport=transport, base_url=f"http://127.0.0.1:{PORT}") as client:
            return await client.request(method, path, headers=headers, **options)

    return completed(answer())


def completed(work: Coroutine[Any, Any, Any]) -> Any:
    """What a coroutine gives, run in a thread of its own: the browser's driver has this thread's loop."""
    with ThreadPoolExecutor(1) as worker:
        return worker.submit(asyncio.run, work).result()


def test_a_prompt_is_explored_shown_and_saved(live, small_model):
    page = ask(live, "GET", f"/{TOKEN}/")
    assert page.status_code == 200
    assert "connect-src" in page.text
    assert page.headers["cache-control"] == "no-store"
    answer = ask(live, "POST", f"/{TOKEN}/explore", json={"prompt": "w1 w2 w3"})
    shown = ask(live, "GET", f"/{TOKEN}/{answer.json()['page']}")
    assert shown.text == explore(small_model("gpt2"), "w1 w2 w3", progress=False).to_html()
    saved = ask(live, "GET", f"/{TOKEN}/{answer.json()['page']}?save")
    assert saved.headers["content-disposition"].startswith("attachment")
    assert saved.text == shown.text


def test_a_page_has_the_modified_model_next_to_the_original(live, small_model):
    model, changes = small_model("gpt2"), [{"kind": "value", "target": "L1D3", "value": 40}]
    answer = ask(live, "POST", f"/{TOKEN}/explore", json={"prompt": "w1 w2 w3", "changes": changes})
    shown = ask(live, "GET", f"/{TOKEN}/{answer.json()['page']}").text
    page = explore(model, "w1 w2 w3", changed=controlled(model, {"L1D3": 40.0}), progress=False)
    assert shown == replace(page, modification="coefficient of a value vector L1D3: 40").to_html()
    refused = ask(live, "POST", f"/{TOKEN}/explore", json={"prompt": "w1", "changes": [{"kind": "x"}]})
    assert refused.status_code == 400


def test_the_modified_model_is_compared_with_the_original(live, small_model):
    model = small_model("gpt2")
    changes = [{"kind": "value", "target": "L1D3", "value": 40}, {"kind": "attn", "target": "0"}]
    answer = ask(live, "POST", f"/{TOKEN}/compare", json={"prompt": "w1 w2", "changes": changes}).json()
    tokens = torch.tensor([[3, 4]])
    with torch.inference_mode():
        plain = model(tokens, return_type="logits")[0, -1].softmax(-1).topk(10).values
        attention = model.original_model.transformer.h[0].attn
        hook = attention.register_forward_hook(lambda m, a, out: (torch.zeros_like(out[0]), *out[1:]))
        try:
            ffn = model.original_model.transformer.h[1].mlp.c_proj
            setting = ffn.register_forward_pre_hook(
                lambda m, a: (a[0].index_fill(-1, torch.tensor([3]), 40.0),)
            )
            changed = model.original_model(tokens).logits[0, -1].softmax(-1).topk(10).values
        finally:
            hook.remove()
            setting.remove()
    torch.testing.assert_close(torch.tensor([p for _, p in answer["before"]["tokens"]]), plain)
    torch.testing.assert_close(torch.tensor([p for _, p in answer["after"]["tokens"]]), changed)
    assert len(answer["after"]["continuation"].split()) == 20
    jumped = compare_changes(model, "w1 w2", [Change("jump", "0-3")])[1]
    with torch.inference_mode():
        stream = model.original_model.transformer
        h = stream.wte(tokens) + stream.wpe(torch.arange(2))
        logits = model.original_model.lm_head(stream.ln_f(h))[0, -1]
    torch.testing.assert_close(
        torch.tensor([p for _, p in jumped.tokens]), logits.softmax(-1).topk(10).values
    )


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"host": "evil.test"}, 403), ({"host": "127.0.0.1:1"}, 403), ({"origin": "http://evil.test"}, 403),
        ({"origin": "null"}, 403), ({"origin": f"https://127.0.0.1:{PORT}"}, 403),
        ({"origin": f"http://127.0.0.1:{PORT}"}, 200), ({"host": f"localhost:{PORT}"}, 200),
    ],
)  # fmt: skip
def test_other_hosts_and_origins_are_refused(live, headers, status):
    assert ask(live, "GET", f"/{TOKEN}/", headers=headers).status_code == status


def test_requests_without_the_token_are_refused(live):
    for path in ("/", "/wrong/", f"/{TOKEN}x/", f"/{TOKEN}/page/none", "/../etc/passwd"):
        assert ask(live, "GET", path).status_code == 404
    assert ask(live, "POST", "/wrong/explore", json={"prompt": "w1"}).status_code == 404
    assert ask(live, "GET", f"/{TOKEN}/explore").status_code == 405
    assert len(LiveModel(live._model).address) > 50


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 400), (b"[]", 400), (b"\xff", 400), (b'{"prompt": 3}', 400), (b"[" * 5000, 400),
        (b'{"prompt": "' + b"a" * 70_000 + b'"}', 413),
        (b'{"prompt": "' + b"a" * 9000 + b'"}', 400), (b'{"prompt": "w1", "changes": 1}', 400),
        (b'{"prompt": "w1", "changes": [1]}', 400),
        (b'{"prompt": "w1", "changes": [{"kind": "value"}]}', 400),
        (b'{"prompt": "w1", "changes": [{"kind": "x", "target": "1"}]}', 422),
        (b'{"prompt": "w1", "changes": [{"kind": "value", "target": "L9D1"}]}', 422),
        (b'{"prompt": "w1", "changes": [{"kind": "value", "target": "L1D1", "value": 1e999}]}', 422),
        (b'{"prompt": "w1", "changes": [{"kind": "value", "target": "L1D1", "value": 1e39}]}', 422),
        (b'{"prompt": "w1", "changes": [{"kind": "value", "target": "L1D1", "value": 1e38}]}', 422),
        (b'{"prompt": "w1", "changes": [{"kind": "value", "target": "L1D1", "value": %s}]}' % HUGE, 422),
        (b'{"prompt": "\\ud800"}', 400),
    ],
)  # fmt: skip
def test_oversized_and_malformed_requests_are_refused(live, body, status):
    answer = ask(
        live, "POST", f"/{TOKEN}/compare", content=body, headers={"content-type": "application/json"}
    )
    assert (answer.status_code, answer.json().keys()) == (status, {"error"})


def test_one_request_is_computed_at_a_time_and_too_many_are_refused(live, monkeypatch):
    """Requests that cost nothing are answered meanwhile."""
    ends, calls = threading.Event(), list[int]()
    monkeypatch.setattr(server_module, "_WAITING", 5)

    def slow(*_: Any, **__: Any) -> Any:
        calls.append(1)
        assert ends.wait(60)
        raise InputError("no answer is needed")

    monkeypatch.setattr(server_module, "compare_changes", slow)
    page = live._store("<p>stored</p>")

    async def clients() -> tuple[list[int], list[int]]:
        transport = httpx.ASGITransport(live.application)
        async with httpx.AsyncClient(
            transport=transport, base_url=f"http://127.0.0.1:{PORT}", timeout=60
        ) as client:
            compare = f"/{TOKEN}/compare"
            slow = [asyncio.create_task(client.post(compare, json={"prompt": "w1"})) for _ in range(5)]
            while not calls or live._waiting < 5:
                await asyncio.sleep(0.005)
            fast = [await client.get(f"/{TOKEN}/{path}") for path in ("", page, "page/none")]
            fast.append(await client.post(compare, content=b"{"))
            fast.append(await client.post(compare, json={"prompt": "w1"}))
            assert len(calls) == 1
            ends.set()
            return [a.status_code for a in fast], [a.status_code for a in await asyncio.gather(*slow)]

    try:
        fast, slow_ones = completed(clients())
    finally:
        ends.set()
    assert (fast, slow_ones, live._waiting) == ([200, 200, 404, 415, 503], [422] * 5, 0)


@pytest.fixture
def address(live):
    """The address of a server that listens."""
    config = uvicorn.Config(live.application, host="127.0.0.1", port=0, log_level="error")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    live._hosts.add(f"127.0.0.1:{port}")
    yield f"http://127.0.0.1:{port}/{TOKEN}/"
    server.should_exit = True
    thread.join()


@contextmanager
def asking(address: str, prompt: str) -> Iterator[None]:
    """A request whose sender closes the connection without waiting for the answer."""
    url, content = httpx.URL(address), json.dumps({"prompt": prompt}).encode()
    head = (
        f"POST {url.path}compare HTTP/1.1\r\nHost: {url.host}:{url.port}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    with socket.create_connection((url.host, url.port), 60) as connection:
        connection.sendall(head.encode() + content)
        yield


def test_abandoned_requests_are_not_computed(live, address, monkeypatch):
    """One whose sender leaves while it waits for its turn."""
    calls: list[str] = []
    ended = threading.Event()

    def slow(model: Any, prompt: str, *_: Any, **__: Any) -> Any:
        calls.append(prompt)
        assert ended.wait(60)
        raise InputError("no answer is needed")

    monkeypatch.setattr(server_module, "compare_changes", slow)
    with asking(address, "w1"):
        while not calls:
            time.sleep(0.005)
        with asking(address, "w2"):
            while live._waiting < 2:
                time.sleep(0.005)
        ended.set()
        while live._waiting:
            time.sleep(0.005)
    assert calls == ["w1"]


def test_the_page_shows_and_changes_a_prompt(browser, address, small_model, tmp_path):
    with controlled(small_model("gpt2"), ["L2D5"], 30.0), torch.inference_mode():
        best = small_model("gpt2")(torch.tensor([[3, 4, 5]]), return_type="logits")[0, -1].topk(10)
    texts = [f"w{int(i) - 2}" if 1 < i < 52 else "" for i in best.indices]
    context = browser.new_context()
    context.set_default_timeout(60_000)
    page = context.new_page()
    visit = Visit(page)
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda line: errors.append(line.text) if line.type == "error" else None)
    try:
        page.goto(address)
        page.fill("#prompt", "w1 w2 w3")
        page.click("#ask button")
        page.frame_locator("#page").locator("[role=grid] td").first.wait_for()
        assert visit.faults() == []
        page.fill("#target", "L2D5")
        page.click("#add button")
        page.locator("#changes input").fill("30")
        page.wait_for_function(  # the answers to what was set before come first
            "texts => {"
            "  const rows = [...document.querySelectorAll(\"[data-side='after'] tbody tr\")];"
            "  const shown = rows.map(row => row.children[1].textContent);"
            "  const same = texts.every((text, i) => !text || text === shown[i]);"
            "  return rows.length === texts.length && same; }",
            arg=texts,
        )
        both = page.frame_locator("#page").locator("#grids h2")
        both.nth(1).wait_for()
        assert both.all_inner_texts() == ["id", "id, modified"]
        page.set_viewport_size({"width": 360, "height": 700})
        wide, shown = page.evaluate(
            "[document.documentElement.scrollWidth, document.documentElement.clientWidth]"
        )
        assert wide <= shown
        assert visit.faults() == []
        with page.expect_download() as download:
            page.click("#save-compared")
        saved = tmp_path / "changed.html"
        download.value.save_as(saved)
        assert errors == []
    finally:
        context.close()
    with visiting(browser, saved) as visit:
        assert visit.rows("section:last-child")[0][1] == texts[0] or not texts[0]
        assert "L2D5: 30" in visit.page.inner_text("main ul")
        assert visit.faults() == []
        assert (visit.requests, visit.errors) == ([], [])


PROMPT = "w1 w2 w9"


@pytest.fixture(scope="module")
def fitted(small_model):
    """A model, maps onto its last layers, and maps of its sub-modules in the first two blocks."""
    model = small_model("llama")
    examples = matlens.make_examples(model, make_sentences())
    pairs = [pair for pair in submodule_pairs(ModelLayout.from_model(model)) if not pair[0].endswith(".2")]
    sites = [0, 1, 3, *(site for pair in pairs for site in pair)]
    samples = matlens.collect(model, examples, sites, positions="all", progress=False)
    jumps = MapSet.fit(samples, pairs=[(0, 3), (1, 3), (0, 1)], progress=False)
    return model, jumps, MapSet(list(fit_submodules(samples, pairs, progress=False)))


def by_hand(model: Any, replacements: Any) -> list[float]:
    tokens = model.to_tokens(PROMPT)
    with torch.inference_mode(), matlens.patched(model, replacements):
        return model(tokens, return_type="logits")[0, -1].softmax(-1).topk(10).values.tolist()


def test_offers_are_the_maps_of_the_sets(fitted):
    _, jumps, inside = fitted
    assert offered_maps([]) == {"mat": [], "mat_attn": [], "mat_ffn": [], "mat_ln1_ln2": []}
    offers = offered_maps([jumps, inside])
    assert sorted(offers.pop("mat")) == ["0-1", "0-3", "1-3"]
    assert offers == {kind: ["0", "1"] for kind in ("mat_attn", "mat_ffn", "mat_ln1_ln2")}


@pytest.mark.parametrize(
    ("kind", "target", "make"),
    [
        ("mat", "1-3", lambda jumps, inside: [matlens.jump(jumps, 1, 3)]),
        ("mat_attn", "1", lambda jumps, inside: [mat_attn(inside, 1, 2)]),
        ("mat_ffn", "0-2", lambda jumps, inside: [mat_ffn(inside, 0, 2)]),
        ("mat_ln1_ln2", "0", lambda jumps, inside: [mat_ln1_ln2(inside, 0, 1)]),
    ],
)
def test_changes_by_maps_equal_patches_by_hand(kind, target, make, fitted):
    model, jumps, inside = fitted
    expected = by_hand(model, [one for replacements in make(jumps, inside) for one in replacements])
    before, after = compare_changes(model, PROMPT, [Change(kind, target)], maps=[jumps, inside], n_tokens=1)
    torch.testing.assert_close(torch.tensor([p for _, p in after.tokens]), torch.tensor(expected))
    assert before.tokens != after.tokens


@torch.inference_mode()
def test_continuations_are_greedy_whatever_the_generation_config_says(model_folder, plain_model):
    model, plain = matlens.load(str(model_folder("llama")), device="cpu"), plain_model("llama")
    ids = model.tokenizer(PROMPT)["input_ids"]
    end = int(plain(torch.tensor([ids])).logits[0, -1].argmax())
    config = model.original_model.generation_config
    config.eos_token_id, config.repetition_penalty, config.do_sample = end, 5.0, True
    config.no_repeat_ngram_size, config.num_beams, config.max_length = 1, 3, 5
    expected = list(ids)
    for _ in range(8):
        logits = plain(torch.tensor([expected])).logits[0, -1]
        logits[end] = -torch.inf
        expected.append(int(logits.argmax()))
    before, _ = compare_changes(model, PROMPT, [Change("jump", "0-1")], n_tokens=8)
    assert before.continuation == model.tokenizer.decode(expected[len(ids) :])
    with pytest.raises(InputError, match=r"^prompt must have 1 to 40 tokens.*got 41"):
        compare_changes(model, "w1 " * 41, [], n_tokens=8)
