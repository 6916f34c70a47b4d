"""How clients come in: HTTP in three dialects (http.py, dialects.py, openapi.py) and gRPC (grpc.py) over one desk that
knows who may ask for how much (desk.py, keys.py, quota.py), with TLS where it is asked for (tls.py). Knows backends by
their protocol alone, and nothing of engines.
"""
