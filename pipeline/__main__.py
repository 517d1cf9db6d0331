"""`python -m pipeline`: the jobs alone, as spark-submit runs them."""

from pipeline.cli import app

app()
