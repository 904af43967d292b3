"""From findings to what people read: pages, plots, Markdown, JUnit, tables. Never imports torch."""
