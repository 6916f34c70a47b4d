"""OpenTelemetry traces of completion requests, sent over OTLP/HTTP. Needs the extra lakh[otel].

A request is a span `completion` (in the caller's trace, if it sent a W3C `traceparent`) with children `queue`,
`prefill` and `decode` from the engine's own clock. Attributes follow OpenTelemetry's conventions for generative AI; no
prompt and no text is recorded. Spans are sent in the background: an unreachable collector delays nobody.
"""

from __future__ import annotations

from typing import Any

from lakh import __version__
from lakh.errors import MissingExtra
from lakh.server.observability.request_record import RequestRecord

__all__ = ["RequestTracer"]

NS = 1_000_000_000


class RequestTracer:
    def __init__(self, endpoint: str, *, service: str = "lakh", exporter: Any = None) -> None:
        """`endpoint`: an OTLP/HTTP collector such as http://127.0.0.1:4318; `exporter` replaces it."""
        try:
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

            if exporter is None:
                from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

                exporter = OTLPSpanExporter(f"{endpoint.rstrip('/')}/v1/traces")
        except ModuleNotFoundError as error:
            raise MissingExtra("--otlp", str(error.name or "opentelemetry").partition(".")[0], "otel") from None
        resource = Resource.create({"service.name": service, "service.version": __version__})
        self._provider = TracerProvider(resource=resource)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("lakh.server")
        self._propagator = TraceContextTextMapPropagator()
        self._spans: dict[str, Any] = {}

    def begin(self, record: RequestRecord) -> None:
        from opentelemetry.trace import SpanKind

        parent = self._propagator.extract({name.lower(): value for name, value in record.headers.items()})
        span = self._tracer.start_span(
            "completion", context=parent, kind=SpanKind.SERVER, start_time=int(record.began_at_s * NS)
        )
        record.trace_id = format(span.get_span_context().trace_id, "032x")
        self._spans[record.id] = span

    def finish(self, record: RequestRecord) -> None:
        from opentelemetry.trace import StatusCode, set_span_in_context

        span = self._spans.pop(record.id, None)
        if span is None:
            return
        began_s = record.began_at_s
        span.set_attributes(_attributes(record))
        if record.status >= 500:
            span.set_status(StatusCode.ERROR, record.error or "")
        if record.phases is not None:
            at_s = began_s
            seconds = {"queue": record.phases.queue_s, "prefill": record.phases.prefill_s}
            for name, phase_s in (seconds | {"decode": record.phases.decode_s}).items():
                child = self._tracer.start_span(name, context=set_span_in_context(span), start_time=int(at_s * NS))
                at_s += phase_s
                child.end(end_time=int(at_s * NS))
        span.end(end_time=int((began_s + record.total_s) * NS))

    def close(self) -> None:
        """Send what is left; waits for the collector a few seconds at most."""
        self._provider.shutdown()


def _attributes(record: RequestRecord) -> dict[str, Any]:
    request, usage = record.request, record.usage
    found: dict[str, Any] = {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.response.model": record.model,
        "url.path": record.path,
        "http.response.status_code": record.status,
        "error.type": record.error if record.status >= 400 else None,
        "gen_ai.response.finish_reasons": record.finish_reasons or None,
        "lakh.request_id": record.id,
        "lakh.first_text_s": record.first_text_s,
    }
    if request is not None:
        found |= {
            "gen_ai.request.model": request.model,
            "gen_ai.request.max_tokens": request.max_tokens,
            "gen_ai.request.temperature": request.sampling.temperature,
            "gen_ai.request.choice.count": request.n,
            "lakh.tenant": request.tenant or None,
        }
    if usage is not None:
        found |= {
            "gen_ai.usage.input_tokens": usage.prompt_tokens,
            "gen_ai.usage.output_tokens": usage.completion_tokens,
            "lakh.cached_tokens": usage.cached_tokens,
            "lakh.from_cache": usage.is_cached,
        }
    return {name: value for name, value in found.items() if value is not None}
