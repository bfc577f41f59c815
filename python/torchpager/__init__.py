"""Virtual memory for PyTorch's GPU tensors.

A program gets a hard budget of GPU memory; what does not fit lives in host RAM and moves by
itself; the results are bit for bit the same; the program is not changed.

>>> import torch, torchpager
>>> with torchpager.simulate("64 MiB"), torchpager.budget("16 MiB"), torchpager.auto_offload():
...     x = torch.ones(16, 1 << 20)  # 64 MiB
...     x.sum().item()
16777216.0
"""

from torchpager import _compat

__version__ = "0.1.0"

try:
    _compat.check()
except ImportError:
    # `python -m torchpager doctor` is there to say what is wrong.
    if not _compat.is_command_line():
        raise
else:
    from torchpager import testing
    from torchpager.adopt import adopt
    from torchpager.budget import budget
    from torchpager.errors import UnavailableError
    from torchpager.offload import auto_offload
    from torchpager.pin import pin
    from torchpager.pluggable import pluggable_allocator
    from torchpager.recording import save_trace, step
    from torchpager.roofline import roofline
    from torchpager.simulate import simulate
    from torchpager.stats import last_oom, reset_stats, stats
    from torchpager.status import status
    from torchpager.trace import load_trace

__all__ = [
    "UnavailableError",
    "__version__",
    "adopt",
    "auto_offload",
    "budget",
    "last_oom",
    "load_trace",
    "pin",
    "pluggable_allocator",
    "reset_stats",
    "roofline",
    "save_trace",
    "simulate",
    "stats",
    "status",
    "step",
    "testing",
]
