"""The way from values of records to the fields that a task learns from, by `data.format`.

`open_reader` makes the `FieldReader` of a format. `registry` is the client of a schema registry.
"""
