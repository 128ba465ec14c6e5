"""`penstock sign`: sign a bundle with a secret key, or check its signature."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from penstock.support.terminal import say


def add_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of `penstock sign`."""
    parser.add_argument("bundle", metavar="BUNDLE")
    parser.add_argument(
        "--key", required=True, metavar="FILE", help="the key: at least 32 bytes, e.g. of `openssl rand -hex 32`"
    )
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit code 5 where the signature does not fit"
    )


def run(arguments: Namespace) -> None:
    """Write a signature, or check one."""
    from penstock.backends.bundle.format import MANIFEST, open_bundle  # lazy: heavy
    from penstock.backends.bundle.signing import check_signature, read_key  # lazy: heavy
    from penstock.backends.bundle.writer import sign_bundle  # lazy: heavy

    key = read_key(arguments.key)
    if arguments.check:
        root = open_bundle(arguments.bundle, unsigned=True).path
        check_signature(root, (root / MANIFEST).read_bytes(), key)
        say(f"{arguments.bundle}: whole, and signed with this key")
    else:
        say(f"wrote {sign_bundle(arguments.bundle, key)}")
