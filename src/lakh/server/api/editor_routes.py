"""What editor extensions ask besides completions: Ollama's list of models, Tabby's health and events."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from typing import Any

from aiohttp import web

from lakh import __version__
from lakh.server.api.dialects.ollama import model_name
from lakh.server.api.json_body import read_json
from lakh.server.api.request_handler import RequestHandler
from lakh.server.backend import ModelDetails
from lakh.server.request import RequestError

__all__ = ["ollama_routes", "tabby_routes"]

# Continue looks for .Suffix: without it, it writes tokens into the prompt that it chooses by the model's name.
FIM_TEMPLATE = """{{ if .Suffix }}<|fim_prefix|>{{ .Prompt }}<|fim_suffix|>{{ .Suffix }}<|fim_middle|>
{{- else }}{{ .Prompt }}{{ end }}"""
TABBY_EVENTS = {"view": "shown", "select": "accepted"}


def ollama_routes(handler: RequestHandler) -> list[web.RouteDef]:
    def models(http: web.Request) -> list[dict[str, Any]]:
        handler.tenant(http.headers.get("Authorization", ""))
        return [
            {
                "name": card.id,
                "model": card.id,
                "digest": card.weights,
                "size": 0 if card.details is None else card.details.file_bytes,
                "details": _ollama_details(card.details),
            }
            for card in handler.backend.models()
        ]

    async def tags(http: web.Request) -> web.Response:
        return web.json_response({"models": models(http)})

    async def running(http: web.Request) -> web.Response:
        return web.json_response({"models": [{**one, "size_vram": 0} for one in models(http)]})

    async def show(http: web.Request) -> web.Response:
        body = await read_json(http)
        asked = body.get("model") or body.get("name") if isinstance(body, Mapping) else None
        found = next((one for one in models(http) if one["name"] == model_name(asked)), None)
        if found is None:
            raise RequestError("model", f"model {str(asked)[:80]!r} is not served here", status=404)
        card = next(card for card in handler.backend.models() if card.id == found["name"])
        name = "unknown" if card.details is None else card.details.architecture
        info: dict[str, Any] = {"general.architecture": name, f"{name}.context_length": card.context}
        if card.details is not None:
            info["general.parameter_count"] = card.details.parameters
        abilities = ["completion", *(["insert"] if card.has_fim else []), *(["tools"] if card.has_tools else [])]
        template = FIM_TEMPLATE if card.has_fim else ""
        shown = {"details": found["details"], "model_info": info, "template": template, "capabilities": abilities}
        return web.json_response(shown)

    async def version(_: web.Request) -> web.Response:
        return web.json_response({"version": __version__})

    return [
        web.get("/api/tags", tags),
        web.get("/api/ps", running),
        web.post("/api/show", show),
        web.get("/api/version", version),
    ]


def _ollama_details(details: ModelDetails | None) -> dict[str, Any]:
    """Empty texts for what is not known."""
    if details is None:
        return {"format": "", "family": "", "families": [], "parameter_size": "", "quantization_level": ""}
    billions = details.parameters >= 1e9
    size = f"{details.parameters / (1e9 if billions else 1e6):.4g}{'B' if billions else 'M'}"
    return {
        "format": details.file_format,
        "family": details.architecture,
        "families": [details.architecture],
        "parameter_size": size,
        "quantization_level": "" if details.precision == "stored" else details.precision.upper(),  # stored: as the file
    }


def tabby_routes(handler: RequestHandler) -> list[web.RouteDef]:
    async def health(http: web.Request) -> web.Response:
        handler.tenant(http.headers.get("Authorization", ""))
        cards = handler.backend.models()
        if not cards:
            raise RequestError(None, "no model is served now", status=503)
        machine = {"arch": platform.machine(), "cpu_info": "", "cpu_count": os.cpu_count() or 1, "cuda_devices": []}
        version = {"build_date": "", "build_timestamp": "", "git_sha": "", "git_describe": f"v{__version__}"}
        return web.json_response({"model": cards[0].id, "device": "lakh", **machine, "version": version})

    async def events(http: web.Request) -> web.Response:
        """What the user did with a suggestion; other events than view and select are ignored."""
        tenant = handler.tenant(http.headers.get("Authorization", ""))
        body = await read_json(http)
        kind = body.get("type") if isinstance(body, Mapping) else None
        if isinstance(kind, str) and kind in TABBY_EVENTS:
            await handler.record_feedback(tenant, {"event": TABBY_EVENTS[kind]})
        return web.json_response({})

    return [web.get("/v1/health", health), web.post("/v1/health", health), web.post("/v1/events", events)]
