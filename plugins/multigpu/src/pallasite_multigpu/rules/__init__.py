"""How the language is lowered."""
