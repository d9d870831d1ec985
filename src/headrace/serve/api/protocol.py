"""Request bodies of the OpenAI endpoints, checked; unknown fields are ignored, as clients expect.

A field that the API has and this engine does not apply is refused with its name, never dropped.
Knows: field names, ranges, how they become `SamplingParams`. Does not know: tokenizers.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator

from headrace.serve.api.errors import ApiError
from headrace.serve.defaults import GenerationDefaults
from headrace.serve.params import Grammar, SamplingParams

MAX_PROMPTS = 256
MAX_INPUTS = 2048
Strict = ConfigDict(extra="ignore", strict=True)

Number = Annotated[float, Field(strict=False, allow_inf_nan=False)]


class StreamOptions(BaseModel):
    """stream_options."""

    model_config = Strict
    include_usage: bool = False
    continuous_usage_stats: bool = False


class JsonSchema(BaseModel):
    """response_format.json_schema."""

    model_config = ConfigDict(extra="ignore", populate_by_name=True)
    name: str = "answer"
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(BaseModel):
    """response_format: text, any JSON object, or JSON of a schema."""

    model_config = ConfigDict(extra="ignore")
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(BaseModel):
    """structured_outputs, as vLLM calls what the OpenAI API does not have."""

    model_config = ConfigDict(extra="ignore")
    json_: dict[str, Any] | str | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None


class GenerationRequest(BaseModel):
    """What chat and completions share."""

    model_config = Strict
    model: str | None = None
    max_tokens: int | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    top_k: int | None = None
    min_p: Number | None = None
    repetition_penalty: Number | None = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    logit_bias: dict[str, Number] | None = None
    seed: int | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int = 0
    skip_special_tokens: bool = True
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    return_token_ids: bool | None = False
    truncate_prompt_tokens: int | None = None
    user: str | None = None

    def check_stream(self) -> None:
        """stream_options makes sense with stream only."""
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options needs stream=true", param="stream_options")

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with a chunk of usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    def stops(self) -> tuple[str, ...]:
        """Stop strings as a tuple."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    def sampling(
        self,
        defaults: GenerationDefaults,
        *,
        max_tokens: int | None,
        logprobs: int | None,
        prompt_logprobs: int | None = None,
        grammar: Grammar | None = None,
    ) -> SamplingParams:
        """Settings of the engine. defaults: for what the request leaves open; their stop strings
        hold beside its own.
        """
        names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
        names += ("presence_penalty", "frequency_penalty")
        given = {n: v for n in names if (v := getattr(self, n)) is not None}
        return SamplingParams(
            **{**defaults.sampling, **given},
            logit_bias=self._bias(),
            seed=self.seed,
            n=1 if self.n is None else self.n,
            max_tokens=max_tokens,
            min_tokens=self.min_tokens,
            stop=tuple(dict.fromkeys((*self.stops(), *defaults.stop))),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            include_stop_str_in_output=self.include_stop_str_in_output,
            ignore_eos=self.ignore_eos,
            skip_special_tokens=self.skip_special_tokens,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            grammar=grammar or self.grammar(),
        )

    def _bias(self) -> dict[int, float]:
        try:
            return {int(k): v for k, v in (self.logit_bias or {}).items()}
        except ValueError as error:
            message = "the keys of logit_bias are token ids written as text, such as '50256'"
            raise ApiError(400, message, param="logit_bias") from error

    def grammar(self) -> Grammar | None:
        """What the answer must match, if anything."""
        structured = self.structured_outputs
        if structured is not None:
            if structured.json_ is not None:
                source = structured.json_
                text = source if isinstance(source, str) else json.dumps(source)
                return Grammar(kind="json_schema", source=text)
            if structured.regex is not None:
                return Grammar(kind="regex", source=structured.regex)
            if structured.choice:
                return Grammar(kind="choice", source=json.dumps(structured.choice))
            if structured.grammar is not None:
                return Grammar(kind="lark", source=structured.grammar)
        wanted = self.response_format
        if wanted is None or wanted.type == "text":
            return None
        if wanted.type == "json_object":
            return Grammar(kind="json_object", source="")
        if wanted.json_schema is None:
            message = "type json_schema needs the field json_schema"
            raise ApiError(400, message, param="response_format")
        return Grammar(kind="json_schema", source=json.dumps(wanted.json_schema.schema_))


class CompletionRequest(GenerationRequest):
    """POST /v1/completions."""

    prompt: str | list[str] | list[int] | list[list[int]]
    logprobs: int | None = None
    echo: bool = False
    suffix: str | None = None
    best_of: int | None = None
    add_special_tokens: bool = True

    @field_validator("prompt")
    @classmethod
    def _bounded(cls, value: Any) -> Any:
        many = isinstance(value, list) and value and not isinstance(value[0], int)
        if value == [] or (many and len(value) > MAX_PROMPTS):
            raise ValueError(f"a prompt, or a list of 1 to {MAX_PROMPTS} prompts, is needed")
        return value

    def prompts(self) -> list[str | list[int]]:
        """The prompts one by one."""
        value: Any = self.prompt
        if isinstance(value, str) or (value and isinstance(value[0], int)):
            return [value]
        return list(value)


class ToolFunction(BaseModel):
    """tools[].function."""

    model_config = ConfigDict(extra="allow")
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(BaseModel):
    """tools[]."""

    model_config = ConfigDict(extra="allow")
    type: Literal["function"] = "function"
    function: ToolFunction


class ChatRequest(GenerationRequest):
    """POST /v1/chat/completions."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[Tool] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    reasoning_effort: str | None = None

    @field_validator("messages")
    @classmethod
    def _roles(cls, value: list[dict[str, Any]]) -> list[dict[str, Any]]:
        for i, message in enumerate(value):
            if not isinstance(message.get("role"), str):
                raise ValueError(f"message {i} has no role")
            if message.get("content") is None and not message.get("tool_calls"):
                raise ValueError(f"message {i} has no content")
        return value

    def wanted_logprobs(self) -> int | None:
        """Alternatives a token; None for no log-probabilities."""
        if self.top_logprobs is not None and not self.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs=true", param="top_logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None


class PoolingRequest(BaseModel):
    """What embeddings and classification share."""

    model_config = Strict
    model: str | None = None
    truncate_prompt_tokens: int | None = Field(default=None, ge=-1)
    add_special_tokens: bool = True
    user: str | None = None


def _some_inputs(value: Any) -> Any:
    many = isinstance(value, list) and value and not isinstance(value[0], int)
    if value == [] or (many and len(value) > MAX_INPUTS):
        raise ValueError(f"a text, or a list of 1 to {MAX_INPUTS} texts, is needed")
    return value


class EmbeddingRequest(PoolingRequest):
    """POST /v1/embeddings: texts, or texts as token ids."""

    input: Annotated[str | list[str] | list[int] | list[list[int]], AfterValidator(_some_inputs)]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = Field(default=None, ge=1)


class TextPair(BaseModel):
    """Two texts that a classifier compares."""

    model_config = Strict
    text: str
    text_pair: str


class ClassifyRequest(PoolingRequest):
    """POST /v1/classify: texts, pairs of texts, or token ids."""

    input: Annotated[
        str | TextPair | list[str] | list[TextPair] | list[int] | list[list[int]],
        AfterValidator(_some_inputs),
    ]
    use_activation: bool | None = None


class TokenizeRequest(BaseModel):
    """POST /tokenize: a prompt, or messages of a chat."""

    model_config = Strict
    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True


class DetokenizeRequest(BaseModel):
    """POST /detokenize."""

    model_config = Strict
    model: str | None = None
    tokens: list[int]


class LoadAdapterRequest(BaseModel):
    """POST /v1/load_lora_adapter."""

    model_config = Strict
    lora_name: str = Field(min_length=1, max_length=200, pattern=r"^[\w.\-/]+$")
    lora_path: str = Field(min_length=1)
    load_inplace: bool = False


class UnloadAdapterRequest(BaseModel):
    """POST /v1/unload_lora_adapter."""

    model_config = Strict
    lora_name: str
