"""Run in a process of its own with pretended devices: one line of JSON a case, for test_parity.

Every case computes loss and gradients on one device and on a mesh. Arguments: cases as
`family|axis=size,...|remat` and, for a LoRA adapter, `|lora`; on a quantised base `|lora|nf4`.
"""

from __future__ import annotations

import functools
import json
import re
import sys
import tempfile
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
import torch
import transformers as tf
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file

from headrace.bridge.module import JaxModule, to_jax
from headrace.kernels.quantized import quantize
from headrace.plan.hlo import devices_together
from headrace.sharding import MeshConfig, make_mesh, make_partition, param_shardings, plan_params
from headrace.sharding.place import put_batch
from headrace.train.losses import ClassificationLoss, causal_loss
from headrace.weights import load_stored, open_stream
from headrace.weights.quantization import quantizations, quantized_weight

DECODER: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
ROWS, TOKENS = 8, 32


def _model(family: str) -> Any:
    torch.manual_seed(0)
    kinds = {
        "llama": lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**DECODER)),
        "gemma3": lambda: tf.Gemma3ForCausalLM(
            tf.Gemma3TextConfig(
                **DECODER, head_dim=16, sliding_window=8, final_logit_softcapping=5.0,
                layer_types=["sliding_attention", "full_attention"],
            )
        ),
        "qwen3_moe": lambda: tf.Qwen3MoeForCausalLM(
            tf.Qwen3MoeConfig(
                **DECODER, head_dim=8, num_experts=4, num_experts_per_tok=2,
                moe_intermediate_size=16,
            )
        ),
        "mixtral": lambda: tf.MixtralForCausalLM(
            tf.MixtralConfig(**DECODER, num_local_experts=6, num_experts_per_tok=2)
        ),
        "bert": lambda: tf.BertForSequenceClassification(
            tf.BertConfig(
                hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
                vocab_size=96, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
                num_labels=3,
            )
        ),
        "t5": lambda: tf.T5ForConditionalGeneration(
            tf.T5Config(
                d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=4, vocab_size=96,
                dropout_rate=0.0,
            )
        ),
    }  # fmt: skip
    return kinds[family]().train()


def _batch(family: str) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    ids = rng.integers(3, 96, (ROWS, TOKENS)).astype(np.int32)
    if family == "bert":
        mask = (np.arange(TOKENS)[None] < rng.integers(4, TOKENS, ROWS)[:, None]).astype(np.int32)
        labels = rng.integers(0, 3, ROWS).astype(np.int32)
        return {"input_ids": ids, "attention_mask": mask, "labels": labels}
    if family == "t5":
        return {"input_ids": ids, "decoder_input_ids": ids[:, ::-1].copy(), "labels": ids}
    positions = np.concatenate([np.arange(20), np.arange(TOKENS - 20)]).astype(np.int32)
    segments = np.where(np.arange(TOKENS) < 20, 1, 2).astype(np.int32)
    labels = ids.copy()
    labels[:, :3] = -100
    return {
        "input_ids": ids, "labels": labels, "position_ids": np.tile(positions, (ROWS, 1)),
        "segment_ids": np.tile(segments, (ROWS, 1)),
    }  # fmt: skip


def _loss(family: str, module: JaxModule, remat: str) -> Any:
    if family == "bert":
        return ClassificationLoss(
            module=module, problem_type="single_label_classification", remat=remat,
            model_inputs=("input_ids", "attention_mask"),
        )  # fmt: skip
    inputs = ("input_ids", "decoder_input_ids") if family == "t5" else ("input_ids", "position_ids")
    return causal_loss(module, trainable=module.layout.trainable, remat=remat, model_inputs=inputs)


def _step(family: str, module: JaxModule, remat: str) -> Any:
    loss, buffers = _loss(family, module, remat), module.buffers()

    def mean(trainable: Any, frozen: Any, batch: Any) -> Any:
        sums = loss({**trainable, **frozen}, buffers, batch, rng=None, train=True)
        return sums.loss / sums.weight

    return jax.jit(jax.value_and_grad(mean))


def collectives(text: str) -> list[tuple[str, int]]:
    """(kind, elements of the result) of every collective in a compiled program."""
    found = []
    kinds = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"
    for line in text.splitlines():
        match = re.search(rf"= (.*?) ({kinds})(?:-start)?\(", line)
        alone = "replica_groups=" in line and devices_together(line) == 1  # nothing is sent
        if match and not alone:
            shapes = re.findall(r"\w+\[([\d,]*)\]", match.group(1))
            sizes = [int(np.prod([int(n) for n in s.split(",") if n] or [1])) for s in shapes]
            found.append((match.group(2), sum(sizes)))
    return found


def _quantized_from_files(module: JaxModule, quantized: Any, layout: Any) -> dict[str, Any]:
    """Quantised weights as a run gets them: from files, layer by layer, onto the mesh."""
    tensors = dict(module.module.named_parameters())
    keys = {key: module.layout.keys[key] for key in quantized}
    made = {
        key: quantized_weight(
            (len(names), *tensors[names[0]].shape), np.dtype(np.float32), quantized[key],
            layout[key],
        )
        for key, names in keys.items()
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        bare = {n: t.detach() for n, t in tensors.items() if ".lora_" not in n}
        bare = {n.replace(".base_layer", ""): t.contiguous() for n, t in bare.items()}
        save_file(bare, f"{folder}/model.safetensors")
        stream = open_stream(folder, module.module)
        return load_stored(stream, keys, layout, dict.fromkeys(keys, np.dtype(np.float32)), made)


@dataclass(frozen=True, kw_only=True)
class OneDevice:
    """A captured model with its weights and batch, and what one device computes."""

    module: JaxModule
    params: dict[str, Any]
    quantized: Any
    batch: dict[str, np.ndarray]
    loss: float
    gradients: dict[str, np.ndarray]

    def split(self, params: Any) -> tuple[Any, Any]:
        trainable = self.module.layout.trainable
        return (
            {key: value for key, value in params.items() if key in trainable},
            {key: value for key, value in params.items() if key not in trainable},
        )


@functools.cache
def one_device(family: str, lora: bool, nf4: bool) -> OneDevice:
    """The same for every mesh and remat policy, so made once."""
    model = _model(family)
    if lora:
        experts = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
        config = LoraConfig(
            r=2, target_modules="all-linear", init_lora_weights=False,
            target_parameters=experts if family in ("qwen3_moe", "mixtral") else None,
        )  # fmt: skip
        model = get_peft_model(model, config, autocast_adapter_dtype=False).get_base_model()
        with torch.no_grad():  # PEFT's random B is so large that float32 noise grows through it
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.mul_(0.01)
    batch = _batch(family)
    example = {
        name: torch.from_numpy(value[:2].astype(np.int64))
        for name, value in batch.items()
        if name not in ("labels", "segment_ids")
    }
    module = to_jax(model, example)
    params = dict(module.params())
    quantized = quantizations(module, "nf4" if nf4 else None)
    for key, how in quantized.items():
        params[key] = jax.jit(quantize, static_argnums=1)(params[key], how)
    one = OneDevice(
        module=module, params=params, quantized=quantized, batch=batch, loss=0.0, gradients={}
    )
    loss, gradients = _step(family, module, "none")(*one.split(params), batch)
    arrays = {key: np.asarray(value) for key, value in gradients.items()}
    return replace(one, loss=float(loss), gradients=arrays)


def run(case: str) -> dict[str, Any]:
    family, axes, remat, *more = case.split("|")
    one = one_device(family, "lora" in more, "nf4" in more)
    module, params, quantized = one.module, one.params, one.quantized
    config = MeshConfig.sized(axes)
    mesh = make_mesh(config, jax.devices()[: config.size])
    plans = plan_params(module, config)
    layout = param_shardings(mesh, plans)
    placed = {
        key: jax.device_put(value, layout[key])
        for key, value in params.items()
        if key not in quantized
    }
    placed |= _quantized_from_files(module, quantized, layout)
    rows = put_batch(mesh, {name: value[None] for name, value in one.batch.items()})
    rows = {name: value[0] for name, value in rows.items()}
    step = _step(family, module.on_mesh(make_partition(mesh, plans)), remat)
    compiled = step.lower(*one.split(placed), rows).compile()
    got = compiled(*one.split(placed), rows)
    largest = {key: float(np.abs(value).max()) for key, value in one.gradients.items()}
    floor = 1e-2 * max(largest.values())  # below it float32 differences of large sums
    gradient = max(
        float(np.abs(np.asarray(got[1][key]) - value).max()) / max(largest[key], floor)
        for key, value in one.gradients.items()
    )
    return {
        "case": case,
        "loss": abs(float(got[0]) - one.loss) / one.loss,
        "gradient": gradient,
        "misplaced": [
            key for key, g in got[1].items() if not g.sharding.is_equivalent_to(layout[key], g.ndim)
        ],
        "collectives": collectives(compiled.as_text()),
        "trained": sum(value.size for value in one.gradients.values()),
        "frozen": sorted(params[key].size for key in params if key not in one.gradients),
    }


if __name__ == "__main__":
    for each in sys.argv[1:]:
        print(json.dumps(run(each)), flush=True)
