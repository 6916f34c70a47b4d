"""Offline generation: completes many prompts at once, for throughput instead of latency.

Hundreds of sequences run together, tokens are sampled on the device, and the host reads them every BURST steps, when it
looks for stop strings and starts new sequences. Samples of one prompt share its KV-cache blocks. Blocks for all tokens
of a sequence are reserved when it starts, so none is preempted. A sequence's tokens are those that `Engine.generate`
gives it, by the same logits and random numbers (in float32; in bfloat16 sums of other shapes may round differently).
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as ListOf
from dataclasses import fields
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from lakh.errors import UserError
from lakh.server.engine import Engine
from lakh.server.model.inference import SequenceChunk
from lakh.server.prompts.encoder import Prompt
from lakh.server.sampling.tokens import SamplingParams, sample_uniform_batch
from lakh.server.sequence import Completion, FinishReason, Sequence

if TYPE_CHECKING:
    from lakh.server.model.gpu.decode import Decoder
    from lakh.server.model.runner import Runner
    from lakh.server.prompts.fim import Order

__all__ = ["OfflineEngine"]

MAX_SEQS = {"cpu": 32, "cuda": 512}
BURST = {"cpu": 1, "cuda": 16}  # steps between two reads: tokens past the end of a sequence against reads
PREFILL_TOKENS = {"cpu": 512, "cuda": 16_384}  # prompt tokens that are computed together
GRAPH_SIZES = (16, 64, 128, 256, 512)
# Without cuDNN, torch's first choice on new GPUs: it builds a plan for every prompt length, 50 ms each on an H200.
ATTENTION = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]

COMMON, OWN = ("temperature", "top_p", "stop"), ("max_tokens", "seed", "ignore_eos")
"""Sampling parameters that all prompts share, and those that each may have of its own. No others are supported."""

StopWhen = Callable[[str], bool]
"""Whether the text so far is complete."""


class OfflineEngine:
    """Uses the model, cache and scheduler of an engine that does nothing else meanwhile."""

    def __init__(self, engine: Engine, *, max_seqs: int | None = None, burst: int | None = None) -> None:
        self.engine = engine
        kind = engine.device.type
        self.max_seqs, self.burst = max_seqs or MAX_SEQS[kind], burst or BURST[kind]
        self._prefill_tokens = PREFILL_TOKENS[kind]
        runner = engine.runner
        decoder = runner.decoder
        self._decode = partial(_eager_burst, runner) if decoder is None else partial(_graph_burst, decoder)

    @staticmethod
    def load(path: str) -> OfflineEngine:
        return OfflineEngine(Engine.load(path))

    def infill(self, prefix: str, suffix: str, max_tokens: int, order: Order = "psm") -> tuple[int, ...]:
        return self.engine.prompts.infill(prefix, suffix, max_tokens, order)

    def generate(
        self,
        prompts: ListOf[Prompt],
        samplings: ListOf[SamplingParams],
        *,
        stop_when: StopWhen | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> list[Completion]:
        """Complete every prompt with its SamplingParams, of which those of COMMON are the same for all.

        A completion also ends when `stop_when` returns True for its text. Calls `progress` with the number of finished
        completions.
        """
        if not prompts:
            return []
        _check_supported(samplings)
        engine, scheduler, common = self.engine, self.engine.scheduler, samplings[0]
        seqs = engine.make_sequences(prompts, samplings)
        keys = {seq: _noise_keys(seq) for seq in seqs}
        texts = dict.fromkeys(seqs, "")
        done: dict[Sequence, Completion] = {}
        # The longest first, because they finish last; copies of a prompt together, because they share blocks.
        scheduler.submit(sorted(seqs, key=lambda seq: (-len(seq.prompt) - seq.max_new_tokens, seq.prompt)))
        try:
            while len(done) < len(seqs):
                self._admit()
                running = list(scheduler.running)
                room = min(engine.spec.context + 1 - len(seq.ids) for seq in running)
                steps = max(1, min(self.burst, room, max(seq.max_new_tokens - len(seq.tokens) for seq in running)))
                burst = self._decode(running, steps, common, _burst_keys(running, keys, steps))
                for seq, tokens in zip(running, burst, strict=True):
                    texts[seq], completion = self._read(seq, tokens, texts[seq], common.stop, stop_when)
                    if completion is not None:
                        done[seq] = completion
                        scheduler.finish(seq)
                if progress is not None:
                    progress(len(done))
        finally:
            scheduler.abort([seq for seq in seqs if seq not in done])
        return [done[seq] for seq in seqs]

    def _admit(self) -> None:
        context, burst = self.engine.spec.context, self.burst
        self.engine.scheduler.admit_reserved(
            self.max_seqs,
            self.engine.weights_version,
            num_tokens=lambda seq: min(len(seq.prompt) + seq.max_new_tokens + burst, context),
            prefill=self._prefill,
            prefill_tokens=self._prefill_tokens,
        )

    @torch.inference_mode()
    def _prefill(self, seqs: list[Sequence]) -> None:
        chunks = [
            SequenceChunk(seq.prompt[seq.num_computed : -1], seq.num_computed, _blocks(seq), scored=0) for seq in seqs
        ]
        with sdpa_kernel(ATTENTION):
            self.engine.network.forward(chunks, self.engine.cache)

    def _read(
        self, seq: Sequence, tokens: list[int], text: str, stops: tuple[str, ...], stop_when: StopWhen | None
    ) -> tuple[str, Completion | None]:
        """Append the tokens of a burst; returns the text so far, and the completion if it has finished."""
        tokenizer = self.engine.tokenizer
        tokens = tokens[: seq.max_new_tokens - len(seq.tokens)]
        end_ids = () if seq.sampling.ignore_eos else seq.end_ids
        end = next((at for at, token in enumerate(tokens) if token in end_ids), None)
        is_eot = end is not None
        if end is not None:
            tokens = tokens[: end + 1]
        is_first = not seq.tokens
        seq.tokens += tokens
        seq.ids += tokens
        text += seq.detokenizer.decode_all(tokens) if is_first else tokenizer.decode_continuation(tokens)
        is_full = len(seq.tokens) >= seq.max_new_tokens
        is_stopped = any(stop in text for stop in stops) or (stop_when is not None and stop_when(text))
        if not (is_eot or is_full or is_stopped):
            return text, None
        text = seq.detokenizer.decode_all(seq.tokens)  # as a whole: bursts may split characters
        ends = [(at, stop) for stop in stops if (at := text.find(stop)) >= 0]
        is_stopped = bool(ends) or (stop_when is not None and stop_when(text))
        if not (is_eot or is_full or is_stopped):
            return text, None
        reason: FinishReason = "stop" if is_eot or is_stopped else "length"
        seq.finish_reason = reason
        stop_reason = min(ends)[1] if ends else None
        return text, Completion(
            text[: min(ends)[0]] if ends else text,
            tuple(seq.tokens),
            reason,
            len(seq.prompt),
            stop_reason=stop_reason,
        )


def _check_supported(samplings: ListOf[SamplingParams]) -> None:
    """Tokens are sampled on the device, by what all sequences share."""
    for item in fields(SamplingParams):
        values = {getattr(sampling, item.name) for sampling in samplings}
        if item.name in COMMON and len(values) > 1:
            raise UserError(item.name, "differs between prompts", "complete them in one call for each value")
        if item.name not in (*COMMON, *OWN) and values != {item.default}:
            raise UserError(item.name, "is not supported offline", "use Engine.generate, or a server")


@torch.inference_mode()
def _eager_burst(
    runner: Runner, seqs: list[Sequence], steps: int, sampling: SamplingParams, keys: Tensor
) -> list[list[int]]:
    """`steps` new tokens of every sequence, step by step through the network, on any device. Their blocks have room."""
    burst: list[list[int]] = [[] for _ in seqs]
    keys = keys.to(runner.network.device)
    for step in range(steps):
        chunks = [
            SequenceChunk([new[-1] if new else seq.ids[-1]], len(seq.ids) - 1 + step, _blocks(seq))
            for seq, new in zip(seqs, burst, strict=True)
        ]
        logits = runner.forward(chunks)
        tokens = sample_uniform_batch(logits, sampling.temperature, sampling.top_p, keys[:, step])
        for new, token in zip(burst, tokens.tolist(), strict=True):
            new.append(token)
    return burst


@torch.inference_mode()
def _graph_burst(
    decoder: Decoder, seqs: list[Sequence], steps: int, sampling: SamplingParams, keys: Tensor
) -> list[list[int]]:
    """The same with the decoder's CUDA graph, whose greedy tokens are replaced by the sampled ones. Reads once."""
    last, positions = [seq.ids[-1] for seq in seqs], [len(seq.ids) - 1 for seq in seqs]
    batch = decoder.load_batch(last, positions, [_blocks(seq) for seq in seqs], GRAPH_SIZES)
    device = batch.tokens.device
    padded = torch.zeros(len(batch), steps, dtype=torch.int64)
    padded[: len(seqs)] = keys
    padded = padded.to(device)
    history = torch.zeros(steps, len(batch), dtype=torch.int64, device=device)
    for step in range(steps):
        batch.replay()
        tokens = sample_uniform_batch(batch.logits, sampling.temperature, sampling.top_p, padded[:, step])
        batch.set_tokens(tokens)
        history[step] = tokens
    return history[:, : len(seqs)].T.tolist()


def _noise_keys(seq: Sequence) -> Tensor:
    """The keys of all its tokens; none for a greedy sequence."""
    count = 0 if seq.sampling.temperature == 0 else seq.max_new_tokens
    return torch.tensor([seq.noise_keys[position] for position in range(count)], dtype=torch.int64)


def _burst_keys(seqs: list[Sequence], keys: dict[Sequence, Tensor], steps: int) -> Tensor:
    """Keys of the next steps, sequences x steps; 0 past the end of a sequence, where tokens are dropped."""
    keys_BS = torch.zeros(len(seqs), steps, dtype=torch.int64)
    for seq, keys_S in zip(seqs, keys_BS, strict=True):
        part = keys[seq][len(seq.tokens) : len(seq.tokens) + steps]
        keys_S[: len(part)] = part
    return keys_BS


def _blocks(seq: Sequence) -> ListOf[int]:
    assert seq.lease is not None
    return seq.lease.blocks
