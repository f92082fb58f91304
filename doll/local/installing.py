"""Commands that install what DOLL starts and pip does not bring, for the system that this is."""

from __future__ import annotations

import sys


def java_and_maven() -> str:
    """How to install Java 17 or newer, and Maven."""
    return _install("Java 17 or newer and Maven", "default-jre-headless maven", "openjdk maven", "openjdk maven")


def redis_server() -> str:
    """How to install `redis-server`."""
    return _install("redis-server", "redis-server", "redis", "redis-server")


def _install(what: str, debian: str, homebrew: str, conda: str) -> str:
    own = f"brew install {homebrew}" if sys.platform == "darwin" else f"apt-get install {debian}"
    return f"install {what} (`{own}` or `conda install -c conda-forge {conda}`)"
