"""`headrace shard MODEL --mesh fsdp=4,tensor=2`: where every parameter lies, and why.

Reads the configuration only; no weights, no devices.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from headrace.sharding import MeshConfig, ParamPlan


def shard(
    model: Annotated[str, typer.Argument(help="Model folder, config folder or hub id.")],
    mesh: Annotated[str, typer.Option(help="Axes and sizes: fsdp=4,tensor=2.")],
    task: Annotated[str, typer.Option(help="causal or sequence-classification.")] = "causal",
    lora_r: Annotated[int, typer.Option(help="Rank of an all-linear adapter; 0 for none.")] = 0,
    override: Annotated[
        list[str] | None,
        typer.Option(help="PATTERN=axes of every dim ('*.q_proj.weight=fsdp,-'), or replicated."),
    ] = None,
    dtype: Annotated[str, typer.Option(help="Dtype of the weights; auto is the model's.")] = "auto",
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run Python code that comes with the model.")
    ] = False,
) -> None:
    """Print the sharding plan of a model: spec and bytes a device of every parameter."""
    from headrace.sharding import MeshConfig
    from headrace.sharding.table import shard_table, shard_totals

    sizes = MeshConfig.sized(mesh)
    overrides = dict(_override(text) for text in override or [])
    plans = _plans(model, sizes, task, lora_r, overrides, dtype, trust_remote_code)
    typer.echo(shard_table(plans))
    typer.echo(shard_totals(plans, sizes))


def _plans(
    name: str,
    mesh: MeshConfig,
    task: str,
    lora_r: int,
    overrides: dict[str, Any],
    dtype: str,
    trust_remote_code: bool,
) -> dict[str, ParamPlan]:
    import torch

    from headrace.bridge.module import to_jax
    from headrace.sharding import plan_params
    from headrace.weights import meta_model

    model: Any = meta_model(name, task=task, dtype=dtype, trust_remote_code=trust_remote_code)
    if lora_r:
        from peft import LoraConfig

        from headrace.train.lora import apply_lora

        adapted, _ = apply_lora(model, LoraConfig(r=lora_r, target_modules="all-linear"))
        model = adapted.get_base_model()
    ids = torch.zeros(2, 16, dtype=torch.int64)
    inputs = {"input_ids": ids, "attention_mask": ids}
    if getattr(model.config, "is_encoder_decoder", False):
        inputs["decoder_input_ids"] = ids
    module = to_jax(model.train(), inputs)
    return plan_params(module, mesh, overrides)


def _override(text: str) -> tuple[str, Any]:
    from headrace.errors import ConfigError

    pattern, found, axes = text.rpartition("=")
    if not found or not pattern:
        raise ConfigError(f"--override {text!r} needs PATTERN=axes: '*.q_proj.weight=-,fsdp'")
    if axes == "replicated":
        return pattern, axes
    entries = [part.strip() for part in axes.split(",")]
    return pattern, [None if e in ("", "-", "null") else e.split("+") for e in entries]
