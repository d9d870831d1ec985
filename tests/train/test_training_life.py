"""One run with everything on: what it logs, averages, stops at, resumes and leaves behind."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from functools import partial
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
import torch
import yaml
from safetensors.numpy import load_file
from torch import nn

from headrace.bridge import to_jax
from headrace.config import SFTConfig
from headrace.data import load
from headrace.data.growing import growing_dataset
from headrace.errors import ConfigError, DataError
from headrace.train import SFTTrainer, make_optimizer
from headrace.train.averaging import AveragedState, with_average
from headrace.train.flops import flops_per_token, peak_flops
from headrace.train.noise import add_embedding_noise
from headrace.train.schedules import ReduceOnPlateau

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")


def make(out: Path, folder: str, **changes: Any) -> SFTTrainer:
    settings: dict[str, Any] = {
        "output_dir": str(out), "max_steps": 40, "logging_steps": 2, "learning_rate": 1e-2,
        "per_device_train_batch_size": 2, "compilation_cache_dir": None, "max_length": 32,
        "activation_checkpointing": "none", "neftune_noise_alpha": 5, "ema_decay": 0.9,
        "eval_strategy": "steps", "eval_steps": 2, "save_steps": 2, "save_total_limit": None,
        "eval_samples": 2, "eval_sample_tokens": 4, "early_stopping_patience": 3,
        "early_stopping_threshold": 0.4, "load_best_model_at_end": True,
        "lr_scheduler_type": "reduce_lr_on_plateau",
        "lr_scheduler_kwargs": {"patience": 0, "threshold": 0.4, "threshold_mode": "abs"},
        "label_smoothing_factor": 0.1, "report_to": ["tensorboard"], "run_name": "life <b>",
    }  # fmt: skip
    return SFTTrainer(
        folder,
        SFTConfig(**(settings | changes)),
        train_dataset=[*tiny.text_rows(30), {"prompt": "the", "completion": " <i>cat"}],
        eval_dataset=tiny.text_rows(6, 1),
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny.saved(tiny.llama(), tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def lived(folder: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SFTTrainer]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_MODE", "offline")
        trainer = make(tmp_path_factory.mktemp("life") / "out", folder)
        trainer.train()
        yield trainer


def out(trainer: SFTTrainer) -> Path:
    return Path(trainer.args.output_dir)


def test_early_stopping_ends_the_run_and_plateaus_lower_the_rate(lived: SFTTrainer) -> None:
    assert 4 <= lived.state.global_step < 40
    rates = [entry["learning_rate"] for entry in lived.state.log_history if "loss" in entry]
    assert rates[-1] < rates[0]
    assert isinstance(lived.run.schedule, ReduceOnPlateau)


def test_saved_weights_are_the_average(lived: SFTTrainer) -> None:
    state = lived.train_state
    assert isinstance(state.opt_state, AveragedState)
    saved = load_file(out(lived) / "model.safetensors")
    average = lived.run.module.layout.unstack(state.opt_state.average)
    last = lived.run.module.layout.unstack(state.trainable)
    for name, value in average.items():
        if name in saved:
            assert np.array_equal(saved[name], np.asarray(value)), name
    name = "model.embed_tokens.weight"
    assert not np.array_equal(np.asarray(average[name]), np.asarray(last[name]))


def test_the_log_holds_samples_and_the_time_to_the_first_step(lived: SFTTrainer) -> None:
    lines = [json.loads(line) for line in (out(lived) / "log.jsonl").read_text().splitlines()]
    trained = [line for line in lines if line["event"] == "train"]
    assert all(line["first_step_seconds"] > 0 for line in trained)
    assert all(line["process_peak_bytes"] > 2**26 for line in trained), "a CPU keeps no account"
    assert len({line["first_step_seconds"] for line in trained}) == 1
    samples = [line for line in lines if line["event"] == "samples"]
    assert samples[0]["step"] == 0, "before training too"
    assert samples[-1]["step"] == lived.state.global_step
    known = {row["prompt"]: row["completion"].strip() for row in tiny.text_rows(6, 1)}
    for each in samples[0]["samples"]:
        assert known[each["prompt"]] == each["expected"].strip()


def test_resuming_with_average_noise_and_packing_is_bit_equal(
    lived: SFTTrainer, folder: str
) -> None:
    steps = lived.state.global_step
    again = make(out(lived).parent / "again", folder)
    again.train(resume_from_checkpoint=str(out(lived) / "checkpoint-2"))
    assert again.state.global_step == steps
    ours, theirs = jax.tree.leaves(lived.train_state), jax.tree.leaves(again.train_state)
    for a, b in zip(ours, theirs, strict=True):
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        assert np.array_equal(np.asarray(a), np.asarray(b))
    losses = [[e["loss"] for e in t.state.log_history if "loss" in e] for t in (lived, again)]
    assert losses[0] == losses[1]


def growing(out: Path, folder: str, rows: list[dict[str, Any]]) -> SFTTrainer:
    """A run whose rows are prepared in pieces of 8 while it trains."""
    file = out.parent / f"{out.name}.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return SFTTrainer(
        folder,
        SFTConfig(
            output_dir=str(out), dataset_name=str(file), dataset_streaming=True, max_steps=12,
            per_device_train_batch_size=2, max_length=32, save_steps=6, logging_steps=2,
            compilation_cache_dir=None, activation_checkpointing="none", model_card=False,
        ),
    )  # fmt: skip


def test_rows_prepared_while_training_resume_bit_equal_and_bad_ones_cost_no_step(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(load, "growing_dataset", partial(growing_dataset, piece=8))
    rows = tiny.text_rows(60)
    whole = growing(tmp_path / "a", folder, rows)
    whole.train()
    shown = capsys.readouterr().out
    assert "the first 1 piece" in shown and "12, rows are still prepared" in shown
    assert whole.state.epoch > 1, "the second epoch mixes all pieces"
    assert shown.count("all rows: packed into") == 1
    again = growing(tmp_path / "b", folder, rows)
    again.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-6"))
    for key, value in whole.train_state.trainable.items():
        assert np.array_equal(np.asarray(value), np.asarray(again.train_state.trainable[key]))

    bad = growing(tmp_path / "c", folder, [*rows[:30], {"prompt": 1, "completion": None}])
    with pytest.raises(DataError, match=r"c\.jsonl, row 31"):
        bad.train()
    (kept,) = (tmp_path / "c").glob("checkpoint-*")
    assert int(kept.name.split("-")[1]) == bad.state.global_step > 0


class Page(HTMLParser):
    """What a page would load from elsewhere, and its text."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.tags: dict[str, int] = {}
        self.words: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] = self.tags.get(tag, 0) + 1
        found = [value for name, value in attrs if name in ("src", "href", "xlink:href")]
        self.loaded += [value for value in found if value and not value.startswith("#")]

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def test_the_report_is_one_page_that_needs_nothing_else(lived: SFTTrainer) -> None:
    text = (out(lived) / "report.html").read_text(encoding="utf-8")
    page = Page()
    page.feed(text)
    assert page.loaded == []
    assert page.tags["svg"] == 5
    assert "script" not in page.tags and "i" not in page.tags, "what data says is escaped"
    words = " ".join(page.words)
    for part in ("life <b>", "Samples", "Evaluation", "perplexity", "prompt-completion"):
        assert part in words
    assert str(out(lived)) not in words


def test_the_card_is_complete_and_its_code_runs(lived: SFTTrainer) -> None:
    text = (out(lived) / "README.md").read_text(encoding="utf-8")
    _, front, body = text.split("---\n", 2)
    found = yaml.safe_load(front)
    assert found["pipeline_tag"] == "text-generation" and found["library_name"] == "transformers"
    assert "license" not in found and "None" not in front
    assert "More Information Needed" not in text
    code = body.split("```python\n")[1].split("```")[0]
    scope: dict[str, Any] = {}
    exec(code.replace('folder = "."', f"folder = {str(out(lived))!r}"), scope)
    ids = torch.tensor([[2, 5, 6]])
    assert scope["model"](ids).logits.shape == (1, 3, tiny.VOCABULARY)


def test_tensorboard_files_hold_the_numbers(lived: SFTTrainer) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(out(lived) / "runs"))
    events.Reload()
    written = {event.step: event.value for event in events.Scalars("train/loss")}
    logged = {e["step"]: e["loss"] for e in lived.state.log_history if "loss" in e}
    assert written == pytest.approx(logged), (written, logged)
    assert "eval/loss" in events.Tags()["scalars"]


def test_flops_count_what_is_multiplied(lived: SFTTrainer) -> None:
    table = tiny.VOCABULARY * 16
    every = lived.run.num_trainable
    assert flops_per_token(lived.run) == 6 * (every - table) + 2 * table
    assert peak_flops("TPU v5 lite") == 197e12
    assert peak_flops("cpu") is None


# -- parts ---------------------------------------------------------------------------------------


def test_average_follows_its_formula() -> None:
    optimizer = with_average(make_optimizer("sgd"), 0.5)
    params = {"w": jnp.asarray([1.0, -2.0])}
    state = optimizer.init(params)
    expected = np.asarray(params["w"])
    for step in range(4):
        params, state = optimizer.update({"w": jnp.ones(2)}, state, params, jnp.asarray(0.25))
        keep = min(0.5, (1 + step) / (10 + step))
        expected = keep * expected + (1 - keep) * np.asarray(params["w"])
        assert np.asarray(state.average["w"]) == pytest.approx(expected)


class Embedder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 8)

    def get_input_embeddings(self) -> nn.Module:
        return self.table

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.table(input_ids) * 2


def test_noise_is_neftunes_in_training_and_absent_in_evaluation() -> None:
    model = Embedder()
    ids = torch.randint(0, 10, (4, 16))
    clean = (model(ids) * 1).detach().numpy()
    add_embedding_noise(model, 5.0)
    bound = 5.0 / math.sqrt(16 * 8)
    eager = (model.train()(ids).detach().numpy() - clean) / 2
    assert 0.9 * bound < np.abs(eager).max() <= bound
    module = to_jax(model.train(), {"input_ids": ids})
    run = jax.jit(
        lambda key, train: module.apply(
            module.params(), {}, rng=key, train=train, input_ids=jnp.asarray(ids)
        )[0],
        static_argnums=1,
    )
    first, second = (np.asarray(run(jax.random.key(i), True)) for i in (0, 1))
    noise = (first - clean) / 2
    assert 0.9 * bound < np.abs(noise).max() <= bound * 1.00001
    assert abs(noise.mean()) < 0.1 * bound
    assert not np.array_equal(first, second)
    assert np.array_equal(first, np.asarray(run(jax.random.key(0), True)))
    assert np.array_equal(np.asarray(run(jax.random.key(0), False)), clean)
    with pytest.raises(ConfigError, match="names no input embedding"):
        add_embedding_noise(nn.Linear(2, 2), 5.0)


def test_wandb_offline_writes_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    from types import SimpleNamespace

    from headrace.train.trackers import make_trackers

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")
    config = SFTConfig(report_to=["wandb"], output_dir=str(tmp_path / "my-run"))
    (tracker,) = make_trackers(config)
    state: Any = SimpleNamespace(global_step=4)
    tracker.on_train_begin(config, state, None)
    tracker.on_log(config, state, None, logs={"loss": 1.5, "eval_loss": 2.5})
    tracker.on_train_end(config, state, None)
    files = list((tmp_path / "wandb").glob("offline-run-*/run-*.wandb"))
    assert len(files) == 1
    assert b"train/loss" in files[0].read_bytes()
