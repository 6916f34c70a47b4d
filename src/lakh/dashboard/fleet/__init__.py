"""The fleet page of a run.

ranks.py          ranks by node and mesh, stragglers, traffic by tier
links.py          bandwidth between every two ranks
node_checks.py    findings of lakh health check
"""

from lakh.dashboard.fleet.links import link_map
from lakh.dashboard.fleet.node_checks import health_findings
from lakh.dashboard.fleet.ranks import Fleet

__all__ = ["Fleet", "health_findings", "link_map"]
