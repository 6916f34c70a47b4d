"""Bits per byte, and perplexity per token, of a model on texts that it has not seen.

Bits per byte does not depend on the tokenizer, so models with different vocabularies can be compared. Each text is read
in windows of the model's context that overlap by half: every token but the first is scored once, with at least half a
context before it if the text has that much. The first token has no context and is not scored; its bytes count.

Needs torch; runs on the GPU if there is one.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lakh import __version__
from lakh.errors import UserError

if TYPE_CHECKING:
    from lakh.server.model.weights import LoadedModel
    from lakh.tokens.tokenizer import Tokenizer

__all__ = ["BITS_PER_BYTE", "ScoredDocument", "measure", "score_documents"]

BITS_PER_BYTE = "bits-per-byte"
IGNORED = -100  # a target that is not scored


def windows(length: int, context: int) -> list[tuple[int, int, int]]:
    """(start, end, first scored target) of each window: together they score 1 .. length - 1 once."""
    found, scored, start = [], 1, 0
    while scored < length:
        end = min(start + context, length)
        found.append((start, end, scored))
        scored = end
        start = max(start + 1, end - context // 2)
    return found


@dataclass(frozen=True)
class ScoredDocument:
    name: str
    ids: tuple[int, ...]
    num_bytes: int
    """Of the text that is scored."""
    is_scored: tuple[bool, ...] | None = None
    """For each token; None scores all."""

    @staticmethod
    def of(name: str, text: str, tokenizer: Tokenizer) -> ScoredDocument:
        return ScoredDocument(name, (*tokenizer.begin_ids, *tokenizer.encode(text)), len(text.encode()))


def score_documents(
    loaded: LoadedModel, documents: Sequence[ScoredDocument], *, progress: Callable[[int], None] | None = None
) -> dict[str, Any]:
    """Bits per byte with its 95 % interval, perplexity per token, and the bits of each document."""
    import torch

    from lakh.evals.scoring.score import bootstrap_interval
    from lakh.workloads.code.model import CodeModel

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with torch.device("meta"):
        network = CodeModel(loaded.spec)
    ready = {key: tensor.to(device, dtype) for key, tensor in loaded.weights.items()}
    network.load_state_dict(ready, strict=True, assign=True)
    network.eval().requires_grad_(False)
    bits, num_tokens = [], 0
    for done, document in enumerate(documents, start=1):
        nats = 0.0
        for start, end, scored in windows(len(document.ids), loaded.spec.context):
            tokens = torch.tensor([document.ids[start:end]], device=device)
            with torch.no_grad():
                logits = network(tokens[:, :-1])[0].float()
            kept = slice(scored - start - 1, None)
            targets = tokens[0, 1:][kept].clone()
            if document.is_scored is not None:
                targets[~torch.tensor(document.is_scored[scored:end], device=device)] = IGNORED
            nats += float(
                torch.nn.functional.cross_entropy(logits[kept], targets, reduction="sum", ignore_index=IGNORED)
            )
            num_tokens += int((targets != IGNORED).sum())
        bits.append(nats / math.log(2))
        if progress:
            progress(done)
    sizes = [document.num_bytes for document in documents]
    return {
        "bits_per_byte": sum(bits) / sum(sizes),
        "interval": list(bootstrap_interval(bits, sizes)),
        "perplexity_per_token": 2 ** (sum(bits) / max(1, num_tokens)),
        "tokens": num_tokens,
        "bytes": sum(sizes),
        "documents": len(documents),
        "document_scores": [
            {"name": document.name, "bits": round(count, 3), "bytes": document.num_bytes}
            for document, count in zip(documents, bits, strict=True)
        ],
    }


def measure(
    model: str, texts: Sequence[tuple[str, str]], *, progress: Callable[[int], None] | None = None
) -> dict[str, Any]:
    """Score (name, text) pairs with the model behind a path. Returns the result document."""
    from lakh.server.model import weights as model_weights
    from lakh.tokens.tokenizer import Tokenizer

    if model.startswith(("http://", "https://")):
        raise UserError(model, "an endpoint does not return probabilities of a given text", "give a model's folder")
    started_s = time.monotonic()
    loaded = model_weights.read(model)
    tokenizer = Tokenizer.load(loaded.tokenizer_json)
    digest = hashlib.sha256()
    for name, text in texts:
        digest.update(f"{name}\0{text}\0".encode())
    documents = [ScoredDocument.of(name, text, tokenizer) for name, text in texts]
    settings = {
        "task": BITS_PER_BYTE,
        "data_sha256": digest.hexdigest(),
        "source": model,
        "documents": len(texts),
        "window": loaded.spec.context,
        "overlap": loaded.spec.context // 2,
        "versions": {"lakh": __version__},
    }
    return {
        "task": BITS_PER_BYTE,
        **score_documents(loaded, documents, progress=progress),
        "protocol": " | ".join(f"{key}={value}" for key, value in settings.items()),
        "settings": settings,
        "seconds": round(time.monotonic() - started_s, 3),
    }
