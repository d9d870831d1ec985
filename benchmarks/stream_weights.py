"""Reading weights onto devices: bytes a second beside the disk's, host memory above the arrays.

    python benchmarks/stream_weights.py                    # 1 GB of random Llama weights
    python benchmarks/stream_weights.py --hidden 4096 --layers 4 --runs 3 --folder /mnt/disk

Writes the model, then in turns, each in a process of its own and with as many threads and bytes at
a time as the loader:

    plain    read the files and do nothing with them (memory that is used again)
    kept     read them into memory that is kept: what anyone who holds the weights must do
    loaded   load them onto pretended devices, compilation included, imports and start-up not
    through  load them as for devices with memory of their own: host buffers, then programs that
             fill stacks

The files are dropped from the page cache before each (posix_fadvise); the last row reads them from
it. `above` is the peak memory of the loading process above the arrays it holds at the end, in
largest tensors.
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
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

MIB = 2**20


def make(folder: Path, hidden: int, layers: int) -> None:
    import torch
    import transformers as tf

    config = tf.LlamaConfig(
        hidden_size=hidden, intermediate_size=4 * hidden, num_hidden_layers=layers,
        num_attention_heads=hidden // 64, vocab_size=32_000, dtype="bfloat16",
    )  # fmt: skip
    tf.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder, max_shard_size="300MB")


def load(folder: Path, through_host: bool) -> dict[str, Any]:
    import jax
    import torch

    from headrace.bridge.module import to_jax
    from headrace.sharding import MeshConfig, make_mesh, param_shardings, plan_params
    from headrace.weights import load_stored, meta_model, open_stream
    from headrace.weights import stream as loading

    if through_host:
        loading._in_host_memory = lambda sharding: False  # pyright: ignore

    model = meta_model(folder).train()
    module = to_jax(model, {"input_ids": torch.ones(2, 16, dtype=torch.int64)})
    config = MeshConfig(fsdp=len(jax.devices()))
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


def plain(folder: Path, kept: bool) -> dict[str, Any]:
    """Reading the files and doing nothing with them; kept: each block into memory of its own."""
    import numpy as np

    from headrace.weights.files import BLOCK_BYTES, READERS

    files = {path: path.stat().st_size for path in sorted(folder.glob("*.safetensors"))}
    blocks = [(path, at) for path, size in files.items() for at in range(0, size, BLOCK_BYTES)]
    own = threading.local()
    start = time.perf_counter()
    whole = {path: np.empty(size, np.uint8) for path, size in files.items()} if kept else {}

    def read(block: tuple[Path, int]) -> int:
        path, at = block
        if kept:
            memory = whole[path][at : at + BLOCK_BYTES]
        else:
            if not hasattr(own, "memory"):
                own.memory = np.empty(BLOCK_BYTES, np.uint8)
            memory = own.memory
        descriptor = os.open(path, os.O_RDONLY)
        got = os.preadv(descriptor, [memory.data], at)
        os.close(descriptor)
        return got

    with ThreadPoolExecutor(READERS) as pool:
        total = sum(pool.map(read, blocks))
    return {"arrays": total, "seconds": time.perf_counter() - start}


def drop(folder: Path) -> None:
    """Take the files out of the page cache."""
    for path in folder.glob("*.safetensors"):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


WAYS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "plain": lambda folder: plain(folder, kept=False),
    "kept": lambda folder: plain(folder, kept=True),
    "loaded": lambda folder: load(folder, through_host=False),
    "through": lambda folder: load(folder, through_host=True),
}


def apart(way: str, folder: Path, devices: int) -> dict[str, Any]:
    """One of WAYS in a process of its own."""
    flags = f"--xla_force_host_platform_device_count={devices}"
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    command = [sys.executable, __file__, "--one", way, "--folder", str(folder)]
    return json.loads(subprocess.check_output(command, env=env, text=True).splitlines()[-1])


def row(folder: Path, devices: int, *, cold: bool) -> str:
    rates: dict[str, float] = {}
    above: dict[str, float] = {}
    for way in WAYS:
        if cold:
            drop(folder)
        found = apart(way, folder, devices)
        rates[way] = found["arrays"] / found["seconds"]
        if "above" in found:
            above[way] = found["above"] / found["largest"]
    shares = [f"{rates[way] / rates['plain']:>8.2f}" for way in ("kept", *above)]
    return " ".join([
        f"{devices:>7} {'cold' if cold else 'warm':<5}",
        *(f"{rate / MIB:>8,.0f}" for rate in rates.values()),
        *shares,
        *(f"{value:>8.2f}" for value in above.values()),
    ])  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--devices", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where to write; a temporary folder without it")
    parser.add_argument("--one", choices=WAYS, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        print(json.dumps(WAYS[given.one](given.folder)))
        return
    with tempfile.TemporaryDirectory(dir=given.folder) as name:
        folder = Path(name)
        make(folder, given.hidden, given.layers)
        print(f"{'':13} {'MiB/s':<35} {'of plain':<26} above, largest tensors")
        columns = [*WAYS, *list(WAYS)[1:], *list(WAYS)[2:]]
        print("devices cache", *(f"{column:>8}" for column in columns), flush=True)
        for devices in given.devices:
            for cold in [True] * given.runs + [False]:
                print(row(folder, devices, cold=cold), flush=True)


if __name__ == "__main__":
    main()
