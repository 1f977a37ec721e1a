"""Sources of records: files, archives, databases, tables and object storage.

Each adapter is a thin layer over the library of its format, opens what it reads in the process
that reads it, and may be sent to any process.
"""
