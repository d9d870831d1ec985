"""Preference losses and reward models against eager torch, with TRL's formulas; whole runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
import torch
import torch.nn.functional as F
from peft import LoraConfig, PeftModel
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from headrace.config import DPOConfig, RewardConfig
from headrace.data import load_data
from headrace.errors import ConfigError, DataError
from headrace.train import DPOTrainer, RewardTrainer
from headrace.train.lora import copy_into_module
from headrace.train.preference import REFERENCE, Settings, preference_loss

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")
BETA, GAMMA, SMOOTHING = 0.3, 0.4, 0.1


def rows(count: int, seed: int = 0) -> list[dict[str, str]]:
    rng = np.random.default_rng(seed)

    def words(low: int, high: int, of: int = 16) -> str:
        return " ".join(rng.choice(tiny.WORDS[:of], rng.integers(low, high)))

    return [
        {"prompt": words(2, 6), "chosen": " cat " + words(1, 5), "rejected": " dog " + words(1, 7)}
        for _ in range(count)
    ]


def config(output_dir: Path, **changes: Any) -> DPOConfig:
    settings: dict[str, Any] = {
        "output_dir": str(output_dir), "max_steps": 6, "per_device_train_batch_size": 4,
        "logging_steps": 2, "learning_rate": 1e-2, "compilation_cache_dir": None, "max_length": 16,
        "pad_to_multiple_of": 16, "activation_checkpointing": "none",
    }  # fmt: skip
    return DPOConfig(**(settings | changes))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny.saved(tiny.llama(), tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def trained(folder: str, tmp_path_factory: pytest.TempPathFactory) -> DPOTrainer:
    """A finished LoRA run with dpo; its adapter is far from zero."""
    trainer = DPOTrainer(
        folder, config(tmp_path_factory.mktemp("dpo")), train_dataset=rows(24),
        eval_dataset=rows(5, 1), peft_config=LoraConfig(r=4, target_modules="all-linear"),
    )  # fmt: skip
    trainer.train()
    return trainer


# -- eager torch, TRL's way ----------------------------------------------------------------------


def torch_logps(model: Any, batch: dict[str, np.ndarray], prefix: str) -> Any:
    """Sum and mean of the completion's log-probabilities, row by row without padding."""
    totals, counts = [], []
    for ids, labels, segments in zip(
        *(batch[prefix + n] for n in ("input_ids", "labels", "segment_ids")), strict=True
    ):
        size = int((segments > 0).sum())
        tokens = torch.as_tensor(ids[:size], dtype=torch.int64)[None]
        logits = model(input_ids=tokens).logits[0, :-1].log_softmax(-1)
        kept = torch.as_tensor(labels[1:size] != -100)
        picked = logits.gather(-1, tokens[0, 1:, None])[:, 0]
        totals.append(picked[kept].sum())
        counts.append(kept.sum())
    total, count = torch.stack(totals), torch.stack(counts)
    return total, total / count


def torch_pair_loss(model: Any, kind: str, batch: dict[str, np.ndarray]) -> Any:
    (c, c_mean), (r, r_mean) = (torch_logps(model, batch, p) for p in ("", "rejected_"))
    with torch.no_grad(), model.disable_adapter():
        (rc, rc_mean), (rr, rr_mean) = (torch_logps(model, batch, p) for p in ("", "rejected_"))
    if kind == "dpo":
        logits = (c - rc) - (r - rr)
        losses = (
            -F.logsigmoid(BETA * logits) * (1 - SMOOTHING)
            - F.logsigmoid(-BETA * logits) * SMOOTHING
        )
    elif kind == "ipo":
        losses = ((c_mean - rc_mean) - (r_mean - rr_mean) - 1 / (2 * BETA)) ** 2
    elif kind == "orpo":
        odds = (c_mean - r_mean) - (
            torch.log1p(-torch.exp(c_mean)) - torch.log1p(-torch.exp(r_mean))
        )
        losses = -c_mean - BETA * F.logsigmoid(odds)
    else:
        logits = (c_mean - r_mean) - GAMMA / BETA
        losses = (
            -F.logsigmoid(BETA * logits) * (1 - SMOOTHING)
            - F.logsigmoid(-BETA * logits) * SMOOTHING
        )
    return losses.sum()


def torch_kto_loss(model: Any, kind: str, batch: dict[str, np.ndarray]) -> Any:
    del kind
    now, _ = torch_logps(model, batch, "")
    with torch.no_grad():
        mixed, _ = torch_logps(model, batch, "kl_")
        with model.disable_adapter():
            before, _ = torch_logps(model, batch, "")
            mixed_before, _ = torch_logps(model, batch, "kl_")
    kl = (mixed - mixed_before).mean().clamp(min=0)
    wanted = torch.as_tensor(batch["desirable"] > 0)
    good = 1.3 * (1 - torch.sigmoid(BETA * (now - before - kl)))
    bad = 0.7 * (1 - torch.sigmoid(BETA * (kl - (now - before))))
    return torch.where(wanted, good, bad).sum()


@pytest.mark.parametrize("kind", ["dpo", "ipo", "orpo", "simpo", "kto"])
def test_loss_and_gradients_equal_eager_torch(
    trained: DPOTrainer, tmp_path: Path, kind: str
) -> None:
    run, state = trained.run, trained.train_state
    data = run.data
    if kind == "kto":
        changed = config(tmp_path, preference_loss="kto")
        data = load_data(changed, run.processing_class, train_dataset=rows(24))
    loader = data.train_loader(trained.args)
    batch = {k: v[0] for k, v in next(loader.steps()).batch.items()}
    assert batch["weights"].sum() == len(batch["weights"])
    settings = Settings(kind, BETA, GAMMA, SMOOTHING, 1.3, 0.7)
    off = frozenset(k for k in run.module.layout.trainable if ".lora_B" in k)
    assert off
    loss = preference_loss(
        run.module, settings, trainable=run.module.layout.trainable, remat="none", adapter_off=off
    )

    def total(trainable: Any) -> Any:
        sums = loss({**trainable, **run.frozen}, state.buffers, batch, rng=None, train=True)
        return sums.loss

    value, grads = jax.jit(jax.value_and_grad(total))(state.trainable)
    model = run.model
    copy_into_module(run.module.module, run.module.layout.unstack(state.trainable))
    model.eval()
    model.zero_grad()
    reference: Callable[..., Any] = torch_kto_loss if kind == "kto" else torch_pair_loss
    expected = reference(model, kind, batch)
    expected.backward()
    expected = expected.detach()
    assert float(value) == pytest.approx(float(expected), rel=2e-5)
    ours = run.module.layout.unstack(grads)
    theirs = {n: p.grad for n, p in run.module.module.named_parameters() if p.requires_grad}
    scale = max(float(g.abs().max()) for g in theirs.values())
    assert scale > 0
    for name, grad in ours.items():
        assert np.abs(np.asarray(grad) - theirs[name].numpy()).max() < 2e-5 * scale, name


def test_lora_has_no_second_model_and_loads_in_stock_peft(
    trained: DPOTrainer, folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not any(key.startswith(REFERENCE) for key in trained.run.frozen)
    first, last = trained.state.log_history[0], trained.state.log_history[-1]
    assert first["loss"] == pytest.approx(np.log(2), abs=1e-6), "policy and reference are one"
    assert first["rewards/margins"] == 0.0
    assert last["rewards/margins"] > 0.01
    metrics = trained.evaluate()
    assert metrics["eval_rewards/accuracies"] >= 0.8
    out = trained.args.output_dir
    assert json.loads((Path(out) / "adapter_config.json").read_text())["task_type"] == "CAUSAL_LM"
    stock = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), out).eval()
    batch = trained.run.data.eval.rows.batch(range(5), 16)  # pyright: ignore[reportOptionalMemberAccess]
    with torch.no_grad():
        total, _ = torch_logps(stock, batch, "")
    assert float(total.mean()) == pytest.approx(metrics["eval_logps/chosen"], rel=1e-4)


def test_whole_model_keeps_a_frozen_copy(folder: str, tmp_path: Path) -> None:
    trainer = DPOTrainer(
        folder, config(tmp_path, max_steps=2, learning_rate=1e-3, logging_steps=1),
        train_dataset=rows(8),
    )  # fmt: skip
    before = {k: np.asarray(v) for k, v in trainer.run.frozen.items()}
    assert {k.removeprefix(REFERENCE) for k in before} == set(trainer.train_state.trainable)
    trainer.train()
    history = trainer.state.log_history
    assert history[0]["loss"] == pytest.approx(np.log(2), abs=1e-6)
    assert history[1]["loss"] < history[0]["loss"]
    for key, value in before.items():
        assert np.array_equal(value, np.asarray(trainer.run.frozen[key])), key
        assert not np.array_equal(
            value, np.asarray(trainer.train_state.trainable[key.removeprefix(REFERENCE)])
        ), key


def test_loss_does_not_depend_on_the_split_into_micro_batches(trained: DPOTrainer) -> None:
    run, state = trained.run, trained.train_state
    loss = run.loss_for("none")
    loader = run.data.train_loader(trained.args)
    batch = {k: v[0] for k, v in next(loader.steps()).batch.items()}

    def mean(parts: int) -> tuple[float, dict[str, float]]:
        every = [{k: np.split(v, parts)[i] for k, v in batch.items()} for i in range(parts)]
        found = [
            loss({**state.trainable, **run.frozen}, state.buffers, b, rng=None, train=True)
            for b in every
        ]
        weight = sum(float(f.weight) for f in found)
        named = {
            k: sum(float(f.means[k][0]) for f in found) / sum(float(f.means[k][1]) for f in found)
            for k in found[0].means or {}
        }
        return sum(float(f.loss) for f in found) / weight, named

    whole, split = mean(1), mean(4)
    assert split[0] == pytest.approx(whole[0], rel=1e-6)
    assert split[1] == pytest.approx(whole[1], rel=1e-5, abs=1e-6)


def test_reward_model_equals_torch_and_reloads(folder: str, tmp_path: Path) -> None:
    trainer = RewardTrainer(
        folder,
        RewardConfig(
            output_dir=str(tmp_path), max_steps=10, per_device_train_batch_size=4, logging_steps=1,
            learning_rate=2e-2, compilation_cache_dir=None, center_rewards_coefficient=0.01,
        ),
        train_dataset=rows(24),
        eval_dataset=rows(6, 1),
        peft_config=LoraConfig(r=4, target_modules="all-linear"),
    )  # fmt: skip
    trainer.train()
    metrics = trainer.evaluate()
    assert metrics["eval_rewards/accuracies"] >= 0.8
    assert (tmp_path / "adapter_config.json").is_file()
    torch.manual_seed(1)  # another head than the run's own: the saved one has to replace it
    base = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1)
    base.config.pad_token_id = 0
    stock = PeftModel.from_pretrained(base, str(tmp_path)).eval()
    batch = trainer.run.data.eval.rows.batch(range(6), 16)  # pyright: ignore[reportOptionalMemberAccess]
    rewards = []
    for prefix in ("", "rejected_"):
        mask = torch.as_tensor(batch[prefix + "segment_ids"] > 0).long()
        with torch.no_grad():
            ids = torch.as_tensor(batch[prefix + "input_ids"]).long()
            rewards.append(stock(input_ids=ids, attention_mask=mask).logits[:, 0])
    chosen, rejected = rewards
    expected = (-F.logsigmoid(chosen - rejected) + 0.01 * (chosen + rejected) ** 2).mean()
    assert metrics["eval_loss"] == pytest.approx(float(expected), rel=1e-4)
    assert metrics["eval_rewards/chosen"] == pytest.approx(float(chosen.mean()), rel=1e-4)


def test_wrong_data_for_the_loss_is_said(folder: str, tmp_path: Path) -> None:
    judged = [{"prompt": "the", "completion": " cat", "label": True}] * 4
    with pytest.raises(DataError, match="only preference_loss: kto learns from those"):
        _ = DPOTrainer(folder, config(tmp_path), train_dataset=judged).run
    with pytest.raises(DataError, match="all 4 answers are wanted; kto needs both"):
        _ = DPOTrainer(folder, config(tmp_path, preference_loss="kto"), train_dataset=judged).run
    with pytest.raises(ConfigError, match="turns the adapter off"):
        config(tmp_path, use_peft=True, use_dora=True)


def test_kto_runs_on_judged_answers(folder: str, tmp_path: Path) -> None:
    judged = [
        {"prompt": row["prompt"], "completion": row[side], "label": side == "chosen"}
        for row in rows(16)
        for side in ("chosen", "rejected")
    ]
    trainer = DPOTrainer(
        folder, config(tmp_path, preference_loss="kto", desirable_weight=1.2),
        train_dataset=judged, peft_config=LoraConfig(r=4, target_modules="all-linear"),
    )  # fmt: skip
    trainer.train()
    first, last = trainer.state.log_history[0], trainer.state.log_history[-1]
    assert first["rewards/chosen"] == 0.0
    assert last["rewards/chosen"] > last["rewards/rejected"]
    assert "16 wanted, 16 unwanted" in str(trainer.run.data.train.report)
    assert jnp.isfinite(last["kl"])
