"""Tests of signatures of bundles: where signatures are demanded, only a bundle signed with the key is opened."""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from acceptance.malformed_bundles import seal
from oracles.chain import chain_bundle

from penstock.backends.bundle.format import open_bundle
from penstock.backends.bundle.signing import KEY_VARIABLE, SIGNATURE
from penstock.commands.parser import main
from penstock.support.errors import UsageError, VerifyError

KEY = "c0ffee" * 12


@pytest.fixture
def key(tmp_path: Path) -> Path:
    path = tmp_path / "bundle.key"
    path.write_text(f"{KEY}\n")
    return path


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return chain_bundle(tmp_path / "bundle", 2, "1f1b").path


@pytest.fixture
def signed(bundle: Path, key: Path) -> Path:
    assert main(["sign", str(bundle), "--key", str(key)]) == 0
    return bundle


def test_a_signature_is_what_openssl_computes(signed: Path) -> None:
    told = b"penstock bundle\n" + (signed / "manifest.json").read_bytes()
    command = ["openssl", "dgst", "-sha256", "-hmac", KEY]
    if shutil.which("openssl") is None:
        expected = hmac.digest(KEY.encode(), told, "sha256").hex()
    else:
        expected = (
            subprocess.run(command, input=told, capture_output=True, check=True, timeout=30).stdout.split()[-1].decode()
        )
    assert (signed / SIGNATURE).read_text() == f"{expected}\n"


def test_where_signatures_are_demanded(
    signed: Path, key: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "other.key"
    other.write_text("b0b" * 12)
    monkeypatch.setenv(KEY_VARIABLE, str(key))
    assert open_bundle(signed).world_size == 2
    assert open_bundle(signed, 1).world_size == 2
    monkeypatch.setenv(KEY_VARIABLE, str(other))
    with pytest.raises(VerifyError, match="does not fit"):
        open_bundle(signed)
    (signed / SIGNATURE).unlink()
    with pytest.raises(VerifyError, match="is not signed"):
        open_bundle(signed)
    monkeypatch.delenv(KEY_VARIABLE)
    assert open_bundle(signed).world_size == 2, "the control: nobody asks for signatures"


@pytest.mark.parametrize("file", ["module.ir", "weights/s1.safetensors", "plan.json", "manifest.json"])
def test_a_forged_bundle_is_refused(signed: Path, key: Path, file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every hash is right again, which is what a signature is for."""
    if file == "manifest.json":
        manifest = json.loads((signed / file).read_bytes())
        seal(signed, manifest | {"name": "another"})
    else:
        data = bytearray((signed / file).read_bytes())
        data[-3] ^= 1
        (signed / file).write_bytes(data)
        seal(signed)
    assert open_bundle(signed).world_size == 2, "the control: hashes alone do not tell"
    monkeypatch.setenv(KEY_VARIABLE, str(key))
    with pytest.raises(VerifyError, match="the signature does not fit"):
        open_bundle(signed)
    with pytest.raises(VerifyError, match="the signature does not fit"):
        open_bundle(signed, 0)


def test_signatures_are_files_of_their_own(
    signed: Path, key: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEY_VARIABLE, str(key))
    (tmp_path / "elsewhere").write_bytes((signed / SIGNATURE).read_bytes())
    (signed / SIGNATURE).unlink()
    (signed / SIGNATURE).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(VerifyError, match="is not signed"):
        open_bundle(signed)
    for text in (b"", b"\0" * 64, hashlib.sha256(b"").hexdigest().encode(), b"\xff" * 4096):
        (signed / SIGNATURE).unlink()
        (signed / SIGNATURE).write_bytes(text)
        with pytest.raises(VerifyError, match="does not fit"):
            open_bundle(signed)


def test_damage_is_not_signed(bundle: Path, key: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (bundle / "module.ir").write_text("module @x {\n}\n")
    assert main(["sign", str(bundle), "--key", str(key)]) == 5
    assert "module.ir: SHA-256 is" in capsys.readouterr().err
    assert not (bundle / SIGNATURE).exists()


def test_checking(signed: Path, key: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (signed / SIGNATURE).read_bytes()
    assert main(["sign", str(signed), "--key", str(key), "--check"]) == 0
    key.write_text("another key of 32 bytes and more....")
    assert main(["sign", str(signed), "--key", str(key), "--check"]) == 5
    said = capsys.readouterr().err
    assert "does not fit" in said
    assert KEY not in said
    assert (signed / SIGNATURE).read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith(".")) == []


def test_keys_that_are_none(bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    short = tmp_path / "short"
    short.write_text("secret")
    os.mkfifo(tmp_path / "pipe")
    for path in (short, tmp_path / "pipe", tmp_path / "none", Path("/dev/zero"), tmp_path):
        monkeypatch.setenv(KEY_VARIABLE, str(path))
        with pytest.raises(UsageError, match=r"a key has 32|cannot be read"):
            open_bundle(bundle)


def test_what_is_compiled_is_signed(tmp_path: Path, key: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, str(key))
    path = chain_bundle(tmp_path / "bundle", 2, "1f1b").path
    assert open_bundle(path).world_size == 2
