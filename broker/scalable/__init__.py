"""Scalable topics: layout, controller, DAG watch, split and merge."""
