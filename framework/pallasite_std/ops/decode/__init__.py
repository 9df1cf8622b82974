"""Attention of one query, or a few, of each sequence against a cache."""
