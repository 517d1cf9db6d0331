"""`magnetar demo`: a pipeline, crashes in the middle of it, and a count of what came out."""
