"""A store whose values only ranks with a secret can write.

In: a store that any process may reach, a key. Out: the same interface, for us and for gloo.

    value = HMAC-SHA256(key, prefix and name, value) · value

Addresses of ranks stand in the store where a group meets. A process that can write there could put other addresses
in their place. Values are not hidden. Counters (`add`) are not sealed: they are numbers that torch keeps, and a process
that changes them makes ranks wait in vain. A process that rules the store can give a value of an earlier run with the
same secret in place of a new one.
"""

from __future__ import annotations

import hmac
from datetime import timedelta

from torch.distributed import Store  # type: ignore[attr-defined]

from penstock.support.errors import VerifyError

_MAC = 32


class SealedStore(Store):
    """A store that seals and checks values. Keep it as long as torch has it: torch calls back."""

    def __init__(self, inner: Store, key: bytes, prefix: str = "") -> None:
        super().__init__()
        self._inner, self._key, self._prefix = inner, key, prefix

    def _name(self, name: str) -> str:
        return f"{self._prefix}/{name}" if self._prefix else name

    def _seal(self, name: str, value: bytes) -> bytes:
        return hmac.digest(self._key, name.encode() + b"\0" + value, "sha256")

    def set(self, name: str, value: str | bytes) -> None:
        data = value.encode() if isinstance(value, str) else bytes(value)
        self._inner.set(self._name(name), self._seal(self._name(name), data) + data)  # type: ignore[arg-type]

    def get(self, name: str) -> bytes:
        sealed = bytes(self._inner.get(self._name(name)))
        if not hmac.compare_digest(sealed[:_MAC], self._seal(self._name(name), sealed[_MAC:])):
            raise VerifyError(
                f"{name!r} was put there by somebody without the secret of this run", where="meeting point"
            )
        return sealed[_MAC:]

    def wait(self, names: list[str], timeout: timedelta | None = None) -> None:
        prefixed = [self._name(name) for name in names]
        self._inner.wait(prefixed) if timeout is None else self._inner.wait(prefixed, timeout)

    def check(self, names: list[str]) -> bool:
        return self._inner.check([self._name(name) for name in names])

    def add(self, name: str, amount: int) -> int:
        return self._inner.add(self._name(name), amount)

    def delete_key(self, name: str) -> bool:
        return self._inner.delete_key(self._name(name))

    def num_keys(self) -> int:
        return self._inner.num_keys()

    def clone(self) -> SealedStore:
        """Return another connection to the same place."""
        return SealedStore(self._inner.clone(), self._key, self._prefix)  # type: ignore[attr-defined]

    def set_timeout(self, timeout: timedelta) -> None:
        self._inner.set_timeout(timeout)

    def has_extended_api(self) -> bool:
        return False
