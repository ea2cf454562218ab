"""How much longer the browser takes to open a page of 128 tokens than one of 16: 8 times the cells."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import typer
from playwright.sync_api import sync_playwright

from matlens.explorer import explore
from matlens.models import SMOLLM2, load

_WORDS = ["The", "capital", "of", "France", "is", "Paris", "."]
_LENGTHS = (16, 128)


def main(
    chromium: str = typer.Option("/usr/bin/chromium", help="The browser's executable."), rounds: int = 3
) -> None:
    """Print the fastest of a few openings of each page, and their ratio."""
    model = load(SMOLLM2, device="cpu")
    fastest = list[float]()
    with TemporaryDirectory() as folder, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for length in _LENGTHS:
            path = Path(folder) / f"{length}.html"
            explore(model, " ".join((_WORDS * length)[:length]), progress=False).save(path)
            seconds = []
            for _ in range(rounds):
                page = browser.new_page()
                page.goto(path.as_uri())
                seconds += page.evaluate("performance.getEntriesByName('ready').map(e => e.duration / 1000)")
                page.close()
            fastest.append(min(seconds))
            print(f"{length} tokens: {fastest[-1]:.2f} s")
        browser.close()
    print(f"ratio: {fastest[1] / fastest[0]:.1f}")


if __name__ == "__main__":
    typer.run(main)
