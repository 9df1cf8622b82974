"""Attention of few queries for each sequence against a cache of keys and values."""
