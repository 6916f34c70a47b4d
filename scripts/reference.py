"""Write the generated pages of docs/reference (settings, architectures, events, errors, commands) and the table of the
README. `--check` only compares.

What these pages say is taken from the code, so that they cannot drift; a test runs the comparison.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path

import click

from lakh import config, errors, events
from lakh.cli.main import cli
from lakh.spec import Run
from lakh.trainer.recovery.resume_rules import reason_fixed

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "reference"
NOTE = "<!-- made by scripts/reference.py; change the code, not this page -->\n"


def settings_page() -> str:
    lines = ["# Settings", "", "Every setting of a run, as `run.toml` holds it and `--set PATH=VALUE` changes it.", ""]
    lines += ["*Fixed* settings cannot change when a run resumes: `lakh resume` refuses them. All others may.", ""]
    lines += ["| setting | type | default | on resume | what it does |", "|---|---|---|---|---|"]
    for item in config.settings(Run):
        default = "required" if item.default == "required" else f"`{item.default}`"
        if item.path.startswith("cluster."):
            default = "from clusters/laptop.toml"
        resume = "fixed" if reason_fixed(item.path) else "may change"
        lines.append(f"| `{item.path}` | {item.type} | {default} | {resume} | {item.doc} |")
    return "\n".join(lines) + "\n"


def events_page() -> str:
    lines = ["# Events", "", "One JSON object per line in `RUN/events/rank-NNNNN.jsonl`, each with"]
    lines += ["`time_s`, `rank`, `step` and `kind`, and the fields of its kind.", ""]
    base = {field.name for field in dataclasses.fields(events.Event)}
    for kind, cls in events.Event.kinds.items():
        if cls is events.UnknownEvent:
            continue
        doc = (cls.__doc__ or "").strip()
        text = "" if doc.startswith(cls.__name__ + "(") else doc
        fields = ", ".join(f"`{f.name}`" for f in dataclasses.fields(cls) if f.name not in base)
        lines += [f"## {kind}", "", *([text, ""] if text else []), f"Fields: {fields}.", ""]
    return "\n".join(lines)


def errors_page() -> str:
    doc = (errors.__doc__ or "").strip()
    first, rest = doc.split("\n\n", 1)
    tree, rest = rest.split("\n\n", 1)
    return f"# Errors\n\n{first}\n\n```text\n{tree}\n```\n\n{rest}\n"


def commands_page() -> str:
    lines = [
        "# Commands",
        "",
        "Results go to stdout, progress and messages to stderr; `--json` ends stdout with one JSON document.",
    ]
    lines += ["Exit codes: 0 done, 2 your input, 65 damaged data, 75 try again, 1 a bug in lakh.", ""]
    for path, command in _commands(cli, "lakh"):
        settings = {**cli.context_settings, **command.context_settings}  # a command inherits those of `lakh`
        context = click.Context(command, info_name=path, terminal_width=100, **{**settings, "max_content_width": 100})
        lines += [f"## {path}", "", "```text", command.get_help(context), "```", ""]
    return "\n".join(lines)


def _commands(command: click.Command, path: str) -> Iterator[tuple[str, click.Command]]:
    yield path, command
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            inner = command.get_command(context, name)
            assert inner is not None
            yield from _commands(inner, f"{path} {name}")


def architectures_page() -> str:
    lines = ["# Model architectures", "", "What `lakh models` lists. Each name is a value of `model.family`.", ""]
    return "\n".join([*lines, *_architectures_table("Hugging Face")]) + ARCHITECTURES_TEXT


def _architectures_table(second: str) -> list[str]:
    """One row for each architecture, with its class or its published models in the second column."""
    from lakh.workloads.code.architectures import listing

    lines = [f"| name | {second} | trains | serves | exports | plans | fill in the middle |", "|---" * 7 + "|"]
    yes = {True: "yes", False: "-"}
    for row in listing.rows():
        flags = [yes[flag] for flag in (row.trains, row.serves, row.plans, row.fim)]
        flags.insert(2, ", ".join(row.exports) or "-")
        of = row.models if second == "models" else f"`{row.hugging_face}`"
        lines.append(f"| {row.name} | {of} | {' | '.join(flags)} |")
    return lines


ARCHITECTURES_TEXT = """

- **Loading**: a Hugging Face directory with `config.json`, `model.safetensors` or its shards, and a tokenizer.
  Refused, with the field or tensor named: other architectures, settings that a block does not compute (such as a bias
  that the family does not have), missing, unexpected or misshapen tensors, pickled weights, a tokenizer with more ids
  than the model.
- **Quantized folders** are read as values, and `--precision` chooses what they are served in: weights in 8 bits with a
  scale for each block, row or matrix (`quant_method` fp8, as in DeepSeek-V3, MiniMax-M2 and Devstral 2, and
  compressed-tensors), integers of 4 or 8 bits with a scale for each group of inputs (awq of version gemm, gptq,
  compressed-tensors), and MXFP4 (GPT-OSS). Others are refused, with their method; a GGUF file of the model may do.
- **Models that also see images** (`gemma3`, `mistral3`, `qwen3_vl`, `llama4`): the language model in them is loaded,
  served, tuned and exported as a gemma3, mistral, ministral3, qwen3 or llama4; the tensors of vision are left out, with
  a warning.
- **GGUF files** are loaded and written for every architecture; those of llama.cpp's `llama` become llama, mistral (with
  a window) or mixtral (with experts). Weights may have any type that the `gguf` package dequantizes, MXFP4 included.
  Refused, by name: other values of `general.architecture`, settings of an architecture, tensors and pre-tokenizers that
  are not known. A file in several parts is loaded by the name of any part, with all parts in one folder.
- **Differences of llama.cpp**: it computes windows for gemma2, gemma3, olmo3 and gpt_oss only, so other models with a
  window agree up to that many tokens, and it rounds the bounds of gpt_oss's positions to whole dims. Where no setting
  of a file can say what a model computes (such as windows in the late layers of qwen2, or layers without experts in
  qwen2_moe and qwen3_moe), the export is refused. It computes the GELU of gpt_bigcode by tanh, so files with
  `"activation_function": "gelu"` are exported with `--format hf` only.
- **Tokenizers of GGUF files**: byte-level BPE (`gpt2`) with the pre-tokenizers smollm, starcoder, refact, command-r,
  codeshell, gpt-2, mpt, olmo, qwen2, deepseek-r1-qwen, llama-bpe, pixtral, dbrx, glm4, deepseek-coder, deepseek-llm,
  deepseek-v3, seed-coder, tekken, gpt-4o, llama4, minimax-m2 and default; SentencePiece BPE (`llama`). Ids are
  llama.cpp's, which does not normalize text to NFC as the tokenizer.json of Qwen does. Tokens with a role, those for
  filling in the middle and the chat template come along in both directions.
- **Positions**: unscaled, `linear`, `llama3` and `yarn`; of phi3 unscaled and `longrope`. In phi3, stablelm, glm4,
  glm4_moe and minimax_m2 they may be in a part of a head.
  With `longrope` (Phi-3.5, Phi-4-mini) a model has the context of its pre-training, mostly 4,096 tokens: beyond it all
  frequencies change when a text grows, and cached keys keep the old ones. Exports keep the numbers for longer texts.
  In ministral3 queries have a factor that grows with the position, beyond the context of pre-training.
  In gemma3 and olmo3 layers with a window have a base of their own, and a scaling is that of the other layers.
  Layers of smollm3 and llama4 without positions are at regular intervals, in GGUF files every fourth.
  In llama4 layers with positions attend to chunks of 8,192 tokens (`model.sliding_window`), and queries of the others
  have a factor that grows (`model.query_growth`, `model.growth_interval`); a run without these settings trains without
  both. Tables of positions have rows for the whole context: serve Scout, which has 10 million tokens, with
  `--max-model-len`. GGUF files are written with a context of 8,191 tokens, up to which llama.cpp computes the same.
  gpt_bigcode has a learned embedding of each position: a longer context than that of its table does not exist.
- **Layers that predict further tokens** (`num_nextn_predict_layers` of DeepSeek-V3 and GLM-4.5) are left out when a
  folder or a GGUF file is read, with a warning, and are not exported.
- **Adapters** of tensors that hold several matrices (phi3's `qkv_proj` and `gate_up_proj`, glm4's `gate_up_proj`,
  gpt_bigcode's `c_attn`) are read and written in PEFT's form: in a file, the adapters of the parts are one of a larger
  rank.
- **Tokenizers** are used as they are. In place of `tokenizer.json` a folder may have `tekken.json` (Mistral),
  `tiktoken.model` (Kimi K2, Moonlight), `qwen.tiktoken`, `tokenizer.model` (SentencePiece's BPE, as of Llama 2, Code
  Llama and Mistral 7B), or `vocab.json` and `merges.txt` where its `tokenizer_class` is Qwen2Tokenizer; with other
  classes these two files do not say how texts are split. Ids are those of tiktoken, SentencePiece and mistral-common:
  equal for 1,465 texts with the seven tokenizers that mistral-common 1.13 brings (by hand, 2026-11-19).
  No code of a folder is run: it is read as text, and refused where it splits texts in another way than lakh. Exports
  have a `tokenizer.json`; llama.cpp splits Kimi's texts in another way than Kimi, so GGUF files with it are refused.
  Refused by name: other files, other kinds of SentencePiece models, and those that change texts (`nmt_nfkc`).
  Tokens that end a text (also several), begin one and pad come from `generation_config.json`, `config.json` and
  `tokenizer_config.json`. A tokenizer without fill-in-the-middle tokens is refused when a request has a suffix.
- **Speed**: on a CPU each step of every architecture is one native call: at the same size a token takes in int8 at most
  1.14 times llama's CPU time for each weight that it reads (`lakh bench decode --families all`). On a GPU
  llama, mistral, qwen2, qwen3 and phi3 without windows use the server's kernels (a single sequence of a model with
  biases, such as qwen2, without matrix-vector kernels), and ministral3 where `--max-model-len` is at most the context
  of its pre-training; all others run the same block in torch, and the log says so. In training, a layer with a window
  uses plain attention where sequences fit the window, else flash attention in bf16 on a GPU, else a mask.
- **Proof**: `tests/unit/workloads/test_architectures.py` compares a small random model of each with transformers in
  float32: logits to 1e-4, greedy tokens with and without cache, past the window, packed documents, losses of five
  training steps to 1e-5, and the export. `test_gguf_families.py` beside it compares the GGUF file of each with
  llama.cpp: log-probabilities to 0.002 (1e-6 but for the tables of GELU), greedy tokens, and a round trip to the bit.
"""


PAGES = {
    "settings.md": settings_page,
    "architectures.md": architectures_page,
    "events.md": events_page,
    "errors.md": errors_page,
    "commands.md": commands_page,
}


README = FOLDER.parents[1] / "README.md"
BEGIN, END = "<!-- made by scripts/reference.py -->\n\n", "\n<!-- end -->"


def readme() -> str:
    """The README with its generated table."""
    before, rest = README.read_text(encoding="utf-8").split(BEGIN)
    return before + BEGIN + "\n".join(_architectures_table("models")) + "\n" + rest[rest.index(END) :]


def stale() -> list[str]:
    """Pages that do not say what the code says."""
    found = [
        name
        for name, make in PAGES.items()
        if not (FOLDER / name).exists() or (FOLDER / name).read_text(encoding="utf-8") != NOTE + make()
    ]
    return found + ([] if README.read_text(encoding="utf-8") == readme() else [README.name])


if __name__ == "__main__":
    if "--check" in sys.argv:
        sys.exit(f"stale: {', '.join(found)}; run: make docs" if (found := stale()) else 0)
    for name, make in PAGES.items():
        (FOLDER / name).write_text(NOTE + make(), encoding="utf-8")
    README.write_text(readme(), encoding="utf-8")
