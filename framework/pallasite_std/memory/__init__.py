"""Memory with addresses: how it is viewed, read and written, and how arrays change layout."""
