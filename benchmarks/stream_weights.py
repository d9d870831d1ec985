"""Reading weights into a mesh: host memory above the arrays, and bytes a second beside the disk's.

    python benchmarks/stream_weights.py                    # 2.4 GB of random Llama weights
    python benchmarks/stream_weights.py --hidden 2048 --runs 1 --folder /mnt/disk

Writes the model, then in turns: reads its files plainly (as many threads and bytes at a time as the
loader, nothing done with them) and loads it in a process of its own onto 4 pretended devices. The
files are dropped from the page cache before each (posix_fadvise), and once more read from it. Peak
memory is that of the loading process above the arrays it holds at the end.
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
from concurrent.futures import ThreadPoolExecutor
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


def plain(folder: Path) -> float:
    """Bytes a second of reading the files and doing nothing with them."""
    from headrace.weights.files import BLOCK_BYTES, READERS

    blocks = [
        (path, start)
        for path in sorted(folder.glob("*.safetensors"))
        for start in range(0, path.stat().st_size, BLOCK_BYTES)
    ]
    buffers = threading.local()

    def read(block: tuple[Path, int]) -> int:
        if not hasattr(buffers, "own"):
            buffers.own = bytearray(BLOCK_BYTES)
        descriptor = os.open(block[0], os.O_RDONLY)
        got = os.preadv(descriptor, [buffers.own], block[1])
        os.close(descriptor)
        return got

    start = time.perf_counter()
    with ThreadPoolExecutor(READERS) as pool:
        total = sum(pool.map(read, blocks))
    return total / (time.perf_counter() - start)


def drop(folder: Path) -> None:
    """Take the files out of the page cache."""
    for path in folder.glob("*.safetensors"):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def load_apart(folder: Path) -> dict[str, Any]:
    """`load` in a process of its own."""
    flags = f"--xla_force_host_platform_device_count={DEVICES}"
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    command = [sys.executable, __file__, "--load", str(folder)]
    return json.loads(subprocess.check_output(command, env=env, text=True).splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where to write; a temporary folder without it")
    parser.add_argument("--load", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.load:
        print(json.dumps(load(given.load)))
        return
    mib = 2**20
    with tempfile.TemporaryDirectory(dir=given.folder) as name:
        folder = Path(name)
        make(folder, given.hidden, given.layers)
        print(f"{'cache':<6} {'plain MiB/s':>12} {'loaded MiB/s':>13} {'share':>6} {'above':>10}")
        for cached in [False] * given.runs + [True]:
            if not cached:
                drop(folder)
            rate = plain(folder)
            if not cached:
                drop(folder)
            found = load_apart(folder)
            loaded = found["arrays"] / found["seconds"]
            print(
                f"{'warm' if cached else 'cold':<6} {rate / mib:>12,.0f} {loaded / mib:>13,.0f} "
                f"{loaded / rate:>6.2f} {found['above'] / mib:>6,.0f} MiB",
                flush=True,
            )
    print(
        f"arrays {found['arrays'] / mib:,.0f} MiB, largest tensor {found['largest'] / mib:,.0f} "
        f"MiB; above: peak host memory above the arrays, {found['above'] / found['largest']:.2f} "
        "of the largest tensor in the last run"
    )


if __name__ == "__main__":
    main()
