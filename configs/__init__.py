"""Presets: models, clusters, Ray launcher files. Data only."""
