"""Signatures of bundles. In: a file with a secret key, shared by the machines that compile and those that run. Out:
`manifest.hmac` beside the manifest:

    HMAC-SHA256(key, "penstock bundle\\n" + manifest.json), in hexadecimal

The manifest has the hashes of all other files, so that one signature covers every byte of the bundle. Where
PENSTOCK_BUNDLE_KEY names a key file, `compile` signs what it writes, and every command and every rank refuses a bundle
without a signature that fits.

Every holder of the key can sign: a signature tells that one of them did, not which. An older bundle that was signed
stays valid.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import stat
from pathlib import Path

from penstock.support.errors import UsageError, VerifyError

SIGNATURE = "manifest.hmac"
KEY_VARIABLE = "PENSTOCK_BUNDLE_KEY"
_SHORTEST, _LONGEST = 32, 1 << 16
_PURPOSE = b"penstock bundle\n"


def read_key(path: str | os.PathLike[str]) -> bytes:
    """Read the key in a file, without white space around it."""
    try:
        # Without blocking: it could be a pipe.
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(handle, "rb") as file:
            plain = stat.S_ISREG(os.fstat(handle).st_mode)
            key = file.read(_LONGEST + 1).strip() if plain else b""
    except (OSError, ValueError) as error:
        raise UsageError(
            f"the key cannot be read: {getattr(error, 'strerror', None) or error}", where=os.fspath(path)
        ) from error
    if not plain or not _SHORTEST <= len(key) <= _LONGEST:
        actual = f"has {len(key)} bytes" if plain else "is no plain file"
        hint = "`openssl rand -hex 32 > FILE` makes a key"
        raise UsageError(f"{actual}, a key has {_SHORTEST} to {_LONGEST}", where=os.fspath(path), hint=hint)
    return key


def key_in_use() -> bytes | None:
    """Read the key that bundles must be signed with, if one was named."""
    path = os.environ.get(KEY_VARIABLE)
    return read_key(path) if path else None


def signature_of(key: bytes, manifest: bytes) -> bytes:
    """Return the content of the signature's file."""
    return hmac.new(key, _PURPOSE + manifest, hashlib.sha256).hexdigest().encode() + b"\n"


def check_signature(root: Path, manifest: bytes, key: bytes) -> None:
    """Refuse a bundle whose manifest does not fit its signature."""
    path = root / SIGNATURE
    if path.is_symlink() or not path.is_file():
        raise VerifyError(
            f"is not signed: {SIGNATURE} is missing",
            where=str(root),
            hint="`penstock sign BUNDLE --key FILE` signs one that you trust",
        )
    with path.open("rb") as file:
        signature = file.read(1024)
    if not hmac.compare_digest(signature, signature_of(key, manifest)):
        raise VerifyError(
            "the signature does not fit: altered since it was signed, or signed with another key", where=str(path)
        )
