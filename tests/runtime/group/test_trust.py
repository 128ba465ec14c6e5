"""Tests of the membership of a group: keepers, with and without TLS, and the records at the meeting point. Every wait
is bounded."""

from __future__ import annotations

import contextlib
import hmac
import shutil
import socket
import ssl
import struct
import subprocess
import sys
import threading
import time

import msgspec
import pytest
from torch.distributed import PrefixStore

from penstock.runtime.group.sealed import SealedStore
from penstock.runtime.group.trust import Trust, open_trust, proof, trust_problems
from penstock.runtime.launch.peers import PeerHello, Peers, Proof, Pulse, Said, Welcome
from penstock.support.errors import UsageError, VerifyError

from ..launch.two_ranks import finish
from .secrets_and_certificates import SECRET, TOKEN, make_certificate, needs_openssl


@pytest.fixture
def listeners():
    made = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
    yield made
    for listener in made:
        listener.close()


@pytest.fixture
def meshes(listeners):
    """meshes(rank, trust, token): the keeper's end of that rank."""
    made = []

    def mesh(rank: int, trust: Trust, token: str = TOKEN) -> Peers:
        made.append(Peers(listeners[rank], rank, [listener.getsockname() for listener in listeners], token, 5, trust))
        return made[-1]

    yield mesh
    for each in made:
        each.close()


def hear(*meshes: Peers, until, seconds: float = 10.0) -> list:
    """What the first one hears, while all of them go on, until it is what was expected."""
    heard: list = []
    deadline = time.monotonic() + seconds
    while not until(heard) and time.monotonic() < deadline:
        for i, mesh in enumerate(meshes):
            found = mesh.hear(0.01)
            heard += found if i == 0 else []
    return heard


class Stranger:
    """A connection that speaks the records, and keeps what was said."""

    def __init__(self, address, context: ssl.SSLContext | None = None) -> None:
        self.connection = socket.create_connection(address, 5)
        self.connection.settimeout(5)
        if context is not None:
            self.connection = context.wrap_socket(self.connection)
        self.sent: list[bytes] = []

    def close(self) -> None:
        self.connection.close()

    def say(self, record: Said) -> None:
        data = msgspec.msgpack.encode(record)
        self.sent.append(struct.pack("<I", len(data)) + data)
        self.connection.sendall(self.sent[-1])

    def listen(self):
        (length,) = struct.unpack("<I", self.connection.recv(4, socket.MSG_WAITALL))
        return msgspec.msgpack.decode(self.connection.recv(length, socket.MSG_WAITALL), type=Said)

    def is_cut_off(self, *meshes: Peers) -> bool:
        """Within bounded time, and nothing came of it."""
        deadline = time.monotonic() + 10
        self.connection.settimeout(0.01)
        while time.monotonic() < deadline:
            for mesh in meshes:
                assert mesh.hear(0.01) == []
            try:
                if self.connection.recv(1 << 16) == b"":
                    return True
            except TimeoutError:
                continue
            except OSError:
                return True
        return False


@pytest.fixture
def strangers():
    """strangers(address, context=None): one that is closed in the end."""
    with contextlib.ExitStack() as stack:
        yield lambda *given: stack.enter_context(contextlib.closing(Stranger(*given)))


def running(mesh: Peers):
    """The mesh goes on in the background, while somebody waits for its answers; what it heard."""
    heard: list = []
    ended = threading.Event()

    def go_on() -> None:
        while not ended.is_set():
            heard.extend(mesh.hear(0.01))

    thread = threading.Thread(target=go_on, daemon=True)
    thread.start()

    def stop():
        ended.set()
        thread.join(10)
        return heard

    return stop


# ------------------------------------------------------------------------------------------------ keepers


@pytest.mark.parametrize("secret", [b"", SECRET])
def test_friends_hear_each_other(meshes, secret):
    """What is said before the other end has proved who it is waits for that."""
    low, high = meshes(0, Trust(secret)), meshes(1, Trust(secret))
    high.send_all(Pulse("1F0", 3))
    assert hear(low, high, until=bool) == [(1, Pulse("1F0", 3))]
    low.send_all(Pulse("0F1", 4))
    assert hear(high, low, until=bool) == [(0, Pulse("0F1", 4))]


@pytest.mark.parametrize(
    ("trust", "token"), [(Trust(b"t" * 32), TOKEN), (Trust(SECRET), "of another start"), (Trust(), TOKEN)]
)
def test_who_has_another_secret_is_refused(meshes, trust, token):
    """The one who connects sees it first: it says nothing, and hears whose fault it is."""
    low, high = meshes(0, Trust(SECRET)), meshes(1, trust, token)
    high.send_all(Pulse("1F0", 3))
    heard = hear(high, low, until=lambda found: (0, None) in found)
    assert heard == [(0, "it does not know the secret of this start"), (0, None)]
    assert low.hear(0.2) == []


def test_guesses_are_refused(meshes, listeners, strangers):
    low = meshes(0, Trust(SECRET))
    for last in (Proof("0" * 64), Proof("\u00e9"), Pulse("1F0", 3), PeerHello(1, "x")):
        stranger = strangers(listeners[0].getsockname())
        stop = running(low)
        stranger.say(PeerHello(1, "n"))
        assert isinstance(stranger.listen(), Welcome)
        assert stop() == []
        stranger.say(last)
        assert stranger.is_cut_off(low)


def test_what_was_overheard_proves_nothing_later(meshes, listeners, strangers):
    """All bytes of a friend, said again: the other end's nonce is another one. Also with the friend's proof for its own records."""
    low = meshes(0, Trust(SECRET))
    address, key = listeners[0].getsockname(), Trust(SECRET).key(TOKEN)
    friend = strangers(address)
    stop = running(low)
    friend.say(PeerHello(1, "nonce"))
    welcome = friend.listen()
    assert welcome.proof == proof(key, "accepts", (1, 0), ("nonce", welcome.nonce))
    friend.say(Proof(proof(key, "connects", (1, 0), ("nonce", welcome.nonce))))
    friend.say(Pulse("1F0", 3))
    deadline = time.monotonic() + 10
    while 1 not in low._links and time.monotonic() < deadline:
        time.sleep(0.01)
    friend.connection.close()
    assert hear(low, until=lambda found: True) == []
    deadline = time.monotonic() + 10
    while 1 in low._links and time.monotonic() < deadline:
        time.sleep(0.01)
    assert stop() == [(1, Pulse("1F0", 3)), (1, None)], "the control: the friend was heard"
    again = strangers(address)
    for data in friend.sent:
        again.connection.sendall(data)
    assert again.is_cut_off(low)
    # Nor does what the other side proved, turned round.
    again = strangers(address)
    stop = running(low)
    again.say(PeerHello(1, "nonce"))
    reflected = again.listen()
    stop()
    again.say(Proof(reflected.proof))
    assert again.is_cut_off(low)


def test_a_key_is_of_its_start_and_its_secret():
    keys = {Trust(secret).key(token) for secret in (b"", SECRET, b"t" * 32) for token in ("a", "b")}
    assert len(keys) == 6
    shown = [Trust(secret).shown for secret in (b"", SECRET, b"t" * 32)]
    assert len(set(shown)) == 3
    assert SECRET.decode() not in shown[1]


# ------------------------------------------------------------------------------------------------ TLS


@needs_openssl
def test_over_tls(meshes, tls, listeners, strangers):
    """Friends hear each other, what is larger than one record of TLS too; neither plain text nor a client without a certificate is let in."""
    trust = open_trust(None, str(tls))
    low, high = meshes(0, trust), meshes(1, trust)
    high.send_all(Pulse("x" * 100_000, 3))
    assert hear(low, high, until=bool) == [(1, Pulse("x" * 100_000, 3))]
    assert all(link.secured.version() == "TLSv1.3" for mesh in (low, high) for link in mesh._links.values())
    address = listeners[0].getsockname()
    plain = strangers(address)
    plain.say(PeerHello(1, "nonce"))
    assert plain.is_cut_off(low, high)
    nobody = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    nobody.check_hostname, nobody.verify_mode = False, ssl.CERT_NONE
    stop = running(low)
    try:
        client = strangers(address, nobody)
        with contextlib.suppress(ssl.SSLError, ConnectionError):
            client.say(PeerHello(1, "nonce"))
        assert client.is_cut_off()
    finally:
        assert stop() == []
    low.send_all(Pulse("0F0", 1))
    assert hear(high, low, until=bool) == [(0, Pulse("0F0", 1))]


@needs_openssl
@pytest.mark.parametrize("who", [0, 1])
def test_certificates_of_others_and_plain_keepers(meshes, tls, tmp_path, who):
    """One end has what the other one does not know, or no TLS at all: it ends, with a word on the side of the one who connected."""
    other = open_trust(None, str(make_certificate(tmp_path / "other"))) if who == 0 else Trust()
    low, high = meshes(0, open_trust(None, str(tls))), meshes(1, other)
    high.send_all(Pulse("1F0", 3))
    heard = hear(high, low, until=lambda found: (0, None) in found)
    assert (0, None) in heard
    assert all(rank == 0 and (said is None or "TLS" in said) for rank, said in heard)
    assert low.hear(0.2) == []


@needs_openssl
def test_an_authority_signs_several(meshes, tmp_path):
    """Two certificates of one authority, one for each host."""
    authority = make_certificate(tmp_path / "authority")
    for name in ("a", "b"):
        folder = tmp_path / name
        folder.mkdir()
        words = "req -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -subj /CN=host -keyout key.pem -out request.pem"
        subprocess.run(["openssl", *words.split()], cwd=folder, check=True, capture_output=True, timeout=60)
        signing = [
            "x509",
            "-req",
            "-in",
            "request.pem",
            "-CA",
            str(authority / "cert.pem"),
            "-CAkey",
            str(authority / "key.pem"),
        ]
        signing += ["-CAcreateserial", "-days", "30", "-out", "cert.pem"]
        subprocess.run(["openssl", *signing], cwd=folder, check=True, capture_output=True, timeout=60)
        shutil.copy(authority / "cert.pem", folder / "ca.pem")
    low, high = (meshes(rank, open_trust(None, str(tmp_path / name))) for rank, name in enumerate("ab"))
    high.send_all(Pulse("1F0", 3))
    assert hear(low, high, until=bool) == [(1, Pulse("1F0", 3))]


@needs_openssl
def test_files_that_are_none(tls, tmp_path):
    assert trust_problems(None, str(tls)) == []
    for name, text in (("empty", None), ("key", "no key"), ("cert", "no certificate")):
        folder = tmp_path / name
        folder.mkdir()
        if text is not None:
            for file in ("cert.pem", "key.pem"):
                (folder / file).write_text(text if file.startswith(name) else (tls / file).read_text())
        (problem,) = trust_problems(None, str(folder))
        assert problem.startswith(f"--tls {folder}: no certificate and key: ")
    locked = tmp_path / "locked"
    locked.mkdir()
    command = [
        "openssl",
        "ec",
        "-in",
        str(tls / "key.pem"),
        "-aes128",
        "-passout",
        "pass:word",
        "-out",
        str(locked / "key.pem"),
    ]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    shutil.copy(tls / "cert.pem", locked)
    with pytest.raises(UsageError, match="no certificate and key"):
        open_trust(None, str(locked))
    (tmp_path / "short").write_text("secret")
    problems = trust_problems(str(tmp_path / "short"), str(tmp_path / "none"))
    assert [problem.split()[0] for problem in problems] == ["--secret", "--tls"]


# ------------------------------------------------------------------------------------------------ where the group meets


def test_values_of_strangers_are_refused(store):
    sealed = SealedStore(store, SECRET, "penstock/1")
    sealed.set("address", "10.0.0.1")
    assert SealedStore(store, SECRET, "penstock/1").get("address") == b"10.0.0.1"
    value = store.get("penstock/1/address")
    expected = hmac.digest(SECRET, b"penstock/1/address\x0010.0.0.1", "sha256")
    assert value == expected + b"10.0.0.1"
    with pytest.raises(VerifyError, match="without the secret"):
        SealedStore(store, b"t" * 32, "penstock/1").get("address")
    # What belongs elsewhere, what was altered, what was never sealed.
    for forged in (b"10.0.0.9", b"", expected + b"10.0.0.9"):
        store.set("penstock/1/address", forged)
        with pytest.raises(VerifyError, match="without the secret"):
            sealed.get("address")
    store.set("penstock/2/address", value)
    with pytest.raises(VerifyError, match="without the secret"):
        SealedStore(store, SECRET, "penstock/2").get("address")
    sealed.clone().set("more", "m")
    assert sealed.get("more") == b"m"
    assert PrefixStore("x", sealed).add("count", 2) == 2
    assert sealed.check(["x/count"])


CONNECT = """
import gc, os, sys
gc.disable()
from datetime import timedelta
from torch.distributed import TCPStore
from penstock.runtime.group.sealed import SealedStore
from penstock.runtime.group.group import RankGroup
rank, port, secret = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3].encode()
store = SealedStore(TCPStore("127.0.0.1", port, None, False, timedelta(seconds=5), wait_for_workers=False), secret)
group = RankGroup(store, rank, 2, 5.0)
group.connect()
group.agree("module.ir", "same")
group.leave()
os._exit(0)
"""


@pytest.mark.parametrize(
    "other", [SECRET.decode(), pytest.param("t" * 32, marks=pytest.mark.slow)], ids=["same", "other"]
)
def test_gloo_meets_at_a_sealed_store(store, other):
    """Its addresses are sealed as well: with another secret the ranks do not connect."""
    command = [sys.executable, "-c", CONNECT]
    both = [
        subprocess.Popen([*command, str(rank), str(store.port), secret], stderr=subprocess.PIPE, text=True)
        for rank, secret in enumerate((SECRET.decode(), other))
    ]
    said = finish(both, 60)
    if other == SECRET.decode():
        assert [process.returncode for process in both] == [0, 0], said
    else:
        assert all(process.returncode for process in both)
        assert any("without the secret of this run" in text for text in said), said
