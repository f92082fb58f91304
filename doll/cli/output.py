"""Results on standard output: as text, or as JSON with `--json`."""

from __future__ import annotations

import json
import sys
from typing import Any

from doll.process.files import json_safe


def emit(as_json: bool, content: Any, text: str) -> None:
    """Print `content` as JSON, or `text`, to standard output."""
    if as_json:
        text = json.dumps(json_safe(content), indent=2, ensure_ascii=False)
    sys.stdout.write(text.rstrip("\n") + "\n")
    sys.stdout.flush()
