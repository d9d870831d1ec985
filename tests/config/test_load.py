"""YAML + flags -> ResolvedConfig: sources, aliases, casts, and one error that lists everything."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.config import ClassificationConfig, SFTConfig, TrainConfig, load_config, peft_config
from headrace.errors import ConfigError


def recipe(folder: Path, text: str) -> Path:
    path = folder / "recipe.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def problems(error: pytest.ExceptionInfo[ConfigError]) -> list[list[str]]:
    """The rows of the message as [key, source, text]."""
    rows = str(error.value).splitlines()[1:-1]
    return [row.split(None, 2) for row in rows]


def test_sources_name_the_line_the_flag_or_the_default(tmp_path: Path) -> None:
    path = recipe(tmp_path, "# a run\nmodel_name_or_path: tiny\n\nlearning_rate: 1e-3\nseed: 1\n")
    resolved = load_config(path, ["--seed", "7"])
    assert resolved.config.learning_rate == 1e-3
    assert resolved.config.seed == 7
    assert resolved.sources["model_name_or_path"] == "recipe.yaml:2"
    assert resolved.sources["learning_rate"] == "recipe.yaml:4"
    assert resolved.sources["seed"] == "flag"
    assert resolved.sources["max_steps"] == "default"
    assert set(resolved.sources) == set(TrainConfig.model_fields)
    assert resolved.notes == ()


@pytest.mark.parametrize(
    ("text", "name", "value"),
    [
        ("learning_rate: 2e-5", "learning_rate", 2e-5),  # YAML 1.1 reads this as text
        ("learning_rate: '2e-5'", "learning_rate", 2e-5),
        ("max_steps: 1e3", "max_steps", 1000),
        ("packing: 'False'", "packing", False),
        ("use_peft: yes", "use_peft", True),
        ("eval_strategy: no", "eval_strategy", "no"),  # YAML reads no as false
        ("save_total_limit: none", "save_total_limit", None),
        ("save_total_limit: null", "save_total_limit", None),
        ("report_to: none", "report_to", ()),
        ("report_to: tensorboard", "report_to", ("tensorboard",)),
        ("report_to: [wandb, trackio]", "report_to", ("wandb", "trackio")),
        ("test_split_size: 0.1", "test_split_size", 0.1),
        ("test_split_size: 200", "test_split_size", 200),
        ("resume_from_checkpoint: true", "resume_from_checkpoint", True),
        ("resume_from_checkpoint: out/checkpoint-3", "resume_from_checkpoint", "out/checkpoint-3"),
        ("optim: adamw_torch_fused", "optim", "adamw"),
        ("lr_scheduler_kwargs: {num_cycles: 2}", "lr_scheduler_kwargs", {"num_cycles": 2}),
    ],
)
def test_values_are_cast_by_field_type(tmp_path: Path, text: str, name: str, value: object) -> None:
    config = load_config(recipe(tmp_path, text)).config
    assert getattr(config, name) == value
    assert type(getattr(config, name)) is type(value)


@pytest.mark.parametrize(
    ("words", "name", "value"),
    [
        (["--learning-rate", "1e-4"], "learning_rate", 1e-4),
        (["--packing=false"], "packing", False),
        (["--no-packing"], "packing", False),
        (["--eval_on_start", "--eval_strategy", "epoch"], "eval_on_start", True),
        (["seed=3"], "seed", 3),
        (["--max_steps", "-1"], "max_steps", -1),
        (["--length_buckets", "64,128", "packing=false"], "length_buckets", (64, 128)),
        (["--length_buckets=[64, 128]", "packing=false"], "length_buckets", (64, 128)),
        (
            ["lora_target_modules=q_proj,v_proj", "use_peft=1"],
            "lora_target_modules",
            ("q_proj", "v_proj"),
        ),
        (["lora_target_modules=.*q_proj", "use_peft=1"], "lora_target_modules", ".*q_proj"),
        (['lr_scheduler_kwargs={"num_cycles": 2}'], "lr_scheduler_kwargs", {"num_cycles": 2}),
    ],
)
def test_flags_as_typed(words: list[str], name: str, value: object) -> None:
    assert getattr(load_config(None, words).config, name) == value


def test_a_word_that_is_no_flag_is_an_error() -> None:
    with pytest.raises(ConfigError, match="needs --name value or name=value"):
        load_config(None, ["recipe2.yaml"])


@pytest.mark.parametrize(
    ("text", "name", "value"),
    [
        ("max_seq_length: 512", "max_length", 512),
        ("sequence_len: 512", "max_length", 512),
        ("cutoff_len: 512", "max_length", 512),
        ("micro_batch_size: 4", "per_device_train_batch_size", 4),
        ("batch_size: 4", "per_device_train_batch_size", 4),
        ("num_epochs: 2", "num_train_epochs", 2.0),
        ("epochs: 2", "num_train_epochs", 2.0),
        ("sample_packing: false", "packing", False),
        ("train_on_inputs: true", "completion_only_loss", False),
        ("train_on_prompt: true", "assistant_only_loss", False),
        ("val_set_size: 0.05", "test_split_size", 0.05),
        ("val_size: 0.05", "test_split_size", 0.05),
        ("base_model: tiny", "model_name_or_path", "tiny"),
        ("evaluation_strategy: epoch", "eval_strategy", "epoch"),
        ("tokenizer: tok", "processing_class", "tok"),
        ("torch_dtype: float32", "dtype", "float32"),
        ("bf16: true", "dtype", "bfloat16"),
        ("gradient_checkpointing: true", "activation_checkpointing", "full"),
        ("gradient_checkpointing: false", "activation_checkpointing", "none"),
        ("adapter: lora", "use_peft", True),
        ("packing_strategy: bfd_split", "over_length", "split"),
    ],
)
def test_names_of_other_tools_are_taken_with_one_note(
    tmp_path: Path, text: str, name: str, value: object
) -> None:
    resolved = load_config(recipe(tmp_path, text))
    assert getattr(resolved.config, name) == value
    assert resolved.sources[name] == "recipe.yaml:1"
    assert len(resolved.notes) == 1
    assert name in resolved.notes[0]


@pytest.mark.parametrize("text", ["lora_rank: 4", "lora_target: all", "lora_target_linear: true"])
def test_lora_names_of_other_tools(tmp_path: Path, text: str) -> None:
    resolved = load_config(recipe(tmp_path, f"use_peft: true\n{text}"))
    assert len(resolved.notes) == 1
    assert resolved.config.lora_r == (4 if "rank" in text else 16)
    assert resolved.config.lora_target_modules == "all-linear"


def test_a_setting_without_effect_is_reported(tmp_path: Path) -> None:
    resolved = load_config(recipe(tmp_path, "attn_implementation: flash_attention_2"))
    assert resolved.notes[0].startswith("attn_implementation has no effect: ")


def test_all_problems_come_in_one_error(tmp_path: Path) -> None:
    path = recipe(
        tmp_path,
        "learning_rte: 1e-3\nlora_r: sixteen\nuse_peft: true\nwarmup_ratio: 2\nzzzzzz: 1\n"
        "deepspeed: zero3.json\n",
    )
    with pytest.raises(ConfigError) as error:
        load_config(path, {"optim": "galore_adamw", "task": "translation"})
    assert str(error.value).startswith("7 settings are wrong.")
    rows = {key: (source, text) for key, source, text in problems(error)}
    assert rows["learning_rte"] == ("recipe.yaml:1", "unknown; did you mean learning_rate?")
    assert rows["lora_r"][0] == "recipe.yaml:2"
    assert "'sixteen'" in rows["lora_r"][1]
    assert rows["zzzzzz"] == ("recipe.yaml:5", "unknown")
    assert "XLA" in rows["deepspeed"][1]
    assert rows["optim"] == (
        "flag",
        "'galore_adamw' is given; needs 'adamw', 'adafactor', 'sgd' or 'lion'",
    )
    assert set(rows) == {
        "learning_rte", "lora_r", "warmup_ratio", "zzzzzz", "deepspeed", "optim", "task",
    }  # fmt: skip


def test_one_setting_given_by_two_names_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="sets max_length, which max_length sets too"):
        load_config(recipe(tmp_path, "max_length: 4\nmax_seq_length: 8"))
    with pytest.raises(ConfigError, match="sets max_length, which max_length sets too"):
        load_config(recipe(tmp_path, "max_length: 4\nmax_length: 8"))


def test_a_flag_overrides_the_file_under_any_name(tmp_path: Path) -> None:
    resolved = load_config(recipe(tmp_path, "max_length: 4"), ["--max_seq_length", "8"])
    assert resolved.config.max_length == 8
    assert resolved.sources["max_length"] == "flag"


@pytest.mark.parametrize("text", ["- a\n- b", "just words", "a: [1", "a: !!python/object:x {}"])
def test_a_file_that_is_not_flat_yaml_is_a_config_error(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match=r"recipe\.yaml"):
        load_config(recipe(tmp_path, text))


def test_missing_file_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(tmp_path / "none.yaml")


def test_empty_file_gives_the_defaults(tmp_path: Path) -> None:
    assert load_config(recipe(tmp_path, "")).config == TrainConfig()


def test_defaults_follow_task_and_method() -> None:
    assert TrainConfig().learning_rate == 2e-5
    assert TrainConfig(use_peft=True).learning_rate == 2e-4
    assert TrainConfig(use_peft=True, learning_rate=1e-3).learning_rate == 1e-3
    assert (SFTConfig().packing, ClassificationConfig().packing) == (True, False)
    assert SFTConfig(packing=False).eval_packing is False
    assert ClassificationConfig().task == "sequence-classification"


def test_python_settings_take_other_names_with_a_warning_and_refuse_unknown_ones() -> None:
    with pytest.warns(UserWarning, match="max_seq_length is called max_length here"):
        assert SFTConfig(max_seq_length=64).max_length == 64  # pyright: ignore[reportCallIssue]
    with pytest.raises(ConfigError, match="did you mean max_length"):
        SFTConfig(max_lenght=64)  # pyright: ignore[reportCallIssue]


def test_replace_keeps_what_was_given_and_derives_the_rest_again() -> None:
    config = TrainConfig(seed=3).replace(use_peft=True)
    assert (config.seed, config.learning_rate) == (3, 2e-4)
    with pytest.raises(ConfigError):
        config.replace(seed=-1)


def test_config_is_frozen_and_survives_json() -> None:
    config = SFTConfig(use_peft=True, lora_target_modules=("q_proj",))
    with pytest.raises(ValueError, match="frozen"):
        config.seed = 1  # pyright: ignore[reportAttributeAccessIssue]
    assert SFTConfig.model_validate_json(config.model_dump_json()) == config


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"lora_r": 4}, "lora_r"),
        ({"use_dora": True}, "use_dora"),
        ({"task": "sequence-classification", "packing": True}, "packing"),
        ({"task": "sequence-classification", "over_length": "split"}, "over_length"),
        ({"label_column": "y"}, "label_column"),
        ({"packing": False, "length_buckets": [64, 32]}, "length_buckets"),
        ({"packing": False, "length_buckets": [32, 64], "max_length": 128}, "length_buckets"),
        ({"length_buckets": [32, 64]}, "length_buckets"),
        ({"max_steps": 0}, "max_steps"),
        ({"warmup_steps": 10, "warmup_ratio": 0.1}, "warmup_ratio"),
        ({"warmup_steps": 1.5}, "warmup_steps"),
        ({"eval_dataset_name": "a.csv", "test_split_size": 0.1}, "test_split_size"),
        ({"test_split_size": 2.5}, "test_split_size"),
        ({"eval_on_start": True}, "eval_on_start"),
        ({"load_best_model_at_end": True}, "load_best_model_at_end"),
        (
            {"load_best_model_at_end": True, "eval_strategy": "epoch"},
            "load_best_model_at_end",
        ),
        (
            {"load_best_model_at_end": True, "eval_strategy": "steps", "save_steps": 700},
            "save_steps",
        ),
        ({"metric_for_best_model": "accuracy"}, "metric_for_best_model"),
        ({"hub_model_id": "me/x"}, "hub_model_id"),
        ({"quantization": "nf4", "use_peft": True, "use_dora": True}, "use_dora"),
    ],
)
def test_contradictions_are_found_early(settings: dict[str, object], field: str) -> None:
    with pytest.raises(ConfigError) as error:
        TrainConfig(**settings)
    assert field in [row[0] for row in problems(error)]


@pytest.mark.parametrize(
    ("settings", "steps"),
    [({}, 0), ({"warmup_steps": 7}, 7), ({"warmup_steps": 0.1}, 11), ({"warmup_ratio": 0.1}, 11)],
)
def test_warmup_is_a_count_or_a_share(settings: dict[str, float], steps: int) -> None:
    assert TrainConfig(**settings).num_warmup_steps(101) == steps


def test_peft_config_is_pefts_own() -> None:
    assert peft_config(TrainConfig()) is None
    lora = peft_config(TrainConfig(use_peft=True, lora_r=4, lora_target_modules=("q_proj",)))
    assert lora is not None
    assert (lora.r, lora.lora_alpha, lora.target_modules) == (4, 32, {"q_proj"})
    assert lora.task_type == "CAUSAL_LM"
    classifier = peft_config(ClassificationConfig(use_peft=True))
    assert classifier is not None
    assert (classifier.task_type, classifier.target_modules) == ("SEQ_CLS", "all-linear")


def test_quantised_bases_by_the_names_of_others() -> None:
    with pytest.warns(UserWarning, match="load_in_4bit"):
        four = TrainConfig(use_peft=True, load_in_4bit=True)
    with pytest.warns(UserWarning, match="quantization_bit"):
        eight = TrainConfig(use_peft=True, quantization_bit=8)
    assert (four.quantization, eight.quantization) == ("nf4", "int8")
    with pytest.raises(ConfigError, match="'fp4' is not supported; needs nf4"):
        TrainConfig(use_peft=True, bnb_4bit_quant_type="fp4")
