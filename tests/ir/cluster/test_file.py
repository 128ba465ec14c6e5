"""Cluster files: written and read back the same, and every problem of a bad one told at once."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.ir.cluster.cluster import CLASSES, Cluster, Device, Host, Link, LinkClass
from penstock.ir.cluster.file import cluster_text, cluster_toml, cluster_yaml, read_cluster
from penstock.ir.graph import Module
from penstock.ir.text import parse_module, print_module
from penstock.support.errors import UsageError

names = st.from_regex(r"[a-zA-Z][\w./:\-]{0,6}", fullmatch=True)
rates = st.floats(1.0, 1e18)
seconds = st.floats(0.0, 10.0)
sizes = st.integers(1, 1 << 50)
spaces = st.dictionaries(st.sampled_from(["ram", "hbm", "pinned", "disk"]), sizes, max_size=3).map(
    lambda d: tuple(d.items())
)
# Devices that share a GPU have to name it.
gpus = st.integers(0, 3).map(str) | st.sampled_from(["GPU-1a2b", "MIG-3c4d"])
shares = st.dictionaries(
    st.sampled_from(["products", "products.bf16", "elements.bytes", "layout"]), st.floats(1e-3, 20.0), max_size=3
).map(lambda d: tuple(d.items()))


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    hosts = draw(st.lists(st.builds(Host, names, names | st.just(""), names | st.just(""), rates | st.just(0.0), seconds), max_size=3, unique_by=lambda h: h.name))  # fmt: skip
    where = st.sampled_from([h.name for h in hosts]) if hosts else names
    device = st.one_of(
        st.builds(Device, names, st.just("cpu"), where, names, st.integers(1, 99), rates, rates, spaces, sizes | st.just(0), rates | st.just(0.0), seconds, seconds, shares, quota=st.sampled_from([1.0, 0.25])).map(lambda d: replace(d, quota_period=0.1 if d.quota < 1 else 0.0)),
        st.builds(Device, names, st.just("cuda"), where, st.sampled_from(["sm_80", "sm_90a", "sm_120"]), st.integers(1, 9), rates, rates, spaces, efficiency=shares, gpu=gpus),
    )  # fmt: skip
    devices = draw(st.lists(device, min_size=1, max_size=4, unique_by=lambda d: d.name))
    pairs = [(a.name, b.name) for i, a in enumerate(devices) for b in devices[i + 1 :]]
    chosen = draw(st.lists(st.sampled_from(pairs), unique=True)) if pairs else []
    links = tuple(Link(a, b, draw(rates), draw(seconds), draw(names | st.just(""))) for a, b in chosen)
    kinds = draw(st.lists(st.sampled_from(sorted(CLASSES)), unique=True))
    return Cluster(
        tuple(devices), links, tuple(hosts), tuple(LinkClass(kind, draw(rates), draw(seconds)) for kind in kinds)
    )


@given(clusters())
@settings(max_examples=60, deadline=None)
def test_what_is_written_is_read_back(tmp_path_factory: pytest.TempPathFactory, cluster: Cluster) -> None:
    folder = tmp_path_factory.mktemp("cluster")
    for suffix in ("toml", "yaml"):
        file = folder / f"cluster.{suffix}"
        file.write_text(cluster_text(cluster, file), encoding="utf-8")
        again = read_cluster(file)
        assert again == cluster
        assert (cluster_yaml if suffix == "yaml" else cluster_toml)(again) == file.read_text(encoding="utf-8")
    # The text of a module says all of it, too.
    module = Module("m", cluster=cluster)
    assert parse_module(print_module(module)) == module


def load(tmp_path: Path, text: str, name: str = "cluster.toml") -> Cluster:
    file = tmp_path / name
    file.write_text(text, encoding="utf-8")
    return Cluster.load(file)


def problems(tmp_path: Path, text: str, name: str = "cluster.toml") -> list[str]:
    with pytest.raises(UsageError) as caught:
        load(tmp_path, text, name)
    assert caught.value.where == str(tmp_path / name)
    first, *rest = str(caught.value).split("\n  - ")
    assert "the cluster has problems:" in first
    return rest


FULL = """
[links]
same-host = { bandwidth = "4 GB/s", latency = "30 us" }
other-host = { bandwidth = 5e8, latency = 1e-4 }

[[host]]
name = "left"
address = "10.0.0.1"
interface = "eth0"
nic_bandwidth = "10 Gbit/s"
nic_latency = "5 us"
[host.device]
threads = 4
memory = "64 GiB"
bandwidth = "20 GB/s"
efficiency = { products = 0.9 }

[[host]]
name = "right"
nic_bandwidth = "4 Gbit/s"

[[device]]
name = "left/cpu:0"
host = "left"

[[device]]
name = "left/cpu:1"
host = "left"
threads = 2
spaces = { ram = "8 GiB", far = "1 TiB" }

[[device]]
name = "right/gpu"
host = "right"
kind = "gpu"
arch = "sm_90"

[[link]]
a = "left/cpu:0"
b = "right/gpu"
bandwidth = "1 MB/s"
latency = 0
"""
YAML = """
links:
  same-host: {bandwidth: 4 GB/s, latency: 30 us}
  other-host: {bandwidth: 5e8, latency: 1e-4}
host:
  - name: left
    address: 10.0.0.1
    interface: eth0
    nic_bandwidth: 10 Gbit/s
    nic_latency: 5 us
    device: {threads: 4, memory: 64 GiB, bandwidth: 20 GB/s, efficiency: {products: 0.9}}
  - {name: right, nic_bandwidth: 4 Gbit/s}
device:
  - {name: "left/cpu:0", host: left}
  - {name: "left/cpu:1", host: left, threads: 2, spaces: {ram: 8 GiB, far: 1 TiB}}
  - {name: right/gpu, host: right, kind: gpu, arch: sm_90}
link:
  - {a: "left/cpu:0", b: right/gpu, bandwidth: 1 MB/s, latency: 0}
"""


@pytest.mark.parametrize(("text", "name"), [(FULL, "cluster.toml"), (YAML, "cluster.yaml"), (YAML, "cluster.yml")])
def test_hosts_give_defaults_and_units_are_read(tmp_path: Path, text: str, name: str) -> None:
    cluster = load(tmp_path, text, name)
    first, second, gpu = cluster.devices
    assert (first.threads, first.flops, first.bandwidth, first.spaces) == (4, 2e11, 2e10, (("ram", 64 * 2**30),))
    assert (first.efficiency, second.efficiency, gpu.efficiency) == ((("products", 0.9),), (("products", 0.9),), ())
    assert (second.threads, second.flops, second.spaces) == (2, 1e11, (("ram", 2**33), ("far", 2**40)))
    assert (gpu.kind, gpu.target, gpu.threads, gpu.flops) == ("cuda", "sm_90", 1, 6.7e13)
    assert cluster.hosts == (Host("left", "10.0.0.1", "eth0", 1.25e9, 5e-6), Host("right", nic_bandwidth=5e8))
    assert cluster.link("left/cpu:1", "left/cpu:0") == Link("left/cpu:1", "left/cpu:0", 4e9, 3e-5)
    assert cluster.link("left/cpu:0", "right/gpu") == Link("left/cpu:0", "right/gpu", 1e6, 0.0)


def test_paths_say_what_they_share(tmp_path: Path) -> None:
    cluster = load(tmp_path, FULL)
    # By class: the slower card is the limit, both are shared by direction, and both latencies count. Then the bytes are
    # copied to the GPU.
    rate, latency = cluster.link_class("host-to-device")
    assert cluster.path("left/cpu:1", "right/gpu") == (
        pytest.approx(1 / (1 / 5e8 + 1 / rate)),
        pytest.approx(1.05e-4 + latency),
        (("nic of left out", 1.25e9), ("nic of right in", 5e8)),
        math.inf,
    )
    assert cluster.path("right/gpu", "left/cpu:1").shares == (("nic of right out", 5e8), ("nic of left in", 1.25e9))
    # A link of its own shares what it says, here nothing.
    assert cluster.path("left/cpu:0", "right/gpu") == (
        pytest.approx(1 / (1 / 1e6 + 1 / rate)),
        pytest.approx(latency),
        (),
        math.inf,
    )
    assert cluster.path("left/cpu:0", "left/cpu:1").shares == ()
    assert (cluster.path("left/cpu:0", "left/cpu:1").summing, cluster.shares_memory("left/cpu:0", "left/cpu:1")) == (
        2.2e9,
        True,
    )
    assert not cluster.shares_memory("left/cpu:1", "right/gpu")
    assert not cluster.is_shared
    # Without anything said, the rate of the cards is better than a guess.
    bare = Cluster(cluster.devices, hosts=cluster.hosts)
    assert bare.link("left/cpu:1", "right/gpu").bandwidth == 5e8
    assert Cluster(cluster.devices).link("left/cpu:1", "right/gpu").bandwidth == CLASSES["other-host"][0]


def test_named_cards_are_shared_by_their_links() -> None:
    devices = (Device("a", host="x"), Device("b", host="y"), Device("c", host="z"), Device("d", host="x"))
    links = (Link("a", "b", 1e9, 1e-4, "eth"), Link("a", "c", 2e9, 1e-4, "eth"), Link("a", "d", 5e9, 1e-5, "bus"))
    cluster = Cluster(devices, links)
    assert cluster.path("a", "b") == (1e9, 1e-4, (("eth out", 2e9),), math.inf)
    assert cluster.path("c", "a").shares == (("eth in", 2e9),)
    assert cluster.path("a", "d").shares == (("bus", 5e9),)
    # With a link between two other hosts no host has the card alone: one medium, whatever the direction.
    assert Cluster(devices, (*links, Link("b", "c", 1e9, 1e-4, "eth"))).path("a", "b").shares == (("eth", 2e9),)


def test_a_gpu_and_its_host_have_a_link_of_their_kind() -> None:
    cluster = Cluster(
        (Device("c"), Device("g", "cuda", target="sm_90"), Device("h", "cuda", host="other", target="sm_90"))
    )
    assert [cluster.link(a, b).bandwidth for a, b in ("cg", "gc", "gh")] == [1e10, 1e10, 1e9]


def test_all_problems_are_told_at_once(tmp_path: Path) -> None:
    found = problems(
        tmp_path,
        """
[oops]
x = 1
[links]
same-host = { bandwidth = 0 }
nowhere = { bandwidth = 1 }
[[host]]
name = "h"
colour = "red"
[host.device]
threads = -1
[[host]]
name = "h"
nic_bandwidth = nan
[[device]]
name = "a"
host = "h"
threads = 0
memory = 0
[[device]]
name = "a"
host = "elsewhere"
flops = -1.0
bandwidth = inf
latency = 3
[[device]]
name = "b c"
host = "h"
memory = "8 parsecs"
bandwidth = "3 GiB"
kind = "tpu"
[[link]]
a = "a"
b = "a"
[[link]]
a = "a"
b = "nobody"
latency = -1
bandwidth = "10 GHz"
""",
    )
    expected = [
        "unknown table [oops], expected device, link, host, links",
        "host 'h': unknown key 'colour', expected one of name, address",
        "host 'h', device: threads must be positive, a whole number, got -1",
        "host 'h': nic_bandwidth must be positive or 0 and finite, got nan",
        "device 'a': threads must be positive, a whole number, got 0",
        "device 'a': memory must be positive and finite, got 0",
        "device 'a': flops must be positive and finite, got -1.0",
        "device 'a': bandwidth must be positive and finite, got inf",
        "device 'a': unknown key 'latency', expected one of name, kind",
        "device 'b c': name must be a name without blanks, of letters, digits and . / : - _, got 'b c'",
        "device 'b c': memory must be a number of bytes or with a unit, like '8 GiB', got '8 parsecs'",
        "device 'b c': bandwidth must be a number of bytes per second or with a unit, like '2 GB/s', got '3 GiB', did you mean '3 GiB/s'?",
        "device 'b c': kind must be one of cpu, cuda or gpu, got 'tpu'",
        "link 1: latency must be positive or 0 and finite, got -1",
        "link 1: bandwidth must be a number of bytes per second or with a unit, like '2 GB/s', got '10 GHz'",
        "[links] same-host: bandwidth must be positive and finite, got 0",
        "[links]: unknown class 'nowhere', expected one of same-host, other-host, host-to-device",
        "device 'a' is listed twice",
        "host 'h' is listed twice",
        "device 'a': no host 'elsewhere', there are h",
        "link 0: 'a' is linked to itself",
        "link 1: no device 'nobody'",
    ]
    for text in expected:
        assert any(line.startswith(text) for line in found), (text, found)
    # The control: nothing else is wrong but the name that could not be read, which is then missing.
    assert len(found) == len(expected) + 1
    assert "device 'b c': needs a name without blanks" in found


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "there is no [[device]]"),
        ('link = "a"\n[[device]]\nname = "a"', "[link] must be a list of tables, written [[link]]"),
        ("[[device]]\nthreads = 2", "device 0: needs a name without blanks"),
        ('[[device]]\nname = "a"\nthreads = 1.5', "device 'a': threads must be positive, a whole number, got 1.5"),
        ('[[device]]\nname = "a"\nthreads = true', "device 'a': threads must be positive, a whole number, got True"),
        ('[[device]]\nname = "a"\nmemory = "0.1 B"', "device 'a': memory must be a byte or more, got '0.1 B'"),
        (
            '[[device]]\nname = "a"\nmemory = 1\nspaces = { ram = 1 }',
            "device 'a': says memory and spaces; memory is the first of the spaces",
        ),
        ('[[device]]\nname = "a"\nquota = 1.5', "device 'a': a quota must be above 0 and at most 1, got 1.5"),
        (
            '[[device]]\nname = "a"\nquota_period = "10 ms"',
            "device 'a': a quota_period without a quota says nothing",
        ),
        (
            '[[device]]\nname = "a"\nkind = "cuda"\narch = "sm_90"\nquota = 0.5',
            "device 'a': a quota is for cpu devices",
        ),
        (
            '[[device]]\nname = "a"\nspaces = { "my ram" = 1 }',
            "device 'a': a memory space needs a name of letters, digits and _, got 'my ram'",
        ),
        ('[[device]]\nname = "a"\nspaces = 7', "device 'a': spaces must be a table, got 7"),
        (
            '[[device]]\nname = "a"\nefficiency = { products = 0 }',
            "device 'a', efficiency: products must be positive and finite, got 0",
        ),
        ('[[device]]\nname = "a"\nefficiency = { "a b" = 1 }', "device 'a', efficiency: 'a b' is no family of work"),
        (
            '[[device]]\nname = "a"\nkind = "gpu"\narch = "sm_90"\ntarget = "sm_80"',
            "device 'a': arch is 'sm_90', but target is 'sm_80'",
        ),
        ('[[device]]\nname = "a"\n[[device]]\nname = "b"\n[[link]]\na = "a"', "link 0: b is missing"),
        ('links = 3\n[[device]]\nname = "a"', "[links] must be a table of classes of links"),
        (
            '[[device]]\nname = "a"\n[links]\nsame-host = 3',
            "[links]: same-host must be a table with bandwidth and latency, got 3",
        ),
        (
            '[[device]]\nname = "a"\n[[device]]\nname = "b"\n[[link]]\na = "a"\nb = "b"\n[[link]]\na = "b"\nb = "a"',
            "link 1: 'b' and 'a' are linked twice",
        ),
        (
            '[[host]]\nname = "x"\n[[host]]\nname = "y"\n[[device]]\nname = "a"',
            "device 'a': needs a host, as there are several: x, y",
        ),
    ],
)
def test_each_problem_by_itself(tmp_path: Path, text: str, expected: str) -> None:
    found = problems(tmp_path, text)
    assert len(found) == 1
    assert found[0].startswith(expected)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("device:\n- {name: a, name: b}", "the key 'name' stands twice"),
        ("device: [", "cannot read the cluster"),
        ("- 1\n- 2", "the cluster must be tables"),
        ("? [1, 2]\n: 3", "a key must be a word"),
        ("device:\n- !!python/object/apply:os.getcwd []", "cannot read the cluster"),
    ],
)
def test_yaml_is_plain_data(tmp_path: Path, text: str, expected: str) -> None:
    with pytest.raises(UsageError, match=expected.replace("[", r"\[")):
        load(tmp_path, text, "cluster.yaml")


def test_one_host_needs_no_naming(tmp_path: Path) -> None:
    cluster = load(tmp_path, '[[host]]\nname = "only"\n[[device]]\nname = "a"\n')
    assert cluster.device("a").host == "only"


def test_local_devices_share_the_machine() -> None:
    even, uneven = Cluster.local(2), Cluster.local(threads=(3, 1))
    assert [d.name for d in uneven.devices] == ["cpu:0", "cpu:1"]
    assert [(d.threads, d.flops) for d in uneven.devices] == [(3, 1.5e11), (1, 5e10)]
    first, second = (d.memory for d in uneven.devices)
    assert first is not None
    assert second is not None
    assert first > second
    assert sum(d.memory or 0 for d in even.devices) <= (first + second) * 1.5
    assert Cluster.local() == Cluster.local(1)
    for count, threads in ((0, ()), (2, (1,)), (1, (0,)), (2.5, ()), ("3", ()), (True, ()), (1, (1.5,))):
        with pytest.raises(UsageError):
            Cluster.local(count, threads)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="from the path of a file, got 3"):
        Cluster.load(3)  # type: ignore[arg-type]


def test_this_machine_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    from penstock.ir.cluster import cluster as data
    from penstock.support.hardware import Gpu, usable_cores

    monkeypatch.setattr(data, "gpus", lambda: ([], "none"))
    (cpu,) = Cluster.detect().devices
    assert (cpu.kind, cpu.threads) == ("cpu", usable_cores())
    monkeypatch.setattr(data, "gpus", lambda: ([Gpu(0, "sm_90", 80 << 30, 3e12)], ""))
    assert [(d.name, d.target, d.memory, d.bandwidth) for d in Cluster.detect().devices[1:]] == [
        ("cuda:0", "sm_90", 80 << 30, 3e12)
    ]


def test_what_cannot_be_is_told_at_once(tmp_path: Path) -> None:
    bad = {
        "flops": "1e300", "bandwidth": "1e-300", "threads": "65537", "memory": f"{2**60 + 1}", "overhead": "1e7", "socket_bandwidth": '"1e30 GB/s"',
    }  # fmt: skip
    text = '[[device]]\nname = "a"\n' + "\n".join(f"{key} = {value}" for key, value in bad.items())
    found = problems(tmp_path, text)
    assert [line.split(": ")[1].split()[0] for line in found] == list(bad)
    assert "device 'a': flops must be from 1 to 1e+24, got 1e+300" in found
    assert "device 'a': threads must be from 1 to 65536, got 65537" in found
    good = {
        "flops": "1e24",
        "bandwidth": "1",
        "threads": "65536",
        "memory": f"{2**60}",
        "overhead": "1e6",
        "socket_bandwidth": '"1 B/s"',
    }
    load(tmp_path, '[[device]]\nname = "a"\n' + "\n".join(f"{key} = {value}" for key, value in good.items()))


def test_rates_that_are_no_numbers_never_get_through(tmp_path: Path) -> None:
    for key in ("flops", "bandwidth", "cache_bandwidth", "overhead"):
        for bad in ("nan", "inf", "-inf", "-1", '"1e999"', '"1e999999999"', '"-2 s"'):
            assert len(problems(tmp_path, f'[[device]]\nname = "a"\n{key} = {bad}')) == 1
    assert math.isfinite(load(tmp_path, '[[device]]\nname = "a"\noverhead = 0').devices[0].overhead)


def test_quotas_of_a_host_are_those_of_its_processors_within_one(tmp_path: Path) -> None:
    """A GPU has none, and a device that has whole cores no period."""
    file = tmp_path / "cluster.toml"
    file.write_text(
        """
        [[host]]
        name = "here"
        [host.device]
        quota = 0.5
        quota_period = "100 ms"
        [[device]]
        name = "a"
        [[device]]
        name = "b"
        quota = 1
        [[device]]
        name = "c"
        kind = "cuda"
        arch = "sm_90"
        """
    )
    quotas = [(device.quota, device.quota_period) for device in read_cluster(file).devices]
    assert quotas == [(0.5, 0.1), (1.0, 0.0), (1.0, 0.0)]


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"quota": 0.0}, "above 0 and at most 1"),
        ({"quota": 0.5, "quota_period": -1.0}, "0 seconds or more"),
        ({"quota_period": 1.0}, "without a quota"),
        ({"kind": "cuda", "quota": 0.5}, "for cpu devices"),
    ],
)
def test_texts_of_modules_refuse_the_same_quotas(fields: dict[str, object], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        Device.from_fields("a", fields, ())
