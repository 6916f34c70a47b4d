"""The gRPC API: lakh.v1.Completion over the same request handler as HTTP.

    lakh.v1.Completion/Complete    server streaming; the client's deadline and cancellation reach the engine
    lakh.v1.Completion/Feedback    what the user did with a suggestion
    grpc.health.v1.Health          "" is liveness, "ready" is readiness; not serving while draining
    reflection                     for grpcurl and similar tools, if grpcio-reflection is installed

Requests are validated by request.py in OpenAI's field names, so both APIs reject the same requests; an error becomes
the corresponding gRPC status.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from lakh.errors import UserError
from lakh.server import proto
from lakh.server.api.listen import check_free
from lakh.server.api.request_handler import RequestHandler
from lakh.server.api.tls import Tls
from lakh.server.backend import CompletionDelta, Usage
from lakh.server.request import RequestError, parse

__all__ = ["running"]

MAX_MESSAGE_BYTES = 4 << 20
STOP_GRACE_S = 5.0
WATCH_S = 0.2
MIN_TIMEOUT_S = 0.001
METHOD = f"/{proto.SERVICE}/Complete"
STATUS = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    404: grpc.StatusCode.NOT_FOUND,
    408: grpc.StatusCode.DEADLINE_EXCEEDED,
    409: grpc.StatusCode.ABORTED,
    413: grpc.StatusCode.RESOURCE_EXHAUSTED,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    503: grpc.StatusCode.UNAVAILABLE,
}
# Fields that are given if they were set, and those that are given unless they are empty.
_OPTIONAL_FIELDS = (
    *("suffix", "max_tokens", "temperature", "top_p", "top_k", "min_p", "min_tokens", "seed", "logprobs", "n"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty", "prompt_logprobs", "echo", "parse_special"),
    *("include_stop_str_in_output", "ignore_eos", "reuse", "heal", "timeout_ms", "generation_ms"),
)
_STRING_FIELDS = (
    *("stop_rule", "order", "supersede", "user", "model", "cache_salt"),
    *("guided_json", "guided_regex", "guided_grammar"),
)
_LIST_FIELDS = ("guided_choice", "stop_token_ids", "allowed_token_ids", "bad_words")


@contextlib.asynccontextmanager
async def running(
    handler: RequestHandler, host: str, port: int, *, tls: Tls | None = None, max_message_bytes: int = MAX_MESSAGE_BYTES
) -> AsyncIterator[str]:
    """Serve gRPC inside the block; yields the address, with the real port if `port` is 0."""
    options = [
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.so_reuseport", 0),  # else a second server silently takes half of the first one's connections
    ]
    grpc_server = grpc.aio.server(options=options)
    service = _CompletionService(handler)
    unary, streaming = grpc.unary_unary_rpc_method_handler, grpc.unary_stream_rpc_method_handler
    methods = [
        ("Complete", streaming, service.complete, proto.CompleteRequest, proto.CompleteChunk),
        ("Models", unary, service.models, proto.ModelsRequest, proto.ModelsReply),
        ("Feedback", unary, service.feedback, proto.FeedbackRequest, proto.FeedbackReply),
    ]
    handlers = {
        name: kind(method, request_deserializer=sent.FromString, response_serializer=reply.SerializeToString)
        for name, kind, method, sent, reply in methods
    }
    grpc_server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(proto.SERVICE, handlers),))
    checks = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(checks, grpc_server)
    services = [proto.SERVICE, health.SERVICE_NAME]
    with contextlib.suppress(ModuleNotFoundError):
        from grpc_reflection.v1alpha import reflection

        reflection.enable_server_reflection([*services, reflection.SERVICE_NAME], grpc_server)
    where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        if tls is None:
            real_port = grpc_server.add_insecure_port(where)
        else:
            real_port = grpc_server.add_secure_port(where, tls.grpc_credentials())
    except RuntimeError:
        check_free("--grpc", host, port)  # explains why, if it can; gRPC does not
        raise UserError(where, "cannot be listened on", "choose another, or port 0: --grpc HOST:PORT") from None
    await grpc_server.start()
    watching = asyncio.create_task(_watch_readiness(handler, checks))
    try:
        yield f"{host}:{real_port}"
    finally:
        watching.cancel()
        await checks.enter_graceful_shutdown()
        await grpc_server.stop(STOP_GRACE_S)


async def _watch_readiness(handler: RequestHandler, checks: Any) -> None:
    """Not ready: a gateway without engines, a stopped engine, or a server that drains. Not alive: see BackendHealth."""
    known: dict[str, bool] = {}
    while True:
        found = handler.backend.health()
        is_ready = not handler.is_draining and found.problem is None
        for name, is_good in {"": found.is_alive, "ready": is_ready, proto.SERVICE: is_ready}.items():
            if known.get(name) != is_good:
                status = health_pb2.HealthCheckResponse
                await checks.set(name, status.SERVING if is_good else status.NOT_SERVING)
                known[name] = is_good
        await asyncio.sleep(WATCH_S)


class _CompletionService:
    def __init__(self, handler: RequestHandler) -> None:
        self.handler = handler

    async def models(self, _: Any, context: grpc.aio.ServicerContext) -> Any:
        try:
            self.handler.tenant(_authorization(context))
        except RequestError as error:
            await context.abort(STATUS.get(error.status, grpc.StatusCode.INTERNAL), error.message)
        return proto.ModelsReply(
            models=[{"id": card.id, "context": card.context} for card in self.handler.backend.models()]
        )

    async def feedback(self, message: Any, context: grpc.aio.ServicerContext) -> Any:
        try:
            tenant = self.handler.tenant(_authorization(context))
            return proto.FeedbackReply(**await self.handler.record_feedback(tenant, {"event": message.event}))
        except RequestError as error:
            await context.abort(STATUS.get(error.status, grpc.StatusCode.INTERNAL), error.message)

    async def complete(self, message: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
        try:
            with self.handler.observed(METHOD, _metadata(context)) as record:
                request = parse(_as_openai(message), self.handler.tenant(_authorization(context)))
                left_s = context.time_remaining()
                if left_s is not None:
                    left_s = max(left_s, MIN_TIMEOUT_S)
                    own_s = left_s if request.timeout_s is None else request.timeout_s
                    request = replace(request, timeout_s=min(left_s, own_s))
                async with contextlib.aclosing(self.handler.complete(request, record)) as items:
                    async for item in items:
                        yield _chunk(item, has_prompt=message.return_token_ids)
        except RequestError as error:
            await context.abort(STATUS.get(error.status, grpc.StatusCode.INTERNAL), error.message)


def _chunk(item: CompletionDelta | Usage, *, has_prompt: bool) -> Any:
    if isinstance(item, Usage):
        counts = ("prompt_tokens", "completion_tokens", "cached_tokens", "draft_tokens", "accepted_tokens")
        return proto.CompleteChunk(usage={name: getattr(item, name) for name in counts})
    return proto.CompleteChunk(
        index=item.index,
        text=item.text,
        tokens=item.tokens,
        finish_reason=item.finish_reason or "",
        **_stop_reason(item.stop_reason),
        logprobs=_logprobs(item),
        prompt_tokens=item.prompt_tokens if has_prompt else None,
        prompt_logprobs=[_prompt_logprob(found or {}) for found in item.prompt_logprobs or ()],
    )


def _stop_reason(found: str | int | None) -> dict[str, str | int]:
    if found is None:
        return {}
    return {"stop_string" if isinstance(found, str) else "stop_token_id": found}


def _logprobs(item: CompletionDelta) -> list[dict[str, Any]]:
    """Those of an echoed prompt, then those of the tokens."""
    if item.logprobs is None:
        return []
    scores, tops = item.logprobs["token_logprobs"], item.logprobs["top_logprobs"]
    echoed = (item.prompt_tokens or ())[: max(len(scores) - len(item.tokens), 0)]
    found = zip((*echoed, *item.tokens), scores, tops, strict=False)
    return [
        {"token": token, "logprob": score, "top": [{"text": text, "logprob": one} for text, one in (top or {}).items()]}
        for token, score, top in found
    ]


def _prompt_logprob(found: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "candidates": [
            {"token": int(number), "logprob": one["logprob"], "rank": one["rank"], "text": one["decoded_token"]}
            for number, one in found.items()
        ]
    }


def _authorization(context: grpc.aio.ServicerContext) -> str:
    return _metadata(context).get("authorization", "")


def _metadata(context: grpc.aio.ServicerContext) -> dict[str, str]:
    return {str(name): str(value) for name, value in context.invocation_metadata() or ()}


def _as_openai(message: Any) -> dict[str, Any]:
    body: dict[str, Any] = {"prompt": _prompt(message), "stop": list(message.stop), "stream": True}
    body |= {name: getattr(message, name) for name in _OPTIONAL_FIELDS if message.HasField(name)}
    body |= {name: getattr(message, name) for name in _STRING_FIELDS if getattr(message, name)}
    body |= {name: list(getattr(message, name)) for name in _LIST_FIELDS if getattr(message, name)}
    body["logit_bias"] = {str(number): bias for number, bias in message.logit_bias.items()}
    body["input_extra"] = [{"filename": file.filename, "text": file.text} for file in message.input_extra]
    # Log-probabilities are sent beside token ids, which a gateway has to request from its engines.
    return body | {"return_token_ids": message.return_token_ids or "logprobs" in body}


def _prompt(message: Any) -> Any:
    """One text, the ids of one prompt, or a list of either."""
    given = [name for name in ("prompt", "prompt_ids", "prompts") if getattr(message, name)]
    if len(given) > 1:
        raise RequestError("prompt", f"prompt: {' and '.join(given)} are given; give only one of them")
    if message.prompts:
        if any(one.text and one.ids for one in message.prompts):
            raise RequestError("prompts", "prompts: one of them has a text and ids; give only one of the two")
        return [list(one.ids) or one.text for one in message.prompts]
    return list(message.prompt_ids) or message.prompt
