"""Homes of items in files, and what comes and goes on the device."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import gc
import mmap
import os
import re
import threading
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from penstock.ir.cluster.cluster import Cluster
from penstock.ir.cluster.spaces import Space
from penstock.ir.graph import STATE, Module, Slot, Var
from penstock.ir.memory.items import ALIGNMENT, Image, images_of
from penstock.ir.types import TensorType
from penstock.runtime.state import pinned
from penstock.runtime.state.home_files import LARGE_PAGE, FileHome, memory_for
from penstock.runtime.state.home_folders import home_warnings, in_memory
from penstock.runtime.state.homes import HomedItem
from penstock.runtime.state.lanes import ThreadLanes
from penstock.runtime.state.pinned import HostHome
from penstock.runtime.state.store import Store
from penstock.support.errors import DoesNotFit, PenstockError, VerifyError

SIZES = {"a": ("f32", (3, 5)), "b": ("bf16", (700_001,)), "c": ("f32", ()), "d": ("i64", (0,))}
VARS = {n: Var(n, TensorType(t, dims), STATE, 0, home="disk") for n, (t, dims) in SIZES.items()}


def image() -> Image:
    (laid_out,) = images_of(VARS).values()
    return laid_out


def item(path, lanes: ThreadLanes | None = None) -> HomedItem:
    return homed_in(path, image(), lanes or ThreadLanes())


def homed_in(path, laid_out: Image, lanes: ThreadLanes) -> HomedItem:
    return HomedItem(laid_out, lanes.open(Space("disk", path=str(path)), laid_out.nbytes), lanes)


def drawn() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {
        name: torch.randn(dims, generator=generator).to(getattr(torch, {"f32": "float32", "bf16": "bfloat16"}[t]))
        for name, (t, dims) in SIZES.items()
        if t != "i64"
    }


def test_an_image_has_each_variable_at_an_aligned_place() -> None:
    laid_out = image()
    assert laid_out.places == {"a": 0, "b": ALIGNMENT, "c": ALIGNMENT + 1_400_064, "d": 2 * ALIGNMENT + 1_400_064}
    assert laid_out.nbytes == 2 * ALIGNMENT + 1_400_064
    assert images_of({"w": Var("w", TensorType("f32", (2,)), STATE, 0)}) == {}


def test_what_goes_home_comes_back_bit_for_bit(tmp_path) -> None:
    lanes = ThreadLanes()
    homed, expected = item(tmp_path, lanes), drawn()
    with homed.filling():
        for name, tensor in expected.items():
            homed.tensor(name).copy_(tensor)
            assert homed.tensor(name).data_ptr() % ALIGNMENT == 0
    assert not list(tmp_path.iterdir())  # a file without a name, which nobody has to clear away
    lanes.trace()
    for _ in range(2):
        homed.bring("0CI0:o")
        homed.wait()
        assert all(torch.equal(homed.tensor(name), tensor) for name, tensor in expected.items())
        for name, tensor in expected.items():
            expected[name] = tensor * 2
            homed.tensor(name).mul_(2)
        homed.store("0CO0:o")
        homed.let_go()
        assert all(torch.equal(homed.newest(name), tensor) for name, tensor in expected.items())
    done = lanes.copied()
    assert [(copy.text, copy.nbytes) for copy in done] == 2 * [(t, image().nbytes) for t in ("0CI0:o", "0CO0:o")]
    assert all(copy.begun <= copy.ended for copy in done)
    assert not lanes.copied()


def test_a_copy_apart_is_what_was_at_home_then(tmp_path) -> None:
    homed = item(tmp_path)
    with homed.filling():
        homed.tensor("a").fill_(1)
    apart, seen = homed.apart(), homed.newest("a")
    homed.bring()
    homed.wait()
    homed.tensor("a").fill_(2)
    homed.store()
    homed.let_go()
    assert apart["a"].unique().tolist() == [1]
    assert seen.unique().tolist() == [2]  # the control: the home itself has changed


class LateHome(FileHome):
    """A home in a file that writes when it may."""

    def __init__(self, space: Space, nbytes: int) -> None:
        super().__init__(space, nbytes)
        self.may, self.failure = threading.Event(), ""

    def write(self, memory: torch.Tensor, moved: Callable[[int], None] = lambda nbytes: None) -> None:
        assert self.may.wait(20)
        if self.failure:
            raise PenstockError(self.failure)
        super().write(memory, moved)


def changed_on_the_device(folder: Path) -> tuple[LateHome, HomedItem]:
    """Return a home that has ones, and its item, which has twos on the device."""
    home = LateHome(Space("disk", path=str(folder)), image().nbytes)
    home.may.set()
    homed = HomedItem(image(), home, ThreadLanes())
    with homed.filling():
        homed.tensor("a").fill_(1)
    homed.bring()
    homed.wait()
    homed.tensor("a").fill_(2)
    return home, homed


def test_a_copy_apart_waits_for_what_is_on_its_way_home(tmp_path) -> None:
    home, homed = changed_on_the_device(tmp_path)
    home.may.clear()
    homed.store()
    # The control: at home it is still the old one.
    assert homed._cut(home.copied())["a"].unique().tolist() == [1]
    threading.Timer(0.05, home.may.set).start()
    assert homed.apart()["a"].unique().tolist() == [2]
    homed.let_go()
    # A copy that fails is told at the end of a run, and not only by an action that no batch follows.
    homed.bring()
    home.failure = "the disk is full"
    homed.store()
    with pytest.raises(PenstockError, match="the disk is full"):
        homed.settle()


def test_a_copy_that_failed_is_an_error_of_all_that_follows(tmp_path) -> None:
    """What is at home is torn then, and nothing reads it as if it were whole."""
    home, homed = changed_on_the_device(tmp_path)
    home.failure = "the disk is full"
    homed.store()
    for again in (homed.settle, homed.let_go, homed.let_go, homed.settle, homed.apart, homed.store):
        with pytest.raises(PenstockError, match="the disk is full"):
            again()
    assert homed.newest("a").unique().tolist() == [2]  # what the device has is whole


def test_a_copy_in_that_failed_is_an_error_of_all_that_follows() -> None:
    home = SlowHome("the disk is gone")
    home.may.set()
    homed = HomedItem(image(), home, ThreadLanes())
    homed.bring()
    for again in (homed.wait, homed.wait, homed.store, homed.let_go, lambda: homed.newest("a")):
        with pytest.raises(PenstockError, match="the disk is gone"):
            again()


def mapped_bytes() -> int:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmData"))


def test_memory_is_given_back(tmp_path) -> None:
    var = Var("m", TensorType("f32", (16 << 20,)), STATE, 0, home="disk")
    (laid_out,) = images_of({"m": var}).values()
    homed = homed_in(tmp_path, laid_out, ThreadLanes())
    with homed.filling():
        pass
    before = mapped_bytes()
    homed.bring()
    homed.wait()
    assert mapped_bytes() - before >= laid_out.nbytes
    homed.store()
    homed.let_go()
    assert mapped_bytes() - before < laid_out.nbytes // 2


def test_a_copy_says_what_it_moved(tmp_path, monkeypatch) -> None:
    """The control: a copy that leaves a piece out moved less."""
    laid_out = replace(image(), nbytes=9 << 20)
    for left_out, expected in ((None, [9 << 20, 9 << 20]), (1, [5 << 20, 5 << 20])):
        lanes, whole = ThreadLanes(), FileHome._pieces
        lanes.trace()
        monkeypatch.setattr(
            FileHome,
            "_pieces",
            lambda self, left_out=left_out, whole=whole: [p for i, p in enumerate(whole(self)) if i != left_out],
        )
        homed = homed_in(tmp_path, laid_out, lanes)
        homed.bring("0CI0:o")
        homed.store("0CO0:o")
        homed.let_go()
        monkeypatch.undo()
        assert [copy.nbytes for copy in lanes.copied()] == expected


def test_what_is_away_is_not_read_by_mistake(tmp_path) -> None:
    store = Store(VARS, (), homed=lambda laid_out: item(tmp_path))
    with pytest.raises(VerifyError, match=r"@a: is asked for on the device, and is at home in disk"):
        store.buffers("s0.U", [Slot("a", "latest")], None, 0)
    store.bring("o", "0CI0:o")
    store.await_items(["o"])
    (held,) = store.buffers("s0.U", [Slot("a", "latest")], None, 0)
    assert held.shape == (3, 5)
    with pytest.raises(VerifyError, match="is on the device already"):
        store.bring("o", "0CI1:o")
    store.store("o", "0CO0:o")
    store.let_item_go("o")
    with pytest.raises(VerifyError, match="not on the device"):
        store.store("o", "0CO0:o")
    with pytest.raises(VerifyError, match="no item o has a home"):
        Store({}, ()).bring("o", "0CI0:o")


class SlowHome:
    """A home that reads when it may."""

    def __init__(self, failure: str = "") -> None:
        self.may, self.failure = threading.Event(), failure

    def read(self, memory: torch.Tensor, moved: Callable[[int], None] = lambda nbytes: None) -> None:
        assert self.may.wait(20)
        if self.failure:
            raise PenstockError(self.failure)
        memory[0] = 7

    def write(self, memory: torch.Tensor, moved: Callable[[int], None] = lambda nbytes: None) -> None: ...

    def write_parts(self, parts, pieces, moved: Callable[[int], None] = lambda nbytes: None) -> None: ...

    def contents(self) -> torch.Tensor:
        raise NotImplementedError

    def copied(self) -> torch.Tensor:
        raise NotImplementedError


def test_the_program_goes_on_until_it_needs_the_item() -> None:
    home = SlowHome()
    homed = HomedItem(image(), home, ThreadLanes())
    homed.bring()
    assert homed.is_here
    threading.Timer(0.05, home.may.set).start()
    homed.wait()
    assert homed.tensor("a").view(torch.uint8)[0, 0] == 7


def test_an_error_of_a_thread_is_raised_where_it_is_waited_for() -> None:
    home = SlowHome("the disk is gone")
    home.may.set()
    homed = HomedItem(image(), home, ThreadLanes())
    homed.bring()
    with pytest.raises(PenstockError, match="the disk is gone"):
        homed.wait()


def test_a_copy_that_does_not_move_on_is_given_up() -> None:
    """The control: one that gets on, slowly, is waited for longer than that."""
    home = SlowHome()
    homed = HomedItem(image(), home, ThreadLanes(timeout=0.05))
    homed.bring("0CI0:o")
    with pytest.raises(PenstockError, match=r"0CI0:o: copying .* from memory space disk has not moved on for 0.05 s"):
        homed.wait()
    home.may.set()

    class Slowly(SlowHome):
        def read(self, memory: torch.Tensor, moved: Callable[[int], None] = lambda nbytes: None) -> None:
            for _ in range(10):
                self.may.wait(0.02)
                moved(1)

    homed = HomedItem(image(), Slowly(), ThreadLanes(timeout=0.1))
    homed.bring()
    homed.wait()


def test_what_is_written_stands_in_no_cache(tmp_path) -> None:
    """Pages of the file that the system holds, by what it says of a mapping. The control: a read through the cache."""
    if in_memory(str(tmp_path)):
        pytest.skip("files of this folder lie in memory")
    home, memory = FileHome(Space("disk", path=str(tmp_path)), 8 << 20), memory_for(8 << 20)
    memory[0] = 7
    home.write(memory)
    home.read(memory)
    contents = home.contents()
    assert cached_pages(contents) == 0
    assert contents[0] == 7
    assert cached_pages(contents) > 0


def advised(memory: torch.Tensor) -> list[tuple[int, int]]:
    """The parts of memory for which the system was asked for large pages, as it says itself."""
    begin = memory.data_ptr()
    parts, start, end = list[tuple[int, int]](), 0, 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if span := re.match("([0-9a-f]+)-([0-9a-f]+) ", line):
            start, end = (int(edge, 16) for edge in span.groups())
        elif line.startswith("VmFlags:") and "hg" in line.split() and begin <= start < begin + len(memory):
            parts.append((start, end))
    return parts


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="the system has no large pages")
@pytest.mark.parametrize("nbytes", [1 << 20, 5 << 20, (9 << 20) + 12345])
def test_large_pages_are_wholly_inside_of_memory(nbytes: int) -> None:
    """Others would hold memory of neighbours that went. The control: advice for all of it, as memory comes, has edges elsewhere."""
    blocks = [memory_for(nbytes) for _ in range(4)]
    edges = [edge % LARGE_PAGE for block in blocks for part in advised(block) for edge in part]
    assert not any(edges)
    assert bool(edges) == (nbytes >= 2 * LARGE_PAGE)
    plain = mmap.mmap(-1, 2 * LARGE_PAGE + 4096 * 3)
    plain.madvise(mmap.MADV_HUGEPAGE)
    assert any(edge % LARGE_PAGE for part in advised(torch.frombuffer(plain, dtype=torch.uint8)) for edge in part)


def refused(file: int) -> None:
    """Refuse to read and write without the cache, as some file systems do although they take the flag."""
    if fcntl.fcntl(file, fcntl.F_GETFL) & os.O_DIRECT:
        raise OSError(errno.EINVAL, "Invalid argument")


def test_a_file_system_that_refuses_direct_pieces_goes_by_the_cache(tmp_path, monkeypatch) -> None:
    """The control: any other error of the first block is one of the home."""
    read, write = os.preadv, os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda file, *how: refused(file) or write(file, *how))
    monkeypatch.setattr(os, "preadv", lambda file, *how: refused(file) or read(file, *how))
    home, memory, back = FileHome(Space("disk", path=str(tmp_path)), 8192), memory_for(8192), memory_for(8192)
    memory[5000:5003] = 7
    home.write(memory)
    home.read(back)
    assert torch.equal(back, memory)
    assert back.count_nonzero() == 3

    def fails(*how: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "pwrite", fails)
    with pytest.raises(PenstockError, match=r"cannot make room in memory space disk.*Input/output error"):
        FileHome(Space("disk", path=str(tmp_path)), 8192)


def test_a_file_that_takes_no_more_is_an_error(tmp_path, monkeypatch) -> None:
    home, asked = FileHome(Space("disk", path=str(tmp_path)), 8192), []

    def nothing(*how: object) -> int:
        assert len(asked) < 3, "asked without end"
        asked.append(how)
        return 0

    monkeypatch.setattr(os, "pwrite", nothing)
    with pytest.raises(PenstockError, match=r"cannot write to memory space disk.*the file takes 0 bytes and no more"):
        home.write(memory_for(8192))


def test_a_file_is_closed_with_its_home_and_not_before_threads_end(tmp_path, monkeypatch) -> None:
    made, finalize = [], weakref.finalize
    monkeypatch.setattr(weakref, "finalize", lambda *how: made.append(finalize(*how)) or made[-1])
    home = FileHome(Space("disk", path=str(tmp_path)), 4096)
    file = home._file
    (closing,) = [one for one in made if one.alive and one.peek()[0] is home]
    assert not closing.atexit
    os.fstat(file)
    del home
    gc.collect()
    assert not closing.alive
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(file)


def cached_pages(memory: torch.Tensor) -> int:
    pages = len(memory) // mmap.PAGESIZE
    found = (ctypes.c_ubyte * pages)()
    address = memory.data_ptr()
    library = ctypes.CDLL(None, use_errno=True)
    assert library.mincore(ctypes.c_void_p(address), ctypes.c_size_t(len(memory)), found) == 0
    return sum(page & 1 for page in found)


def test_folders_in_memory_are_known(tmp_path) -> None:
    assert in_memory("/dev/shm") == "tmpfs"
    assert not in_memory("/proc")
    assert not in_memory(str(tmp_path / "missing"))


def test_a_folder_that_has_no_room_says_so_at_once(tmp_path) -> None:
    with pytest.raises(PenstockError, match=r"missing: cannot make room in memory space disk, 4.0 KiB: No such file"):
        FileHome(Space("disk", path=str(tmp_path / "missing")), 4096)
    with pytest.raises(PenstockError, match="cannot make room in memory space disk"):
        FileHome(Space("disk", path=str(tmp_path)), 1 << 59)
    small = FileHome(Space("disk", path=str(tmp_path)), 4096)
    os.ftruncate(small._file, 100)
    with pytest.raises(PenstockError, match=r"cannot read from memory space disk.*the file ends at 100 bytes"):
        small.read(memory_for(4096))


def test_a_home_in_memory_is_warned_of(tmp_path) -> None:
    module = Module("m", vars=VARS, cluster=replace(Cluster.local(1), spaces=(Space("disk", path="/dev/shm"),)))
    (warning,) = home_warnings(module)
    assert "disk is in /dev/shm, a tmpfs" in warning
    assert not [*home_warnings(module.but(vars={}))]


def test_threads_that_copy_end_with_their_rank(tmp_path) -> None:
    before, lanes = set(threading.enumerate()), ThreadLanes()
    homed = item(tmp_path, lanes)
    with homed.filling():
        pass
    homed.bring()
    homed.wait()
    threads = set(threading.enumerate()) - before
    assert {thread.name for thread in threads} == {"copies in", "copies out"}
    del homed, lanes
    gc.collect()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()


def test_a_home_in_memory_of_the_host_needs_what_is_free(monkeypatch) -> None:
    """It is refused before anything is taken or pinned. The control: with as much free it goes on to CUDA."""
    space, device, asked = Space.from_fields("dram", {"kind": "ram"}), torch.device("cuda", 0), []
    monkeypatch.setattr(pinned, "pin", lambda *given: asked.append(given))
    monkeypatch.setattr(pinned, "unpin", lambda *given: None)
    monkeypatch.setattr(pinned, "free_memory", lambda: 8191)
    with pytest.raises(DoesNotFit, match=r"no 8.0 KiB of memory space dram, of this host 8.0 KiB are free"):
        HostHome(space, 8192, device)
    assert not asked
    monkeypatch.setattr(pinned, "free_memory", lambda: 8192)
    assert HostHome(space, 8192, device).contents().numel() == 8192
    assert len(asked) == 1
