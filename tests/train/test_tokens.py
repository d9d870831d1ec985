"""Token classification, masked language modelling and label smoothing against stock libraries."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import seqeval.metrics
import tiny
import torch
from transformers import (
    AutoModelForTokenClassification,
    BertConfig,
    BertForMaskedLM,
    BertForTokenClassification,
)
from twin import JaxTwin, TorchTwin, batches, jax_params

from headrace.config import TrainConfig
from headrace.train import Trainer
from headrace.train.losses import CausalLoss, ClassificationLoss

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")
ANIMALS = ("cat", "dog", "bird")


def bert_config(**changes: Any) -> BertConfig:
    return BertConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        vocab_size=tiny.VOCABULARY + 1, max_position_embeddings=64, **changes,
    )  # fmt: skip


def tagged_rows(count: int, seed: int = 0) -> list[dict[str, list[str]]]:
    """An adjective before an animal belongs to its entity."""
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(count):
        words = rng.choice(tiny.WORDS, rng.integers(3, 9)).tolist()
        tags = ["B-ANIMAL" if word in ANIMALS else "O" for word in words]
        made.append({"tokens": words, "ner_tags": tags})
    return made


def config(task: Any, out: Path, **changes: Any) -> TrainConfig:
    settings: dict[str, Any] = {
        "task": task, "output_dir": str(out), "per_device_train_batch_size": 8, "logging_steps": 5,
        "learning_rate": 2e-2, "compilation_cache_dir": None, "max_length": 16, "bucket_count": 1,
        "save_strategy": "no",
    }  # fmt: skip
    return TrainConfig(**(settings | changes))


def masked_tokenizer() -> Any:
    found = tiny.tokenizer()
    found.add_special_tokens({"mask_token": "<mask>"})
    return found


def test_tags_are_learned_scored_by_entities_and_reload(tmp_path: Path) -> None:
    torch.manual_seed(0)
    base = tiny.saved(BertForTokenClassification(bert_config()), tmp_path / "base")
    held = tagged_rows(20, 1)
    trainer = Trainer(
        base, config("token-classification", tmp_path / "out", max_steps=30),
        train_dataset=tagged_rows(64), eval_dataset=held,
    )  # fmt: skip
    trainer.train()
    metrics = trainer.evaluate()
    stock = AutoModelForTokenClassification.from_pretrained(tmp_path / "out").eval()
    assert stock.config.id2label == {0: "B-ANIMAL", 1: "O"}
    predicted, expected, losses, count = [], [], 0.0, 0
    for row in held:
        ids = tiny.tokenizer()(row["tokens"], is_split_into_words=True, return_tensors="pt")
        labels = torch.tensor([[stock.config.label2id[tag] for tag in row["ner_tags"]]])
        with torch.no_grad():
            found = stock(input_ids=ids["input_ids"], labels=labels)
        losses, count = losses + float(found.loss) * labels.numel(), count + labels.numel()
        predicted.append([stock.config.id2label[int(i)] for i in found.logits[0].argmax(-1)])
        expected.append(row["ner_tags"])
    assert metrics["eval_loss"] == pytest.approx(losses / count, rel=1e-4)
    assert metrics["eval_f1"] == pytest.approx(float(seqeval.metrics.f1_score(expected, predicted)))
    assert metrics["eval_f1"] > 0.9, "which words are animals is easy to see"


def test_masked_words_are_learned_with_the_stock_loss(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = BertForMaskedLM(bert_config())
    rows = [
        {"text": "the red cat sees a small dog now"},
        {"text": "a bird likes the old tree"},
    ] * 20
    trainer = Trainer(
        model, config("masked-lm", tmp_path, max_steps=40, mlm_probability=0.3),
        train_dataset=rows, eval_dataset=rows[:8], processing_class=masked_tokenizer(),
    )  # fmt: skip
    run = trainer.run
    (step,) = [next(run.data.eval_loader(trainer.args).steps())]
    batch = {k: v[0] for k, v in step.batch.items()}
    ours = trainer.evaluate()["eval_loss"]
    with torch.no_grad():
        inputs = {k: torch.as_tensor(v).long() for k, v in batch.items()}
        theirs = model.eval()(**inputs)
    assert ours == pytest.approx(float(theirs.loss), rel=1e-5)
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < 0.5 * ours
    assert "lm_head" not in str(run.notes)
    reloaded = BertForMaskedLM.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        again = reloaded(**inputs)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(float(again.loss), rel=1e-4)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_label_smoothing_is_torchs(smoothing: float) -> None:
    model = TorchTwin()
    (batch,) = batches(1)
    loss = CausalLoss(module=JaxTwin(), head=None, label_smoothing=smoothing, shift=False)
    arrays = {k: jnp.asarray(v) for k, v in batch.items()}
    ours = loss(jax_params(model), {}, arrays, rng=None, train=True)
    logits = model(torch.as_tensor(batch["input_ids"]))
    theirs = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), torch.as_tensor(batch["labels"]).long().flatten(),
        label_smoothing=smoothing,
    )  # fmt: skip
    assert float(ours.loss / ours.weight) == pytest.approx(float(theirs.detach()), rel=1e-6)
    plain = loss(jax_params(model), {}, arrays, rng=None, train=False)
    assert (float(plain.loss) == float(ours.loss)) == (smoothing == 0.0), "evaluation is unsmoothed"


def test_label_smoothing_of_classes_is_torchs() -> None:
    rng = np.random.default_rng(0)
    logits, labels = rng.normal(size=(6, 4)).astype(np.float32), rng.integers(0, 4, 6)

    class Fixed:
        def apply(self, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
            return type("Out", (), {"logits": jnp.asarray(logits)})(), {}

    loss = ClassificationLoss(
        module=Fixed(), problem_type="single_label_classification", label_smoothing=0.2
    )
    ours = loss({}, {}, {"labels": jnp.asarray(labels, jnp.int32)}, rng=None, train=True)
    theirs = torch.nn.functional.cross_entropy(
        torch.as_tensor(logits), torch.as_tensor(labels), label_smoothing=0.2
    )
    assert float(ours.loss / ours.weight) == pytest.approx(float(theirs.detach()), rel=1e-6)
