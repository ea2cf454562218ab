"""Several processes of one job, forked from the tests, which have imported and loaded everything already."""

from __future__ import annotations

import multiprocessing
import os
import socket
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm

from matlens import parallel

LONGEST = 300.0  # seconds for a whole job


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def run_ranks(n: int, work: Callable[[], Any], folder: Path, *, join: bool = True) -> list[dict[str, Any]]:
    """What each process has made of its work: ``result``, or the ``error`` that it ended with, or neither.

    Work that finds the other processes itself is called without them (``join=False``).
    """
    folder.mkdir(parents=True)
    port = free_port()
    context = multiprocessing.get_context("fork")
    children = [context.Process(target=_child, args=(rank, n, port, work, folder, join)) for rank in range(n)]
    began = time.monotonic()
    for child in children:
        child.start()
    for child in children:
        child.join(max(0.1, LONGEST - (time.monotonic() - began)))
    hanging = [child for child in children if child.is_alive()]
    for child in hanging:
        child.kill()
    assert not hanging, "processes wait for each other for ever"
    paths = [folder / f"{rank}.pt" for rank in range(n)]
    return [torch.load(path, weights_only=False) if path.exists() else {} for path in paths]


def _child(rank: int, n: int, port: int, work: Callable[[], Any], folder: Path, join: bool) -> None:
    torch.set_num_threads(1)
    tqdm.set_lock(threading.RLock())  # threads that could have held the old one are not forked
    os.environ |= {
        "RANK": str(rank), "WORLD_SIZE": str(n), "LOCAL_RANK": str(rank),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip
    outcome: dict[str, Any]
    try:
        if join:
            with parallel.distributed():
                outcome = {"result": work()}
        else:
            outcome = {"result": work()}
    except BaseException as error:
        outcome = {"error": str(error), "kind": type(error).__name__, "trace": traceback.format_exc()}
    torch.save(outcome, folder / f"{rank}.partial")
    (folder / f"{rank}.partial").rename(folder / f"{rank}.pt")
    os._exit(0)
