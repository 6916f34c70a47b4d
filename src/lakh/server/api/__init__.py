"""How clients reach a backend: HTTP in several dialects (http.py, dialects/) and gRPC (grpc.py) over one request
handler (request_handler.py) with API keys, quotas and metrics. server.py starts and stops both; tls.py encrypts them.
"""
