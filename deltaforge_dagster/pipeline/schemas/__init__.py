"""Table versions of a pipeline: registered with their first rows, approved, shown and compared.

`approval` stores new versions and holds rows of unapproved ones, `views` shows versions and their
differences to people, and `live` compares them with the tables that the database has now.
"""
