"""How tests damage files: every kind of harm that can come to one, drawn with a seed."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from matlens import InputError

Harm = Callable[[bytes, random.Random], bytes]


def _flip(content: bytes, generator: random.Random) -> bytes:
    place = generator.randrange(len(content))
    return content[:place] + bytes([content[place] ^ 1 << generator.randrange(8)]) + content[place + 1 :]


def _blank(content: bytes, generator: random.Random) -> bytes:
    start = generator.randrange(len(content))
    return content[:start] + bytes(len(content) - start)


def _swap(content: bytes, generator: random.Random) -> bytes:
    size = generator.randint(1, max(len(content) // 3, 1))
    first = generator.randrange(len(content) - size + 1)
    second = generator.randrange(len(content) - size + 1)
    swapped = bytearray(content)
    swapped[first : first + size], swapped[second : second + size] = (
        content[second : second + size],
        content[first : first + size],
    )
    return bytes(swapped)


HARMS: dict[str, Harm] = {
    "flipped bit": _flip,
    "blanked": _blank,
    "swapped parts": _swap,
    "cut": lambda content, generator: content[: generator.randrange(len(content))],
    "longer": lambda content, generator: content + generator.randbytes(generator.randint(1, 40)),
    "bytes left out": lambda content, generator: (
        content[: (place := generator.randrange(len(content)))] + content[place + generator.randint(1, 9) :]
    ),
    "noise": lambda content, generator: generator.randbytes(len(content)),
}


def harmed(path: Path, n: int, seed: int = 0) -> Iterator[str]:
    """Damage a file in ``n`` ways, one after the other; it is whole again at the end."""
    whole, generator = path.read_bytes(), random.Random(f"{seed} {path.name}")
    for _ in range(n):
        name, harm = generator.choice(list(HARMS.items()))
        content = harm(whole, generator)
        if content != whole:
            path.write_bytes(content)
            yield f"{path.name}: {name}"
    path.write_bytes(whole)


def outcome(work: Callable[[], Any]) -> tuple[Any, str | None]:
    """What work gives, or what it says when it refuses; whatever else it raises is a failure."""
    try:
        return work(), None
    except InputError as error:
        return None, str(error)
