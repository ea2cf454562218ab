"""A server on this machine for the pages of a model: type prompts, and change the model.

It listens on localhost and needs the token in its address. Requests of other sites are refused: host and
origin have to be its own. One request is computed at a time; those abandoned while they wait are not.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

from matlens.errors import Between, InputError, checked, printable
from matlens.explorer.changes import KINDS, Change, Outcome, changed_model, compare_changes, offered_maps
from matlens.explorer.exploration import explore
from matlens.io.files import parse_json
from matlens.lens.lens import Lens
from matlens.linear.mapsets import MapSet
from matlens.models.identity import ModelIdentity
from matlens.models.tokens import visible
from matlens.plots.pages import assemble

try:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.requests import Request
    from starlette.responses import HTMLResponse, JSONResponse, Response
    from starlette.routing import Route
except ModuleNotFoundError as error:
    raise InputError("The server needs Starlette and uvicorn: pip install 'matlens[serve]'.") from error

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge

HOST = "127.0.0.1"
_MAX_BYTES = 2**16  # of a request
_WAITING = 32  # requests at once
_PAGES = 32  # in memory
_MAX_PROMPT = 8000
_COEFFICIENT = 3.0
_HEADERS = {
    "Cache-Control": "no-store", "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin", "X-Frame-Options": "SAMEORIGIN",
}  # fmt: skip


@checked
class LiveModel:
    """A model behind a server: uvicorn runs its `application`; `address` is the page to open.

    Parameters
    ----------
    model
        Do not modify it while the server runs.
    lenses
        Lenses and maps that prompts are read through, next to ``id``.
    maps
        Sets of maps to use in place of blocks and sub-modules.
    port, token
        The port, and the secret in the address, by default a new one.
    """

    def __init__(
        self,
        model: TransformerBridge,
        lenses: Sequence[Lens | MapSet] = (),
        *,
        maps: Sequence[MapSet] = (),
        port: Annotated[int, Between(1, 65535)] = 8765,
        token: str | None = None,
    ) -> None:
        self.port = port
        self._model, self._lenses, self._maps = model, list(lenses), list(maps)
        identity = ModelIdentity.from_model(model)
        self._name = identity.name
        for given in [*self._lenses, *self._maps]:
            given.provenance.check_same(identity, ours="the maps", theirs="the model")
        self._token = token or secrets.token_urlsafe(24)
        self._hosts = {f"{name}:{port}" for name in (HOST, "localhost")}
        self._worker = ThreadPoolExecutor(max_workers=1)
        self._waiting = 0
        self._pages: dict[str, str] = {}  # the newest last
        self.address = f"http://{HOST}:{port}/{self._token}/"

    @property
    def application(self) -> Any:
        """The ASGI application."""
        return Starlette(
            routes=[
                Route("/{token}/", self._answering(self._show), methods=["GET"]),
                Route("/{token}/page/{number}", self._answering(self._page), methods=["GET"]),
                Route("/{token}/explore", self._answering(self._explore), methods=["POST"]),
                Route("/{token}/compare", self._answering(self._compare), methods=["POST"]),
            ]
        )

    def _answering(
        self, answer: Callable[[Request], Awaitable[Response]]
    ) -> Callable[[Request], Awaitable[Response]]:
        async def checked_answer(request: Request) -> Response:
            try:
                self._check_own(request)
                response = await answer(request)
            except HTTPException as refusal:
                response = JSONResponse({"error": refusal.detail}, refusal.status_code)
            except InputError as error:
                response = JSONResponse({"error": str(error)}, 422)
            response.headers.update(_HEADERS)
            return response

        return checked_answer

    def _check_own(self, request: Request) -> None:
        host, origin = request.headers.get("host", ""), request.headers.get("origin")
        if host not in self._hosts:
            raise HTTPException(403, "This server answers on its own machine only.")
        if origin is not None and origin.removeprefix("http://") not in self._hosts:
            raise HTTPException(403, "This server answers its own page only.")
        token = request.path_params["token"]
        if not secrets.compare_digest(token.encode(), self._token.encode()):
            raise HTTPException(404, "Not found. Open the address that the server has printed.")

    async def _show(self, request: Request) -> Response:
        return HTMLResponse(live_page(self._name, offered_maps(self._maps)))

    async def _page(self, request: Request) -> Response:
        page = self._pages.get(request.path_params["number"])
        if page is None:
            raise HTTPException(404, "This page has expired. Run the prompt again.")
        saved = {"Content-Disposition": 'attachment; filename="page.html"'}
        return HTMLResponse(page, headers=saved if "save" in request.query_params else None)

    async def _explore(self, request: Request) -> Response:
        content = await _content(request)
        prompt, changes = _prompt(content), _changes(content)

        def work() -> str:
            changed = changed_model(self._model, changes, self._maps) if changes else None
            page = explore(self._model, prompt, self._lenses, changed=changed, progress=False)
            return replace(page, modification="; ".join(map(_described, changes))).to_html()

        return JSONResponse({"page": self._store(await self._computed(request, work))})

    def _store(self, page: str) -> str:
        """Store a page, and drop the oldest; returns its path."""
        number = secrets.token_hex(8)
        self._pages[number] = page
        if len(self._pages) > _PAGES:
            del self._pages[next(iter(self._pages))]
        return f"page/{number}"

    async def _compare(self, request: Request) -> Response:
        content = await _content(request)
        prompt, changes = _prompt(content), _changes(content)
        before, after = await self._computed(
            request, lambda: compare_changes(self._model, prompt, changes, maps=self._maps)
        )
        saved = self._store(compared_page(self._name, prompt, changes, before, after))
        return JSONResponse({"before": vars(before), "after": vars(after), "page": saved})

    async def _computed(self, request: Request, work: Callable[[], Any]) -> Any:
        """Do some work when its turn comes, unless the request is abandoned by then."""
        if self._waiting >= _WAITING:
            raise HTTPException(503, "Too many requests are waiting. Try again in a moment.")
        loop = asyncio.get_running_loop()

        def run() -> Any:
            if asyncio.run_coroutine_threadsafe(request.is_disconnected(), loop).result():
                raise HTTPException(499, "The request was abandoned.")
            return work()

        self._waiting += 1
        try:
            return await loop.run_in_executor(self._worker, run)
        finally:
            self._waiting -= 1


def live_page(model: str, offers: Mapping[str, Sequence[str]]) -> str:
    """The page for prompts and changes; ``offers`` are those of `offered_maps`."""
    kinds = [
        {"kind": kind, "name": name, "example": example, "known": list(offers.get(kind, ()))}
        for kind, (name, example) in KINDS.items()
        if offers.get(kind) or not kind.startswith("mat")
    ]
    return assemble(
        "live.html", "live.js", title=f"{model}, live",
        data={"coefficient": _COEFFICIENT, "kinds": kinds},
        rules=["connect-src 'self'", "frame-src 'self'"], model=printable(model),
    )  # fmt: skip


def compared_page(model: str, prompt: str, changes: Sequence[Change], before: Outcome, after: Outcome) -> str:
    """A standalone page of the original and the modified outcome of a prompt."""
    return assemble(
        "compared.html", "compared.js", title=f"{prompt} · {model}, modified", data={},
        model=printable(model), prompt=visible(prompt), changes=list(map(_described, changes)),
        sides=[("Original", before), ("Modified", after)],
    )  # fmt: skip


def _described(change: Change) -> str:
    value = f": {change.value:g}" if change.kind == "value" else ""
    return f"{KINDS[change.kind][0]} {printable(change.target)}{value}"


async def _content(request: Request) -> dict[str, Any]:
    if request.headers.get("content-type", "").partition(";")[0] != "application/json":
        raise HTTPException(415, "Expected JSON.")
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > _MAX_BYTES:
            raise HTTPException(413, f"The request is larger than {_MAX_BYTES:,} bytes.")
    try:
        content = parse_json(body.decode(), "the request")
    except (UnicodeError, InputError) as error:
        raise HTTPException(400, f"There is no JSON in the request: {error}") from error
    if not isinstance(content, dict):
        raise HTTPException(400, "Expected an object of JSON.")
    return content


def _prompt(content: dict[str, Any]) -> str:
    prompt = content.get("prompt")
    if not isinstance(prompt, str) or not 0 < len(prompt) <= _MAX_PROMPT:
        raise HTTPException(400, f"Expected a prompt, a text of at most {_MAX_PROMPT:,} characters.")
    if not prompt.isascii() and any("\ud800" <= character <= "\udfff" for character in prompt):
        raise HTTPException(400, "The prompt has half of a surrogate pair.")
    return prompt


def _changes(content: dict[str, Any]) -> list[Change]:
    try:
        return [Change(**change) for change in content.get("changes", [])]
    except TypeError as error:
        raise HTTPException(400, "Expected changes with a kind, a target, and a value.") from error


def run_server(live: LiveModel) -> None:
    """Answer requests until the process is interrupted."""
    uvicorn.run(live.application, host=HOST, port=live.port, log_level="warning", access_log=False)
