"""Warpgroup matrix products (PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions")."""
