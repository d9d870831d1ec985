"""Plans of a small model: analytic ones anywhere, compiled ones by the real TPU compiler."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, BertConfig, Gemma3TextConfig, LlamaConfig

from headrace.cli.app import run
from headrace.config import TrainConfig, load_config
from headrace.errors import ConfigError
from headrace.plan import planner, program
from headrace.plan.advice import smallest_changes
from headrace.plan.cache import request_key
from headrace.plan.candidate import Candidate, check_mesh
from headrace.plan.compiled import compile_candidate
from headrace.plan.hardware import parse_slice
from headrace.plan.measure import measure_dataset
from headrace.plan.planner import analytic_plan, default_candidate, make_plan, read_subject
from headrace.plan.search import parse_budget, parse_deadline, search
from headrace.plan.shape import model_shape, read_model_config
from headrace.plan.topology import compiler_obstacle, without_compilation_cache
from headrace.train.memory import refused_bytes

needs_compiler = pytest.mark.skipif(
    compiler_obstacle() is not None, reason=str(compiler_obstacle())
)
DATA = {"dataset_rows": 10_000, "dataset_mean_tokens": 400}


def llama(folder: Path) -> str:
    config = LlamaConfig(
        vocab_size=1024, hidden_size=256, intermediate_size=512, num_hidden_layers=5,
        num_attention_heads=4, num_key_value_heads=2, head_dim=64, max_position_embeddings=4096,
        dtype="bfloat16",
    )  # fmt: skip
    config.save_pretrained(folder)
    return str(folder)


def recipe(model: str, **changes) -> TrainConfig:
    settings = {
        "use_peft": True, "max_length": 512, "num_train_epochs": 1.0,
        "per_device_train_batch_size": 2, "plan": DATA,
    }  # fmt: skip
    if changes.get("use_peft", True):
        settings["lora_dropout"] = 0.0
    return TrainConfig(model_name_or_path=model, **settings | changes)


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(vocab_size=500, hidden_size=64, intermediate_size=96, num_hidden_layers=3,
                    num_attention_heads=4, num_key_value_heads=2),
        Gemma3TextConfig(vocab_size=500, hidden_size=64, intermediate_size=96, num_hidden_layers=6,
                         num_attention_heads=4, num_key_value_heads=2, head_dim=32),
        BertConfig(vocab_size=500, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
                   num_attention_heads=4),
    ],
    ids=lambda config: config.model_type,
)  # fmt: skip
def test_sizes_from_config_json_are_those_of_the_model(tmp_path, config):
    config.save_pretrained(tmp_path)
    shape = model_shape(read_model_config(str(tmp_path)))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
    in_layers = sum(p.numel() for n, p in model.named_parameters() if ".layer" in n)
    assert shape.in_layers == pytest.approx(in_layers, rel=0.03)  # q and k norms are left out


def test_missing_model_files_are_named(tmp_path):
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        read_model_config(str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "odd"}')
    with pytest.raises(ConfigError, match="hidden_size, num_hidden_layers"):
        model_shape(read_model_config(str(tmp_path)), "odd")


def test_a_plan_without_compiler_has_every_number(tmp_path):
    plan = make_plan(recipe(llama(tmp_path)), "v5e-4", compile=False)
    found = plan.as_json()
    for name in (
        "fits", "hbm_bytes_per_chip", "memory", "step_seconds", "real_tokens_per_second",
        "padded_tokens_per_second", "mfu", "hours", "usd", "usd_per_million_tokens",
        "compile_seconds",
    ):  # fmt: skip
        assert name in found
    assert found["compiled"] is False
    assert found["fits"] is True
    steps = 10_000 * 400 / (0.75 * 4 * 2 * 512)  # rows this long pack badly, and it is said so
    assert plan.workload.share == 0.75
    assert found["steps"] == pytest.approx(steps, abs=1)
    assert found["hours"] == pytest.approx(found["steps"] * found["step_seconds"] / 3600)
    assert found["usd"] == pytest.approx(4 * 1.20 * found["hours"])
    per_million = 4.80 / 3600 / found["real_tokens_per_second"] * 1e6
    assert found["usd_per_million_tokens"] == pytest.approx(per_million)


def test_no_price_and_no_data_stay_unknown(tmp_path):
    found = make_plan(recipe(llama(tmp_path), plan={}), "v7x-8", compile=False).as_json()
    assert found["usd"] is None
    assert found["hours"] is None
    assert found["usd_per_million_tokens"] is None


def test_settings_are_taken_back_by_the_configuration(tmp_path):
    config = recipe(llama(tmp_path))
    settings = make_plan(config, "v5e-8", compile=False).settings()
    again = config.replace(**settings)
    assert again.mesh == {"data": 8}  # it fits one chip
    assert default_candidate(read_subject(again), "v5e-8").as_json() == (
        default_candidate(read_subject(config), "v5e-8").as_json()
    )


def test_what_does_not_fit_says_what_would(tmp_path):
    config = recipe(
        llama(tmp_path), use_peft=False, per_device_train_batch_size=4096, max_length=4096,
        activation_checkpointing="none",
    )  # fmt: skip
    plan = make_plan(config, "v5e-1", compile=False)
    assert not plan.fits
    assert plan.changes == tuple(smallest_changes(plan))
    assert all(c.hbm_bytes <= c.candidate.hardware.chip.hbm_bytes for c in plan.changes)
    assert plan.changes[0].candidate.slice_name == "v5e-1"  # not a larger slice at once


def test_a_mesh_that_does_not_match_the_slice():
    with pytest.raises(ConfigError, match=r"needs 6 devices, v5e-8 has 8.*fsdp: 4 would fit"):
        check_mesh({"fsdp": 3, "tensor": 2}, parse_slice("v5e-8"))
    with pytest.raises(ConfigError, match="'pipeline'"):
        check_mesh({"pipeline": 8}, parse_slice("v5e-8"))


def test_wrong_plan_settings_are_listed_together(tmp_path):
    config = recipe(llama(tmp_path), plan={"rows": 3, "supervised_share": 2})
    with pytest.raises(ConfigError, match=r"(?s)plan\.rows is not known.*supervised_share: 2"):
        make_plan(config, "v5e-4", compile=False)


def test_search_orders_by_money_or_time(tmp_path):
    subject = read_subject(recipe(llama(tmp_path)))
    names = ["v5e-1", "v5e-4", "v5p-8", "h100-1", "a100-1"]
    cheap = search(subject, slices=names, finalists=0)
    fast = search(subject, slices=names, finalists=0, objective="time")
    assert len(cheap.plans) == len(names)
    money = [plan.money_key for plan in cheap.plans]
    times = [plan.time_key for plan in fast.plans]
    assert money == sorted(money)
    assert times == sorted(times)
    assert cheap.plans[-1].usd() is None  # no price is known for the A100, so it is last
    assert fast.plans[0] in fast.pareto
    limited = search(subject, slices=names, finalists=0, budget=1e-9)
    assert "nothing keeps within" in limited.notes[0]


def test_budgets_and_deadlines():
    assert parse_budget("20usd") == parse_budget("$20") == 20
    assert parse_deadline("90m") == 1.5
    assert parse_deadline("2d") == 48
    with pytest.raises(ConfigError, match="3h, 90m or 2d"):
        parse_deadline("soon")


def test_a_model_for_no_slice(tmp_path):
    config = LlamaConfig(hidden_size=65536, intermediate_size=2**18, num_hidden_layers=128,
                         num_attention_heads=64)  # fmt: skip
    config.save_pretrained(tmp_path)
    subject = read_subject(recipe(str(tmp_path), use_peft=False))
    with pytest.raises(ConfigError, match=r"fits none of the 2 slices.*use_peft"):
        search(subject, slices=["v5e-1", "v5e-4"], finalists=0)


def test_refusals_of_the_compiler_are_read():
    text = (
        "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO "
        "temporaries (150.12G) exceeds available HBM (95.74G)."
    )
    assert refused_bytes(text) == pytest.approx(150.12 * 2**30, rel=1e-6)
    assert refused_bytes("INTERNAL: something else") is None


def test_requests_differ_where_programs_do(tmp_path):
    request = {"model_config": {"a": 1}, "config": {"lora_r": 8}}
    key = request_key(request, {"length": 1})
    assert key == request_key(
        {**request, "config": {"lora_r": 8, "output_dir": "x"}}, {"length": 1}
    )
    assert key != request_key(request, {"length": 2})
    assert key != request_key({**request, "config": {"lora_r": 16}}, {"length": 1})


@needs_compiler
def test_a_stretched_capture_lowers_to_the_same_program(tmp_path, monkeypatch):
    config = recipe(llama(tmp_path))
    candidate = Candidate(slice_name="v5e-4", mesh={"fsdp": 4}, length=256)
    stretched = program.capture_model(config)
    text = program.lower_step(stretched, candidate).lowered.as_text()
    monkeypatch.setattr(program, "_repeats", lambda text: (0, 1))
    full = program.capture_model(config)
    assert full.num_params == stretched.num_params
    # the same but for the names of stacked weights, which say how many were captured
    expected = program.lower_step(full, candidate).lowered.as_text()
    assert text.replace("layers.[0:3]", "layers.[0:5]") == expected


@needs_compiler
def test_compiled_memory_is_the_compilers_own(tmp_path):
    config = recipe(llama(tmp_path), lora_target_modules=".*q_proj")
    captured = program.capture_model(config)
    candidate = Candidate(slice_name="v5e-1", batch_size=8, length=64)
    with without_compilation_cache():
        compiled = program.lower_step(captured, candidate).lowered.compile()
    stats = compiled.memory_analysis()
    report = compile_candidate(captured, candidate)
    total = (
        stats.argument_size_in_bytes
        + stats.output_size_in_bytes
        - stats.alias_size_in_bytes
        + stats.temp_size_in_bytes
        + stats.generated_code_size_in_bytes
    )
    assert report["fits"]
    assert report["hbm_bytes_per_chip"] == pytest.approx(total, rel=0.01)
    trained = captured.num_trainable
    assert report["memory"]["trained weights (float32)"] == 4 * trained
    assert report["memory"]["optimizer"] == pytest.approx(8 * trained, rel=0.001)
    assert report["seconds"] > report["device_flops"] / 197e12


@needs_compiler
def test_an_evaluation_is_a_program_of_its_own(tmp_path):
    """Forward only, on a mesh: its FLOPs are the formula's, nothing of the optimizer is there."""
    config = recipe(llama(tmp_path), lora_target_modules=".*q_proj", mesh={"fsdp": 4})
    subject = read_subject(config)
    candidate = default_candidate(subject, "v5e-4", "evaluate")
    assert (candidate.rows, candidate.accumulation) == (32, 1)
    report = compile_candidate(program.capture_model(config), candidate)
    plan = analytic_plan(subject, candidate)
    tokens = candidate.device_tokens
    assert report["parts"]["loss head"]["flops"] == 2 * tokens * 1024 * 256
    matrices = sum(kind.count * kind.used for kind in subject.shape.layers)
    assert report["parts"]["matmuls, forward"]["flops"] == pytest.approx(
        2 * tokens * (matrices + subject.training.adapter), rel=0.02
    )
    assert "optimizer" not in report["memory"]
    assert report["memory"]["frozen weights"] < 0.3 * subject.training.stored
    packed = 10_000 * 400 / plan.workload.share / 512
    assert plan.num_steps == math.ceil(packed / 32)
    assert "per_device_eval_batch_size" in plan.settings()


def test_a_finalist_that_is_too_large_gives_way_to_the_next(tmp_path, monkeypatch):
    """The analytic model is wrong about its first choice: the compiler says four times as much."""
    asked: list[str] = []

    def compiled(subject, candidates, **options):
        found = []
        for each in candidates:
            asked.append(each.remat)
            plan = analytic_plan(subject, each)
            factor = 4 if each.remat == asked[0] else 1
            memory = {name: factor * size for name, size in plan.memory.items()}
            fits = sum(memory.values()) <= plan.limit
            found.append(replace(plan, report={"fits": fits, "memory": memory}))
        return found

    monkeypatch.setattr(sys.modules[search.__module__], "compiled_plans", compiled)
    monkeypatch.setattr(sys.modules[search.__module__], "obstacle", lambda *given: "")
    model = Path(__file__).parents[2] / "examples" / "planning" / "gemma-2b"
    subject = read_subject(recipe(str(model), max_length=2048, dtype="bfloat16"))
    found = search(subject, slices=["v5e-1"], finalists=1)
    assert len(asked) > 1
    assert asked[-1] != asked[0]
    assert found.plans[0].compiled
    assert found.plans[0].fits


def test_an_evaluation_that_does_not_fit_needs_smaller_batches(tmp_path, capsys):
    words = ["plan", "--model_name_or_path", llama(tmp_path), "--evaluate", "--no-compile"]
    words += ["--slice", "v5e-1", "--per_device_eval_batch_size", "65536", "--max_length", "4096"]
    assert run(words) == 3
    shown = capsys.readouterr().out
    assert "per_device_eval_batch_size: " in shown
    assert "gradient_accumulation_steps" not in shown
    assert run([*words, "--search"]) == 2


@needs_compiler
def test_the_command_compiles_once(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("HEADRACE_PLAN_CACHE", str(tmp_path / "cache"))
    model = llama(tmp_path / "model")
    words = ["plan", "--model_name_or_path", model, "--use_peft", "true", "--lora_dropout", "0"]
    words += ["--lora_target_modules", ".*q_proj", "--max_length", "64", "--slice", "v5e-1"]
    words += ["--format", "json"]
    words += ["--html", str(tmp_path / "page.html")]
    assert run(words) == 0
    first = json.loads(capsys.readouterr().out)
    assert run(words) == 0
    second = json.loads(capsys.readouterr().out)
    assert first["compiled"]
    assert not first["cached"]
    assert second["cached"]
    assert second["step_seconds"] == first["step_seconds"]
    page = (tmp_path / "page.html").read_text()
    assert "v5e-1" in page
    assert "http" not in page.replace("http-equiv", "")  # nothing is loaded from elsewhere


def test_tables_fit_a_terminal(tmp_path, capsys):
    model = llama(tmp_path / "model")
    picture = tmp_path / "plan.png"
    words = ["plan", "--model_name_or_path", model, "--use_peft", "true", "--no-compile"]
    words += ["--plan", "{dataset_rows: 10000, dataset_mean_tokens: 100}"]
    assert run([*words, "--slice", "v5e-8", "--explain"]) == 0
    one = capsys.readouterr().out
    assert run([*words, "--search", "--picture", str(picture)]) == 0
    table = capsys.readouterr().out
    explained = one.index("Where the numbers come from")
    assert max(len(line) for line in [*one[:explained].splitlines(), *table.splitlines()]) <= 100
    assert "NOT COMPILED" in one
    assert "v5p-128" in table
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_without_a_compiler_the_reason_is_given(tmp_path, monkeypatch):
    monkeypatch.setattr(planner, "compiler_obstacle", lambda: "libtpu is not installed")
    plan = make_plan(recipe(llama(tmp_path)), "v5e-4")
    assert not plan.compiled
    assert plan.as_json()["not_compiled_because"] == "libtpu is not installed"
    gpu = make_plan(recipe(llama(tmp_path)), "h100-2")
    assert "not compiled ahead of time" in gpu.why_not


def test_what_does_not_fit_leaves_with_three(tmp_path, capsys):
    model = llama(tmp_path / "model")
    words = ["plan", "--model_name_or_path", model, "--no-compile", "--slice", "v5e-1"]
    words += ["--per_device_train_batch_size", "4096", "--max_length", "4096"]
    assert run(words) == 3
    assert "Smallest changes that make it fit" in capsys.readouterr().out


def test_a_dataset_at_hand_is_measured(monkeypatch):
    """The shipped example: as many steps as its run takes."""
    monkeypatch.chdir(Path(__file__).parents[2])
    config = load_config("examples/reminders/lora.yaml").config
    measured = measure_dataset(config)
    plan = make_plan(config, "v5e-1", compile=False, measured=measured)
    rows = len(Path("examples/reminders/train.jsonl").read_text().splitlines())
    assert measured["dataset_rows"] == rows
    assert 0.5 < measured["real_share"] <= 1
    assert 0 < measured["supervised_share"] < 1  # only answers carry a loss
    assert plan.num_steps == round(rows * config.num_train_epochs / 16)


def test_analytic_is_for_every_chip(tmp_path):
    subject = read_subject(recipe(llama(tmp_path)))
    for name in ("v4-8", "v5e-8", "v5p-8", "v6e-8", "v7x-8", "a100-8", "h100-8", "h200-8"):
        plan = analytic_plan(subject, default_candidate(subject, name))
        assert plan.fits
        assert 0 < plan.mfu < 1
