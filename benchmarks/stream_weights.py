"""Reading weights into a mesh: host memory above the arrays, and bytes a second.

    python benchmarks/stream_weights.py                    # about 1.2 GB of random Llama weights
    python benchmarks/stream_weights.py --hidden 4096      # larger

Writes the model to a temporary folder, loads it in a process of its own onto 4 pretended devices,
and compares the process's peak memory with the arrays it holds. The disk's read rate is that of
reading the same files once before, so both come from the page cache unless it is dropped.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

DEVICES = 4


def make(folder: Path, hidden: int, layers: int) -> None:
    import torch
    import transformers as tf

    config = tf.LlamaConfig(
        hidden_size=hidden, intermediate_size=4 * hidden, num_hidden_layers=layers,
        num_attention_heads=hidden // 64, vocab_size=32_000, dtype="bfloat16",
    )  # fmt: skip
    tf.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder, max_shard_size="300MB")


def load(folder: Path) -> dict[str, Any]:
    import jax
    import torch

    from headrace.bridge.module import to_jax
    from headrace.sharding import MeshConfig, make_mesh, param_shardings, plan_params
    from headrace.weights import load_stored, meta_model, open_stream

    model = meta_model(folder).train()
    module = to_jax(model, {"input_ids": torch.ones(2, 16, dtype=torch.int64)})
    config = MeshConfig(fsdp=DEVICES)
    mesh = make_mesh(config)
    plans = plan_params(module, config)
    stream = open_stream(folder, model)
    stream.check()
    shardings = param_shardings(mesh, plans)
    dtypes = {key: plan.dtype for key, plan in plans.items()}
    before, peaks, done = _resident(), [0], threading.Event()

    def watch() -> None:
        while not done.wait(0.002):
            peaks[0] = max(peaks[0], _resident())

    watcher = threading.Thread(target=watch)
    watcher.start()
    start = time.perf_counter()
    arrays = load_stored(stream, module.layout.keys, shardings, dtypes)
    jax.block_until_ready(arrays)
    seconds = time.perf_counter() - start
    done.set()
    watcher.join()
    largest = max(p.bytes // len(p.names) for p in plans.values())
    held = sum(s.data.nbytes for a in arrays.values() for s in a.addressable_shards)
    return {
        "arrays": held, "above": peaks[0] - before - held, "largest": largest, "seconds": seconds,
    }  # fmt: skip


def _resident() -> int:
    """Bytes of this process in memory now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--load", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.load:
        print(json.dumps(load(given.load)))
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make(folder, given.hidden, given.layers)
        start, total = time.perf_counter(), 0
        for path in folder.glob("*.safetensors"):
            with path.open("rb", buffering=0) as file:
                while block := file.read(2**23):
                    total += len(block)
        rate = total / (time.perf_counter() - start)
        flags = f"--xla_force_host_platform_device_count={DEVICES}"
        env = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
        command = [sys.executable, __file__, "--load", str(folder)]
        found = json.loads(subprocess.check_output(command, env=env, text=True).splitlines()[-1])
    mib = 2**20
    print(f"{total / mib:,.0f} MiB in files, {found['arrays'] / mib:,.0f} MiB in arrays")
    print(
        f"peak host memory above the arrays: {found['above'] / mib:,.0f} MiB "
        f"= {found['above'] / found['largest']:.2f} of the largest tensor "
        f"({found['largest'] / mib:,.0f} MiB)"
    )
    print(
        f"loaded at {total / found['seconds'] / mib:,.0f} MiB/s; plain reading of the same files "
        f"{rate / mib:,.0f} MiB/s"
    )


if __name__ == "__main__":
    main()
