"""Answer times of `matlens serve` while many ask at once: what computes waits, what does not is quick.

python benchmarks/serving.py --clients 20
"""

from __future__ import annotations

import asyncio
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated

import httpx
import typer
import uvicorn

from matlens import load
from matlens.explorer import LiveModel

_PROMPTS = ("The Eiffel Tower stands in the city of", "Wine is made of", "A week has seven", "In winter it")


@contextmanager
def serving(live: LiveModel) -> Iterator[None]:
    """A server that listens until the block ends."""
    config = uvicorn.Config(live.application, host="127.0.0.1", port=live.port, log_level="error")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield
    finally:
        server.should_exit = True
        thread.join()


async def timed(client: httpx.AsyncClient, method: str, path: str, **options: object) -> tuple[float, int]:
    """Seconds until an answer, and its status."""
    start = time.perf_counter()
    answer = await client.request(method, path, **options)  # type: ignore[arg-type]
    return time.perf_counter() - start, answer.status_code


async def clients(address: str, n: int) -> tuple[list[tuple[float, int]], list[tuple[float, int]]]:
    """All ask for a comparison at once; meanwhile the page itself is asked for again and again."""
    async with httpx.AsyncClient(base_url=address, timeout=None) as client:
        content = [{"prompt": _PROMPTS[i % len(_PROMPTS)], "changes": []} for i in range(n)]
        dear = [asyncio.create_task(timed(client, "POST", "compare", json=body)) for body in content]
        cheap = []
        while not all(task.done() for task in dear):
            cheap.append(await timed(client, "GET", ""))
            await asyncio.sleep(0.05)
        return [task.result() for task in dear], cheap


def show(name: str, answers: Sequence[tuple[float, int]]) -> None:
    """Print a line of the table."""
    seconds = sorted(second for second, _ in answers)
    late = seconds[int(0.95 * (len(seconds) - 1))]
    statuses = ", ".join(map(str, sorted({status for _, status in answers})))
    print(
        f"{name:34} {len(seconds):5} answers ({statuses})  median {statistics.median(seconds):7.3f} s  "
        f"95% {late:7.3f} s  last {seconds[-1]:7.3f} s",
        flush=True,
    )


def main(
    model: str = "smollm2-135m",
    at_once: Annotated[int, typer.Option("--clients", min=1, max=32)] = 20,
    port: Annotated[int, typer.Option(min=1024)] = 8799,
) -> None:
    """One client alone, and then many at once."""
    live = LiveModel(load(model, device="cpu"), port=port)
    with serving(live):
        for n in (1, at_once):
            dear, cheap = asyncio.run(clients(live.address, n))
            show(f"comparisons, {n} at once", dear)
            show("the page meanwhile", cheap)


if __name__ == "__main__":
    typer.run(main)
