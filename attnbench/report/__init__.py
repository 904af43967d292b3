"""From findings to pages: plots, report.html and report.md. Never imports torch."""

from attnbench.report.write import write_report

__all__ = ["write_report"]
