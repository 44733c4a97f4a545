"""Pictures of a plan or a run: one page without network, and traces for Perfetto, from plain data."""

from optimum_trn.report.page import Compilation, Curve, Memory, Report, Span, Table, render
from optimum_trn.report.perfetto import Slice, chrome_trace

__all__ = ["Compilation", "Curve", "Memory", "Report", "Slice", "Span", "Table", "chrome_trace", "render"]
