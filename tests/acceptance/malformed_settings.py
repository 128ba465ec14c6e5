"""Files of settings that are wrong (cluster, training, plan, metrics, workload, IR, model), and environments."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from acceptance.malformed_case import DEEP, Case, Good

_CLUSTERS: dict[str, tuple[str, bytes]] = {
    "missing": ("none.toml", b""),
    "empty": ("c.toml", b""),
    "bytes": ("c.toml", b"\xff\xfe"),
    "syntax": ("c.toml", b"[[device]"),
    "deep": ("c.toml", b"a = " + b"[" * DEEP + b"]" * DEEP),
    "number": ("c.toml", b'[[device]]\nname = "cpu:0"\nthreads = ' + b"9" * 5000),
    "date": ("c.toml", b"[[device]]\nname = 1979-05-27\n"),
    "nan": ("c.toml", b'[[device]]\nname = "cpu:0"\nflops = nan\n'),
    "infinite": ("c.toml", b'[[device]]\nname = "cpu:0"\nmemory = inf\n'),
    "unit": ("c.toml", b'[[device]]\nname = "cpu:0"\nmemory = "8 parsec"\n'),
    "exponent": ("c.toml", b'[[device]]\nname = "cpu:0"\nmemory = "1e999999999 GiB"\n'),
    "unknown": ("c.toml", b'[[device]]\nname = "cpu:0"\ncolour = "red"\n'),
    "twice": ("c.toml", b'[[device]]\nname = "cpu:0"\n[[device]]\nname = "cpu:0"\n'),
    "link": ("c.toml", b'[[device]]\nname = "cpu:0"\n[[link]]\na = "cpu:0"\nb = "cpu:7"\n'),
    "table": ("c.toml", b"device = 3\nlink = {}\n"),
    "yaml-syntax": ("c.yaml", b"device: [: : :"),
    "yaml-deep": ("c.yaml", b"[" * 20_000),
    "yaml-object": ("c.yaml", b"device: !!python/object/apply:os.getcwd []"),
    "yaml-bomb": (
        "c.yaml",
        b"a: &a [x,x]\n" + b"".join(b"%c: &%c [*%c,*%c]\n" % (98 + i, 98 + i, 97 + i, 97 + i) for i in range(20)),
    ),
    "yaml-anchor": ("c.yaml", b"&a [*a]"),
    "yaml-list": ("c.yaml", b"- 1\n- 2\n"),
}
_TRAININGS: dict[str, bytes] = {
    "empty": b"",
    "bytes": b"\xff",
    "syntax": b"loss = ",
    "deep": b"loss = " + b"[" * DEEP + b"]" * DEEP,
    "loss": b'loss = "sorrow"',
    "loss-number": b"loss = 3",
    "microbatches": b'loss = "cross_entropy"\nmicrobatches = -1',
    "microbatches-huge": b'loss = "cross_entropy"\nmicrobatches = 99999999999999999999',
    "clip": b'loss = "cross_entropy"\nclip = nan',
    "seed": b'loss = "cross_entropy"\nseed = -3',
    "unknown": b'loss = "cross_entropy"\nflavour = 1',
    "optimizer": b'loss = "cross_entropy"\n[optimizer]\nkind = "gradient_ascent"',
    "optimizer-lr": b'loss = "cross_entropy"\n[optimizer]\nkind = "sgd"\nlr = inf',
    "rate": b'loss = "cross_entropy"\n[rate]\nkind = "cosine"\nsteps = -1',
    "group": b'loss = "cross_entropy"\n[[group]]\npattern = "("',
    "group-list": b'loss = "cross_entropy"\ngroup = [1, 2]',
}


def clusters() -> Iterator[Case]:
    for i, (name, (file, content)) in enumerate(_CLUSTERS.items()):

        def make(
            folder: Path, good: Good, file: str = file, content: bytes = content, simulate: bool = i % 3 == 2
        ) -> list[str]:
            if not file.startswith("none"):
                (folder / file).write_bytes(content)
            words = ["simulate", str(good.bundle)] if simulate else ["plan", str(good.model), "--dim", "batch=2"]
            return [*words, "--cluster", str(folder / file)]

        yield Case(f"cluster-{name}", make)


def trainings() -> Iterator[Case]:
    for name, content in _TRAININGS.items():

        def make(folder: Path, good: Good, content: bytes = content) -> list[str]:
            (folder / "t.toml").write_bytes(content)
            return ["plan", str(good.model), "--dim", "batch=2", "--train", str(folder / "t.toml")]

        yield Case(f"training-{name}", make)


_OTHERS: dict[str, tuple[bytes, list[str]]] = {
    "plan-text": (b"{", ["plan", "MODEL", "--dim", "batch=2", "--plan", "FILE"]),
    "plan-deep": (b"[" * DEEP, ["plan", "MODEL", "--dim", "batch=2", "--plan", "FILE"]),
    "plan-stages": (
        b'{"schedule": "forward", "microbatches": 1, "stages": [{"devices": [[]]}]}',
        ["plan", "MODEL", "--plan", "FILE"],
    ),
    "plan-schedule": (
        b'{"schedule": [], "microbatches": 1, "stages": [{"devices": ["cpu:0"]}]}',
        ["plan", "MODEL", "--plan", "FILE"],
    ),
    "plan-recompute": (
        b'{"schedule": "1f1b", "recompute": {}, "microbatches": 1, "stages": 1}',
        ["plan", "MODEL", "--plan", "FILE"],
    ),
    "metrics-text": (b"hello\n", ["plan", "BUNDLE", "--grade", "FILE"]),
    "metrics-bytes": (b"\xff\n", ["plan", "BUNDLE", "--grade", "FILE"]),
    "metrics-nan": (b'{"step": 0, "step_s": NaN}\n' * 9, ["plan", "BUNDLE", "--grade", "FILE"]),
    "metrics-list": (b"[1]\n" * 9, ["plan", "BUNDLE", "--grade", "FILE"]),
    "metrics-deep": (b"[" * DEEP + b"\n", ["plan", "BUNDLE", "--grade", "FILE"]),
    "workload-text": (b"[", ["plan", "--workload", "FILE"]),
    "workload-deep": (b"[" * DEEP, ["plan", "--workload", "FILE"]),
    "workload-empty": (b"{}", ["plan", "--workload", "FILE"]),
    "workload-nodes": (b'{"nodes": [1], "edges": {}, "maxSizePerFPGA": "x"}', ["plan", "--workload", "FILE"]),
    "ir-bytes": (b"\xff", ["inspect", "FILE"]),
    "ir-empty": (b"", ["opt", "FILE", "-p", "simplify"]),
    "ir-deep": (b"module @x {\n  note " + b"(" * DEEP + b"\n}\n", ["opt", "FILE", "-p", "simplify"]),
    "ir-pass": (b"module @x {\n}\n", ["opt", "FILE", "-p", "simplify{" * 5000]),
    "model-bytes": (b"\xff" * 50, ["plan", "FILE"]),
    "model-empty": (b"", ["verify", "FILE"]),
    "known": (b"\x93NUMPY", ["plan", "MODEL", "--dim", "batch=2", "--known", "x=FILE.npy"]),
    "numbers": (b"", ["run", "BUNDLE", "--lr", "nan", "--timeout", "nan"]),
    "numbers-rate": (b"", ["run", "BUNDLE", "--lr-schedule", "cosine{steps=" + "9" * 4000 + "}"]),
    "numbers-regex": (b"", ["plan", "MODEL", "--dim", "batch=2", "--frozen", "(" * 500]),
}


def others() -> Iterator[Case]:
    for name, (content, words) in _OTHERS.items():

        def make(folder: Path, good: Good, content: bytes = content, words: list[str] = words) -> list[str]:
            (folder / "file").write_bytes(content)
            (folder / "file.npy").write_bytes(content)
            places = {"FILE": str(folder / "file"), "MODEL": str(good.model), "BUNDLE": str(good.bundle)}
            return [places.get(word, word.replace("FILE", str(folder / "file"))) for word in words]

        yield Case(f"file-{name}", make)


_GROUP = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
_SETTINGS: list[dict[str, str]] = [
    {"RANK": "abc"}, {"RANK": ""}, {"RANK": "-1"}, {"RANK": "2"}, {"RANK": "9" * 5000}, {"RANK": "0.5"}, {"RANK": "٣"},
    {"WORLD_SIZE": "0"}, {"WORLD_SIZE": "x"}, {"WORLD_SIZE": "3"}, {"WORLD_SIZE": "1e9"}, {"WORLD_SIZE": "9" * 30},
    {"MASTER_PORT": "x"}, {"MASTER_PORT": "0x10"}, {"MASTER_PORT": "99999999"}, {"MASTER_PORT": "-5"}, {"MASTER_PORT": ""},
    {"MASTER_ADDR": ""}, {"LOCAL_RANK": "abc"},
]  # fmt: skip


def environments() -> Iterator[Case]:
    for i, change in enumerate(_SETTINGS):
        yield Case(f"group-{i}", lambda folder, good: ["run", str(good.bundle), "--steps", "1"], _GROUP | change)
    for i, change in enumerate([{"RANK": "abc"}, {"WORLD_SIZE": "x"}, {"MASTER_PORT": "x"}]):
        yield Case(f"doctor-{i}", lambda folder, good: ["doctor"], _GROUP | change)
    compile_words = ["--dim", "batch=2", "-o"]
    for i, change in enumerate(
        [{"PENSTOCK_CACHE_SIZE": text} for text in ("lots", "-1", "nan", "9" * 5000, "1 parsec")]
    ):
        yield Case(
            f"cache-{i}", lambda folder, good: ["compile", str(good.model), *compile_words, str(folder / "b")], change
        )
    yield Case(
        "dump", lambda folder, good: ["compile", str(good.model), *compile_words, str(folder / "b"), "--backend", "numpy"],
        {"PENSTOCK_DUMP": "/dev/null/x"},
    )  # fmt: skip
