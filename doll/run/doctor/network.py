"""Checks whether a `host:port` resolves, answers and, with TLS, has a valid certificate."""

from __future__ import annotations

import errno
import socket
import ssl
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from doll.records.check import Check
from doll.run.doctor.answers import check_certificate

_TIMEOUT_S: Final = 5.0
_DEFAULT_PORT: Final = "9092"  # the default of librdkafka
_PEM: Final = "-----BEGIN"
_NO_ROUTE: Final = "this host has no route there: correct the address, or its network"
_REMEDIES: Final[Mapping[int | None, str]] = {
    errno.ECONNREFUSED: "its host answers, and nothing listens on this port: start it, or correct the port",
    errno.ETIMEDOUT: "open the network to it (security group, firewall, route), or correct the address",
    errno.ENETUNREACH: _NO_ROUTE,
    errno.EHOSTUNREACH: _NO_ROUTE,
}
TCP_SETTINGS: Final = ("tcp_slow_start_after_idle", "tcp_congestion_control")


def tls_context(authority: str | None) -> ssl.SSLContext:
    """Return a TLS context that checks certificates and host names by a CA (PEM text or path), or the system's CAs.

    Raises:
        OSError: the file cannot be read (ssl.SSLError: it contains no certificate).
    """
    if authority is None:
        return ssl.create_default_context()
    if authority.startswith(_PEM):
        return ssl.create_default_context(cadata=authority)
    return ssl.create_default_context(cafile=authority)


def ask_address(
    service: str, address: str, context: ssl.SSLContext | None, *, advertised_by: str = ""
) -> Iterator[Check]:  # fmt: skip
    """Connect to `host:port`; with a TLS context, also perform the handshake. No other data are sent.

    Args:
        advertised_by: address of the server that advertises this address; "": the address is configured.
    """
    name = f"{service}: connect to {address}"
    host, _, port = address.rpartition(":") if ":" in address else (address, "", _DEFAULT_PORT)
    start_s = time.perf_counter()
    try:
        plain = socket.create_connection((host.strip("[]"), int(port)), timeout=_TIMEOUT_S)
    except (OSError, ValueError) as exc:
        problem, todo = _unreachable(exc)
        if advertised_by:
            name = f"{name}, which the brokers advertise"
            todo = (
                f"{advertised_by} answers, and sends clients there: set advertised.listeners of the broker to what "
                f"this host reaches, or: {todo}"
            )
        yield Check(name, "failed", problem, todo)
        return
    yield Check(name, "ok", f"{1000 * (time.perf_counter() - start_s):.1f} ms")
    with plain:
        if context is not None:
            yield from _ask_certificate(service, address, host, plain, context)


def _unreachable(exc: Exception) -> tuple[str, str]:
    """Return the reason why no service answers at an address, and a remedy."""
    if isinstance(exc, socket.gaierror):
        return f"the name does not resolve ({exc.strerror})", "correct the name, or the DNS of this host"
    number = exc.errno if isinstance(exc, OSError) else None
    why = f"nothing answers ({getattr(exc, 'strerror', None) or exc})"
    if isinstance(exc, TimeoutError):
        why, number = f"nothing comes back within {_TIMEOUT_S:g} s", errno.ETIMEDOUT
    return why, _REMEDIES.get(number, "correct the address, start it, or open the network to it")


def _ask_certificate(
    service: str, address: str, host: str, plain: socket.socket, context: ssl.SSLContext
) -> Iterator[Check]:  # fmt: skip
    name = f"{service}: certificate of {address}"
    try:
        with context.wrap_socket(plain, server_hostname=host.strip("[]")) as secure:
            until = (secure.getpeercert() or {}).get("notAfter")
    except OSError as exc:  # it may require our certificate, or not use TLS: the log-in reports that
        problem = exc.verify_message if isinstance(exc, ssl.SSLCertVerificationError) else _handshake(exc)
        if problem:
            todo = f"set DOLL_{service.upper()}_CA to its authority's certificates (PEM), or correct the certificate"
            yield Check(name, "failed", problem, todo)
        return
    if isinstance(until, str):
        yield check_certificate(name, ssl.cert_time_to_seconds(until) - time.time())


def tcp_settings() -> dict[str, str]:
    """Return the TCP settings of this machine that doctor judges; empty on other systems than Linux."""
    return {
        name: path.read_text(encoding="ascii").strip()
        for name in TCP_SETTINGS
        if (path := Path("/proc/sys/net/ipv4", name)).is_file()
    }


def _handshake(exc: OSError) -> str:
    """Return the problem of a handshake. Return "" if the server requires our certificate (TLS 1.2), because the
    server's own certificate may be valid."""
    text = str(exc)
    return "" if "CERTIFICATE_REQUIRED" in text or "HANDSHAKE_FAILURE" in text else f"no TLS handshake ({text})"
