"""A page as one HTML file that needs no server and no network: it contains its scripts, styles and state.

The scripts are those of the live page. The file lists their hashes, so that a browser runs no other script, such as one
in the text of a record.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.resources
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from doll.monitor.state.watched_job import PageState
from doll.monitor.views.page import page, visible
from doll.monitor.views.page_details import detail
from doll.monitor.views.panels import Panel
from doll.process.files import write_atomically

MAX_ROWS: Final = 100  # limit of the table in the details of a record
_IMPORT: Final = re.compile(r'^import .* from "\./(.+)";\n', re.MULTILINE)
_EXPORT: Final = re.compile(r"^export ", re.MULTILINE)
_STYLE: Final = re.compile(r'<link rel="stylesheet" href="(.+)">')
_SCRIPT: Final = re.compile(r'<script src="(.+?)" (defer|type="module")></script>')
_ICON: Final = 'href="icon.svg"'
_CHARSET: Final = '<meta charset="utf-8">\n'


def save_run(state: PageState, path: Path, panels: Sequence[Panel] = ()) -> None:
    """Write the page of a run that has ended, with the details that a click opens.

    Raises:
        OSError: `path` cannot be written.
    """
    shown = page(state)
    keys = [f"worker/{worker}" for worker in shown["workers"]]
    keys += [f"{name[:-1]}/{key}" for name, rows in shown["lists"].items() if name != "events" for key in rows]
    details = {}
    for target in keys:
        kind, _, numbers = target.partition("/")
        if (opened := detail(state, kind, [*map(int, numbers.split("-"))])) is not None:
            details[target] = {**opened, "rows": opened.get("rows", [])[:MAX_ROWS]}
    save_page("index", {**shown, "panels": list(panels), "details": details}, path)


def save_panels(name: str, headline: str, panels: Sequence[Panel], path: Path) -> None:
    """Write a page with a name, one line of text, and charts.

    Raises:
        OSError: `path` cannot be written.
    """
    save_page("panels", {"name": name, "headline": headline, "panels": list(panels)}, path)


def save_page(name: Literal["index", "runs", "panels"], state: dict[str, Any], path: Path) -> None:
    """Write a page of the live server together with its state.

    Raises:
        OSError: `path` cannot be written.
    """
    hashes: dict[str, list[str]] = {"script": [], "style": []}

    def inline(tag: Literal["script", "style"], attributes: str, text: str) -> str:
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        hashes[tag].append(f"'sha256-{digest}'")
        return f"<{tag}{attributes}>{text}</{tag}>"

    def script(found: re.Match[str]) -> str:
        if found[2] == "defer":
            return inline("script", "", static(found[1]))
        return inline("script", ' type="module"', bundle(found[1]))

    html = _SCRIPT.sub(script, _STYLE.sub(lambda found: inline("style", "", static(found[1])), static(f"{name}.html")))
    policy = (
        f"default-src 'none'; script-src {' '.join(hashes['script'])}; style-src {' '.join(hashes['style'])}; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    icon = base64.b64encode(static("icon.svg").encode()).decode()
    html = html.replace(_ICON, f'href="data:image/svg+xml;base64,{icon}"').replace(
        _CHARSET, f'{_CHARSET}<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
    )
    # Escaped so that no text of a record ends the element or begins a comment.
    values = msgspec.json.encode(visible(state)).decode().replace("<", "\\u003c")
    data = f'<script type="application/json" id="saved">{values}</script>'
    write_atomically(path, html.replace("</body>", f"{data}\n</body>"))


def static(name: str) -> str:
    """Return the text of a front-end file."""
    return importlib.resources.files("doll.dashboard").joinpath("static", name).read_text(encoding="utf-8")


def bundle(name: str, seen: set[str] | None = None) -> str:
    """Return a front-end module as one script, with its imported modules first. Their names do not collide."""
    seen = set() if seen is None else seen
    if name in seen:
        return ""
    seen.add(name)
    text = static(name)
    before = "".join(bundle(other, seen) for other in _IMPORT.findall(text))
    return before + _EXPORT.sub("", _IMPORT.sub("", text))
