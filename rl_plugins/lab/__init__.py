"""How we show what methods do: demo, bench, comparisons, the trace viewer, generated pages."""
