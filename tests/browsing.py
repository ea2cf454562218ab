"""A page in a browser without a network, and what is read from it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from axe_playwright_python.sync_playwright import Axe

SERIOUS = ("serious", "critical")


@dataclass
class Visit:
    """An open page, its other requests, and the errors in it."""

    page: Any
    requests: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def rows(self, selector: str) -> list[list[str]]:
        """Texts of a table's cells, row by row, without the head."""
        return self.page.evaluate(
            "s => [...document.querySelectorAll(s + ' tbody tr, ' + s + ' tfoot tr')]"
            ".map(tr => [...tr.children].map(td => td.textContent))",
            selector,
        )

    def faults(self) -> list[str]:
        """Serious violations that axe-core finds."""
        found = Axe().run(self.page).response["violations"]
        return [f"{v['id']}: {v['nodes'][0]['html']}" for v in found if v["impact"] in SERIOUS]


@contextmanager
def visiting(browser: Any, page: str | Path, *, fragment: str = "", **options: Any) -> Iterator[Visit]:
    """Open a file with the network off; requests for anything else are blocked and recorded."""
    context = browser.new_context(**options)
    context.set_default_timeout(60_000)
    url = Path(page).absolute().as_uri()
    folder = url.rpartition("/")[0]
    visit = Visit(context.new_page())

    def decide(route: Any) -> None:
        if route.request.url.startswith(folder):
            route.continue_()
        else:
            visit.requests.append(route.request.url)
            route.abort()

    context.route("**/*", decide)
    context.set_offline(True)
    visit.page.on("pageerror", lambda error: visit.errors.append(str(error)))
    visit.page.on("dialog", lambda dialog: (visit.errors.append(dialog.message), dialog.dismiss()))
    visit.page.on(
        "console", lambda line: visit.errors.append(line.text) if line.type in ("error", "warning") else None
    )
    try:
        visit.page.goto(url + fragment)
        visit.page.wait_for_selector("html[data-ready]")
        yield visit
    finally:
        context.close()


def numbers(text: str) -> list[float]:
    """All numbers in a text of a page; percentages are parts of one."""
    found = re.findall(r"(−?\d[\d,]*(?:\.\d+)?(?:e-?\d+)?)(%?)", text)
    return [float(digits.replace("−", "-").replace(",", "")) / (100 if unit else 1) for digits, unit in found]
