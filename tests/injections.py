"""Texts that a page must show and not obey: markup, script, both directions, what cannot be seen."""

from __future__ import annotations

_CODE = "window.obeyed=1"
INJECTIONS = (
    f"</script><script>{_CODE}</script>", f"<SCRIPT>{_CODE}</SCRIPT>", f"<img src=x onerror={_CODE}>",
    f"<iframe srcdoc='<script>{_CODE}</script>'>", "<base href=//x.test>",
    f"<a href=javascript:{_CODE}>x</a>",
    "</style><style>*{color:red}", "<meta http-equiv=refresh content=0>", "<!-- <script>", "-->", "<![CDATA[",
    "</bdi></table></body></html>", "&lt;b&gt;", "&#60;script&#62;", "&", '"', "\\", "\\u003c",
    f'" onmouseover="{_CODE}', f"' onclick='{_CODE}'", f"`${{{_CODE}}}`", "{{7*7}}", "{% raw %}", "__proto__",
    "constructor", "NaN", "\u202eevil", "\u2066a\u2069", "שלום", "a\u0000b", "\u001b[31m", "\u2028", "\r\n",
    "\ud800", "🏳️‍🌈",
)  # fmt: skip
