"""Scenario 6: the whole model runs on a side stream.

Source: an offloader that had remembered the default stream raced with a model that ran on
another one (https://github.com/huggingface/trl/pull/7195).

Setup: train inside ``torch.cuda.stream(s)`` at 40% of the peak.
Right: the plain run's bits; nothing is reused before its event.

That a freed block's frames serve no other stream before their events is shown for the simulated
device's streams in tests/c/test_core.c (switch ``TP_RULE_SAME_STREAM``).
"""

import pytest
import torch
from places import Place
from workloads import Job, Transformer


def test_training_on_a_side_stream_at_40_percent_has_plain_bits(place: Place) -> None:
    if place.simulated:
        pytest.skip("CPU tensors have no streams; tests/c runs the streams of this device")
    job = Job(place, lambda: Transformer(512, 6), 10, batch=(4, 256))
    budget = job.peak() * 4 // 10
    plain = job.run()
    side = torch.cuda.Stream()
    with place.paging(budget) as paging:
        with torch.cuda.stream(side):
            paged = job.run()
        paging.assert_paged(evictions=10, fills=10)
    assert paged == plain
