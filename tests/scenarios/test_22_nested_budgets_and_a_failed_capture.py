"""Scenario 22: two budgets and a graph capture, left by an exception.

Source: an error inside a CUDA graph capture left the allocator in the state of a capture, and
its memory reserved for good (https://github.com/pytorch/pytorch/pull/190308,
https://github.com/pytorch/pytorch/pull/180395).

Setup: a budget inside a budget, inside it a capture, and an exception in the capture.
Right: the outer budget is in force again, nothing has leaked, paging goes on.

On the simulated device, which has no graphs for CPU tensors, the exception comes from a step.
"""

import gc
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from places import Place

import torchpager
from torchpager import _core


class BodyError(Exception):
    """What the body raises."""


def capture(place: Place) -> AbstractContextManager[object]:
    """Return a capture, where there is one."""
    return nullcontext() if place.simulated else torch.cuda.graph(torch.cuda.CUDAGraph())


def fail_inside(place: Place, inner_bytes: int, weights: list[torch.Tensor]) -> None:
    """Enter the inner budget, page, and raise in a capture."""
    with torchpager.budget(inner_bytes):
        for weight in weights:
            weight.mul_(2.0)
        place.synchronize()
        with capture(place):
            result = weights[0] + weights[1]
            assert result.shape == weights[0].shape
            raise BodyError


def test_outer_budget_is_restored_when_a_capture_fails(place: Place) -> None:
    size = 16 * place.granule
    count = 8
    with place.paging(6 * size) as paging:
        weights = [
            torch.full((size // 4,), float(i), device=place.device) for i in range(count)
        ]
        place.empty_cache()
        outer = _core.get_budget(place.slot)
        assert outer[0] == paging.budget_bytes
        blocks = len(_core.blocks(place.slot))
        for turn in range(3):
            with pytest.raises(BodyError):
                fail_inside(place, paging.budget_bytes - 2 * size, weights)
            gc.collect()
            place.empty_cache()
            assert _core.get_budget(place.slot) == outer
            assert len(torchpager._control.active_contexts()) == place.pick(sim=3, cuda=2)
            assert len(_core.blocks(place.slot)) == blocks
            if not place.simulated:
                assert not torch.cuda.is_current_stream_capturing()
            for index, weight in enumerate(weights):
                expected = float(index) * 2.0 ** (turn + 1)
                assert weight.min().item() == weight.max().item() == expected
        _core.check(place.slot)
        paging.assert_paged(evictions=3, fills=3)
        del weights, weight
