"""The one path of all doors: sessions, their records, and who goes on with them."""
