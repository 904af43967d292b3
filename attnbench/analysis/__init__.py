"""From records to tables: columns, comparisons, limits and exports. Never imports torch."""
