"""Spark through PySpark: a source, an exactly-once sink, and the jobs that stand on them."""
