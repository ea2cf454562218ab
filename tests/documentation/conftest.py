"""Says at the end how many blocks have been run."""

from __future__ import annotations

from collections import Counter
from typing import Any


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Add up what the tests of pages and notebooks have counted."""
    counts, pages = Counter[str](), 0
    for report in terminalreporter.stats.get("passed", ()):
        found = dict(report.user_properties).get("documentation")
        if report.when == "call" and found:
            counts.update(found)
            pages += 1
    if pages:
        each = ", ".join(f"{n} {what}" for what, n in counts.most_common())
        terminalreporter.write_line(f"Blocks on {pages} pages of the documentation: {each}")
