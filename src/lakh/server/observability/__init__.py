"""What operators see of each request, beside /metrics.

request_record.py   the record of a request, and a log of them as JSON lines
tracing.py          OpenTelemetry spans
cost.py             the price of 1,000 completions
"""
