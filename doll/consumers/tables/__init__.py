"""A worker's part of embedding tables: rows in a cache, asked for at the server, and its own steps on them."""
