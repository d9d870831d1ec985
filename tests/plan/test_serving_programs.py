"""Compiled serving plans: the engine's own programs, the real TPU compiler, sums by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import jax
import pytest
from rich.console import Console
from transformers import LlamaConfig, LlamaForCausalLM

from headrace.cli.app import run
from headrace.config import TrainConfig
from headrace.errors import ConfigError
from headrace.kernels import target_platform
from headrace.plan import serving_program
from headrace.plan.candidate import ServerCandidate
from headrace.plan.compiler import Answer
from headrace.plan.hardware import parse_slice
from headrace.plan.hlo import ArrayShape, parse_module
from headrace.plan.page import serving_page
from headrace.plan.replay import PagedRead, replay
from headrace.plan.replay import _paged_work as paged_work
from headrace.plan.report import show_serving
from headrace.plan.serving import Traffic, make_serving_plan
from headrace.plan.serving_compiled import compile_server, program_keys
from headrace.plan.serving_program import abstract_model, capture_server, server_options
from headrace.plan.topology import compiler_obstacle
from headrace.serve import EngineOptions, capture_for_serving
from headrace.serve.lowering import Lowering
from headrace.serve.options import choose_shapes
from headrace.serve.programs import Programs
from headrace.serve.shapes import StepShape, choose_forms

needs_compiler = pytest.mark.skipif(
    compiler_obstacle() is not None, reason=str(compiler_obstacle())
)
TINY = LlamaConfig(
    vocab_size=512, hidden_size=128, intermediate_size=128, num_hidden_layers=4,
    num_attention_heads=2, num_key_value_heads=1, head_dim=128, max_position_embeddings=256,
)  # fmt: skip
SERVER = ServerCandidate(slice_name="v5e-4", tensor=1, streams=4, longest=128, prompt=96, answer=32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    found = tmp_path_factory.mktemp("tiny")
    TINY.save_pretrained(found)
    return found


@pytest.fixture(scope="module")
def captured(folder):
    return capture_server(TrainConfig(model_name_or_path=str(folder), dtype="bfloat16"))


def test_the_plan_lowers_what_the_engine_compiles(folder):
    """Four layers with weights, captured whole, against three captured without and stretched."""
    served = capture_for_serving(LlamaForCausalLM(TINY).eval(), roll=True)
    options = EngineOptions(max_num_seqs=2, max_model_len=64, cache_tokens=256)
    shapes = choose_shapes(served, options)
    forms = choose_forms([e for e in served.entries.values() if e.writes], shapes)
    engine = Programs(model=served, shapes=shapes, forms=forms).lowering
    without = capture_server(TrainConfig(model_name_or_path=str(folder), dtype="float32"))
    # an engine on JAX's default device says nothing of where arrays lie
    model = abstract_model(without, jax.devices()[:1])
    params, buffers = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (model.params, model.buffers)
    )
    model = replace(model, params=params, buffers=buffers)
    planned = Lowering(
        model=model,
        shapes=choose_shapes(model, options),
        forms=choose_forms([e for e in model.entries.values() if e.writes], shapes),
    )
    assert planned.shapes == shapes
    step = StepShape(decode=2, blocks=shapes.block_steps[0])
    for key in (("step", step, False), ("sample", "greedy", 2)):
        text = (
            planned.lower(key).as_text().replace("loop_model_layers_0_2", "loop_model_layers_0_3")
        )
        assert text == engine.lower(key).as_text()


@needs_compiler
def test_compiled_for_a_tpu(captured):
    texts: list[str] = []
    report = compile_server(captured, SERVER, say=texts.append)
    assert report["attention"] == ["ragged"]
    assert report["fits"]
    assert report["cache_tokens"] >= SERVER.streams * SERVER.longest
    memory = report["memory"]
    weights = 4 * (2 * 128 * 256 + 2 * 128 * 128 + 3 * 128 * 128 + 2 * 128) + 2 * 512 * 128 + 128
    assert memory["weights"] == pytest.approx(2 * weights, rel=0.01)  # and the rotary table
    pages = report["engine"]["num_pages"] * report["engine"]["page_size"]
    assert memory["cache pages"] == pages * 4 * 2 * 128 * 2
    assert report["hbm_bytes_per_chip"] == sum(memory.values())
    assert memory["programs"] > 0
    parts = report["programs"]["decode step"]["parts"]
    assert parts["attention, forward"]["count"] == 4
    # four streams of 112 keys, read as one block of 256 (or all there are) in each layer
    keys = 4 * min(256, report["engine"]["page_size"] * 10)
    assert parts["attention, forward"]["hbm_bytes"] == pytest.approx(4 * keys * 512, rel=0.1)
    assert 0 < report["decode_seconds"] < report["prompt_step_seconds"] < 1e-3
    assert any("prompt step" in text for text in texts)
    assert compile_server(captured, SERVER, known=lambda program: {"same": program}) == {
        "same": report["program"]
    }


@needs_compiler
def test_no_room_for_one_sequence(captured, monkeypatch):
    monkeypatch.setattr(
        serving_program, "local_bytes", lambda tree: parse_slice("v5e-4").chip.hbm_bytes
    )
    report = compile_server(captured, SERVER)
    assert not report["fits"]
    assert "needs" in report["refusal"]
    assert set(report["memory"]) == {"weights"}


def test_what_the_engine_refuses_is_refused(captured):
    with pytest.raises(ConfigError, match="ragged paged attention"):
        server_options(ServerCandidate(**{**SERVER.as_json(), "kv_cache_dtype": "int8"}))
    with pytest.raises(ConfigError, match="one device"):
        server_options(ServerCandidate(**{**SERVER.as_json(), "quantization": "int8", "tensor": 2}))
    with target_platform("tpu"):
        assert captured.head is not None


def test_paged_attention_by_hand():
    shapes = [
        ArrayShape(dtype="s32", sizes=(4 + 3,), space=0),
        ArrayShape(dtype="s32", sizes=(4 + 3, 8), space=0),
        ArrayShape(dtype="bf16", sizes=(4 + 3 * 32, 8, 128), space=0),
        ArrayShape(dtype="bf16", sizes=(100, 64, 4, 128), space=0),
    ]
    read = PagedRead(decode=4, context=300, block=32, prompt=100)
    flops, num_bytes = paged_work(read, shapes)
    # four decoding rows read two blocks of 256; three blocks of a prompt that begin at query 4
    # lie in two blocks of queries each, and read one block of keys in both
    keys = 4 * 512 + 3 * 2 * 256
    assert flops == 4 * 128 * 8 * 32 * keys
    assert num_bytes == keys * 4 * 128 * 2 + 2 * 100 * 8 * 128 * 2


def test_a_scatter_costs_its_update():
    text = """HloModule m, is_scheduled=true

%f (p0: f32[1024,128], p1: s32[4,1], p2: f32[4,128]) -> f32[1024,128] {
  %p0 = f32[1024,128]{1,0} parameter(0)
  %p1 = s32[4,1]{1,0} parameter(1)
  %p2 = f32[4,128]{1,0} parameter(2)
  ROOT %s = f32[1024,128]{1,0} scatter(%p0, %p1, %p2), to_apply=%r
}

ENTRY %main (a: f32[1024,128], b: s32[4,1], c: f32[4,128]) -> f32[1024,128] {
  %a = f32[1024,128]{1,0} parameter(0)
  %b = s32[4,1]{1,0} parameter(1)
  %c = f32[4,128]{1,0} parameter(2)
  ROOT %x = f32[1024,128]{1,0} fusion(%a, %b, %c), kind=kCustom, calls=%f
}
"""
    found = replay(parse_module(text), parse_slice("v5e-1"))
    assert found.parts["elementwise, forward"].hbm_bytes == 2 * 4 * 128 * 4 + 4 * 4


REPORT = {
    "program": "x",
    "fits": False,
    "memory": {"weights": 3 * 2**30, "cache pages": 2**30},
    "cache_tokens": 2048,
    "cache_tokens_that_fit": 4096,
    "prompt_tokens_a_step": 512,
    "engine": {"page_size": 16},
    "attention": ["ragged"],
    "decode_seconds": 0.010,
    "prompt_step_seconds": 0.030,
    "programs": {"decode step": {"seconds": 0.01, "parts": {
        "matmuls, forward": {"seconds": 0.01, "bound": "HBM"}}}},
    "compile_seconds": 60.0,
    "notes": [],
}  # fmt: skip


def plan_with(reports: list[dict], folder: Path, monkeypatch, **traffic: int):
    """A plan whose compiler answers with the given reports, in order."""
    answers = iter(reports)

    def answer(config, candidates, **options):
        return [Answer(candidate=c, report=next(answers)) for c in candidates]

    monkeypatch.setattr("headrace.plan.serving.compile_all", answer)
    monkeypatch.setattr("headrace.plan.serving.compiler_obstacle", lambda: None)
    config = TrainConfig(model_name_or_path=str(folder))
    seen = []
    found = make_serving_plan(
        config, "v6e-4", traffic=Traffic(**traffic), tensor=1, first=seen.append
    )
    assert [each.compiled for each in seen] == [False]
    return found


def test_tokens_of_a_compiled_plan(folder, monkeypatch):
    plan = plan_with([{**REPORT, "fits": True}], folder, monkeypatch, prompt=512, answer=128)
    assert plan.candidate.streams == 16  # 64 streams, four copies
    load = plan.compiled_load()
    # sixteen prompts take sixteen steps while 128 tokens are written
    assert load.token == pytest.approx((112 * 0.010 + 16 * 0.030) / 128)
    assert load.tokens_per_second == pytest.approx(4 * 16 / load.token)
    assert (load.first, load.bound) == (pytest.approx(0.030), "HBM")
    memory = {"weights": 9 * 2**40}
    refused = {k: REPORT[k] for k in ("program", "compile_seconds", "notes", "fits")}
    refused |= {"memory": memory, "refusal": "Ran out of memory on HBM"}
    none = plan_with([refused] * 4, folder, monkeypatch, prompt=512, answer=128)
    assert (none.fits, none.loads(), none.cache_tokens) == (False, [], 0)
    busy = plan_with([{**REPORT, "fits": True}], folder, monkeypatch, prompt=8192, answer=128)
    assert busy.compiled_load().token == pytest.approx(16 * 16 * 0.030 / 128)


def test_changes_are_compiled_and_shown(folder, monkeypatch):
    fits = {**REPORT, "fits": True}
    plan = plan_with([REPORT, REPORT, fits, fits], folder, monkeypatch, prompt=512, answer=128)
    assert not plan.fits
    assert len(plan.changes) == 3
    assert [change.plan.fits for change in plan.changes] == [True, True, False]
    console = Console(width=100, record=True, highlight=False)
    show_serving(plan, console, explain=True)
    text = console.export_text()
    for words in ("DOES NOT FIT", "--max_length 640", "compiled: fits", "30.00 ms", "replayed"):
        assert words in text
    page = serving_page([plan])
    assert "does not fit" in page
    assert "Where the numbers come from" in page
    found = json.loads(json.dumps(plan.as_json()))
    assert found["compiled"]
    assert not found["fits"]
    assert found["decode_seconds"] == 0.010
    assert [change["fits"] for change in found["changes"]] == [True, True, False]


def test_gpus_and_refusals_keep_the_analytic_answer(folder, monkeypatch, capsys):
    recipe = ["plan", "--model_name_or_path", str(folder), "--serve", "--prompt-tokens", "64"]
    short = ["--answer-tokens", "32", "--max_length", "128"]
    assert run([*recipe, *short, "--slice", "h100-1", "--html", str(folder / "page.html")]) == 0
    assert "GPU programs are not compiled" in capsys.readouterr().out
    assert "NOT COMPILED" not in (folder / "page.html").read_text(encoding="utf-8")
    refused = [Answer(candidate=SERVER, error="the engine refuses it")]
    monkeypatch.setattr("headrace.plan.serving.compile_all", lambda *a, **k: refused)
    monkeypatch.setattr("headrace.plan.serving.compiler_obstacle", lambda: None)
    assert run([*recipe, *short, "--slice", "v6e-1"]) == 0
    text = capsys.readouterr().out
    assert "the engine refuses it" in text
    assert "NOT COMPILED" in text


def test_program_names(captured):
    model = abstract_model(captured, jax.devices()[:1])
    shapes = choose_shapes(model, EngineOptions(max_num_seqs=3, max_model_len=64, cache_tokens=512))
    keys = program_keys(Lowering(model=model, shapes=shapes, forms={}))
    assert [key[0] for key in keys.values()] == ["step", "step", "sample"]
    assert set(keys.values()) <= set(Lowering(model=model, shapes=shapes, forms={}).all_keys())
