"""The engine against transformers' own generate, logits processors and log-probabilities."""

from __future__ import annotations

import json
import random
import re
import threading
from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf

from headrace.errors import CaptureError, ConfigError, QueueFullError
from headrace.serve import (
    Delta,
    Engine,
    EngineOptions,
    Grammar,
    SamplingParams,
    capture_for_serving,
)

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def _prompts(*lengths: int, seed: int = 0, vocab: int = 1024) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, vocab) for _ in range(n)] for n in lengths]


def _generate(model: Any, prompt: list[int], num: int, **options: Any) -> list[int]:
    model.generation_config.eos_token_id = None
    ids = torch.tensor([prompt])
    out = model.generate(ids, max_new_tokens=num, do_sample=False, pad_token_id=1, **options)
    return out[0, len(prompt) :].tolist()


def _tokens(engine: Engine, prompts: list[list[int]], params: SamplingParams) -> list[list[int]]:
    return [answers[0].token_ids for answers in engine.generate(prompts, params)]


def test_greedy_equals_transformers_batched_alone_chunked_and_from_the_cache(
    engine: Engine, llama: Any
) -> None:
    prompts = _prompts(1, 4, 17, 50, 33, 8)  # more than rows, longer than a step's budget
    want = [_generate(llama, p, 12) for p in prompts]
    assert _tokens(engine, prompts, GREEDY) == want
    hits = engine.page_pool.hits
    assert [_tokens(engine, [p], GREEDY)[0] for p in prompts] == want
    assert engine.page_pool.hits > hits
    engine.check_invariants()
    assert engine.page_pool.num_used == 0


def test_a_cache_too_small_for_all_preempts_and_answers_alike(llama: Any) -> None:
    served = capture_for_serving(llama)
    options = EngineOptions(
        max_model_len=64,
        max_num_seqs=4,
        page_size=4,
        max_batched_tokens=32,
        cache_tokens=104,
        warm_up=False,
    )
    prompts = _prompts(20, 21, 22, 23, seed=3)
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    with Engine(served, options=options) as small:
        assert _tokens(small, prompts, params) == [_generate(llama, p, 20) for p in prompts]
        assert small.stats.preemptions > 0
        small.check_invariants()


def _gemma2() -> Any:
    torch.manual_seed(0)
    config = tf.Gemma2Config(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        sliding_window=5,
        query_pre_attn_scalar=8,
        max_position_embeddings=128,
    )
    model = tf.Gemma2ForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.25)
    return model


@pytest.mark.parametrize("roll", [True, False], ids=["loops", "unrolled"])
def test_windows_and_softcaps_follow_from_the_graph(roll: bool) -> None:
    model = _gemma2()
    served = capture_for_serving(model, roll=roll)
    windows = {entry.window for entry in served.entries.values()}
    assert windows == {5, None}
    options = EngineOptions(
        max_model_len=64, max_num_seqs=2, page_size=4, max_batched_tokens=32, warm_up=False
    )
    prompts = _prompts(3, 40, seed=1, vocab=96)
    with Engine(served, options=options) as engine:
        assert _tokens(engine, prompts, GREEDY) == [_generate(model, p, 12) for p in prompts]


def test_guesses_change_the_speed_and_not_the_answer(engine: Engine, llama: Any) -> None:
    prompt = _prompts(6, seed=5)[0] * 5  # repeats itself, so guesses are made
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    drafted = engine.stats.drafted
    assert _tokens(engine, [prompt], params) == [_generate(llama, prompt, 40)]
    assert engine.stats.drafted > drafted
    drawn = SamplingParams(temperature=0.6, max_tokens=30, seed=11, ignore_eos=True)
    runner: Any = engine._runner
    with_guesses = _tokens(engine, [prompt], drawn)
    draft, runner.scheduler.draft = runner.scheduler.draft, lambda sequence: ()
    try:
        assert _tokens(engine, [prompt], drawn) == with_guesses
    finally:
        runner.scheduler.draft = draft


def test_a_seed_repeats_an_answer_whoever_shares_the_batch(engine: Engine) -> None:
    prompt, *others = _prompts(9, 5, 30, 12, seed=2)
    params = SamplingParams(temperature=1.3, top_p=0.9, top_k=50, seed=42, max_tokens=16)
    alone = _tokens(engine, [prompt], params)[0]
    noise = SamplingParams(temperature=1.0, max_tokens=16, seed=7)
    crowd = engine.generate([*others, prompt], [noise, noise, noise, params])
    assert crowd[-1][0].token_ids == alone
    other = SamplingParams(temperature=1.3, top_p=0.9, top_k=50, seed=43, max_tokens=16)
    assert _tokens(engine, [prompt], other)[0] != alone


def test_draws_follow_the_probabilities_that_top_k_and_top_p_leave(llama: Any) -> None:
    """2,000 draws from one distribution: only allowed tokens, at their frequencies."""
    from headrace.serve import sampler

    logits = np.array([2.0, 1.5, 1.0, 0.5, 0.0, -1.0], np.float32)
    rows, num = 2000, 6

    def draw(**settings: float) -> np.ndarray:
        ints = np.zeros((sampler.NUM_INTEGERS, rows), np.int32)
        floats = np.zeros((sampler.NUM_FLOATS, rows), np.float32)
        ints[0], ints[3] = np.arange(rows), settings.get("top_k", 0)
        floats[0], floats[1] = settings.get("temperature", 1.0), settings.get("top_p", 1.0)
        floats[2], floats[3] = settings.get("min_p", 0.0), 1.0
        packed = sampler.unpack(ints, floats)
        wide = np.broadcast_to(logits, (rows, num))
        tokens = np.asarray(sampler.sample(wide, packed, "drawn").token)
        return np.bincount(tokens, minlength=num) / rows

    probs = torch.tensor(logits).softmax(0)
    np.testing.assert_allclose(draw(), probs, atol=0.04)
    for settings, warper in [
        ({"top_k": 3}, tf.TopKLogitsWarper(3)),
        ({"top_p": 0.7}, tf.TopPLogitsWarper(0.7)),
        ({"min_p": 0.3}, tf.MinPLogitsWarper(0.3)),
        ({"temperature": 0.5}, tf.TemperatureLogitsWarper(0.5)),
    ]:
        scores: Any = warper(torch.zeros(1, 1, dtype=torch.long), torch.tensor(logits)[None])
        want = scores.softmax(-1)[0].numpy()
        got = draw(**settings)
        assert np.all(got[want == 0] == 0), settings
        np.testing.assert_allclose(got, want, atol=0.04)


def test_repetition_penalty_is_that_of_transformers(engine: Engine, llama: Any) -> None:
    prompt = _prompts(12, seed=8)[0]
    params = SamplingParams(temperature=0, repetition_penalty=1.7, max_tokens=16, ignore_eos=True)
    assert _tokens(engine, [prompt], params) == [
        _generate(llama, prompt, 16, repetition_penalty=1.7)
    ]


def test_biases_and_penalties_do_what_the_api_says(engine: Engine) -> None:
    prompt = _prompts(12, seed=9)[0]
    plain = _tokens(engine, [prompt], GREEDY)[0]
    banned = SamplingParams(
        temperature=0, max_tokens=12, ignore_eos=True, logit_bias=dict.fromkeys(plain, -100.0)
    )
    forced = SamplingParams(temperature=0, max_tokens=3, logit_bias={77: 100.0})
    frequent = SamplingParams(
        temperature=0,
        max_tokens=6,
        logit_bias={77: 60.0, 78: 58.0},
        presence_penalty=2.0,
        frequency_penalty=2.0,
    )
    answers = engine.generate([prompt] * 4, [banned, forced, frequent, GREEDY])
    first, second, third, fourth = (a[0].token_ids for a in answers)
    assert not set(first) & set(plain)
    assert second == [77, 77, 77]
    assert third.count(78) >= 2  # 77 loses its lead of 2 after one use
    assert fourth == plain  # the neighbours' settings are theirs alone


def test_logprobs_are_those_of_the_model(engine: Engine, llama: Any) -> None:
    prompt = _prompts(20, seed=4)[0]
    params = SamplingParams(
        temperature=0.8, seed=1, max_tokens=5, logprobs=3, prompt_logprobs=2, ignore_eos=True
    )
    answer = engine.generate([prompt], params)[0][0]
    ids = torch.tensor([prompt + answer.token_ids])
    with torch.no_grad():
        logprobs = llama(ids).logits.log_softmax(-1)[0]
    scores = answer.prompt_logprobs
    assert scores is not None
    assert scores[0] is None
    assert [s.token_id for s in scores[1:] if s] == prompt[1:]
    entries = [*scores[1:], *answer.logprobs]
    for i, entry in enumerate(entries):
        assert entry is not None
        want = logprobs[i]
        assert entry.logprob == pytest.approx(float(want[entry.token_id]), abs=2e-4)
        top = want.topk(len(entry.top))
        assert [t for t, _ in entry.top] == top.indices.tolist()
        np.testing.assert_allclose([v for _, v in entry.top], top.values, atol=2e-4)


def test_stop_strings_end_the_text_across_tokens(engine: Engine, tokenizer: Any) -> None:
    prompt = _prompts(10, seed=6)[0]
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    whole = engine.generate([prompt], params)[0][0]
    assert whole.text == tokenizer.decode(prompt + whole.token_ids)[len(tokenizer.decode(prompt)) :]
    middle = len(whole.text) // 2
    stop = whole.text[middle : middle + 4]  # most likely parts of two or more tokens
    at = whole.text.find(stop)
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, stop=(stop,))
    pieces = list(engine.stream(prompt, params))
    assert "".join(d.text for d in pieces) == whole.text[:at]
    assert pieces[-1].finish_reason == "stop"
    assert pieces[-1].stop_reason == stop
    kept = SamplingParams(
        temperature=0, max_tokens=24, ignore_eos=True, stop=(stop,), include_stop_str_in_output=True
    )
    assert engine.generate([prompt], kept)[0][0].text == whole.text[: at + 4]


def test_end_tokens_and_least_lengths(engine: Engine) -> None:
    prompt = _prompts(7, seed=12)[0]
    bias = {0: 100.0}  # the end token
    ended = engine.generate([prompt], SamplingParams(temperature=0, logit_bias=bias))[0][0]
    assert (ended.finish_reason, ended.token_ids) == ("stop", [0])
    params = SamplingParams(temperature=0, logit_bias=bias, min_tokens=4, max_tokens=9)
    answer = engine.generate([prompt], params)[0][0]
    assert len(answer.token_ids) == 5
    assert answer.token_ids[-1] == 0


def test_several_answers_share_the_prompt(engine: Engine) -> None:
    prompt = _prompts(24, seed=13)[0]
    hits = engine.page_pool.hits
    params = SamplingParams(temperature=1.0, seed=5, n=3, max_tokens=8, ignore_eos=True)
    answers = engine.generate([prompt], params)[0]
    assert len({tuple(a.token_ids) for a in answers}) == 3
    assert engine.page_pool.hits >= hits + 2 * 20
    again = engine.generate([prompt], params)[0]
    assert [a.token_ids for a in again] == [a.token_ids for a in answers]


def test_answers_match_their_grammar(engine: Engine) -> None:
    schema = {
        "type": "object",
        "properties": {"day": {"enum": ["friday", "monday"]}, "n": {"type": "integer"}},
        "required": ["day", "n"],
        "additionalProperties": False,
    }
    prompt = _prompts(8, seed=14)[0]
    params = [
        SamplingParams(
            temperature=0.7,
            seed=3,
            max_tokens=60,
            logit_bias={0: 20.0},
            grammar=Grammar(kind="json_schema", source=json.dumps(schema)),
        ),
        SamplingParams(
            temperature=1.0, seed=4, max_tokens=30, grammar=Grammar(kind="regex", source="[ab]{7}c")
        ),
        GREEDY,
    ]
    structured, pattern, free = engine.generate([prompt] * 3, params)
    row = json.loads(structured[0].text)
    assert set(row) == {"day", "n"}
    assert re.fullmatch("[ab]{7}c", pattern[0].text)
    assert pattern[0].finish_reason == "stop"
    assert free[0].token_ids == _tokens(engine, [prompt], GREEDY)[0]
    with pytest.raises(ConfigError, match="json_schema cannot be used"):
        broken = Grammar(kind="json_schema", source='{"type": "nonsense"}')
        engine.generate([prompt], SamplingParams(grammar=broken))


def test_leaving_a_stream_frees_its_pages(engine: Engine) -> None:
    prompt = _prompts(20, seed=15)[0]
    for delta in engine.stream(prompt, SamplingParams(temperature=0, max_tokens=100)):
        assert isinstance(delta, Delta)
        break
    engine.check_invariants()
    assert engine.page_pool.num_used == 0


def test_a_full_queue_refuses_and_loses_nothing(engine: Engine) -> None:
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    done: list[Delta] = []
    accepted = refused = 0
    finished = threading.Event()

    def sink(delta: Delta) -> None:
        if delta.finish_reason is not None:
            done.append(delta)
            finished.set()

    for _ in range(60):
        try:
            engine.submit(_prompts(5)[0], params, sink)
            accepted += 1
        except QueueFullError:
            refused += 1
    assert refused > 0
    while len(done) < accepted:
        assert finished.wait(30)
        finished.clear()
    assert {d.finish_reason for d in done} == {"length"}


@pytest.mark.parametrize(
    ("prompt", "settings", "words"),
    [
        ([], {}, "empty"),
        ([5] * 200, {}, "context is 160"),
        ([5], {"max_tokens": 160}, "context is 160"),
        ([5, 5000], {}, "from 0 to 1023"),
        ([5], {"logit_bias": {5000: 1.0}}, "token 5000"),
    ],
)
def test_wrong_prompts_are_refused(
    engine: Engine, prompt: list[int], settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        engine.generate([prompt], SamplingParams(**settings))


def test_wrong_settings_are_refused_all_at_once() -> None:
    with pytest.raises(ConfigError, match=r"temperature is nan.*top_p is 0.*n is 0"):
        SamplingParams(temperature=float("nan"), top_p=0, n=0)


def test_models_that_no_page_table_serves_are_refused_by_reason() -> None:
    torch.manual_seed(0)
    small = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2}
    mamba = tf.MambaForCausalLM(tf.MambaConfig(**small, state_size=4))
    with pytest.raises(CaptureError, match=r"tokens outside of its attention.*aten\.conv1d.*Mamba"):
        capture_for_serving(mamba)
    t5 = tf.T5ForConditionalGeneration(
        tf.T5Config(vocab_size=64, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    )
    with pytest.raises(CaptureError, match="encoder-decoder"):
        capture_for_serving(t5)
    # attention in one layer, a convolution over the tokens in the other: its graph has attention
    # nodes, and answers would be wrong without an error
    lfm2 = tf.Lfm2ForCausalLM(
        tf.Lfm2Config(
            **small,
            intermediate_size=24,
            num_attention_heads=2,
            num_key_value_heads=1,
            layer_types=["conv", "full_attention"],
        )
    )
    with pytest.raises(CaptureError, match=r"tokens outside of its attention.*aten\.conv1d.*Lfm2"):
        capture_for_serving(lfm2)
