"""Scenario 19: a tensor is deleted while its bytes are on the host.

Source: a library that moves tensors out by virtual memory released a handle twice when a tensor
was freed meanwhile (https://github.com/fzyzcjy/torch_memory_saver/issues/92).

Setup: evict A and B, delete A, empty_cache(), use B.
Right: no driver error, A's bytes are back, B is bit-identical.
"""

import gc
import time

import torch
from places import Place

from torchpager import _core, testing


def two_on_the_host(place: Place, size: int) -> tuple[torch.Tensor, torch.Tensor, str]:
    """Return two tensors that are in HOST, and the digest of the second."""
    generator = torch.Generator().manual_seed(19)
    values = torch.randint(256, (2, size), dtype=torch.uint8, generator=generator)
    first, second = (row.to(place.device).clone() for row in values)
    expected = place.digest([second])
    testing.evict(first)
    testing.evict(second)
    assert testing.state(first).where == testing.state(second).where == "host"
    return first, second, expected


def test_freed_tensors_host_bytes_serve_again_and_the_other_is_whole(place: Place) -> None:
    size = 6 * place.granule
    with place.paging(4 * size) as paging:
        first, second, expected = two_on_the_host(place, size)
        both = paging.stats()
        del first
        gc.collect()
        place.empty_cache()
        assert both.host.current - paging.stats().host.current == size
        time.sleep(0.1)  # the old mapping goes away on the pager's own thread
        third = torch.full((size,), 3, dtype=torch.uint8, device=place.device)
        testing.evict(third)
        assert paging.stats().host_bytes.current == both.host_bytes.current
        assert place.digest([second]) == expected
        assert place.digest([second + 0]) == expected
        assert third.min().item() == third.max().item() == 3
        _core.check(place.slot)
        paging.assert_paged(evictions=3, fills=2)
        del second, third


def test_empty_cache_gives_a_freed_tensors_host_bytes_back(place: Place) -> None:
    size = 6 * place.granule
    with place.paging(4 * size) as paging:
        first, second, expected = two_on_the_host(place, size)
        both = paging.stats().host_bytes.current
        del first
        gc.collect()
        place.empty_cache()
        left = paging.stats().host_bytes.current
        assert place.digest([second]) == expected
        del second
        assert both - left >= size
