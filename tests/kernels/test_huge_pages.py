"""Memory in huge pages: shared by small tensors, freed with the last one, and moved in place."""

from __future__ import annotations

import gc
import re
import sys
from pathlib import Path

import pytest
import torch
from hf_spec_kernels import huge_pages
from hf_spec_kernels.huge_pages import ALIGNMENT, HUGE_PAGE, MAPPING, empty, move, page_runs
from torch import Tensor

linux = pytest.mark.skipif(sys.platform != "linux", reason="Linux has these pages")


def in_huge_pages(tensor: Tensor) -> int:
    """Return the number of bytes of the tensor's mapping that are in huge pages."""
    inside, kilobytes = False, 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if bounds := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            first, end = (int(bound, 16) for bound in bounds.groups())
            inside = first <= tensor.data_ptr() < end
        elif inside and line.startswith("AnonHugePages:"):
            kilobytes += int(line.split()[1])
    return kilobytes << 10


def skip_without_huge_pages() -> None:
    """Skip the test if huge pages are unavailable or disabled."""
    path = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not path.exists() or "[never]" in path.read_text():
        pytest.skip("the system has no huge pages")


@linux
class TestEmpty:
    def test_small_tensors_share_a_mapping(self) -> None:
        tensors = [empty((n, 3), dtype) for n in (5, 7) for dtype in (torch.int8, torch.float32)]
        for value, tensor in enumerate(tensors):
            tensor.fill_(value)
        assert all((tensor == value).all() for value, tensor in enumerate(tensors))
        addresses = [tensor.data_ptr() for tensor in tensors]
        assert all(address % ALIGNMENT == 0 for address in addresses)
        assert max(addresses) - min(addresses) < MAPPING

    def test_the_last_tensor_frees_the_mapping(self) -> None:
        first, second = empty((10,), torch.int8), empty((10,), torch.int8)
        mapping = huge_pages._newest[-1]
        del first
        gc.collect()
        assert mapping() is not None
        del second
        # Tensors of other tests may share it.
        gc.collect()
        big = empty((MAPPING,), torch.int8)
        assert huge_pages._newest[-1] is mapping, "large tensors have their own"
        assert big.fill_(1).sum(dtype=torch.int64) == MAPPING

    def test_a_tensor_that_does_not_fit_gets_another_mapping(self) -> None:
        size = MAPPING // 2
        tensors = [empty((size,), torch.uint8).fill_(i) for i in range(4)]
        assert [int(tensor.max()) for tensor in tensors] == [0, 1, 2, 3]
        assert [int(tensor.min()) for tensor in tensors] == [0, 1, 2, 3]

    def test_pages_are_huge(self) -> None:
        skip_without_huge_pages()
        assert in_huge_pages(empty((2 * MAPPING,), torch.int8).fill_(1)) >= MAPPING

    def test_without_memory_to_map(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(nbytes: int) -> None:
            raise OSError

        monkeypatch.setattr(huge_pages, "_mapped", fail)
        assert empty((2 * MAPPING,), torch.int8).shape == (2 * MAPPING,)

    def test_no_elements(self) -> None:
        assert empty((0, 4), torch.float32).shape == (0, 4)


def test_other_systems_use_ordinary_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(huge_pages.mmap, "MADV_HUGEPAGE", raising=False)
    monkeypatch.setattr(huge_pages.sys, "platform", "win32")
    huge_pages._collapse.cache_clear()
    tensor = empty((3, 4), torch.bfloat16)
    move([tensor])
    assert (tensor.shape, tensor.dtype) == ((3, 4), torch.bfloat16)
    monkeypatch.undo()
    huge_pages._collapse.cache_clear()


@linux
def test_move_keeps_contents_and_addresses() -> None:
    tensors = [torch.arange(3 << 20, dtype=torch.int32).remainder_(7 + i) for i in range(3)]
    before = [(tensor.data_ptr(), int(tensor.sum())) for tensor in tensors]
    move(tensors)
    assert [(tensor.data_ptr(), int(tensor.sum())) for tensor in tensors] == before


@pytest.mark.parametrize("stuck", [0, 1, 2])
def test_one_page_that_cannot_move_does_not_keep_the_others(
    stuck: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensor = torch.ones(4 * HUGE_PAGE, dtype=torch.int8)
    ((first, end),) = page_runs([(tensor.data_ptr(), tensor.nbytes)])
    pages, moved, calls = range(first, end, HUGE_PAGE), set(), []

    def collapse(address: int, nbytes: int) -> int:
        """Stop at the page that is stuck, like Linux where it finds no memory."""
        calls.append(address)
        for page in range(address, address + nbytes, HUGE_PAGE):
            if page == pages[stuck]:
                return -1
            moved.add(page)
        return 0

    monkeypatch.setattr(huge_pages, "_collapse", lambda: collapse)
    move([tensor])
    assert moved == set(pages) - {pages[stuck]}
    # A page at an end, which often belongs to something else, too, costs no further calls.
    assert stuck > 0 or len(calls) == 3


@linux
def test_moved_pages_are_huge() -> None:
    skip_without_huge_pages()
    tensor = torch.ones(64 << 20, dtype=torch.int8)
    if in_huge_pages(tensor):
        pytest.skip("the system gives huge pages to everyone")
    if huge_pages._collapse()(tensor.data_ptr() // HUGE_PAGE * HUGE_PAGE + HUGE_PAGE, HUGE_PAGE):  # type: ignore[misc]
        pytest.skip("Linux cannot move memory")
    move([tensor])
    assert in_huge_pages(tensor) >= 60 << 20


def test_runs_of_pages() -> None:
    page = HUGE_PAGE
    # Two weights in neighboring pages, one inside a page, one that ends at a page boundary.
    ranges = [(5 * page, page), (page // 2, page), (2 * page + 9, 10), (8 * page + 1, 2 * page - 1)]
    assert page_runs(ranges) == [(0, 3 * page), (5 * page, 6 * page), (8 * page, 10 * page)]
    assert page_runs([(0, 4 * page), (page, 10)]) == [(0, 4 * page)]
