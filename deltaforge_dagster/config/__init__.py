"""The pipeline file and the installation's settings.

`model` is the whole file, made of the models in `sources`, `sinks`, `processors`, `engine`, `sensing`; `file` reads,
checks and documents it; `settings` are the environment variables of an installation.
"""
