"""The host's side: mailboxes of groups of devices, and the tables that kernels get."""
