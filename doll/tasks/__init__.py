"""Tasks that ship with DOLL. Each is a plain `doll.Task`: copy one to begin your own."""
