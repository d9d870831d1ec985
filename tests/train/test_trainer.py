"""SFTTrainer from rows to files that stock PEFT reads; resume, interruption, failures."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
import torch
from peft import LoraConfig, PeftModel
from safetensors.torch import load_file
from transformers import LlamaForCausalLM, TrainerCallback

from headrace.config import ClassificationConfig, SFTConfig
from headrace.errors import CheckpointError, ConfigError, DataError, TrainingError
from headrace.sharding import DeviceMemory
from headrace.train import SFTTrainer, durable, loop, programs
from headrace.train.checkpoint import list_checkpoints
from headrace.train.interrupt import Interrupt

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning"),
]
STEPS = 6
FIRST: list[Any] = []  # the state the finished run started from


def config(output_dir: Path, **changes: Any) -> SFTConfig:
    settings: dict[str, Any] = {
        "output_dir": str(output_dir), "max_steps": STEPS, "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2, "logging_steps": 1, "save_steps": 3,
        "save_total_limit": None, "max_length": 24, "learning_rate": 1e-2,
        "compilation_cache_dir": None, "eval_strategy": "steps", "eval_steps": 3,
        "activation_checkpointing": "none", "seed": 7,
    }  # fmt: skip
    return SFTConfig(**(settings | changes))


def make(
    output_dir: Path, folder: str, *, rows: int = 40, callbacks: Any = (), **changes: Any
) -> SFTTrainer:
    return SFTTrainer(
        folder,
        config(output_dir, **changes),
        train_dataset=tiny.text_rows(rows),
        eval_dataset=tiny.text_rows(10, 1),
        peft_config=LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.1),
        callbacks=callbacks,
    )


class Recorder(TrainerCallback):
    """Notes the hooks in their order."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, int]] = []
        self.models: set[int] = set()

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("on_"):
            return super().__getattribute__(name)

        def hook(args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.seen.append((name, state.global_step))

        return hook


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny.saved(tiny.llama(), tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def finished(folder: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[SFTTrainer, Path, Any]:
    """One whole run; its compiled programs serve the tests that need a second run."""
    out = tmp_path_factory.mktemp("run")
    trainer = make(out, folder, callbacks=[Recorder])
    FIRST.append(jax.tree.map(jnp.copy, trainer.train_state))
    output = trainer.train()
    return trainer, out, output


def again(trainer: SFTTrainer, output_dir: Path, **changes: Any) -> SFTTrainer:
    """The same run, compiled already, into another folder."""
    fresh = SFTTrainer("unused", trainer.args.replace(output_dir=str(output_dir), **changes))
    fresh._run = replace(trainer.run, config=fresh.args)
    fresh._programs, fresh._arrays = trainer._programs, jax.tree.map(jnp.copy, FIRST[0])
    return fresh


def log_lines(path: Path, event: str = "train") -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (path / "log.jsonl").read_text().splitlines()]
    return [line for line in lines if line["event"] == event]


def assert_same_arrays(left: Any, right: Any) -> None:
    assert left.keys() == right.keys()
    for name in left:
        assert np.asarray(left[name]).tobytes() == np.asarray(right[name]).tobytes(), name


def test_run_learns_and_reports(finished: tuple[SFTTrainer, Path, Any]) -> None:
    trainer, out, output = finished
    losses = [line["loss"] for line in log_lines(out)]
    assert len(losses) == STEPS == output.global_step
    assert losses[-1] < losses[0]
    assert output.training_loss == pytest.approx(np.mean(losses))
    assert [line["step"] for line in log_lines(out, "eval")] == [3, 6]
    metrics = trainer.evaluate()
    assert metrics["eval_loss"] == log_lines(out, "eval")[-1]["eval_loss"]
    same = trainer.evaluate(tiny.text_rows(10, 1), metric_key_prefix="test")
    assert same["test_loss"] == metrics["eval_loss"]
    assert trainer.evaluate(tiny.text_rows(10, 2))["eval_loss"] != metrics["eval_loss"]
    assert metrics["eval_perplexity"] == pytest.approx(np.exp(metrics["eval_loss"]))
    assert [p.name for p in list_checkpoints(out)] == ["checkpoint-3", "checkpoint-6"]
    assert output.metrics["load_back_max_difference"] < 1e-6


def test_only_the_adapter_moved(finished: tuple[SFTTrainer, Path, Any], folder: str) -> None:
    trainer, _, _ = finished
    base = dict(LlamaForCausalLM.from_pretrained(folder).named_parameters())
    run = trainer.run
    for name, value in run.module.layout.unstack(run.frozen).items():
        original = base[name.replace(".base_layer", "")].detach().numpy()
        assert np.array_equal(np.asarray(value), original), name
    for key, value in trainer.train_state.trainable.items():
        assert not np.array_equal(np.asarray(value), np.asarray(FIRST[0].trainable[key])), key


def test_files_load_in_stock_peft(finished: tuple[SFTTrainer, Path, Any], folder: str) -> None:
    trainer, out, _ = finished
    saved = load_file(out / "adapter_model.safetensors")
    assert "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight" in saved
    assert len(saved) == 2 * 2 * 7, "two matrices, two layers, seven projections"
    assert json.loads((out / "adapter_config.json").read_text())["task_type"] == "CAUSAL_LM"
    for place in (out, out / "checkpoint-6"):
        stock = PeftModel.from_pretrained(LlamaForCausalLM.from_pretrained(folder), place).eval()
        ids = torch.arange(20)[None]
        theirs = stock(input_ids=ids).logits.detach().numpy()
        run, state = trainer.run, trainer.train_state
        params = {**state.trainable, **run.frozen}
        inputs = {"input_ids": ids.numpy(), "position_ids": ids.numpy()}
        ours = run.module.apply(params, state.buffers, train=False, **inputs)[0].logits
        np.testing.assert_allclose(np.asarray(ours), theirs, atol=1e-6)
    assert (out / "tokenizer.json").exists()


def test_callbacks_are_called_in_order(finished: tuple[SFTTrainer, Path, Any]) -> None:
    trainer, _, _ = finished
    (recorder,) = trainer.callbacks.callbacks
    seen = [hook for hook, _ in recorder.seen]
    assert seen[:4] == ["on_init_end", "on_train_begin", "on_epoch_begin", "on_step_begin"]
    assert seen[-1] == "on_train_end"
    assert seen.count("on_step_begin") == seen.count("on_step_end") == STEPS
    assert seen.count("on_evaluate") == seen.count("on_save") == 2
    assert seen.count("on_log") == STEPS + 2
    at_three = [hook for hook, step in recorder.seen if step == 3]
    assert at_three.index("on_step_end") < at_three.index("on_evaluate") < at_three.index("on_save")


class PressCtrlC(TrainerCallback):
    def __init__(self, number: int = signal.SIGINT) -> None:
        self.number = number

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 2:
            os.kill(os.getpid(), self.number)


def test_interrupted_and_resumed_is_bit_equal(
    finished: tuple[SFTTrainer, Path, Any], folder: str, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    whole, out, _ = finished
    broken = again(whole, tmp_path)
    broken.add_callback(PressCtrlC)
    with pytest.raises(KeyboardInterrupt, match="stopped after step 2 of 6"):
        broken.train()
    assert [p.name for p in list_checkpoints(tmp_path)] == ["checkpoint-2"]
    assert "resume_from_checkpoint: true" in capsys.readouterr().out
    resumed = make(tmp_path, folder)  # captured and compiled anew, as in another process
    output = resumed.train(resume_from_checkpoint=True)
    assert output.global_step == STEPS
    assert_same_arrays(resumed.train_state.trainable, whole.train_state.trainable)
    ours, theirs = (jax.tree.leaves(t.train_state.opt_state) for t in (resumed, whole))
    assert all(np.array_equal(a, b) for a, b in zip(ours, theirs, strict=True))
    lines, expected = log_lines(tmp_path), log_lines(out)
    assert [line["loss"] for line in lines] == [line["loss"] for line in expected]
    assert [line["epoch"] for line in lines[2:]] == [line["epoch"] for line in expected[2:]]


def test_the_first_ctrl_c_says_what_it_does_and_the_second_stops_at_once(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(KeyboardInterrupt, match="stopped at once"), Interrupt() as interrupt:
        os.kill(os.getpid(), signal.SIGINT)
        assert interrupt.received == signal.SIGINT
        assert "finishing the step, then saving" in capfd.readouterr().err
        os.kill(os.getpid(), signal.SIGINT)


def test_sigterm_saves_and_exits(finished: tuple[SFTTrainer, Path, Any], tmp_path: Path) -> None:
    trainer = again(finished[0], tmp_path)
    trainer.add_callback(PressCtrlC(signal.SIGTERM))
    with pytest.raises(SystemExit) as caught:
        trainer.train()
    assert caught.value.code == 0
    assert [p.name for p in list_checkpoints(tmp_path)] == ["checkpoint-2"]


def test_checkpoint_of_another_run_is_refused(
    finished: tuple[SFTTrainer, Path, Any], tmp_path: Path
) -> None:
    other = again(finished[0], tmp_path)
    identity = {**other.run.identity, "dataset": "other", "seed": 8}
    other._run = replace(other.run, identity=identity)
    with pytest.raises(CheckpointError, match="belongs to another run") as caught:
        other.train(resume_from_checkpoint=str(finished[1] / "checkpoint-3"))
    assert "seed: 7 in the checkpoint, 8 now" in str(caught.value)


def test_nan_names_the_step_and_the_last_checkpoint(
    finished: tuple[SFTTrainer, Path, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = again(finished[0], tmp_path, save_steps=1)

    def explode(step: int) -> float:
        return 1e-2 if step < 2 else 1e38

    trainer._run = replace(trainer.run, schedule=explode)
    with pytest.raises(TrainingError) as caught:
        trainer.train()
    text = str(caught.value)
    assert "not finite since step 4, for 3 steps in a row" in text
    assert str(tmp_path / "checkpoint-") in text and "lower learning_rate" in text
    assert "step 4 skipped: loss nan" in capsys.readouterr().out
    values = jax.tree.leaves(trainer.train_state.trainable)
    assert all(np.isfinite(np.asarray(value)).all() for value in values)


class _Full:
    """The disk is full for the first `failures` checkpoints."""

    def __init__(self, failures: int) -> None:
        self.left, self.real = failures, durable._put

    def __call__(self, *args: Any) -> None:
        if self.left:
            self.left -= 1
            raise OSError(errno.ENOSPC, "No space left on device")
        self.real(*args)


def test_full_disk_in_mid_run_does_not_end_it(
    finished: tuple[SFTTrainer, Path, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(durable, "_put", _Full(1))
    trainer = again(finished[0], tmp_path)
    trainer.train()
    assert [p.name for p in list_checkpoints(tmp_path)] == ["checkpoint-6"]
    assert "is full" in capsys.readouterr().out
    assert_same_arrays(trainer.train_state.trainable, finished[0].train_state.trainable)


class _Steps(TrainerCallback):
    """Sets an event when step 5 is done."""

    def __init__(self, event: threading.Event) -> None:
        self.event = event

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 5:
            self.event.set()


def test_steps_go_on_while_a_checkpoint_is_written(
    finished: tuple[SFTTrainer, Path, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    went_on, waited, real = threading.Event(), list[bool](), loop.save_run

    def slow(run: Any, state: Any, folder: Path) -> None:
        if folder.name == ".checkpoint-3.tmp":
            waited.append(went_on.wait(60))
        real(run, state, folder)

    monkeypatch.setattr(loop, "save_run", slow)
    trainer = again(finished[0], tmp_path)
    trainer.add_callback(_Steps(went_on))
    trainer.train()
    assert waited == [True], "step 5 came while the checkpoint of step 3 was written"
    resumed = again(finished[0], tmp_path)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert_same_arrays(resumed.train_state.trainable, finished[0].train_state.trainable)


KILLED = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, {here!r})
import test_trainer
from headrace.train import loop
real = loop.save_run
def killed(run, state, folder):
    real(run, state, folder)
    if folder.name == ".checkpoint-4.tmp":
        os.kill(os.getpid(), signal.SIGKILL)
loop.save_run = killed
test_trainer.make(Path({out!r}), {folder!r}, save_steps=2).train()
"""


def test_kill_9_while_a_checkpoint_is_written_costs_that_checkpoint_only(
    finished: tuple[SFTTrainer, Path, Any], folder: str, tmp_path: Path
) -> None:
    script = KILLED.format(here=str(Path(__file__).parent), out=str(tmp_path), folder=folder)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()[-2000:]
    assert (tmp_path / ".checkpoint-4.tmp" / "train_state.safetensors").is_file()
    assert [p.name for p in list_checkpoints(tmp_path)] == ["checkpoint-2"]
    resumed = again(finished[0], tmp_path)
    resumed.train(resume_from_checkpoint=True)
    assert_same_arrays(resumed.train_state.trainable, finished[0].train_state.trainable)
    assert not list(tmp_path.glob(".checkpoint-*"))


def test_full_disk_at_the_end_is_an_error(
    finished: tuple[SFTTrainer, Path, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = again(finished[0], tmp_path, save_strategy="no")
    monkeypatch.setattr(durable, "_put", _Full(9))
    with pytest.raises(CheckpointError, match="is full"):
        trainer.train()


def test_memory_need_is_compared_before_the_first_step(
    finished: tuple[SFTTrainer, Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = finished[0]
    assert trainer._programs is not None
    trainer._programs.prepare_largest(trainer.train_state)
    monkeypatch.setattr(programs, "device_memory", lambda: DeviceMemory(limit=1, used=0))
    with pytest.raises(TrainingError, match=r"the training step needs .* GiB, the device has"):
        trainer._programs.prepare_largest(trainer.train_state)
    monkeypatch.setattr(programs, "device_memory", lambda: None)
    auto = replace(trainer.run, config=trainer.args.replace(activation_checkpointing="auto"))
    made = programs.Programs(auto, trainer.train_state, on_compile=print)
    assert made.remat == "none" and "no memory limit is known" in made.notes[0]


def test_training_again_goes_on_from_the_weights(
    finished: tuple[SFTTrainer, Path, Any], tmp_path: Path
) -> None:
    trainer = again(finished[0], tmp_path, save_strategy="no", eval_strategy="no")
    trainer.train()
    first = [line["loss"] for line in log_lines(tmp_path)]
    trainer.train()
    second = [line["loss"] for line in log_lines(tmp_path)]
    assert len(second) == STEPS and trainer.state.global_step == STEPS
    assert np.mean(second) < np.mean(first) - 0.02


def test_wrong_saved_files_are_found(
    finished: tuple[SFTTrainer, Path, Any], tmp_path: Path
) -> None:
    trainer = again(finished[0], tmp_path)
    trainer._arrays = finished[0].train_state
    trainer.save_model()
    assert trainer.check_saved().equal
    from safetensors.torch import save_file

    path = tmp_path / "adapter_model.safetensors"
    save_file({k: v * 2 for k, v in load_file(path).items()}, path)
    with pytest.raises(TrainingError, match="do not give the trained model back"):
        trainer.check_saved()


def test_arguments_are_checked(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="SFTConfig is needed"):
        SFTTrainer("x", {"output_dir": "y"})
    with pytest.raises(ConfigError, match="does 'causal'"):
        SFTTrainer("x", ClassificationConfig())
    with pytest.raises(TypeError, match="is not a transformers"):
        SFTTrainer("x", config(tmp_path), callbacks=[object()])
    with pytest.raises(ConfigError, match="no tokenizer"):
        _ = SFTTrainer(tiny.llama(), config(tmp_path), train_dataset=tiny.text_rows(4)).run
    with pytest.raises(ConfigError, match="no model"):
        rows, words = tiny.text_rows(4), tiny.tokenizer()
        _ = SFTTrainer(args=config(tmp_path), train_dataset=rows, processing_class=words).run


def test_an_output_folder_that_cannot_be_written_is_found_first(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"output_dir .*file/out cannot be made"):
        SFTTrainer("no-model", config(tmp_path / "file" / "out")).train()


def test_token_ids_beyond_the_embeddings_are_refused(tmp_path: Path) -> None:
    model = tiny.llama()
    model.resize_token_embeddings(10, mean_resizing=False)
    trainer = SFTTrainer(
        model, config(tmp_path), train_dataset=tiny.text_rows(9), eval_dataset=tiny.text_rows(3),
        processing_class=tiny.tokenizer(),
    )  # fmt: skip
    with pytest.raises(DataError, match="the model has 10 embeddings"):
        _ = trainer.run
