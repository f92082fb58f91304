"""The formats of records: control records, packed samples, limits of external input, refused records."""
