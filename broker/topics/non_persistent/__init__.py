"""Topics that store nothing: `non-persistent://`.  See docs/non-persistent-topics.md."""
