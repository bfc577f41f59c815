"""Scenario 5: mappings change in one thread while another copies on three streams.

Source: virtual memory calls beside queued work ended in hangs in one driver
(https://github.com/ROCm/rocm-systems/pull/6982) and in an illegal access where the wrong stream
was waited for (https://github.com/pytorch/pytorch/issues/196258).

Setup: one thread evicts and brings back, another copies on three streams, 10,000 rounds.
Right: no error such as "not ready", no hang, no wrong value.
"""

import threading
from contextlib import nullcontext

import torch
from places import Place

from torchpager import _core
from torchpager import testing as paged_testing

ROUNDS = 10_000
LANES = 3


class Mapper(threading.Thread):
    """Evicts the tensors one after the other, and brings back every second one, until told."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        super().__init__(name="mapper")
        self._addresses = [torch._C.TensorBase.data_ptr(tensor) for tensor in tensors]
        self.stop = threading.Event()
        self.evicted = 0
        self.errors: list[BaseException] = []

    def run(self) -> None:
        turn = 0
        while not self.stop.is_set():
            address = self._addresses[turn % len(self._addresses)]
            turn += 1
            try:
                _core.evict(address)
                self.evicted += 1
                if turn % 2:
                    _core.touch(address)
            except _core.CoreError as error:
                if error.status != "BUSY":  # in use at this moment: that is no failure
                    self.errors.append(error)
            except BaseException as error:
                self.errors.append(error)


def copy_rounds(
    place: Place, lanes: list[list[torch.Tensor]], wrong: list[torch.Tensor]
) -> None:
    """Fill, copy and compare on one lane after the other; a lane is a stream on a GPU."""
    streams = [None if place.simulated else torch.cuda.Stream() for _ in lanes]
    place.synchronize()
    for turn in range(ROUNDS):
        lane = turn % LANES
        source, target = lanes[lane]
        with nullcontext() if place.simulated else torch.cuda.stream(streams[lane]):
            source.fill_(turn)
            target.copy_(source, non_blocking=True)
            wrong[lane].add_((target != turn).any())
    place.synchronize()


def test_ten_thousand_rounds_of_copies_beside_mapping_are_right(place: Place) -> None:
    count = place.granule // 4
    with place.paging(16 * LANES * place.granule) as paging:
        lanes = [
            [torch.zeros(count, device=place.device) for _ in range(2)] for _ in range(LANES)
        ]
        wrong = [torch.zeros((), dtype=torch.int64, device=place.device) for _ in range(LANES)]
        tensors = [tensor for lane in lanes for tensor in lane]
        for tensor in tensors:
            assert paged_testing.state(tensor).where == "resident"
            paged_testing.evict(tensor)
        mapper = Mapper(tensors)
        mapper.start()
        try:
            copy_rounds(place, lanes, wrong)
        finally:
            mapper.stop.set()
            mapper.join(30)
        assert not mapper.is_alive()
        assert mapper.errors == []
        assert [int(count) for count in wrong] == [0] * LANES
        paging.assert_paged(evictions=100, fills=100)
        del lanes, tensors, tensor
