"""The costs of a scalable topic with many segments, and of many topics at rest."""
