"""Reports: what is slow or missing, what replays, where padding goes, and what it cost."""

from graphpass.ledger import CountedReason, Reason
from graphpass.report.drawing import Table
from graphpass.report.figures import Costs, KernelUse, KeyUse, Problem, ReportFigures, SizeTraffic
from graphpass.report.report import Report

__all__ = [
    "Costs",
    "CountedReason",
    "KernelUse",
    "KeyUse",
    "Problem",
    "Reason",
    "Report",
    "ReportFigures",
    "SizeTraffic",
    "Table",
]
