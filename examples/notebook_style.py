"""A model that exists before the contexts, as in a notebook.

The contexts are started and stopped by hand. Runs on the first GPU if there is one, else on the
simulated device.

    python examples/notebook_style.py
"""

import torch
from torch import nn

import torchpager

on_gpu = torch.cuda.is_available()
device = "cuda" if on_gpu else "cpu"

# Cell 1: a model, made by whoever made it.
model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(12))).to(device)
optimizer = torch.optim.AdamW(model.parameters(), foreach=False)

# Cell 2: put it under a budget of half of what training it takes.
simulation = None if on_gpu else torchpager.simulate("1 GiB", granularity="64 KiB").start()
paging = torchpager.auto_offload().start()
moved = torchpager.adopt(model, optimizer)
limit = torchpager.budget("128 MiB").start()
print(f"adopted {moved >> 20} MiB")
print(torchpager.status())

# Cell 3: train.
inputs = torch.randn(256, 1024, device=device)
for step in range(5):
    loss = model(inputs).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}: loss {loss.item():.6f}")
print(torchpager.stats())

# Cell 4: out again; the model stays usable.
limit.stop()
paging.stop()
if simulation is not None:
    simulation.stop()
print(f"afterwards: {model(inputs[:1]).abs().sum().item():.6f}")
