"""What a program sees when even the host has no room: torch's own error, with figures.

Runs on the simulated device, on any machine.

    python examples/out_of_memory.py
"""

import torch

import torchpager

with (
    torchpager.simulate("64 MiB"),
    torchpager.budget("32 MiB", host="64 MiB"),
    torchpager.auto_offload(),
):
    kept = []
    try:
        while True:
            kept.append(torch.ones(2 << 20))  # 8 MiB each
    except torch.OutOfMemoryError as error:
        print(f"{len(kept)} tensors of 8 MiB, then:\n{error}")
    figures = torchpager.last_oom()
    assert figures is not None
    print(f"requested {figures.requested_bytes}, in HOST {figures.host_bytes}")
    # The program goes on: every tensor is intact, and a freed one makes room.
    assert all(tensor.sum().item() == float(2 << 20) for tensor in kept)
    kept.pop()
    kept.append(torch.ones(2 << 20))
    print("and on it goes")
