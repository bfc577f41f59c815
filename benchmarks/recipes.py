"""Which blocks of a recorded step may be dropped, and how they are made again.

A recorded trace has no arguments and no use counts, so a live hook knows more. Here a storage
may be dropped if one operator of the list below allocated it and wrote it whole in the forward
pass, and none wrote it later. What a rerun takes is that operator's time on the device with
that of those which it calls.

A trace names the operators that launch something, outer ones before those that they call. Those
which only call others (composites) are passed through to the first that is no composite.
"""

from collections import defaultdict

from torchpager.trace import Step, StepRecipe

# Functional, deterministic, not random, without running statistics.
MAY_BE_RERUN = frozenset(
    [
        *("addmm", "baddbmm", "bmm", "mm", "cudnn_convolution", "_cudnn_attention_forward"),
        *("native_layer_norm", "native_group_norm"),
        *("_log_softmax", "_softmax", "_safe_softmax"),
        *("gelu", "hardswish", "leaky_relu", "relu", "sigmoid", "silu", "tanh"),
        *("add.Scalar", "add.Tensor", "sub.Tensor", "mul.Scalar", "mul.Tensor"),
        *("div.Scalar", "div.Tensor", "pow.Scalar", "pow.Tensor_Scalar", "reciprocal", "neg"),
        *("exp", "log", "rsqrt", "sqrt", "cos", "sin", "where.self"),
        *("mean.dim", "sum.dim_IntList"),
        *("_to_copy", "copy_", "clone", "cat", "stack", "constant_pad_nd"),
        *("embedding", "index_select", "gather"),
        *("max_pool2d_with_indices", "avg_pool2d", "adaptive_avg_pool2d"),
    ]
)
# They call others and do nothing themselves.
_COMPOSITES = frozenset(
    [
        *("linear", "matmul", "conv1d", "conv2d", "convolution", "_convolution"),
        *("layer_norm", "log_softmax.int", "softmax.int"),
        *("scaled_dot_product_attention", "_scaled_dot_product_cudnn_attention"),
        *("contiguous", "reshape", "to.dtype"),
    ]
)
# Those of the first list call these on what they have just allocated.
_NESTED = frozenset(["copy_", "fill_", "gather.out", "resize_"])
# Attention draws random numbers if it drops out, and the trace does not say: such a program has
# operators that drop out elsewhere, too.
_DRAWS = "dropout"
_ATTENTION = "_cudnn_attention_forward"


def recipes_of(step: Step) -> tuple[StepRecipe, ...]:
    """Return the recipes of a step, in order of their operators."""
    writers: dict[int, list[int]] = defaultdict(list)
    for at, operator in enumerate(step.operators):
        for block in dict.fromkeys(operator.writes):
            writers[block].append(at)
    draws = any(_DRAWS in each.name for each in step.operators)
    found: dict[int, StepRecipe] = {}
    for block, places in writers.items():
        run = _producer(step, block, places)
        if run is None or (draws and _ATTENTION in {_short(step, at) for at in run}):
            continue
        outputs = _outputs(step, run, places[0], writers)
        if outputs is None or run[-1] in found:
            continue
        inputs = dict.fromkeys(each for at in run for each in step.operators[at].reads)
        found[run[-1]] = StepRecipe(
            run[-1],
            sum(step.operators[at].device_ns for at in run),
            tuple(each for each in inputs if each not in outputs),
            outputs,
        )
    return tuple(found[at] for at in sorted(found))


def _short(step: Step, at: int) -> str:
    return step.operators[at].name.removeprefix("aten::").removesuffix(".")


def _producer(step: Step, block: int, places: list[int]) -> range | None:
    """Return the operator that made a block, with those that it called; None: it may not be
    rerun."""
    born, dead = step.blocks[block].born, step.blocks[block].dead
    if born is None or dead is None or dead < born or places[0] - born > 1:
        return None
    run = range(places[0], places[-1] + 1)
    if len(run) != len(places) or step.operators[born].phase != "forward":
        return None  # written again later
    while len(run) and _short(step, run[0]) in _COMPOSITES:
        run = run[1:]
    if not len(run) or _short(step, run[0]) not in MAY_BE_RERUN:
        return None
    if any(_short(step, at) not in MAY_BE_RERUN | _NESTED for at in run[1:]):
        return None
    return run


def _outputs(
    step: Step, run: range, first: int, writers: dict[int, list[int]]
) -> tuple[int, ...] | None:
    """Return what the operators allocated, the first of them (composites too) at `first`; None:
    they write something else."""
    outputs = dict.fromkeys(each for at in run for each in step.operators[at].writes)
    for each in outputs:
        born = step.blocks[each].born
        # An operator with several results stands behind the birth of the last.
        if born is None or not first - len(outputs) <= born <= run[-1]:
            return None
        if writers[each][-1] > run[-1]:
            return None
    return tuple(outputs)
