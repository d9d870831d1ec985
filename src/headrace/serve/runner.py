"""One turn of the engine: plan, run, read, update. Only the engine's thread comes here.

What a row of the device programs needs is kept in NumPy tables by row (page numbers, position, X

Knows: scheduler, programs, sampling, text. Does not know: threads, HTTP.

Shapes: A = rows (sequences that run at once), M = pages a sequence may have, O = rows of a step.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np

from headrace.errors import ConfigError
from headrace.serve import sampler
from headrace.serve.adapters import Adapters
from headrace.serve.draft import PromptLookup
from headrace.serve.grammar import GrammarCompiler, Matcher
from headrace.serve.model import ServedModel
from headrace.serve.pages import PagePool
from headrace.serve.params import SamplingParams
from headrace.serve.programs import Programs
from headrace.serve.request import Delta, FinishReason, Sequence, TokenLogprob
from headrace.serve.scheduler import Chunk, Plan, Scheduler
from headrace.serve.shapes import (
    Packed,
    Shapes,
    StepShape,
    choose_forms,
    packed_size,
    split_packed,
)
from headrace.serve.stats import EngineStats

log = logging.getLogger(__name__)


class Runner:
    """The state of the loop: tables by row, the scheduler, the programs, news not told yet."""

    def __init__(
        self,
        model: ServedModel,
        shapes: Shapes,
        options: Any,
        stats: EngineStats,
        adapters: Adapters,
    ) -> None:
        self.model, self.shapes, self.stats, self.adapters = model, shapes, stats, adapters
        writing = [e for e in model.entries.values() if e.writes]
        forms = choose_forms(writing, shapes, model.mesh)
        self.programs = Programs(model=model, shapes=shapes, forms=forms)
        pool = PagePool(shapes.num_pages, shapes.page_size, caching=options.prefix_caching)
        self.scheduler = Scheduler(
            pool,
            max_num_seqs=shapes.max_num_seqs,
            block=shapes.block,
            max_blocks=shapes.block_steps[-1],
        )
        self.scheduler.on_pages = self._write_table
        self.scheduler.on_leave = self._leave_row
        self.drafts = PromptLookup(shapes.num_drafts) if shapes.num_drafts else None
        if self.drafts is not None:
            self.scheduler.draft = self.drafts
        A, M = shapes.max_num_seqs, shapes.pages_a_sequence
        self._tables = np.zeros((A, M), np.int32)
        self._computed = np.zeros(A, np.int32)
        self._last = np.zeros(A, np.int32)
        self._lora = np.zeros(A, np.int32)
        self._integers = np.zeros((sampler.NUM_INTEGERS, A), np.int32)
        self._integers[4] = np.arange(A)
        self._floats = np.zeros((sampler.NUM_FLOATS, A), np.float32)
        self._shaped = np.zeros(A, bool)
        self._set = np.zeros(A, bool)
        self._drafted: dict[int, tuple[int, ...]] = {}
        self._outbox: dict[Any, list[tuple[Any, Delta]]] = {}
        self._news: list[tuple[Sequence, tuple[int, ...], tuple[TokenLogprob, ...]]] = []
        self._grammars: GrammarCompiler | None = None

    # requests -----------------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        """Whether there is nothing to compute and nothing to tell."""
        return not (self.scheduler.running or self.scheduler.waiting or self._news)

    def matcher(self, params: SamplingParams) -> Matcher | None:
        """The grammar of a request, compiled (in the caller's thread)."""
        if params.grammar is None:
            return None
        if self.model.tokenizer is None:
            raise ConfigError("structured output needs a tokenizer")
        if self._grammars is None:
            self._grammars = GrammarCompiler(self.model.tokenizer, self.model.vocab_size)
        return self._grammars.matcher(params.grammar)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence."""
        if sequence.cancelled:
            self.refuse(sequence, "")
        else:
            self.scheduler.add(sequence)

    def refuse(self, sequence: Sequence, why: str) -> None:
        """End a sequence that never ran."""
        sequence.finished = "error" if why else "abort"
        if sequence.held is not None:
            self.adapters.drop(sequence.held)
            sequence.held = None
        self._told(sequence, Delta(finish_reason=sequence.finished, error=why))
        self.deliver()

    def cancel(self, sequences: Iterable[Sequence]) -> None:
        """End sequences now; their pages are free before the next step."""
        for sequence in sequences:
            sequence.cancelled = True
            if sequence.finished is None:
                self._finish(sequence, "abort")
                self._told(sequence, Delta(finish_reason="abort"))
        self.deliver()

    def abort_all(self, reason: FinishReason, why: str) -> None:
        """End everything, at shutdown or after a failure."""
        self._news.clear()
        for sequence in [*self.scheduler.running, *self.scheduler.waiting]:
            self._finish(sequence, reason)
            self._told(sequence, Delta(finish_reason=reason, error=why))
        self.deliver()

    # one turn -----------------------------------------------------------------------------------

    def turn(self) -> None:
        """Compute one step, and tell the news of the step before while the device works."""
        begin = time.perf_counter()
        plan = self.scheduler.plan()
        self.stats.preemptions = self.scheduler.num_preemptions
        if not plan:
            self._tell_news()
            if not self.scheduler.running and self.scheduler.waiting:
                time.sleep(0.001)
            return
        shape = self._shape(plan)
        packed, parts, chunk_starts = self._pack(plan, shape)
        rows = self._rows(plan, chunk_starts)
        parts.select_O[: len(rows)] = [at for _, at, _ in rows]
        lora = bool(parts.adapters_T.any())
        hidden, chosen = self.programs.step(shape, packed, lora=lora)
        started = time.perf_counter()
        scores = self._score(plan, shape, hidden, chunk_starts)
        self._tell_news()
        told = time.perf_counter()
        sampled = self._sample(rows, chosen) if rows else None
        sampling = time.perf_counter()
        tokens = np.asarray(sampled.token) if sampled is not None else None
        done = time.perf_counter()
        self._keep_scores(scores)
        self._update(plan, rows, sampled, tokens)
        self.stats.steps += 1
        self.stats.wait_seconds += done - sampling
        self.stats.text_seconds += told - started
        self.stats.host_seconds += (started - begin) + (time.perf_counter() - done)
        self.stats.observe("iteration_tokens", len(plan.decode) + sum(c.count for c in plan.chunks))

    def _shape(self, plan: Plan) -> StepShape:
        blocks = sum(-(-c.count // self.shapes.block) for c in plan.chunks)
        return self.shapes.fit(len(plan.decode), blocks)

    def _pack(self, plan: Plan, shape: StepShape) -> tuple[np.ndarray, Packed, list[int]]:
        """The step's integers, whole and in parts, and where each chunk's tokens begin."""
        sizes, D, S = self.shapes, shape.decode, self.shapes.page_size
        packed = np.zeros(packed_size(sizes, shape), np.int32)
        parts = split_packed(packed, sizes, shape)
        tokens, positions, slots, lora, _, tables = parts
        positions[:] = -1
        n = len(plan.decode)
        if n:
            rows = np.fromiter((s.slot for s in plan.decode), np.int64, n)
            at = self._computed[rows]
            tokens[:n], positions[:n], lora[:n] = self._last[rows], at, self._lora[rows]
            slots[:n] = self._tables[rows, at // S] * S + at % S
            tables[:n] = self._tables[rows]
        starts: list[int] = []
        row, base = D, D
        for chunk in plan.chunks:
            sequence, count = chunk.sequence, chunk.count
            stop = base + count
            at = np.arange(chunk.start, chunk.start + count, dtype=np.int32)
            known = sequence.tokens[chunk.start : chunk.start + count]
            tokens[base:stop] = [*known, *chunk.drafts]
            positions[base:stop] = at
            slots[base:stop] = self._tables[sequence.slot, at // S] * S + at % S
            lora[base:stop] = sequence.lora_slot
            blocks = -(-count // sizes.block)
            tables[row : row + blocks] = self._tables[sequence.slot]
            starts.append(base)
            row, base = row + blocks, base + blocks * sizes.block
        return packed, parts, starts

    def _rows(self, plan: Plan, starts: list[int]) -> list[tuple[Sequence, int, int]]:
        """Rows that get a token: (sequence, token of the step, number of guesses before it)."""
        rows = [(s, i, 0) for i, s in enumerate(plan.decode)]
        for chunk, start in zip(plan.chunks, starts, strict=True):
            if chunk.completes:
                last = start + chunk.count - 1
                first = last - len(chunk.drafts)
                rows += [(chunk.sequence, at, at - first) for at in range(first, last + 1)]
        return rows

    def _sample(self, rows: list[tuple[Sequence, int, int]], chosen: Any) -> sampler.Sampled:
        """Start drawing a token for every row; a sequence that ended meanwhile gets one too."""
        live = [sequence for sequence, _, _ in rows if sequence.slot >= 0]
        for sequence in live:
            self._set_row(sequence)
        n, width, padding = len(rows), chosen.shape[0], self.shapes.max_num_seqs
        index = np.fromiter((s.slot for s, _, _ in rows), np.int64, n)
        integers = np.zeros((sampler.NUM_INTEGERS, width), np.int32)
        floats = np.zeros((sampler.NUM_FLOATS, width), np.float32)
        floats[3] = 1.0
        integers[:, :n] = self._integers[:, index]
        floats[:, :n] = self._floats[:, index]
        integers[2, :n] = [s.num_generated + ahead for s, _, ahead in rows]
        integers[4, :n] = np.where(index < 0, padding, index)
        integers[4, n:] = padding  # has no counts
        shaped = any(self._shaped[s.slot] for s in live)
        variant: sampler.Variant = "drawn" if floats[0].any() else "greedy"
        bits = None
        if shaped:
            variant, bits = "shaped", self._bits(rows, width)
        return self.programs.sample(variant, chosen, integers, floats, bits)

    def _set_row(self, sequence: Sequence) -> None:
        """Fill the row of sampling settings of a sequence that begins to write."""
        slot, p = sequence.slot, sequence.params
        column = self._integers[:, slot]
        if self._set[slot]:
            return
        self._set[slot] = True
        column[0] = np.int32(sequence.seed & 0x7FFFFFFF)
        column[1] = np.int32((sequence.seed >> 31) & 0x7FFFFFFF)
        column[3] = max(p.top_k, 0)
        column[5] = p.logprobs is not None
        self._floats[:, slot] = (
            p.temperature,
            p.top_p,
            p.min_p,
            p.repetition_penalty,
            p.presence_penalty,
            p.frequency_penalty,
        )
        self._shaped[slot] = p.shapes_logits
        if p.shapes_logits:
            size = self.model.vocab_size
            written = sequence.tokens[sequence.num_prompt :]
            counts = np.bincount(written, minlength=size).astype(np.int32)
            seen = np.zeros(size, bool)
            seen[sequence.tokens[: sequence.num_prompt]] = True
            bias = np.zeros(size, np.float32)
            for token, value in p.logit_bias.items():
                bias[token] = value
            self.programs.set_shaping(slot, counts, seen=seen, bias=bias)

    def _bits(self, rows: list[tuple[Sequence, int, int]], width: int) -> np.ndarray:
        bits = np.full((width, -(-self.model.vocab_size // 32)), -1, np.int32)
        for i, (sequence, _, _) in enumerate(rows):
            if sequence.matcher is not None and sequence.finished is None:
                try:
                    sequence.matcher.fill(bits[i])
                except ConfigError as error:
                    self._fail(sequence, str(error))
            if sequence.num_generated < sequence.params.min_tokens:
                for end in self.model.end_ids:
                    bits[i, end // 32] &= ~np.int32(np.uint32(1 << (end % 32)).view(np.int32))
        return bits

    # results ------------------------------------------------------------------------------------

    def _update(
        self,
        plan: Plan,
        rows: list[tuple[Sequence, int, int]],
        sampled: sampler.Sampled | None,
        tokens: np.ndarray | None,
    ) -> None:
        now = time.monotonic()
        for chunk in plan.chunks:
            self._advance_chunk(chunk, now)
        if sampled is None or tokens is None:
            return
        written = tokens.tolist()
        described = self._described(rows, sampled)
        accepted: dict[int, tuple[Sequence, list[int]]] = {}
        for i, (sequence, _, ahead) in enumerate(rows):
            if sequence.finished is not None:
                continue
            if ahead:
                mine = accepted[id(sequence)][1]
                drafts = self._drafted[id(sequence)]
                if len(mine) != ahead or drafts[ahead - 1] != mine[-1]:
                    continue
                mine.append(written[i])
            else:
                accepted[id(sequence)] = (sequence, [written[i]])
        decoding = {id(s) for s in plan.decode}
        for sequence, mine in accepted.values():
            # The token that was fed is in the cache now, and so is every guess that came true.
            new = len(mine) if id(sequence) in self._drafted else int(id(sequence) in decoding)
            self._append(sequence, mine, new, described.get(id(sequence), ()), now)
        self._drafted.clear()

    def _advance_chunk(self, chunk: Chunk, now: float) -> None:
        sequence = chunk.sequence
        if sequence.finished is not None:
            return
        if chunk.drafts:
            self._drafted[id(sequence)] = chunk.drafts
            self.stats.drafted += len(chunk.drafts)
            return
        if not sequence.started:
            sequence.started = now
            self.stats.prompt_tokens += sequence.num_prompt
            self.stats.cached_tokens += sequence.num_cached
        self.scheduler.advance(sequence, chunk.count)
        self._computed[sequence.slot] = sequence.computed
        # A prompt of which one token is left goes on as if it decoded that token.
        self._last[sequence.slot] = sequence.tokens[-1]

    def _append(
        self,
        sequence: Sequence,
        mine: list[int],
        computed: int,
        logprobs: tuple[TokenLogprob, ...],
        now: float,
    ) -> None:
        """New tokens of one sequence; ends it where it must end."""
        params, ends = sequence.params, self.model.end_ids
        kept: list[int] = []
        for token in mine:
            kept.append(token)
            sequence.tokens.append(token)
            written = sequence.num_generated
            if sequence.matcher is not None and token not in ends:
                sequence.matcher_done = sequence.matcher.take(token)
            if token in ends and not params.ignore_eos:
                sequence.finished = "stop"
            elif token in params.stop_token_ids and written >= params.min_tokens:
                sequence.finished, sequence.stop_reason = "stop", token
            elif sequence.matcher_done:
                sequence.finished = "stop"
            elif written >= sequence.max_tokens:
                sequence.finished = "length"
            if sequence.finished is not None:
                break
        self.stats.accepted += len(kept) - 1
        self.stats.generation_tokens += len(kept)
        self._observe_token(sequence, now, len(kept))
        if computed:
            self.scheduler.advance(sequence, min(computed, len(kept)))
        self._computed[sequence.slot] = sequence.computed
        self._last[sequence.slot] = kept[-1]
        self._news.append((sequence, tuple(kept), logprobs))
        if sequence.finished is not None:
            self._finish(sequence, sequence.finished)

    def _observe_token(self, sequence: Sequence, now: float, count: int) -> None:
        if not sequence.first_token:
            sequence.first_token = now
            self.stats.observe("time_to_first_token", now - sequence.arrived)
        elif count:
            self.stats.observe("inter_token_latency", (now - sequence.last_token) / count)
        sequence.last_token = now

    def _described(
        self, rows: list[tuple[Sequence, int, int]], sampled: sampler.Sampled
    ) -> dict[int, tuple[TokenLogprob, ...]]:
        if not any(s.params.logprobs is not None for s, _, _ in rows):
            return {}
        result = _on_host(sampled)
        found: dict[int, tuple[TokenLogprob, ...]] = {}
        for i, (sequence, _, _) in enumerate(rows):
            if sequence.params.logprobs is not None:
                found[id(sequence)] = (_logprob(result, i, sequence.params.logprobs),)
        return found

    def _score(
        self, plan: Plan, shape: StepShape, hidden: Any, starts: list[int]
    ) -> list[tuple[Chunk, int, Any]]:
        """Start scoring prompts whose log-probabilities are wanted."""
        wanted = [
            (c, at)
            for c, at in zip(plan.chunks, starts, strict=True)
            if c.sequence.params.prompt_logprobs is not None
            and c.start < c.sequence.num_prompt
            and not c.drafts
        ]
        if not wanted:
            return []
        targets = np.zeros(self.shapes.tokens(shape), np.int32)
        for chunk, at in wanted:
            following = chunk.sequence.tokens[chunk.start + 1 : chunk.start + chunk.count + 1]
            targets[at : at + len(following)] = following
        result = self.programs.score(hidden, targets)
        return [(chunk, at, result) for chunk, at in wanted]

    def _keep_scores(self, scores: list[tuple[Chunk, int, Any]]) -> None:
        if not scores:
            return
        result = _on_host(scores[0][2])
        for chunk, at, _ in scores:
            sequence = chunk.sequence
            wanted = sequence.params.prompt_logprobs
            if sequence.finished is not None or wanted is None:
                continue
            if chunk.start == 0:
                sequence.prompt_scores[:] = [None]
            left = min(chunk.count, sequence.num_prompt - 1 - chunk.start)
            sequence.prompt_scores += [
                _logprob(
                    result,
                    at + i,
                    wanted,
                    token=sequence.tokens[chunk.start + i + 1],
                )
                for i in range(left)
            ]

    # news ---------------------------------------------------------------------------------------

    def _tell_news(self) -> None:
        """Turn new tokens into text and hand them over; stop strings end sequences here."""
        news, self._news = self._news, []
        for sequence, tokens, logprobs in news:
            try:
                self._tell(sequence, tokens, logprobs)
            except Exception as error:  # one answer's text must not stop the others
                log.exception("the text of %s failed", sequence.id)
                self._fail(sequence, f"{type(error).__name__} while decoding")
        self.deliver()

    def _tell(
        self, sequence: Sequence, tokens: tuple[int, ...], logprobs: tuple[TokenLogprob, ...]
    ) -> None:
        if sequence.cancelled:
            return
        text, stream = "", sequence.text
        if stream is not None:
            text = stream.push(tokens)
            if stream.stopped is not None and sequence.num_generated >= sequence.params.min_tokens:
                sequence.stop_reason = stream.stopped
                self._finish(sequence, "stop")
                sequence.finished = "stop"
            if sequence.finished is not None:
                text += stream.flush()
        first = sequence.prompt_told
        sequence.prompt_told = True
        scores = None
        if not first and sequence.params.prompt_logprobs is not None:
            scores = tuple(sequence.prompt_scores)
        self._told(
            sequence,
            Delta(
                index=sequence.index,
                token_ids=tokens,
                text=text,
                logprobs=logprobs,
                prompt_logprobs=scores,
                finish_reason=sequence.finished,
                stop_reason=sequence.stop_reason,
            ),
        )

    def _told(self, sequence: Sequence, delta: Delta) -> None:
        delta = replace(
            delta,
            index=sequence.index,
            num_prompt=sequence.num_prompt,
            num_generated=sequence.num_generated,
            num_cached=sequence.num_cached,
        )
        if sequence.ended:
            return
        sequence.ended = delta.finish_reason is not None
        if sequence.ended:
            self._observe_end(sequence, delta)
        if sequence.loop is None:
            sequence.sink(delta)
        else:
            self._outbox.setdefault(sequence.loop, []).append((sequence.sink, delta))

    def deliver(self) -> None:
        """Hand collected news to the listeners' event loops, one call a loop."""
        outbox, self._outbox = self._outbox, {}
        for loop, news in outbox.items():
            try:
                loop.call_soon_threadsafe(_call_sinks, news)
            except RuntimeError:
                log.info("a listener's event loop is closed; its answers are dropped")

    def _observe_end(self, sequence: Sequence, delta: Delta) -> None:
        now = time.monotonic()
        observe = self.stats.observe
        observe(f"finished:{delta.finish_reason}", 1)
        observe("e2e_request_latency", now - sequence.arrived)
        observe("request_prompt_tokens", sequence.num_prompt)
        observe("request_generation_tokens", sequence.num_generated)
        if sequence.started:
            observe("request_queue_time", sequence.started - sequence.arrived)
        if sequence.first_token and sequence.num_generated > 1:
            span = sequence.last_token - sequence.first_token
            observe("request_time_per_output_token", span / (sequence.num_generated - 1))

    # leaving ------------------------------------------------------------------------------------

    def _fail(self, sequence: Sequence, why: str) -> None:
        self._finish(sequence, "error")
        self._told(sequence, Delta(finish_reason="error", error=why))

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """Free everything a sequence holds; does nothing the second time."""
        self.scheduler.finish(sequence)
        sequence.finished = sequence.finished or reason
        if sequence.held is not None:
            self.adapters.drop(sequence.held)
            sequence.held = None
        if self.drafts is not None:
            self.drafts.forget(sequence)

    def _write_table(self, sequence: Sequence) -> None:
        pages, slot = sequence.pages, sequence.slot
        self._tables[slot, : len(pages)] = pages
        self._lora[slot] = sequence.lora_slot
        self._computed[slot] = sequence.computed

    def _leave_row(self, sequence: Sequence) -> None:
        slot = sequence.slot
        self._set[slot] = False
        if self._shaped[slot]:
            # The next sequence of the row may share a step with ones that shape their logits.
            self._shaped[slot] = False
            zeros = np.zeros(self.model.vocab_size, np.int32)
            self.programs.set_shaping(slot, zeros, seen=None, bias=None)


def _on_host(sampled: sampler.Sampled) -> sampler.Sampled:
    arrays: list[Any] = [np.asarray(x) for x in sampled]
    return sampler.Sampled(*arrays)


def _call_sinks(news: list[tuple[Any, Delta]]) -> None:
    for sink, delta in news:
        sink(delta)


def _logprob(
    result: sampler.Sampled, i: int, num_top: int, *, token: int | None = None
) -> TokenLogprob:
    ids, values = result.top_ids[i, :num_top], result.top_logprobs[i, :num_top]
    return TokenLogprob(
        token_id=int(result.token[i]) if token is None else token,
        logprob=float(result.logprob[i]),
        top=tuple(zip(ids.tolist(), values.tolist(), strict=True)),
    )
