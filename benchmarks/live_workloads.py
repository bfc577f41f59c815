"""The programs of the live benchmark: plain PyTorch, built from configurations and a seed.

Nothing here imports torchpager. Each program repeats a step; after the last one it names what
its bits are compared by. ``full`` sizes are for a GPU, ``small`` ones for a machine without.
"""

import hashlib
import importlib.util
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.nn import functional

DEMO_TRAIN = Path(__file__).resolve().parents[1] / "python/torchpager/demo_train.py"


def load_demo_train() -> ModuleType:
    """Return the demo's training program, loaded without the package that it is part of."""
    spec = importlib.util.spec_from_file_location("demo_train", DEMO_TRAIN)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["demo_train"] = module
    spec.loader.exec_module(module)
    return module


# -- what a program is ---------------------------------------------------------------------


@dataclass
class Peer:
    """What another tool changes about a training program.

    Attributes
    ----------
    on_model
        Called with the model and its repeated blocks, before the optimizer is made.
    optimizer
        Makes the optimizer instead of the program.
    around
        Makes the context of each forward pass.
    """

    on_model: Callable[[nn.Module, list[nn.Module]], None] = lambda _model, _blocks: None
    optimizer: Callable[..., Any] | None = None
    around: Callable[[], AbstractContextManager[Any]] = nullcontext


class Training:
    """A model, batches made from numbers of steps, a loss, and an optimizer."""

    def __init__(
        self,
        model: nn.Module,
        blocks: list[nn.Module],
        loss_of: Callable[[int], torch.Tensor],
        optimizer_class: type[torch.optim.Optimizer],
        optimizer_options: dict[str, Any],
        peer: Peer,
    ) -> None:
        self._model = model
        self._loss_of = loss_of
        self._around = peer.around
        peer.on_model(model, blocks)
        trained = [each for each in model.parameters() if each.requires_grad]
        make = peer.optimizer or optimizer_class
        self._optimizer = make(trained, **optimizer_options)

    def step(self, number: int) -> str:
        """Train once and return the loss, exactly."""
        self._optimizer.zero_grad(set_to_none=True)
        with self._around():
            loss = self._loss_of(number)
        loss.backward()
        self._optimizer.step()
        return float(loss.detach().item()).hex()

    def compared(self) -> dict[str, Iterable[torch.Tensor]]:
        """Name the tensors that a run is compared by."""
        parameters = list(self._model.parameters())
        return {
            "parameters": parameters,
            "gradients": [each.grad for each in parameters if each.grad is not None],
            "optimizer states": self._states(),
            "buffers": self._model.buffers(),
        }

    def _states(self) -> Iterator[torch.Tensor]:
        # One tool has an optimizer for each parameter, on a copy of it.
        if hasattr(self._optimizer, "optim_dict"):
            inner = self._optimizer.optim_dict
            owners = [
                next(iter(inner[each].state.values()), {})
                if each in inner
                else self._optimizer.d_opt.state[each]
                for each in self._model.parameters()
            ]
        else:
            state = self._optimizer.state
            owners = [state[each] for each in self._model.parameters() if each in state]
        for owner in owners:
            for name in sorted(owner):
                value = owner[name]
                if isinstance(value, torch.Tensor):
                    yield value


class Generation:
    """Greedy decoding with a cache; the first step reads the prompt, each other one a token."""

    def __init__(self, model: nn.Module, prompt: torch.Tensor) -> None:
        self._model = model
        self._codes = prompt
        self._cache: Any = None
        self._logits: torch.Tensor | None = None

    @torch.no_grad()
    def step(self, number: int) -> str:
        """Generate a token for each row and return them."""
        del number
        answer = self._model(input_ids=self._codes, past_key_values=self._cache, use_cache=True)
        self._cache = answer.past_key_values
        self._logits = answer.logits[:, -1].float()
        self._codes = self._logits.argmax(-1, keepdim=True)
        return " ".join(map(str, self._codes.flatten().tolist()))

    def compared(self) -> dict[str, Iterable[torch.Tensor]]:
        """Name the tensors that a run is compared by."""
        assert self._logits is not None
        return {"logits": [self._logits]}


Program = Training | Generation


@dataclass(frozen=True)
class Workload:
    """A program and its sizes.

    Attributes
    ----------
    make
        Called with the sizes, the device and what a peer changes; the seed is set.
    full, small
        Sizes.
    needs
        Modules without which it cannot be built.
    token
        A step is a token.
    """

    make: Callable[[Mapping[str, Any], str, Peer], Program]
    full: dict[str, Any]
    small: dict[str, Any]
    needs: tuple[str, ...] = ()
    token: bool = False


# -- bits ----------------------------------------------------------------------------------


class Fingerprint:
    """Tells tensors' bytes by 64-bit sums, made where the tensors are, piece by piece.

    Each eight bytes are multiplied by an odd number that depends on their place in the piece,
    and added up: that is exact in any order, so it is the same on every device, and one element
    that differs always shows.
    """

    def __init__(self, piece_bytes: int) -> None:
        self._words = piece_bytes // 8
        self._weights: dict[torch.device, torch.Tensor] = {}

    def of(self, tensors: Iterable[torch.Tensor]) -> str:
        """Return the fingerprint of the tensors, in order."""
        total = hashlib.sha256()
        for tensor in tensors:
            local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
            total.update(f"{tuple(local.shape)} {local.dtype}".encode())
            raw = local.detach().contiguous().reshape(-1).view(torch.uint8)
            if raw.storage_offset() % 8:
                raw = raw.clone()
            whole = raw.numel() // 8 * 8
            words = raw[:whole].view(torch.int64)
            for start in range(0, words.numel(), self._words):
                total.update(self._sum_of(words[start : start + self._words]))
            if whole < raw.numel():
                total.update(bytes(raw[whole:].tolist()))
        return total.hexdigest()[:16]

    def _sum_of(self, words: torch.Tensor) -> bytes:
        if words.device not in self._weights:
            generator = torch.Generator().manual_seed(1)
            odd = torch.randint(-(2**62), 2**62, (self._words,), generator=generator) * 2 + 1
            self._weights[words.device] = odd.to(words.device)
        weights = self._weights[words.device][: words.numel()]
        return int((words * weights).sum().item()).to_bytes(8, "little", signed=True)


# -- programs ------------------------------------------------------------------------------


def numbers(step: int, shape: tuple[int, ...], below: int, device: str) -> torch.Tensor:
    """Return the whole numbers of a step, made on the CPU."""
    generator = torch.Generator().manual_seed(1000 + step)
    return torch.randint(0, below, shape, generator=generator).to(device)


def images(step: int, sizes: Mapping[str, Any], device: str) -> torch.Tensor:
    """Return the pictures of a step, made on the device: there are too many to copy."""
    generator = torch.Generator(device).manual_seed(2000 + step)
    shape = (sizes["batch"], 3, sizes["image"], sizes["image"])
    return torch.randn(shape, generator=generator, device=device)


def autocast(device: str) -> Any:
    """Return bfloat16 on a GPU, and nothing elsewhere, where it would only be slow."""
    return torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda")


def make_gpt(sizes: Mapping[str, Any], device: str, peer: Peer) -> Program:
    """Return the demo's GPT."""
    demo = load_demo_train()
    config = demo.Config(device=device, **sizes)
    with torch.device(device):
        model = demo.GPT(config, config.vocabulary)
    shape = (config.batch, config.context)

    def loss_of(step: int) -> torch.Tensor:
        codes = numbers(step, (shape[0], shape[1] + 1), config.vocabulary, device)
        with autocast(device):
            logits = model(codes[:, :-1].contiguous())
            return functional.cross_entropy(
                logits.flatten(0, 1).float(), codes[:, 1:].flatten()
            )

    options = {"lr": 1e-4, "weight_decay": 0.1, "fused": True}
    return Training(model, list(model.blocks), loss_of, torch.optim.AdamW, options, peer)


def make_resnet50(sizes: Mapping[str, Any], device: str, peer: Peer) -> Program:
    """Return torchvision's ResNet-50, channels last, SGD with momentum."""
    from torchvision.models import resnet50
    from torchvision.models.resnet import Bottleneck

    with torch.device(device):
        model = resnet50(num_classes=1000).to(memory_format=torch.channels_last)
    blocks = [each for each in model.modules() if isinstance(each, Bottleneck)]

    def loss_of(step: int) -> torch.Tensor:
        pictures = images(step, sizes, device).to(memory_format=torch.channels_last)
        labels = numbers(step, (sizes["batch"],), 1000, device)
        with autocast(device):
            return functional.cross_entropy(model(pictures).float(), labels)

    options = {"lr": 0.01, "momentum": 0.9, "weight_decay": 1e-4}
    return Training(model, blocks, loss_of, torch.optim.SGD, options, peer)


def make_vit(sizes: Mapping[str, Any], device: str, peer: Peer) -> Program:
    """Return timm's ViT, AdamW."""
    import timm

    with torch.device(device):
        model = timm.create_model(sizes["name"], pretrained=False, img_size=sizes["image"])

    def loss_of(step: int) -> torch.Tensor:
        labels = numbers(step, (sizes["batch"],), 1000, device)
        with autocast(device):
            logits = model(images(step, sizes, device))
            return functional.cross_entropy(logits.float(), labels)

    options = {"lr": 1e-4, "weight_decay": 0.1, "fused": True}
    return Training(model, list(model.blocks), loss_of, torch.optim.AdamW, options, peer)


def make_llama(sizes: Mapping[str, Any], device: str) -> nn.Module:
    """Return a model of transformers, in bfloat16 on a GPU."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**sizes["model"])
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16 if device == "cuda" else torch.float32)
    try:
        with torch.device(device):
            return LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(before)


def make_llama_lora(sizes: Mapping[str, Any], device: str, peer: Peer) -> Program:
    """Return a Llama with peft's LoRA on all projections, AdamW on the adapters."""
    from peft import LoraConfig, get_peft_model

    names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    config = LoraConfig(r=16, lora_alpha=32, target_modules=names, task_type="CAUSAL_LM")
    base = make_llama(sizes, device)
    blocks = list(base.model.layers)
    with torch.device(device):
        model = get_peft_model(base, config, autocast_adapter_dtype=False)
    model.train()
    shape, below = (sizes["batch"], sizes["context"]), sizes["model"]["vocab_size"]

    def loss_of(step: int) -> torch.Tensor:
        codes = numbers(step, shape, below, device)
        return model(input_ids=codes, labels=codes, use_cache=False).loss

    options = {"lr": 1e-4, "fused": True}
    return Training(model, blocks, loss_of, torch.optim.AdamW, options, peer)


def make_llama_generate(sizes: Mapping[str, Any], device: str, peer: Peer) -> Program:
    """Return greedy generation by a Llama."""
    model = make_llama(sizes, device).eval()
    peer.on_model(model, list(model.model.layers))
    prompt = numbers(0, (sizes["batch"], sizes["prompt"]), sizes["model"]["vocab_size"], device)
    return Generation(model, prompt)


WORKLOADS = {
    "gpt": Workload(
        make_gpt,
        full={
            "layers": 16, "width": 2048, "heads": 16, "context": 1024, "batch": 16,
            "vocabulary": 32768,
        },
        small={
            "layers": 4, "width": 128, "heads": 4, "context": 64, "batch": 4,
            "vocabulary": 1024,
        },
    ),
    "resnet50": Workload(
        make_resnet50,
        full={"batch": 256, "image": 224},
        small={"batch": 4, "image": 64},
        needs=("torchvision",),
    ),
    "vit": Workload(
        make_vit,
        full={"name": "vit_large_patch16_224", "batch": 64, "image": 224},
        small={"name": "vit_tiny_patch16_224", "batch": 4, "image": 96},
        needs=("timm",),
    ),
    "llama-lora": Workload(
        make_llama_lora,
        full={
            "batch": 8, "context": 1024,
            "model": {
                "vocab_size": 32000, "hidden_size": 2048, "intermediate_size": 5632,
                "num_hidden_layers": 22, "num_attention_heads": 32,
                "num_key_value_heads": 4, "max_position_embeddings": 2048,
            },
        },
        small={
            "batch": 2, "context": 64,
            "model": {
                "vocab_size": 1024, "hidden_size": 128, "intermediate_size": 384,
                "num_hidden_layers": 4, "num_attention_heads": 4,
                "num_key_value_heads": 2, "max_position_embeddings": 128,
            },
        },
        needs=("transformers", "peft"),
    ),
    "llama-generate": Workload(
        make_llama_generate,
        full={
            "batch": 1, "prompt": 256,
            "model": {
                "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008,
                "num_hidden_layers": 32, "num_attention_heads": 32,
                "num_key_value_heads": 32, "max_position_embeddings": 2048,
            },
        },
        small={
            "batch": 1, "prompt": 16,
            "model": {
                "vocab_size": 1024, "hidden_size": 128, "intermediate_size": 384,
                "num_hidden_layers": 4, "num_attention_heads": 4,
                "num_key_value_heads": 4, "max_position_embeddings": 128,
            },
        },
        needs=("transformers",),
        token=True,
    ),
}  # fmt: skip
