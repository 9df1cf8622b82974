"""PTX as data: lexer, syntax tree and parser."""
