"""From findings to pages: plots, report.html and report.md. Never imports torch."""
