"""Decoding speed beside its peers: the same weights, the same prompt, the same number of new tokens, in one run.

Each system is asked twice, for 1 and for `new` tokens, and the difference gives the cost of a token; the first figure
is the time to the first token. `cpu_ms_per_token` is the process's CPU time, which other work on the machine disturbs
least; `tok_per_s` is the clock's, over all rows of the batch. Of `repeats` alternating rounds each of the two times is
the best, for all systems alike (the best difference would flatter: it is that of the slowest first token).
`bandwidth_fraction` is weight bytes read per second over what a product (CPU) or copy (GPU) of a large tensor reads per
second in the same run.

Knows the engine and how to start its peers; prints nothing.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lakh.errors import UserError
from lakh.server.engine import Engine, SamplingParams
from lakh.server.gc_control import full_collections_disabled
from lakh.server.model import weights as model_weights
from lakh.server.model.cpu import kernels
from lakh.spec.model import Model
from lakh.tokens.tokenizer import Tokenizer
from lakh.workloads.code.formats import hf

__all__ = ["SHAPES", "SYSTEMS", "Row", "bench_decode", "random_model"]

SHAPES = {
    "135m": Model(
        layers=30, width=576, heads=9, kv_heads=3, ffn=1536, vocab=49152, context=8192, rope_base=100_000.0, tied=True
    ),
    # hidden 2048, 24 layers: the shape of which public and own figures on an H200 are known
    "1.2b": Model(layers=24, width=2048, heads=16, kv_heads=8, ffn=5504, vocab=32064, context=4096, tied=False),
}
SYSTEMS = ("lakh", "lakh-int8", "transformers", "transformers-static", "llama.cpp")


@dataclass(frozen=True)
class Row:
    system: str
    device: str
    params: int
    dtype: str
    batch: int
    prompt: int
    new: int
    tok_per_s: float | None
    """Like the other two of a token, None where the machine was so busy that `new` tokens took no longer than one."""
    cpu_ms_per_token: float | None
    ttft_ms: float
    bandwidth_fraction: float | None


Ask = Callable[[int], None]
"""Complete the prompts with so many new tokens each."""


def bench_decode(
    folder: Path,
    *,
    systems: Sequence[str],
    batches: Sequence[int] = (1,),
    prompt: int = 64,
    new: int = 48,
    repeats: int = 3,
    progress: Callable[[str], None] = lambda what: None,
) -> list[dict[str, Any]]:
    """Rows for every system and batch. `folder` is a Hugging Face directory."""
    loaded = model_weights.read(folder)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    read_Bps = _read_Bps(device)
    tokenizer = Tokenizer.load(loaded.tokenizer_json)
    rows = []
    for batch in batches:
        generator = torch.Generator().manual_seed(batch)
        prompts = torch.randint(20, tokenizer.vocab_size, (batch, prompt), generator=generator).tolist()
        asks: dict[str, tuple[Ask, str, int]] = {}
        for name in systems:
            progress(f"{name}, batch {batch}: loading")
            made = _START[name](folder, loaded, tokenizer, prompts, device)
            if made is not None:
                asks[name] = made
                made[0](new)  # compiles, captures, allocates
        best: dict[str, Times] = {}
        with full_collections_disabled():  # as a server is: a full collection takes a fifth of a second
            for number in range(repeats):
                for name, (ask, _, _) in asks.items():
                    progress(f"{name}, batch {batch}: round {number + 1} of {repeats}")
                    times = _measure(ask, new)
                    best[name] = Times(*map(min, best.get(name, times), times))
        for name, (_, dtype, weight_bytes) in asks.items():
            times = best[name]
            wall_s = _more(times.first_s, times.all_s, new)
            cpu_s = _more(times.first_cpu_s, times.all_cpu_s, new)
            step_s = wall_s if device == "cuda" else cpu_s
            rows.append(
                Row(
                    system=name,
                    device=device,
                    params=loaded.spec.parameters,
                    dtype=dtype,
                    batch=batch,
                    prompt=prompt,
                    new=new,
                    tok_per_s=batch / wall_s if wall_s else None,
                    cpu_ms_per_token=cpu_s / batch * 1e3 if cpu_s else None,
                    ttft_ms=times.first_s * 1e3,
                    bandwidth_fraction=weight_bytes / step_s / read_Bps if step_s else None,
                )
            )
        asks.clear()
        gc.collect()
    if not rows:
        raise UserError(f"systems {', '.join(systems)}", f"none of them runs this model on a {device}", "choose others")
    return [asdict(row) for row in rows]


class Times(NamedTuple):
    """Seconds for one token and for all of them, by the clock and of CPU."""

    first_s: float
    first_cpu_s: float
    all_s: float
    all_cpu_s: float


def _measure(ask: Ask, new: int) -> Times:
    times = []
    for count in (1, new):
        began_s, began_cpu_s = time.perf_counter(), time.process_time()
        ask(count)
        times += [time.perf_counter() - began_s, time.process_time() - began_cpu_s]
    return Times(*times)


def _more(first: float, every: float, new: int) -> float | None:
    """What one more token takes."""
    return (every - first) / (new - 1) if every > first else None


def _read_Bps(device: str) -> float:
    """Bytes per second of CPU time in a large matrix-vector product, torch's or ours, whichever reads faster; on a GPU
    by its clock in a copy, both ways.
    """
    if device == "cuda":
        source = torch.empty(1 << 30, dtype=torch.int32, device="cuda")
        target = torch.empty_like(source)
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        for _ in range(2):
            target.copy_(source)
        events[0].record()
        for _ in range(5):
            target.copy_(source)
        events[1].record()
        torch.cuda.synchronize()
        return 5 * 2 * source.nbytes / (events[0].elapsed_time(events[1]) / 1e3)
    matrix, vector = torch.ones(1 << 15, 1 << 12), torch.ones(1 << 12)
    weights, row = matrix.numpy(), vector[None].numpy()
    seconds = []
    for product in (lambda: torch.mv(matrix, vector), lambda: kernels.head_f32(weights, row)):
        for _ in range(4):
            began_s = time.process_time()
            product()
            seconds.append(time.process_time() - began_s)
    return matrix.nbytes / min(seconds)


# --- systems ------------------------------------------------------------------------------------------------

Made = tuple[Ask, str, int] | None


def _lakh(precision: Any) -> Callable[..., Made]:
    def start(folder: Path, loaded: Any, tokenizer: Tokenizer, prompts: list[list[int]], device: str) -> Made:
        try:
            engine = Engine(loaded.name, loaded.spec, loaded.weights, tokenizer, precision=precision)
        except UserError:
            if precision is None:
                raise
            return None  # a format for CPUs, and for some widths only

        def ask(count: int) -> None:
            rows = [engine.make_sequence(tuple(prompt), SamplingParams(max_tokens=count)) for prompt in prompts]
            for row in rows:
                row.eot = -1  # random weights may draw it; every system makes `count` tokens
            engine.pool.reset()  # every prompt is new
            engine.submit(*rows)
            while any(row.finish_reason is None for row in rows):
                engine.step()

        return ask, engine.network.precision, engine.network.weight_bytes

    return start


def _transformers(static: bool) -> Callable[..., Made]:
    def start(folder: Path, loaded: Any, tokenizer: Tokenizer, prompts: list[list[int]], device: str) -> Made:
        if static and device == "cpu":
            return None
        try:
            import transformers
        except ModuleNotFoundError:
            raise UserError("transformers", "is not installed", "pip install transformers, or leave it out") from None
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        model = model.to(device).eval()
        ids = torch.tensor(prompts, device=device)
        options = {"cache_implementation": "static"} if static else {}

        def ask(count: int) -> None:
            with torch.inference_mode():
                made = model.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    max_new_tokens=count,
                    min_new_tokens=count,
                    do_sample=False,
                    pad_token_id=0,
                    **options,
                )
            assert made.shape[1] == ids.shape[1] + count
            if device == "cuda":
                torch.cuda.synchronize()

        size = sum(p.nbytes for p in model.parameters()) - (0 if loaded.spec.tied else model.lm_head.weight.nbytes)
        return ask, "bf16" if device == "cuda" else "f32", size

    return start


def _llama_cpp(folder: Path, loaded: Any, tokenizer: Tokenizer, prompts: list[list[int]], device: str) -> Made:
    if device == "cuda" or len(prompts) > 1:
        return None
    from lakh.server.bench import llama_cpp as bench_llama_cpp

    ask = bench_llama_cpp.start(loaded.spec, loaded.weights, loaded.tokenizer_json, prompts[0], torch.get_num_threads())
    return ask, "f32", 4 * loaded.spec.parameters


_START: dict[str, Callable[..., Made]] = {
    "lakh": _lakh(None),
    "lakh-int8": _lakh("int8"),
    "transformers": _transformers(static=False),
    "transformers-static": _transformers(static=True),
    "llama.cpp": _llama_cpp,
}


# --- a model to measure -------------------------------------------------------------------------------------


def random_model(shape: str, folder: Path) -> Path:
    """Random weights in this shape, as a Hugging Face directory with a tokenizer that knows every id."""
    spec = SHAPES[shape]
    device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
    generator = torch.Generator(device).manual_seed(0)
    weights: dict[str, Tensor] = {}
    for name, size in hf.shapes(spec).items():
        noise = torch.ones(size, device=device)
        if len(size) > 1:
            noise.normal_(0.0, 0.02, generator=generator)
        weights[name] = noise.to("cpu", dtype)
    path = folder / "tokenizer.json"
    path.write_bytes(_tokenizer_json(spec.vocab))
    hf.save(folder / "model", spec, weights, path)
    return folder / "model"


def _tokenizer_json(num_ids: int) -> bytes:
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    from lakh.tokens.tokenizer import SPECIAL_TOKENS

    letters = pre_tokenizers.ByteLevel.alphabet()
    words = [*SPECIAL_TOKENS, *sorted(letters)]
    words += [f"w{number}" for number in range(num_ids - len(words))]
    made = tokenizers.Tokenizer(models.BPE(vocab={word: number for number, word in enumerate(words)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(list(SPECIAL_TOKENS))
    return made.to_str().encode()
