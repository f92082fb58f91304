"""Who may ask an HTTP server: loopback without a token, others with one that is a secret."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from doll.errors import ConfigError
from doll.process.http_access import (
    Right,
    Tokens,
    address_of,
    host_name,
    is_loopback,
    is_token,
    listen,
    read_token,
    read_tokens,
)


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("::1", True),
        ("localhost", True),
        ("LOCALHOST", True),
        ("0.0.0.0", False),
        ("10.0.0.1", False),
        ("::", False),
        ("localhost.evil.example", False),
        ("", False),
    ],
)
def test_loopback_names(name: str, answer: bool) -> None:
    assert is_loopback(name) is answer


@pytest.mark.parametrize(
    ("header", "name"),
    [("localhost", "localhost"), ("127.0.0.1:80", "127.0.0.1"), ("[::1]:80", "::1"), ("[::1]", "::1"), ("", "")],
)
def test_the_name_of_a_host_header(header: str, name: str) -> None:
    assert host_name(header) == name


def token_file(path: Path, text: str, mode: int = 0o600) -> Path:
    file = path / "token"
    file.write_text(text)
    file.chmod(mode)
    return file


def test_a_token_is_read_without_its_line_end(tmp_path: Path) -> None:
    assert read_token(token_file(tmp_path, "0123456789abcdef\n")) == "0123456789abcdef"


@pytest.mark.parametrize(
    ("text", "mode", "said"),
    [
        ("0123456789abcdef", 0o644, "chmod 600"),
        ("short", 0o600, "at least 16"),
        ("0123456789 abcdef0", 0o600, "without spaces"),
        ("0123456789abcdé0", 0o600, "ASCII"),
        (2_000 * "x", 0o600, "at most 1000 bytes"),
    ],
)
def test_a_token_that_is_no_secret_is_refused(tmp_path: Path, text: str, mode: int, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read_token(token_file(tmp_path, text, mode))


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read the token in .*nothing"):
        read_token(tmp_path / "nothing")


def test_tokens_are_compared_whole() -> None:
    assert is_token("0123456789abcdef", "0123456789abcdef")
    assert not is_token("0123456789abcdef0", "0123456789abcdef")
    assert not is_token("é\udcff", "0123456789abcdef")


def test_a_token_has_a_right_and_that_to_act_includes_that_to_read() -> None:
    both = Tokens(act="acts-0123456789ab", read="reads-0123456789a")
    assert [both.right_of(given) for given in (both.act, both.read, "", "other")] == [
        Right.ACT, Right.READ, Right.OPEN, Right.OPEN,
    ]  # fmt: skip
    assert both.right_of(both.read[::-1], lambda token: token[::-1]) is Right.READ
    only = Tokens(read=both.read)
    assert [only.right_of(given) for given in (both.act, both.read, "")] == [Right.OPEN, Right.READ, Right.OPEN]
    assert Tokens().right_of("") is Right.ACT
    assert (bool(only), bool(Tokens())) == (True, False)
    assert both.act not in repr(both)
    assert both.read not in repr(both)


def test_the_same_token_for_both_rights_is_refused(tmp_path: Path) -> None:
    file = token_file(tmp_path, "0123456789abcdef")
    with pytest.raises(ConfigError, match="got the same text twice"):
        read_tokens(file, file)
    assert read_tokens(None, file) == Tokens(read="0123456789abcdef")


def test_other_machines_need_a_token() -> None:
    with pytest.raises(ConfigError, match="other machines would reach this server, so expected --token-file"):
        listen("0.0.0.0", 0)
    with listen("0.0.0.0", 0, Tokens(read="0123456789abcdef")) as listener:
        assert address_of(listener).startswith("http://0.0.0.0:")


def test_a_port_that_is_taken_is_named() -> None:
    with listen("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        assert address_of(listener) == f"http://127.0.0.1:{port}"
        assert socket.create_connection(("127.0.0.1", port)).close() is None
        with pytest.raises(ConfigError, match=f"cannot listen at 127.0.0.1:{port}"):
            listen("127.0.0.1", port)
