"""A plugin of another author. Of Pallasite it imports what plugins and users may import, only."""
