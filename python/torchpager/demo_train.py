"""The demo's training program: a character-level GPT on the text of the standard library.

Plain PyTorch: nothing here imports torchpager. It runs by path, as any training script does,
and is then the reference. The paged runs call the same ``train`` inside torchpager's contexts,
so what is compared is one program with itself.

Started as a script it takes the names of two JSON files, the configuration to read and the
result to write, and reports progress on standard output, one JSON object a line.
"""

import sys

if __name__ == "__main__":
    # Run by path, the first entry of sys.path is this folder, whose modules belong to a
    # package.
    sys.path.pop(0)

import gc
import hashlib
import json
import os
import sysconfig
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn import functional

OTHER_CHARACTER = "\ufffd"
# So much is hashed at once, by one thread.
_HASHED_BYTES = 8 << 20


@dataclass(frozen=True)
class Config:
    """What is trained and how. Everything that decides the bits is in here.

    Parameters
    ----------
    device
        ``"cpu"`` or ``"cuda"``.
    layers, width, heads, context, batch
        The model, and the shape of a batch: ``batch`` sequences of ``context`` characters.
    vocabulary
        Rows of the embedding and of the head; raised to what the text needs.
    steps
        Optimizer steps.
    autocast
        Forward in bfloat16.
    threads
        Threads of one operator on the CPU. A sum depends on how it is split among them.
    text_bytes
        How much text is read.
    chunk_bytes
        Piece in which tensors are copied out to be hashed; on the simulated device below
        ``large_min``, so that the copies are not device memory themselves.
    """

    device: str = "cpu"
    layers: int = 6
    width: int = 256
    heads: int = 8
    context: int = 128
    batch: int = 4
    vocabulary: int = 0
    steps: int = 60
    autocast: bool = False
    threads: int = 2
    seed: int = 1
    learning_rate: float = 6e-4
    text_bytes: int = 4 << 20
    chunk_bytes: int = 32 << 10

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "Config":
        """Build a configuration from a JSON object, ignoring keys meant for others."""
        names = {field.name for field in fields(cls)}
        return cls(**{key: value for key, value in data.items() if key in names})

    def to_json(self) -> dict[str, Any]:
        """Return the configuration as a JSON object."""
        return asdict(self)


class Observer(Protocol):
    """Told of the stages of each step, on the training thread."""

    def forward_begins(self) -> None:
        """Hear that the forward pass begins; no activation and no gradient is alive."""

    def forward_done(self) -> None:
        """Hear that the loss exists, and everything that the backward pass will read."""

    def step_done(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Hear that the optimizer has stepped; the gradients are still alive."""

    def trained(self) -> None:
        """Hear that the last step is done; what follows only reads the results."""


class Silent:
    """An observer that does nothing."""

    def forward_begins(self) -> None:
        """Do nothing."""

    def forward_done(self) -> None:
        """Do nothing."""

    def step_done(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Do nothing."""

    def trained(self) -> None:
        """Do nothing."""


# -- text ----------------------------------------------------------------------------------


def standard_library_files() -> Iterator[Path]:
    """Yield the standard library's modules, in an order that depends on their names only."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3"}
    for path in sorted(root.rglob("*.py"), key=lambda path: path.relative_to(root).as_posix()):
        if not skipped.intersection(path.relative_to(root).parts):
            yield path


def read_text(limit_bytes: int) -> str:
    """Return the first ``limit_bytes`` characters of the standard library's source."""
    parts: list[str] = []
    size = 0
    for path in standard_library_files():
        try:
            part = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        parts.append(part)
        size += len(part)
        if size >= limit_bytes:
            break
    if size == 0:
        raise RuntimeError("no source text of the standard library was found on this machine")
    return "".join(parts)[:limit_bytes]


class Characters:
    """The text as character codes, and random batches of it.

    Characters that occur fewer than 20 times share one code, so that a code fits a byte.
    """

    def __init__(self, text: str, seed: int) -> None:
        counts = Counter(text)
        kept = sorted(char for char, count in counts.items() if count >= 20)[:255]
        code_of = {char: code for code, char in enumerate([*kept, OTHER_CHARACTER])}
        other = code_of[OTHER_CHARACTER]
        self.count = len(code_of)
        self.characters = len(text)
        # Over a buffer of Python's: the text is not part of what the device holds.
        self._buffer = bytearray(code_of.get(char, other) for char in text)
        self._codes = torch.frombuffer(self._buffer, dtype=torch.uint8)
        self._generator = torch.Generator().manual_seed(seed)

    def batch(self, config: Config) -> tuple[torch.Tensor, torch.Tensor]:
        """Return inputs and targets, int64, each of shape (batch, context)."""
        last = self.characters - config.context - 1
        starts = torch.randint(0, last, (config.batch,), generator=self._generator).tolist()
        rows = [self._codes[start : start + config.context + 1] for start in starts]
        both = torch.stack(rows).long().to(config.device)
        return both[:, :-1].contiguous(), both[:, 1:].contiguous()


# -- model ---------------------------------------------------------------------------------


class Block(nn.Module):
    """One layer: causal attention, then a two-layer perceptron, each with a residual."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.mix = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (batch, context, width) to the same shape."""
        batch, context, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, context, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.mix(seen.transpose(1, 2).reshape(batch, context, width))
        hidden: torch.Tensor = self.down(functional.gelu(self.up(self.norm2(x))))
        return x + hidden


class GPT(nn.Module):
    """A decoder-only transformer over a small vocabulary."""

    def __init__(self, config: Config, vocabulary: int) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, config.width)
        self.place = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(
            Block(config.width, config.heads) for _ in range(config.layers)
        )
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, vocabulary)

    def forward(self, codes: torch.Tensor) -> torch.Tensor:
        """Map codes of shape (batch, context) to logits (batch, context, vocabulary)."""
        places = torch.arange(codes.shape[1], device=codes.device)
        x = self.token(codes) + self.place(places)
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


# -- digests -------------------------------------------------------------------------------


def digest(tensors: Iterable[torch.Tensor], chunk_bytes: int) -> str:
    """Return the SHA-256 of those of the tensors' bytes, ``_HASHED_BYTES`` at a time, in order.

    The bytes are copied out by operators, a chunk at a time: reading a tensor's memory directly
    would make it immovable under a pager.
    """
    total = hashlib.sha256()
    staging = torch.empty(chunk_bytes, dtype=torch.uint8)
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        for tensor in tensors:
            raw = tensor.detach().reshape(-1).view(torch.uint8)
            for start in range(0, raw.numel(), chunk_bytes):
                piece = raw[start : start + chunk_bytes]
                copy = staging[: piece.numel()]
                copy.copy_(piece)
                data = copy.numpy().data
                parts = (
                    data[at : at + _HASHED_BYTES] for at in range(0, len(data), _HASHED_BYTES)
                )
                for part in pool.map(hashlib.sha256, parts):
                    total.update(part.digest())
    return total.hexdigest()


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """Yield every tensor of the optimizer's state, in the order of the parameters."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state[parameter]
            for name in sorted(state):
                value = state[name]
                yield value if isinstance(value, torch.Tensor) else torch.tensor(value)


# -- training ------------------------------------------------------------------------------


def emit(event: str, **values: object) -> None:
    """Write one event for the process that watches."""
    print(json.dumps({"event": event, **values}), flush=True)


def synchronize(device: str) -> None:
    """Wait for the device, if there is one to wait for."""
    if device == "cuda":
        torch.cuda.synchronize()


def prepare(config: Config) -> None:
    """Fix everything that could change the bits; load the libraries the model will use."""
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(config.threads)
    if config.device != "cuda":
        return
    small = Config(
        device="cuda", layers=1, width=256, heads=4, context=64, batch=2, steps=1,
        autocast=config.autocast,
    )  # fmt: skip
    codes = torch.zeros(small.batch, small.context, dtype=torch.int64, device="cuda")
    model = GPT(small, 64).to("cuda")
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    one_step(small, model, optimizer, codes, codes, Silent())
    synchronize("cuda")
    del model, optimizer, codes
    gc.collect()
    torch.cuda.empty_cache()


def wait_for_watcher(config: Config) -> None:
    """Say that the device is ready and idle; go on when told to."""
    on_gpu = config.device == "cuda"
    emit(
        "ready",
        reserved_bytes=torch.cuda.memory_reserved() if on_gpu else 0,
        gpu_uuid=str(torch.cuda.get_device_properties().uuid) if on_gpu else None,
    )
    sys.stdin.readline()


def one_step(
    config: Config,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    inputs: torch.Tensor,
    targets: torch.Tensor,
    observer: Observer,
) -> torch.Tensor:
    """Do one optimizer step and return the loss."""
    observer.forward_begins()
    with torch.autocast(config.device, dtype=torch.bfloat16, enabled=config.autocast):
        logits = model(inputs)
        loss = functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
    del logits
    observer.forward_done()
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    return loss.detach()


def train(config: Config, observer: Observer) -> dict[str, Any]:
    """Train from the seed and return losses, digests and times as a JSON object."""
    torch.manual_seed(config.seed)
    text = Characters(read_text(config.text_bytes), config.seed)
    vocabulary = max(text.count, config.vocabulary)
    with torch.device(config.device):
        model = GPT(config, vocabulary)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=config.learning_rate, foreach=False, weight_decay=0.1
    )
    losses: list[float] = []
    step_starts: list[float] = []
    step_seconds: list[float] = []
    for step in range(config.steps):
        inputs, targets = text.batch(config)
        synchronize(config.device)
        start = time.monotonic()
        losses.append(one_step(config, model, optimizer, inputs, targets, observer).item())
        synchronize(config.device)
        step_starts.append(start)
        step_seconds.append(time.monotonic() - start)
        observer.step_done(model, optimizer)
        if step < config.steps - 1:
            optimizer.zero_grad(set_to_none=True)
        emit("progress", step=step + 1, loss=losses[-1])
    observer.trained()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return {
        "torch": torch.__version__,
        "device_name": torch.cuda.get_device_name() if config.device == "cuda" else "cpu",
        "characters": text.characters,
        "vocabulary": vocabulary,
        "parameter_count": sum(p.numel() for p in model.parameters()),
        "losses": [loss.hex() for loss in losses],
        "first_loss": losses[0],
        "last_loss": losses[-1],
        "step_starts": step_starts,
        "step_seconds": step_seconds,
        "digests": {
            "parameters": digest(model.parameters(), config.chunk_bytes),
            "gradients": digest(gradients, config.chunk_bytes),
            "optimizer states": digest(optimizer_tensors(optimizer), config.chunk_bytes),
        },
    }


def main(argv: list[str]) -> int:
    """Run the plain training; ``argv`` is the configuration's path and the result's path."""
    config = Config.from_json(json.loads(Path(argv[0]).read_text()))
    prepare(config)
    wait_for_watcher(config)
    result = train(config, Silent())
    if config.device == "cuda":
        result["peak_bytes"] = torch.cuda.max_memory_allocated()
    result["pager_imported"] = any(
        name.partition(".")[0] == "torchpager" for name in sys.modules
    )
    Path(argv[1]).write_text(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
