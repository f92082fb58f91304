"""A certificate authority for tests, and what it signs, as PEM files."""

from __future__ import annotations

import datetime
import ipaddress
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

_PEM = serialization.Encoding.PEM


class Authority:
    """Signs certificates for loopback; its own is at `path`."""

    def __init__(self, folder: Path, name: str = "ca") -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._name = folder, name
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._own = self._sign(name, self._key, datetime.timedelta(days=1))
        self.path = folder / f"{name}.pem"
        self.path.write_bytes(self._own.public_bytes(_PEM))

    def issue(self, name: str, lifetime_s: float = 86_400.0, password: str = "") -> Path:
        """A PEM file with a private key (PKCS 8), its certificate for CN=`name` and the authority's."""
        key = ec.generate_private_key(ec.SECP256R1())
        hidden: serialization.KeySerializationEncryption = (
            serialization.BestAvailableEncryption(password.encode()) if password else serialization.NoEncryption()
        )
        private = key.private_bytes(_PEM, serialization.PrivateFormat.PKCS8, hidden)
        signed = self._sign(name, key, datetime.timedelta(seconds=lifetime_s))
        path = self._folder / f"{name}.pem"
        path.write_bytes(private + signed.public_bytes(_PEM) + self._own.public_bytes(_PEM))
        return path

    def _sign(self, name: str, key: ec.EllipticCurvePrivateKey, lifetime: datetime.timedelta) -> x509.Certificate:
        def named(text: str) -> x509.Name:
            return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])

        now = datetime.datetime.now(datetime.UTC)
        builder = x509.CertificateBuilder(
            issuer_name=named(self._name), subject_name=named(name), public_key=key.public_key(),
            serial_number=x509.random_serial_number(), not_valid_before=now - datetime.timedelta(hours=1),
            not_valid_after=now + lifetime,
        )  # fmt: skip
        names = [x509.IPAddress(ipaddress.ip_address("127.0.0.1")), x509.DNSName("localhost")]
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        is_ca = x509.BasicConstraints(ca=name == self._name, path_length=None)
        return builder.add_extension(is_ca, critical=True).sign(self._key, hashes.SHA256())
