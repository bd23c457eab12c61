"""Table versions of a pipeline: registered with their first rows, approved, shown and compared.

`registry` stores new versions, `approval` holds rows of unapproved ones, `diff` and `views` show
them to people, and `live` compares them with the tables that the database has now.
"""
