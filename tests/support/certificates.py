"""Certificates for servers and clients on 127.0.0.1, which openssl makes for a test."""

from __future__ import annotations

import subprocess
from pathlib import Path

__all__ = ["Certificates"]

_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2")


class Certificates:
    """An authority, a certificate of a server and one of a client, each with its key, as PEM files.

    Args:
        folder: Where the files are, created if needed.
        address: What the server's certificate is for, as subjectAltName says it.
        client_required: Whether the server refuses clients without a certificate of the authority.
    """

    def __init__(self, folder: Path, address: str = "IP:127.0.0.1", *, client_required: bool = False) -> None:
        folder.mkdir(exist_ok=True)
        self._client_required = client_required
        self.ca = folder / "ca.pem"
        self.server = folder / "server.pem"
        self.client = folder / "client.pem"
        # Python 3.13 requires that an authority says what its key is for.
        usage = ("-addext", "keyUsage=critical,keyCertSign,cRLSign")
        _openssl("-subj", "/CN=authority", *usage, "-keyout", _key_of(self.ca), "-out", self.ca)
        for certificate, name in ((self.server, address), (self.client, "DNS:client")):
            signed = ("-CA", self.ca, "-CAkey", _key_of(self.ca), "-subj", f"/CN={certificate.stem}")
            extensions = ("-addext", f"subjectAltName={name}", "-addext", "basicConstraints=critical,CA:FALSE")
            _openssl(*signed, *extensions, "-keyout", _key_of(certificate), "-out", certificate)

    @property
    def client_options(self) -> str:
        """The options of a URL with which a client shows its certificate."""
        return f"tls_cert={self.client}&tls_key={_key_of(self.client)}"

    def server_lines(self, port: int) -> list[str]:
        """Return the lines of redis.conf for a server, or a sentinel, that speaks TLS only."""
        return [
            "port 0",
            f"tls-port {port}",
            f"tls-cert-file {self.server}",
            f"tls-key-file {_key_of(self.server)}",
            f"tls-ca-cert-file {self.ca}",
            f"tls-auth-clients {'yes' if self._client_required else 'optional'}",
            "tls-replication yes",
        ]


def _key_of(certificate: Path) -> Path:
    return certificate.with_suffix(".key")


def _openssl(*arguments: str | Path) -> None:
    made = subprocess.run(["openssl", "req", "-x509", *_KEY, *arguments], check=False, capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
