"""Copies between global and shared memory: descriptors, boxes, bulk copies."""
