"""Whether a `host:port` resolves, answers and, with TLS, shows a certificate that holds."""

from __future__ import annotations

import errno
import os
import socket
import ssl
import time
from pathlib import Path
from typing import Final

from doll.run.doctor.checks import AddressFacts, Unreachable

_TIMEOUT_S: Final = 5.0
_DEFAULT_PORT: Final = "9092"  # librdkafka's
_PEM: Final = "-----BEGIN"
TCP_SETTINGS: Final = ("tcp_slow_start_after_idle", "tcp_congestion_control")


def tls_context(authority: str | None) -> ssl.SSLContext:
    """Verifies certificates and names by an authority (PEM, or the path of a PEM file), else by the system's.

    Raises:
        OSError: the file cannot be read (ssl.SSLError: it holds no certificate).
    """
    if authority is None:
        return ssl.create_default_context()
    if authority.startswith(_PEM):
        return ssl.create_default_context(cadata=authority)
    return ssl.create_default_context(cafile=authority)


def ask_address(address: str, context: ssl.SSLContext | None) -> AddressFacts:
    """Connect to `host:port`, and shake hands where there is a TLS context; nothing is sent then."""
    host, _, port = address.rpartition(":") if ":" in address else (address, "", _DEFAULT_PORT)
    start_s = time.perf_counter()
    try:
        plain = socket.create_connection((host.strip("[]"), int(port)), timeout=_TIMEOUT_S)
    except socket.gaierror as exc:
        return AddressFacts(address, problem=f"the name does not resolve ({exc.strerror})", why="name")
    except TimeoutError:
        return AddressFacts(address, problem=f"nothing comes back within {_TIMEOUT_S:g} s", why="silent")
    except (OSError, ValueError) as exc:
        reason = getattr(exc, "strerror", None) or str(exc)
        return AddressFacts(address, problem=f"nothing answers ({reason})", why=_why(exc))
    connect_s = time.perf_counter() - start_s
    with plain:
        if context is None:
            return AddressFacts(address, connect_s=connect_s)
        try:
            with context.wrap_socket(plain, server_hostname=host.strip("[]")) as secure:
                certificate = secure.getpeercert() or {}
        except ssl.SSLCertVerificationError as exc:
            return AddressFacts(address, connect_s=connect_s, certificate_problem=exc.verify_message)
        except OSError as exc:  # it may ask for our certificate first, or speak no TLS: the log-in says so
            return AddressFacts(address, connect_s=connect_s, certificate_problem=_handshake(exc))
        until = certificate.get("notAfter")
        left_s = ssl.cert_time_to_seconds(until) - time.time() if isinstance(until, str) else None
        return AddressFacts(address, connect_s=connect_s, certificate_left_s=left_s)


def _why(exc: Exception) -> Unreachable:
    number = exc.errno if isinstance(exc, OSError) else None
    if number == errno.ECONNREFUSED:
        return "refused"
    if number in (errno.ENETUNREACH, errno.EHOSTUNREACH):
        return "no_route"
    return "silent" if number == errno.ETIMEDOUT else "other"


def tcp_settings() -> dict[str, str]:
    """What this machine's TCP does, of those settings that doctor judges; nothing where it is not Linux."""
    return {
        name: path.read_text(encoding="ascii").strip()
        for name in TCP_SETTINGS
        if (path := Path("/proc/sys/net/ipv4", name)).is_file()
    }


def _handshake(exc: OSError) -> str:
    """Of a server that wants a certificate of ours (TLS 1.2), nothing: that is no problem of its certificate."""
    text = str(exc)
    return "" if "CERTIFICATE_REQUIRED" in text or "HANDSHAKE_FAILURE" in text else f"no TLS handshake ({text})"


def environment_authority(name: str) -> str | None:
    """PEM, or a path, of $`name`; None where it is not set."""
    return os.environ.get(name) or None
