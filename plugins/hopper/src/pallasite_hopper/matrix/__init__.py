"""Warpgroup MMA (PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions")."""
