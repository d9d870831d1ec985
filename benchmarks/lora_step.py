"""One LoRA training step of a Llama shape: Headrace beside eager PyTorch, torch.compile and
torchax.

Every contender does the same work: forward, loss over all tokens, backward, clip, AdamW on a
rank-16 adapter of every linear layer, float32, the same shapes. Each runs in a process of its own
and they take
turns, so that a busy machine is busy for all; the table gives medians and the median of paired
ratios.

    python benchmarks/lora_step.py --rounds 7
    python benchmarks/lora_step.py --only headrace eager eager+pages
    python benchmarks/lora_step.py --torchax-python .venv-torchax/bin/python

torchax needs an environment of its own (its release does not import with torch >= 2.13 as it is;
the missing overload names are supplied here, nothing else is changed). A contender that cannot run
is reported. Headrace runs with huge pages for malloc, as the `headrace` command sets them; the
peers as their users start them, and with "+pages" with the same setting.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

SHAPES = {
    "20m": {"hidden_size": 384, "intermediate_size": 1024, "layers": 8, "heads": 6, "kv": 2},
    "45m": {"hidden_size": 512, "intermediate_size": 1408, "layers": 10, "heads": 8, "kv": 4},
}
VOCAB, RANK = 16_000, 16


def model_and_batch(shape: str, batch: int, length: int) -> tuple[Any, Any]:
    """The peft-wrapped torch model in train mode, and its token ids."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    size = SHAPES[shape]
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=size["hidden_size"],
        intermediate_size=size["intermediate_size"],
        num_hidden_layers=size["layers"],
        num_attention_heads=size["heads"],
        num_key_value_heads=size["kv"],
        tie_word_embeddings=True,
        use_cache=False,
    )
    lora = LoraConfig(r=RANK, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(LlamaForCausalLM(config), lora).train()
    return model, torch.randint(0, VOCAB, (batch, length))


def headrace_step(
    shape: str, batch: int, length: int, *, remat: str = "none"
) -> Callable[[], float]:
    """Headrace's own step: fused head and loss, layers in a loop, donated state."""
    import jax
    import numpy as np

    import headrace as hr
    from headrace.train.losses import causal_loss
    from headrace.train.optimizers import make_optimizer
    from headrace.train.state import compute_dtypes, create_state
    from headrace.train.step import make_train_step

    model, ids = model_and_batch(shape, batch, length)
    jm = hr.to_jax(model, {"input_ids": ids})
    optimizer = make_optimizer(
        "adamw", stacked=frozenset(k for k, n in jm.layout.keys.items() if len(n) > 1)
    )
    params = jm.params()
    trainable = jm.layout.trainable
    state, frozen = create_state(
        params, jm.buffers(), trainable=trainable, optimizer=optimizer, seed=0
    )
    function = make_train_step(
        causal_loss(jm, trainable=trainable, remat=remat),
        optimizer,
        dtypes=compute_dtypes(params, trainable),
    )
    compiled = jax.jit(function, donate_argnums=0)
    batches = {k: np.asarray(ids, np.int32)[None] for k in ("input_ids", "labels")}
    held = {"state": state}

    def step() -> float:
        held["state"], metrics = compiled(held["state"], frozen, batches, np.float32(1e-4))
        return float(metrics["loss"])

    return step


def eager_step(
    shape: str, batch: int, length: int, *, compiled: bool = False
) -> Callable[[], float]:
    """A plain PyTorch loop: model, clip_grad_norm_, AdamW."""
    import torch

    model, ids = model_and_batch(shape, batch, length)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4)
    forward = torch.compile(model) if compiled else model

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        loss = forward(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        return float(loss)

    return step


def _supply_removed_overloads(torch: Any) -> None:
    """torchax 0.0.13 names overloads for named dims, which torch 2.13 no longer has; nothing calls
    them.
    """
    packet = torch._ops.OpOverloadPacket
    original = packet.__getattr__

    def lookup(self: Any, key: str) -> Any:
        try:
            return original(self, key)
        except AttributeError:
            if "imname" in key or "names" in key:
                return self
            raise

    packet.__getattr__ = lookup


def torchax_step(shape: str, batch: int, length: int) -> Callable[[], float]:
    """torchax's functional step inside its own jax_jit, with optax, as its LoRA example splits
    weights.
    """
    import torch

    _supply_removed_overloads(torch)
    import jax
    import optax
    import torchax
    from torchax import interop

    model, ids = model_and_batch(shape, batch, length)
    weights = {k: v.detach() for k, v in model.named_parameters() if v.requires_grad}
    rest = {k: v.detach() for k, v in model.named_parameters() if not v.requires_grad}
    rest |= {k: v.detach() for k, v in model.named_buffers()}
    env = torchax.default_env()
    with env:
        weights = {k: v.to("jax") for k, v in weights.items()}
        rest, tokens = {k: v.to("jax") for k, v in rest.items()}, ids.to("jax")
        optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-4))
        state = interop.call_jax(optimizer.init, weights)

        def loss_of(weights: Any, rest: Any, tokens: Any) -> Any:
            out = torch.func.functional_call(
                model,
                {**weights, **rest},
                (),
                {"input_ids": tokens, "labels": tokens, "use_cache": False},
            )
            return out.loss

        gradient = interop.jax_value_and_grad(loss_of)

        def full_step(weights: Any, rest: Any, state: Any, tokens: Any) -> Any:
            loss, grads = gradient(weights, rest, tokens)
            updates, state = interop.call_jax(optimizer.update, grads, state, weights)
            weights = interop.call_jax(optax.apply_updates, weights, updates)
            return loss, weights, state

        compiled = interop.jax_jit(full_step, kwargs_for_jax_jit={"donate_argnums": (0, 2)})
    held = {"weights": weights, "state": state}

    def step() -> float:
        with env:
            loss, held["weights"], held["state"] = compiled(
                held["weights"], rest, held["state"], tokens
            )
            return float(jax.block_until_ready(loss.jax()))

    return step


CONTENDERS = {
    "headrace": headrace_step,
    "headrace-full": lambda *a: headrace_step(*a, remat="full"),
    "eager": eager_step,
    "eager+pages": eager_step,
    "torch.compile": lambda *a: eager_step(*a, compiled=True),
    "torch.compile+pages": lambda *a: eager_step(*a, compiled=True),
    "torchax": torchax_step,
}


def serve(name: str, shape: str, batch: int, length: int) -> None:
    """Worker: build, warm up, then run as many steps as each input line asks for."""
    start = time.perf_counter()
    step = CONTENDERS[name](shape, batch, length)
    loss = step()
    ready = time.perf_counter() - start
    step()
    print(json.dumps({"ready": ready, "loss": loss}), flush=True)
    for line in sys.stdin:
        seconds = []
        for _ in range(int(line)):
            begin = time.perf_counter()
            step()
            seconds.append(time.perf_counter() - begin)
        print(json.dumps(seconds), flush=True)


def launch(name: str, python: str, options: argparse.Namespace) -> subprocess.Popen[str]:
    """A worker process of one contender."""
    command = [python, __file__, "--serve", name, "--shape", options.shape]
    command += ["--batch", str(options.batch), "--length", str(options.length)]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1"}
    if name.startswith("headrace") or name.endswith("+pages"):
        environment["GLIBC_TUNABLES"] = "glibc.malloc.hugetlb=1"
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE if not options.verbose else None,
        text=True,
        env=environment,
    )


def answer(process: subprocess.Popen[str]) -> Any:
    """The worker's next JSON line; None when it died."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(("{", "[")):
            return json.loads(line)
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--serve")
    parser.add_argument("--shape", default="45m", choices=SHAPES)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=2, help="steps a turn")
    parser.add_argument("--only", nargs="*", default=list(CONTENDERS))
    parser.add_argument("--torchax-python", default=sys.executable)
    parser.add_argument("--verbose", action="store_true")
    options = parser.parse_args()
    if options.serve:
        serve(options.serve, options.shape, options.batch, options.length)
        return
    workers: dict[str, Any] = {}
    for name in options.only:
        python = options.torchax_python if name == "torchax" else sys.executable
        process = launch(name, python, options)
        ready = answer(process)
        if ready is None:
            reason = (process.stderr.read() if process.stderr else "").strip().splitlines()[-1:]
            print(f"{name}: cannot run here: {' '.join(reason)[:200]}")
            continue
        print(
            f"{name}: first step after {ready['ready']:.1f} s, loss {ready['loss']:.4f}", flush=True
        )
        workers[name] = process
    times: dict[str, list[float]] = {name: [] for name in workers}
    for _ in range(options.rounds):
        for name, process in workers.items():
            process.stdin.write(f"{options.steps}\n")
            process.stdin.flush()
            times[name].append(statistics.mean(answer(process)))
    for process in workers.values():
        process.stdin.close()
        process.wait()
    report(times, options)


def report(times: dict[str, list[float]], options: argparse.Namespace) -> None:
    tokens = options.batch * options.length
    print(
        f"\nLlama {options.shape}, LoRA r {RANK} all-linear, {options.batch} x {options.length}, "
        f"float32"
    )
    print(f"{'':20}{'s/step median':>14}{'min':>8}{'max':>8}{'tokens/s':>10}{'headrace is':>14}")
    base = times.get("headrace")
    for name, values in times.items():
        ratio = ""
        if base and name != "headrace":
            paired = [v / b for v, b in zip(values, base, strict=True)]
            ratio = f"{statistics.median(paired):.2f}x faster"
        median = statistics.median(values)
        row = f"{name:20}{median:14.3f}{min(values):8.3f}{max(values):8.3f}"
        print(f"{row}{tokens / median:10.0f}{ratio:>14}")


if __name__ == "__main__":
    main()
