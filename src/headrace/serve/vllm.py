"""Hand-over to vLLM on TPU: what it needs, the exact command, and whether it answers alike.

vLLM runs its own models in an environment that cannot be shared with this one, so nothing of it is
imported: it gets a merged checkpoint, is started by the printed command (pip or container), and is
then asked over HTTP.

Knows: checkpoint files, command lines. Does not know: slices (`headrace.plan`), vLLM's code.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.errors import ConfigError, ServeError

IMAGE = "vllm/vllm-tpu:latest"


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What vLLM is started with. tensor: chips of one copy of the model; chips: of the slice;
    memory_share: of a chip's memory, for weights and cache. fits: whether the context has room.
    """

    slice_name: str
    chips: int
    tensor: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    memory_share: float
    fits: bool


@dataclass(frozen=True, kw_only=True)
class Handover:
    """A folder that vLLM can load, and how to start it."""

    folder: Path
    command: tuple[str, ...]
    container: tuple[str, ...]
    environment: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]

    def __str__(self) -> str:
        env = " ".join(f"{k}={v}" for k, v in self.environment)
        lines = [
            "# In an environment of its own (Python 3.12): uv pip install vllm-tpu",
            f"{env} {shlex.join(self.command)}".strip(),
            "",
            "# Or in a container:",
            shlex.join(self.container),
        ]
        return "\n".join([*lines, "", *(f"# {note}" for note in self.notes)])


def prepare(
    model: str | Path,
    output_dir: str | Path | None,
    *,
    sizes: Sizes,
    base: str | None = None,
    port: int = 8000,
) -> Handover:
    """Merge an adapter if `model` is one, check the folder, and write the command.

    output_dir: where a merged checkpoint goes; needed for adapters. Raises ConfigError for a folder
    that vLLM would refuse or a slice that is too small, all problems at once.
    """
    from headrace.weights import find_adapter, merge_adapter

    folder = Path(model)
    if find_adapter(folder) is not None:
        if output_dir is None:
            raise ConfigError(f"{model} is an adapter; --output says where the merged model goes")
        folder = merge_adapter(folder, output_dir, base=base).path
    problems = _check_folder(folder)
    if not sizes.fits:
        problems.append(
            f"weights and {sizes.max_model_len} tokens do not fit {sizes.slice_name}; take a "
            "larger slice or a smaller --max-model-len"
        )
    if problems:
        raise ConfigError(f"vLLM cannot serve {folder}:\n  " + "\n  ".join(problems))
    options = [
        "--tensor-parallel-size",
        str(sizes.tensor),
        "--max-model-len",
        str(sizes.max_model_len),
        "--max-num-batched-tokens",
        str(sizes.max_num_batched_tokens),
        "--max-num-seqs",
        str(sizes.max_num_seqs),
        "--gpu-memory-utilization",
        str(sizes.memory_share),
        "--port",
        str(port),
    ]
    env = (("VLLM_XLA_CACHE_PATH", "~/.cache/vllm-xla"), ("VLLM_ENGINE_READY_TIMEOUT_S", "3600"))
    place = str(folder.resolve())
    container = ["docker", "run", "--rm", "--privileged", "--net=host", "--shm-size", "150gb"]
    container += ["-v", f"{place}:/model:ro", "-e", "VLLM_ENGINE_READY_TIMEOUT_S=3600"]
    container += ["--entrypoint", "vllm", IMAGE, "serve", "/model", *options]
    return Handover(
        folder=folder,
        command=("vllm", "serve", place, *options),
        container=tuple(container),
        environment=env,
        notes=(
            f"one copy of the model on {sizes.tensor} of the {sizes.chips} chips of "
            f"{sizes.slice_name}; start it {sizes.chips // sizes.tensor} times to use all",
            "vLLM on TPU refuses seed with temperature > 0, and takes but does not apply min_p,",
            "penalties and logit_bias; headrace serve applies them",
            f"then: headrace serve {shlex.quote(str(folder))} --engine vllm --check "
            f"http://HOST:{port}",
        ),
    )


def _check_folder(folder: Path) -> list[str]:
    problems: list[str] = []
    if not (folder / "config.json").is_file():
        raise ConfigError(f"{folder} has no config.json; give a model or adapter folder")
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    if len(config.get("architectures") or []) != 1:
        problems.append("config.json must name exactly one class in architectures")
    if not list(folder.glob("*.safetensors")):
        problems.append("it holds no safetensors files")
    if not (folder / "tokenizer_config.json").is_file():
        problems.append("it holds no tokenizer")
    return problems


@dataclass(frozen=True, kw_only=True)
class Parity:
    """How a remote server's log-probabilities of our prompts differ from the model's."""

    num_prompts: int
    num_tokens: int
    mean_difference: float
    largest_difference: float
    greedy_agreement: float

    def __str__(self) -> str:
        return (
            f"{self.num_prompts} prompts, {self.num_tokens} tokens: log-probabilities differ by "
            f"{self.mean_difference:.2e} on average, {self.largest_difference:.2e} at most; "
            f"first greedy token equal in {self.greedy_agreement:.0%}"
        )


def check_parity(
    engine: Any,
    url: str,
    prompts: Sequence[str],
    *,
    adapter: str | None = None,
    model: str | None = None,
    api_key: str | None = None,
) -> Parity:
    """Compare log-probabilities of prompts between our engine and an OpenAI-style server.

    Raises ServeError when the server cannot be reached or gives no log-probabilities.
    """
    import httpx

    from headrace.serve.params import SamplingParams

    ids = [engine.encode(p) for p in prompts]
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
    ours = [a[0] for a in engine.generate(ids, params, adapter=adapter)]
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    base = url.rstrip("/").removesuffix("/v1")
    differences: list[float] = []
    agree = 0
    with httpx.Client(base_url=base, headers=headers, timeout=300) as client:
        try:
            name = model or client.get("/v1/models").raise_for_status().json()["data"][0]["id"]
            for prompt, mine in zip(ids, ours, strict=True):
                body = {"model": name, "prompt": prompt, "max_tokens": 1, "temperature": 0}
                body |= {"echo": True, "logprobs": 1}
                answer = client.post("/v1/completions", json=body).raise_for_status().json()
                theirs = answer["choices"][0]["logprobs"]["token_logprobs"]
                scores = mine.prompt_logprobs or ()
                pairs = zip(scores[1:], theirs[1 : len(prompt)], strict=True)
                differences += [abs(a.logprob - b) for a, b in pairs if a is not None]
                own, other = answer["choices"][0]["text"], mine.text
                agree += own.endswith(other) if other else True
        except (httpx.HTTPError, KeyError, IndexError, TypeError, ValueError) as error:
            raise ServeError(f"{url} gave no log-probabilities to compare: {error}") from error
    if not differences:
        raise ServeError("no prompt has two tokens or more; nothing was compared")
    return Parity(
        num_prompts=len(prompts),
        num_tokens=len(differences),
        mean_difference=sum(differences) / len(differences),
        largest_difference=max(differences),
        greedy_agreement=agree / len(prompts),
    )
