"""Hide the secrets in the URLs of a text. Every error of DOLL and every line of its log passes through this module."""

from __future__ import annotations

import re
from typing import Final

HIDDEN: Final = "***"
# A colon that no port follows begins a password. It may hold a slash that is not escaped, as AWS's keys do, and the
# text may be cut off within it.
_PASSWORD: Final = r"(?!\[)[^\s/?#@:]*:(?!(?:\d{0,5}|port)(?:[.:]?(?:\s|$)|[/?#,;'\")\[\]]))(?:\S*@|[^\s'\"]*)"
# `s3://bucket@stable` names a version of a run.
_USER: Final = re.compile(rf"(?<=://)(?:{_PASSWORD}|(?<!\bs3://)[^\s/?#'\"]*@)")
_QUERY: Final = re.compile(r"(?<=://)([^\s?'\"]+\?)[^\s'\"#]+")


def redacted(text: str) -> str:
    """Return `text` with the user, password and query of each URL hidden.

    >>> redacted("MLflow at http://ann:secret@host:5000/x?key=secret does not answer")
    'MLflow at http://***@host:5000/x?*** does not answer'
    """
    if "://" not in text:
        return text
    return _QUERY.sub(rf"\1{HIDDEN}", _USER.sub(f"{HIDDEN}@", text))


def holds_credentials(text: str) -> bool:
    """Return whether a URL in `text` has a user or a password.

    >>> holds_credentials("s3://KEY:SEC/RET@bucket/x"), holds_credentials("s3://bucket/x@stable")
    (True, False)
    """
    return "://" in text and _USER.search(text) is not None
