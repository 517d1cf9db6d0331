"""`python -m pipeline`: the jobs alone; spark-submit takes deploy/spark/jobs.py."""

from pipeline.cli import app

app()
