"""The pipeline file and the installation's settings.

`model` describes the whole file. It is composed of the models in `processors`, `engine`, `columns`
and `sensing`, and of those of each kind of source and sink (`sources` and `sinks` have what all
kinds share). `file` reads, checks and documents a file, `env` expands environment variables in it.
`settings` are the environment variables of an installation.
"""
