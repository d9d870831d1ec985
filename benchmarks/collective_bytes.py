"""Bytes that one device receives in a LoRA step, by the number of devices: `fsdp` from 4 to 256.

    python benchmarks/collective_bytes.py                       # minutes on 2 cores
    python benchmarks/collective_bytes.py --slices v5e-4,v5e-64 --hidden 1024 --flags default

The step of a Llama-shaped model (4 layers), one row of 1,024 tokens a device, is
compiled by the real TPU compiler for each slice; bytes are read from its collectives, loops
multiplied. The part of a weight that a device does not hold is (n - 1) / n of it: what is received
may grow by that factor and by nothing else. Needs `pip install headrace[tpu]`.
"""

from __future__ import annotations

import argparse
import tempfile

from transformers import LlamaConfig

from headrace.config import TrainConfig
from headrace.plan import make_plan

SLICES = "v5e-4,v5e-8,v5e-16,v5e-64,v5e-256"


def main() -> None:
    """Print a row for each slice."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--slices", default=SLICES)
    parser.add_argument("--hidden", type=int, default=4096, help="features of the model")
    parser.add_argument("--flags", default="overlap", help="set of compiler flags")
    given = parser.parse_args()
    names = given.slices.split(",")
    first = None
    print(
        f"{'slice':<9} {'devices':>7} {'MiB received':>13} {'x n/(n-1)':>10} {'of the first':>13}"
        "  MiB by collective"
    )
    with tempfile.TemporaryDirectory() as folder:
        LlamaConfig(
            vocab_size=16384,
            hidden_size=given.hidden,
            intermediate_size=2 * given.hidden,
            num_hidden_layers=4,
            num_attention_heads=given.hidden // 128,
            num_key_value_heads=max(1, given.hidden // 512),
            dtype="bfloat16",
        ).save_pretrained(folder)
        for name in names:
            config = TrainConfig(
                model_name_or_path=folder,
                use_peft=True,
                lora_dropout=0.0,
                max_length=1024,
                per_device_train_batch_size=1,
                activation_checkpointing="full",
                compiler_flags=given.flags,
                mesh={"fsdp": int(name.partition("-")[2])},
            )
            plan = make_plan(config, name)
            assert plan.report is not None
            kinds = plan.report["link_bytes"]
            received = sum(kinds.values())
            num = plan.hardware.num_devices
            whole = received * num / (num - 1)
            first = first or whole
            print(
                f"{name:<9} {num:>7} {received / 2**20:>9.1f} {whole / 2**20:>10.1f} "
                f"{whole / first:>13.2f}  "
                + ", ".join(f"{kind} {size / 2**20:.1f}" for kind, size in sorted(kinds.items())),
                flush=True,
            )


if __name__ == "__main__":
    main()
