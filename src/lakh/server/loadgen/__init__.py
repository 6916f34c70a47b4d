"""Load generator: simulated users who type real files against a completion service.

    typing.py      what users request and when          generator.py   sends the requests (open or closed loop)
    target.py      the service over HTTP or gRPC        report.py      latencies, the server's metrics, plots
    ablation.py    the same load with one server feature after another

Independent of torch and of the server's internals.
"""
