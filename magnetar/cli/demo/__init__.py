"""`magnetar demo`: a pipeline, a crash in the middle of it, and the proof that all is whole."""
