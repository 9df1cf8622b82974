"""The profiler: events that a kernel records, and the trace that the host writes."""
