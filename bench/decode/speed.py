"""Decoding speed of lakh and its peers: the same weights, prompts and number of new tokens, in one run.

Each system generates 1 token and `new` tokens; the difference gives the cost of a token, and the first figure is the
time to first token. `cpu_ms_per_token` is the process's CPU time, which other load on the machine disturbs least;
`tok_per_s` is by the wall clock, over the whole batch. Each of the two times is the best of `repeats` alternating
rounds (the best difference would flatter: it belongs to the slowest first token). `bandwidth_fraction` is weight bytes
read per second over the rate of a large product (CPU) or copy (GPU) in the same run.
"""

from __future__ import annotations

import functools
import gc
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bench.harness import BenchRow, SystemFailed, alternate, best
from lakh.errors import UserError
from lakh.server.engine import Engine, SamplingParams
from lakh.server.gc_control import full_collections_disabled
from lakh.server.model import weights as model_weights
from lakh.server.model.cpu import native, packed
from lakh.server.model.inference import Precision, can_keep_stored
from lakh.server.model.runner import KvDtype
from lakh.spec.model import Model
from lakh.tokens.tokenizer import Tokenizer
from lakh.workloads.code.formats import hf

__all__ = [
    "SHAPES",
    "SYSTEMS",
    "Started",
    "Times",
    "bench_decode",
    "measure",
    "per_token",
    "random_model",
    "read_Bps",
    "start_engine",
    "tokenizer_json",
]

SHAPES = {
    "135m": Model(
        layers=30, width=576, heads=9, kv_heads=3, ffn=1536, vocab=49152, context=8192, rope_base=100_000.0, tied=True
    ),
    # hidden 2048, 24 layers: the shape of public and own figures on an H200
    "1.2b": Model(layers=24, width=2048, heads=16, kv_heads=8, ffn=5504, vocab=32064, context=4096, tied=False),
}
SYSTEMS = (
    "lakh",
    "lakh-int8",
    "lakh-int4",
    "lakh-fp8",
    "lakh-kv8",
    "lakh-stored",
    "transformers",
    "transformers-static",
    "gpt-fast",
    "llama.cpp",
    "llama.cpp-q8_0",
    "llama.cpp-q4_k_m",
    "vllm-cpu",
)


Generate = Callable[[int], tuple[float, float] | None]
"""Completes the prompts with this number of new tokens each; a process of its own returns its wall and CPU seconds."""


def bench_decode(
    folder: Path,
    *,
    systems: Sequence[str],
    batches: Sequence[int] = (1,),
    prompt: int = 64,
    new: int = 48,
    repeats: int = 3,
    gpt_fast: str | None = None,
    llama_cpp: str | None = None,
    vllm_python: str | None = None,
    progress: Callable[[str], object] = lambda what: None,
) -> list[BenchRow]:
    """A row for every system and batch. `folder` is a Hugging Face directory, `gpt_fast` a checkout, `llama_cpp` the
    folder of a build's programs, `vllm_python` the Python of an environment with vllm-cpu."""
    start_of = {"gpt-fast": _gpt_fast(gpt_fast), "vllm-cpu": _vllm_cpu(vllm_python)}
    start_of |= {**_llama_cpp_systems(llama_cpp), **_START}
    loaded = model_weights.read(folder)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    bandwidth_Bps = read_Bps(device)
    tokenizer = Tokenizer.load(loaded.tokenizer_json)
    rows: list[BenchRow] = []
    for batch in batches:
        generator = torch.Generator().manual_seed(batch)
        prompts = torch.randint(20, tokenizer.vocab_size, (batch, prompt), generator=generator).tolist()
        started: dict[str, Started] = {}
        failed: dict[str, str] = {}
        for name in systems:
            progress(f"{name}, batch {batch}: loading")
            try:
                found = start_of[name](folder, loaded, tokenizer, prompts, device)
                if found is not None:
                    found.generate(new)  # compiles, captures, allocates
                    started[name] = found
            except SystemFailed as error:
                failed[name] = str(error)
        measures = {name: functools.partial(measure, found.generate, new) for name, found in started.items()}
        with full_collections_disabled():  # as in a server: a full garbage collection takes a fifth of a second
            found_times = alternate(measures, repeats, progress=progress)
        for name in (name for name in systems if name in started or name in failed):
            row: BenchRow = {"system": name, "device": device, "params": loaded.spec.parameters, "dtype": ""}
            row |= {"batch": batch, "prompt": prompt, "new": new}
            row |= dict.fromkeys(("tok_per_s", "cpu_ms_per_token", "ttft_ms", "bandwidth_fraction"))
            reason = failed.get(name) or found_times[name].failed
            if reason:
                rows.append(row | {"failed": reason})
                continue
            found = started[name]
            times = Times(*best(found_times[name].measured))
            wall_s = per_token(times.first_s, times.all_s, new)
            cpu_s = per_token(times.first_cpu_s, times.all_cpu_s, new)
            step_s = wall_s if device == "cuda" else cpu_s
            row |= {"dtype": found.dtype, "ttft_ms": times.first_s * 1e3, "note": found.note}
            # None if the machine was so busy that `new` tokens took no longer than one.
            row["tok_per_s"] = batch / wall_s if wall_s else None
            row["cpu_ms_per_token"] = cpu_s / batch * 1e3 if cpu_s else None
            row["bandwidth_fraction"] = found.weight_bytes / step_s / bandwidth_Bps if step_s else None
            rows.append(row)
        started.clear()
        measures.clear()
        gc.collect()
    if not rows:
        raise UserError(f"systems {', '.join(systems)}", f"none of them runs this model on a {device}", "choose others")
    return rows


class Times(NamedTuple):
    """Wall and CPU seconds for one token and for all."""

    first_s: float
    first_cpu_s: float
    all_s: float
    all_cpu_s: float


def measure(generate: Generate, new: int) -> Times:
    times: list[float] = []
    for count in (1, new):
        began_s, began_cpu_s = time.perf_counter(), time.process_time()
        own = generate(count)
        times += own or (time.perf_counter() - began_s, time.process_time() - began_cpu_s)
    return Times(*times)


def per_token(first: float, every: float, new: int) -> float | None:
    return (every - first) / (new - 1) if every > first else None


def read_Bps(device: str) -> float:
    """Bytes read per second: on a CPU per second of CPU time in the faster of torch's and our matrix-vector product; on
    a GPU by its clock in a copy, counting reads and writes.
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
    products: list[Callable[[], Tensor]] = [lambda: torch.mv(matrix, vector)]
    if native.open_library() is not None:
        own = packed.PackedMatrix(matrix.shape[1], {0: packed.pack(matrix, 32)})
        products.append(lambda: packed.linear(vector[None], own))
    seconds = []
    for product in products:
        for _ in range(4):
            began_s = time.process_time()
            product()
            seconds.append(time.process_time() - began_s)
    return matrix.nbytes / min(seconds)


# --- systems ------------------------------------------------------------------------------------------------


class Started(NamedTuple):
    """A system with the model loaded."""

    generate: Generate
    dtype: str
    weight_bytes: int
    """Read per step."""
    note: str = ""


Start = Callable[..., Started | None]
"""Loads the model; None if the system does not run it here."""


def _lakh(precision: Precision | None, kv_dtype: KvDtype = "auto") -> Start:
    def start(folder: Path, loaded: Any, tokenizer: Tokenizer, prompts: list[list[int]], device: str) -> Started | None:
        own: Precision = precision or ("bf16" if device == "cuda" else "f32")
        if own == "stored" and not can_keep_stored(loaded.spec, loaded.weights, torch.device(device)):
            return None
        try:
            return start_engine(loaded.name, loaded.spec, loaded.weights, tokenizer, prompts, own, kv_dtype)
        except UserError:
            if precision is None:
                raise
            return None  # only on some devices and for some widths

    return start


def start_engine(
    name: str,
    spec: Model,
    weights: Any,
    tokenizer: Tokenizer,
    prompts: list[list[int]],
    precision: Precision,
    kv_dtype: KvDtype = "auto",
) -> Started:
    """lakh's engine with these weights."""
    engine = Engine(name, spec, weights, tokenizer, precision=precision, kv_dtype=kv_dtype)

    def generate(count: int) -> None:
        rows = [engine.make_sequence(tuple(prompt), SamplingParams(max_tokens=count)) for prompt in prompts]
        for row in rows:
            row.end_ids = ()  # every system generates exactly `count` tokens
        engine.pool.reset()  # no cached prompts
        engine.scheduler.prompts_first = True  # as in Engine.generate
        engine.submit(*rows)
        while any(row.finish_reason is None for row in rows):
            engine.step()

    notes = [] if kv_dtype == "auto" else [f"KV cache {kv_dtype}"]
    library = native.open_library()
    if engine.network.device.type == "cpu" and library is not None:
        notes.append(f"{library.lakh_engine_selected().decode()} kernels")
    return Started(generate, engine.network.precision, engine.network.weight_bytes, ", ".join(notes))


def _transformers(static: bool) -> Start:
    def start(folder: Path, loaded: Any, tokenizer: Tokenizer, prompts: list[list[int]], device: str) -> Started | None:
        if static and device == "cpu":
            return None
        import transformers

        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        model = model.to(device).eval()
        ids = torch.tensor(prompts, device=device)
        options = {"cache_implementation": "static"} if static else {}

        def generate(count: int) -> None:
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
        return Started(generate, "bf16" if device == "cuda" else "f32", size)

    return start


def _gpt_fast(checkout: str | None) -> Start:
    def start(folder: Path, loaded: Any, tokenizer: Tokenizer, prompts: list[list[int]], device: str) -> Started | None:
        if checkout is None:
            return None
        from bench.decode import gpt_fast

        generate = gpt_fast.start(checkout, loaded.spec, loaded.weights, prompts, device)
        size_of_number = 2 if device == "cuda" else 4
        dtype = "bf16" if device == "cuda" else "f32"
        return Started(generate, dtype, size_of_number * loaded.spec.parameters)

    return start


def _llama_cpp_systems(folder: str | None) -> dict[str, Start]:
    from bench.decode import llama_cpp

    build = llama_cpp.require_build(folder) if folder else None
    formats = {"llama.cpp": "f32", "llama.cpp-q8_0": "q8_0", "llama.cpp-q4_k_m": "q4_k_m"}
    return {name: _llama_cpp(quantization, build) for name, quantization in formats.items()}


def _llama_cpp(quantization: str, build: Path | None) -> Start:
    def start(folder: Path, loaded: Any, tokenizer: Tokenizer, prompts: list[list[int]], device: str) -> Started | None:
        if device == "cuda" or len(prompts) > 1:
            return None
        from bench.decode import llama_cpp

        path = llama_cpp.convert(loaded.spec, loaded.weights, loaded.tokenizer_json, quantization, build)
        generate: Generate
        threads = torch.get_num_threads()
        if build is not None:
            generate, note = llama_cpp.start_build(build, path, prompts[0], threads), f"build {build}"
        else:
            generate, note = llama_cpp.start(path, prompts[0], threads), f"wheel: {llama_cpp.wheel_features()}"
        return Started(generate, quantization, path.stat().st_size, note)

    return start


def _vllm_cpu(python: str | None) -> Start:
    def start(folder: Path, loaded: Any, tokenizer: Tokenizer, prompts: list[list[int]], device: str) -> Started | None:
        if python is None or device == "cuda" or len(prompts) > 1:
            return None
        from bench.decode import vllm_cpu

        program = vllm_cpu.require_python(python)
        threads = torch.get_num_threads()
        peer = vllm_cpu.start(program, loaded.spec, loaded.weights, loaded.tokenizer_json, prompts[0], threads)
        return Started(peer.generate, "f32", 4 * loaded.spec.parameters, f"vllm {peer.version}")

    return start


_START: dict[str, Start] = {
    "lakh": _lakh(None),
    "lakh-int8": _lakh("int8"),
    "lakh-int4": _lakh("int4"),
    "lakh-fp8": _lakh("fp8"),
    "lakh-kv8": _lakh(None, "int8"),
    "lakh-stored": _lakh("stored"),
    "transformers": _transformers(static=False),
    "transformers-static": _transformers(static=True),
}


def random_model(shape: str, folder: Path) -> Path:
    """Write random weights of this shape as a Hugging Face directory, with a tokenizer that covers every id."""
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
    path.write_bytes(tokenizer_json(spec.vocab))
    hf.save(folder / "model", spec, weights, path)
    return folder / "model"


def tokenizer_json(num_ids: int) -> bytes:
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    from lakh.tokens.tokenizer import SPECIAL_TOKENS

    letters = pre_tokenizers.ByteLevel.alphabet()
    words = [*SPECIAL_TOKENS, *sorted(letters), "ab"]
    words += [f"w{number}" for number in range(num_ids - len(words))]
    # One merge: llama.cpp refuses a tokenizer without any.
    made = tokenizers.Tokenizer(
        models.BPE(vocab={word: number for number, word in enumerate(words)}, merges=[("a", "b")])
    )
    # The kind that lakh trains, which a GGUF file can describe.
    digits, byte_level = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(list(SPECIAL_TOKENS))
    return made.to_str().encode()
