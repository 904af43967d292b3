"""From findings to what people read: pages, plots, Markdown, JUnit, tables. Never imports torch."""

import logging

# Where matplotlib cannot write to a home it says so on stderr, and keeps its caches elsewhere.
logging.getLogger("matplotlib").addFilter(lambda x: x.funcName != "_get_config_or_cache_dir")
