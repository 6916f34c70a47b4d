"""Node health: what a machine's counters say, and whether the node may go on. Independent of torch.

sources/        read counters: NVML, sysfs and procfs, the kernel log
checks.py       the table of checks: metric, limits, level, the vendor's reason, and a value that injects the fault
decisions.py    readings and earlier readings -> findings -> healthy, watch, drain or rma, with the reason
ledger.py       what was found per serial number, across jobs: repeat offenders
"""

from lakh.health.checks import CHECKS, HealthCheck, HealthReading
from lakh.health.decisions import HealthDecision, HealthFinding, decide_health, evaluate_checks
from lakh.health.ledger import HealthLedger

__all__ = [
    "CHECKS",
    "HealthCheck",
    "HealthDecision",
    "HealthFinding",
    "HealthLedger",
    "HealthReading",
    "decide_health",
    "evaluate_checks",
]
