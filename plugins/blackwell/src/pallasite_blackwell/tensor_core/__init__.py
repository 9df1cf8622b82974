"""Matrix products of the fifth-generation tensor core, and its copies to tensor memory."""
