"""The jobs `magnetar pipeline ...` as spark-submit takes them, which wants a file.

spark-submit --master yarn deploy/spark/jobs.py audit topic://public/default/bills ...
"""

from magnetar.spark.cli import app

app(prog_name="jobs.py")
