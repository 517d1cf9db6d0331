"""Source, sink and jobs on Spark: `python -m bench.pipeline`."""
