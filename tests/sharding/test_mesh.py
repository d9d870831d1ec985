"""What does not fit is said: sizes, devices, heads, experts, batches, overrides."""

from __future__ import annotations

import jax
import pytest
import torch
import transformers as tf

from headrace.bridge.module import JaxModule, to_jax
from headrace.errors import ConfigError
from headrace.sharding import MeshConfig, batch_spec, make_mesh, plan_params
from headrace.sharding.place import check_batch
from headrace.weights import meta_model

TINY = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip


@pytest.fixture(scope="module")
def llama() -> JaxModule:
    ids = torch.ones(2, 8, dtype=torch.int64)
    return to_jax(meta_model(tf.LlamaConfig(**TINY)).train(), {"input_ids": ids})


def test_a_mesh_is_read_from_mappings_words_and_auto() -> None:
    assert MeshConfig.parse({"fsdp": 4, "tensor": 2}, 8).sizes == {
        "data": 1, "fsdp": 4, "tensor": 2, "context": 1, "expert": 1,
    }  # fmt: skip
    assert MeshConfig.parse("fsdp=4, tensor=2", 8) == MeshConfig(fsdp=4, tensor=2)
    assert MeshConfig.parse("auto", 8) == MeshConfig(fsdp=8)
    assert MeshConfig.parse(None, 8).size == 1
    assert MeshConfig(data=2, fsdp=3, expert=5, tensor=7, context=11).batch_size == 30


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ({"fsdp": 3}, "needs 3 devices, there are 8"),
        ({"tensor": 2, "fsdp": 2}, "With fsdp: 4 it fits"),
        ({"pipeline": 2}, "no axis pipeline"),
        ({"fsdp": 0}, "whole number"),
        ({"fsdp": True}, "whole number"),
        ("fsdp", "axis=size"),
    ],
)
def test_a_mesh_that_does_not_fit_is_an_error(value: object, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        MeshConfig.parse(value, 8)  # pyright: ignore[reportArgumentType]


def test_make_mesh_names_its_axes_and_counts_devices() -> None:
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    assert mesh.axis_names == ("data", "fsdp", "tensor", "context", "expert")
    assert batch_spec(mesh) == jax.sharding.PartitionSpec(None, None, None)
    with pytest.raises(ConfigError, match="needs 2 devices, there are 1"):
        make_mesh(MeshConfig(fsdp=2), jax.devices()[:1])


def test_batches_that_the_mesh_does_not_divide_are_an_error() -> None:
    mesh = jax.sharding.AbstractMesh((2, 2, 4), ("data", "fsdp", "context"))
    check_batch(mesh, (1, 8, 64))  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match=r"6 rows .* = 4.*30 tokens over context = 4"):
        check_batch(mesh, (1, 6, 30))  # pyright: ignore[reportArgumentType]


def test_heads_and_experts_that_are_not_divided_are_an_error(llama: JaxModule) -> None:
    with pytest.raises(ConfigError) as error:
        plan_params(llama, MeshConfig(tensor=3, expert=2))
    assert "tensor: 3 does not divide the 4 attention heads" in str(error.value)
    assert "has no experts" in str(error.value)


def test_overrides_win_and_all_that_do_not_fit_are_listed(llama: JaxModule) -> None:
    plans = plan_params(
        llama,
        MeshConfig(fsdp=2, tensor=2),
        {"*.q_proj.weight": [["fsdp", "tensor"], None], "model.embed*": "replicated"},
    )
    key = next(key for key in plans if "q_proj" in key)
    assert plans[key].spec == jax.sharding.PartitionSpec(None, ("fsdp", "tensor"), None)
    assert plans["model.embed_tokens.weight"].bytes_per_device == 96 * 32 * 4
    wrong = {
        "*.q_porj.weight": "replicated",
        "*.k_proj.weight": ["rows", None],
        "*.v_proj.weight": ["fsdp"],
        "*.o_proj.weight": ["fsdp", "fsdp"],
    }
    with pytest.raises(ConfigError) as error:
        plan_params(llama, MeshConfig(fsdp=2), wrong)
    text = str(error.value)
    for part in ("matches no parameter", "no axis rows", "one entry for each of 2", "used twice"):
        assert part in text
