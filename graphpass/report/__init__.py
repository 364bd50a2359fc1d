"""Reports: what is slow or missing, what replays, where padding goes, and what it cost."""

from graphpass.ledger import Reason
from graphpass.report.figures import (
    Costs,
    GroupCost,
    KernelUse,
    KeyUse,
    Problem,
    ReportFigures,
    SizeTraffic,
    UncapturedCalls,
)
from graphpass.report.parts import Table
from graphpass.report.report import Report

__all__ = [
    "Costs",
    "GroupCost",
    "KernelUse",
    "KeyUse",
    "Problem",
    "Reason",
    "Report",
    "ReportFigures",
    "SizeTraffic",
    "Table",
    "UncapturedCalls",
]
