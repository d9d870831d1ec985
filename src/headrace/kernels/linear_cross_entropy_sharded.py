"""The fused head and loss on a mesh: every device takes its own tokens and the whole head.

Tokens are divided over all axes, `tensor` too: the head is gathered once and each device runs the
chunks of its part, so no logits cross the network and the loss is exact for any tail. The gradient
of the head goes back in parts (reduce-scatter).

Shapes: B = rows, S = tokens in a row, D = hidden size, V = vocabulary.
"""

from __future__ import annotations

from typing import Any

import jax
from jax import Array
from jax.sharding import PartitionSpec

from headrace.kernels.linear_cross_entropy import LinearCrossEntropy, linear_cross_entropy
from headrace.kernels.partition import BATCH_AXES, CONTEXT, TENSOR, Partition


def linear_cross_entropy_on_mesh(
    partition: Partition,
    hidden_BSD: Array,
    weight_VD: Array,
    labels_BS: Array,
    *,
    weight_spec: PartitionSpec,
    bias: Array | None = None,
    weights_BS: Array | None = None,
    **options: Any,
) -> LinearCrossEntropy:
    """`linear_cross_entropy` over the mesh; sums are those of all devices.

    weight_spec: how weight_VD is stored. options: tail, ignore_index, label_smoothing, chunk,
    weight_grad. Holds the whole head on every device while it runs: V * D in its dtype.
    """
    sequence = (CONTEXT, TENSOR)
    if hidden_BSD.shape[1] % partition.size(sequence):
        sequence = (CONTEXT,)
    tokens = PartitionSpec(partition.entry(*BATCH_AXES), partition.entry(*sequence))
    axes = partition.axes(*BATCH_AXES, *sequence)
    given = {"bias": bias, "weights": weights_BS}
    given = {name: array for name, array in given.items() if array is not None}
    specs = {name: tokens if name == "weights" else PartitionSpec() for name in given}

    def local(
        hidden: Array, weight: Array, labels: Array, given: dict[str, Array]
    ) -> LinearCrossEntropy:
        found = linear_cross_entropy(
            hidden.reshape(-1, hidden.shape[-1]),
            _whole(weight, weight_spec),
            labels.reshape(-1),
            bias=given.get("bias"),
            weights_T=given["weights"].reshape(-1) if "weights" in given else None,
            **options,
        )
        return LinearCrossEntropy(*(jax.lax.psum(x, axes) if axes else x for x in found))

    divided = jax.shard_map(
        local,
        mesh=partition.mesh,
        in_specs=(tokens, weight_spec, tokens, specs),
        out_specs=PartitionSpec(),
        check_vma=False,
    )
    return divided(hidden_BSD, weight_VD, labels_BS, given)


def _whole(weight: Array, spec: PartitionSpec) -> Array:
    """All parts of a weight, dim by dim."""
    for dim, entry in enumerate(spec):
        if entry is not None:
            weight = jax.lax.all_gather(weight, entry, axis=dim, tiled=True)
    return weight
