"""Losses that compare answers: DPO, IPO, ORPO, SimPO, KTO, and reward models.

Policy and reference are the same captured program. The reference is the model before training: with
LoRA the adapter counts as zero, so no second model exists; what else is trained stands once more
under `reference/` in the frozen parameters. Dropout is off, as in TRL: the two must be comparable.

Sums over rows: a micro-batch gives sum(loss) and its number of rows. KTO's estimate of the KL term
is a mean over the micro-batch, as in TRL; for that loss alone the split into micro-batches matters.

Shapes: B = rows, R = answers (2B for pairs: chosen and rejected in turn), S = tokens in an answer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from headrace.errors import CaptureError
from headrace.kernels import linear_cross_entropy
from headrace.train.losses import IGNORE_INDEX, Batch, LossSums, Means, shift_labels
from headrace.train.state import Params

REFERENCE = "reference/"  # prefix of frozen parameters that hold values from before training
WITH_REFERENCE = ("dpo", "ipo", "kto")
CHUNK = 512  # positions whose logits exist at one time on a mesh


class Settings(NamedTuple):
    """Numbers of the losses, as in the configuration."""

    kind: str
    beta: float
    gamma: float
    label_smoothing: float
    desirable_weight: float
    undesirable_weight: float


class Logps(NamedTuple):
    """Log-probability of each answer given its prompt, float32 [R]: the sum, and a token's mean."""

    total: Array
    mean: Array


@dataclass(frozen=True, kw_only=True)
class AnswerLogps:
    """`(params, batch, prefix) -> Logps`; without logits in memory where the head can be split."""

    module: Any
    head: Any | None
    remat: str
    head_trainable: bool

    def __call__(self, params: Params, buffers: Params, answers: Batch) -> Logps:
        """answers: input_ids, position_ids, segment_ids, labels [R, S]."""
        outputs, _ = self.module.apply(
            params, buffers, rng=None, train=False, remat=self.remat,
            segment_ids=answers["segment_ids"], input_ids=answers["input_ids"],
            position_ids=answers["position_ids"],
        )  # fmt: skip
        targets_RS = shift_labels(answers["labels"], answers["segment_ids"])
        counts_R = (targets_RS != IGNORE_INDEX).sum(axis=1).astype(jnp.float32)
        total_R = -self._nll(params, outputs.logits, targets_RS)
        return Logps(total_R, total_R / jnp.maximum(counts_R, 1.0))

    def _nll(self, params: Params, hidden: Array, targets_RS: Array) -> Array:
        """Summed negative log likelihood of each answer, float32 [R]."""
        if self.head is None:
            return _token_nll(hidden, targets_RS).sum(axis=1)
        if getattr(self.module, "partition", None) is not None:
            return self._chunked(params, hidden, targets_RS)
        head = self.head
        bias = params[head.bias_key] if head.bias_key is not None else None

        def row(pair: tuple[Array, Array]) -> Array:
            return linear_cross_entropy(
                pair[0], params[head.weight_key], pair[1], bias=bias, tail=head.tail,
                ignore_index=IGNORE_INDEX, weight_grad=self.head_trainable,
            ).loss_sum  # fmt: skip

        return jax.lax.map(row, (hidden, targets_RS))

    def _chunked(self, params: Params, hidden_RSD: Array, targets_RS: Array) -> Array:
        """The same in chunks of positions, whose rows stay where the mesh has them."""
        head = self.head
        assert head is not None
        rows, length, size = hidden_RSD.shape
        chunk = min(CHUNK, length)
        extra = -length % chunk
        hidden = jnp.pad(hidden_RSD, ((0, 0), (0, extra), (0, 0)))
        targets = jnp.pad(targets_RS, ((0, 0), (0, extra)), constant_values=IGNORE_INDEX)
        hidden = jnp.swapaxes(hidden.reshape(rows, -1, chunk, size), 0, 1)
        targets = jnp.swapaxes(targets.reshape(rows, -1, chunk), 0, 1)

        @jax.checkpoint
        def part(hidden_RCD: Array, targets_RC: Array) -> Array:
            return _token_nll(head.logits(params, hidden_RCD), targets_RC).sum(axis=1)

        return jax.lax.map(lambda pair: part(*pair), (hidden, targets)).sum(axis=0)


def _token_nll(logits: Array, targets: Array) -> Array:
    mask = targets != IGNORE_INDEX
    logits = logits.astype(jnp.float32)
    safe = jnp.where(mask, targets, 0)
    picked = jnp.take_along_axis(logits, safe[..., None], axis=-1)[..., 0]
    return jnp.where(mask, jax.nn.logsumexp(logits, axis=-1) - picked, 0.0)


@dataclass(frozen=True, kw_only=True)
class PreferenceLoss:
    """The loss of task preference; `notes` say how the head is computed, for the start screen.

    adapter_off: stored keys that count as zero in the reference (LoRA's B).
    """

    logps: AnswerLogps
    settings: Settings
    adapter_off: frozenset[str] = frozenset()
    notes: tuple[str, ...] = field(default=())

    def __call__(
        self, params: Params, buffers: Params, batch: Batch, *, rng: Array | None, train: bool
    ) -> LossSums:
        del rng, train
        policy = {k: v for k, v in params.items() if not k.startswith(REFERENCE)}
        compare = _unpaired if self.settings.kind == "kto" else _paired
        answers = _mixed_answers(batch) if self.settings.kind == "kto" else pair_answers(batch)
        now = self.logps(policy, buffers, answers)
        before = None
        if self.settings.kind in WITH_REFERENCE:
            reference = jax.lax.stop_gradient(self._reference(params))
            before = jax.lax.stop_gradient(self.logps(reference, buffers, answers))
        rows_B, means = compare(self.settings, now, before, batch)
        weights_B = batch["weights"]
        return LossSums(
            loss=jnp.where(weights_B > 0, rows_B, 0.0).sum(),
            weight=weights_B.sum(),
            buffers={},
            means=means,
        )

    def _reference(self, params: Params) -> Params:
        found: Params = {}
        for key, value in params.items():
            if key.startswith(REFERENCE):
                continue
            if key in self.adapter_off:
                value = jnp.zeros_like(value)
            found[key] = params.get(REFERENCE + key, value)
        return found


def pair_answers(batch: Batch) -> dict[str, Array]:
    """Chosen and rejected in turn, [2B, S]: neighbours, so that a split over rows keeps pairs."""
    names = ("input_ids", "position_ids", "segment_ids", "labels")
    both = {name: jnp.stack([batch[name], batch[f"rejected_{name}"]], axis=1) for name in names}
    return {name: value.reshape(-1, value.shape[-1]) for name, value in both.items()}


def _mixed_answers(batch: Batch) -> dict[str, Array]:
    """Each row's answer and the prompt with another row's answer in turn, [2B, S]."""
    names = ("input_ids", "position_ids", "segment_ids", "labels")
    both = {name: jnp.stack([batch[name], batch[f"kl_{name}"]], axis=1) for name in names}
    return {name: value.reshape(-1, value.shape[-1]) for name, value in both.items()}


def _turns(values_R: Array) -> tuple[Array, Array]:
    """Every first and every second of the answers."""
    both = values_R.reshape(-1, 2)
    return both[:, 0], both[:, 1]


def _mean(values_B: Array, weights_B: Array) -> tuple[Array, Array]:
    """(sum, count) over rows of weight 1; a filler row may hold anything."""
    return jnp.where(weights_B > 0, values_B, 0.0).sum(), weights_B.sum()


def _paired(
    settings: Settings, now: Logps, before: Logps | None, batch: Batch
) -> tuple[Array, Means]:
    """Loss of each pair, and what TRL logs under the same names."""
    pair_losses: dict[str, Callable[..., Array]] = {
        "dpo": _dpo, "ipo": _ipo, "orpo": _orpo, "simpo": _simpo,
    }  # fmt: skip
    losses_B = pair_losses[settings.kind](settings, now, before)
    if before is not None:
        rewards_R = settings.beta * (now.total - before.total)
    else:
        rewards_R = settings.beta * now.mean
    chosen_B, rejected_B = _turns(rewards_R)
    logps_chosen_B, logps_rejected_B = _turns(now.total)
    values = {
        "rewards/chosen": chosen_B,
        "rewards/rejected": rejected_B,
        "rewards/margins": chosen_B - rejected_B,
        "rewards/accuracies": (chosen_B > rejected_B).astype(jnp.float32),
        "logps/chosen": logps_chosen_B,
        "logps/rejected": logps_rejected_B,
    }
    values = {name: jax.lax.stop_gradient(value) for name, value in values.items()}
    return losses_B, {name: _mean(value, batch["weights"]) for name, value in values.items()}


def _dpo(settings: Settings, now: Logps, before: Logps) -> Array:
    """Rafailov et al. 2023, eq. 7; with label smoothing the conservative form (Mitchell 2023)."""
    chosen_B, rejected_B = _turns(now.total - before.total)
    logits_B = settings.beta * (chosen_B - rejected_B)
    wrong = settings.label_smoothing
    return -(1 - wrong) * jax.nn.log_sigmoid(logits_B) - wrong * jax.nn.log_sigmoid(-logits_B)


def _ipo(settings: Settings, now: Logps, before: Logps) -> Array:
    """Azar et al. 2023, eq. 17, on means over tokens (as TRL, after the paper's authors)."""
    chosen_B, rejected_B = _turns(now.mean - before.mean)
    return jnp.square(chosen_B - rejected_B - 1 / (2 * settings.beta))


def _orpo(settings: Settings, now: Logps, before: None) -> Array:
    """Hong et al. 2024, eq. 6: the answer's own loss and the log odds ratio."""
    del before
    chosen_B, rejected_B = _turns(now.mean)
    # log(p / (1 - p)) of the tokens' geometric mean; log1p(-e^x) loses digits near 0, expm1 not.
    odds_B = (chosen_B - rejected_B) - (
        jnp.log(-jnp.expm1(chosen_B)) - jnp.log(-jnp.expm1(rejected_B))
    )
    return -chosen_B - settings.beta * jax.nn.log_sigmoid(odds_B)


def _simpo(settings: Settings, now: Logps, before: None) -> Array:
    """Meng et al. 2024, eq. 6."""
    del before
    chosen_B, rejected_B = _turns(now.mean)
    logits_B = settings.beta * (chosen_B - rejected_B) - settings.gamma
    wrong = settings.label_smoothing
    return -(1 - wrong) * jax.nn.log_sigmoid(logits_B) - wrong * jax.nn.log_sigmoid(-logits_B)


def _unpaired(
    settings: Settings, now: Logps, before: Logps | None, batch: Batch
) -> tuple[Array, Means]:
    """KTO (Ethayarajh et al. 2024, eq. 7 and 8): loss of each judged answer."""
    assert before is not None
    weights_B, wanted_B = batch["weights"], batch["desirable"] > 0
    ratio_B, mixed_B = _turns(now.total - before.total)
    total, count = _mean(mixed_B, weights_B)
    kl = jax.lax.stop_gradient(jnp.maximum(total / jnp.maximum(count, 1.0), 0.0))
    good_B = settings.desirable_weight * (1 - jax.nn.sigmoid(settings.beta * (ratio_B - kl)))
    bad_B = settings.undesirable_weight * (1 - jax.nn.sigmoid(settings.beta * (kl - ratio_B)))
    rewards_B = jax.lax.stop_gradient(settings.beta * ratio_B)
    logps_B = jax.lax.stop_gradient(_turns(now.total)[0])
    chosen = weights_B * wanted_B
    rejected = weights_B * ~wanted_B
    means = {
        "rewards/chosen": _mean(rewards_B, chosen),
        "rewards/rejected": _mean(rewards_B, rejected),
        "logps/chosen": _mean(logps_B, chosen),
        "logps/rejected": _mean(logps_B, rejected),
        "kl": (kl * count, count),
    }
    return jnp.where(wanted_B, good_B, bad_B), means


@dataclass(frozen=True, kw_only=True)
class RewardLoss:
    """Bradley-Terry: -log sigmoid(reward of chosen - reward of rejected), one number an answer.

    center: weight of (chosen + rejected)^2, which keeps rewards around zero (Eisenstein 2023).
    """

    module: Any
    center: float = 0.0
    remat: str = "none"
    notes: tuple[str, ...] = field(default=())

    def __call__(
        self, params: Params, buffers: Params, batch: Batch, *, rng: Array | None, train: bool
    ) -> LossSums:
        del rng, train
        answers = pair_answers(batch)
        outputs, _ = self.module.apply(
            params, buffers, rng=None, train=False, remat=self.remat,
            input_ids=answers["input_ids"], attention_mask=_attention_mask(answers["segment_ids"]),
        )  # fmt: skip
        rewards_R = outputs.logits.astype(jnp.float32)[:, 0]
        chosen_B, rejected_B = _turns(rewards_R)
        weights_B = batch["weights"]
        losses_B = -jax.nn.log_sigmoid(chosen_B - rejected_B)
        if self.center:
            losses_B = losses_B + self.center * jnp.square(chosen_B + rejected_B)
        values = {
            "rewards/chosen": chosen_B,
            "rewards/rejected": rejected_B,
            "rewards/margins": chosen_B - rejected_B,
            "rewards/accuracies": (chosen_B > rejected_B).astype(jnp.float32),
        }
        return LossSums(
            loss=jnp.where(weights_B > 0, losses_B, 0.0).sum(),
            weight=weights_B.sum(),
            buffers={},
            means={k: _mean(jax.lax.stop_gradient(v), weights_B) for k, v in values.items()},
        )


def _attention_mask(segment_ids: Array) -> Array:
    """1 on tokens; a filler row attends to its first position, since to nothing gives NaN."""
    mask = (segment_ids > 0).astype(jnp.int32)
    return mask.at[:, 0].set(1)


def preference_loss(
    module: Any,
    settings: Settings,
    *,
    trainable: frozenset[str],
    remat: str,
    adapter_off: frozenset[str],
) -> PreferenceLoss:
    """The preference loss of a captured causal model."""
    notes: tuple[str, ...] = ()
    backbone, head = module, None
    try:
        if not module.program.dynamic:
            raise CaptureError("the capture has static shapes and is made anew for each of them")
        backbone, head = module.without_head()
    except CaptureError as reason:
        notes = (f"loss computes all logits [R, S, V]: the LM head could not be split ({reason})",)
    keys = set() if head is None else {head.weight_key, head.bias_key}
    return PreferenceLoss(
        logps=AnswerLogps(
            module=backbone, head=head, remat=remat, head_trainable=bool(keys & trainable)
        ),
        settings=settings,
        adapter_off=adapter_off,
        notes=notes,
    )


def reference_values(
    layout_keys: Mapping[str, tuple[str, ...]], compute: Mapping[str, Array], adapter: bool
) -> tuple[Params, frozenset[str]]:
    """What the reference needs beside the frozen weights: (copies under REFERENCE, keys at zero).

    compute: trainable parameters in the model's dtype, from before training. With a fresh LoRA
    adapter its B is zero, so the adapter needs no copy; a trained one is copied (it is small).
    """
    lora = compute if adapter else {}
    down = {k for k in lora if _is_lora(layout_keys[k], ".lora_A", ".lora_embedding_A")}
    up = {k for k in lora if _is_lora(layout_keys[k], ".lora_B", ".lora_embedding_B")}
    fresh = not any(bool(jnp.any(compute[key] != 0)) for key in up)
    free = down | up if fresh else set[str]()
    copies = {REFERENCE + k: jnp.array(v, copy=True) for k, v in compute.items() if k not in free}
    return copies, frozenset(up if fresh else ())


def _is_lora(names: tuple[str, ...], *marks: str) -> bool:
    return any(mark in names[0] for mark in marks)
