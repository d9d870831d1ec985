"""Model FLOPs utilisation: the arithmetic a step needs, as a share of what the devices could do.

    a token forward and backward = (4 * parameters + 2 * trained parameters) FLOPs

two for each weight of the forward pass, two for the gradient of its input, two for its own gradient
where it is trained. Input embeddings are a look-up and not counted; attention scores and
recomputation are left out, so the number is a floor (PaLM, appendix B, without its attention term).

Knows: the planner's table of chips (dense bfloat16). Units: FLOP/s a device.
"""

from __future__ import annotations

import jax

from headrace.plan.hardware import chip_of
from headrace.train.setup import Run


def peak_flops(device_kind: str) -> float | None:
    """FLOP/s of one device in bfloat16, None for a kind that is not known (a CPU)."""
    chip = chip_of(device_kind)
    return None if chip is None else chip.flops


def flops_per_token(run: Run) -> float:
    """FLOPs of one token of a training step."""
    embedding = run.model.get_input_embeddings()
    table = embedding.weight.numel() if embedding is not None else 0
    output = run.model.get_output_embeddings() if hasattr(run.model, "lm_head") else None
    if output is not None and embedding is not None and output.weight is embedding.weight:
        table = 0  # a tied table is multiplied at the output
    counted = max(run.num_trainable + run.num_frozen - table, 0)
    return 4.0 * counted + 2.0 * run.num_trainable


def utilisation(run: Run, tokens_per_second: float) -> float | None:
    """Share of the devices' peak; None where the peak is not known."""
    peak = peak_flops(jax.devices()[0].device_kind)
    if peak is None:
        return None
    return flops_per_token(run) * tokens_per_second / (peak * run.placement.config.size)
