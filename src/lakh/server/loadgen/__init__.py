"""Load generator: simulated users who type real files against a completion service.

    typing.py      what users request and when          generator.py   sends the requests (open or closed loop)
    target.py      the service over HTTP or gRPC        report.py      latencies, the server's metrics, plots

The ablation of the server's techniques (`lakh loadgen --before-after`) is in the benchmarks: bench/serve/ablation.py.
Independent of torch and of the server's internals.
"""
