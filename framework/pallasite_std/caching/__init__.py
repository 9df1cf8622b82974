"""What keys of caches need to know of the code that makes the entries."""
