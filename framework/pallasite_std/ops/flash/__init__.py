"""Attention of many queries."""
