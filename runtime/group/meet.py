"""The meeting point of a group: a store that rank 0 serves, or the launcher.

In: a ProcessPlace and an Interface. Out: a store of this start alone.

Rank 0 listens on one address: that of MASTER_ADDR where it is this host's, else that of the chosen interface. A store
that a launcher serves outlives its ranks. So each start of a rank is counted in it, and the values of the ranks stand
under that number.
"""

from __future__ import annotations

import os
import socket

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from penstock.support.errors import UsageError

from .group import RankGroup, not_met, time_span
from .hosts import INTERFACE_VARIABLE, Interface, ProcessPlace, choose_interface, interfaces, place_of, resolve
from .sealed import SealedStore
from .trust import Trust


def join_environment(timeout: float) -> tuple[Store, int, int]:
    """Join the meeting point that the environment names, through the interface that leads there; return store, rank,
    world size."""
    place = place_of()
    return join_place(place, choose_interface(place), timeout), place.rank, place.world


def join_place(place: ProcessPlace, interface: Interface, timeout: float, trust: Trust | None = None) -> Store:
    """Return the store of this start of the group. Gloo talks through the interface from here on. With `trust` the
    ranks compare what they trust, and values are sealed where there is a secret (sealed.py)."""
    os.environ[INTERFACE_VARIABLE] = interface.name
    try:
        if place.served or place.rank:
            store = TCPStore(place.address, place.port, place.world, False, time_span(timeout), wait_for_workers=False)
        else:
            store = _serve(place, interface, timeout)
        # Counted for each size of the group by itself: a rank that is not there in between does not count.
        start = store.add(f"penstock/start/{place.world}/{place.rank}", 1)
    except RuntimeError as error:
        raise not_met(f"{place.address}:{place.port}", timeout, error, f"rank {place.rank} on {place.host}") from error
    prefix = f"penstock/{place.world}/{start}"
    met = PrefixStore(prefix, store)
    if trust is None:
        return met
    RankGroup(met, place.rank, place.world, timeout).agree(
        "trust", trust.shown, hint="give --secret and --tls on all hosts, with the same files"
    )
    return SealedStore(store, trust.secret, prefix) if trust.secret else met


def _serve(place: ProcessPlace, interface: Interface, timeout: float) -> TCPStore:
    resolved = resolve(place.address, place)
    address = (
        resolved if resolved in interfaces().values() and not _stays_here(resolved, interface) else interface.address
    )
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((address, place.port))
    except OSError as error:
        listener.close()
        what = f"cannot listen where the group meets, at {address} port {place.port}: {error.strerror or error}"
        raise UsageError(
            what, where=f"rank {place.rank} on {place.host}", hint="set MASTER_PORT to a port that is free"
        ) from error
    listener.listen(128)
    return TCPStore(
        address,
        place.port,
        place.world,
        True,
        time_span(timeout),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def _stays_here(address: str, interface: Interface) -> bool:
    """Return whether a meeting point could be reached by this host alone, though the other hosts are elsewhere."""
    return address.startswith("127.") and not interface.address.startswith("127.")
