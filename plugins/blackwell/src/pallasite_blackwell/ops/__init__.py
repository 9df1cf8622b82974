"""The operations library on targets with tensor memory."""
