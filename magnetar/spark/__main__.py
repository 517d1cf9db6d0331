"""`python -m magnetar.spark`: the jobs alone; spark-submit takes deploy/spark/jobs.py."""

from magnetar.spark.cli import app

app()
