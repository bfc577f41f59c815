"""PyTorch's own operator samples: memory of their own for each call, and what comes out.

Nothing here knows of torchpager.
"""

import os
import random
import sys
import types
import unittest
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

os.environ["PYTORCH_TEST_WITH_SLOW"] = "0"

import torch
from torch.utils import _pytree as pytree


def database() -> list[Any]:
    """Return the entries in the order of the seed.

    The module that lists them imports ``expecttest``, for a base class of PyTorch's own test
    cases. Where that package is missing, an empty module with the standard library's class
    stands in for it during the import; nothing of it is used.
    """
    try:
        import expecttest  # noqa: F401
    except ImportError:
        stand_in = types.ModuleType("expecttest")
        stand_in.TestCase = unittest.TestCase  # type: ignore[attr-defined]
        sys.modules["expecttest"] = stand_in
    from torch.testing._internal.common_methods_invocations import op_db

    entries = sorted(op_db, key=name_of)
    random.Random(SEED).shuffle(entries)
    return entries


SEED = 20
LARGEST = 20_000
"""Elements of a sample's tensors; a larger sample is left out."""

# The first two that an entry supports are tested.
_PREFERRED = (
    torch.float32, torch.complex64, torch.bfloat16, torch.float64, torch.complex128,
    torch.float16, torch.int64, torch.int32, torch.bool, torch.uint8, torch.float8_e4m3fn,
    torch.float8_e5m2,
)  # fmt: skip
_DTYPES = 2

# What an operator may raise on a sample; both runs must raise the same.
_ERRORS = (
    RuntimeError, ValueError, TypeError, IndexError, NotImplementedError, AssertionError,
    AttributeError, ImportError, OSError,
)  # fmt: skip


def name_of(op: Any) -> str:
    """Return the name of an entry: the operator's, and that of its variant."""
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else str(op.name)


def dtypes_of(op: Any, device: str) -> list[torch.dtype]:
    """Return the dtypes in which an entry is tested; none if the device has no kernel."""
    supported = op.supported_dtypes(device)
    return [dtype for dtype in _PREFERRED if dtype in supported][:_DTYPES]


def tensors_of(value: Any) -> list[torch.Tensor]:
    """Return the tensors in nested arguments or results."""
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def copied(value: Any, gradients: bool) -> Any:
    """Return the same arguments with memory of their own, made by operators."""

    def copy(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if leaf.layout is torch.strided and not leaf.is_nested and not leaf.is_quantized:
            # The geometry too: the clone of an expanded or strided tensor is contiguous.
            flat = torch.empty(0, dtype=leaf.dtype, device=leaf.device)
            own = flat.set_(leaf.detach().untyped_storage()).clone()
            made = own.as_strided(leaf.size(), leaf.stride(), leaf.storage_offset())
            made = made.conj() if leaf.is_conj() else made
            made = torch._neg_view(made) if leaf.is_neg() else made
        else:
            made = leaf.detach().clone()
        return made.requires_grad_(leaf.requires_grad and gradients)

    return pytree.tree_map(copy, value)


def bits(value: Any) -> list[Any]:
    """Return bytes and shapes of all tensors in a value, and other leaves as text."""
    found: list[Any] = []
    for leaf in pytree.tree_leaves(value):
        if not isinstance(leaf, torch.Tensor):
            found.append(repr(leaf) if isinstance(leaf, (int, float, bool, complex)) else None)
            continue
        plain = leaf.detach()
        if plain.layout is not torch.strided:
            plain = plain.to_dense()
        if plain.is_quantized:
            plain = plain.int_repr()
        flat = torch.empty(plain.numel(), dtype=plain.dtype, device=plain.device)
        flat = flat.copy_(plain.reshape(-1)).view(torch.uint8).cpu()
        found.append((tuple(plain.shape), plain.dtype, flat.numpy().tobytes()))
    return found


def samples_of(op: Any, device: str, dtype: torch.dtype, count: int) -> list[Any]:
    """Return a few of an operator's samples, evenly chosen among those of moderate size."""
    torch.manual_seed(2)
    random.seed(2)
    gradients = op.supports_autograd and dtype in op.supported_backward_dtypes(device)
    found = []
    try:
        for sample in op.sample_inputs(device, dtype, requires_grad=gradients):
            parts = tensors_of((sample.input, sample.args, sample.kwargs))
            if all(tensor.numel() <= LARGEST for tensor in parts):
                found.append(sample)
    except (*_ERRORS, unittest.SkipTest):
        pass  # what came before it is good
    return found[:: max(1, -(-len(found) // count))][:count]


@dataclass
class Outcome:
    """What one call gave."""

    result: list[Any]
    inputs: list[Any]
    error: str | None
    backward: bool
    has_bytes: bool
    """Whether an input holds at least one byte."""

    def without_bits(self) -> "Outcome":
        """Return the same with shapes and dtypes only."""
        return replace(self, result=_shapes(self.result), inputs=_shapes(self.inputs))


def _shapes(found: list[Any]) -> list[Any]:
    """Return what bits() gave, without the bytes and numbers."""
    return [each[:2] if isinstance(each, tuple) else each is None for each in found]


class Watch:
    """Is told how far a call has come. This one does nothing."""

    def before_call(self, live: Any) -> None:
        """Note that the forward or backward call comes next, on these tensors."""

    def call_ended(self) -> None:
        """Note that nothing has been read since but by the calls."""

    def view_read(self) -> None:
        """Note that the result, a view of an input, has been read."""


@dataclass
class Case:
    """One sample of one form of an operator."""

    label: str
    form: str
    """"" is functional, "_" in place, "out" and "out empty" with out=."""
    operator: Callable[..., Any]
    sample: Any
    gradients: bool
    out: Any = None
    """What out= is made like."""

    def without_backward(self) -> "Case":
        """Return the same call without the backward pass."""
        return replace(self, label=f"{self.label} without backward", gradients=False)

    def run(self, watch: "Watch") -> Outcome:
        """Call it on memory of its own."""
        arguments = copied((self.sample.input, *self.sample.args), self.gradients)
        options = copied(self.sample.kwargs, self.gradients)
        if self.form.startswith("out"):
            options["out"] = self._destination()
        torch.manual_seed(1)
        error, backward, result = None, False, None
        watch.before_call((arguments, options))
        try:
            result = self._call(arguments, options)
            gradients = self._gradients(result, (arguments, options), watch)
            backward = gradients is not None
            result = (result, gradients)
        except _ERRORS as raised:
            result = error = type(raised).__name__
        watch.call_ended()
        inputs = tensors_of((arguments, options))
        seen = bits(result)
        if not self.form and _share_memory(tensors_of(result), inputs):
            watch.view_read()
        has_bytes = any(tensor.numel() for tensor in inputs)
        return Outcome(seen, bits((arguments, options)), error, backward, has_bytes)

    def _destination(self) -> Any:
        if self.form == "out empty":
            return pytree.tree_map(lambda leaf: leaf.new_empty(0), self.out)
        made = copied(self.out, False)
        for tensor in tensors_of(made):
            tensor.zero_()
        return made

    def _call(self, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        if self.form == "_" and self.gradients:
            # A leaf cannot be written to.
            return self.operator(arguments[0].clone(), *arguments[1:], **options)
        return self.operator(*arguments, **options)

    def _gradients(
        self, result: Any, inputs: Any, watch: "Watch"
    ) -> tuple[torch.Tensor | None, ...] | None:
        wanted = [leaf for leaf in tensors_of(inputs) if leaf.requires_grad]
        roots = [leaf for leaf in tensors_of(result) if leaf.requires_grad]
        if not wanted or not roots:
            return None
        starts = [torch.randn_like(root, requires_grad=False) for root in roots]
        watch.before_call((inputs, result, starts))
        return torch.autograd.grad(roots, wanted, starts, allow_unused=True)


def _storages(tensors: list[torch.Tensor]) -> set[int]:
    return {
        tensor.untyped_storage()._cdata
        for tensor in tensors
        if tensor.layout is torch.strided and not tensor.is_nested
    }


def _share_memory(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return bool(_storages(left) & _storages(right))


def cases_of(op: Any, device: str, count: int) -> Iterator[Case]:
    """Yield every form of an entry's samples, in its dtypes."""
    for dtype in dtypes_of(op, device):
        has_out = op.supports_out
        in_place = op.inplace_variant
        for idx, sample in enumerate(samples_of(op, device, dtype, count)):
            label = f"{name_of(op)} {str(dtype)[6:]} sample {idx}"
            yield Case(label, "", op.op, sample, True)
            if in_place is not None:
                inputs = sample.input
                gradients = (
                    op.supports_inplace_autograd
                    and isinstance(inputs, torch.Tensor)
                    and inputs.requires_grad
                )
                yield Case(f"{label} in place", "_", in_place, sample, gradients)
            if has_out and "out" not in sample.kwargs:
                like = _prototype(op, sample)
                if like is None:
                    has_out = False
                    continue
                yield Case(f"{label} out=", "out", op.op, sample, False, like)
                if idx == 0 and all(leaf.layout is torch.strided for leaf in tensors_of(like)):
                    yield Case(f"{label} empty out=", "out empty", op.op, sample, False, like)


def _prototype(op: Any, sample: Any) -> Any:
    """Return what out= must look like, or None if this entry has no use for it."""
    torch.manual_seed(1)
    try:
        with torch.no_grad():
            arguments = copied((sample.input, *sample.args), False)
            like = op.op(*arguments, **copied(sample.kwargs, False))
    except _ERRORS:
        return None
    if isinstance(like, torch.Tensor):
        return like
    leaves = pytree.tree_leaves(like)
    return tuple(like) if leaves and len(tensors_of(like)) == len(leaves) else None
