"""Table versions of a pipeline: registered when rows arrive, approved when the file asks for it, shown and compared.

`registry` stores new versions, `approval` holds rows of unapproved ones, `diff` and `views` show them to people, and
`live` compares them with the tables that the database has now.
"""
