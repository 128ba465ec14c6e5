"""Proofs that a process belongs to a group.

In: files that the user gives on every host. Out: keys, proofs, TLS contexts.

    --secret FILE   at least 32 bytes, the same everywhere. They never travel: proofs are made with them and with values
                    that are new in every start
    --tls DIR       cert.pem and key.pem, and ca.pem where cert.pem is not its own authority. Both ends of a connection
                    show a certificate of that authority; names in certificates do not count, an end that has one
                    belongs to the group

A proof is HMAC-SHA256(key, side, both ranks, both nonces): each end names a nonce of its own, so that an overheard
proof proves nothing later.
"""

from __future__ import annotations

import hashlib
import hmac
import ssl
from dataclasses import dataclass
from pathlib import Path

from penstock.backends.bundle.signing import read_key
from penstock.support.errors import PenstockError, UsageError

CERTIFICATE, PRIVATE, AUTHORITY = "cert.pem", "key.pem", "ca.pem"


@dataclass(frozen=True)
class Trust:
    """The keys and contexts of a group. `secret` is empty where none was given, the contexts are None without TLS."""

    secret: bytes = b""
    server: ssl.SSLContext | None = None
    client: ssl.SSLContext | None = None

    def key(self, token: str) -> bytes:
        """Return the key that the keepers of one start prove to have; `token` is that of the start."""
        return hmac.digest(self.secret, b"penstock start\n" + token.encode(), "sha256")

    @property
    def shown(self) -> str:
        """A text that ranks may tell each other of their trust, to see that one has another."""
        secret = hmac.digest(self.secret, b"penstock shown\n", "sha256").hex()[:16] if self.secret else "none"
        return f"secret {secret}, {'TLS' if self.server else 'no TLS'}"


def open_trust(secret: str | None, tls: str | None) -> Trust:
    """Read the given files; UsageError for files that cannot be used."""
    key = b"" if secret is None else read_key(secret)
    if tls is None:
        return Trust(key)
    return Trust(key, _context(ssl.PROTOCOL_TLS_SERVER, tls), _context(ssl.PROTOCOL_TLS_CLIENT, tls))


def trust_problems(secret: str | None, tls: str | None) -> list[str]:
    """List the problems of the files."""
    problems = []
    for flag, arguments in (("--secret", (secret, None)), ("--tls", (None, tls))):
        try:
            open_trust(*arguments)
        except PenstockError as error:
            problems.append(f"{flag} {error.where}: {error.what}")
    return problems


def _context(side: int, folder: str) -> ssl.SSLContext:
    certificate, private, authority = (Path(folder, name) for name in (CERTIFICATE, PRIVATE, AUTHORITY))
    context = ssl.SSLContext(side)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    try:
        # A key with a password is refused; otherwise OpenSSL would ask for it on the terminal.
        context.load_cert_chain(certificate, private, password=lambda: "")
        context.load_verify_locations(authority if authority.exists() else certificate)
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or error
        hint = (
            f"the directory has {CERTIFICATE} and {PRIVATE}, and perhaps {AUTHORITY}, in PEM form without a "
            "password (docs/security.md)"
        )
        raise UsageError(f"no certificate and key: {reason}", where=folder, hint=hint) from error
    return context


def proof(key: bytes, side: str, ranks: tuple[int, int], nonces: tuple[str, str]) -> str:
    """Return the proof that one `side` (connects, accepts) has the key. Ranks and nonces are those of the end that
    connects and of the end that accepts."""
    text = "\n".join(("penstock keeper", side, *map(str, ranks), *nonces))
    return hmac.new(key, text.encode(), hashlib.sha256).hexdigest()


def is_proof(shown: str, key: bytes, side: str, ranks: tuple[int, int], nonces: tuple[str, str]) -> bool:
    """Compare a proof in constant time."""
    return hmac.compare_digest(shown.encode(), proof(key, side, ranks, nonces).encode())
